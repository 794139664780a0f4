"""The recipes for losses of the last year: numbers worked by hand, and formulas written once more, as loops."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from config import AlgoConfig
from grpo.step.packing import pack
from rollout import Trace
from tests.unit.test_variants import F64, f64


def losses(script, kind, p, old, advantages, mask, sequence, **keys):
    """The loss of each token, its gradient by log p, and what counts as clipped."""
    logp = p.log().requires_grad_()
    algo = AlgoConfig(loss=kind, **keys)
    loss, clipped = script.policy_loss(logp, old.log(), advantages, mask, torch.tensor(sequence), algo)
    return loss.detach(), torch.autograd.grad(loss.sum(), logp)[0], clipped


def test_drpo_by_hand(fork):
    """p from 1/2 to 0.8, so its ratio is 1.6: a gradient of -1.6 A w, w = 1 -+ 0.3 / delta."""
    script, p, old = fork("drpo"), f64(0.8, 0.8), f64(0.5, 0.5)
    for delta, loss, gradient in ((0.5, [-1.42, 1.78], [-0.64, 2.56]), (0.2, [-1.15, 2.05], [0.8, 4.0])):
        got = losses(script, "drpo", p, old, f64(1, -1), torch.ones(2), [0, 1], clip_high=delta)
        torch.testing.assert_close(got[0], f64(*loss), **F64)
        torch.testing.assert_close(got[1], f64(*gradient), **F64)


def test_vespo_by_hand(fork):
    """An answer of ratios 2, (an environment's token) and 1, one of ratio 1/2, and one whose ratio is beyond floats."""
    p, old = f64(0.8, 0.9, 0.3, 0.2, 1.0), f64(0.4, 0.1, 0.3, 0.4, 1e-320)
    mask, advantages = f64(1, 0, 1, 1, 1), f64(1, 1, 1, -1, -1)
    _, gradient, _ = losses(fork("vespo"), "vespo", p, old, advantages, mask, [0, 0, 0, 1, 2])
    above, below = 2**2 * math.exp(3 * (1 - 2)), 0.5**3 * math.exp(2 * (1 - 0.5))
    torch.testing.assert_close(gradient[[0, 2, 3, 4]], f64(-above, -above, below, 0), **F64)


def test_cppo_by_hand(fork):
    """Weights 1, 0.95, 0.9, 0.85, 0.8 around an environment's token. Their bounds are 0.15, 0.15, since what the first
    token saves does not count, 0.0175, 0.0139 and 0.00965; each of two more answers begins anew with 0.15."""
    drift, mask = f64(0.005, 0.165, 0.4, 0.019, 0.02, 0.0125, 0.14, 0.16), f64(1, 1, 0, 1, 1, 1, 1, 1)
    script, old, sequence = fork("cppo"), torch.full_like(drift, 0.5), [0, 0, 0, 0, 0, 0, 1, 2]
    for a, way, want in ((1, 1, [0, 1, 0, 0, 1, 1, 0, 1]), (-1, -1, [0, 1, 0, 0, 1, 1, 0, 1]), (1, -1, [0] * 8)):
        p = old + way * drift
        loss, _, clipped = losses(script, "cppo", p, old, a * torch.ones(8), mask, sequence, clip_high=0.15)
        assert clipped.tolist() == want
        torch.testing.assert_close(loss, -a * p / old * (1 - f64(*want)), **F64)


def test_fipo_by_hand(fork):
    """Each token by the double sum over those after it in its answer; then what is clipped or left out."""
    script, generator = fork("fipo"), torch.Generator().manual_seed(0)
    x = 0.005 * torch.rand(40, generator=generator, dtype=torch.float64)
    sequence = torch.tensor([0] * 27 + [1] * 13)
    mask = (torch.rand(40, generator=generator) > 0.2).double()
    want = [
        sum(2 ** ((t - k) / 32) * x[k] * mask[k] for k in range(t, 40) if sequence[k] == sequence[t]) for t in range(40)
    ]
    got = script.future_weight(x, torch.ones(40), mask, sequence)
    torch.testing.assert_close(got, torch.stack(want).exp(), **F64)
    # Where A < 0 a ratio of 11 does not count, and has weight 1. A ratio of 9 counts. Weights are in [1, 1.2].
    ratios, sequence, two_on = f64(1.01, 11, 1.1, 0.5, 9), torch.tensor([0, 0, 0, 1, 2]), 2 ** (-2 / 32)
    for sign, want in ((1, [1.2, 1.2, 1.1, 1, 1.2]), (-1, [1.01 * 1.1**two_on, 1, 1.1, 1, 1.2])):
        got = script.future_weight(ratios.log(), sign * torch.ones(5), torch.ones(5), sequence)
        torch.testing.assert_close(got, f64(*want), **F64)
    # The weight is a factor of the advantage, before the clip. It has no gradient.
    loss, gradient, _ = losses(script, "fipo", f64(0.55), f64(0.5), torch.ones(1), torch.ones(1), [0], clip_high=0.28)
    assert (loss.item(), gradient.item()) == pytest.approx((-1.1 * 1.1, -1.1 * 1.1), rel=1e-12)


def test_pass_at_k_by_hand(fork):
    """One right of four: half of the 6 pairs fail, two thirds of a wrong answer's: (1/2 - 2/3) / (1/2).
    Where every pair passes it is 0."""
    advantages = fork("pass_k").group_advantages
    hands = {(0, 1, 0, 0): [-1 / 3, 1, -1 / 3, -1 / 3], (1, 1, 1, 0): [0] * 4}
    for rewards, want in hands.items():
        np.testing.assert_allclose(advantages(np.array(rewards, float), np.zeros(4), "pass@2"), want)
    r = np.array([1.0, 0, 0, 1, 0, 0, 0])
    # All groups of 3 of the 7, GRPO among them, and the mean of those that an answer is in.
    sets = list(itertools.combinations(range(7), 3))
    best = np.array([r[list(members)].max() for members in sets])
    white = (best - best.mean()) / best.std()
    want = [np.mean([a for a, members in zip(white, sets, strict=True) if i in members]) for i in range(7)]
    np.testing.assert_allclose(advantages(r, np.zeros(7), "pass@3"), want)


def test_echo_by_hand(fork):
    """Replies of two tokens, of one and of none, in an update of 6 sampled tokens without a reward: each of the three
    answers has 0.05 · 6 / 3 for its replies. No other number of the report counts them, and the head computes them."""
    script = fork("echo")
    talks = [([3, 4], [5, 6, 7, 8], [1, 2, 1]), ([3, 4], [9, 2, 3], [1, 1, 1]), ([5], [6, 7], [2])]
    samples = [
        script.Sample(0, ids, answer, [-1.0] * len(answer), True, "", "", Trace(turns=turns))
        for ids, answer, turns in talks
    ]
    batch = script.flatten(samples)
    batch = dataclasses.replace(batch, weights=batch.mask.float(), advantages=1.0 - batch.mask.float())

    logp = torch.linspace(-3, -1, 11, requires_grad=True)
    losses, reports = [], []
    for rows in (batch, script.with_replies(batch, [0, 1, 2])):
        mb = pack(rows, [0, 1, 2], 11, "cpu")
        loss, tokens, report = script.grpo_loss(mb, logp, torch.zeros(11), AlgoConfig())
        losses.append(loss)
        reports.append({**report, "tokens": tokens, "loss": None})
    assert reports[0] == reports[1] and losses[0] == 0
    (grad,) = torch.autograd.grad(losses[1], logp)
    torch.testing.assert_close(grad, torch.tensor([0, 0, -0.05, -0.05, 0, 0, 0, -0.1, 0, 0, 0]))
    assert torch.equal(mb.mask[0], batch.mask | (grad != 0))
