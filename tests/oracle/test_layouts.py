"""Every layout and every model family: the gradient of each parameter, the loss and the log-probs of one update equal
those of plain transformers in float64, one unpadded sequence at a time; weights come back bit by bit.
"""

import json
import math
import re

import numpy as np
import pytest
import torch

from oracle import formulas
from tests.conftest import check_state
from tests.layout_worker import one_layout
from tests.oracle import layouts
from tests.oracle.layouts import LAYOUTS, MOE_LAYOUTS, check_update, make_plan, run_worker
from tests.oracle.reference import (
    file_weights,
    float64_model,
    gradients,
    make_samples,
    reference,
    relative,
    worst_gradient,
)


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory) -> layouts.Results:
    return layouts.run_cases(request, fork_server, tmp_path_factory)


@pytest.mark.parametrize(("family", "layout"), layouts.CASES)
def test_update_equals_plain_transformers(results, family, layout, record_property):
    found, wanted, plan = results[family]
    assert found[layout]["shared"] > 0  # answers shared their prompt
    error = check_update(found[layout], wanted)
    record_property("gradient, relative error", f"{error:.0e}")
    layouts.check_held(found[layout]["held"], plan, layout)


ON_HALF = [  # with FlashAttention and grouped_mm; a token near a tie goes to another expert (0.12)
    ("qwen2", "bf16", 0.05), ("qwen2", "fp16", 0.01), ("mistral", "fp16", 0.01), ("qwen3_moe", "fp16", 0.1),
    ("mistral", "bf16", 0.05), ("qwen3_moe", "bf16", 0.25),
]  # fmt: skip
ONE_RANK = [pytest.param(family, "fp32", 1e-4, marks=pytest.mark.gpu) for family in ("mistral", "qwen3_moe")]


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [*ONE_RANK, *(pytest.param(*case, marks=pytest.mark.gpu(only=True)) for case in ON_HALF)],
)
def test_one_rank_equals_plain_transformers(world, tmp_path, family, dtype, bound, record_property):
    """The whole gradient, from weights that are rounded to the dtype."""
    found = one_layout(make_plan(tmp_path, family, dtype=dtype, layouts={"one": []}), "one")
    error = layouts.whole_error(found, reference(tmp_path / "model", found))
    record_property("gradient, relative error", f"{error:.1e}")
    assert error < bound


# Relative errors of the whole gradient, at most; measured on all layouts: docs/dev/layouts.md.
HALF = {"fp16": 0.02, "bf16": 0.2}
# Where rounding moves a ratio, or a KL of the kind k3, over a bound, the gradient jumps.
NO_CLIP = {"clip_low": 100.0, "clip_high": 100.0, "kl": "k2"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", [family for family in layouts.FAMILIES if family not in layouts.ALIKE])
def test_half_precision_is_within_its_rounding_on_every_axis(fork_server, tmp_path, family, dtype):
    """Weights are rounded beforehand; activations, and gradients between layers, are in the dtype."""
    axes = ("TP2·CP2", "PP2·VPP2·DP2", *(["EP2·TP2·ETP2·DP2"] if family in layouts.MOE else []))
    chosen = {name: layouts.layouts_of(family)[name] for name in axes}
    keys = [f"algo.{key}={value}" for key, value in NO_CLIP.items()]
    (found,) = run_worker(fork_server, tmp_path, 4, make_plan(tmp_path, family, *keys, dtype=dtype, layouts=chosen))
    wanted = reference(tmp_path / "model", found[axes[0]], **NO_CLIP)
    for layout in chosen:
        assert layouts.whole_error(found[layout], wanted) < HALF[dtype], layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"hidden": 96, "kv_heads": 1}, ["parallel.cp=2"]),  # 3 heads
        ({"kv_heads": 1}, ["parallel.tp=4"]),  # a rank holds rows of one head and a half
        ({"layers": 3, "tied": True}, ["parallel.pp=2", "megatron.account_for_embedding_in_pipeline_split=true"]),
        ({"layers": 3}, ["parallel.pp=2", "megatron.account_for_loss_in_pipeline_split=true"]),
    ],
)
def test_sizes_that_a_layout_does_not_divide(fork_server, tmp_path, options, keys):
    """Samples of one position too."""
    plan = make_plan(tmp_path, "qwen2", layouts={"odd": keys})
    layouts.make_model(tmp_path / "model", "qwen2", **options)
    ((found,),) = (each.values() for each in run_worker(fork_server, tmp_path, 4, plan))
    check_update(found, reference(tmp_path / "model", found))
    layouts.check_held(found["held"], plan, "odd")


