"""Ends a run that stands still, and says which rank stands where.

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

import psutil
import torch.distributed as dist

from support.ranks import say

STATES = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "stuck in the kernel: a disk, network or GPU driver does not return",
    psutil.STATUS_ZOMBIE: "dead",
}


class Watchdog:
    """Ends a run in which no rank has finished a phase for `timeout_s`, after printing which ranks lag, and where.

    Every rank makes one after init_process_group; 0 turns it off. All ranks exit with 1, so that torchrun
    --max-restarts can go on from a checkpoint. A rank whose thread holds Python's lock inside a C call cannot answer:
    the others print, read the stacks that its faulthandler has written down, and kill it.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s, self.interval = timeout_s, min(timeout_s / 10, 5.0)
        self.rank, self.host = int(os.environ["RANK"]), os.environ.get("GROUP_RANK", socket.gethostname())
        self.at = (0, "start", time.monotonic())  # replaced as a whole, so no thread sees half of it
        self.total = 0  # phases that all ranks together have finished, as last heard
        self.alarm, self.ended = threading.Event(), threading.Event()
        self.talk = threading.Thread(target=self._talk, daemon=True)
        if timeout_s:
            name = [f"watchdog/{uuid.uuid4().hex}"]  # not the restart's count: see fresh_store
            dist.broadcast_object_list(name)
            self.name = name[0]
            self.stacks = os.memfd_create("stacks")  # others read it as /proc/PID/fd/NUMBER
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
                    store.set(f"at/{self.rank}", json.dumps(self._place(sequence, phase)))
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

    def _place(self, sequence: int, phase: str) -> dict:
        """What the others need to find this rank when it is silent."""
        process = {"pid": os.getpid(), "stacks": self.stacks, "host": self.host, "machine": socket.gethostname()}
        return {"sequence": sequence, "phase": phase, **process}

    def _judge(self) -> None:
        """Raise the alarm when all has stood still for too long; never blocks.

        Time counts only while this thread runs, so a job that its scheduler or a laptop suspended is not stuck.
        """
        idle, last, seen, patience = 0.0, time.monotonic(), None, 4 * self.interval + 15
        while True:
            self._expect_python()
            if self.ended.wait(self.interval):
                faulthandler.cancel_dump_traceback_later()
                return
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

    def _expect_python(self) -> None:
        """Have faulthandler write down all stacks, from a thread that needs no lock, unless this is called again soon.

        Soon is a quarter of the timeout: what it writes early, as after a suspension, nobody reads and this removes.
        """
        os.ftruncate(self.stacks, 0)
        os.lseek(self.stacks, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(self.timeout_s / 4, file=self.stacks)

    def _report(self, store: dist.Store) -> None:
        """Write down where this rank is; the first to come prints all ranks. Ends the process."""
        first = store.add("alarm", 1) == 1
        sequence, phase, since = self.at
        workers = siblings()
        seen = {"seconds": time.monotonic() - since, "stack": main_stack(), "workers": workers}
        store.set(f"report/{self.rank}", json.dumps(self._place(sequence, phase) | seen))
        wait_s = 2 * self.interval + 3
        if first:
            say(self._table(store, wait_s))
            store.set("printed", "")
        store.wait(["printed"], timedelta(seconds=2 * wait_s + 5))
        # A silent rank, stopped or inside a C call, cannot take torchrun's SIGTERM either, and would cost it 30 s.
        silent = {p["pid"]: p["stacks"] for p in json.loads(store.get("silent")) if p["host"] == self.host}
        silent = {pid: stacks for pid, stacks in silent.items() if str(pid) in workers}
        killer = store.add(f"kill/{self.host}", 1) == 1
        for pid, stacks in silent.items() if killer else []:
            if workers[str(pid)] not in STATES:
                say(f"\nprocess {pid} does not let go of Python's lock:\n{dumped_stacks(pid, stacks)}")
        time.sleep(0.6 if silent and not killer else 0.5)  # rank 0 may hold the store: all read, then end
        for pid in silent if killer else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _table(self, store: dist.Store, wait_s: float) -> str:
        """Phase and state of every rank, and the stacks of those that lag; also names the silent ones in the store."""
        ranks = range(dist.get_world_size())
        deadline = time.monotonic() + wait_s
        while not store.check([f"report/{r}" for r in ranks]) and time.monotonic() < deadline:
            time.sleep(0.1)
        places = {r: {"phase": "start"} | read(store, f"at/{r}") | read(store, f"report/{r}") for r in ranks}
        workers = {place["host"]: place["workers"] for place in places.values() if "workers" in place}
        lowest = min(place["sequence"] for place in places.values() if "sequence" in place)
        lines = [f"watchdog: no rank has finished a phase for {self.timeout_s:g} s", "rank  phase       seconds  state"]
        silent, stacks = [], defaultdict(list)
        for rank, place in places.items():
            seconds = "?"
            if "stack" in place:
                seconds = f"{place['seconds']:.0f}"
                state = "lags" if place["sequence"] == lowest else "waits"
            elif place["phase"] == "ended":
                state = "ended"
            else:
                state = f"no answer: {state_of(place, workers)}"
                silent += [place] if "pid" in place else []
            if state == "lags":
                stacks[place["stack"]].append(str(rank))
            lines.append(f"{rank:4d}  {place['phase']:10s} {seconds:>8s}  {state}")
        store.set("silent", json.dumps(silent))
        for stack, which in stacks.items():
            lines.append(f"\nrank{'s' * (len(which) > 1)} {', '.join(which)}, most recent call last:\n{stack}")
        return "\n".join(lines)


def read(store: dist.Store, key: str) -> dict:
    """What a rank has written into the store, {} if nothing."""
    return json.loads(store.get(key)) if store.check([key]) else {}


def main_stack() -> str:
    """Where the main thread is, as in a traceback."""
    return "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])).rstrip()


def siblings() -> dict[str, str]:
    """The processes that torchrun or srun started on this host: {id: state, as psutil names it}.

    They have this one's parent, or its command line, where each has a shell of its own between it and the launcher.
    """
    own = psutil.Process().cmdline()
    processes = psutil.process_iter(["ppid", "cmdline", "status"])
    return {
        str(p.pid): p.info["status"] for p in processes if p.info["ppid"] == os.getppid() or p.info["cmdline"] == own
    }


def state_of(place: dict, workers: dict[str, dict[str, str]]) -> str:
    """What is known of a silent rank, from what the others saw on their hosts: {host: {process id: state}}."""
    state = "stopped (SIGSTOP), dead, or in a call that never returns"
    if place.get("host") in workers:  # another rank of this torchrun has looked
        status = workers[place["host"]].get(str(place["pid"]), psutil.STATUS_ZOMBIE)
        state = STATES.get(status, "in a call that never returns")
    return f"{state} (process {place['pid']} on {place['machine']})" if "pid" in place else state


def dumped_stacks(pid: int, stacks: int) -> str:
    """The stacks of all threads of a process on this host, as its faulthandler has written them down."""
    try:
        text = Path(f"/proc/{pid}/fd/{stacks}").read_text(errors="replace").rstrip()
    except OSError as error:  # ended meanwhile
        return f"its stacks cannot be read: {error}"
    return text or "for too short a time to have its stacks"
