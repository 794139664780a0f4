"""Rewards to advantages, a step to its parts and its learning rate: plain Python, answer by answer.

`algo` is the section of the configuration, a dict. An answer is a dict, as rollouts/ has it. What a group and a loss
are made of is in support/proof/formulas.py.
"""

import math

import numpy as np

from support.proof import formulas

# ---------------------------------------------------------------- a step's values and its parts


def scheduled(config: dict, step: int) -> dict[str, float]:
    """{name: value in this step} of the keys that may have a schedule, with the warm-up of the learning rate."""
    places = {"lr": "train", "kl_coef": "algo", "entropy_coef": "algo", "temperature": "rollout"}
    values = {}
    for name, section in places.items():
        start = config[section][name]
        values[name] = start
        course = config["schedule"][name]
        if course is None:
            continue
        last = course["steps"] or config["train"]["steps"]
        x = min((step - 1) / max(last - 1, 1), 1.0)  # progress
        if course["shape"] == "constant":
            x = float(x == 1)
        elif course["shape"] == "cosine":
            x = (1 - math.cos(math.pi * x)) / 2
        values[name] = start + (course["to"] - start) * x
    if config["train"]["warmup_steps"]:
        values["lr"] *= min(1.0, step / config["train"]["warmup_steps"])
    return values


def trained_groups(answers: list[dict], config: dict, rounds: int) -> set[int]:
    """The groups that a step trains on: all or, under dynamic sampling, those of unequal rewards before the penalty on
    length; where there are none, the groups of the last round.
    """
    groups = {a["group"] for a in answers}
    if config["algo"]["max_rounds"] == 1:
        return groups
    rewards = {}
    for a in answers:
        plain = sum(value for name, value in a["reward_parts"].items() if name != "overlong")
        rewards.setdefault(a["group"], set()).add(plain)
    mixed = {group for group, values in rewards.items() if len(values) > 1}
    return mixed or {group for group in groups if group >= (rounds - 1) * config["rollout"]["prompts_per_step"]}


def updates_of(answers: list[dict], config: dict, step: int) -> list[list[int]]:
    """Numbers of the answers of each update: each epoch shuffles the groups and cuts them into updates_per_step."""
    groups = sorted({a["group"] for a in answers})
    updates = []
    for epoch in range(config["train"]["epochs_per_step"]):
        order = np.random.default_rng([config["seed"], step, epoch]).permutation(groups)
        for part in np.array_split(order, config["train"]["updates_per_step"]):
            chosen = [i for i, a in enumerate(answers) if a["group"] in part]
            if chosen:
                updates.append(chosen)
    return updates


# ---------------------------------------------------------------- advantages


def advantages_of(answers: list[dict], rewards: list[float], tokens: list[int], kind: str) -> np.ndarray:
    """The advantage of each answer, given its reward and its trained tokens."""
    groups = np.array([a["group"] for a in answers])
    found = np.zeros(len(answers))
    for group in set(groups):
        found[groups == group] = formulas.compare(np.array(rewards)[groups == group], kind)
    values = np.repeat(found, tokens)
    if kind != "reinforce_pp" or len(values) < 2:
        return found
    return (found - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)  # over the trained tokens
