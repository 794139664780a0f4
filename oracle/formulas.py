"""The formulas of an update, an answer at a time: the reference of the oracle and of the tests.

They are written from the papers that docs/algorithms.md names, and share no code with the script. Tensors are [tokens
that the model sampled] of one answer, log-probs in nats. `algo` has the keys of that section of the configuration.
"""

import numpy as np
import torch

LOSSES = ("ppo_clip", "gspo", "cispo", "ipo", "dppo_tv", "reinforce")
KLS = ("k1", "k2", "k3", "k3+")
NORMS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002)}


# ---------------------------------------------------------------- the loss of an answer


def answer_loss(logp, old, ref, rollout, advantages, weights, entropy, algo, ref_kl=None, teacher_kl=None):
    """The loss of each token, [4, tokens]: weighted loss, weighted policy loss, is clipped, is out of bounds.

    The last two are divergences over the whole vocabulary, where the loss has them.
    """
    policy, clipped = policy_loss(logp, old, advantages, algo)
    factor, outside = correction(logp.detach() if algo.old_logp == "rollout" else old, rollout, algo)
    policy = policy * factor

    loss = policy - algo.entropy_coef * entropy
    if algo.kl_in == "loss" and algo.kl_coef:
        loss = loss + algo.kl_coef * (kl(logp, ref, algo.kl) if ref_kl is None else ref_kl)
    if teacher_kl is not None:
        loss = loss + algo.teacher_coef * teacher_kl
    return torch.stack([weights * loss, weights * policy, clipped, outside])


def policy_loss(logp, old, advantages, algo):
    """The policy loss of each token, and 1 where a bound cuts its gradient. Counterpart of train_grpo.policy_loss."""
    if algo.loss == "reinforce":
        return -advantages * logp, torch.zeros_like(logp)
    ratio = torch.exp((logp - old).clamp(-20, 20))

    # Bounds on the change of the probability.
    if algo.loss in ("ipo", "dppo_tv"):
        moved = (torch.exp(logp) - torch.exp(old)).detach()
        above = moved > algo.clip_high
        below = moved < -algo.clip_low
        if algo.loss == "dppo_tv":
            above = above & (advantages > 0)
            below = below & (advantages <= 0)
        clipped = above | below
        return -ratio * advantages * ~clipped, clipped.to(logp.dtype)

    # Bounds on the ratio. In GSPO it is the geometric mean over the answer, with the gradient of each token.
    if algo.loss == "gspo":
        whole = torch.exp((logp - old).mean().clamp(max=10)).detach()
        ratio = whole * torch.exp(logp - logp.detach())
    bounded = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    if algo.loss == "cispo":
        return -bounded.detach() * advantages * logp, (bounded != ratio).to(logp.dtype)

    free_gain = ratio * advantages
    bounded_gain = bounded * advantages
    loss = -torch.minimum(free_gain, bounded_gain)
    clipped = bounded_gain < free_gain
    if algo.dual_clip is not None:
        ceiling = -algo.dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    return loss, clipped.to(logp.dtype)


def correction(trainer, sampler, algo):
    """The weight of each token, and 1 where it is out of bounds. Counterpart of train_grpo.mismatch_weight."""
    low, high = BOUNDS[algo.correction]
    low = low if algo.correction_low is None else algo.correction_low
    high = high if algo.correction_high is None else algo.correction_high

    # What is compared with the bounds is the weight itself, but in seq_mask the answer's geometric mean.
    log_weight = trainer - sampler
    compared = log_weight
    if algo.correction == "seq_mask":
        compared = log_weight.mean().expand_as(log_weight)
    elif algo.correction_level == "sequence":
        compared = log_weight = log_weight.sum().expand_as(log_weight)

    weight = torch.exp(log_weight.clamp(-20, 20))
    compared = torch.exp(compared.clamp(-20, 20))
    outside = (compared < low) | (compared > high)
    if algo.correction == "none":
        weight = torch.ones_like(weight)
    elif algo.correction == "tis":
        weight = weight.clamp(low, high)
    else:
        weight = weight * ~outside
    return weight, outside.to(weight.dtype)


