"""Whole runs of train_grpo.py with all tensors on a GPU that is not there (tests/gpu_rehearsal): the code that only
GPUs run. Each gives the metrics that the CPU's own run gives from the same answers, and waits for the GPU nowhere but
where WAITS says. Kernels, NCCL and vLLM are not run."""

import json
import shutil
from dataclasses import dataclass, field

import pytest

from tests.compare_runs import EXCLUDED
from tests.conftest import tiny_model
from tests.oracle.layouts import FULL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles tests/gpu_rehearsal/shim.cpp"),
]
SCRIPT = "tests/gpu_rehearsal/rehearse.py"
ALL = (
    "rollout.max_logp_gap=inf", "rollout.prompts_per_step=4", "rollout.group_size=4", "train.steps=2",
    "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=64", "train.warmup_steps=0",
)  # fmt: skip
KL = ("algo.kl_coef=0.05", "algo.reference_on=host", "train.updates_per_step=2")


@dataclass(frozen=True)
class Run:
    """A run of the script: ranks, overrides beside ALL, architecture, waits besides WAITS. None counts no waits."""

    ranks: int = 1
    overrides: tuple[str, ...] = ()
    arch: str = "qwen2"
    waits: dict | None = field(default_factory=dict)


CLOCK = {("grpo/run/clock.py __call__", "synchronize"): (1, "step")}
# phase → {(place, kind): (number, unit)}. "passes" is inside Megatron's schedule: the forward and backward passes.
WAITS = {
    **dict.fromkeys(("rollout", "reward", "gather", "sleep"), CLOCK),
    "wait": {
        ("grpo/run/clock.py __call__", "synchronize"): (2, "step"),
        ("grpo/parts/base/ranks.py on_any_rank", "copy to the GPU"): (2, "step"),
        ("grpo/parts/base/ranks.py on_any_rank", "_local_scalar_dense"): (2, "step"),
    },
    "logprob": CLOCK | {("train_grpo.py score", "copy from the GPU"): (1, "log-prob pass")},
    "train": {
        ("grpo/run/clock.py __call__", "synchronize"): (1, "update"),
        ("grpo/step/metrics.py add_up", "copy from the GPU"): (1, "update"),
        ("grpo/parts/model/optimizer_state.py own_steps", "_local_scalar_dense"): (1, "update"),
        ("grpo/parts/model/routes.py reduce_counts", "copy from the GPU"): (1, "update"),
        ("train_grpo.py score", "copy from the GPU"): (1, "log-prob pass"),  # rounding, at the first update of a start
        ("clip_grads.py get_grad_norm_fp32", "_local_scalar_dense"): (1, "update"),
        ("optimizer.py has_grad_norm_group", "_local_scalar_dense"): (1, "update"),  # Megatron 0.19, at the first one
        ("optimizer.py has_grad_norm_group", "copy to the GPU"): (1, "update"),
        ("distributed_data_parallel.py restore_grad_buffers", "synchronize"): (1, "update"),
    },
    "train, passes": {("finalize_model_grads.py finalize_model_grads", "_local_scalar_dense"): (1, "update")},
    "sync": CLOCK
    | {
        ("grpo/parts/engine/push_check.py stacked", "copy from the GPU"): (1, "step"),
        ("distributed_data_parallel.py offload_grad_buffers", "synchronize"): (1, "step"),
        ("distributed_data_parallel.py offload_grad_buffers", "empty_cache"): (1, "step"),
        ("grpo/parts/model/offload.py offload_state", "synchronize"): (1, "step"),
        ("grpo/parts/model/offload.py offload_state", "empty_cache"): (1, "step"),
    },
    "step": {
        ("grpo/step/metrics.py expert_load", "copy from the GPU"): (1, "step"),
        ("grpo/run/guard.py some_entries", "copy from the GPU"): (1, "step"),  # of the reference
        ("grpo/parts/model/optimizer_state.py own_steps", "_local_scalar_dense"): (1, "step"),  # Adam's, before
    },
}
NOT_COUNTED = ("start", "build", "save")  # the start, and files

LAYERS = 2
HOST = ("megatron.optimizer_cpu_offload=true", "megatron.use_precision_aware_optimizer=true", "model.dtype=bf16")
REPLAY = ("algo.replay_routes=true", *FULL)


