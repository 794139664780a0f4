"""Every layout and every model family: the gradient of each parameter, the loss and the log-probs of one update equal
those of plain transformers in float64, one unpadded sequence at a time; weights come back bit by bit.

The table in docs/dev/layouts.md is written by this file when all of it runs (`make test-all`).
"""

import json
import math
from collections.abc import Callable
from functools import partial

import make_tiny
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
from support.proof import formulas
from tests.conftest import REPO, tiny_config
from tests.layout_worker import KINDS, one_layout
from tests.oracle.plain import ALGO, TEMPERATURE, float64_model, hf_gradients, reference, relative, worst_gradient
from tools.plan import count as count_memory

MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MOE)
CONFIGS = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }},
    "mistral": {"sliding_window": 8, "kv_heads": 4},  # answers are longer; the others have 2 key-value heads
    "mixtral": {"sliding_window": 8},
    "qwen3": {"tied": True},
}  # fmt: skip
OVERLAP = ["megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true"]
FULL = [f"megatron.recompute_{k}" for k in ("granularity=full", "method=uniform", "num_layers=1")]
STAGES = "megatron.pipeline_model_parallel_layout"
LAYOUTS = {  # on 4 ranks
    "DP4": [],
    "TP2·DP2": ["parallel.tp=2"],
    "TP4": ["parallel.tp=4"],
    "PP2·DP2": ["parallel.pp=2"],
    "TP2·PP2": ["parallel.tp=2", "parallel.pp=2"],
    "CP2·DP2": ["parallel.cp=2"],
    "TP2·CP2": ["parallel.tp=2", "parallel.cp=2"],
    "PP2·CP2": ["parallel.pp=2", "parallel.cp=2"],
    "CP4": ["parallel.cp=4"],
    "PP2·DP2, 1 and 3 layers": ["parallel.pp=2", "megatron.num_layers_in_first_pipeline_stage=1"],
    "PP4, 0, 2, 1 and 1 layers": ["parallel.pp=4", f"{STAGES}=E|tt|t|tL"],
    "PP2·VPP2·DP2": ["parallel.pp=2", "parallel.vpp=2"],
    "PP2·VPP2·DP2, 2 + 1 and 0 + 1 layers": ["parallel.pp=2", "parallel.vpp=2", f"{STAGES}=Ett||t|tL"],
    "TP2·PP2·VPP2, overlap, full recompute": ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2", *OVERLAP, *FULL],
    "CP2·DP2, overlap, selective recompute": ["parallel.cp=2", *OVERLAP, "megatron.recompute_granularity=selective"],
}
DENSE_LAYOUTS = {"TP2·DP2, without SP": ["parallel.tp=2", "parallel.sp=false"]}
MOE_LAYOUTS = {
    "EP2·DP4": ["parallel.ep=2"],
    "EP4·DP4, overlap": ["parallel.ep=4", *OVERLAP],
    "EP2·TP2·ETP1·DP2": ["parallel.ep=2", "parallel.tp=2"],
    "EP2·TP2·ETP2·DP2": ["parallel.ep=2", "parallel.tp=2", "parallel.etp=2"],
    "PP2·EP2·DP2": ["parallel.pp=2", "parallel.ep=2"],
    "CP2·EP2·DP2": ["parallel.cp=2", "parallel.ep=2"],
}
NORMS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def layouts_of(family: str) -> dict[str, list[str]]:
    return LAYOUTS | (MOE_LAYOUTS if family in MOE else DENSE_LAYOUTS)


