"""What keeps a run from being lost, stuck or mixed up: stop requests, a store for restarts, a watchdog.

Knows torchrun and torch.distributed, no trainer. Importing it does nothing.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from support import sandbox

# ---------------------------------------------------------------- stop requests

SAME_REQUEST_S = 2.0  # a scheduler may signal every process while torchrun passes the same signal on


class StopSignals:
    """Turns SIGTERM and SIGINT into `requested`, the first one's name; make it on the main thread.

    `requested` is this rank's alone and changes at any moment: the ranks have to agree on it before they act.
    """

    # torchrun starts each rank in a session of its own, so a Ctrl-C reaches the ranks through torchrun only (torch
    # 2.13). It passes the signal on once, waits --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT; 30 s, before torch
    # 2.12 always), then kills. A second Ctrl-C makes it send SIGTERM, not SIGINT. Its own exit code is 1 either way.

    def __init__(self):
        self.requested: str | None = None
        self.ended = False  # nothing will be finished and saved any more
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A handler runs once the main thread is back in Python; the pipe is written at once, even in a collective.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _note(self, number: int, _frame=None) -> None:
        self.requested = self.requested or signal.Signals(number).name

    def _listen(self, pipe: int) -> None:
        first, since = None, 0.0
        while True:
            number = os.read(pipe, 1)[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if first is None:
                first, since = number, time.monotonic()
                self._note(number)
                if os.environ.get("RANK", "0") == "0" and not self.ended:
                    say(f"{self.requested}: finishing this phase, then saving; a second Ctrl-C stops at once")
            elif signal.SIGINT in (first, number) and time.monotonic() - since >= SAME_REQUEST_S:
                os._exit(130)


def say(text: str) -> None:
    """Write to standard error in one piece, whatever the main thread is doing with it."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def die_with_torchrun() -> None:
    """Be killed as soon as torchrun ends, however it does; call it early. Does nothing without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    sandbox.die_with_parent()
    if os.getsid(0) != os.getpid():
        return  # a wrapper script is in between
    parent = os.getppid()
    try:
        maps = Path(f"/proc/{parent}/maps").read_text(errors="replace")
        gone = bool(maps) and "libtorch" not in maps
    except OSError as error:
        gone = isinstance(error, PermissionError) and parent == 1  # an init of another user; torchrun can be read
    if gone:  # torchrun ended before this call, and another process adopted this one
        say("torchrun is gone, so this rank ends too")
        os._exit(1)


def fresh_store() -> dist.Store:
    """A store for init_process_group with nothing of an earlier start of these ranks in it. Every rank calls this.

    Under --max-restarts torchrun keeps its store (torch 2.13, pytorch issue 135712): a rank could read the address of a
    dead one there, then fail or hang. TORCHELASTIC_RESTART_COUNT does not tell the starts apart: each node has its own.
    So rank 0 gives this start a name, and tells it to each rank in reply to a number that only a living one waits on.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    name = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", name)
        name = store.get(f"name/{name}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    waiting = set(range(1, world_size))
    while waiting:
        for other in [r for r in waiting if store.check([f"hello/{r}"])]:
            store.set(f"name/{store.get(f'hello/{other}').decode()}", name)
        waiting = {r for r in waiting if not store.check([f"heard/{name}/{r}"])}
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


# ---------------------------------------------------------------- watchdog

STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "stuck in the kernel: a disk, network or GPU driver does not return",
    "Z": "dead",
}


