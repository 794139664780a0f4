"""The gap between trainer and vLLM: what stops a run, what warns, and the rounding that both are measured against."""

import math
import re
from collections import deque
from types import SimpleNamespace

import pytest
import torch

import train_grpo
from config import TrainingError
from grpo.run import guard
from grpo.step import metrics
from tests.conftest import refused, tiny_config

ROUNDING = 0.04  # nats


def new(score=None):
    """What the guard of a run that begins keeps of the gap."""
    return SimpleNamespace(model=[], score=score, rounding=None, recent=deque(maxlen=20), warned=False)


def report_of(difference_T):
    """What the updates report where the trainer's log-probs are above vLLM's by these differences."""
    found = metrics.gap_report(difference_T, difference_T, torch.ones(len(difference_T)))
    return {name: value.item() for name, value in found.items()} | {"tokens": len(difference_T)}


@pytest.fixture
def check(monkeypatch):
    """check(differences [T], "section.key=value", ..., kept=..., spread=...) → None, or it raises what check_gap does.

    A scoring pass has the same differences, or those of `scored`. The model's rounding is a normal distribution with a
    mean |Δ| of ROUNDING; log-probs are from -spread to 0.
    """
    monkeypatch.setattr(guard, "explain_gap", lambda *args: "the table")
    monkeypatch.setattr(guard.dist, "get_rank", lambda: 0)

    def run(difference_T, *overrides, kept=None, spread=4.0, scored=None):
        cfg = tiny_config("model.dtype=bf16", *overrides)
        rollout_logp = -torch.rand(len(difference_T), generator=torch.Generator().manual_seed(1)) * spread
        mask = torch.ones(len(difference_T), dtype=torch.bool)
        batch = SimpleNamespace(ref_logp=None, old_logp=None, rollout_logp=rollout_logp, mask=mask)
        trainer = rollout_logp + (difference_T if scored is None else scored)
        rounding = guard.gap_of(normal(ROUNDING))
        monkeypatch.setattr(guard, "measure_rounding", lambda *args: (batch, trainer, rounding))
        kept = kept or new()
        kept.score = lambda *args: trainer
        guard.check_gap(kept, report_of(difference_T), batch, cfg, 1)

    return run


