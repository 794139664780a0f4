"""What breaks around a run, done to real ones (docs/dev/faults.md): what the user sees, and that the bits stay."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import REPO, ForkedTraining
from tests.processes import wait_until

pytestmark = pytest.mark.slow
STEPS = 12
JOB = (
    "rollout.prompts_per_step=4", "rollout.group_size=8", f"train.steps={STEPS}", "train.warmup_steps=0",
    "train.save_every=2", "resume=auto",
)  # fmt: skip


def wait_for_step(job, step):
    job.wait_for(rf"\] +{step}/{STEPS} ")


@pytest.fixture(scope="module")
def undisturbed(fork_server, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return ForkedTraining(fork_server, tiny, out, *JOB, nproc=2, code=0).result(STEPS)


@pytest.fixture
def check_the_end(train_forked, undisturbed):
    """check_the_end("3") lets the job go on after step 3. It must end as the undisturbed one does."""

    def check(step=""):
        run = train_forked(2, *JOB)
        assert run.code == 0 and f"resume:  after step {step}" in run.text, run.text
        assert torch.cuda.is_available() or run.result(STEPS) == undisturbed

    return check


@pytest.mark.gpu(ranks=2)
def test_a_killed_rank(start, check_the_end):
    job = start(2, *JOB)
    wait_for_step(job, 3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.end() == 1
    assert "exitcode  : -9" in job.text and "Signal 9 (SIGKILL) received by PID" in job.text, job.text
    assert re.search(
        r"\nerror: rank 0, in the phase \w+: another rank is gone \(.*go on with resume=auto", job.own_text
    )
    assert "then saving" not in job.text, job.text  # torchrun ends the others with SIGTERM
    check_the_end()


def test_stop_requests(start, check_the_end):
    job = start(2, *JOB)
    wait_for_step(job, 5)
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    assert job.end() == 1  # torchrun's own
    assert job.text.count("SIGINT: finishing this phase, then saving; a second Ctrl-C stops at once") == 1
    step = int(re.search(r"stopped after step (\d+), saved in .*; go on with resume=auto", job.text)[1])
    assert (job.out / f"checkpoints/step_{step:06d}").exists() and "exitcode" not in job.text, job.text

    job = start(2, *JOB)
    job.wait_for(f"resume:  after step {step}, ")
    wait_for_step(job, step + 2)
    for process in job.family():  # as a scheduler may do it: every process, the grading ones too
        process.terminate()
    assert job.end() == 1 and job.text.count("SIGTERM: finishing this phase, then saving") == 1
    check_the_end(re.search(r"stopped after step (\d+,) saved in .*; go on with resume=auto", job.text)[1])


def test_a_full_disk(start, check_the_end, tmp_path, request):
    folder = tmp_path / "out"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]  # two checkpoints of 10 MB, one more, an export
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", folder], check=True))

    for step, room in ((3, 1 << 20), (7, 0)):  # room for logs but not for a checkpoint; for nothing
        job = start(2, *JOB)
        wait_for_step(job, step)
        with (folder / "filler").open("wb") as file:
            while job.process.poll() is None:  # what an old checkpoint leaves is filled up too
                size = file.seek(0, os.SEEK_END)
                free = shutil.disk_usage(folder).free - room
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), size, max(free, 1))
                time.sleep(0.05)

        assert job.end() == 1
        said = r"\nerror: .*No space left on device.*[Mm]ake room, then go on with resume=auto"
        assert re.search(said, job.own_text, re.IGNORECASE) and "Traceback" not in job.own_text, job.text
        (folder / "filler").unlink()
    check_the_end()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap")
def test_the_demo_trains_on_a_bare_debian():
    """A quarter of an hour, mostly of download."""
    subprocess.run(["bash", REPO / "tests/bare_machine.sh"], check=True)


# The start of a run, and then, in place of its steps, all-reduces, until one of the ranks fails.
FAILS = """
import os, signal, sys
import torch
import train_grpo

def train(cfg, inputs, clock):
    for step in range(100):
        if step == 5 and torch.distributed.get_rank() == 17:
            if cfg.seed == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        torch.distributed.all_reduce(torch.zeros(1))

train_grpo.train = train
sys.exit(train_grpo.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "seed, told",
    [(0, "rank 17, in the phase start: out of GPU memory"), (1, r"rank \d+, in the phase start: another rank is gone")],
)
def test_a_failure_on_one_of_32_ranks_is_told_once(train_forked, tmp_path, seed, told):
    (tmp_path / "fails.py").write_text(FAILS)
    run = train_forked(32, f"seed={seed}", "rollout.prompts_per_step=32", script=tmp_path / "fails.py", code=1)
    (error,) = re.findall("(?m)^error: (.*)", run.text)
    assert re.match(told, error), run.text


# docs/train_grpo.sbatch with a real torchrun: srun, scancel, scontrol and what the ranks run are stand-ins.
STANDINS = {
    "srun": """echo "srun $*" >> calls
        shift
        echo $$ > torchrun.pid
        exec "$@" """,
    "scancel": 'echo "scancel $*" >> calls; kill -TERM $(cat torchrun.pid)',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "scontrol $*" >> calls',
}
RANK = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (open("saved." + os.environ["RANK"], "w"), sys.exit(0)))
open("ready." + os.environ["RANK"], "w")
signal.pause() if "stops" in sys.argv else sys.exit(3)
"""


@pytest.mark.parametrize("how", ["stops", "fails"])
def test_a_job_that_must_stop_saves_and_is_requeued_and_one_that_fails_is_not(tmp_path, how):
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train_grpo.py").write_text(RANK)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | job | {"SLURM_GPUS_ON_NODE": "2", "PATH": path}

    script = subprocess.Popen(["bash", REPO / "docs/train_grpo.sbatch", how], cwd=tmp_path, env=env)
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, 120)
    if how == "stops":
        script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 1  # torchrun's, of either

    srun, *calls = (tmp_path / "calls").read_text().splitlines()
    assert srun.startswith("srun --kill-on-bad-exit=1 torchrun --nnodes=1 --nproc_per_node=2 ")
    assert srun.endswith(f" --rdzv-endpoint=localhost:29400 train_grpo.py {how} resume=auto")
    stopped = ["scancel --signal=TERM 4711", "scontrol requeue 4711"]
    assert calls == (stopped if how == "stops" else [])
    assert len(list(tmp_path.glob("saved.*"))) == (2 if how == "stops" else 0)