def make_model(folder, family: str, dtype: str = "fp32", **options):
    """A 4-layer model in which every parameter, norms and biases too, has a value of its own, rounded to the dtype."""
    options = {"tied": False, "hidden": 128, "layers": 4, **CONFIGS.get(family, {}), **options}
    make_tiny.save_model(folder, make_tiny.char_tokenizer("0123456789>+-="), family, ffn=2, **options)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(7)
    weights = {name: w + 0.05 * torch.randn(w.shape, generator=noise) for name, w in sorted(weights.items())}
    weights = {name: w.to(bridge.DTYPES[dtype]).float() for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_samples() -> list[dict]:
    """14 answers of 1 to 30 tokens to four prompts, of one token and more, and three of one token."""
    rng = np.random.default_rng(4)
    samples = []
    prompts = [rng.integers(2, 16, length) for length in (8, 1, 5, 6)]
    for n in range(14):
        prompt, response = prompts[n // 4], rng.integers(0, 16, 1 if n % 5 == 0 else rng.integers(1, 31))
        sample = {"group": n // 4, "prompt_ids": prompt.tolist(), "response_ids": response.tolist(), "finished": True}
        sample |= {"rollout_logp": rng.normal(-2.5, 0.5, len(response)).tolist(), "advantage": rng.normal()}
        samples.append(sample | {"text": "", "source": "s"})
    return samples


def make_plan(folder, family: str, *overrides: str, dtype: str = "fp32", **plan) -> dict:
    """A plan for tests/layout_worker.py, with a model of the family and samples in the folder."""
    make_model(folder / "model", family, dtype)
    (folder / "samples.json").write_text(json.dumps(make_samples()))
    common = [
        f"model.path={folder / 'model'}", "data.train=unused", "data.max_prompt_tokens=8", "rollout.max_new_tokens=32",
        f"rollout.temperature={TEMPERATURE}", *(f"algo.{key}={value}" for key, value in ALGO.items()),
        "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=40",
        f"model.dtype={dtype}",
    ]  # fmt: skip
    return {"samples": str(folder / "samples.json"), "out": str(folder), "overrides": [*common, *overrides], **plan}


def run_worker(
    server, folder, nproc: int, *plans: dict, script="tests/layout_worker.py", **env: str
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Of each plan, layout → what tests/layout_worker.py found on it; `server` is the fork_server."""
    file, printed = folder / "plans.json", folder / "printed.txt"
    file.write_text(json.dumps(plans))
    assert server.run(printed, script, str(file), nproc=nproc, seconds=1800, **env) == 0, printed.read_text()
    return [{name: load_file(f"{plan['out']}/{name}.safetensors") for name in plan["layouts"]} for plan in plans]


Results = dict[str, tuple[dict, dict, dict]]  # family → (what each layout gave, the reference, the worker's plan)


def run_asked(request, server, tmp_path_factory, legal: Callable, wanted_of: Callable, *overrides: str) -> Results:
    """Run the layouts of all cases of the test that asks; `legal(family)` are {name: overrides} of layouts, and
    `wanted_of(model folder, what one layout gave)` is the reference."""
    asked: dict[str, dict] = {}
    for item in request.session.items:
        chosen = item.callspec.params if hasattr(item, "callspec") else {}
        if item.module is request.module and "layout" in chosen:
            family, layout = chosen["family"], chosen["layout"]
            asked.setdefault(family, {})[layout] = legal(family)[layout]
    results = {}
    for family, layouts in asked.items():  # one after the other: experts' groups leave threads behind
        folder = tmp_path_factory.mktemp(family)
        plan = make_plan(folder, family, *overrides, layouts=layouts)
        (found,) = run_worker(server, folder, 4, plan)
        results[family] = found, wanted_of(folder / "model", next(iter(found.values()))), plan
    return results


def check_update(found: dict, wanted: dict) -> float:
    """Compare an update with its reference; returns the largest relative error of a gradient."""
    assert {k for k in found if k.startswith("grad.")} == {k for k in wanted if k.startswith("grad.")}
    assert found["same"] == 1  # loading and exporting gave back every weight bit by bit
    assert (found["logp"] - wanted["logp"]).abs().max() < 1e-4
    assert found["loss"].item() == pytest.approx(wanted["loss"], rel=1e-5)
    error, name = worst_gradient(found, wanted)
    assert error < 1e-5, name
    norm = torch.stack([g.norm() for name, g in wanted.items() if name.startswith("grad.")]).norm().item()
    assert found["grad_norm"].item() == pytest.approx(norm, rel=1e-5)
    return error


def check_held(held: torch.Tensor, plan: dict, layout: str) -> None:
    """--dry-run plans what each of the 4 ranks holds; [ranks, 4]."""
    cfg = tiny_config(*plan["overrides"], *plan["layouts"][layout])
    planned = [count_memory(cfg, 4, rank).gpu for rank in range(4)]
    assert held.tolist() == [[gpu.get(kind, 0) for kind in KINDS] for gpu in planned]


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory) -> Results:
    known = run_asked(
        request, fork_server, tmp_path_factory, layouts_of,
        lambda folder, given: reference(folder, make_samples(), given),
    )  # fmt: skip
    if sum(len(found) for found, _, _ in known.values()) == len(CASES):
        write_table(known)
    return known


# In `make test`: each axis, and each pair of axes that meets in one tensor or one schedule.
QUICK = {
    "qwen2": ("TP2·DP2, without SP", "TP2·CP2", "TP4", "PP2·CP2", "TP2·PP2·VPP2, overlap, full recompute"),
    "qwen3_moe": ("EP4·DP4, overlap", "EP2·TP2·ETP1·DP2", "EP2·TP2·ETP2·DP2", "PP2·EP2·DP2", "CP2·EP2·DP2"),
}


CASES = [
    pytest.param(
        family, layout, marks=pytest.mark.gpu(ranks=4) if layout in QUICK.get(family, ()) else pytest.mark.slow
    )
    for family in FAMILIES
    for layout in layouts_of(family)
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_update_equals_plain_transformers(results, family, layout):
    found, wanted, plan = results[family]
    assert found[layout]["shared"] > 0  # answers shared their prompt
    check_update(found[layout], wanted)
    check_held(found[layout]["held"], plan, layout)


HALF_ON_GPU = pytest.mark.gpu(
    only=True
)  # FlashAttention and grouped_mm; a token near a tie goes to another expert (0.12)


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [
        pytest.param("mistral", "fp32", 1e-4, marks=pytest.mark.gpu),
        pytest.param("qwen3_moe", "fp32", 1e-4, marks=pytest.mark.gpu),
        pytest.param("qwen2", "bf16", 0.05, marks=HALF_ON_GPU),
        pytest.param("qwen2", "fp16", 0.01, marks=HALF_ON_GPU),
        pytest.param("mistral", "fp16", 0.01, marks=HALF_ON_GPU),
        pytest.param("qwen3_moe", "fp16", 0.1, marks=HALF_ON_GPU),
        pytest.param("mistral", "bf16", 0.05, marks=HALF_ON_GPU),
        pytest.param("qwen3_moe", "bf16", 0.25, marks=HALF_ON_GPU),
    ],
)
def test_one_rank_equals_plain_transformers(world, tmp_path, family, dtype, bound, record_property):
    """The whole gradient, from weights that are rounded to the dtype."""
    found = one_layout(make_plan(tmp_path, family, dtype=dtype, layouts={"one": []}), "one")
    error = whole_error(found, reference(tmp_path / "model", make_samples(), found))
    record_property("gradient, relative error", f"{error:.1e}")
    assert error < bound


# Relative errors of the whole gradient, at most; measured on all layouts: docs/dev/layouts.md.
HALF = {"fp16": 0.01, "bf16": 0.2}
NO_CLIP = {"clip_low": 100.0, "clip_high": 100.0}  # where rounding moves a ratio over a bound, the gradient jumps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_within_its_rounding_on_every_axis(fork_server, tmp_path, family, dtype):
    """Weights are rounded beforehand; activations, and gradients between layers, are in the dtype."""
    axes = ("TP2·CP2", "PP2·VPP2·DP2", *(["EP2·TP2·ETP2·DP2"] if family in MOE else []))
    layouts = {name: layouts_of(family)[name] for name in axes}
    keys = [f"algo.{key}={value:g}" for key, value in NO_CLIP.items()]
    (found,) = run_worker(fork_server, tmp_path, 4, make_plan(tmp_path, family, *keys, dtype=dtype, layouts=layouts))
    wanted = reference(tmp_path / "model", make_samples(), found[axes[0]], **NO_CLIP)
    for layout in layouts:
        assert whole_error(found[layout], wanted) < HALF[dtype], layout


def whole_error(found: dict, wanted: dict) -> float:
    """The relative error of the whole gradient."""
    names = [name for name in wanted if name.startswith("grad.")]
    return relative(*(torch.cat([side[name].flatten() for name in names]) for side in (found, wanted)))


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
    make_model(tmp_path / "model", "qwen2", **options)
    ((found,),) = (each.values() for each in run_worker(fork_server, tmp_path, 4, plan))
    check_update(found, reference(tmp_path / "model", make_samples(), found))
    check_held(found["held"], plan, "odd")


@pytest.mark.slow
def test_every_loss_and_normalisation_does_not_depend_on_the_layout(fork_server, tmp_path):
    """On TP2·PP2 with uneven micro-batches, with truncated importance sampling and the straight-through KL."""
    common = {"kl": "k3+", "correction": "tis", "correction_high": 1.1}
    cases = {f"{loss} {norm}": {"loss": loss, "loss_norm": norm} for loss in formulas.LOSSES for norm in NORMS}
    for algo in cases.values():
        if algo["loss"] in ("ipo", "dppo_tv"):
            algo |= {"clip_low": 0.002, "clip_high": 0.002}  # the models' probabilities are small
    layouts = {name: [f"algo.{key}={value}" for key, value in algo.items()] for name, algo in cases.items()}
    keys = [f"algo.{key}={value}" for key, value in common.items()]
    plan = make_plan(tmp_path, "qwen2", *keys, "parallel.tp=2", "parallel.pp=2", layouts=layouts)
    (found,) = run_worker(fork_server, tmp_path, 4, plan)
    for name, algo in cases.items():
        wanted = reference(tmp_path / "model", make_samples(), found[name], **algo, **common)
        assert found[name]["loss"].item() == pytest.approx(wanted["loss"], rel=1e-5), name
        error, parameter = worst_gradient(found[name], wanted)
        assert error < 1e-5, (name, parameter)


@pytest.mark.slow
def test_balancing_loss_does_not_depend_on_the_layout(fork_server, tmp_path):
    """Switch's loss over the response tokens of each micro-batch, weighted by their number; the same two micro-batches
    on every layout, against transformers' router logits in float64."""
    samples = make_samples()
    lengths_N = np.array([len(s["prompt_ids"]) + len(s["response_ids"]) - 1 for s in samples])
    bins, coefficient = [[*range(0, 14, 2)], [*range(1, 14, 2)]], 0.5
    budget = max(math.ceil(lengths_N[members].sum() / 4) * 4 for members in bins)  # a multiple of tp · cp
    layouts = ("TP2·PP2", "TP2·CP2", "PP2·CP2", "EP2·TP2·ETP1·DP2", "EP2·TP2·ETP2·DP2", "PP2·EP2·DP2")
    plan = make_plan(
        tmp_path, "qwen3_moe", f"megatron.moe_aux_loss_coeff={coefficient}",
        f"train.max_tokens_per_micro_batch={budget}", "train.logprob_max_tokens_per_micro_batch=4096",
        layouts={name: (LAYOUTS | MOE_LAYOUTS)[name] for name in layouts}, bins=bins,
    )  # fmt: skip
    (found,) = run_worker(fork_server, tmp_path, 4, plan)
    wanted = reference(tmp_path / "model", samples, found["TP2·PP2"])
    balance, load = balance_gradients(tmp_path / "model", samples, bins, coefficient)
    for layout in layouts:
        assert found[layout]["load"].tolist() == pytest.approx(load, rel=1e-6)
        for name, grad in balance.items():
            assert relative(found[layout][name], wanted[name] + grad) < 1e-5, (layout, name)
    router = "grad.model.layers.0.mlp.gate.weight"
    assert balance[router].norm() > 0.01 * wanted[router].norm()  # else this would show nothing


def balance_gradients(folder, samples: list[dict], bins: list[list[int]], coefficient: float):
    """(gradients of sum_bins tokens · coefficient · E · sum_e f_e P_e / all tokens, busiest over mean load a layer)."""
    model = float64_model(folder)
    logits = {}  # layer → router logits of the sequence just run
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(lambda m, i, out, layer=layer: logits.update({layer: out[0]}))
    tokens, counts = sum(len(s["response_ids"]) for s in samples), torch.zeros(len(model.model.layers), 4)
    for members in bins:
        probs = {layer: [] for layer in range(len(model.model.layers))}
        for s in (samples[n] for n in members):
            model(torch.tensor([s["prompt_ids"] + s["response_ids"]]))
            for layer, found in logits.items():
                probs[layer].append(found[len(s["prompt_ids"]) - 1 : -1].softmax(-1))
        loss = 0.0
        for layer, parts in probs.items():
            p = torch.cat(parts)  # [tokens of the micro-batch, E]
            chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1)
            loss = loss + len(p) * coefficient * 4 * (chosen.mean(0) / 2 * p.mean(0)).sum()
            counts[layer] += chosen.sum(0).float()
        (loss / tokens).backward()
    return hf_gradients(model), (counts.amax(1) / counts.mean(1)).tolist()


def write_table(known: Results) -> None:
    """The table in docs/dev/layouts.md: the largest relative error of a parameter's gradient, layouts × families."""
    page = REPO / "docs/dev/layouts.md"
    lines = [f"| | {' | '.join(FAMILIES)} |", "|---" * (len(FAMILIES) + 1) + "|"]
    for layout in [*LAYOUTS, *DENSE_LAYOUTS, *MOE_LAYOUTS]:
        cells = ["–"] * len(FAMILIES)
        for number, family in enumerate(FAMILIES):
            found, wanted, _ = known[family]
            if layout in found:
                cells[number] = f"{worst_gradient(found[layout], wanted)[0]:.0e}"
        lines.append(f"| {layout} | {' | '.join(cells)} |")
    page.write_text(page.read_text().rpartition("| | ")[0] + "\n".join(lines) + "\n")


# tests/layout_worker.py on the kernels of vLLM's batch-invariant mode for a FAMILY of GPUs, put under a CPU.
INVARIANT = """
import os, runpy
from types import SimpleNamespace
from vllm.model_executor.determinism import batch_invariant

batch_invariant.softmax = lambda x, dim=-1: (x - x.logsumexp(dim, keepdim=True)).exp()
batch_invariant.log_softmax = lambda x, dim=-1: x - x.logsumexp(dim, keepdim=True)
batch_invariant.mean_dim = lambda x, dim, keepdim: x.sum(dim, keepdim=keepdim) / x.shape[dim]
batch_invariant.bmm_batch_invariant = lambda a, b: (a[:, :, :, None] * b[:, None]).sum(2)
batch_invariant.matmul_persistent = lambda a, b, bias=None: (a[:, :, None] * b).sum(1)
batch_invariant._resolve_block_sizes = lambda: None
batch_invariant.current_platform = SimpleNamespace(
    dispatch_key="CPU", is_cuda_alike=lambda: True, is_rocm=lambda: False, is_xpu=lambda: False, is_cuda=lambda: False,
    is_device_capability_family=lambda family: family == int(os.environ["FAMILY"]),
)
batch_invariant.enable_batch_invariant_mode()
runpy.run_path("tests/layout_worker.py", run_name="__main__")
"""


@pytest.mark.slow
def test_vllms_batch_invariance_keeps_gradients_from_capability_9_on(fork_server, tmp_path):
    """Below, rollout.exact=true is refused."""
    (tmp_path / "invariant.py").write_text(INVARIANT)
    plan = make_plan(tmp_path, "qwen3_moe", layouts={"tp2": ["parallel.tp=2"]})
    make_model(tmp_path / "model", "qwen3_moe")
    (tmp_path / "samples.json").write_text(json.dumps(make_samples()))
    run = partial(run_worker, fork_server, tmp_path, 2, plan, script=tmp_path / "invariant.py")
    with pytest.raises(AssertionError, match="matmul_batch_invariant requires both inputs be at least 2D"):
        run(FAMILY="80")
    ((found,),) = (each.values() for each in run(FAMILY="90"))
    check_update(found, reference(tmp_path / "model", make_samples(), found))
