"""Packing: invariants of every plan, how little attention pads at real lengths, and shared prompts by hand."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import megatron_bridge as bridge
from config import AlgoConfig, ParallelConfig
from grpo.parts.model.attention import make_buckets
from grpo.step import packing
from rollout import Trace
from tests.conftest import tiny_config, tiny_model
from train_grpo import Sample, flatten, grpo_loss


def plan_bins(lengths_N, max_tokens, replicas, parallel=None):
    return packing.plan_bins(lengths_N, lengths_N**2, max_tokens, replicas, parallel or ParallelConfig())[0]


STEP, CAP = 5120, 24576  # samples, positions of a row


def test_what_every_plan_keeps_to():
    rng = np.random.default_rng(1)
    for _ in range(150):
        samples, cap, replicas = rng.integers(1, 200), int(rng.integers(64, 2000)) * 4, int(rng.integers(1, 9))
        lengths_N = rng.integers(1, 1 + int(rng.integers(1, cap - 3)), samples)
        parallel = ParallelConfig(
            tp=int(rng.choice([1, 2, 4])), pp=int(rng.choice([1, 2, 4])), vpp=int(rng.choice([1, 2]))
        )

        bins = plan_bins(lengths_N, cap, replicas, parallel)
        assert sorted(n for members in bins for n in members) == list(range(samples))
        assert max(lengths_N[members].sum() for members in bins) <= cap
        assert len(bins) % replicas == 0

        rounds = len(bins) // replicas
        assert rounds >= min(parallel.pp, samples // replicas)
        assert rounds % (parallel.pp if parallel.vpp > 1 else 1) == 0
        assert bins == plan_bins(lengths_N.copy(), cap, replicas, parallel)


def test_attention_pads_little_replicas_work_alike_and_planning_is_fast():
    """Lengths of about 1,100 tokens, with a tail to 8,192."""
    lengths_N = np.clip(np.random.default_rng(0).lognormal(np.log(700), 1.0, STEP), 50, 8192).astype(np.int64)
    start = time.process_time()
    bins = plan_bins(lengths_N, CAP, 8)
    assert time.process_time() - start < 0.4  # of a busy machine; else 0.1
    padded = sum(count * longest**2 for members in bins for count, longest in make_buckets(lengths_N[members]))
    assert padded <= 1.15 * (lengths_N**2).sum()
    cost_B = np.array([(packing.TOKEN * lengths_N[members] + lengths_N[members] ** 2).sum() for members in bins])
    costs = cost_B.reshape(-1, 8).sum(0)
    assert costs.max() <= 1.05 * costs.min()


# ---------------------------------------------------------------- prompts that answers share


def answers(prompts, *lengths, **given):
    """Answers of these lengths to each prompt, no two the same."""
    return [
        Sample(group, prompt, [100 + 10 * group + i] * n, [-1.0] * n, True, "", "s", **given)
        for group, prompt in enumerate(prompts)
        for i, n in enumerate(lengths)
    ]


def test_truncated_answers_keep_their_mask_and_need_not_be_trained():
    cut_off, whole = [Sample(0, [1, 2], [3, 4], [-1.0, -1.0], finished, "", "s") for finished in (False, True)]
    batch = flatten([cut_off, whole], mask_truncated=True)
    assert batch.mask.tolist() == [0, 1, 1, 0, 1, 1] and batch.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert torch.equal(flatten([cut_off, whole]).loss_mask, batch.mask)


def test_an_empty_micro_batch_counts_nothing():
    batch = flatten(answers([[1, 2, 3]], 2))
    batch = replace(batch, advantages=torch.ones(4), weights=torch.ones(4))
    assert packing.pack(batch, [], 300, "cpu").sizes.tolist() == [128, 128, 44]
    mb = packing.pack(batch, [], 2, "cpu")
    assert mb.tokens.shape == (1, 2) and mb.mask.sum() == 0
    loss, denominator, _ = grpo_loss(mb, torch.zeros(2, requires_grad=True), torch.zeros(2), AlgoConfig())
    assert loss.item() == 0 and denominator.item() == 0


def test_tokens_and_routes_decide_what_is_shared():
    samples = answers([[1, 2, 3]] * 2 + [[1, 2, 4]], 2, 2)
    batch = flatten(samples)
    assert batch.prompts_N.tolist() == [3] * 6
    assert batch.same_prompt_N.tolist() == [0, 0, 0, 0, 1, 1]  # groups of one prompt share it
    routes = [np.zeros((s.positions, 2, 1), np.uint8) for s in samples]
    routes[1][0] += 1  # vLLM sent the prompt's first token to another expert
    batch = flatten([replace(s, trace=Trace(replay={"routes": r})) for s, r in zip(samples, routes, strict=True)])
    assert batch.same_prompt_N.tolist() == [0, 1, 0, 0, 2, 2]
    turns = answers([[1, 2]], 6, 6)
    batch = flatten([replace(s, trace=Trace(turns=[0, 2, 4])) for s in turns])  # the first turn has no token
    assert batch.prompts_N.tolist() == [4, 4]


def plan_rows(batch, cap, replicas=1, *overrides):
    return packing.plan_rows(batch, [*range(len(batch.lengths_N))], cap, replicas, tiny_config(*overrides))


def test_plans_of_shared_prompts_by_hand():
    # Four answers of 5 tokens to 10: 14 positions, and 4 for each further one. Copies count an eighth, which makes
    # 29.75 of four and 19.25 of two.
    batch = flatten(answers([[*range(10)], [*range(1, 11)]], 5, 5, 5, 5))
    assert plan_rows(batch, 64) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert plan_rows(batch, 30) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(map(len, plan_rows(batch, 29))) == [2, 2, 2, 2]
    assert len(plan_rows(batch, 28, 1, "train.share_prompts=false")) == 4
    with pytest.raises(ValueError, match="a sample of 14 tokens does not fit a micro-batch of 13"):
        plan_rows(batch, 13)


@pytest.mark.parametrize("family, cap", [("qwen3", 3.5), ("qwen3_5_text", 1)])
def test_rows_of_linear_attention_hold_every_copy(world, tmp_path, family, cap):
    """Sixteen answers of 8 tokens to prompts of 96: other models hold three times the row as keys and values."""
    cfg = tiny_config(f"model.path={tiny_model(tmp_path, family)}")
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    batch = flatten(answers(np.arange(4 * 96).reshape(4, 96).tolist(), *[8] * 16))
    rows = packing.to_micro_batches(batch, [*range(64)], 512, cfg)
    held = [row.tokens.shape[1] / 512 for row in rows]
    assert cap - 0.5 < max(held) <= cap and sum(len(row.samples) for row in rows) == 64
    computed = sum(row.width for row in rows)
    assert computed < sum(row.tokens.shape[1] for row in rows) / 2  # what fits a row is shared still


def test_sharing_saves_what_prompts_repeat_and_replicas_still_work_alike():
    """64 prompts of 120 tokens with 16 answers of 20 to 1,024 (P120, A250): 0.7 of the positions."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(9, 99, (64, 120))
    samples = [
        Sample(g, prompts[g], [1] * n, [-1.0] * n, True, "", "s")
        for g in range(64)
        for n in np.clip(rng.lognormal(np.log(220), 0.5, 16), 20, 1024).astype(int)
    ]
    batch = flatten(samples)
    bins = plan_rows(batch, CAP, replicas=8)
    assert sorted(n for members in bins for n in members) == list(range(1024))
    widths = np.array([(batch.lengths_N[m] - packing.shared_positions(batch, m, True)).sum() for m in bins])
    assert widths.max() <= CAP and widths.sum() < 0.72 * batch.lengths_N.sum()
    assert widths.reshape(-1, 8).sum(0).max() <= 1.05 * widths.sum() / 8


