"""The checks of tools/gpu_check.py as data: commands, rows, bounds and remedies.

Imports no torch: a check runs in separate processes.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks import works

FOLDER = "GPU_CHECK_FOLDER"  # environment variable: the folder that a check writes into
ROWS = "rows.jsonl"  # file in that folder, with {"row", "figure", "note"} per line


class NotRun(Exception):
    """A check cannot run here, for the given reason; not a failure of the machine."""


class Row(NamedTuple):
    """A row of the table: what is measured, its bound, and the remedy if it fails."""

    name: str
    sign: str  # "≤" or "≥": how the figure must compare with the bound
    bound: float
    unit: str
    remedy: str
    gpu: bool = False  # needs a GPU


class Check(NamedTuple):
    """A torchrun command, and the rows that it answers."""

    name: str
    seconds: float  # time limit
    expected: float  # seconds on one GPU: an estimate, not measured on a GPU
    rows: list[Row]
    script: str
    arguments: tuple[str, ...] = ()  # {own}: folder of the check, {shared}: folder of models, {prompts}: 32 per rank
    read: Callable = lambda outcome: read_lines(outcome.folder / ROWS)  # Outcome → answers; raises NotRun
    alone: bool = False  # one rank is enough
    code: int = 0  # expected exit code of torchrun
    least_ranks: int = 1
    least_gib: float = 0.0  # memory of a GPU


# ---------------------------------------------------------------- reading results


def read_lines(path: Path) -> list[dict]:
    """Return the objects of a JSON lines file without an incomplete last line; [] if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_demo(outcome) -> Iterator[dict]:
    """Yield the final reward and the largest log-prob gap of a run of the demo."""
    if outcome.code != 0:
        return
    steps = [m for m in read_lines(outcome.folder / "out/metrics.jsonl") if m.get("reward/mean") is not None]
    rewards = [m["reward/mean"] for m in steps]
    gaps = [m["logp_gap/mean"] for m in steps]
    note = f"{len(steps)} steps, {median(m['time/step'] for m in steps):.2f} s each, from {rewards[0]:.2f}"
    yield {"row": DEMO[0].name, "figure": mean(rewards[-10:]), "note": note}
    yield {"row": DEMO[1].name, "figure": max(gaps), "note": f"median of the steps {median(gaps):.1e}"}


def read_killed(outcome) -> Iterator[dict]:
    """Yield, for a run whose last rank killed itself, the time until all ended, and whether torchrun named the rank.

    A run that the time limit ended has answers only if it was beyond the bound by then.
    """
    killed = outcome.folder / "killed"
    if not killed.exists():
        return
    blamed = re.search(r"exitcode\s*: -9|Signal 9 \(SIGKILL\)", outcome.text)
    others = re.findall(r"error: (rank \d+, in the phase \w+: another rank is gone)|(watchdog: no rank)", outcome.text)
    said = next(
        (first or second for first, second in others), "torchrun ended the others before they reported an error"
    )
    seconds = outcome.ended - killed.stat().st_mtime
    if outcome.code is None and seconds <= KILLED[0].bound:
        return
    yield {"row": KILLED[0].name, "figure": seconds, "note": said}
    note = blamed[0] if blamed else "not in its report"
    yield {"row": KILLED[1].name, "figure": 0.0 if blamed is None else 1.0, "note": note}


def read_bench(outcome, rows: list[Row]) -> Iterator[dict]:
    """Yield MFU of training, sampling rate ÷ bare vLLM and seconds of the push from a run of benchmarks/ours.py."""
    no_room = re.search(r"error: (--model .* GiB are free)", outcome.text)
    if no_room:
        raise NotRun(no_room[1])
    steps = works.read_results(outcome.folder / "bench.csv")
    table = works.summary(steps)
    rates = [step["tokens_per_s"] * step["step_s"] / step["rollout_s"] for step in steps]
    share = median(rate / step["bare_tokens_per_s"] for rate, step in zip(rates, steps, strict=True))
    phases = ", ".join(f"{phase} {table[f'{phase} s']:.2g}" for phase in ("rollout", "logprob", "train", "sync"))
    peak = max(table[f"{phase} peak GiB"] for phase in works.PHASES)
    notes = [
        f"step {table['step s']:.2f} s: {phases}; peak {peak:.1f} GiB",
        f"{median(rates):.0f} tokens/s, vLLM alone {table['bare vLLM tokens/s']:.0f}",
        f"the push check takes {table['push check % of step']:.1f} % of the step",
    ]
    for row, figure, note in zip(rows, (table["MFU of train %"], share, table["sync s"]), notes, strict=True):
        yield {"row": row.name, "figure": figure, "note": note}


