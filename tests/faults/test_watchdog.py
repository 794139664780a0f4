"""The watchdog, stop requests, the clock, and what ranks do together, each with real processes."""

import os
import re
import signal
import time

import pytest

from tests.processes import Torchrun

START = """
import os, signal, time
import torch, torch.distributed as dist
from support.base import ranks
from support.step.records import gather_samples
from support.run.clock import Clock, StopRequested, StopSignals
from support.run.watchdog import Watchdog

rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
ranks.die_with_torchrun()

def note(name):  # for the test: who got here
    print(f"{name}.{rank}.{restart}\\n", end="", flush=True)
"""
GROUP = START + "ranks.join_ranks(timeout_s=600)\n"
WATCHED = GROUP + "watchdog = Watchdog(timeout_s=3)\n"


def wait_for_notes(run: Torchrun, name: str, count: int = 2, restart: int = 0) -> None:
    for rank in range(count):
        run.wait_for(rf"\b{name}\.{rank}\.{restart}\n")


@pytest.fixture
def start(tmp_path, request):
    """start(program, options of torchrun, ...) → a Torchrun of two ranks; whatever is left is killed afterwards."""

    def one(program: str, *options: str, **settings) -> Torchrun:
        (tmp_path / "program.py").write_text(program)
        options = options or ("--standalone",)
        run = Torchrun(tmp_path / "output.txt", tmp_path / "program.py", options=options, **settings)
        request.addfinalizer(run.kill)
        return run

    return one


@pytest.fixture
def forked(fork_server, tmp_path):
    """forked(program) → what two ranks of the fork server have printed, once they have ended with 0."""

    def run(program: str) -> str:
        (tmp_path / "program.py").write_text(program)
        printed = tmp_path / "output.txt"
        assert fork_server.run(printed, tmp_path / "program.py", nproc=2) == 0, printed.read_text()
        return printed.read_text()

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
@pytest.mark.parametrize("stopped", [0, 2])  # rank 0 holds what the process group met at
def test_ranks_that_stand_still(start, stopped):
    waits = 2 - stopped
    run = start(WATCHED + STUCK + f"wait_for_the_other() if rank == {waits} else turn_in_circles()", nproc=3)
    wait_for_notes(run, "stuck", 3)
    pid = run.ranks()[stopped]
    time.sleep(0.7)  # for the last phase to reach the store
    os.kill(pid, signal.SIGSTOP)
    run.wait_for("most recent call last:")
    os.kill(pid, signal.SIGKILL)  # torchrun would do so after 30 s
    assert run.end() == 1
    report = re.split(r"\n(?:\[rank|Traceback|[WE]\d{4} )", run.text)[0]  # then torchrun, or a rank that lost the other
    assert "\nrank  phase       seconds  state\n" in report and re.search(rf"\n   {waits}  train +\d+  waits\n", report)
    assert re.search(r"\n   1  reward +\d+  lags\n", report)
    assert f"\n   {stopped}  reward            ?  no answer: stopped (SIGSTOP) (process {pid} on " in report
    assert "\nrank 1, most recent call last" in report and "in turn_in_circles" in report
    assert "in wait_for_the_other" not in report and run.text.count("watchdog:") == 1


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_python_shows_its_stack(start):
    hold = "\ndef hold():\n    import ctypes\n    ctypes.PyDLL(None).sleep(100)\n"
    run = start(WATCHED + STUCK + hold + "hold() if rank == 1 else wait_for_the_other()")
    assert run.end() == 1
    assert "no answer: in a call that never returns" in run.text
    assert re.search(r"\nprocess \d+ does not release Python's lock \(GIL\):\n", run.text), run.text
    assert re.search(r"hread .*\n.*program.py\", line \d+ in hold\n", run.text), run.text


@pytest.mark.slow
def test_no_false_alarm(start):
    """Each phase is shorter than the timeout, all together are longer; then the job is suspended; then it has ended."""
    program = """
for step in range(8):
    watchdog.enter(f"phase {step}")
    time.sleep(0.5)
    dist.all_reduce(torch.ones(1))
note("here")
time.sleep(1.5)
watchdog.stop()
time.sleep(4)
note("done")
"""
    run = start(WATCHED + program)
    wait_for_notes(run, "here")
    pids = run.ranks().values()
    for number, seconds in ((signal.SIGSTOP, 4), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    assert run.end() == 0 and "watchdog" not in run.text
    wait_for_notes(run, "done")


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [["--standalone"], ["--master-addr=127.0.0.1", "--master-port=29611"]])
def test_torchrun_restarts_the_ranks(start, rendezvous):
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
    run = start(early + WATCHED.removeprefix(START) + STUCK + program, *rendezvous, "--max-restarts=1")
    assert run.end() == 0, run.text
    wait_for_notes(run, "done", restart=1)