def normal(mean, count=2000):
    """Normally distributed differences with this mean |Δ|."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * mean * math.sqrt(math.pi / 2)


def test_k3_of_a_gap_and_of_a_report():
    d = 0.3
    assert report_of(torch.full((100,), d))["gap_k3"] == pytest.approx(100 * (math.exp(d) - d - 1), rel=1e-5)
    assert report_of(torch.tensor([-60.0]))["gap_k3"] == 10  # clamped, as token_kl is
    found = guard.gap_of(torch.tensor([d, -d, 60.0, math.log(2)]), outliers=1)
    assert found.mean == pytest.approx((2 * d + 60 + math.log(2)) / 4)
    assert found.k3 == pytest.approx((math.exp(d) + math.exp(-d) - 2 + 1 - math.log(2)) / 4)
    assert math.isnan(guard.Gap(math.nan, math.nan).over(guard.Gap(1.0, 1.0)))


@pytest.mark.parametrize("times, printed, stops", [(2, 0, False), (5, 1, False), (15, 0, True)])
def test_rounding_passes_a_few_times_it_warns_once_and_many_times_stops(check, capsys, times, printed, stops):
    kept = new()
    for _ in range(2):
        with refused(TrainingError, "times what rounding moves them in this model" if stops else None):
            check(normal(times * ROUNDING), kept=kept)
    assert capsys.readouterr().out.count("warning: step 1: trainer and vLLM disagree") == printed


def test_a_difference_that_follows_the_log_prob_stops_however_small_it_is(check):
    """A temperature that is off by 6 % in a model whose rounding is as large as what it does."""
    rollout_logp = -torch.rand(2000, generator=torch.Generator().manual_seed(1)) * 4
    with pytest.raises(TrainingError, match="it follows the log-prob"):
        check(normal(ROUNDING) + 0.06 * rollout_logp)
    check(normal(ROUNDING) + 0.01 * rollout_logp)


def test_a_slope_that_moves_log_probs_by_less_than_rounding_is_none(check):
    """Of a model that has learnt nothing: the log-probs of its tokens differ by less than rounding moves them."""
    check(0.5 * -torch.rand(2000, generator=torch.Generator().manual_seed(1)) * 0.1, spread=0.1)


def test_two_tokens_are_no_defect_and_nan_is_one(check):
    difference_T = normal(ROUNDING)
    difference_T[:2] = -8.0
    check(difference_T)
    difference_T[:200] = -8.0
    with pytest.raises(TrainingError):
        check(difference_T)
    with pytest.raises(TrainingError):
        check(torch.full((20,), math.nan))


@pytest.mark.parametrize("tokens, keys", [(30, []), (30, ["rollout.max_logp_gap=inf"]), (10, [])])
def test_a_gap_of_0_where_a_scoring_pass_differs_is_that_of_vllm_to_itself(check, tokens, keys):
    """Unless so few tokens differ that none may have in the update."""
    scored = torch.zeros(2000)
    scored[:tokens] = 1e-3
    error = "exactly 0, but a scoring pass differs from vLLM in 30 of 2000 tokens"
    with refused(TrainingError, None if keys or tokens == 10 else error):
        check(torch.zeros(2000), *keys, scored=scored)
    check(torch.zeros(2000))


@pytest.mark.parametrize("key", ["rollout.max_logp_gap=inf", "rollout.vllm.quantization=fp8"])
def test_a_gap_that_the_configuration_intends_is_told_once(check, capsys, key):
    kept = new()
    for _ in range(2):
        check(normal(20 * ROUNDING), key, kept=kept)
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1
    assert f"the run goes on, since {key.partition('=')[0]} is set" in printed


def test_bounds_of_ones_own_stop(check):
    with pytest.raises(TrainingError, match=r" by .*, bound 5.0e-02 \(rollout.max_logp_gap\)"):
        check(normal(0.06), "rollout.max_logp_gap=0.05")
    with pytest.raises(TrainingError, match=r" by .*, bound 5.0e-02 \(rollout.max_logp_gap\)"):
        check(normal(0.04), "rollout.max_logp_gap=0.05", "model.dtype=fp32")
    kept = new()
    for _ in range(3):  # missing ones of 4 count as 0
        check(normal(0.06), "rollout.max_mismatch_kl=0.0025", kept=kept)
    with pytest.raises(TrainingError, match=r"bound 2.5e-03 \(rollout.max_mismatch_kl\)"):
        check(normal(0.06), "rollout.max_mismatch_kl=0.0025", kept=kept)


@pytest.mark.parametrize("dtype, low, high", [("fp32", 1e-7, 2e-6), ("bf16", 3e-4, 3e-2)])
def test_rounding_is_measured_and_leaves_the_model_as_it_was(build, dtype, low, high):
    run = build(f"model.dtype={dtype}")
    batch = train_grpo.flatten(train_grpo.collect(run, run.cfg, 1).samples)
    before_F = train_grpo.score(run.model, batch, run.cfg)
    with guard.nudged_embeddings(run.model):
        nudged_F = train_grpo.score(run.model, batch, run.cfg)
    assert low < guard.gap_of((nudged_F - before_F)[batch.mask]).mean < high
    assert torch.equal(before_F, train_grpo.score(run.model, batch, run.cfg))
    first = batch.lengths_N[0]
    some, logp_F, rounding = guard.measure_rounding(run.model, batch, run.cfg, train_grpo.score)
    assert len(some.lengths_N) == guard.MEASURED and torch.equal(logp_F[:first], before_F[:first])
    assert max(low, guard.SMALLEST[dtype]) <= rounding.mean < high


@pytest.mark.parametrize(
    "number, report, says",
    [
        (0, {"gap_max": 0.0, "old_gap_max": 0.0}, None),
        (1, {"gap_max": 0.3, "old_gap_max": 0.0}, None),  # the policy has moved since it sampled
        (0, {"gap_max": 1e-7, "old_gap_max": 0.0}, "the third operation differs\n  1 of 5 log-probs differ, in 1 of 2 "
         "answers; the first: answer 1, to prompt 1, token 2 (id 9): trainer -0.9000000, vLLM -1.0000000"),
        (1, {"gap_max": 0.3, "old_gap_max": 1e-7}, "update 2: old log-probs are not those that vLLM sampled with"),
        (0, {"gap_max": math.nan, "old_gap_max": math.nan}, "they differ by up to nan"),
    ],
)  # fmt: skip
def test_with_equal_bits_any_difference_stops_and_its_token_is_named(monkeypatch, number, report, says):
    """Two answers of 2 and 3 tokens; the last token's log-prob is another one in the trainer."""
    common = {"rollout_logp": [-1.0] * 3, "finished": True, "text": "", "source": ""}
    first = train_grpo.Sample(group=0, prompt_ids=[1, 2], response_ids=[3, 4], **common | {"rollout_logp": [-1.0] * 2})
    second = train_grpo.Sample(group=1, prompt_ids=[5, 6], response_ids=[7, 8, 9], **common)
    batch = train_grpo.flatten([first, second])
    logp_F = batch.rollout_logp.clone()
    logp_F[-1] = -0.9
    monkeypatch.setattr(guard.first_difference, "explain", lambda *args: "the third operation differs")
    kept = SimpleNamespace(score=lambda *args: logp_F, model=[], engine=None, forward=None)
    with refused(TrainingError, says and re.escape(says)):
        guard.check_equal(kept, report, batch, tiny_config(), 2, number)
