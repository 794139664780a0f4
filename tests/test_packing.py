"""Packing: bins worked by hand, invariants of every plan, and how little attention pads at real lengths."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from config import Config, ParallelConfig
from support.base.read_config import override
from support.step import packing
from support.step.packing import ROW_TOKENS, TOKEN, add_padding, bubble, measure_rows, pack
from train_grpo import Sample, flatten


def plan_bins(lengths_N, max_tokens, replicas, parallel=None, padded=True):
    return packing.plan_bins(lengths_N, max_tokens, replicas, parallel or ParallelConfig(), padded)


STEP, UPDATE, CAPS = 5120, 1280, (24576, 49152)  # samples; positions of a training and of a log-prob row


def question_lengths(samples: int) -> np.ndarray:
    """Like GSM8K: prompts of about 100 tokens, 8 answers of about 190 to each."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(95), 0.35, samples // 8), 30, 512).repeat(8)
    return (prompts + np.clip(rng.lognormal(np.log(170), 0.5, samples), 20, 1024)).astype(np.int64)


def long_lengths(samples: int) -> np.ndarray:
    """Of about 1,100 tokens, with a tail to 8,192."""
    return np.clip(np.random.default_rng(0).lognormal(np.log(700), 1.0, samples), 50, 8192).astype(np.int64)


def test_bins_by_hand():
    # Room for two of 5 or four of 2: neighbours in length share a bin, whatever their order.
    assert plan_bins(np.array([2, 5, 2, 5, 2, 2]), 10, 1) == [[1, 3], [0, 2, 4, 5]]
    # Three rows of one length cost the same and go one to each replica; a sample is never split.
    assert plan_bins(np.array([4, 4, 4]), 4, 3) == [[0], [1], [2]]
    # Two replicas, four bins: the costliest meets the cheapest.
    assert plan_bins(np.array([9, 8, 7, 1]), 9, 2) == [[0], [1], [3], [2]]
    # Without padding bins are alike in tokens instead, and 5 + 2 + 2 fits.
    assert plan_bins(np.array([2, 5, 2, 5, 2, 2]), 9, 1, padded=False) == [[1, 0, 4], [3, 2, 5]]
    assert plan_bins(np.array([3]), 64, 2) == [[0], []] and plan_bins(np.array([], dtype=int), 64, 2) == [[], []]
    with pytest.raises(ValueError, match="a sample of 65 tokens does not fit a micro-batch of 64"):
        plan_bins(np.array([65]), 64, 1)


