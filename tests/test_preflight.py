"""The checks before the start, and what running out of memory means."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import UserError
from support.base import ranks, versions
from support.check import machines, preflight
from support.run import launch


def test_machine(tmp_path):
    preflight.check_disk(tmp_path / "not/yet", 1)
    preflight.check_writable(tmp_path / "not/yet")
    assert not list(tmp_path.iterdir())
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
    with pytest.raises(UserError, match=r"^no Python\.h, which vLLM's kernels need\. .*apt-get install gcc"):
        gpus("H100", **{"Python.h": None})


@pytest.mark.parametrize("number", [0, 2])
def test_machines_are_named_once(number, monkeypatch, capfd):
    north, south = {"127.0.0.1", "10.0.0.1", "fe80::1"}, {"127.0.0.1", "10.0.0.2"}
    gathered = [("north", north), ("north", north), ("south", south)]
    monkeypatch.setattr(ranks, "gather", lambda own: gathered)
    monkeypatch.setattr(dist, "get_rank", lambda: number)
    assert machines.name_machines() == {"10.0.0.1": "north", "fe80::1": "north", "10.0.0.2": "south"}
    assert capfd.readouterr().out == ("machines: north on rank 0, 1; south on rank 2\n" if number == 0 else "")
    del gathered[2]
    assert machines.name_machines() == {} and capfd.readouterr() == ("", "")


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


@pytest.mark.parametrize(
    ("driver", "vllm", "refused"), [("580.1", "0.32.0", True), ("580.1", None, False), (None, "0.32.0", False)]
)
def test_a_gpu_is_not_left_unused_by_mistake(driver, vllm, refused, monkeypatch):
    """Torch sees none, though there is NVIDIA's driver, and vLLM is not its build for CPUs."""
    monkeypatch.setattr(versions, "driver", lambda: driver)
    monkeypatch.setattr(versions, "version_of", {"vllm": vllm}.get)
    if not refused:
        machines.check_unused_gpus()
        return
    with pytest.raises(UserError, match=r"^torch sees no GPU, .*: python -m tools\.doctor says why"):
        machines.check_unused_gpus()
