"""Checks before weights are loaded, and what running out of memory means for the configuration.

Knows torch.distributed, no trainer.
"""

import errno
import shutil
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from config import RankError, UserError
from support.base import ranks, remedies
from support.base.memory import host_free_bytes
from support.base.read_config import dotted_items
from support.base.require import require
from support.base.versions import gib

GROUP_CHECK_S = 120.0  # for the first all-reduce of a process group


def check_disk(folder: Path, bytes_needed: int) -> None:
    """Raises UserError if the disk that the output folder is or will be on has less than that free."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    require(
        free >= bytes_needed,
        f"output_dir={folder}: its disk has {gib(free)} free, this run saves {gib(bytes_needed)}; make room, "
        "choose another output_dir, save less often (train.save_every) or keep less (train.keep_last)",
    )


def check_writable(folder: Path) -> None:
    """Raises UserError if no file can be written in `folder`, or in the nearest folder above that exists."""
    error = try_to_write(folder)
    if error is not None:
        raise UserError(
            f"output_dir={folder}: cannot write in {nearest_existing(folder)} ({error.strerror}); choose an output_dir "
            "that this user may write to, on a disk with room"
        )


def try_to_write(folder: Path) -> OSError | None:
    """What the system says where it refuses a small file in `folder` or the nearest above; None where it writes it."""
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_existing(folder), prefix=".writable-") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def check_same_config(config: dict) -> None:
    """Raises UserError, on every rank, if the ranks do not hold the same configuration: which keys differ, and where.

    `config` is {section: {key: value}}, as deep as it likes. Prints which ranks are where, on several machines.
    """
    own = {key: str(value) for key, value in dotted_items(config)}
    machines, tables = zip(*ranks.gather((socket.gethostname(), own)), strict=True)
    others = [table for table in tables if table != tables[0]]
    lines = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "not set") for table in tables]
        if len(set(values)) > 1:
            lines.append(f"  {key}: {ranks.describe(values, machines)}")
    require(
        not lines,
        f"{len(others)} of {len(tables)} ranks have another configuration than rank 0; start every machine "
        "with the same files and overrides:\n" + "\n".join(lines),
    )
    if dist.get_rank() == 0 and len(set(machines)) > 1:
        print(f"machines: {ranks.describe(machines)}", flush=True)


def check_groups(groups: dict[str, dist.ProcessGroup | None], timeout_s: float) -> None:
    """One all-reduce in each process group, on all ranks in the same order; None where this rank is in no such group.

    Raises RankError for one that fails, gives a wrong sum or takes more than `timeout_s`. Where it is one of
    GPUs, leave with os._exit then: a thread may still hang in it.
    """
    for name, group in groups.items():
        problem = group and try_all_reduce(group, timeout_s)
        if problem:
            members = ", ".join(map(str, dist.get_process_group_ranks(group)))
            raise RankError(
                f"the all-reduce of group {name} (ranks {members}) {problem}; likely a rank that died or never "
                "started, a network interface that the nodes do not share (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or "
                "a firewall between the nodes; NCCL_DEBUG=INFO says more"
            )


def try_all_reduce(group: dist.ProcessGroup, timeout_s: float) -> str | None:
    """What is wrong with an all-reduce in a group; None where it gives the sum."""
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    value = torch.tensor([dist.get_rank() + 1], device="cuda" if on_gpu else "cpu")
    outcome = []  # the sum, or an error

    def reduce() -> None:
        try:
            dist.all_reduce(value, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
            outcome.append(value.item())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=reduce, daemon=True)  # NCCL connects inside the call, before its timeout counts
    thread.start()
    thread.join(timeout_s + 1)
    expected = sum(rank + 1 for rank in dist.get_process_group_ranks(group))
    if not outcome or "timed out" in str(outcome[0]):
        return f"did not finish within {timeout_s:g} s"
    if isinstance(outcome[0], Exception):
        return f"failed: {str(outcome[0]).splitlines()[0]}"
    return None if outcome[0] == expected else f"gave {outcome[0]}, not {expected}"


def explain_lost_rank(phase: str, error: Exception) -> str | None:
    """What an error means if it comes from a lost connection; else None."""
    if not isinstance(error, RuntimeError) or "onnection" not in str(error):  # gloo and NCCL have no class of their own
        return None
    text = str(error).splitlines()[0]
    return (
        f"rank {dist.get_rank()}, in the phase {phase}: another rank is gone ({text}). torchrun's report says which "
        "one; go on with resume=auto"
    )


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def explain_disk_error(phase: str, error: Exception, folder: Path) -> str | None:
    """What an error means if it comes from a disk that cannot be written, most likely that of output_dir; else None.

    torch and safetensors do not say so with an OSError, so a small file is tried.
    """
    known = getattr(error, "errno", None) in DISK_ERRORS or "I/O error" in str(error)
    reason = error if known else try_to_write(folder)
    return reason and (
        f"a file could not be written in the phase {phase}: {reason}; the disk of output_dir={folder} has "
        f"{gib(shutil.disk_usage(nearest_existing(folder)).free)} free. Make room, then go on with resume=auto"
    )


GPU_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
HOST_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory")


def explain_out_of_memory(phase: str, error: BaseException) -> str | None:
    """What an error in a phase means for the configuration, where memory of GPU or host was short; else None.

    An unknown phase counts as "build". Such errors have no class in common: vLLM raises ValueError and RuntimeError.
    """
    text = str(error)
    vllm = next((keys for words, keys in remedies.VLLM_MEMORY.items() if words in text), None)
    if isinstance(error, MemoryError) or any(words in text for words in HOST_WORDS):
        kind = "host memory"
        remedy = remedies.Remedy(f"what is free on the machine ({gib(host_free_bytes())})", remedies.HOST_MEMORY)
    elif vllm is not None:
        kind = "memory for vLLM"
        remedy = remedies.Remedy("rollout.gpu_memory_utilization", vllm)
    elif isinstance(error, torch.OutOfMemoryError) or any(words in text for words in GPU_WORDS):
        kind = "GPU memory"
        remedy = remedies.MEMORY.get(phase, remedies.MEMORY["build"])
    else:
        return None
    reason = (text or type(error).__name__).splitlines()[0]
    told = f"out of {kind} in the phase {phase}, whose budget is {remedy.sign}: {reason}"
    return f"{told}\n  turn one of: {'; '.join(remedy.turn)}"
