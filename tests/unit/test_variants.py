"""Each variant of the algorithm: numbers worked by hand."""

import math
from statistics import stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_grpo
from config import AlgoConfig, RewardConfig
from grpo.run.preflight import run_plan
from grpo.step import gdpo
from grpo.step.records import Sample
from tests.conftest import tiny_config

F64 = {"rtol": 1e-12, "atol": 1e-12}


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "kind, want",
    [
        ("none", [0, 0, 0, 0]),
        # Rewards 1, 0, 0, 3: mean 1, squared deviations 0, 1, 1, 4, so s = sqrt(6 / 3).
        ("grpo", [0, -1 / (math.sqrt(2) + 1e-6), -1 / (math.sqrt(2) + 1e-6), 2 / (math.sqrt(2) + 1e-6)]),
        ("dr_grpo", [0, -1, -1, 2]),
        # Means of the others: 1, 4/3, 4/3, 1/3.
        ("rloo", [0, -4 / 3, -4 / 3, 8 / 3]),
        # Variances of the others (ddof 1): {0,0,3}: 3; {1,0,3} twice: 7/3; {1,0,0}: 1/3.
        ("grpo_loo", [0, *[-4 / 3 / (math.sqrt(7 / 3) + 1e-6)] * 2, 8 / 3 / (math.sqrt(1 / 3) + 1e-6)]),
        # One group alone: S is its own std.
        ("grpo_batch", [a / (math.sqrt(2) + 1e-4) for a in (0, -1, -1, 2)]),
        ("gdpo", [a / (math.sqrt(2) + 1e-4) for a in (0, -1, -1, 2)]),
        ("max_rl", [0, -1, -1, 2]),
        # r - m = 0, -1, -1, 2 over 1, 2, 1, 4 tokens: mean 5/8, sum of squares 2 + 1 + 16, variance (19 - 25/8) / 7.
        ("reinforce_pp", [(a - 5 / 8) / math.sqrt((19 - 25 / 8) / 7 + 1e-8) for a in (0, -1, -1, 2)]),
    ],
)
def test_advantages_by_hand(kind, want):
    got = train_grpo.group_advantages(np.array([1.0, 0, 0, 3]), np.full(4, 5), kind, np.array([1, 2, 1, 4]))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "kind", ["grpo", "dr_grpo", "rloo", "grpo_loo", "grpo_batch", "max_rl", "gdpo", "reinforce_pp"]
)
@pytest.mark.parametrize("rewards", [[0.7], [1 / 3] * 7, [1e9] * 5])
def test_one_answer_or_equal_rewards_give_exactly_zero(kind, rewards):
    got = train_grpo.group_advantages(np.array(rewards, float), np.zeros(len(rewards)), kind, np.full(len(rewards), 3))
    assert got.tolist() == [0.0] * len(rewards)


def scored(rows):
    """Samples of (group, source, reward parts)."""
    return [
        Sample(group, [1], [2], [0.0], True, "", source, reward=sum(parts.values()), reward_parts=parts)
        for group, source, parts in rows
    ]


def test_parts_are_normalized_before_their_sum_by_hand():
    # Part a (weight 2), without it: 1, 0, 1: mean 2/3, variance 1/3. Part b: 0, 8, 4: mean 4, variance 16. The second
    # group has source t, whose reward is one function with the parts c and d; c is absent in one answer, d is constant.
    first = [{"a": 2.0, "b/x": 0.0}, {"a": 0.0, "b/x": 8.0}, {"a": 2.0, "b/x": 4.0}]
    second = [{"c": 1.0, "d": 7.0}, {"d": 7.0}, {"c": 3.0, "d": 7.0}]
    samples = scored([(0, "s", parts) for parts in first] + [(1, "t", parts) for parts in second])
    rewards = RewardConfig(default={"a": 2.0, "b": 1.0}, by_source={"t": "custom"})
    std_a = math.sqrt(1 / 3) + 1e-4
    c = 1 / (math.sqrt(2) + 1e-4)
    third = 2 / 3 / std_a
    want = [third - 4 / (4 + 1e-4), -2 * third + 4 / (4 + 1e-4), third, -c, 0, c]
    np.testing.assert_allclose(gdpo.normalize_parts(samples, rewards, 1.0), want, rtol=1e-12)
    batch = train_grpo.add_advantages(samples, train_grpo.flatten(samples), AlgoConfig(advantage="gdpo"), rewards)
    np.testing.assert_allclose(batch.advantages.tolist(), np.array(want) / (stdev(want) + 1e-4), rtol=1e-6)


