"""Divergences of the policy from another model, over the whole vocabulary: algo.teacher_kl, and algo.kl=full.

p is the policy's distribution of the next token and q the other model's, both at the sampling temperature:

  reverse    KL(p ‖ q) = sum_v p_v log(p_v / q_v)     the expectation of log p - log q of a token that p draws
  forward    KL(q ‖ p) = sum_v q_v log(q_v / p_v)
  jsd        β KL(q ‖ m) + (1 - β) KL(p ‖ m),  m = β q + (1 - β) p         GKD, arXiv 2306.13649, section 3

With top_k the tokens less likely to q than its k likeliest are one event, as in SDFT (arXiv 2601.19897): the divergence
of these k + 1 events is never above that of all tokens, and its gradient reaches every logit.

With l = logit / temperature and, up to a constant, h = d divergence / d p:

  d divergence / d l_v = p_v (h_v - sum_u p_u h_u)      h = log(p / q),  -q / p,  (1 - β) log(p / m)

The head calls these functions for a chunk of M positions, whose logits are [M, V / tp] on each tensor-parallel rank.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from grpo.parts.model.layers import row_blocks

# isort: split
from megatron.core.tensor_parallel.mappings import _gather_along_last_dim


@dataclass(frozen=True)
class OtherModel:
    """Another model at the M positions of a micro-batch that this rank scores, and how the policy is compared with it.

    Its logits are the product of the two tensors. They exist for a chunk of positions at a time.
    """

    hidden_M: torch.Tensor  # [M, its hidden size], on any device
    weight: torch.Tensor  # of its head, [V / tp, its hidden size]: this rank's part of the policy's vocabulary
    matches: bool  # its passes are in vLLM's arithmetic
    kind: str = "reverse"  # or forward, jsd
    beta: float = 0.5  # of jsd
    top_k: int = 0  # 0: all tokens


class Known(NamedTuple):
    """What the forward pass knows of a chunk, [M] each. A log-prob is logit / temperature - max - log_z."""

    max_M: torch.Tensor  # of the policy
    log_z_M: torch.Tensor
    other_max_M: torch.Tensor
    other_log_z_M: torch.Tensor
    bound_M: torch.Tensor | None = None  # the other model's logit of its k-th likeliest token; None without top_k
    rest_M: torch.Tensor | None = None  # log-probs of all less likely tokens together, of both models, [2, M]
    mean_M: torch.Tensor | None = None  # sum_u p_u h_u


def diverge(other: OtherModel, logits_M, other_logits_M, known: Known, temperature, group):
    """The divergence at each position, [M] fp32, and `known` with what its gradient needs besides."""
    if other.top_k:
        known = known._replace(bound_M=kth_largest(other_logits_M, other.top_k, group))
        known = known._replace(rest_M=rest(logits_M, other_logits_M, known, temperature, group))

    sums_M = known.max_M.new_zeros(2, len(known.max_M))
    for rows in row_blocks(logits_M):
        _, *parts = terms(other, logits_M, other_logits_M, known, rows, temperature)
        sums_M[:, rows] = torch.stack([part.sum(-1) for part in parts])
    dist.all_reduce(sums_M, group=group)
    divergence_M, mean_M = sums_M
    return divergence_M, known._replace(mean_M=mean_M)


def divergence_grad(other: OtherModel, logits_M, other_logits_M, known: Known, grad_M, temperature) -> torch.Tensor:
    """The gradient of the policy's logits from that of the divergence, [M] → [M, V / tp], over `other_logits_M`."""
    for rows in row_blocks(logits_M):
        p, _, weighted = terms(other, logits_M, other_logits_M, known, rows, temperature)
        grad = weighted.sub_(p.mul_(known.mean_M[rows, None]))
        other_logits_M[rows] = grad.mul_(grad_M[rows, None] / temperature).to(other_logits_M.dtype)
    return other_logits_M


def terms(other: OtherModel, logits_M, other_logits_M, known: Known, rows, temperature):
    """Of some rows, at each token: p, its term of the divergence, and p h; [rows, V / tp] each."""
    logp = log_probs(logits_M[rows], known.max_M[rows], known.log_z_M[rows], temperature)
    logq = log_probs(other_logits_M[rows], known.other_max_M[rows], known.other_log_z_M[rows], temperature)
    p, q = logp.exp(), logq.exp()

    # Log-probs of the token's event: of all tokens of the rest together.
    event_p, event_q = logp, logq
    if known.bound_M is not None:
        is_rest = other_logits_M[rows] < known.bound_M[rows, None]
        event_p, event_q = (
            torch.where(is_rest, whole[rows, None], own) for whole, own in zip(known.rest_M, (logp, logq), strict=True)
        )

    if other.kind == "reverse":
        weighted = p * (event_p - event_q)
        return p, weighted, weighted
    if other.kind == "forward":
        return p, q * (event_q - event_p), -(logp + event_q - event_p).exp()
    if other.kind == "jsd":
        beta = other.beta
        mixture = torch.logaddexp(event_q + math.log(beta), event_p + math.log(1 - beta))
        weighted = (1 - beta) * p * (event_p - mixture)
        return p, beta * q * (event_q - mixture) + weighted, weighted
    raise ValueError(f"no divergence {other.kind!r}: must be one of reverse, forward, jsd")


def log_probs(logits, max_M, log_z_M, temperature):
    """In fp32 or wider."""
    return (logits.to(max_M.dtype) / temperature).sub_((max_M + log_z_M)[:, None])


def kth_largest(logits_M, k, group):
    """The k-th largest logit of each position, over the whole vocabulary; [M, V / tp] → [M]."""
    own = logits_M.topk(min(k, logits_M.shape[-1])).values
    return _gather_along_last_dim(own, group).topk(k).values[:, -1]


def rest(logits_M, other_logits_M, known: Known, temperature, group):
    """The log-prob, to both models, of all tokens whose logit is below the other model's bound; [2, M]."""
    sums_M = known.max_M.new_zeros(2, len(known.max_M))
    for rows in row_blocks(logits_M):
        is_rest = other_logits_M[rows] < known.bound_M[rows, None]
        logp = log_probs(logits_M[rows], known.max_M[rows], known.log_z_M[rows], temperature)
        logq = log_probs(other_logits_M[rows], known.other_max_M[rows], known.other_log_z_M[rows], temperature)
        sums_M[:, rows] = torch.stack([(logp.exp() * is_rest).sum(-1), (logq.exp() * is_rest).sum(-1)])
    dist.all_reduce(sums_M, group=group)
    return sums_M.clamp(min=torch.finfo(sums_M.dtype).tiny).log()  # where no token is left, no term has it