def test_more_bins_where_stages_would_idle_but_no_small_ones_for_it():
    lengths_N = np.full(64, 512)
    plans = {pp: len(plan_bins(lengths_N, 64 * 512, 1, ParallelConfig(pp=pp))) for pp in (1, 2, 4, 8)}
    assert plans[1] == 1  # one row holds all
    for pp in (2, 4, 8):
        assert plans[pp] >= 2 * pp - 2 and 64 * 512 / plans[pp] >= packing.ROW_TOKENS
    # By hand, 4 stages: 3 of 3 + 1 slots idle with one row, 3 of 3 + 9 with nine; two chunks a stage halve it.
    assert [packing.bubble(m, ParallelConfig(pp=4)) for m in (1, 9)] == [0.75, 0.25]
    assert packing.bubble(3, ParallelConfig(pp=4, vpp=2)) == 3 / 9


def test_measures_of_rows_by_hand(monkeypatch):
    """Rows of 30 + 2 positions with 1 shared, and of 20 + 20 with 9 shared; each has 1 of padding.

    Attention pads the second sequence and the padding of the first row to 2: 30² + 2 · 2² and 2 · 20² + 1.
    """
    samples = answers([[1]], 30, 2) + answers([[*range(9)]], 12, 12)
    batch, cfg = flatten(samples), tiny_config("train.max_tokens_per_micro_batch=64")
    rows = [packing.pack(batch, [0, 1], 32, "cpu", True), packing.pack(batch, [2, 3], 32, "cpu", True)]
    counts = {"real": 62, "positions": 64, "shared": 10, "micro_batches": 2, "fill": 64 / 128, "bubble": 0}
    work = 30**2 + 2**2 + 2 * 20**2
    counts["attended"] = work - 1**2 - 9**2
    assert packing.measure_rows(rows, cfg) == {**counts, "attention_waste": (work + 5) / work}
    monkeypatch.setattr(packing, "uses_varlen", lambda on, dtype: True)
    assert packing.measure_rows(rows, cfg) == {**counts, "attention_waste": 1}
