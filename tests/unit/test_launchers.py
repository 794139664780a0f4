"""Ranks that srun, mpirun or a user's own hand has started find themselves and train."""

import contextlib
import os
import signal
import subprocess

import pytest

from config import UserError
from support.base import versions
from support.base.launchers import MASTER_NAMES, PORTS, RANK_NAMES, environment, port
from support.check import machines
from tests.conftest import REPO, command_line, read_rows, tiny_config
from tests.processes import wait_until

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


PORT = port(SRUN)
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1234"}


def world(*values: int | str) -> dict[str, str]:
    """Rank, size, local rank, local size, address, port, or the first of these, as variables."""
    return dict(zip((*RANK_NAMES, *MASTER_NAMES), map(str, values), strict=False))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # torchrun's are left alone, under srun too
        (TORCHRUN, {}), (TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, {}),
        ({name: TORCHRUN[name] for name in (*RANK_NAMES[:3], "MASTER_ADDR")} | SRUN,
         {"LOCAL_WORLD_SIZE": "8", "MASTER_PORT": PORT}),
        # srun
        (SRUN, world(9, 16, 1, 8, "gpu03", PORT)),
        (SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "1"}, world(9, 16, 1, 8)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
                 "SLURM_PROCID": "1"}, world(1, 2, 1, 2, "127.0.0.1", PORT)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "12,4"}, world(9, 16, 1, 4, "gpu03", PORT)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, world(9, 16, 1, 2, "gpu03", PORT)),
        # what a batch script starts itself is no rank
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}, {}), ({}, {}),
        # mpirun; in a Slurm job it starts its daemons by srun, whose ranks are those of the machines
        (OPEN_MPI, world(3, 8, 3, 8, "127.0.0.1", "29500")), (INTEL_MPI, world(5, 8, 1, 4) | {"MASTER_PORT": "29500"}),
        (INTEL_MPI | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
         world(5, 8, 1, 4, "gpu03", PORT)),
        # by hand: what follows from the address
        (BY_HAND | {"MASTER_ADDR": "localhost"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}),
        (BY_HAND | {"MASTER_ADDR": "pod-0"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (BY_HAND | {"MASTER_ADDR": "gpu01", "LOCAL_RANK": "1"}, {}), ({"RANK": "0"}, {}),
        ({"RANK": "0", "WORLD_SIZE": "1"},
         {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}),
    ],
)  # fmt: skip
def test_what_follows_from_the_variables_of_a_launcher(given, wanted):
    assert environment(given) == wanted


def test_the_port_is_that_of_the_job():
    assert int(PORT) in PORTS and port(SRUN | {"SLURM_STEP_ID": "1"}) != PORT
    named = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-laptop-17@1"}
    assert environment(named)["MASTER_PORT"] == environment(named | {"OMPI_COMM_WORLD_RANK": "4"})["MASTER_PORT"]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("laptop", "laptop"), ("a1,a2", "a1"), ("node[01-04,7]", "node01"), ("node[7,9-12],login", "node7"),
        ("rack[2-3]n[05-06]", "rack2n05"), ("gpu-a[1-2].site.org,b", "gpu-a1.site.org"),
    ],
)  # fmt: skip
def test_first_host(hosts, first):
    assert environment(SRUN | {"SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


STARTED = SRUN | environment(SRUN)
GPUS = {"is_available": True, "device_count": 8, "get_device_name": "NVIDIA H100", "get_device_capability": (9, 0)}
MIG = {"device_count": 1, "get_device_name": "NVIDIA H100 MIG 1g.10gb"}
EXACT = ["rollout.exact=true"]


@pytest.mark.parametrize(
    ("env", "gpus", "header", "keys", "message"),
    [
        ({"SLURM_JOB_ID": "4711"}, {}, None, [], r"start with torchrun .*; in this Slurm job: srun python train_grpo"),
        (environment(INTEL_MPI), {}, None, [], r"rank 5 was started without MASTER_ADDR: .* -x MASTER_ADDR=HOST"),
        (STARTED, {}, None, [], None),
        (STARTED, {}, None, [f"profile.{key}" for key in ("start=1", "stop=1", "memory=true")],
         r"profile.memory=true: .* there is no GPU here"),
        (STARTED, GPUS | MIG, "Python.h", [],
         "has 1 GPU: one process a GPU; if srun binds one GPU to each, add --gpu-bind=none to it; with MIG one"),
        (STARTED, GPUS, "Python.h", [], None), (STARTED, GPUS, "Python.h", EXACT, None),
        (STARTED, GPUS | {"get_device_capability": (8, 0)}, "Python.h", EXACT,
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
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        machines.check_start(cfg)


# ---------------------------------------------------------------- real runs

SMALL = ("train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4")


def clean() -> dict[str, str]:
    """The environment without any launcher's variables."""
    launcher = (*RANK_NAMES, *MASTER_NAMES, "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return ours | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.slow
def test_two_ranks_with_the_variables_of_srun_train(fork_server, tiny, tmp_path):
    out, printed = tmp_path / "out", tmp_path / "printed.txt"
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    ranks = [clean() | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    code = fork_server.run_ranks(printed, ["train_grpo.py", *command_line(tiny, out, SMALL, "tiny")], ranks, port=None)
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
    wait_until((tmp_path / "ready").exists)
    if stopped:
        script.send_signal(signal.SIGUSR1)
    code = script.wait(30)
    calls = (tmp_path / "calls").read_text().splitlines()
    srun = "srun --kill-on-bad-exit=1 --gpu-bind=none python train_grpo.py --config x.yaml resume=auto"
    if stopped:
        assert code == 0 and calls == [srun, "scancel --signal=TERM 4711", "scontrol requeue 4711"]
    else:
        assert code == 3 and calls == [srun]
