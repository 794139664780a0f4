"""What a failure of a machine means for the run, and which keys to turn if memory is short."""

import errno
import shutil
from pathlib import Path

import torch

from grpo.parts.base import files
from grpo.parts.base.processes import host_free_bytes
from grpo.parts.base.versions import gib

LESS, MORE = "rollout.gpu_memory_utilization down", "rollout.gpu_memory_utilization up"
FEWER = "rollout.vllm.max_num_seqs down"
SAMPLING = f"{LESS}; {FEWER}; rollout.tp up; train.offload=optimizer"
MEMORY = {  # phase → what to turn, in the order in which to try it
    "build": f"parallel.tp up; parallel.pp up; parallel.ep up; {LESS}; {FEWER}",
    "rollout": SAMPLING,
    "eval": SAMPLING,
    "logprob": "train.logprob_max_tokens_per_micro_batch down; algo.reference_on=host; parallel.tp up",
    "train": "train.max_tokens_per_micro_batch down; megatron.recompute_granularity=full "
    "megatron.recompute_method=uniform megatron.recompute_num_layers=1; parallel.tp up; parallel.cp up; "
    "megatron.optimizer_cpu_offload=true megatron.use_precision_aware_optimizer=true",
    "sync": f"rollout.sync_bucket_mb down; {LESS}; parallel.tp up",
    "save": f"parallel.tp up; parallel.pp up; {LESS}",
}

HOST_MEMORY = (
    "rollout.tp up: a copy of the weights an engine; reward.workers down; fewer ranks on a machine, or more memory for "
    "the job (Slurm: --mem, Docker: --memory)"
)

OTHERS = "end what else uses this GPU (nvidia-smi shows it)"
NO_CACHE = "No available memory for the cache blocks"
# What vLLM says if memory is short → what to turn. It has a budget of its own, whatever the phase.
VLLM_MEMORY = {
    NO_CACHE: f"{MORE}; rollout.tp up; rollout.vllm.max_num_batched_tokens down",
    "exceeds available Mamba cache": f"{FEWER}; {MORE}; rollout.tp up",  # states of linear attention
    "larger than the available KV cache": f"{MORE}; rollout.tp up; "
    "data.max_prompt_tokens or rollout.max_new_tokens down",
    "on startup is less than": f"{LESS}; rollout.tp up; {OTHERS}",
    "Error in memory profiling": f"{OTHERS}; start again; {LESS}",
    "Memory usage increased after sleeping": f"{OTHERS}; start again with resume=auto",
    "when warming up": f"{FEWER}; {LESS}; rollout.tp up",
    "out of memory at": f"{LESS}; parallel.tp up; parallel.pp up",  # its allocator, at wake
    # on a CPU
    "on kv cache allocation is less than": "rollout.vllm.kv_cache_memory_bytes down; rollout.tp up; "
    "fewer ranks on a machine",
}

LOST_WORDS = ("onnection", "remote process exited", "network error")  # of gloo and NCCL, which have no class for it


def lost_rank(error) -> str | None:
    """What an error means if it comes from a lost connection, else None."""
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in LOST_WORDS):
        return None
    text = str(error).splitlines()[0]
    return f"another rank is gone ({text}). torchrun's report says which one; go on with resume=auto"


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def disk_error(error, folder: Path) -> str | None:
    """What an error means if output_dir cannot be written to, else None. torch raises no OSError for it."""
    known = getattr(error, "errno", None) in DISK_ERRORS or "I/O error" in str(error)
    reason = error if known else files.try_to_write(folder)
    if not reason:
        return None
    free = gib(shutil.disk_usage(files.nearest_existing(folder)).free)
    return (
        f"a file could not be written: {reason}; the disk of output_dir={folder} has {free} free. Make room, then go "
        "on with resume=auto"
    )


GPU_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
HOST_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory")


def out_of_memory(phase, error) -> str | None:
    """What an error in a phase means for the configuration if memory of GPU or host was short, else None.

    An unknown phase counts as "build". Such errors have no class in common: vLLM raises ValueError and RuntimeError.
    """
    text = str(error)
    of_vllm = [keys for words, keys in VLLM_MEMORY.items() if words in text]
    if isinstance(error, MemoryError) or any(words in text for words in HOST_WORDS):
        kind, turn = f"host memory, of which {gib(host_free_bytes())} are free", HOST_MEMORY
    elif of_vllm:
        kind, turn = "memory for vLLM", of_vllm[0]
    elif isinstance(error, torch.OutOfMemoryError) or any(words in text for words in GPU_WORDS):
        kind, turn = "GPU memory", MEMORY.get(phase, MEMORY["build"])
    else:
        return None

    reason = (text or type(error).__name__).splitlines()[0]
    return f"out of {kind}: {reason}\n  turn one of: {turn}"
