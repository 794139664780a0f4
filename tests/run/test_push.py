"""A weight push that does not arrive whole, on every rank, ends the run at once; and it never holds two buckets."""

import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_bridge as bridge
from config import RankError, TrainingError
from grpo.parts.engine.push_check import PushCheck, digest, engine_digests, shard_digests, stacked
from rollout import Engine
from tests.conftest import build_model, refused, tiny_config, tiny_model


@pytest.mark.slow
@pytest.mark.gpu(ranks=2)
def test_a_faulty_push_ends_the_run_at_once(train_forked):
    """Before the step is logged. The museum has more of them."""
    keys = ("rollout.prompts_per_step=4", "train.warmup_steps=0", "model.dtype=bf16", "train.lr=1e-6")
    run = train_forked(2, *keys, "parallel.pp=2", "rollout.tp=2", MUTANT="half_a_push", code=1)
    assert re.search(r"error: .*did not take up .*: on ranks \[0, 1\] .*layers\.1\..* and \d+ more", run.text), run.text
    assert "Traceback" not in run.text and not run.metrics


def test_an_engine_that_got_no_weights_since_it_slept_samples_nothing():
    engine = object.__new__(Engine)
    engine.has_weights = False
    with pytest.raises(RankError, match="none came since it slept"):
        next(engine.generate([[1]], [1], 2, None, 4))


# ---------------------------------------------------------------- the trainer's shards, without vLLM