def kl(logp, ref, kind):
    """Schulman's estimates of KL(policy ‖ reference) at each token. k3+ has the value of k3 and the gradient of k2."""
    d = ref - logp
    if kind == "k1":
        return -d
    k2 = d * d / 2
    if kind == "k2":
        return k2
    bounded = d.clamp(-20, 20)
    k3 = (torch.exp(bounded) - bounded - 1).clamp(-10, 10)
    return k3.detach() + k2 - k2.detach() if kind == "k3+" else k3


def divergence(logp, logq, kind="reverse", beta=0.5, top_k=0):
    """How far the distribution p is from q at each token; log-probs [tokens, vocabulary] → [tokens]. Counterpart of
    grpo/parts/model/divergence.py, by torch's own gradient.
    """
    if top_k:  # the tokens that are less likely to q than its k likeliest are one
        least = logq.topk(top_k, -1).values[:, -1:]
        logp, logq = (add_rest(values, logq < least) for values in (logp, logq))
    p, q = logp.exp(), logq.exp()
    if kind == "reverse":
        return (p * (logp - logq)).sum(-1)
    if kind == "forward":
        return (q * (logq - logp)).sum(-1)
    mixture = (beta * q + (1 - beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
    return beta * (q * (logq - mixture)).sum(-1) + (1 - beta) * (p * (logp - mixture)).sum(-1)


def add_rest(logp, is_rest):
    """Log-probs with the tokens of the rest replaced by one more column, their sum."""
    total = torch.where(is_rest, logp.exp(), 0.0).sum(-1, keepdim=True)
    rest = total.clamp(min=torch.finfo(logp.dtype).tiny).log()
    return torch.cat([logp.masked_fill(is_rest, -1e9), rest], -1)


# ---------------------------------------------------------------- what an answer is worth


def compare(rewards, kind):
    """The advantages of one group's answers, given their rewards. A scale over the batch is not yet applied."""
    r = np.asarray(rewards, dtype=np.float64)
    if r.min() == r.max() or kind == "none":
        return np.zeros(len(r))
    centred = r - r.mean()
    if kind == "grpo":
        return centred / (r.std(ddof=1) + 1e-6)
    if kind == "max_rl":
        return centred / r.mean() if r.mean() > 0 else np.zeros(len(r))
    if kind not in ("rloo", "grpo_loo"):
        return centred

    # Each answer against the others of its group.
    found = []
    for number, reward in enumerate(r):
        others = np.delete(r, number)
        spread = 1.0
        if kind == "grpo_loo" and others.min() != others.max():
            spread = others.std(ddof=1) + 1e-6
        found.append((reward - others.mean()) / spread)
    return np.array(found)


def normalized_parts(parts, weights):
    """GDPO's rewards of one group, arXiv 2601.05242: each part is normalized by itself, and their weighted sum taken.

    `parts` has {name: weighted value} of each answer, `weights` the weight in each value.
    """
    found = np.zeros(len(parts))
    for name in sorted(set().union(*parts)):
        has_it = np.array([name in of_answer for of_answer in parts])
        r = np.array([of_answer[name] for of_answer in parts if name in of_answer]) / weights[name]
        if r.min() != r.max():
            found[has_it] += weights[name] * (r - r.mean()) / (r.std(ddof=1) + 1e-4)
    return found


def length_penalty(length, limit, algo):
    """What an answer of `length` tokens loses of its reward: nothing, then more over the last overlong_buffer of
    `limit` tokens.
    """
    share = np.interp(length, [limit - algo.overlong_buffer, limit], [0, 1])
    return -algo.overlong_coef * float(share)


def answer_weights(tokens_N, kind, length):
    """The weight of a token of each answer, given the trained tokens of each; the loss is divided by their sum."""
    tokens_N = np.asarray(tokens_N)
    each = tokens_N.sum() / max(np.count_nonzero(tokens_N), 1)
    weights = {
        "token_mean": 1.0,
        "seq_mean_token_mean": each / np.maximum(tokens_N, 1),
        "seq_mean_token_sum": each,
        "seq_mean_token_sum_norm": each / length,
    }
    return weights[kind] * (tokens_N > 0)
