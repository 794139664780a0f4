"""Shared by the processes of tools/gpu_check.py: start, results, and the small models that they use.

A check is a function(record) of a script that torchrun starts: `record(row, figure, note)` answers a row of checks.py.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import train_grpo
from benchmarks import works
from config import Config
from support.base import ranks
from support.base.read_config import load_config
from support.engine import vllm_process
from tools import make_tiny
from tools.gpu_checks.checks import FOLDER, ROWS

Record = Callable[..., None]  # (row's name, figure, note)

# kind → (architecture of make_tiny, its options): multi-head, grouped-query, mixture of experts
MODELS = {"dense": ("llama", {"kv_heads": 8}), "gqa": ("qwen2", {"kv_heads": 2}), "moe": ("qwen3_moe", {"kv_heads": 2})}
# kind → layout on an even number of ranks
PAIRS = {
    "dense": ("parallel.tp=2", "rollout.tp=2"),
    "gqa": ("parallel.tp=1", "rollout.tp=1"),
    "moe": ("parallel.ep=2", "rollout.tp=1"),
}
PROMPT = 16  # tokens of the longest prompt
VOCABULARY = 16  # tokens of char_tokenizer


def folder() -> Path:
    """Return the folder that this check writes into."""
    return Path(os.environ[FOLDER])


def main(checks: dict[str, Callable[[Record], None]]) -> int:
    """Run the check that the command line names."""
    ranks.die_with_torchrun()
    if int(os.environ["WORLD_SIZE"]) % 2 == 0:  # PAIRS have parallel.tp=2
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    vllm_process.set_environment()  # before anything is allocated on a GPU
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def record(row: str, figure: float, note: str = "") -> None:
        if ranks.is_first_rank():
            with (folder() / ROWS).open("a") as file:
                file.write(json.dumps({"row": row, "figure": float(figure), "note": note}) + "\n")

    checks[sys.argv[1]](record)
    return 0


def config(path: Path, *overrides: str) -> Config:
    """Return the configuration of the demo with the model at `path` and overrides."""
    common = (
        f"model.path={path}", "data.train=none", "model.dtype=bf16", f"data.max_prompt_tokens={PROMPT}",
        "train.clip_grad=0", "rollout.gpu_memory_utilization=0.3",
    )  # fmt: skip
    return load_config("configs/tiny.yaml", [*common, *overrides])


def layout(kind: str) -> tuple[str, ...]:
    """Return the overrides for the layout of a model on these ranks."""
    return PAIRS[kind] if dist.get_world_size() % 2 == 0 else ()


def make_model(kind: str) -> Path:
    """Write a model of that kind, with 3 to 6 million weights and non-trivial norms and biases; returns its folder."""
    path = folder() / kind
    if ranks.is_first_rank():
        arch, options = MODELS[kind]
        make_tiny.save_model(
            path, make_tiny.char_tokenizer("0123456789>+-="), arch, tied=kind == "gqa", hidden=256, ffn=4, **options
        )
        from safetensors.torch import load_file, save_file

        weights, noise = load_file(path / "model.safetensors"), torch.Generator().manual_seed(7)
        weights = {name: w + 0.02 * torch.randn(w.shape, generator=noise) for name, w in sorted(weights.items())}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    return path


def bench_model(name: str) -> Path:
    """Write a bf16 model of benchmarks/ours.py into the folder that the benchmarks also use; returns its folder."""
    path = None
    if ranks.is_first_rank():
        path, _ = works.make_inputs(folder().parent / "bench", works.Work(name, "bf16"))
    found = [path]
    dist.broadcast_object_list(found)
    return found[0]


def samples(number: int, longest: int, vocabulary: int = VOCABULARY, shortest: int = 1) -> list[train_grpo.Sample]:
    """Return random answers of `shortest` to `longest` tokens with advantages, the same on every rank."""
    rng = np.random.default_rng(3)
    made = []
    for n in range(number):
        prompt = rng.integers(2, vocabulary, rng.integers(1, PROMPT + 1)).tolist()
        response = rng.integers(0, vocabulary, rng.integers(shortest, longest + 1)).tolist()
        made.append(
            train_grpo.Sample(n // 2, prompt, response, rng.normal(-2.5, 0.5, len(response)).tolist(), True, "", "s")
        )
        made[-1].advantage = rng.normal()
    return made
