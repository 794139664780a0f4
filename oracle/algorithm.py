"""The order of prompts, rewards to advantages, a step to its parts and its learning rate: plain Python and numpy.

An answer is a dict, as rollouts/ has it. What a group and a loss are made of is in oracle/formulas.py.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from config import AlgoConfig, Config
from oracle import formulas

# ---------------------------------------------------------------- prompts and seeds

BLOCK = 100  # prompts of a mixture, in which shares are exact to one prompt


def order_of(sizes: list[int], weights: list[float], seed: int) -> Iterator[tuple[int, int]]:
    """(set, number of its prompt) of the endless stream of prompts: each set in shuffled epochs, mixed by weight."""
    taken = [0] * len(sizes)
    orders = {}
    for chosen in sets_of(weights, seed):
        epoch, place = divmod(taken[chosen], sizes[chosen])
        if (chosen, epoch) not in orders:
            orders[chosen, epoch] = np.random.default_rng([seed, epoch, chosen]).permutation(sizes[chosen])
        taken[chosen] += 1
        yield chosen, int(orders[chosen, epoch][place])


def sets_of(weights: list[float], seed: int) -> Iterator[int]:
    """The set of each prompt: in each block those that 0, 1, ... + shift fall on, which share [0, 100], shuffled."""
    if len(weights) == 1:
        yield from itertools.repeat(0)
    ends = BLOCK * np.cumsum(weights) / np.sum(weights)
    for block in itertools.count():
        shift = block * (math.sqrt(5) - 1) / 2 % 1
        sets = np.searchsorted(ends[:-1], np.arange(BLOCK) + shift, side="right")
        yield from np.random.default_rng([seed, block, 0, 1]).permutation(sets).tolist()


def seed_of(*numbers: int) -> int:
    """The seed in vLLM of a group, from (seed, step, group), and of a later turn, from (that, answer, turn)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# ---------------------------------------------------------------- a step's values and its parts


def scheduled(cfg: Config, step: int) -> dict[str, float]:
    """{name: value in this step} of the keys that may have a schedule, with the warm-up of the learning rate."""
    values = {
        "lr": cfg.train.lr, "kl_coef": cfg.algo.kl_coef, "entropy_coef": cfg.algo.entropy_coef,
        "temperature": cfg.rollout.temperature,
    }  # fmt: skip
    for name, course in cfg.schedule:
        if course is None:
            continue
        last = course.steps or cfg.train.steps
        x = min((step - 1) / max(last - 1, 1), 1.0)  # progress
        if course.shape == "constant":
            x = float(x == 1)
        elif course.shape == "cosine":
            x = (1 - math.cos(math.pi * x)) / 2
        values[name] += (course.to - values[name]) * x
    if cfg.train.warmup_steps:
        values["lr"] *= min(1.0, step / cfg.train.warmup_steps)
    return values


def trained_groups(answers: list[dict], cfg: Config) -> set[int]:
    """The groups that a step trains on: all or, under dynamic sampling, those whose rewards differ before the penalty
    on length, or if there are none the last round's, which then had as many as the first.
    """
    rewards = {}
    for a in answers:
        plain = sum(value for name, value in a["reward_parts"].items() if name != "overlong")
        rewards.setdefault(a["group"], set()).add(plain)
    groups = {a["group"] for a in answers}
    if cfg.algo.max_rounds == 1:
        return groups
    mixed = {group for group, values in rewards.items() if len(values) > 1}
    return mixed or set(sorted(groups)[-cfg.rollout.prompts_per_step :])


def updates_of(answers: list[dict], cfg: Config, step: int) -> list[list[int]]:
    """Numbers of the answers of each update: each epoch shuffles the groups and cuts them into updates_per_step."""
    groups = sorted({a["group"] for a in answers})
    updates = []
    for epoch in range(cfg.train.epochs_per_step):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(groups)
        for part in np.array_split(order, cfg.train.updates_per_step):
            chosen = [i for i, a in enumerate(answers) if a["group"] in part]
            if chosen:
                updates.append(chosen)
    return updates


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "grpo_loo", "grpo_batch", "max_rl", "reinforce_pp", "none")


def advantages_of(answers: list, algo: AlgoConfig, kl_coef: float = 0.0) -> np.ndarray:
    """The advantage of each of the answers (trainer.Scored), whose rewards lose kl_coef times their KL."""
    groups = np.array([a.row["group"] for a in answers])
    rewards = np.array([a.row["reward"] for a in answers])
    if kl_coef:
        rewards = rewards - kl_coef * np.array([formulas.kl(a.old, a.ref, algo.kl).double().sum() for a in answers])
    found = np.zeros(len(groups))
    for group in set(groups):
        found[groups == group] = formulas.compare(rewards[groups == group], algo.advantage)
    if algo.advantage == "grpo_batch" and len(rewards) > 1:
        return found / (rewards.std(ddof=1) + 1e-4)
    values = np.repeat(found, [len(a.sampled) if a.is_trained else 0 for a in answers])
    if algo.advantage != "reinforce_pp" or len(values) < 2:
        return found
    return (found - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)  # over the trained tokens
