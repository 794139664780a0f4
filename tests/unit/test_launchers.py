"""Ranks that srun, mpirun or a user's own hand has started find themselves and train."""

import os
import signal
import subprocess
import time

import pytest

from config import UserError
from support.base import launchers, versions
from support.base.launchers import environment
from support.base.read_config import override
from support.check import machines
from tests.conftest import REPO, command_line, read_rows, tiny_config

TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29400", "GROUP_RANK": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}  # fmt: skip
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def world(rank: int, size: int, local: int, local_size: int, address: str, port: str) -> dict[str, str]:
    values = (rank, size, local, local_size, address, port)
    return dict(zip((*launchers.RANK_NAMES, *launchers.MASTER_NAMES), map(str, values), strict=True))


def test_torchrun_is_left_alone():
    assert environment(TORCHRUN) == {}
    assert environment(TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}) == {}
    without = {name: value for name, value in TORCHRUN.items() if name not in ("LOCAL_WORLD_SIZE", "MASTER_PORT")}
    assert environment(without | SRUN) == {"LOCAL_WORLD_SIZE": "8", "MASTER_PORT": launchers.port(SRUN)}


def test_srun():
    port = launchers.port(SRUN)
    assert environment(SRUN) == world(9, 16, 1, 8, "gpu03", port)
    assert int(port) in launchers.PORTS and port != launchers.port(SRUN | {"SLURM_STEP_ID": "1"})
    assert environment(SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "1"}) == {
        name: value for name, value in world(9, 16, 1, 8, "", "").items() if name not in launchers.MASTER_NAMES
    }
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
    assert environment(SRUN | one) == world(1, 2, 1, 2, "127.0.0.1", port)
    for tasks, local_size in (("12,4", "4"), ("2(x3),1", "2")):
        assert environment(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks})["LOCAL_WORLD_SIZE"] == local_size


def test_what_a_batch_script_starts_itself_is_no_rank():
    script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}
    assert environment(script) == {}
    assert environment({}) == {} and environment({"RANK": "0"}) == {}


def test_mpirun():
    assert environment(OPEN_MPI) == world(3, 8, 3, 8, "127.0.0.1", "29500")
    several = environment(INTEL_MPI)
    assert several == {name: value for name, value in world(5, 8, 1, 4, "", "29500").items() if value}
    # In a Slurm job mpirun starts its daemons by srun, whose ranks are those of the machines.
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    found = environment(INTEL_MPI | daemon)
    assert found == world(5, 8, 1, 4, "gpu03", found["MASTER_PORT"])
    named = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-laptop-17@1"}
    assert environment(named)["MASTER_PORT"] == environment(named | {"OMPI_COMM_WORLD_RANK": "4"})["MASTER_PORT"]


