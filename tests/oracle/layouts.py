"""Plans, runs and comparisons of an update on many layouts."""

import json

import make_tiny
import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
from grpo.run.preflight.memory_plan import count as count_memory
from tests.conftest import tiny_config
from tests.layout_worker import KINDS
from tests.oracle.reference import ALGO, TEMPERATURE, make_samples, reference, relative, worst_gradient

MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text")
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", *MOE)
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
GATHER = "megatron.moe_token_dispatcher_type=allgather"
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
    "EP4·DP4, allgather": ["parallel.ep=4", GATHER],
    "PP2·EP2·DP2, allgather": ["parallel.pp=2", "parallel.ep=2", GATHER],
    "EP2·TP2·ETP2·DP2, allgather": ["parallel.ep=2", "parallel.tp=2", "parallel.etp=2", GATHER],
}


def layouts_of(family) -> dict[str, list[str]]:
    legal = LAYOUTS | (MOE_LAYOUTS if family in MOE else DENSE_LAYOUTS)
    if family in LINEAR:  # no rank has half a group of heads
        legal = {name: keys for name, keys in legal.items() if name != "TP4"}
    return legal


def make_model(folder, family, dtype="fp32", **options):
    """A 4-layer model in which every parameter, norms and biases too, has a value of its own, rounded to the dtype."""
    options = {"tied": False, "hidden": 128, "layers": 4, **CONFIGS.get(family, {}), **options}
    make_tiny.save_model(folder, make_tiny.char_tokenizer("0123456789>+-="), family, ffn=2, **options)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(7)
    weights |= {name: w - 3 for name, w in weights.items() if name.endswith("A_log")}  # a state that lasts
    weights = {name: w + 0.05 * torch.randn(w.shape, generator=noise) for name, w in sorted(weights.items())}
    weights = {name: w.to(bridge.DTYPES[dtype]).float() for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_plan(folder, family, *overrides, dtype="fp32", **plan) -> dict:
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


def run_worker(server, folder, nproc, *plans, script="tests/layout_worker.py", **env) -> list[dict[str, dict]]:
    """Of each plan, layout → what tests/layout_worker.py found on it; `server` is the fork_server."""
    file = folder / "plans.json"
    printed = folder / "printed.txt"
    file.write_text(json.dumps(plans))
    assert server.run(printed, script, str(file), nproc=nproc, seconds=1800, **env) == 0, printed.read_text()
    return [{name: load_file(f"{plan['out']}/{name}.safetensors") for name in plan["layouts"]} for plan in plans]


Results = dict[str, tuple[dict, dict, dict]]  # family → (what each layout gave, the reference, the worker's plan)


def run_cases(request, server, tmp_path_factory, *overrides, more=None, lora=None) -> Results:
    """Run the layouts of all cases of the module of a test; `more` are {name: overrides} of layouts of its own."""
    chosen = {}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.module is request.module and "layout" in params:
            family = params["family"]
            layout = params["layout"]
            chosen.setdefault(family, {})[layout] = (layouts_of(family) | (more or {}))[layout]

    results = {}
    for family, layouts in chosen.items():  # one after the other: experts' groups leave threads behind
        folder = tmp_path_factory.mktemp(family)
        plan = make_plan(folder, family, *overrides, layouts=layouts)
        (found,) = run_worker(server, folder, 4, plan)
        results[family] = found, reference(folder / "model", next(iter(found.values())), lora=lora), plan
    return results


def check_update(found, wanted) -> float:
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


def check_held(held, plan, layout):
    """--dry-run plans what each of the 4 ranks holds; [ranks, 4]."""
    cfg = tiny_config(*plan["overrides"], *plan["layouts"][layout])
    planned = [count_memory(cfg, 4, rank).gpu for rank in range(4)]
    assert held.tolist() == [[gpu.get(kind, 0) for kind in KINDS] for gpu in planned]


# In `make test`: each axis, and pairs of axes that meet in one tensor or one schedule; more of them in test_lora.py.
QUICK = {
    "qwen2": ("TP4", "PP2·CP2", "TP2·PP2·VPP2, overlap, full recompute"),
    "qwen3_moe": ("CP2·EP2·DP2", "PP2·EP2·DP2, allgather"),
    "qwen3_5_text": ("TP2·CP2",),
}
ON_GPUS = {  # there besides
    "qwen2": ("TP2·CP2", "TP2·DP2, without SP"),
    "qwen3_moe": ("EP4·DP4, overlap", "EP2·TP2·ETP1·DP2", "EP2·TP2·ETP2·DP2", "PP2·EP2·DP2"),
}


def marks_of(family, layout) -> list[pytest.MarkDecorator]:
    is_quick = layout in QUICK.get(family, ())
    marks = [] if is_quick else [pytest.mark.slow]
    return marks + ([pytest.mark.gpu(ranks=4)] if is_quick or layout in ON_GPUS.get(family, ()) else [])


# Families whose layers, but for single ones, are those of qwen2, qwen3_moe and qwen3_5_text, which have all layouts:
# one layout an axis.
ALIKE = ("llama", "mistral", "qwen3", "mixtral", "qwen2_moe", "qwen3_5_moe_text")
EACH_AXIS = ("TP2·DP2", "CP2·DP2", "PP2·VPP2·DP2", "EP2·DP4", "EP2·TP2·ETP2·DP2")

CASES = [
    pytest.param(family, layout, marks=marks_of(family, layout))
    for family in FAMILIES
    for layout in layouts_of(family)
    if family not in ALIKE or layout in EACH_AXIS
]


def whole_error(found, wanted) -> float:
    """The relative error of the whole gradient."""
    names = [name for name in wanted if name.startswith("grad.")]
    return relative(*(torch.cat([side[name].flatten() for name in names]) for side in (found, wanted)))