def machine_row(rows: list[dict]) -> tuple[Row, float, str]:
    """Return (row, figure, note) for the findings of tools/doctor.py."""
    stops = [f"{row['item']}: {row['found']}" for row in rows if row["verdict"] == "STOP"]
    row = Row("machine", "≤", 0, "things that stop a run", "python -m tools.doctor names the remedy of each")
    return row, len(stops), "; ".join(stops)


# ---------------------------------------------------------------- rows

KERNEL = "use another torch; until then model.flash_attention=false pads sequences, slower"
GROUPED = "megatron.moe_grouped_gemm=false computes one expert after the other"
GRADIENT = "mend attention or experts if they failed above; else suspect CUDA and NCCL. Do not train on this machine"
PUSH = "rollout.sleep_level=1; with experts rollout.vllm.moe_backend=triton; rollout.vllm.enforce_eager=true"
GRAPHS = "rollout.vllm.enforce_eager=true, since CUDA graphs read the old places; or the other rollout.sleep_level"
GAP = "if the push is ok, the arithmetic differs: model.fp32_head=true, algo.correction=tis; see the gradients above"
SLEEP = "use the rollout.sleep_level (1 or 2) that passes; lower rollout.gpu_memory_utilization"
AWAKE = "lower rollout.gpu_memory_utilization by as much"
SEEDS = "set VLLM_USE_V2_MODEL_RUNNER=1, and make Triton work"
PLAN = "add the difference to the plan of --dry-run"
OFFLOAD = "train.offload=none"
RATE = "results are still correct; look for other processes on the GPU (nvidia-smi), few CPU cores, low clocks"

KINDS = ("dense", "gqa", "moe")  # kinds of models, see tools/gpu_checks/worker.py
ATTENTION = [
    Row("attention without padding: result", "≤", 0.01, "relative", KERNEL, gpu=True),
    Row("attention without padding: gradient", "≤", 0.02, "relative", KERNEL, gpu=True),
]
EXPERTS = [
    Row("grouped experts, fp32", "≤", 1e-5, "relative", GROUPED),
    Row("grouped experts, bf16", "≤", 0.01, "relative", GROUPED),
    Row("experts without a token: gradient", "≤", 0, "largest", GROUPED),
]
GRADIENTS = [
    Row(f"gradient, {kind}, {dtype}", "≤", bound, "relative", GRADIENT)
    for kind in KINDS
    # in bf16 a token near a tie goes to another expert than in fp32
    for dtype, bound in (("fp32", 1e-4), ("bf16", 0.1 if kind == "moe" else 0.05))
]
OFFLOADS = [
    Row("update made twice", "≤", 0, "elements differ", "rollout.exact=true will not reproduce a run here"),
    Row("update with train.offload=grads", "≤", 0, "elements differ", OFFLOAD),
    Row("update with train.offload=optimizer", "≤", 0, "elements differ", OFFLOAD),
    Row("memory that train.offload=optimizer frees", "≥", 0.95, "of its bytes", OFFLOAD, gpu=True),
]
PLANS = [
    Row("plan: what stays", "≤", 0.15, "off", PLAN),
    Row("plan: peak of log-probs", "≤", 0.15, "off", PLAN, gpu=True),
    Row("plan: peak of training", "≤", 0.15, "off", PLAN, gpu=True),
]


def push_rows(kind: str) -> list[Row]:
    """Return the rows of every model that vLLM samples from."""
    return [
        Row(f"push, {kind}", "≥", 1, "of vLLM's weights proven", PUSH),
        Row(f"push, {kind}: tensors moved", "≤", 0, "tensors of vLLM", GRAPHS, gpu=True),
        Row(f"push, {kind}: greedy answers", "≤", 0, "of 32 differ", PUSH),
        Row(f"log-prob gap, {kind}", "≤", 0.05, "mean", GAP),
    ]