def test_by_hand():
    """What follows from the address."""
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1234"}
    assert environment(given | {"MASTER_ADDR": "localhost"}) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert environment(given | {"MASTER_ADDR": "pod-0"}) == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert environment(given | {"MASTER_ADDR": "gpu01", "LOCAL_RANK": "1"}) == {}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert environment(alone) == {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("laptop", "laptop"), ("a1,a2", "a1"), ("node[01-04,7]", "node01"), ("node[7,9-12],login", "node7"),
        ("rack[2-3]n[05-06]", "rack2n05"), ("gpu-a[1-2].site.org,b", "gpu-a1.site.org"),
    ],
)  # fmt: skip
def test_first_host(hosts, first):
    assert environment(SRUN | {"SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


def test_what_is_said_where_something_is_missing(monkeypatch):
    cfg = tiny_config()
    monkeypatch.setattr(machines.os, "environ", {"SLURM_JOB_ID": "4711"})
    with pytest.raises(UserError, match=r"start with torchrun .*; in this Slurm job: srun python train_grpo"):
        machines.check_start(cfg)
    monkeypatch.setattr(machines.os, "environ", environment(INTEL_MPI))
    with pytest.raises(UserError, match=r"rank 5 was started without MASTER_ADDR: .* -x MASTER_ADDR=HOST"):
        machines.check_start(cfg)
    monkeypatch.setattr(machines.os, "environ", SRUN | environment(SRUN))
    machines.check_start(cfg)
    with pytest.raises(UserError, match=r"profile.memory=true: .* there is no GPU here"):
        machines.check_start(override(cfg, {"profile.start": 1, "profile.stop": 1, "profile.memory": True}))
    monkeypatch.setattr(machines.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machines.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machines.torch.cuda, "get_device_name", lambda number: "NVIDIA H100 MIG 1g.10gb")
    binds = "has 1 GPU: one process a GPU; if srun binds one GPU to each, add --gpu-bind=none to it; with MIG one"
    with pytest.raises(UserError, match=binds):
        machines.check_start(cfg)
    monkeypatch.setattr(machines.torch.cuda, "device_count", lambda: 8)
    tools = {"C compiler": "/usr/bin/gcc", "Python.h": "/usr/include/Python.h"}
    monkeypatch.setattr(versions, "build_tools", lambda: tools)
    machines.check_start(cfg)
    exact = override(cfg, {"rollout.exact": True})
    monkeypatch.setattr(machines.torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match=r"rollout.exact=true needs GPUs of compute capability 9.0: .* this is NVIDIA"):
        machines.check_start(exact)
    monkeypatch.setattr(machines.torch.cuda, "get_device_capability", lambda: (9, 0))
    machines.check_start(exact)
    tools["Python.h"] = None
    with pytest.raises(UserError, match=r"^no Python\.h, which vLLM's kernels need\. .*apt-get install gcc"):
        machines.check_start(cfg)


# ---------------------------------------------------------------- real runs

SMALL = ("train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4")


def clean() -> dict[str, str]:
    """The environment without any launcher's variables."""
    launcher = (*launchers.RANK_NAMES, *launchers.MASTER_NAMES, "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return ours | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.slow
def test_two_ranks_with_the_variables_of_srun_train(fork_server, tiny, tmp_path):
    out, printed = tmp_path / "out", tmp_path / "printed.txt"
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    ranks = [clean() | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    command = ["train_grpo.py", *command_line(tiny, out, SMALL, "tiny")]
    code = fork_server.run_ranks(printed, command, ranks, port=None)
    text = printed.read_text()
    assert code == 0 and text.count("layout:  2 ranks") == 1, text  # the first rank speaks for both
    assert [row["step"] for row in read_rows(out / "metrics.jsonl")] == [1, 2]
    assert (out / "hf/step_000002").is_dir()


# ---------------------------------------------------------------- the example for Slurm

STANDINS = {
    "srun": """echo "srun $*" >> calls
        trap "exit 0" TERM
        touch ready
        for i in $(seq 200); do sleep 0.05; done
        exit 3""",
    "scancel": 'echo "scancel $*" >> calls; kill -TERM $(cat rank)',
    "scontrol": 'echo "scontrol $*" >> calls',
}


@pytest.mark.parametrize("stopped", [True, False], ids=["time limit", "failure"])
def test_the_sbatch_example(tmp_path, stopped):
    """It is told of the time limit, has the ranks save and asks for another go; a run that fails gets none."""
    for name, body in STANDINS.items():
        body = body.replace("trap", "echo $$ > rank; trap") if stopped else body.replace("seq 200", "seq 1")
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = clean() | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    script = subprocess.Popen(["bash", REPO / "docs/train_grpo.sbatch", "--config", "x.yaml"], cwd=tmp_path, env=env)
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if stopped:
        script.send_signal(signal.SIGUSR1)
    code = script.wait(30)
    calls = (tmp_path / "calls").read_text().splitlines()
    srun = "srun --kill-on-bad-exit=1 --gpu-bind=none python train_grpo.py --config x.yaml resume=auto"
    if stopped:
        assert code == 0 and calls == [srun, "scancel --signal=TERM 4711", "scontrol requeue 4711"]
    else:
        assert code == 3 and calls == [srun]