class Watchdog:
    """Ends a run in which no rank has finished a phase for `timeout_s`, after printing which ranks lag, and where.

    Every rank makes one after init_process_group; 0 turns it off. All ranks exit with 1, so that torchrun
    --max-restarts can go on from a checkpoint. A rank whose main thread holds Python's lock inside a C call cannot
    answer: the others print and kill it, and it is asked for its stack by SIGUSR2.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s, self.interval = timeout_s, min(timeout_s / 10, 5.0)
        self.rank, self.host = int(os.environ["RANK"]), os.environ.get("GROUP_RANK", "0")
        self.at = (0, "start", time.monotonic())  # replaced as a whole, so no thread sees half of it
        self.total = 0  # phases that all ranks together have finished, as last heard
        self.alarm, self.ended = threading.Event(), threading.Event()
        self.talk = threading.Thread(target=self._talk, daemon=True)
        if timeout_s:
            name = [f"watchdog/{uuid.uuid4().hex}"]  # not the restart's count: see fresh_store
            dist.broadcast_object_list(name)
            self.name = name[0]
            if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                faulthandler.register(signal.SIGUSR2, all_threads=False)  # needs no lock of Python's
            atexit.register(self.stop)  # Python aborts if it ends while a thread is inside the store
            self.talk.start()
            threading.Thread(target=self._judge, daemon=True).start()

    def enter(self, phase: str) -> None:
        """Say that the main thread has finished a phase and what it does now. Costs a microsecond."""
        self.at = (self.at[0] + 1, phase, time.monotonic())

    @property
    def phase(self) -> str:
        """What the main thread does now."""
        return self.at[1]

    def stop(self) -> None:
        """Watch no longer: what follows may take as long as it likes."""
        if not self.ended.is_set():
            self.enter("ended")
            self.ended.set()
        if self.talk.is_alive():
            self.talk.join(2.0)

    def _talk(self) -> None:
        """Tell the others of this rank's phases and hear of theirs. All calls that may block are made here."""
        try:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
            store, told, ended = dist.PrefixStore(self.name, store), -1, False
            while True:
                sequence, phase, _ = self.at
                if sequence != told:
                    store.set(
                        f"at/{self.rank}", json.dumps([sequence, phase, self.host, os.getpid(), socket.gethostname()])
                    )
                    store.add("finished", sequence - told)
                    told = sequence
                self.total = store.add("finished", 0)
                if ended:
                    return
                if self.alarm.is_set() or store.check(["alarm"]):
                    self.alarm.set()
                    self._report(store)
                ended = self.ended.wait(self.interval)
        except Exception as error:  # torch's and Python's own; the store ends with torchrun, or with rank 0
            if not self.ended.is_set():
                what = str(error).splitlines()[0]
                say(f"rank {self.rank}: the watchdog lost torchrun's store and now sees this rank alone ({what})")

    def _judge(self) -> None:
        """Raise the alarm when all has stood still for too long; never blocks.

        Time counts only while this thread runs, so a job that its scheduler or a laptop suspended is not stuck.
        """
        idle, last, seen, patience = 0.0, time.monotonic(), None, 4 * self.interval + 15
        while not self.ended.wait(self.interval):
            now, progress = time.monotonic(), (self.total, self.at[0])
            idle = idle + min(now - last, 2 * self.interval) if progress == seen or self.alarm.is_set() else 0.0
            last, seen = now, progress
            if idle > self.timeout_s:
                self.alarm.set()
            if self.alarm.is_set() and (not self.talk.is_alive() or idle > self.timeout_s + patience):
                _, phase, since = self.at
                say(
                    f"watchdog: rank {self.rank} has been in the phase {phase!r} for {now - since:.0f} s, more than "
                    f"{self.timeout_s:g} s, and the store of torchrun does not answer\n{main_stack()}"
                )
                os._exit(1)

    def _report(self, store: dist.Store) -> None:
        """Write down where this rank is; the first to come prints all ranks. Ends the process."""
        first = store.add("alarm", 1) == 1
        sequence, phase, since = self.at
        seconds, workers = time.monotonic() - since, siblings()
        mine = [sequence, phase, seconds, main_stack(), self.host, workers]
        store.set(f"report/{self.rank}", json.dumps(mine))
        wait_s = 2 * self.interval + 3
        if first:
            say(self._table(store, wait_s))
            store.set("printed", "")
        store.wait(["printed"], timedelta(seconds=2 * wait_s + 5))
        # A silent rank, stopped or inside a C call, cannot take torchrun's SIGTERM either, and would cost it 30 s.
        silent = [pid for host, pid in json.loads(store.get("silent")) if host == self.host and str(pid) in workers]
        killer = store.add(f"kill/{self.host}", 1) == 1
        for pid in silent if killer else []:
            if workers[str(pid)] not in STATES:
                say(f"\nprocess {pid} asked for its stack:")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(0.6 if silent and not killer else 0.5)  # rank 0 may hold the store: all read, then end
        for pid in silent if killer else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _table(self, store: dist.Store, wait_s: float) -> str:
        """Phase and state of every rank, and the stacks of those that lag; also names the silent ones in the store."""
        ranks, deadline = range(dist.get_world_size()), time.monotonic() + wait_s
        while not store.check([f"report/{r}" for r in ranks]) and time.monotonic() < deadline:
            time.sleep(0.1)
        reports = {r: json.loads(store.get(f"report/{r}")) for r in ranks if store.check([f"report/{r}"])}
        known = {r: json.loads(store.get(f"at/{r}")) for r in ranks if store.check([f"at/{r}"])}
        workers = {host: states for *_, host, states in reports.values()}
        lowest = min([r[0] for r in reports.values()] + [k[0] for r, k in known.items() if r not in reports])
        lines = [f"watchdog: no rank has finished a phase for {self.timeout_s:g} s", "rank  phase       seconds  state"]
        silent, stacks = [], defaultdict(list)
        for rank in ranks:
            if rank in reports:
                sequence, phase, seconds, stack, *_ = reports[rank]
                lines.append(f"{rank:4d}  {phase:10s} {seconds:8.0f}  {'lags' if sequence == lowest else 'waits'}")
                if sequence == lowest:
                    stacks[stack].append(str(rank))
                continue
            _, phase, host, pid, name = known.get(rank, (0, "start", None, 0, ""))
            state = "stopped (SIGSTOP), dead, or in a call that never returns"
            if host in workers:  # another rank of this torchrun has looked
                state = STATES.get(workers[host].get(str(pid), "Z"), "in a call that never returns")
            where = f" (process {pid} on {name})" if pid else ""
            lines.append(
                f"{rank:4d}  {phase:10s} {'?':>8s}  " + ("ended" if phase == "ended" else f"no answer: {state}{where}")
            )
            if pid and phase != "ended":
                silent.append((host, pid))
        store.set("silent", json.dumps(silent))
        for stack, which in stacks.items():
            lines.append(f"\nrank{'s' * (len(which) > 1)} {', '.join(which)}, most recent call last:\n{stack}")
        return "\n".join(lines)


def main_stack() -> str:
    """Where the main thread is, as in a traceback."""
    return "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])).rstrip()


def siblings() -> dict[str, str]:
    """The processes that torchrun, this one's parent, started on this host, and their states: {id: letter in /proc}."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid():
                found[stat.parent.name] = state
    return found