# tests/layout_worker.py compares them for every family and layout, in fp32
SOURCES = [("qwen3_5_moe_text", "bf16", 0), ("qwen3_moe", "bf16", 8), ("qwen3_moe", "fp16", 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("arch, dtype, rank", SOURCES)
def test_the_digests_of_shards_are_those_of_the_tensors_they_give(world, tmp_path, arch, dtype, rank):
    """With adapters as well, and not when one element has changed since."""
    tiny_model(tmp_path, arch)
    model = build_model(tiny_config(f"model.path={tmp_path}", f"model.dtype={dtype}", f"lora.rank={rank}"))
    for weight in bridge.trainable_weights(model):
        weight.data.add_(torch.randn_like(weight) / 100)
    pushed = sums_of((name, 0, tensor) for name, tensor in bridge.hf_weights(model))
    assert sums_of(bridge.hf_shards(model)) == pushed
    bridge.named_weights(model)["embedding.word_embeddings.weight"].data[3, 5] += 1
    now = sums_of(bridge.hf_shards(model))
    assert [key for key in pushed if now[key] != pushed[key]] == [("model.embed_tokens.weight", 0, False)]


def sums_of(shards):
    """The digests of shards without the number of places: the tensors that a shard joins begin at any row."""
    return {key: found[:2] for key, found in shard_digests(shards).items()}


# ---------------------------------------------------------------- digests, without vLLM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_the_sum_over_parts_and_sees_any_bit(dtype):
    whole = torch.randn(96, 64).to(dtype)
    for parts in (whole.split([32, 48, 16]), whole.split([16, 48], dim=1)):
        assert digest(whole) == [sum(sums) for sums in zip(*map(digest, parts), strict=True)]
    assert digest(torch.zeros(7, dtype=dtype)) == [0, 0, 0]
    assert digest(torch.ones(32, 64, dtype=dtype))[2] == 0  # rows are equal

    bits = whole.clone().view({torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype])
    bits[5, 7] += 1
    assert digest(bits) != digest(whole)
    bits[70, 7] -= 1  # the sum is the old one again
    assert digest(bits) != digest(whole)

    for rows, seen in (([3, 5], {2, 3}), ([3, 19], {3})):  # places count within 16 rows, and all in order
        swapped = whole.clone()
        swapped[rows] = whole[rows[::-1]]
        assert digest(swapped, ordered=True)[:3] == digest(swapped)
        pairs = zip(digest(swapped, ordered=True), digest(whole, ordered=True), strict=True)
        assert {number for number, (one, other) in enumerate(pairs) if one != other} == seen


def test_chunks_do_not_change_a_digest(monkeypatch):
    whole = torch.randn(1024)
    expected = digest(whole), digest(whole, ordered=True)
    monkeypatch.setattr("grpo.parts.engine.push_check.CHUNK", {"cpu": 64})
    assert (digest(whole), digest(whole, ordered=True)) == expected


class Layer(torch.nn.Module):
    """vLLM's stacked query, key, value, and a norm, of a rank of two: queries split, the one key-value head copied."""

    def __init__(self, hf, rank):
        super().__init__()
        self.qkv_proj, self.norm = torch.nn.Module(), torch.nn.Module()
        q = hf["layer.q_proj.weight"].chunk(2)[rank]
        self.qkv_proj.weight = torch.nn.Parameter(torch.cat([q, hf["layer.k_proj.weight"], hf["layer.v_proj.weight"]]))
        self.norm.weight = torch.nn.Parameter(hf["layer.norm.weight"].clone())


def compared(check, pushed, held, **faults):
    """Two ranks, one engine: the trainer has `pushed`, while rank r of vLLM holds what follows from held[r]."""
    layers = [torch.nn.ModuleDict({"layer": Layer(hf, rank)}) for rank, hf in enumerate(held)]
    digests = [engine_digests(layer) for layer in layers]
    parts = shard_digests((name, 0, tensor) for name, tensor in pushed.items())
    held = [stacked(found.values()) for found in digests]
    check.compare(list(digests[0]), [parts] * 2, held, **faults)


def weights(seed, **others):
    random = torch.Generator().manual_seed(seed)
    made = {f"layer.{x}_proj.weight": torch.randn(64, 32, generator=random) for x in "qkv"}
    return made | {"layer.norm.weight": torch.ones(32)} | {f"layer.{name}.weight": t for name, t in others.items()}


def test_copies_of_key_value_heads_are_found_out_and_held_to():
    check, old, new = PushCheck(tp=2), weights(0), weights(1)
    zero = weights(0) | {f"layer.{x}_proj.weight": torch.zeros(64, 32) for x in "qkv"}  # tells nothing of copies
    for hf, changed in ((zero, 1.0), (old, 0.5), (old, 0.0), (new, 0.5)):
        compared(check, hf, [hf, hf])
        assert check.metrics == {"sync/checked": 1, "sync/changed": changed}
    factors = [check.factors[f] for f in check.fits[0, :, 0].argmax(0)]
    assert factors == [(1, 2), (2, 2)] and check.fits[0].sum() == 2  # of qkv_proj and of the norm
    with pytest.raises(TrainingError, match=r"ranks \[0, 1\] these weights .*: layer\.qkv_proj\.weight"):
        compared(check, old, [old, new])
    with pytest.raises(TrainingError, match=r"these weights .*: layer\.norm\.weight"):
        compared(check, new, [new, weights(1, norm=torch.full((32,), 1.5))])


@pytest.mark.parametrize("initial, rows, seen", [(1, 64, True), (1, 60, False), (0, 60, False), (0, 64, False)])
def test_exchanged_rows_are_found_where_places_are_known(initial, rows, seen):
    """After the first push, in a weight that is not all zeros then, and whose tensors begin at multiples of 16 rows."""
    check = PushCheck(tp=2)
    for seed, factor in ((0, initial), (1, 1), (2, 1)):  # healthy: no alarm
        hf = {name: weight[:rows] * factor + 0.0 for name, weight in weights(seed).items()}
        compared(check, hf, [hf, hf])
    exchanged = hf | {"layer.k_proj.weight": hf["layer.k_proj.weight"][[1, 0, *range(2, rows)]]}
    with refused(TrainingError, r"these weights are not the trainer's: layer\.qkv_proj\.weight" if seen else None):
        compared(check, hf, [hf, exchanged])


def test_a_warning_names_weights_that_vllm_keeps_in_a_layout_of_its_own(capsys):
    check, hf = PushCheck(tp=2), weights(0)
    other = weights(0, norm=torch.full((32,), 3.0))
    compared(check, hf, [other, other])
    assert check.metrics["sync/checked"] == 0.5
    assert "vLLM keeps 1 of 2 weights in a layout of its own" in capsys.readouterr().out
    compared(check, weights(1), [weights(1), weights(1)])


def test_a_push_with_other_names_or_a_fault_on_one_rank_is_refused():
    hf = weights(0)
    with pytest.raises(TrainingError, match=r"vLLM has no layer\.o_proj\.weight"):
        compared(PushCheck(tp=2), weights(0, o_proj=torch.ones(8, 8)), [hf, hf])
    for fault in ("changed", "moved"):
        with pytest.raises(TrainingError, match=r"on ranks \[1\]: .*layer\.norm\.weight"):
            compared(PushCheck(tp=2), hf, [hf, hf], **{fault: [[], ["layer.norm.weight"]]})


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("arch", ["qwen2", "qwen3_moe"])
def test_a_push_holds_one_bucket_at_a_time(world, tmp_path, monkeypatch, arch):
    """What a consumer still holds of a bucket, the last tensor, is no view of it."""
    tiny_model(tmp_path / "model", arch)
    model = build_model(tiny_config(f"model.path={tmp_path / 'model'}"))
    gather_bucket, buckets = bridge.gather_bucket, []

    def counted(*args):
        assert all(bucket.expired() for bucket in buckets)
        flat = gather_bucket(*args)
        buckets.append(StorageWeakRef(flat.untyped_storage()))
        return flat

    monkeypatch.setattr(bridge, "gather_bucket", counted)
    whole, last = dict(bridge.hf_weights(model)), None
    for last in bridge.hf_weights(model, bucket_bytes=1 << 14):
        assert torch.equal(last[1], whole[last[0]])
    assert len(buckets) > 5 and all(bucket.expired() for bucket in buckets) and last
