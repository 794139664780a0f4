"""Two torchruns of two ranks each, as on two machines: what breaks between them, and what the user sees
(docs/dev/faults.md)."""

import re
import time

import psutil
import pytest

from tests.conftest import ForkedTraining, check_complete
from tests.fork_server import free_port

pytestmark = pytest.mark.slow

STEPS = 6
STALL_S = 45  # longer than building takes
JOB = (
    "rollout.prompts_per_step=4", "rollout.group_size=8", f"train.steps={STEPS}", "train.warmup_steps=0",
    "train.save_every=2", f"train.stall_timeout_s={STALL_S}", "resume=auto",
)  # fmt: skip


@pytest.fixture
def machine(start):
    """machine(0 or 1) → the torchrun of two ranks there; the rendezvous is on machine 0."""
    port = free_port()

    def run(number):
        options = (
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two",
            f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=127.0.0.{1 + number}", "--max-restarts=3",
        )  # fmt: skip
        # Without it an agent that joins later waits in vain for the address of the store, which the first agent
        # announces only once (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
        return start(2, *JOB, options=options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    return run


@pytest.fixture
def check_the_end(fork_server, tiny, tmp_path):
    """check_the_end(both) → what machine 0 printed. The result must have the bits of four ranks on one machine."""

    def check(*both):
        assert [run.end() for run in both] == [0, 0], both[0].text + both[1].text
        single = ForkedTraining(fork_server, tiny, tmp_path / "single", *JOB, nproc=4, code=0)
        for run in (single, both[0]):
            check_complete(run.out)
        assert both[0].result(STEPS) == single.result(STEPS)
        assert re.search(r"resume:  after step [24], from ", both[0].text), both[0].text
        return both[0].text

    return check


def test_a_machine_that_comes_late_stands_still_and_then_is_silent(machine, check_the_end):
    """Its connections stay open."""
    second = machine(1)
    time.sleep(5)  # nobody holds the rendezvous that it looks for
    first = machine(0)
    first.wait_for(rf"\] +2/{STEPS} ")

    # A pause is no alarm.
    ranks = [psutil.Process(pid) for pid in second.ranks().values()]
    for rank in ranks:
        rank.suspend()
    time.sleep(STALL_S / 3)
    for rank in ranks:
        rank.resume()
    first.wait_for(rf"\] +3/{STEPS} ")
    assert "watchdog" not in first.text and "resume:  after" not in first.text, first.text

    # Silence is one, and another machine takes its place.
    for process in second.family():
        process.suspend()
    first.wait_for(rf"watchdog, .*: no rank has finished a phase for {STALL_S} s\n")
    second.kill()
    text = check_the_end(first, machine(1))
    for rank in (2, 3):
        assert re.search(rf"\n   {rank}  [\d:]+  \w+ +process \d+ on .*, no answer: stopped, dead or ", text), text
