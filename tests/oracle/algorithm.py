"""Rewards to advantages, log-probs to a loss, a step to its learning rate: plain Python and torch, answer by answer.

`algo` is the section of the configuration, a dict. An answer is a dict, as rollouts/ has it. Formulas are written from
the papers that docs/algorithms.md names.
"""

import math
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

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


def compare(rewards: list[float], kind: str) -> list[float]:
    """Advantages of the answers of one group, given their rewards; reinforce_pp is whitened later."""
    if min(rewards) == max(rewards) or kind == "none":
        return [0.0] * len(rewards)
    found = []
    for i, r in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        if kind == "grpo":
            found.append((r - mean(rewards)) / (stdev(rewards) + 1e-6))
        elif kind in ("dr_grpo", "reinforce_pp"):
            found.append(r - mean(rewards))
        elif kind == "rloo":
            found.append(r - mean(others))
        elif kind == "grpo_loo":
            unequal = min(others) < max(others)
            found.append((r - mean(others)) / (stdev(others) + 1e-6 if unequal else 1.0))
        else:
            raise ValueError(f"algo.advantage={kind}")
    return found


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
        advantages = compare(to_go, algo["advantage"])
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


# ---------------------------------------------------------------- the loss of one answer


def kl_estimate(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Schulman's estimates of KL(policy ‖ reference) at sampled tokens; k3+ has the gradient of k2."""
    d = ref - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d * d / 2
    held = d.clamp(-20, 20)
    k3 = (torch.exp(held) - held - 1).clamp(-10, 10)
    if kind == "k3":
        return k3
    if kind == "k3+":
        k2 = d * d / 2
        return k3.detach() + k2 - k2.detach()
    raise ValueError(f"algo.kl={kind}")


def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, algo: dict) -> tuple[Tensor, Tensor]:
    """The policy loss at each sampled token of one answer, and whether a bound holds there."""
    kind = algo["loss"]
    if kind == "reinforce":
        return -advantages * logp, torch.zeros_like(logp)
    ratio = torch.exp((logp - old).clamp(-20, 20))
    if kind == "gspo":
        whole = torch.exp((logp - old).mean().clamp(max=10)).detach()
        ratio = whole * torch.exp(logp - logp.detach())
    low, high = 1 - algo["clip_low"], 1 + algo["clip_high"]
    held = ratio.clamp(low, high)
    if kind == "cispo":
        return -held.detach() * advantages * logp, (held != ratio).float()
    if kind not in ("ppo_clip", "gspo"):
        raise ValueError(f"algo.loss={kind}")
    free_gain, held_gain = ratio * advantages, held * advantages
    loss = -torch.minimum(free_gain, held_gain)
    clipped = held_gain < free_gain
    if algo["dual_clip"] is not None:
        beyond = (advantages < 0) & (loss > -algo["dual_clip"] * advantages)
        loss = torch.where(beyond, -algo["dual_clip"] * advantages, loss)
        clipped = clipped | beyond
    return loss, clipped.float()


DEFAULT_BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002)}


def correction(trainer: Tensor, sampler: Tensor, algo: dict) -> tuple[Tensor, Tensor]:
    """The weight of each sampled token of one answer for trainer against sampler, and whether it is out of bounds."""
    kind = algo["correction"]
    low, high = DEFAULT_BOUNDS[kind]
    low = low if algo["correction_low"] is None else algo["correction_low"]
    high = high if algo["correction_high"] is None else algo["correction_high"]
    log_w = trainer - sampler
    if kind in ("tis", "icepop") and algo["correction_level"] == "sequence":
        log_w = log_w.sum().expand_as(log_w)
    w = torch.exp(log_w.clamp(-20, 20))
    judged = w
    if kind == "seq_mask":
        judged = torch.exp(log_w.mean().clamp(-20, 20)).expand_as(w)
    outside = (judged < low) | (judged > high)
    if kind == "none":
        return torch.ones_like(w), outside.float()
    if kind == "tis":
        return w.clamp(low, high), outside.float()
    return torch.where(outside, 0.0, w), outside.float()


def answer_weights(tokens: list[int], config: dict) -> tuple[list[float], int]:
    """What a token of each answer weighs in the sum of the loss, and what the sum is divided by.

    `tokens`: the trained tokens of each answer of the update.
    """
    kind = config["algo"]["loss_norm"]
    total = sum(tokens)
    answers = max(sum(count > 0 for count in tokens), 1)
    length = config["algo"]["loss_norm_length"] or config["rollout"]["max_new_tokens"]
    if kind == "token_mean":
        weights = [1.0 for _ in tokens]
    elif kind == "seq_mean_token_mean":
        weights = [total / (answers * max(count, 1)) for count in tokens]
    elif kind == "seq_mean_token_sum":
        weights = [total / answers for _ in tokens]
    elif kind == "seq_mean_token_sum_norm":
        weights = [total / (answers * length) for _ in tokens]
    else:
        raise ValueError(f"algo.loss_norm={kind}")
    return weights, total