def test_an_answer_whose_grading_failed_has_0_in_every_part():
    samples = scored([(0, "s", parts) for parts in ({"r": 1.0}, {"r": 0.0}, {"r": 0.0}, {})])
    samples[3].graded = "timeout"
    got = gdpo.normalize_parts(samples, RewardConfig(default="custom"), 1.0)
    np.testing.assert_allclose(got, np.array([3, -1, -1, -1]) / 4 / (0.5 + 1e-4), rtol=1e-12)


def test_the_length_penalty_is_a_part_with_its_coefficient():
    samples = scored([(0, "s", {"r": n / 10, "overlong": -0.5 * n}) for n in (0, 1, 2)])
    got = gdpo.normalize_parts(samples, RewardConfig(default="custom"), 0.5)
    np.testing.assert_allclose(got, [-1 / 1.001 + 0.5 / 1.0001, 0, 1 / 1.001 - 0.5 / 1.0001], rtol=1e-12, atol=1e-12)


def test_overlong_penalty_by_hand():
    samples = [Sample(0, [1], [2] * n, [], True, "", "", reward=1.0) for n in (10, 80, 85, 90, 100)]
    train_grpo.penalize_length(samples, AlgoConfig(overlong_buffer=20, overlong_coef=2.0), 100)
    assert [s.reward_parts["overlong"] for s in samples] == [0, 0, -0.5, -1, -2]
    assert [s.reward for s in samples] == [1, 1, 0.5, 0, -1]


# tests/oracle/test_loss.py compares values, gradients and clips of each loss, correction and KL with the formulas.


LN = [math.log(p) for p in (0.8, 0.6, 0.35, 0.2)]


