"""Ends a run that hangs, and prints where each rank is. Knows torchrun and torch.distributed, no trainer."""

import atexit
import faulthandler
import json
import math
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

import psutil
import torch.distributed as dist

from support.base.ranks import gather, say

STATES = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "stuck in the kernel: a disk, network or GPU driver does not return",
    psutil.STATUS_ZOMBIE: "dead",
}
IN_A_CALL = "in a call that never returns"

STORE_TIMEOUT_S = 60.0


class Watchdog:
    """Ends a run in which no rank has finished a phase for `timeout_s`, after printing which ranks lag, and where.

    Every rank makes one after init_process_group; 0 turns it off. All ranks exit with 1. A rank that holds Python's
    lock (GIL) inside a C call cannot answer: the others print the report and have faulthandler write its stacks.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.interval = min(timeout_s / 10, 5.0)
        self.rank = int(os.environ["RANK"])
        machine = socket.gethostname()
        self.process = {"pid": os.getpid(), "machine": machine, "host": os.environ.get("GROUP_RANK", machine)}
        self.at = (0, "start", time.monotonic())  # phases finished, phase, its start; replaced as a whole, for threads
        self.total = 0  # phases that all ranks together have finished, as last read from the store
        self.alarm = threading.Event()
        self.ended = threading.Event()
        self.talk = threading.Thread(target=self._talk, daemon=True)
        if timeout_s:
            self.name = f"watchdog/{gather(uuid.uuid4().hex)[0]}"  # unique, unlike the restart count: see fresh_store
            faulthandler.register(signal.SIGUSR2)  # writes the stacks of all threads, without Python's lock
            atexit.register(self.stop)  # Python aborts if it ends while a thread is inside the store
            self.talk.start()
            threading.Thread(target=self._judge, daemon=True).start()

    def enter(self, phase: str) -> None:
        """Note that the main thread has finished a phase and begins another one. Takes a microsecond."""
        self.at = (self.at[0] + 1, phase, time.monotonic())

    def stop(self) -> None:
        """Stop watching: the rest of the run may take any time."""
        self.enter("ended")
        self.ended.set()
        if self.talk.is_alive():
            self.talk.join(STORE_TIMEOUT_S)  # its call returns when the store answers or ends

    def _talk(self) -> None:
        """Publish this rank's phases in the store and read those of others. Only this thread makes calls that block."""
        try:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
            store = dist.PrefixStore(self.name, store)
            published = -1
            ended = False
            while True:
                sequence = self.at[0]
                if sequence != published:
                    self._publish(store)
                    store.add("finished", sequence - published)
                    published = sequence
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

    def _publish(self, store: dist.Store, **report) -> None:
        """Write into the store where this rank is and how others inspect its process; `report`: of an alarm."""
        sequence, phase, since = self.at
        here = {"sequence": sequence, "phase": phase, "seconds": time.monotonic() - since}
        store.set(f"at/{self.rank}", json.dumps(here | self.process | report))

    def _judge(self) -> None:
        """Raise the alarm when no phase ends for too long, while this thread runs: a suspended job is not stuck."""
        idle = 0.0
        last = time.monotonic()
        seen = None
        patience = 4 * self.interval + 15
        while not self.ended.wait(self.interval):
            now = time.monotonic()
            progress = (self.total, self.at[0])
            if progress == seen or self.alarm.is_set():
                idle += min(now - last, 2 * self.interval)
            else:
                idle = 0.0
            last = now
            seen = progress
            if idle > self.timeout_s:
                self.alarm.set()
            if self.alarm.is_set() and (not self.talk.is_alive() or idle > self.timeout_s + patience):
                _, phase, since = self.at
                say(
                    f"watchdog: rank {self.rank} has been in the phase {phase!r} for {now - since:.0f} s, more than "
                    f"{self.timeout_s:g} s, and the store at {os.environ['MASTER_ADDR']} does not answer\n"
                    f"{main_stack()}"
                )
                os._exit(1)

    def _report(self, store: dist.Store) -> None:
        """Publish where this rank is; the first rank to report prints the table of all ranks. Ends the process."""
        first = store.add("alarm", 1) == 1
        workers = siblings()
        self._publish(store, stack=main_stack(), workers=workers)
        wait_s = 2 * self.interval + 3  # for the other ranks
        if first:
            time.sleep(wait_s)
            reports = {}
            for rank in range(dist.get_world_size()):
                reports[rank] = {"sequence": math.inf, "phase": "start"}  # of one that has not come so far
                if store.check([f"at/{rank}"]):
                    reports[rank] = json.loads(store.get(f"at/{rank}"))
            say(f"watchdog: no rank has finished a phase for {self.timeout_s:g} s\n{table(reports)}")
            silent = [r for r in reports.values() if "pid" in r and "stack" not in r and r["phase"] != "ended"]
            store.set("silent", json.dumps(silent))
        store.wait(["silent"], timedelta(seconds=2 * wait_s + 5))
        host = self.process["host"]
        if store.add(f"stacks/{host}", 1) == 1:
            for report in json.loads(store.get("silent")):
                if report["host"] == host and workers.get(str(report["pid"])) == IN_A_CALL:
                    say(f"\nprocess {report['pid']} does not release Python's lock (GIL):")
                    os.kill(report["pid"], signal.SIGUSR2)
        time.sleep(0.5)  # rank 0 may host the store: all ranks read it, then end
        os._exit(1)


def table(reports: dict[int, dict]) -> str:
    """Phase and state of every rank, and the stacks of those that lag, from {rank: what it has published}."""
    workers = {report["host"]: report["workers"] for report in reports.values() if "workers" in report}
    lowest = min(report["sequence"] for report in reports.values())
    lines = ["rank  phase       seconds  state"]
    lagging = defaultdict(list)  # stack → ranks
    for rank, report in reports.items():
        seconds = "?"
        if "stack" in report:
            seconds = f"{report['seconds']:.0f}"
            state = "lags" if report["sequence"] == lowest else "waits"
        elif report["phase"] == "ended":
            state = "ended"
        else:
            state = f"no answer: {state_of(report, workers)}"
        if state == "lags":
            lagging[report["stack"]].append(str(rank))
        lines.append(f"{rank:4d}  {report['phase']:10s} {seconds:>8s}  {state}")
    for stack, ranks in lagging.items():
        which = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"\n{which} {', '.join(ranks)}, most recent call last:\n{stack}")
    return "\n".join(lines)


def main_stack() -> str:
    """The stack of the main thread, formatted as in a traceback."""
    return "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])).rstrip()


def siblings() -> dict[str, str]:
    """The processes that torchrun or srun started on this host: {id: state}.

    They have the same parent as this one, or, where each has a shell between it and the launcher, its command line.
    """
    own = psutil.Process().cmdline()
    found = {}
    for p in psutil.process_iter(["ppid", "cmdline", "status"]):
        if p.info["ppid"] == os.getppid() or p.info["cmdline"] == own:
            found[str(p.pid)] = STATES.get(p.info["status"], IN_A_CALL)
    return found


def state_of(report: dict, workers: dict[str, dict[str, str]]) -> str:
    """The state of a silent rank, from what other ranks saw on their hosts: {host: {process id: state}}."""
    state = "stopped (SIGSTOP), dead, or in a call that never returns"
    if report.get("host") in workers:  # another rank of this torchrun has reported
        state = workers[report["host"]].get(str(report["pid"]), STATES[psutil.STATUS_ZOMBIE])
    return f"{state} (process {report['pid']} on {report['machine']})" if "pid" in report else state