@pytest.mark.slow
def test_every_loss_and_every_normalisation_does_not_depend_on_the_layout(fork_server, tmp_path):
    """On TP2·PP2 with uneven micro-batches, with truncated importance sampling and the straight-through KL. Either
    is the default in each case: a normalisation is only a weight of each token."""
    common = {"kl": "k3+", "correction": "tis", "correction_high": 1.1}
    cases = {
        f"{loss} {norm}": {"loss": loss, "loss_norm": norm}
        for loss in formulas.LOSSES
        for norm in formulas.NORMS
        if norm == "token_mean" or loss == "ppo_clip"
    }
    for algo in cases.values():
        if algo["loss"] in ("ipo", "dppo_tv"):
            algo |= {"clip_low": 0.002, "clip_high": 0.002}  # the models' probabilities are small

    chosen = {name: [f"algo.{key}={value}" for key, value in algo.items()] for name, algo in cases.items()}
    keys = [f"algo.{key}={value}" for key, value in common.items()]
    plan = make_plan(tmp_path, "qwen2", *keys, "parallel.tp=2", "parallel.pp=2", layouts=chosen)
    (found,) = run_worker(fork_server, tmp_path, 4, plan)
    for name, algo in cases.items():
        wanted = reference(tmp_path / "model", found[name], **algo, **common)
        assert found[name]["loss"].item() == pytest.approx(wanted["loss"], rel=1e-5), name
        error, parameter = worst_gradient(found[name], wanted)
        assert error < 1e-5, (name, parameter)


@pytest.mark.slow
def test_balancing_loss_does_not_depend_on_the_layout(fork_server, tmp_path):
    """Switch's loss over the response tokens of each micro-batch, weighted by their number; the same two micro-batches
    on every layout, against transformers' router logits in float64."""
    samples = make_samples()
    lengths_N = np.array([len(s["prompt_ids"]) + len(s["response_ids"]) - 1 for s in samples])
    bins = [[*range(0, 14, 2)], [*range(1, 14, 2)]]
    coefficient = 0.5
    budget = max(math.ceil(lengths_N[members].sum() / 4) * 4 for members in bins)  # a multiple of tp · cp
    names = ("TP2·PP2", "TP2·CP2", "EP2·TP2·ETP2·DP2", "PP2·EP2·DP2")
    plan = make_plan(
        tmp_path, "qwen3_moe", f"megatron.moe_aux_loss_coeff={coefficient}",
        f"train.max_tokens_per_micro_batch={budget}", "train.logprob_max_tokens_per_micro_batch=4096",
        layouts={name: (LAYOUTS | MOE_LAYOUTS)[name] for name in names}, bins=bins,
    )  # fmt: skip
    (found,) = run_worker(fork_server, tmp_path, 4, plan)

    wanted = reference(tmp_path / "model", found["TP2·PP2"])
    balance, load = balance_gradients(tmp_path / "model", samples, bins, coefficient)
    for layout in names:
        assert found[layout]["load"].tolist() == pytest.approx(load, rel=1e-6)
        for name, grad in balance.items():
            assert relative(found[layout][name], wanted[name] + grad) < 1e-5, (layout, name)
    router = "grad.model.layers.0.mlp.gate.weight"
    assert balance[router].norm() > 0.01 * wanted[router].norm()  # else this would show nothing