@pytest.mark.parametrize(
    "options, rises, falls",
    [
        # old p = 1/2, and now 0.8, 0.6, 0.35, 0.2: ratios 1.6, 1.2, 0.7, 0.4, bounds 0.75 and 1.5. Losses at A = 1, -1.
        ({"loss": "ppo_clip"}, [-1.5, -1.2, -0.7, -0.4], [1.6, 1.2, 0.75, 0.75]),
        ({"loss": "ppo_clip", "dual_clip": 1.1}, [-1.5, -1.2, -0.7, -0.4], [1.1, 1.1, 0.75, 0.75]),
        ({"loss": "cispo"}, [-1.5 * LN[0], -1.2 * LN[1], -0.75 * LN[2], -0.75 * LN[3]],
         [1.5 * LN[0], 1.2 * LN[1], 0.75 * LN[2], 0.75 * LN[3]]),
        # p has moved by 0.3, 0.1, -0.15, -0.3; bounds 0.1, closed, and 0.2.
        ({"loss": "ipo", "clip_low": 0.1, "clip_high": 0.2}, [0, -1.2, 0, 0], [0, 1.2, 0, 0]),
        ({"loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.2}, [0, -1.2, -0.7, -0.4], [1.6, 1.2, 0, 0]),
    ],
)  # fmt: skip
def test_policy_losses_by_hand(options, rises, falls):
    """And, of the clipped ones, where the clip decides."""
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(4)
    old = torch.full((8,), math.log(0.5), dtype=torch.float64)
    algo = AlgoConfig(**{"clip_low": 0.25, "clip_high": 0.5, **options})
    loss, clipped = train_grpo.policy_loss(f64(*LN, *LN), old, advantages, torch.ones(8), torch.arange(8), algo)
    torch.testing.assert_close(loss, f64(*rises, *falls), **F64)
    if algo.loss == "ppo_clip":  # above the upper bound if A rises, below the lower one if it falls, at the ceiling
        assert clipped.tolist() == [1, 0, 0, 0, *(loss[4:] != f64(1.6, 1.2, 0.7, 0.4))]


def test_k3_by_hand():
    """Values and gradients at differences within the clamps, beyond that of the value, and where exp would overflow."""
    logp = torch.zeros(7, requires_grad=True)
    kl = train_grpo.token_kl(logp, torch.tensor([0, math.log(2), -math.log(2), 3, -12, 100, -100]), "k3")
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.tensor([0, 1 - math.log(2), math.log(2) - 0.5, 10, 10, 10, 10]))
    torch.testing.assert_close(logp.grad, torch.tensor([0, -1, 0.5, 0, 0, 0, 0]))


@pytest.mark.parametrize(
    "options, weights, outside",
    [
        # w = 4, 0.5 in sequence 0 (product 2, geometric mean sqrt 2), 0.25 in sequence 1; the first token is a prompt
        ({"correction": "none"}, [1, 1, 1], [1, 0, 0]),
        ({"correction": "tis", "correction_low": 0.3, "correction_high": 5}, [4, 0.5, 0.3], [0, 0, 1]),
        ({"correction": "tis", "correction_level": "sequence", "correction_high": 1.5}, [1.5, 1.5, 0.25], [1, 1, 0]),
        ({"correction": "icepop"}, [4, 0.5, 0], [0, 0, 1]),
        ({"correction": "seq_mask", "correction_low": 0.9, "correction_high": 1.5}, [4, 0.5, 0], [0, 0, 1]),
    ],
)
def test_mismatch_weights_by_hand(options, weights, outside):
    mask, sequence = f64(0, 1, 1, 1), torch.tensor([0, 0, 0, 1])
    trainer, algo = torch.log(f64(100, 4, 0.5, 0.25)), AlgoConfig(**options)
    got, cut = train_grpo.mismatch_weight(trainer, torch.zeros(4), mask, sequence, algo)
    torch.testing.assert_close(got[1:], f64(*weights), **F64)
    assert cut[1:].tolist() == outside


@pytest.mark.parametrize(
    "kind, want",
    [
        # Five answers of 3 tokens, 1, none, 4 that are left out of the loss, 2; one more not chosen: T = 6, N = 3.
        ("token_mean", [1, 1, 0, 0, 1, 0]),
        ("seq_mean_token_mean", [6 / 9, 6 / 3, 0, 0, 6 / 6, 0]),
        ("seq_mean_token_sum", [2, 2, 0, 0, 2, 0]),
        ("seq_mean_token_sum_norm", [0.2, 0.2, 0, 0, 0.2, 0]),
    ],
)
def test_loss_weights_by_hand(kind, want):
    lengths, trained = [4, 2, 1, 6, 2, 3], [3, 1, 0, 0, 2, 3]
    sample = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    mask = torch.cat([(torch.arange(n) >= n - k).float() for n, k in zip(lengths, trained, strict=True)])
    weights = train_grpo.loss_weights(SimpleNamespace(loss_mask=mask, seq_id=sample), [4, 0, 1, 2, 3], kind, 10)
    torch.testing.assert_close(weights, torch.tensor(want)[sample] * mask, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "overrides, hint",
    [
        (["algo.loss=ipo"], "algo.old_logp=rollout"),  # a mask against the trainer's own first update holds nothing
        (["algo.loss=gspo", "algo.correction=tis"], "algo.correction_level=sequence"),  # one weight an answer
        (["algo.loss=gspo", "algo.correction=tis", "algo.correction_level=sequence"], None),
    ],
)
def test_what_does_not_fit_a_loss_is_pointed_out(overrides, hint):
    cfg = tiny_config("model.path=m", "data.train=d", *overrides)
    found = [text for text in run_plan.warnings(cfg, 1) if "masks" in text or "gspo" in text]
    assert len(found) == (hint is not None) and all(hint in text for text in found)
