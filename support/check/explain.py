"""What a failure of a machine means for the run, and which keys to turn where memory is short."""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from support.base import files
from support.base.memory import host_free_bytes
from support.base.versions import gib


class Remedy(NamedTuple):
    """What sets the memory, and what to turn, in the order in which to try it."""

    sign: str
    turn: list[str]


LESS, MORE = "rollout.gpu_memory_utilization down", "rollout.gpu_memory_utilization up"
FEWER = "rollout.vllm.max_num_seqs down"
SAMPLING = Remedy("rollout.gpu_memory_utilization", [LESS, FEWER, "rollout.tp up", "train.offload=optimizer"])
MEMORY = {  # phase → its remedy
    "build": Remedy("parallel.*", ["parallel.tp up", "parallel.pp up", "parallel.ep up", LESS, FEWER]),
    "rollout": SAMPLING,
    "eval": SAMPLING,
    "logprob": Remedy(
        "train.logprob_max_tokens_per_micro_batch",
        ["train.logprob_max_tokens_per_micro_batch down", "algo.reference_on=host", "parallel.tp up"],
    ),
    "train": Remedy(
        "train.max_tokens_per_micro_batch",
        [
            "train.max_tokens_per_micro_batch down",
            "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1",
            "parallel.tp up",
            "parallel.cp up",
            "megatron.optimizer_cpu_offload=true megatron.use_precision_aware_optimizer=true",
        ],
    ),
    "sync": Remedy("rollout.sync_bucket_mb", ["rollout.sync_bucket_mb down", LESS, "parallel.tp up"]),
    "save": Remedy("parallel.*", ["parallel.tp up", "parallel.pp up", LESS]),
}

HOST_MEMORY = [
    "rollout.tp up: a copy of the weights an engine",
    "reward.workers down",
    "fewer ranks on a machine, or more memory for the job (Slurm: --mem, Docker: --memory)",
]

OTHERS = "end what else uses this GPU (nvidia-smi shows it)"
NO_CACHE = "No available memory for the cache blocks"
VLLM_MEMORY = {  # what vLLM says where memory is short → what to turn; it has a budget of its own, whatever the phase
    NO_CACHE: [MORE, "rollout.tp up", "rollout.vllm.max_num_batched_tokens down"],
    "larger than the available KV cache": [
        MORE, "rollout.tp up", "data.max_prompt_tokens or rollout.max_new_tokens down",
    ],
    "on startup is less than": [LESS, "rollout.tp up", OTHERS],
    "Error in memory profiling": [OTHERS, "start again", LESS],
    "when warming up": [FEWER, LESS, "rollout.tp up"],
    "out of memory at": [LESS, "parallel.tp up", "parallel.pp up"],  # its allocator, at wake
    "on kv cache allocation is less than": [  # on a CPU
        "VLLM_CPU_KVCACHE_SPACE down", "rollout.tp up", "fewer ranks on a machine",
    ],
}  # fmt: skip

LOST_WORDS = ("onnection", "remote process exited", "network error")  # of gloo and NCCL, which have no class for it


def lost_rank(phase: str, error: Exception) -> str | None:
    """What an error means if it comes from a lost connection; else None."""
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in LOST_WORDS):
        return None
    text = str(error).splitlines()[0]
    return (
        f"rank {dist.get_rank()}, in the phase {phase}: another rank is gone ({text}). torchrun's report says which "
        "one; go on with resume=auto"
    )


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def disk_error(phase: str, error: Exception, folder: Path) -> str | None:
    """What an error means if a small file cannot be written to output_dir (torch raises no OSError then); else None."""
    known = getattr(error, "errno", None) in DISK_ERRORS or "I/O error" in str(error)
    reason = error if known else files.try_to_write(folder)
    return reason and (
        f"a file could not be written in the phase {phase}: {reason}; the disk of output_dir={folder} has "
        f"{gib(shutil.disk_usage(files.nearest_existing(folder)).free)} free. Make room, then go on with resume=auto"
    )


GPU_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
HOST_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory")


def out_of_memory(phase: str, error: BaseException) -> str | None:
    """What an error in a phase means for the configuration, where memory of GPU or host was short; else None.

    An unknown phase counts as "build". Such errors have no class in common: vLLM raises ValueError and RuntimeError.
    """
    text = str(error)
    vllm = next((keys for words, keys in VLLM_MEMORY.items() if words in text), None)
    if isinstance(error, MemoryError) or any(words in text for words in HOST_WORDS):
        kind = "host memory"
        remedy = Remedy(f"what is free on the machine ({gib(host_free_bytes())})", HOST_MEMORY)
    elif vllm is not None:
        kind = "memory for vLLM"
        remedy = Remedy("rollout.gpu_memory_utilization", vllm)
    elif isinstance(error, torch.OutOfMemoryError) or any(words in text for words in GPU_WORDS):
        kind = "GPU memory"
        remedy = MEMORY.get(phase, MEMORY["build"])
    else:
        return None
    reason = (text or type(error).__name__).splitlines()[0]
    told = f"out of {kind} in the phase {phase}, whose budget is {remedy.sign}: {reason}"
    return f"{told}\n  turn one of: {'; '.join(remedy.turn)}"
