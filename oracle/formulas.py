"""The formulas of an update, an answer at a time: the reference of the oracle and of the tests.

Written from the papers that docs/algorithms.md names, apart from the script. Tensors are [tokens that the model
sampled] of one answer; `algo` has the keys of that section.
"""

import numpy as np
import torch
from torch import Tensor

from config import AlgoConfig

LOSSES = ("ppo_clip", "gspo", "cispo", "ipo", "dppo_tv", "reinforce")
KLS = ("k1", "k2", "k3", "k3+")
NORMS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002)}


# ---------------------------------------------------------------- the loss of an answer


def answer_loss(
    logp: Tensor, old: Tensor, ref: Tensor, rollout: Tensor, advantages: Tensor, weights: Tensor, entropy: Tensor,
    algo: AlgoConfig,
) -> Tensor:  # fmt: skip
    """Of each token: its weighted loss and policy loss, whether it is clipped, and out of bounds; [4, tokens]."""
    policy, held = policy_loss(logp, old, advantages, algo)
    factor, outside = correction(logp.detach() if algo.old_logp == "rollout" else old, rollout, algo)
    policy = policy * factor
    loss = policy - algo.entropy_coef * entropy
    if algo.kl_in == "loss":
        loss = loss + algo.kl_coef * kl(logp, ref, algo.kl)
    return torch.stack([weights * loss, weights * policy, held, outside])


def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """The policy loss at each token, and whether a bound holds there: train_grpo.policy_loss."""
    if algo.loss == "reinforce":
        return -advantages * logp, torch.zeros_like(logp)
    ratio = torch.exp((logp - old).clamp(-20, 20))
    if algo.loss == "gspo":
        whole = torch.exp((logp - old).mean().clamp(max=10)).detach()
        ratio = whole * torch.exp(logp - logp.detach())
    if algo.loss in ("ipo", "dppo_tv"):
        moved = (torch.exp(logp) - torch.exp(old)).detach()
        above, below = moved > algo.clip_high, moved < -algo.clip_low
        if algo.loss == "dppo_tv":
            above, below = above & (advantages > 0), below & (advantages <= 0)
        held = above | below
        return -ratio * advantages * ~held, held.to(logp.dtype)
    bounded = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    if algo.loss == "cispo":
        return -bounded.detach() * advantages * logp, (bounded != ratio).to(logp.dtype)
    free_gain, bounded_gain = ratio * advantages, bounded * advantages
    loss = -torch.minimum(free_gain, bounded_gain)
    held = bounded_gain < free_gain
    if algo.dual_clip is not None:
        beyond = (advantages < 0) & (loss > -algo.dual_clip * advantages)
        loss = torch.where(beyond, -algo.dual_clip * advantages, loss)
        held = held | beyond
    return loss, held.to(logp.dtype)


def correction(trainer: Tensor, sampler: Tensor, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """The weight of each token, as train_grpo.mismatch_weight gives it, and whether it is out of bounds."""
    low, high = BOUNDS[algo.correction]
    low = low if algo.correction_low is None else algo.correction_low
    high = high if algo.correction_high is None else algo.correction_high
    log_weight = trainer - sampler
    judged = log_weight
    if algo.correction == "seq_mask":
        judged = log_weight.mean().expand_as(log_weight)
    elif algo.correction_level == "sequence":
        judged = log_weight = log_weight.sum().expand_as(log_weight)
    weight, judged = (torch.exp(x.clamp(-20, 20)) for x in (log_weight, judged))
    outside = (judged < low) | (judged > high)
    kept = {"none": torch.ones_like(weight), "tis": weight.clamp(low, high)}
    return kept.get(algo.correction, weight * ~outside), outside.to(weight.dtype)


def kl(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Schulman's estimates of KL(policy ‖ reference) at each token; k3+ has the gradient of k2: train_grpo.token_kl."""
    d = ref - logp
    k2 = d * d / 2
    if kind in ("k1", "k2"):
        return -d if kind == "k1" else k2
    held = d.clamp(-20, 20)
    k3 = (torch.exp(held) - held - 1).clamp(-10, 10)
    return k3.detach() + k2 - k2.detach() if kind == "k3+" else k3


# ---------------------------------------------------------------- what an answer is worth


def compare(rewards: np.ndarray, kind: str) -> np.ndarray:
    """The advantages of the answers of one group, given their rewards; those that the batch scales, before it does."""
    r = np.asarray(rewards, dtype=np.float64)
    centred = r - r.mean()
    if r.min() == r.max() or kind == "none":
        return np.zeros(len(r))
    if kind == "grpo":
        return centred / (r.std(ddof=1) + 1e-6)
    if kind == "max_rl":
        return centred / r.mean() if r.mean() > 0 else np.zeros(len(r))
    if kind in ("rloo", "grpo_loo"):
        others = [np.delete(r, i) for i in range(len(r))]
        spread = [1.0 if kind == "rloo" or x.min() == x.max() else x.std(ddof=1) + 1e-6 for x in others]
        return np.array([(value - x.mean()) / s for value, x, s in zip(r, others, spread, strict=True)])
    return centred


def length_penalty(length: int, limit: int, algo: AlgoConfig) -> dict[str, float]:
    """The part of a reward that an answer of `length` tokens loses: in the last overlong_buffer of `limit` tokens."""
    start = limit - algo.overlong_buffer
    return {"overlong": -algo.overlong_coef * float(np.interp(length, [start, limit], [0, 1]))} if start < limit else {}


def answer_weights(tokens_N: np.ndarray, kind: str, length: int) -> np.ndarray | None:
    """What a token of each answer weighs, by each one's trained tokens (their sum divides); None: a fork's rule."""
    tokens_N = np.asarray(tokens_N)
    each = tokens_N.sum() / max(np.count_nonzero(tokens_N), 1)
    weights = {
        "token_mean": 1.0,
        "seq_mean_token_mean": each / np.maximum(tokens_N, 1),
        "seq_mean_token_sum": each,
        "seq_mean_token_sum_norm": each / length,
    }
    return weights[kind] * (tokens_N > 0) if kind in weights else None