def balance_gradients(folder, samples, bins, coefficient):
    """(gradients of sum_bins tokens · coefficient · E · sum_e f_e P_e / all tokens, busiest over mean load a layer)."""
    model = float64_model(folder)
    weights = file_weights(folder)
    for weight in weights.values():
        weight.requires_grad_()
    layers = model.module.model.layers
    probs = [[] for _ in layers]  # of each layer's router, for the sequences of a micro-batch [positions, E]
    for layer, found in zip(layers, probs, strict=True):
        layer.mlp.gate.register_forward_hook(lambda m, i, out, found=found: found.append(out[0].softmax(-1)))

    total = 0.0
    counts = torch.zeros(len(layers), 4)
    for members in bins:
        for found in probs:
            found.clear()
        for n in members:
            model.logits(weights, [samples[n]["prompt_ids"]], [samples[n]["response_ids"]], 1.0)
        for layer, found in enumerate(probs):
            responses = [p[len(samples[n]["prompt_ids"]) - 1 : -1] for n, p in zip(members, found, strict=True)]
            p = torch.cat(responses)  # [tokens of the micro-batch, E]
            chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1)
            total = total + len(p) * coefficient * 4 * (chosen.mean(0) / 2 * p.mean(0)).sum()
            counts[layer] += chosen.sum(0).float()
    tokens = sum(len(s["response_ids"]) for s in samples)
    return gradients(total / tokens, weights), (counts.amax(1) / counts.mean(1)).tolist()


# Layouts of recipes at their own number of ranks, 8 to 64: one in EVERY, all with --all-starts. The models have the
# recipe's family and as many layers, heads and experts as its layout needs. docs/dev/layouts.md has errors and sources.
# `make test-all` runs the first and the fifth.
EVERY = 4
WIDE = {"hidden": 256, "kv_heads": 8}  # 8 heads
EXPERTS = {"num_experts": 8, "kv_heads": 4}
BOTH = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# "ranks: sizes" → (family, entries of its config.json, options of Megatron-core).
STARTS = {
    "8: tp2 pp2 cp2 ep4": ("qwen3_moe", EXPERTS, ()),  # verl, Qwen3-30B-A3B with LoRA
    "8: tp2 pp2": ("qwen2", {}, ()),  # configs/qwen7b.yaml and qwen2.5_7b_tools.yaml; verl, Qwen3-8B
    "8: ep8": ("qwen3_moe", EXPERTS, ()),  # configs/qwen3_30b_a3b.yaml; verl, Qwen3-30B-A3B
    "32: pp2 vpp8 cp4 ep4": ("qwen3_moe", {**EXPERTS, "layers": 16}, ()),  # ROLL, Qwen3-30B-A3B
    "16: tp8": ("qwen2", WIDE, ()),  # configs/qwen2.5_32b.yaml
    "64: tp8 pp8": ("qwen2", {**WIDE, "layers": 8}, ()),
    "64: tp4 pp2 ep32": ("qwen3_moe", {**EXPERTS, "num_experts": 32}, ()),  # configs/qwen3_235b_a22b.yaml
    "64: tp4 pp8 ep8": ("qwen3_moe", {**EXPERTS, "layers": 14}, BOTH),  # the same with 94 layers in 8 stages
}


@pytest.mark.slow
def test_a_layout_at_its_own_size(fork_server, tmp_path, start, record_property):
    """An update, the digests of a push, a checkpoint that another layout reads."""
    family, options, fields = STARTS[start]
    nproc = int(start.partition(":")[0])
    sizes = {key: int(size) for key, size in re.findall(r"([a-z]+)(\d+)", start)}
    keys = [f"parallel.{key}={size}" for key, size in sizes.items()] + [f"megatron.{field}=true" for field in fields]
    plan = make_plan(tmp_path, family, layouts={"large": keys})
    layouts.make_model(tmp_path / "model", family, **options)
    samples = make_samples() * (1 + nproc // 32)  # so that every replica has some
    samples = [sample | {"group": n // 4} for n, sample in enumerate(samples)]
    (tmp_path / "samples.json").write_text(json.dumps(samples))

    ((found,),) = (each.values() for each in run_worker(fork_server, tmp_path, nproc, plan))
    error = check_update(found, reference(tmp_path / "model", found, samples))
    record_property("gradient, relative error", f"{error:.0e}")

    stored = {"large": sizes | {"megatron": dict.fromkeys(fields, True)}, "other": {"tp": 2, "pp": 2}}
    check_state(fork_server, tmp_path, "fp32", stored, nproc)