@pytest.mark.parametrize("padded", [True, False])
def test_what_every_plan_keeps_to(padded):
    rng = np.random.default_rng(1)
    for _ in range(150):
        samples, cap, replicas = rng.integers(1, 200), int(rng.integers(64, 2000)) * 4, int(rng.integers(1, 9))
        lengths_N = rng.integers(1, 1 + int(rng.integers(1, cap - 3)), samples)
        parallel = ParallelConfig(
            tp=int(rng.choice([1, 2, 4])), pp=int(rng.choice([1, 2, 4])), vpp=int(rng.choice([1, 2]))
        )
        bins = plan_bins(lengths_N, cap, replicas, parallel, padded)
        assert sorted(n for members in bins for n in members) == list(range(samples))
        for members in bins:
            tokens = len(members) * lengths_N[members].max(initial=0) if padded else lengths_N[members].sum()
            assert tokens <= cap
        assert len(bins) % replicas == 0
        rounds = len(bins) // replicas
        assert rounds >= min(parallel.pp, samples // replicas)
        assert rounds % (parallel.pp if parallel.vpp > 1 else 1) == 0
        assert bins == plan_bins(lengths_N.copy(), cap, replicas, parallel, padded)


@pytest.mark.parametrize("lengths", [question_lengths, long_lengths])
@pytest.mark.parametrize("samples", [STEP, UPDATE])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("replicas", [1, 8])
def test_attention_pads_little_replicas_work_alike_and_planning_is_fast(lengths, samples, cap, replicas):
    lengths_N = lengths(samples)
    start = time.process_time()
    bins = plan_bins(lengths_N, cap, replicas)
    assert time.process_time() - start < 0.4  # of a busy machine; else 0.1
    sizes = np.array([len(members) for members in bins])
    longest = np.array([lengths_N[members].max(initial=0) for members in bins])
    assert (sizes * longest).max() <= cap
    assert (sizes * longest**2).sum() <= 1.15 * (lengths_N**2).sum()
    assert (sizes * longest).sum() <= 1.1 * lengths_N.sum()
    costs = TOKEN * np.array([lengths_N[members].sum() for members in bins]) + sizes * longest**2
    costs = costs.reshape(-1, replicas).sum(0)  # of each replica
    assert costs.max() <= 1.05 * costs.min()


def test_more_bins_where_stages_would_idle_but_no_small_ones_for_it():
    lengths_N = np.full(64, 512)
    plans = {pp: len(plan_bins(lengths_N, 64 * 512, 1, ParallelConfig(pp=pp))) for pp in (1, 2, 4, 8)}
    assert plans[1] == 1  # one row holds all
    for pp in (2, 4, 8):
        assert plans[pp] >= 2 * pp - 2 and 64 * 512 / plans[pp] >= ROW_TOKENS
    assert len(plan_bins(lengths_N[:8], 64 * 512, 1, ParallelConfig(pp=4))) == 4  # as many as stages in any case
    assert len(plan_bins(lengths_N[:3], 64 * 512, 1, ParallelConfig(pp=4))) == 3  # or samples
    # By hand, 4 stages: 3 of 3 + 1 slots idle with one row, 3 of 3 + 9 with nine; two chunks a stage halve it.
    assert [bubble(m, ParallelConfig(pp=4)) for m in (1, 9)] == [0.75, 0.25]
    assert bubble(3, ParallelConfig(pp=4, vpp=2)) == 3 / 9 and bubble(5, ParallelConfig()) == 0


def test_padding_makes_no_longer_sequence():
    # Three of 100 and 2 positions more: the third goes on for two, 3 × 102 and not 4 × 100.
    assert add_padding(np.array([100, 100, 100]), 2).tolist() == [100, 100, 102]
    assert add_padding(np.array([100, 60]), 40).tolist() == [100, 100]  # there is room in the layout as it is
    assert add_padding(np.array([4, 4]), 9).tolist() == [4, 4, 4, 4, 1]  # and not a sequence of 9
    assert add_padding(np.array([4, 4]), 0).tolist() == [4, 4]
    assert add_padding(np.array([], dtype=int), 300).tolist() == [128, 128, 44]
    samples = [Sample(0, [1], [2] * n, [-1.0] * n, True, "", "s") for n in (4, 4)]
    mb = pack(flatten(samples), [0, 1], 17, "cpu")
    assert mb.cu_seqlens.tolist() == [0, 4, 8, 12, 16, 17] and mb.max_seqlen == 4
    assert mb.position_ids.tolist() == [[0, 1, 2, 3] * 4 + [0]]
    assert mb.seq_id.tolist() == [[0] * 4 + [1] * 4 + [-1] * 9] and mb.mask[0, 8:].sum() == 0


def test_measures_of_rows_count_what_attention_pads(monkeypatch):
    """Rows of 6 + 2 and 3 + 3 positions, 12 allowed: 2 × 6 and 2 × 3 padded ones, attention 72 + 18 for 40 + 18."""
    samples = [Sample(0, [1], [2] * n, [-1.0] * n, True, "", "s") for n in (6, 2, 3, 3)]
    rows = [pack(flatten(samples), members, width, "cpu") for members, width in (([0, 1], 8), ([2, 3], 6))]
    cfg = override(Config(model={"path": "m"}, data={"train": "d"}), {"train.max_tokens_per_micro_batch": 12})
    counts = {"real": 14, "micro_batches": 2, "bubble": 0}
    assert measure_rows(rows, cfg) == {**counts, "positions": 18, "fill": 18 / 24, "attention_waste": 90 / 58}
    monkeypatch.setattr(packing, "attention_pads", lambda dtype: False)
    assert measure_rows(rows, cfg) == {**counts, "positions": 14, "fill": 14 / 24, "attention_waste": 1}


def test_packed_rows_of_any_plan_hold_the_same_tokens():
    rng = np.random.default_rng(2)
    samples = [
        Sample(0, [1, 2], rng.integers(3, 9, n).tolist(), [-1.0] * n, True, "", "s") for n in rng.integers(1, 40, 30)
    ]
    batch = replace(flatten(samples), weights=torch.ones(1))
    for tp, cap in ((1, 64), (4, 128)):
        seen_F = torch.zeros(len(batch.tokens))
        for members in plan_bins(batch.lengths_N, cap, 2, ParallelConfig(tp=tp)):
            width = max(1, -(-int(batch.lengths_N[members].sum()) // tp)) * tp
            mb = pack(replace(batch, weights=None), members, width, "cpu")
            seen_F[mb.index_T] += 1
            assert mb.tokens.shape[1] == width == mb.cu_seqlens[-1]
            assert (len(mb.cu_seqlens) - 1) * mb.max_seqlen <= cap  # padding is within the cap as well
            assert torch.equal(mb.tokens[0, : len(mb.index_T)], batch.tokens[mb.index_T])
        assert (seen_F == 1).all()
