"""The commit and package versions of a run, and what a run needs of a machine. Its import needs no package."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from grpo.parts.base.processes import REPO

# Versions of packages that the tests of this repository ran with, without their patch level
TESTED = {
    "python": ("3.11", "3.13"), "torch": ("2.13",), "megatron-core": ("0.16", "0.19"), "vllm": ("0.32",),
    "transformers": ("5.19",),
}  # fmt: skip
OPTIONAL = ("transformer-engine", "flash-attn", "fla-core")  # few runs need one of them
FLA_CORE = "0.6.0"  # the version of fla-core that Qwen3.5 takes on a GPU in bf16 or fp16
TRACKERS = {"tensorboard": "2.21.0", "wandb": "0.31.0"}  # tested versions, for log.tensorboard and log.wandb
OTHERS = (
    "numpy", "safetensors", "tokenizers", "datasets", "pandas", "pyarrow", "math-verify", "pydantic", "triton",
    "flashinfer-python",
)  # fmt: skip

Versions = dict[str, str | None]  # None for what is missing

BUILD_TOOLS_REMEDY = "Triton compiles with them: apt-get install gcc python3-dev (for this Python); CC names a compiler"
MIG_REMEDY = "one rank on one slice (--nproc_per_node=1), or whole GPUs for more ranks: nvidia-smi -mig 0 as root"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: "2.13.0+cpu" → (2, 13, 0)."""
    start = re.match(r"[\d.]*", version)[0]
    return tuple(int(number) for number in start.split(".") if number)


def version_of(name: str) -> str | None:
    """The version of a package, or None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(package: str) -> str | None:
    """The version of a package, or of its build for the CPU. None if neither is installed."""
    return version_of(package) or version_of(f"{package}-cpu")


def check_versions() -> list[str]:
    """A warning for each package of TESTED that is missing or has an untested version. Imports none of them."""
    warnings = []
    for package, tested in TESTED.items():
        version = platform.python_version() if package == "python" else installed(package)
        version = version or "(not installed)"
        if numbers(version)[:2] not in map(numbers, tested):
            warnings.append(f"{package} {version} was not tested; tested: {' and '.join(tested)}")
    return warnings


def commit() -> str:
    """The commit of this checkout, with "+changes" if a tracked file differs. "unknown" if this is no checkout."""

    def git(*words):
        command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", str(REPO), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "grpo/parts/base/versions.py")  # fails in another project's checkout
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@functools.cache
def versions() -> Versions:
    """{"commit": …, "python": …, package: version, …, "driver": …} at the start of a run; None for what is missing."""
    found = {"commit": commit()}
    found |= {name: installed(name) for name in (*TESTED, *OPTIONAL, *OTHERS)}
    return found | {"python": platform.python_version(), **cuda_versions(), "driver": driver()}


def cuda_versions() -> Versions:
    """The CUDA and NCCL that torch was built with. None for a build without, or if torch cannot be imported."""
    found = {"cuda": None, "nccl": None}
    try:
        import torch
    except (ImportError, OSError):  # OSError: one of its libraries does not load
        return found
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def driver() -> str | None:
    """The version of NVIDIA's kernel driver, or None if there is none."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    found = re.search(r" (\d+\.\d+(\.\d+)?) ", path.read_text())
    return found and found[1]


def build_tools() -> Versions:
    """{"C compiler": path, "Python.h": path}, None if missing. On a GPU Triton compiles vLLM's launchers with them."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    compilers = [path for path in map(shutil.which, names) if path]
    header = Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h")  # Debian's own scheme has no headers
    return {
        "C compiler": compilers[0] if compilers else None,
        "Python.h": str(header) if header.exists() else None,
    }


def missing_libraries() -> str | None:
    """The system libraries that torch or vLLM need and this machine lacks, and what to install; None if all are here.

    The libraries of NVIDIA's driver do not count. Imports neither package, whose loader would name one at a time.
    """
    torch, vllm = importlib.util.find_spec("torch"), importlib.util.find_spec("vllm")
    if not (torch and vllm and shutil.which("ldd")):
        return None

    # torch loads its own libraries before vLLM's need them, so ldd must find them too.
    files = [file for package in (torch, vllm) for file in Path(package.origin).parent.glob("*.so")]
    site = Path(torch.origin).parents[1]
    folders = [site / "torch/lib", *site.glob("nvidia/*/lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    command = ["env", f"LD_LIBRARY_PATH={':'.join(map(str, folders))}", "ldd", *files]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    names = sorted(set(re.findall(r"\t(?!libcuda\.|libnvidia-)(\S+) => not found", listed)))
    if not names:
        return None

    return (
        f"no {', '.join(names)}, which torch or vLLM needs: apt-get install the packages, which have similar names, as "
        "libnuma1 for libnuma.so.1"
    )


def differences(was: Versions, now: Versions) -> list[str]:
    """A line for each version that differs: "torch: 2.13.0 → 2.14.0"."""
    return [f"{name}: {was.get(name)} → {now.get(name)}" for name in {**was, **now} if was.get(name) != now.get(name)]
