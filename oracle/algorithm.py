"""The order of prompts, a step's values and its parts, and advantages from rewards: plain Python and numpy.

An answer is a dict, as rollouts/ has it. The formulas of a group and of a loss are in oracle/formulas.py.
"""

import itertools
import math

import numpy as np

from grpo.parts.base.read_config import override
from oracle import formulas

# ---------------------------------------------------------------- prompts and seeds

BLOCK = 100  # prompts of a mixture, in which shares are exact to one prompt


def order_of(sizes, weights, seed):
    """(set, number of its prompt) of the endless stream of prompts: each set in shuffled epochs, mixed by weight."""
    streams = [epochs_of(size, seed, chosen) for chosen, size in enumerate(sizes)]
    for chosen in sets_of(weights, seed):
        yield chosen, next(streams[chosen])


def epochs_of(size, seed, chosen):
    """The numbers of a set's prompts, each epoch in another order."""
    for epoch in itertools.count():
        yield from np.random.default_rng([seed, epoch, chosen]).permutation(size).tolist()


def sets_of(weights, seed):
    """The set of each prompt. The numbers 0, 1, ... of a block, plus its shift, fall on the sets' shares of [0, 100];
    the sets that they fall on are shuffled.
    """
    ends = BLOCK * np.cumsum(weights) / np.sum(weights)
    for block in itertools.count():
        shift = block * (math.sqrt(5) - 1) / 2 % 1
        sets = np.searchsorted(ends[:-1], np.arange(BLOCK) + shift, side="right")
        yield from np.random.default_rng([seed, block, 0, 1]).permutation(sets).tolist()


def seed_of(*numbers):
    """A seed of vLLM: of a group from (seed, step, group), of a later turn from (the group's seed, answer, turn)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# ---------------------------------------------------------------- a step's values and its parts


def scheduled(cfg, step):
    """{dotted key: value in this step} of the keys that may have a schedule, with the warm-up of the learning rate."""
    values = {
        "train.lr": cfg.train.lr, "algo.kl_coef": cfg.algo.kl_coef, "algo.entropy_coef": cfg.algo.entropy_coef,
        "rollout.temperature": cfg.rollout.temperature,
    }  # fmt: skip

    for key in values:
        course = getattr(cfg.schedule, key.partition(".")[2])
        if course is None:
            continue
        last = course.steps or cfg.train.steps
        progress = min((step - 1) / max(last - 1, 1), 1.0)
        if course.shape == "constant":
            progress = float(progress == 1)
        elif course.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        values[key] += (course.to - values[key]) * progress

    if cfg.train.warmup_steps:
        values["train.lr"] *= min(1.0, step / cfg.train.warmup_steps)
    return values


def at_step(cfg, step):
    """The configuration that a step uses, if it keeps to the schedules."""
    return override(cfg, scheduled(cfg, step))


def mixed_groups(answers):
    """{group: whether its rewards differ, before the penalty on length}."""
    rewards = {}
    for a in answers:
        plain = sum(value for name, value in a["reward_parts"].items() if name != "overlong")
        rewards.setdefault(a["group"], set()).add(plain)
    return {group: len(values) > 1 for group, values in sorted(rewards.items())}


def rounds_of(answers, cfg):
    """How many groups each round of a step samples: as many as it still lacks, of which those of equal rewards do not
    count where there are several rounds.
    """
    counts = [mixed or cfg.algo.max_rounds == 1 for mixed in mixed_groups(answers).values()]
    rounds = []
    while missing := cfg.rollout.prompts_per_step - sum(counts[: sum(rounds)]):
        if len(rounds) == cfg.algo.max_rounds:
            break
        rounds.append(missing)
    return rounds


def trained_groups(answers, cfg):
    """The groups that a step trains on.

    Under dynamic sampling these are the groups of mixed rewards. If there are none, it trains on the groups of the last
    round, which then had as many as the first.
    """
    groups = mixed_groups(answers)
    if cfg.algo.max_rounds == 1:
        return {*groups}
    return {group for group, mixed in groups.items() if mixed} or {*[*groups][-cfg.rollout.prompts_per_step :]}


def updates_of(answers, groups, cfg, step):
    """Numbers of the answers of each update: each epoch shuffles the groups and cuts them into updates_per_step."""
    updates = []
    for epoch in range(cfg.train.epochs_per_step):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(sorted(groups))
        for part in np.array_split(order, cfg.train.updates_per_step):
            chosen = [i for i, a in enumerate(answers) if a["group"] in part]
            if chosen:
                updates.append(chosen)
    return updates


# ---------------------------------------------------------------- advantages

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "grpo_loo", "grpo_batch", "max_rl", "reinforce_pp", "gdpo", "none")


def advantages_of(answers, algo, kl_coef=0.0):
    """The advantage of each of the answers (trainer.Answer), whose rewards lose kl_coef times their KL."""
    groups = np.array([a.row["group"] for a in answers])
    rewards = np.array([a.row["reward"] for a in answers])
    if algo.advantage == "gdpo":
        rewards = np.zeros(len(groups))
        for group in set(groups):
            members = [a for a in answers if a.row["group"] == group]
            weights = {name: weight for a in members for name, weight in a.part_weights.items()}
            parts = [a.row["reward_parts"] for a in members]
            failed = [a.row["graded"] != "ok" for a in members]  # 0 in every part
            names = dict.fromkeys(set().union(*parts), 0.0)
            parts = [names | part if fail else part for part, fail in zip(parts, failed, strict=True)]
            rewards[groups == group] = formulas.normalized_parts(parts, weights)
    if kl_coef:
        rewards = rewards - kl_coef * np.array([formulas.kl(a.old, a.ref, algo.kl).double().sum() for a in answers])

    found = np.zeros(len(groups))
    for group in set(groups):
        found[groups == group] = formulas.compare(rewards[groups == group], algo.advantage)

    # Two kinds are scaled over the batch: by its rewards, or by the advantages of its trained tokens.
    if algo.advantage in ("grpo_batch", "gdpo") and len(rewards) > 1:
        return found / (rewards.std(ddof=1) + 1e-4)
    values = np.repeat(found, [len(a.sampled) if a.is_trained else 0 for a in answers])
    if algo.advantage == "reinforce_pp" and len(values) > 1:
        return (found - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return found
