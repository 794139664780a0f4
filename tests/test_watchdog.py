"""The watchdog, stop requests, the clock, and what ranks do together, each with real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.base import processes
from tests.conftest import REPO

START = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from support.base import ranks
from support.step.records import gather_samples
from support.run.clock import Clock, StopRequested
from support.run.signals import StopSignals
from support.run.watchdog import Watchdog

folder, rank, restart = Path(sys.argv[1]), int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
ranks.die_with_torchrun()

def note(name):  # for the test: who got here
    (folder / f"{name}.{rank}.{restart}").write_text(str(os.getpid()))

note("pid")
"""
GROUP = START + "ranks.join_ranks(timeout_s=600)\n"
WATCHED = GROUP + "watchdog = Watchdog(timeout_s=3)\n"


class Started:
    """A running torchrun of two ranks that execute `program`."""

    def __init__(self, folder: Path, program: str, *options: str, nproc: int = 2, **env: str):
        self.folder, self.output = folder, folder / "output.txt"
        (folder / "program.py").write_text(program)
        rendezvous = [] if any("rdzv" in o or "master" in o for o in options) else ["--standalone"]
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc_per_node={nproc}", *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **env}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*command, str(folder / "program.py"), str(folder)], env=env, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, *names: str, seconds: float = 120) -> list[int]:
        """Wait until the ranks have noted these names, "name.rank.restart"; the process ids."""
        deadline = time.monotonic() + seconds
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.05)
        return [int((self.folder / name).read_text()) for name in names]

    def end(self, seconds: float = 120) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def living(self) -> list[int]:
        """Ranks that still run; a killed one may take a moment."""
        deadline = time.monotonic() + 5
        while True:
            found = []
            for note in self.folder.glob("pid.*"):
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{note.read_text()}/stat").read_text().rpartition(")")[2]
                    found += [int(note.read_text())] if stat.split()[0] not in "ZX" else []
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


@pytest.fixture
def start(tmp_path):
    """start(program, *torchrun's options, NAME=...) → Started; whatever is left is killed afterwards."""
    runs = []

    def one(program: str, *options: str, **settings) -> Started:
        runs.append(Started(tmp_path, program, *options, **settings))
        return runs[-1]

    yield one
    for run in runs:
        run.process.kill()
        for pid in run.living():
            processes.kill_family(pid)


@pytest.fixture
def forked(fork_server, tmp_path):
    """forked(program) → what two ranks of the fork server have noted and printed, once they have ended with 0."""

    def run(program: str) -> tuple[set[str], str]:
        (tmp_path / "program.py").write_text(program)
        printed = tmp_path / "output.txt"
        code = fork_server.run(printed, tmp_path / "program.py", str(tmp_path), nproc=2)
        text = printed.read_text()
        assert code == 0, text
        return {path.stem for path in tmp_path.glob("*.*.0")}, text

    return run


# ---------------------------------------------------------------- the watchdog

STUCK = """
def wait_for_the_other():
    watchdog.enter("train")
    note("stuck")
    dist.all_reduce(torch.ones(1))

def turn_in_circles():
    note("stuck")
    while True:
        time.sleep(0.01)

watchdog.enter("reward")
time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])  # rank 0 holds what the process group met at
def test_a_stopped_rank(start, stopped):
    run = start(WATCHED + STUCK + f"turn_in_circles() if rank == {stopped} else wait_for_the_other()")
    pids = run.wait_for("stuck.0.0", "stuck.1.0")
    time.sleep(1)  # for the last phase to reach the store
    os.kill(pids[stopped], signal.SIGSTOP)
    began = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - began < 25  # torchrun alone gives a stopped rank 30 s
    assert f"   {stopped}  reward            ?  no answer: stopped (SIGSTOP) (process {pids[stopped]}" in run.text
    assert f"   {1 - stopped}  train     " in run.text and "rank  phase       seconds  state" in run.text
    assert run.text.count("watchdog:") == 1 and not run.living()


@pytest.mark.slow
def test_ranks_that_stand_still(start):
    run = start(WATCHED + STUCK + "wait_for_the_other() if rank == 0 else turn_in_circles()", nproc=3)
    pids = run.wait_for("stuck.0.0", "stuck.1.0", "stuck.2.0")
    time.sleep(0.7)  # for the last phase to reach the store
    os.kill(pids[2], signal.SIGSTOP)
    assert run.end() == 1
    report = re.split(r"\n(?:\[rank|Traceback|[WE]\d{4} )", run.text)[0]  # then torchrun, or a rank that lost the other
    assert re.search(r"\nrank  phase       seconds  state\n   0  train +\d+  waits\n   1  reward +\d+  lags\n", report)
    assert f"\n   2  reward            ?  no answer: stopped (SIGSTOP) (process {pids[2]} on " in report
    assert "rank 1, most recent call last" in report and "in turn_in_circles" in report
    assert "in wait_for_the_other" not in report
    assert run.text.count("watchdog:") == 1 and not run.living()


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_python_shows_its_stack(start):
    hold = "\ndef hold():\n    import ctypes\n    ctypes.PyDLL(None).sleep(100)\n"
    run = start(WATCHED + STUCK + hold + "hold() if rank == 1 else wait_for_the_other()")
    assert run.end() == 1
    assert "no answer: in a call that never returns" in run.text
    assert re.search(r"process \d+ does not release Python's lock \(GIL\):\nTimeout", run.text), run.text
    assert re.search(r"Thread .*\n.*program.py\", line \d+ in hold\n", run.text), run.text
    assert not run.living()


@pytest.mark.slow
def test_no_false_alarm(start):
    program = """
