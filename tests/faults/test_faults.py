"""What breaks around a run, done to real ones: what the user sees, and that resume=auto then ends with the same bits.

docs/dev/faults.md has the messages.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import REPO, Training, command_line

STEPS = 12
JOB = [
    "rollout.prompts_per_step=4", "rollout.group_size=8", f"train.steps={STEPS}", "train.warmup_steps=0",
    "train.save_every=2", "reward.timeout_s=100", "resume=auto",
]  # fmt: skip

# The demo's reward, which takes as long as a file named "pause" lies beside it.
REWARD = """
import pathlib, sys, time
sys.path.insert(0, "tools")
from tiny_reward import digits_in_place

pause = pathlib.Path(__file__).with_name("pause")

def reward(text, answer, row):
    while pause.exists():
        pause.with_name("paused").touch()
        time.sleep(0.05)
    return digits_in_place(text, answer, row)
"""


class Job(Training):
    """The job that all of these tests disturb, in a folder `base`."""

    def __init__(self, base: Path, *overrides: str):
        reward = f"reward.custom={base / 'reward.py'}:reward"
        super().__init__(base, base / "out", *JOB, reward, *overrides)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(rf"\] +{step}/{STEPS} ")


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def undisturbed(base) -> dict:
    job = Job(base)
    assert job.end() == 0, job.text
    result = job.result(STEPS)
    shutil.rmtree(job.out)
    return result


@pytest.fixture
def start(base, request):
    """start("section.key=value", ...) → Job; whatever is left is killed afterwards."""

    def one(*overrides: str) -> Job:
        job = Job(base, *overrides)
        request.addfinalizer(job.kill)
        return job

    def remove_files() -> None:
        shutil.rmtree(base / "out", ignore_errors=True)
        for name in ("pause", "paused"):
            (base / name).unlink(missing_ok=True)

    request.addfinalizer(remove_files)  # after the kills
    return one


@pytest.fixture
def disk(base, request):
    """disk(options of a tmpfs) mounts one on the output folder."""
    out = base / "out"

    def mount(options: str) -> Path:
        out.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", out], capture_output=True, text=True)
        if done.returncode:
            out.rmdir()
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", out], check=True))
        return out

    return mount


@pytest.mark.slow
@pytest.mark.gpu(ranks=2)
def test_a_killed_and_a_stopped_rank(start, undisturbed):
    job = start()
    job.wait_for_step(3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.end() == 1
    assert "exitcode  : -9" in job.text and "Signal 9 (SIGKILL) received by PID" in job.text, job.text
    assert re.search(
        r"\nerror: rank 0, in the phase \w+: another rank is gone \(.*go on with resume=auto", job.own_text
    )
    assert "then saving" not in job.text, job.text  # torchrun ends the others with SIGTERM

    job = start("train.stall_timeout_s=30")  # longer than building takes
    job.wait_for(r"resume:  after step [23456]")
    job.wait_for_step(7)
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for(rf"\n   1  .* no answer: stopped \(SIGSTOP\) \(process {stopped} on ")
    os.kill(stopped, signal.SIGKILL)  # torchrun would do so after 30 s
    assert job.end() == 1
    assert "watchdog: no rank has finished a phase for 30 s\nrank  phase       seconds  state\n" in job.text, job.text

    job = start()
    assert job.end() == 0 and "resume:  after step " in job.text, job.text
    assert torch.cuda.is_available() or job.result(STEPS) == undisturbed


@pytest.mark.slow
def test_stop_requests(start, base, undisturbed):
    job = start()
    job.wait_for_step(3)
    (base / "pause").touch()
    job.wait_for(base / "paused")
    job.ctrl_c()
    job.wait_for("SIGINT: finishing this phase, then saving; a second Ctrl-C stops at once")
    time.sleep(2.5)
    job.ctrl_c()
    began = time.monotonic()
    assert job.end() == 1 and time.monotonic() - began < 10
    assert "stopped after" not in job.text
    (base / "pause").unlink()

    job = start()
    job.wait_for_step(5)
    job.ctrl_c()
    assert job.end() == 1  # torchrun's own
    step = int(re.search(r"stopped after step (\d+), saved in .*; go on with resume=auto", job.text)[1])
    assert (job.out / f"checkpoints/step_{step:06d}").exists() and "exitcode" not in job.text, job.text

    job = start()
    job.wait_for(f"resume:  after step {step}, ")
    job.wait_for_step(step + 2)
    for process in job.family():  # as a scheduler may do it: every process, the grading ones too
        process.terminate()
    assert job.end() == 1
    step = int(re.search(r"stopped after step (\d+), saved in .*; go on with resume=auto", job.text)[1])

    job = start()
    assert job.end() == 0 and f"resume:  after step {step}, " in job.text, job.text
    assert job.result(STEPS) == undisturbed


@pytest.mark.slow
def test_a_full_disk(start, disk, undisturbed):
    folder = disk("size=64m")  # two checkpoints of 10 MB, one being written, an export
    for step, room in ((3, 1 << 20), (7, 0)):  # room for logs but not for a checkpoint; for nothing
        job = start()
        job.wait_for_step(step)
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
    job = start()
    assert job.end() == 0 and "resume:  after step " in job.text, job.text
    assert job.result(STEPS) == undisturbed


@pytest.mark.slow
def test_a_taken_port_without_torchrun(base):
    """As srun starts ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, "train_grpo.py", *command_line(base, base / "out", (), "tiny")]
        env = {**os.environ, **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"error: rank 0 cannot meet the others at 127.0.0.1:{port} (" in done.stderr
    assert "address already in use" in done.stderr and "choose another" in done.stderr