# ---------------------------------------------------------------- stop requests; test_faults.py has those that save


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_even_in_a_collective(start):
    run = start(GROUP + "StopSignals()\nnote('ready')\ndist.recv(torch.ones(1), 1) if rank == 0 else time.sleep(100)")
    wait_for_notes(run, "ready")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    assert len(run.ranks()) == 2
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1 and time.monotonic() - began < 10


TIED_LATE = """
torchrun = os.getppid()
note("ready")
while os.getppid() == torchrun:
    time.sleep(0.05)
ranks.die_with_torchrun()
note("alive")
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [START + "note('ready')\ntime.sleep(100)", START.replace("ranks.die_with_torchrun()", "") + TIED_LATE],
    ids=["tied to it at once", "tied when it has ended"],
)
def test_no_rank_outlives_torchrun(start, program):
    run = start(program)
    wait_for_notes(run, "ready")
    run.process.kill()
    run.end()
    assert "alive" not in run.text


# ---------------------------------------------------------------- the clock, and ranks together


def test_samples_are_gathered_by_group_with_texts_on_rank_0_alone(forked):
    program = """
from dataclasses import dataclass

@dataclass
class Answer:
    group: int
    text: str | None

def gather(samples):
    found, notes = gather_samples(samples, {"rank": rank})
    assert notes == [{"rank": 0}, {"rank": 1}]
    return [(sample.group, sample.text) for sample in found]

shares = [[Answer(2, "a"), Answer(2, ""), Answer(0, "b")], [Answer(1, "c"), Answer(1, "数学")]]
together = [(0, "b"), (1, "c"), (1, "数学"), (2, "a"), (2, "")]
assert gather(shares[rank]) == [(group, text if rank == 0 else None) for group, text in together]
assert gather([Answer(0, "d")] if rank else []) == [(0, "d" if rank == 0 else None)]  # a rank without any
"""
    forked(GROUP + program)


def test_ranks_agree_and_a_clock(forked):
    program = """
import math
from support.check import machines
assert ranks.on_any_rank(rank == 1) and not ranks.on_any_rank(False)
assert ranks.gather(rank) == [0, 1]
assert ranks.on_first_rank(lambda: "lock") == (None if rank else "lock")

def say_error(action, *arguments):
    try:
        action(*arguments)
    except (ranks.UserError, ranks.RankError) as error:
        print(f"{error}\\n", end="", flush=True)

say_error(ranks.on_first_rank, lambda: int("x"))
config = {"seed": 0, "train": {"lr": 1e-6}, "model": {"lr": 3}, "megatron": {"field": 1} if rank else {}}
machines.check_ranks({"seed": 0, "train": {"lr": 1e-6}, "model": {"lr": math.nan}}, "data.train", "1")
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
machines.check_groups({"tp": pair, "pp": alone if rank == 1 else None}, 30)
say_error(machines.check_ranks, config | {"train": {"lr": 1e-6 if rank == 0 else 1e-5}}, "data.train", "1")
if rank == 0:
    say_error(machines.check_groups, {"tp": pair}, 1)
dist.barrier()

clock = Clock(stall_timeout_s=60)
assert clock.phase == "start" and clock.signals.requested is None
with clock("train"):
    assert clock.phase == "train"
assert clock.phase == "step"
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
    text = forked(GROUP + program)
    assert "stopped.0.0" in text and "stopped.1.0" in text
    assert text.count("invalid literal for int()") == 2
    assert text.count("1 of 2 ranks have another configuration than rank 0") == 2
    assert text.count("  train.lr: 1e-06 on rank 0; 1e-05 on rank 1\n") == 2
    assert text.count("  megatron.field: not set on rank 0; 1 on rank 1\n") == 2
    assert "seed:" not in text and "model.lr:" not in text
    assert "the all-reduce of group tp (ranks 0, 1) did not finish within 1 s; likely a rank that died" in text