def of_experts(forwards):
    """Waits of a rank with experts, which `forwards` times computes a micro-batch, 2 where it is recomputed."""
    layers = LAYERS * forwards
    return {
        "train, passes": {
            ("moe_utils.py permute", "masked_select"): (2 * layers, "micro-batch"),
            ("token_dispatcher.py _maybe_dtoh_and_synchronize", "synchronize"): (layers, "micro-batch"),
        },
    }


SHAPES = {  # of the rows, which pipeline stages send ahead of them
    "train, passes": {
        ("p2p_communication.py _communicate_shapes", kind): (3, "training micro-batch")
        for kind in ("copy from the GPU", "copy to the GPU", "synchronize")
    }
}
ON_HOST = {
    "train": {
        ("hybrid_optimizer.py step", "synchronize"): (1, "update"),
        ("hybrid_optimizer.py param_copy_back_gpu_hook", "copy to the GPU"): (16, "update"),  # 16 weights
    }
}
RUNS = {
    "dense, KL, two updates": Run(overrides=KL),
    "the same in bf16, offload": Run(
        overrides=("model.dtype=bf16", "model.fp32_head=true", "train.offload=optimizer", *KL)
    ),
    "experts, replayed routes, recompute": Run(overrides=REPLAY, arch="qwen3_moe", waits=of_experts(forwards=2)),
    "optimizer on the host, precision-aware": Run(overrides=HOST, waits=ON_HOST),
    "two ranks, tp and experts": Run(2, ("parallel.tp=2", "parallel.ep=2"), "qwen3_moe", waits=of_experts(forwards=1)),
    "two ranks, pipeline": Run(2, ("parallel.pp=2",), waits=SHAPES),
    "two ranks, cp": Run(2, ("parallel.cp=2",)),
    "LoRA": Run(overrides=("lora.rank=4",)),
    "fp16, an overflow": Run(overrides=("model.dtype=fp16", "megatron.initial_loss_scale=65536"), waits=None),
}
DENSE = RUNS["dense, KL, two updates"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """options(run) → its overrides, with a model of its architecture."""
    folders = {arch: tiny_model(tmp_path_factory.mktemp(arch), arch) for arch in ("qwen2", "qwen3_moe")}
    return lambda run: (f"model.path={folders[run.arch]}", *ALL, *run.overrides)


def differences(ours: list[dict], expected: list[dict], run) -> list[str]:
    """What differs in the metrics of two runs, step by step; not what depends on the machine."""
    found = []
    excluded, tolerance = EXCLUDED, 1e-5
    if {"model.dtype=bf16", "model.dtype=fp16"} & {*run.overrides}:  # they round, and attention pads on the CPU alone
        excluded, tolerance = (*EXCLUDED, "pack/"), 0.03
    for row, other in zip(ours, expected, strict=True):
        for name in {name for name in row.keys() | other.keys() if not name.startswith(excluded)}:
            wanted = other[name]
            if row[name] != (wanted if wanted is None else pytest.approx(wanted, rel=tolerance, abs=tolerance)):
                found.append(f"step {row['step']}, {name}: {row[name]} on the GPU, {other[name]} on the CPU")
    return found


def unknown_waits(training, run) -> list[str]:
    """The waits of each rank that neither WAITS nor the run allows."""
    found = []
    for rank in range(run.ranks):
        noted = json.loads((training.out / f"waits_{rank}.json").read_text())
        units = noted["units"]
        units["micro-batch"] = units["training micro-batch"] + units.get("log-prob micro-batch", 0)
        for phase, place, kind, number in noted["counts"]:
            known = WAITS.get(phase, {}) | run.waits.get(phase, {})
            limit, unit = known.get((place, kind), (0, "step"))
            if phase not in NOT_COUNTED and number > limit * units.get(unit, 0):
                found.append(f"rank {rank}, {phase}: {place} waits {number} times ({kind}); {units}")
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsed_run(start, options, train_forked, tmp_path, name):
    run = RUNS[name]
    on_gpu = start(run.ranks, *options(run), script=SCRIPT, out=tmp_path / "gpu")
    on_cpu = train_forked(run.ranks, "--on", "cpu", *options(run), script=SCRIPT)
    assert on_gpu.end() == on_cpu.code == 0, on_gpu.text + on_cpu.text
    assert not differences(on_gpu.metrics, on_cpu.metrics, run)
    assert run.waits is None or not unknown_waits(on_gpu, run), "if the wait is meant, it belongs into WAITS"
    assert "the update is not what its formulas say" not in on_gpu.text