for step in range(12):  # each phase shorter than the timeout, all of them longer
    watchdog.enter(f"phase {step}")
    time.sleep(0.5)
    dist.all_reduce(torch.ones(1))
watchdog.stop()
time.sleep(4)
note("done")
"""
    run = start(WATCHED + program)
    assert run.end() == 0 and "watchdog" not in run.text
    assert all((run.folder / f"done.{rank}.0").exists() for rank in (0, 1))


@pytest.mark.slow
def test_a_suspended_job_is_not_stuck(start):
    program = """
watchdog.enter("rollout")
note("here")
time.sleep(1.5)
watchdog.stop()
"""
    run = start(WATCHED + program)
    pids = run.wait_for("here.0.0", "here.1.0")
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    assert run.end() == 0 and "watchdog" not in run.text


RENDEZVOUS = {
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1"],
    "static": ["--master-addr=127.0.0.1", "--master-port=29611"],
    "standalone": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RENDEZVOUS)
def test_torchrun_restarts_the_ranks(start, kind):
    early = START + "if restart == '1' and rank == 0: time.sleep(2)  # rank 1 finds only what the first rank 0 left\n"
    program = """
if restart == "0":
    turn_in_circles() if rank == 1 else wait_for_the_other()
dist.all_reduce(torch.ones(1))
watchdog.enter("train")
time.sleep(4 * watchdog.interval)  # what the first ranks left in the store is no alarm
watchdog.stop()
note("done")
"""
    run = start(early + WATCHED.removeprefix(START) + STUCK + program, *RENDEZVOUS[kind], "--max-restarts=1")
    assert run.end() == 0, run.text
    assert (run.folder / "done.0.1").exists() and (run.folder / "done.1.1").exists() and not run.living()


@pytest.mark.slow  # for 15 s the ranks hope for the store, then torchrun gives the stopped rank 30 s
def test_a_store_that_does_not_answer(start):
    run = start(
        WATCHED + STUCK + "turn_in_circles() if rank == 0 else wait_for_the_other()",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # rank 0 holds the store
    )
    pids = run.wait_for("stuck.0.0", "stuck.1.0")
    os.kill(pids[0], signal.SIGSTOP)
    assert run.end() == 1
    assert "rank 1 has been in the phase 'train'" in run.text and "in wait_for_the_other" in run.text
    assert not run.living()


# ---------------------------------------------------------------- stop requests

STOP = """
stop = StopSignals()
note("ready")
while not stop.requested:
    time.sleep(0.05)
note(stop.requested)
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_lets_the_ranks_finish(start, name):
    run = start(START + STOP + "time.sleep(1)\nnote('done')")
    run.wait_for("ready.0.0", "ready.1.0")
    run.process.send_signal(getattr(signal, name))
    assert run.end() == 1  # torchrun's own, whatever the ranks exit with
    assert all((run.folder / f"{what}.{r}.0").exists() for what in (name, "done") for r in (0, 1))
    assert run.text.count(f"{name}: finishing this phase, then saving; a second Ctrl-C stops at once") == 1


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_even_in_a_collective(start):
    program = """
stop = StopSignals()
note("ready")
dist.recv(torch.ones(1), 1) if rank == 0 else time.sleep(100)
"""
    run = start(GROUP + program)
    run.wait_for("ready.0.0", "ready.1.0")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    assert all(Path(f"/proc/{pid}").exists() for pid in run.wait_for("pid.0.0", "pid.1.0"))
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1 and time.monotonic() - began < 10 and not run.living()


def test_no_rank_outlives_torchrun(start):
    run = start(START + "note('ready')\ntime.sleep(100)")
    run.wait_for("ready.0.0", "ready.1.0")
    run.process.kill()
    run.end()
    assert not run.living()


@pytest.mark.slow
def test_torchrun_may_end_before_a_rank_is_tied_to_it(start):
    program = """
torchrun = os.getppid()
note("ready")
while os.getppid() == torchrun:
    time.sleep(0.05)
ranks.die_with_torchrun()
note("alive")
time.sleep(100)
"""
    run = start(START.replace("ranks.die_with_torchrun()", "") + program, nproc=1)
    run.wait_for("ready.0.0")
    run.process.kill()
    run.end()
    assert not run.living() and not (run.folder / "alive.0.0").exists()


