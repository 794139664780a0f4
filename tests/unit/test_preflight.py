"""The checks before the start, and what running out of memory means."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import UserError
from grpo.parts.base import ranks, versions
from grpo.run.preflight import machines
from tests.conftest import refused, tiny_config


def test_the_output_folder_and_its_disk(tiny, tmp_path, monkeypatch):
    cfg = tiny_config(f"model.path={tiny / 'model'}", f"output_dir={tmp_path / 'not/yet'}")
    machines.check_first_host(cfg)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(machines.costs, "disk_bytes", lambda cfg, weights: 2**60)
    with pytest.raises(UserError, match=r"output_dir=.*not/yet: .*a checkpoint and an export take"):
        machines.check_first_host(cfg)
    with pytest.raises(UserError, match=r"output_dir=/proc/out: cannot write in /proc "):
        machines.check_writable(Path("/proc/out"))


def test_another_configuration_commit_and_other_data_of_a_machine_are_refused(monkeypatch):
    def gather(own):
        other = {"train.lr": "1e-05", "token ids of data.train": "2", "commit": "b", "megatron.field": "1"}
        return [("north", own[1]), ("north", own[1]), ("south", own[1] | other)]

    monkeypatch.setattr(ranks, "gather", gather)
    monkeypatch.setattr(versions, "versions", lambda: {"commit": "a"})
    with pytest.raises(UserError, match=r"^the ranks have different configurations; start ") as refusal:
        machines.check_ranks(
            {"seed": 0, "train": {"lr": 1e-6}, "megatron": {}}, "data.train", {"rows": "1", "token ids": "1"}
        )
    assert refusal.value.args[0].splitlines()[1:] == [
        "  train.lr: 1e-06 on rank 0, 1 (north); 1e-05 on rank 2 (south)",
        "  token ids of data.train: 1 on rank 0, 1 (north); 2 on rank 2 (south)",
        "  commit: a on rank 0, 1 (north); b on rank 2 (south)",
        "  megatron.field: not set on rank 0, 1 (north); 1 on rank 2 (south)",
    ]


@pytest.mark.parametrize(
    "times, said",
    [
        ([("north", 100.0), ("north", 105.0), ("south", 100.9)], None),  # rank 1 is late
        ([("north", 100.0), ("south", 97.5), ("south", 98.0)], "north is 2.5 s ahead of south's"),
    ],
)
def test_clocks_of_machines_that_differ(monkeypatch, capsys, times, said):
    monkeypatch.setattr(ranks, "gather", lambda own: times)
    monkeypatch.setattr(machines.dist, "get_rank", lambda: 0)
    machines.check_clocks()
    out = capsys.readouterr().out
    assert (said in out) if said else not out


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    """A library of torch, which asks for one by a name of the same length."""
    library = Path(torch._C.__file__).read_bytes().replace(b"libtorch_python.so", b"libnot_here3.so.12")
    (tmp_path / "_C.so").write_bytes(library)
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=tmp_path / name))
    with pytest.raises(UserError, match=r"^no libnot_here3\.so\.12, which .*: apt-get install the packages"):
        machines.check_without_gpu(tiny_config())


def test_a_gpu_is_not_left_unused_by_mistake(monkeypatch):
    """Torch sees none, though there is NVIDIA's driver, and vLLM is not its build for CPUs."""
    for driver, vllm in (("580.1", None), (None, "0.32.0"), ("580.1", "0.32.0")):
        monkeypatch.setattr(versions, "driver", lambda driver=driver: driver)
        monkeypatch.setattr(versions, "version_of", {"vllm": vllm}.get)
        message = r"^torch sees no GPU, .*: python -m tools\.doctor says why"
        with refused(UserError, message if driver and vllm else None):
            machines.check_without_gpu(tiny_config())


GPUS = {"is_available": True, "device_count": 8, "get_device_name": "NVIDIA H100", "get_device_capability": (9, 0)}
MIG = {"device_count": 1, "get_device_name": "NVIDIA H100 MIG 1g.10gb"}
STARTED = dict.fromkeys(machines.OF_TORCHRUN, "1") | {"LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "env, gpus, header, keys, message",
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, {}, None, [], r"^start with torchrun .*; WORLD_SIZE, LOCAL_WORLD_SIZE, "),
        (STARTED, {}, None, [], None),
        (STARTED, {}, None, ["rollout.vllm.quantization=fp8"],
         r"rollout.vllm.quantization=fp8: .* there is no GPU here"),
        (STARTED | {"SLURM_PROCID": "0"}, GPUS | MIG, "Python.h", [],
         r"=8, but this process sees 1 GPU\(s\), .* srun .* --gpu-bind=none .*; with MIG use one"),
        (STARTED, GPUS | {"get_device_capability": (8, 0)}, "Python.h", ["rollout.exact=true"],
         r"rollout.exact=true needs GPUs of compute capability 9.0: .* this is NVIDIA"),
        (STARTED, GPUS, None, [], r"^no Python\.h, which vLLM's kernels need\. .*apt-get install gcc"),
    ],
)  # fmt: skip
def test_what_is_said_where_something_is_missing(monkeypatch, env, gpus, header, keys, message):
    cfg = tiny_config(*keys)
    monkeypatch.setattr(machines.os, "environ", env)
    monkeypatch.setattr(versions, "build_tools", lambda: {"C compiler": "/usr/bin/gcc", "Python.h": header})
    for name, value in gpus.items():
        monkeypatch.setattr(machines.torch.cuda, name, lambda *_, value=value: value)
    with refused(UserError, message):
        machines.check_start(cfg)
