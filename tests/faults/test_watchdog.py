"""The watchdog, stop requests, the clock, and what ranks do together, each with real processes."""

import re
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPO
from tests.processes import Torchrun

START = """
import os, signal, time
import torch, torch.distributed as dist
from grpo.parts.base import ranks
from grpo.run.clock import Clock, StopRequested, StopSignals
from grpo.run.watchdog import Watchdog

rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
ranks.die_with_torchrun()

def note(name):  # for the test: who got here
    print(f"{name}.{rank}.{restart}\\n", end="", flush=True)
"""
GROUP = START + "ranks.join_ranks(timeout_s=600)\n"
WATCHED = GROUP + "watchdog = Watchdog(timeout_s=3)\n"


def wait_for_notes(run, name, restart=0):
    for rank in range(2):
        run.wait_for(rf"\b{name}\.{rank}\.{restart}\n")


@pytest.fixture
def torchrun(tmp_path, request):
    """torchrun(program, ...) → a Torchrun of two ranks; whatever is left is killed afterwards."""

    def one(program, **settings):
        (tmp_path / "program.py").write_text(program)
        run = Torchrun(tmp_path / "output.txt", tmp_path / "program.py", **settings)
        request.addfinalizer(run.kill)
        return run

    return one


# ---------------------------------------------------------------- the watchdog

HANG = """
import os, sys, time
where = os.environ["HANG"] if os.environ["RANK"] == "1" else ""

def reward(text, answer, row):
    time.sleep(1000 if where == "reward" else 0)
    return 0.0

if __name__ == "__main__":
    import ctypes, train_grpo
    if where == "rollout":
        from vllm.v1.engine.llm_engine import LLMEngine
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        # Never returns, and holds the GIL; before it the watchdog's thread publishes the phase.
        LLMEngine.add_request = lambda *_: time.sleep(1) or lock(mutex) or lock(mutex)
    sys.exit(train_grpo.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase, line", [("reward", "in collect"), ("rollout", "<lambda>")])
def test_a_run_of_two_ranks_one_of_which_hangs(start, tmp_path, phase, line):
    """In a reward, and in vLLM without a chance to answer; the other one in a collective."""
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    keys = (f"reward.custom={script}:reward", "reward.timeout_s=900", "train.stall_timeout_s=20")  # building takes less
    run = start(2, *keys, script=script, HANG=phase)
    assert run.end() == 1
    silent = ", no answer: stopped, dead or in a call that holds Python's lock" if phase == "rollout" else ""
    table = r"\nwatchdog, [\d:]{8}: no rank has finished a phase for 20 s\nrank  since     phase\n"
    table += r"   0  [\d:]{8}  \w+ +process \d+ on \S+\n"
    table += rf"   1  [\d:]{{8}}  {phase} +process \d+ on \S+{silent}\n"
    assert re.search(table, run.text), run.text
    stacks = r"\nrank 0, most recent call last:\n(  .*\n)+?  .*torch/distributed/.*\n"
    own = r"Timeout \(0:00:40\)!\n(.*\n)*?" if silent else r"\nrank 1, most recent call last:\n(  .*\n)+?"
    assert re.search(stacks, run.text) and re.search(rf"{own}  .* {line}\n", run.text), run.text


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [["--standalone"], ["--master-addr=127.0.0.1", "--master-port=29611"]])
def test_torchrun_restarts_the_ranks(torchrun, rendezvous):
    early = START + "if restart == '1' and rank == 0: time.sleep(2)  # rank 1 finds only what the first rank 0 left\n"
    program = """
if restart == "0":
    time.sleep(1000) if rank == 1 else dist.barrier()
dist.all_reduce(torch.ones(1))
watchdog.enter("train")
time.sleep(1.2)  # what the first ranks left in the store is no alarm
watchdog.stop()
note("done")
"""
    run = torchrun(early + WATCHED.removeprefix(START) + program, options=(*rendezvous, "--max-restarts=1"))
    assert run.end() == 0, run.text
    wait_for_notes(run, "done", restart=1)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_even_in_a_collective(torchrun):
    program = "StopSignals()\nnote('ready')\ndist.recv(torch.ones(1), 1) if rank == 0 else time.sleep(100)"
    run = torchrun(GROUP + program)
    wait_for_notes(run, "ready")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    assert len(run.ranks()) == 2
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1 and time.monotonic() - began < 10


STOPS = """
import os, signal, sys, time
from grpo.run.clock import StopSignals
for case in sys.argv[1:]:
    name = case.removeprefix("nohup ")
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if case == name else signal.SIG_IGN)
        read, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)  # nobody reads what this process prints, as where an ssh has ended
        signals = StopSignals()
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.3)
        print("stopped", flush=True)
        os._exit(0 if signals.requested == name else 9)
    print(case, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_what_asks_to_stop_and_is_ignored_under_nohup():
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"]
    program = [sys.executable, "-c", STOPS, *names, "nohup SIGHUP"]
    text = subprocess.check_output(program, cwd=REPO, text=True)
    assert text.splitlines() == [*(f"{name} 0" for name in names), "nohup SIGHUP 1"]  # 1: its print failed


@pytest.mark.slow
def test_no_rank_outlives_torchrun(torchrun):
    run = torchrun(START + "note('ready')\ntime.sleep(100)")
    wait_for_notes(run, "ready")
    run.process.kill()
    run.end()


def test_ranks_agree_and_a_clock(fork_server, tmp_path):
    program = """
from grpo.run.preflight import machines
assert ranks.on_any_rank(rank == 1) and not ranks.on_any_rank(False)
assert ranks.gather(rank) == [0, 1]
assert ranks.on_first_rank(lambda: "lock") == (None if rank else "lock")

def say_error(action, *arguments):
    try:
        action(*arguments)
    except (ranks.UserError, ranks.RankError) as error:
        print(f"{error}\\n", end="", flush=True)

say_error(ranks.on_first_rank, lambda: int("x"))
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
machines.check_groups({"tp": pair, "pp": alone if rank == 1 else None}, 30)
say_error(machines.check_ranks, {"seed": rank}, "data.train", {"rows": "1", "token ids": "1"})
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
    script, printed = tmp_path / "program.py", tmp_path / "output.txt"
    script.write_text(GROUP + program)
    code = fork_server.run(printed, script, nproc=2)
    text = printed.read_text()
    assert code == 0, text
    assert "stopped.0.0" in text and "stopped.1.0" in text
    assert text.count("invalid literal for int()") == 2
    assert text.count("the ranks have different configurations") == 2
    assert text.count("  seed: 0 on rank 0; 1 on rank 1\n") == 2
    assert "the all-reduce of group tp (ranks 0, 1) gave " in text and "; likely a rank that died" in text