# ---------------------------------------------------------------- the clock, and ranks together


def test_gather_keeps_everything(forked):
    program = """
import numpy as np
from dataclasses import dataclass

@dataclass
class Answer:
    group: int
    ids: np.ndarray
    text: str | None
    parts: dict

def ids(*values):
    return np.array(values, np.int32)

def shares():  # of each rank: odd sizes, nothing in an array, text of many alphabets, two samples that share an array
    shared = ids(7, 8, 9)
    return [
        [Answer(2, ids(1), "ab", {"x": 0.5}), Answer(2, ids(), "", {}), Answer(0, shared, "été 😀", {"y": -1.0})],
        [Answer(1, ids(*range(1000)), "数学\\n", {"x": np.float64(0.1)}), Answer(1, shared, "z", {})],
    ]

samples, notes = gather_samples(shares()[rank], {"rank": rank})
assert notes == [{"rank": 0}, {"rank": 1}]
a, b = shares()
for sample, was in zip(samples, [a[2], b[0], b[1], a[0], a[1]], strict=True):
    assert (sample.group, sample.ids.tolist(), sample.parts) == (was.group, was.ids.tolist(), was.parts)
    assert sample.ids.dtype == np.int32 and sample.text == (was.text if rank == 0 else None)
samples, _ = gather_samples(shares()[0] if rank else [], None)  # a rank without any
assert [s.text for s in samples] == (["été 😀", "ab", ""] if rank == 0 else [None] * 3)

value = {"rank": rank, "odd": np.arange(rank * 3, dtype=np.int8), "cut": np.arange(6.0)[::2], "words": ["é" * rank]}
zero, one = ranks.gather(value)
assert (zero["rank"], zero["odd"].tolist(), zero["words"]) == (0, [], [""])
assert (one["rank"], one["odd"].tolist(), one["words"]) == (1, [0, 1, 2], ["é"])
assert zero["cut"].tolist() == one["cut"].tolist() == [0, 2, 4]
note("same")
"""
    noted, _ = forked(GROUP + program)
    assert noted >= {"same.0", "same.1"}


def test_ranks_agree_and_a_clock(forked):
    program = """
import math
from support.check import preflight
assert ranks.on_any_rank(rank == 1) and not ranks.on_any_rank(False)
assert ranks.gather(rank) == [0, 1]
assert ranks.on_first_rank(lambda: "lock") == (None if rank else "lock")
try:
    ranks.on_first_rank(lambda: int("x"))
except ranks.UserError as error:
    print(f"first rank: {error}\\n", end="", flush=True)
config = {"seed": 0, "train": {"lr": 1e-6}, "model": {"lr": 3}, "megatron": {"field": 1} if rank else {}}
preflight.check_same_config({"seed": 0, "train": {"lr": 1e-6}, "model": {"lr": math.nan}})
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
preflight.check_groups({"tp": pair, "pp": alone if rank == 1 else None}, 30)
try:
    preflight.check_same_config(config | {"train": {"lr": 1e-6 if rank == 0 else 1e-5}})
except ValueError as error:
    print(f"{error}\\n", end="", flush=True)
if rank == 0:
    try:
        preflight.check_groups({"tp": pair}, 1)
    except ValueError as error:
        print(f"{error}\\n", end="", flush=True)
dist.barrier()

clock = Clock(stall_timeout_s=60)
assert clock.phase == "start" and clock.seconds == {} and clock.signals.requested is None
clock.enter("build")
assert clock.phase == "build"
time.sleep(0.2)
clock.start_step(1)
for _ in range(2):
    with clock("train"):
        assert clock.phase == "train"
        time.sleep(0.1)
assert clock.phase == "step" and list(clock.seconds) == ["train"]
seconds = clock.end_step()
assert 0.2 <= seconds["train"] <= seconds["step"] < 0.4
assert math.isclose(seconds["train"] + seconds["other"], seconds["step"], abs_tol=1e-6)
try:
    with clock("rollout"):
        raise MemoryError
except MemoryError:
    assert clock.phase == "rollout"  # what a message names
clock.check_stop()
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    while clock.signals.requested is None:
        time.sleep(0.01)
try:
    clock.check_stop()
except StopRequested:
    note("stopped")
clock.stop()
assert clock.phase == "ended"
"""
    noted, text = forked(GROUP + program)
    assert noted >= {"stopped.0", "stopped.1"}
    assert text.count("first rank: invalid literal for int()") == 2
    assert text.count("1 of 2 ranks have another configuration than rank 0") == 2
    assert text.count("  train.lr: 1e-06 on rank 0; 1e-05 on rank 1\n") == 2
    assert text.count("  megatron.field: not set on rank 0; 1 on rank 1\n") == 2
    assert "seed:" not in text and "model.lr:" not in text
    assert "the all-reduce of group tp (ranks 0, 1) did not finish within 1 s; likely a rank that died" in text
