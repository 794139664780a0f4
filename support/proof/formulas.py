"""The loss of two synthetic answers, token by token in plain numbers, against what the script computes for them."""

import math
from dataclasses import dataclass, replace

import torch

from config import AlgoConfig, UserError
from support.base import ranks
from support.step.records import Batch, MicroBatch

LOSSES = ("ppo_clip", "gspo", "cispo", "ipo", "dppo_tv", "reinforce")
KLS = ("k1", "k2", "k3", "k3+")
BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002)}


@dataclass
class Token:
    """What the loss of a token is made of; numbers, the advantage and the weight in the update among them."""

    logp: float
    old: float
    ref: float
    rollout: float
    advantage: float
    weight: float


def add_logprobs(batch: Batch) -> Batch:
    """The batch with log-probs of an old policy and a reference unlike vLLM's; a teacher has those of the old one."""
    logp_F = batch.rollout_logp
    return replace(batch, old_logp=0.9 * logp_F, ref_logp=0.8 * logp_F, teacher_logp=0.9 * logp_F)


def check_loss(computed: tuple, mb: MicroBatch, logp_T: torch.Tensor, algo: AlgoConfig) -> None:
    """Compare what grpo_loss has `computed` for `mb` and entropies of -logp_T with its formula; run the backward pass.

    Raises UserError where they differ. Says so where a name in `algo` is a fork's own, which has no formula here.
    """
    loss, _, _ = computed
    loss.backward()
    if algo.loss not in LOSSES or algo.kl not in KLS or algo.correction not in BOUNDS:
        if ranks.is_first_rank():
            print(f"algo.loss={algo.loss}, algo.kl={algo.kl}: the loss is a fork's own and not judged by a formula")
        return
    expected = sum(sum(answer_loss(answer, algo)) for answer in answers_of(mb, logp_T))
    if not math.isclose(loss.item(), expected, rel_tol=1e-4, abs_tol=1e-5):
        raise UserError(
            f"the loss of algo.loss={algo.loss}, algo.correction={algo.correction}, algo.kl={algo.kl} on two synthetic "
            f"answers is {loss.item():.6f}, by its formula {expected:.6f}: grpo_loss computes something else. A "
            "formula of your own needs a name of its own (docs/forking.md)"
        )


def answers_of(mb: MicroBatch, logp_T: torch.Tensor) -> list[list[Token]]:
    """The sampled tokens of each answer in the row."""
    columns = [logp_T, mb.old_logp[0], mb.ref_logp[0], mb.rollout_logp[0], mb.advantages[0], mb.weights[0]]
    tokens = [Token(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    numbers = mb.sequence_T.tolist()
    sampled = mb.mask[0].tolist()
    answers = {number: [] for number in numbers}
    for token, number, is_sampled in zip(tokens, numbers, sampled, strict=True):
        if is_sampled:
            answers[number].append(token)
    return list(answers.values())


def answer_loss(answer: list[Token], algo: AlgoConfig) -> list[float]:
    """The weighted loss of each token of an answer."""
    count = max(len(answer), 1)
    mean_ratio = math.exp(sum(t.logp - t.old for t in answer) / count)
    gaps = [(t.logp if algo.old_logp == "rollout" else t.old) - t.rollout for t in answer]
    losses = []
    for t, gap in zip(answer, gaps, strict=True):
        ratio = mean_ratio if algo.loss == "gspo" else math.exp(t.logp - t.old)
        judged = gap
        if algo.correction == "seq_mask":
            judged = sum(gaps) / count
        elif algo.correction_level == "sequence":
            judged = gap = sum(gaps)
        loss = policy(ratio, t, algo) * correction(gap, judged, algo) + algo.entropy_coef * t.logp
        if algo.kl_in == "loss":
            loss += algo.kl_coef * kl(t.ref - t.logp, algo.kl)
        losses.append(t.weight * loss)
    return losses


def policy(ratio: float, t: Token, algo: AlgoConfig) -> float:
    """The policy loss of a token: train_grpo.policy_loss."""
    bounded = min(max(ratio, 1 - algo.clip_low), 1 + algo.clip_high)
    if algo.loss == "reinforce":
        return -t.advantage * t.logp
    if algo.loss == "cispo":
        return -bounded * t.advantage * t.logp
    if algo.loss in ("ipo", "dppo_tv"):
        moved = math.exp(t.logp) - math.exp(t.old)
        above, below = moved > algo.clip_high, moved < -algo.clip_low
        if algo.loss == "dppo_tv":
            above, below = above and t.advantage > 0, below and t.advantage <= 0
        return 0.0 if above or below else -ratio * t.advantage
    loss = max(-ratio * t.advantage, -bounded * t.advantage)
    if algo.dual_clip is not None and t.advantage < 0:
        loss = min(loss, -algo.dual_clip * t.advantage)
    return loss


def correction(log_weight: float, judged: float, algo: AlgoConfig) -> float:
    """The importance weight of a token's policy loss, where exp(judged) has to be within the bounds:
    train_grpo.mismatch_weight.
    """
    low, high = BOUNDS[algo.correction]
    if algo.correction_low is not None:
        low = algo.correction_low
    if algo.correction_high is not None:
        high = algo.correction_high
    weight = math.exp(log_weight)
    if algo.correction == "none":
        return 1.0
    if algo.correction == "tis":
        return min(max(weight, low), high)
    return weight if low <= math.exp(judged) <= high else 0.0


def kl(d: float, kind: str) -> float:
    """The KL of a token whose log-probs differ by d = ref - logp: train_grpo.token_kl."""
    return {"k1": -d, "k2": d * d / 2}.get(kind, math.exp(d) - d - 1)
