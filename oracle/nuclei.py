"""The ids from which vLLM draws a token with rollout.top_p or top_k, its nucleus: recorded, or made from our logits."""

import itertools
import math

import torch

LOW = -1e30  # a logit of probability 0; finite, so that 0 times it is 0
WHOLE = slice(None)  # the nucleus of a token that an environment wrote: all ids


def nuclei_of(row, sampled):
    """The recorded nucleus of each token of an answer, of which the model `sampled` some. None if there are none."""
    if "nuclei" not in row:
        return None
    found = [[]]
    for token in row["nuclei"]:
        if token < 0:
            found.append([])
        else:
            found[-1].append(token)
    return spread(found[:-1], row, sampled)


def spread(nuclei, row, sampled):
    """The nuclei of an answer's sampled tokens, among those of all its tokens; WHOLE where there is none."""
    found = [WHOLE] * len(row["response_ids"])
    for place, ids in zip(sampled, nuclei, strict=False):
        found[place] = ids
    return found


def cut(logits, nuclei):
    """The logits [tokens, vocabulary], LOW outside of the nucleus of each token."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in zip(kept, nuclei, strict=True):
        row[ids] = True
    return torch.where(kept, logits, LOW)


def bounds_of(logp, sampling, slack=0.0):
    """What must be in the nucleus of each token, and what may be, [tokens, vocabulary] each, if log-probs may be off by
    `slack`; they are equal without. `logp` is [tokens, vocabulary] too.

    vLLM keeps the top_k likeliest ids; of these, each before which the likelier ones have less than top_p together.
    """
    order = logp.sort(-1, descending=True).values
    # Of each id, how many are likelier: for sure, and at most.
    likelier = torch.searchsorted(-order, -(logp + slack))
    at_most = torch.searchsorted(-order, -(logp - slack), right=slack > 0) - int(slack > 0)
    k = logp.shape[-1] if sampling.top_k <= 0 else min(sampling.top_k, logp.shape[-1])

    # The share of the likelier ones in the top k.
    mass = order.exp().double().cumsum(-1)
    share = torch.nn.functional.pad(mass / mass[:, k - 1 : k], (1, 0))
    factor = math.exp(2 * slack)
    must = (at_most < k) & (share.gather(-1, at_most) * factor + slack / 100 < sampling.top_p)
    may = (likelier < k) & (share.gather(-1, likelier) / factor - slack / 100 < sampling.top_p)
    return must, may


def fill_nuclei(state, answers):
    """Give the answers (trainer.Answer) the nuclei that are not recorded, from our logits, where their sampling cuts.

    Returns (what is wrong with recorded ones or "", their sizes, those of ours), or None without recorded ones.
    """
    answers = [a for a in answers if a.sampling.top_p < 1 or a.sampling.top_k > 0]
    slack = state.report.bounds["token: rollout_logp"][0]
    problem = ""
    theirs, ours = [], []
    passes = state.trainer.passes(answers, state.trainer.current, replays=True, is_cut=False)
    for a, logps in itertools.chain.from_iterable(passes):
        drawn = logps.cpu()
        own, _ = bounds_of(drawn, a.sampling)
        if a.nuclei is None:
            ids = [{*row.nonzero()[:, 0].tolist(), token} for row, token in zip(own, a.tokens, strict=True)]
            a.nuclei = spread([[*each] for each in ids], a.row, a.sampled)
            continue

        recorded = [a.nuclei[place] for place in a.sampled]
        if WHOLE in recorded:
            problem = problem or f"group {a.row['group']}: {recorded.index(WHOLE)} nuclei of {len(recorded)} tokens"
            continue
        theirs += [len(nucleus) for nucleus in recorded]
        ours += own.sum(-1).tolist()
        for given in zip(recorded, a.tokens, *bounds_of(drawn, a.sampling, slack), strict=True):
            problem = problem or difference(*given)
    return (problem, theirs, ours) if theirs or problem else None


def difference(nucleus, token, must, may):
    """What is wrong with the nucleus of a token, given what must and may be in it [vocabulary]; empty if nothing is."""
    if token not in nucleus:
        return f"the token {token} is not among the {len(nucleus)} ids that it was drawn from"
    has = torch.zeros_like(must)
    has[nucleus] = True
    wrong = (has & ~may) | (must & ~has)
    if not wrong.any():
        return ""
    one = int(wrong.nonzero()[0])
    return f"it is drawn from {len(nucleus)} ids, {'with' if has[one] else 'without'} {one}"
