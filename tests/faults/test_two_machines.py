"""Two machines on this one: two network namespaces, each with a host name and an address, and a cable with a delay.
Real runs of two ranks on each, what breaks between them, and what the user sees (docs/dev/faults.md)."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import link
from tests.conftest import ForkedTraining, Training, check_complete

pytestmark = pytest.mark.slow

NAMES = ("north", "south")  # of ranks 0 and 1, where the rendezvous is too, and of ranks 2 and 3
DELAY_S = 0.005  # of each packet
STEPS = 6
STALL_S = 45  # longer than building takes
JOB = (
    "rollout.prompts_per_step=4", "rollout.group_size=8", f"train.steps={STEPS}", "train.warmup_steps=0",
    "train.save_every=2", f"train.stall_timeout_s={STALL_S}", "resume=auto",
)  # fmt: skip


class Machine:
    """A network namespace with a host name of its own."""

    def __init__(self, number: int):
        self.number, self.name, self.address = number, NAMES[number], link.ADDRESSES[number]
        hold = f"hostname {self.name} && echo ready && exec sleep infinity"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", hold], **pipes)
        if self.holder.stdout.readline() != "ready\n":
            pytest.skip(f"network namespaces are refused here: {self.holder.stderr.read().strip()}")

    def run(self, start: Callable[..., Training]) -> Training:
        """Two ranks of the job on this machine, by the fixture `start`."""
        options = (
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={link.ADDRESSES[0]}:29400", "--rdzv-id=two",
            f"--rdzv-conf=is_host={int(self.number == 0)}", f"--local-addr={self.address}", "--max-restarts=3",
        )  # fmt: skip
        inside = ("nsenter", f"--target={self.holder.pid}", "--net", "--uts", "env")
        env = {
            "GLOO_SOCKET_IFNAME": link.DEVICE,
            # Without it an agent that joins later waits in vain for the address of the store, which the first told
            # only once (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        return start(2, *JOB, options=options, prefix=inside, **env)


@pytest.fixture(scope="module")
def machines():
    """The two machines, and the process that is the cable between them."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("no unshare, ip or /dev/net/tun, of which the machines and their cable are made")
    started = []
    try:
        both = []
        for number in range(2):
            both.append(Machine(number))
            started.append(both[-1].holder)
        command = [sys.executable, link.__file__, *(str(holder.pid) for holder in started), str(DELAY_S)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        if started[-1].stdout.readline() != "ready\n":
            pytest.skip(f"namespaces cannot be joined here: {started[-1].stderr.read().strip()}")
        yield *both, started[-1]
    finally:
        for process in started:
            process.kill()
            process.wait()


def result(training) -> dict:
    """What neither a second machine nor a fault may change."""
    check_complete(training.out)
    return training.result(STEPS)


@pytest.fixture(scope="module")
def on_one_machine(fork_server, tiny, tmp_path_factory) -> dict:
    """The result of the job on four ranks of one machine."""
    out = tmp_path_factory.mktemp("single") / "out"
    return result(ForkedTraining(fork_server, tiny, out, *JOB, nproc=4, code=0))


def test_a_late_rendezvous_and_a_machine_that_is_slow_and_then_dies(machines, start, on_one_machine):
    north, south, _ = machines
    second = south.run(start)
    time.sleep(5)  # nobody holds the rendezvous that it looks for
    first = north.run(start)
    first.wait_for(rf"\] +2/{STEPS} ")
    assert "\nmachines: north on rank 0, 1; south on rank 2, 3\n" in first.text, first.text
    stopped = list(second.ranks().values())
    for number, seconds in ((signal.SIGSTOP, STALL_S / 3), (signal.SIGCONT, 0)):
        for pid in stopped:
            os.kill(pid, number)
        time.sleep(seconds)
    first.wait_for(rf"\] +3/{STEPS} ")
    assert "watchdog" not in first.text and "resume:  after" not in first.text, first.text
    second.kill()
    again = south.run(start)
    assert first.end() == 0 and again.end() == 0, first.text + again.text
    gone = r"\nerror: rank [01], in the phase \w+: another rank is gone \(.*go on with resume=auto\n"
    assert re.search(gone, first.text) and re.search(r"resume:  after step [24], from ", first.text), first.text
    assert result(first) == on_one_machine


def test_a_cut_cable(machines, start, on_one_machine):
    north, south, cable = machines
    first, second = north.run(start), south.run(start)
    first.wait_for(rf"\] +3/{STEPS} ")
    cable.send_signal(signal.SIGSTOP)
    try:
        first.wait_for(rf"watchdog, .*: no rank has finished a phase for {STALL_S} s\n")
        second.wait_for(r"Timeout \(0:01:05\)!\nThread 0x(.*\n)+?  File .*watchdog\.py\", line \d+ in _watch\n")
        second.kill()
    finally:
        cable.send_signal(signal.SIGCONT)
    again = south.run(start)
    assert first.end() == 0 and again.end() == 0, first.text + again.text
    for rank in (2, 3):
        silent = rf"\n   {rank}  [\d:]+  \w+ +process \d+ on south, no answer: stopped, dead or "
        assert re.search(silent, first.text), first.text
    assert re.search(r"resume:  after step [24], from ", first.text), first.text
    assert result(first) == on_one_machine
