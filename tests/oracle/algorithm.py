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


def overlong_penalty(answer: dict, config: dict) -> float:
    """The penalty on the length of an answer: DAPO, arXiv 2503.14476, eq. 13."""
    buffer = config["algo"]["overlong_buffer"]
    free = config["rollout"]["max_new_tokens"] - buffer
    share = (len(answer["response_ids"]) - free) / buffer
    return -config["algo"]["overlong_coef"] * min(max(share, 0.0), 1.0)


# ---------------------------------------------------------------- credit


def token_values(answer: dict) -> list[float]:
    """The reward at each response token: rewards of tokens where they are, those of the whole answer at the last."""
    values = [0.0] * len(answer["response_ids"])
    of_tokens = answer.get("token_rewards") or {}
    for rewards in of_tokens.values():
        for place, value in rewards:
            values[place] += value
    values[-1] += sum(value for name, value in answer["reward_parts"].items() if name not in of_tokens)
    return values


def group_advantages(answers: list[dict], charges: list[list[float]], algo: dict) -> list[list[float]]:
    """The advantage of each response token of the answers of one group.

    `charges`: what the KL takes from the reward of each token. With token rewards and credit to_go the group is divided
    at each place where one of its answers has a reward; from each cut on the sums of what follows are compared, and an
    answer that has no such cut is there with its last part. Otherwise whole answers are compared.
    """
    cuts = set()
    if algo.get("credit", "to_go") == "to_go":
        for a in answers:
            for rewards in (a.get("token_rewards") or {}).values():
                cuts |= {place + 1 for place, _ in rewards}
    values = [token_values(a) for a in answers]
    net = [[v - c for v, c in zip(*pair, strict=True)] for pair in zip(values, charges, strict=True)]
    starts = [[0, *(cut for cut in sorted(cuts) if cut < len(v))] for v in net]  # of the parts of each answer
    found = [[0.0] * len(v) for v in net]
    for number in range(max(len(s) for s in starts)):
        begins = [s[min(number, len(s) - 1)] for s in starts]
        to_go = [math.fsum(v[begin:]) for v, begin in zip(net, begins, strict=True)]
        if len(cuts) == 0 and not any(map(any, charges)):
            to_go = [a["reward"] for a in answers]  # as it was summed when it was graded
        advantages = formulas.compare(to_go, algo["advantage"]).tolist()
        for i, begin in enumerate(begins):
            if number < len(starts[i]):
                found[i][begin:] = [advantages[i]] * (len(net[i]) - begin)
    return found


def whiten(advantages: list[list[float]], trained: list[list[bool]]) -> list[list[float]]:
    """REINFORCE++: all advantages less their mean, over their standard deviation, both over the trained tokens."""
    values = [a for row, flags in zip(advantages, trained, strict=True) for a, t in zip(row, flags, strict=True) if t]
    if len(values) < 2:
        return advantages
    center = math.fsum(values) / len(values)
    variance = math.fsum((a - center) ** 2 for a in values) / (len(values) - 1)
    return [[(a - center) / math.sqrt(variance + 1e-8) for a in row] for row in advantages]