SLEEPS = [
    Row("a tensor lost in a push", "≥", 1, "detected", "report it: the push check does not work here"),
    *(
        row
        for level in (2, 1)
        for row in (
            Row(f"sleep level {level}: growth over 20 steps", "≤", 0.25, "GiB", SLEEP, gpu=True),
            Row(f"sleep level {level}: left of vLLM", "≤", 4, "GiB", SLEEP, gpu=True),
            Row(f"sleep level {level}: sleep and wake", "≤", 2, "s", SLEEP, gpu=True),
        )
    ),
    Row("vLLM awake", "≤", 1.15, "of its share of the GPU", AWAKE, gpu=True),
    Row("seeded sampling", "≥", 0.95, "of the speed without seeds", SEEDS, gpu=True),
]
DEMO = [
    Row("demo in bf16: reward at its end", "≥", 0.5, "of 1", "see the rows above; then docs/tuning.md"),
    Row("demo in bf16: log-prob gap", "≤", 0.05, "mean", GAP),
]
KILLED = [
    Row("a killed rank: all have ended", "≤", 60, "s after", "lower train.stall_timeout_s; unset TORCH_NCCL_*"),
    Row("a killed rank: torchrun names it", "≥", 1, "named", "keep the job's standard error"),
]


def bench_rows(model: str, mfu: float) -> list[Row]:
    """Return the rows of benchmarks/ours.py for a model; `mfu` is the bound in percent, 0 for none."""
    return [
        Row(f"{model}: training", "≥", mfu, "% of the matmul rate", RATE),
        Row(f"{model}: sampling", "≥", 0.95 if mfu else 0, "of vLLM alone", RATE),
        Row(f"{model}: push", "≤", 1, "s", RATE),
    ]


# Rows by whose failure a run would learn from wrong numbers, by how their names begin.
WRONG_NUMBERS = (
    "machine", "attention ", "grouped experts", "experts without", "gradient, ", "push, ", "log-prob gap, ", "demo ",
)  # fmt: skip

# ---------------------------------------------------------------- checks

KERNELS, TRAINER, ENGINE = (f"tools/gpu_checks/try_{name}.py" for name in ("kernels", "trainer", "engine"))
TRIALS = [
    Check("attention", 60, 15, ATTENTION, KERNELS, ("attention",), alone=True),
    Check("experts", 60, 15, EXPERTS, KERNELS, ("experts",), alone=True),
    Check("gradients", 120, 40, GRADIENTS, TRAINER, ("gradients",)),
    Check("offload", 60, 30, OFFLOADS, TRAINER, ("offload",)),
    Check("plan", 90, 40, PLANS, TRAINER, ("plan",), least_gib=20),
    Check("vllm gqa", 240, 130, [*push_rows("gqa"), *SLEEPS], ENGINE, ("gqa",)),
    Check("vllm dense", 150, 60, push_rows("dense"), ENGINE, ("dense",)),
    Check("vllm moe", 150, 60, push_rows("moe"), ENGINE, ("moe",)),
    Check(
        "demo", 300, 180, DEMO, "train_grpo.py",
        ("--config", "configs/tiny.yaml", "model.dtype=bf16", "model.path={shared}/tiny/model",
         "data.train={shared}/tiny/train.jsonl", "output_dir={own}/out", "train.save_every=0"), read_demo,
    ),
    Check(
        "killed rank", 180, 70, KILLED, "tools/gpu_checks/try_killed.py",
        ("--config", "configs/tiny.yaml", "model.dtype=bf16", "model.path={shared}/tiny/model", "train.steps=9",
         "data.train={shared}/tiny/train.jsonl", "output_dir={own}/out", "rollout.vllm.enforce_eager=true"),
        read_killed, code=1, least_ranks=2,
    ),
]  # fmt: skip


def bench_check(model: str, mfu: float, dtype: str, least_gib: float, *arguments: str) -> Check:
    """Return the check that runs benchmarks/ours.py on a model."""
    rows = bench_rows(model, mfu)
    common = ("--model", model, "--dtype", dtype, "--folder", "{shared}/bench", "--csv", "{own}/bench.csv")
    steps = ("--warmup", "1", "--steps", "2")
    return Check(
        f"bench {model}", 240, 130, rows, "benchmarks/ours.py", (*common, *steps, *arguments),
        partial(read_bench, rows=rows), least_gib=least_gib,
    )  # fmt: skip


def all_checks(gpu: bool) -> list[Check]:
    """Return the checks in their order. The slow ones, which only measure speed, come last."""
    if not gpu:
        return [*TRIALS, bench_check("tiny", 0, "fp32", 0)]
    step = ("--tokens", "256", "rollout.prompts_per_step={prompts}", "rollout.gpu_memory_utilization=0.4")
    keys = ("train.max_tokens_per_micro_batch", "train.logprob_max_tokens_per_micro_batch")
    return [
        *TRIALS,
        bench_check("qwen2.5-0.5b", 25, "bf16", 44, *step, *(f"{key}=16384" for key in keys)),
        bench_check("qwen2.5-1.5b", 35, "bf16", 70, *step, *(f"{key}=8192" for key in keys)),
    ]
