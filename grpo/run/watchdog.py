"""Ends a run that hangs, and prints where each rank is, by the store of torch.distributed and Python's faulthandler."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback

import torch.distributed as dist

from grpo.parts.base.ranks import say


class Watchdog:
    """Ends a run in which no rank has finished a phase for `timeout_s`, each rank with exit code 1; 0 turns it off.

    Every rank makes one after init_process_group. The first to end prints phase and stack of all ranks. A rank cannot
    answer if it holds Python's lock (GIL) or has lost the store. Its faulthandler then writes its threads' stacks.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.at = ("start", time.strftime("%T"))  # phase, since; replaced as a whole: the thread reads it
        self.moved = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        if timeout_s:
            self.thread.start()

    def enter(self, phase):
        """Note that the main thread has finished a phase and begins another one."""
        self.at = (phase, time.strftime("%T"))
        self.moved.set()

    def stop(self):
        """Stop watching: the rest of the run may take any time."""
        self.enter("ended")
        if self.timeout_s:
            self.thread.join()  # Python aborts if it ends while a thread is inside the store
            faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        store = dist.distributed_c10d._get_default_store().clone()  # a connection of this thread
        rank = dist.get_rank()  # kept: the process group may end before the watchdog
        process = f"process {os.getpid()} on {os.uname().nodename}"
        interval = min(self.timeout_s / 10, 5.0)
        moves, idle_s = 0, 0.0  # counted, not read from a clock: a job that was suspended does not hang

        with contextlib.suppress(dist.DistError):  # the store has ended: faulthandler ends a rank that goes on
            while self.at[0] != "ended":
                faulthandler.dump_traceback_later(self.timeout_s + 20, exit=True)  # unless this line runs again before
                stack = ""
                if idle_s > self.timeout_s:
                    stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident]))
                moved = self.moved.is_set()
                self.moved.clear()
                store.set(f"at/{rank}", json.dumps([*self.at, process, stack]))

                before, moves = moves, store.add("moves", int(moved))  # of all ranks
                if stack:
                    end_run(store, f"no rank has finished a phase for {self.timeout_s:g} s", 2 * interval + 3)
                idle_s = idle_s + interval if moves == before else 0.0
                self.moved.wait(interval)


def end_run(store: dist.Store, why, wait_s: float):
    """End this process. The first rank waits for the other ranks, then prints what each has published."""
    is_first = store.add("reports", 1) == 1
    time.sleep(wait_s)

    if is_first:
        lines = [f"watchdog, {time.strftime('%T')}: {why}\nrank  since     phase"]
        ranks_of: dict[str, list[str]] = {}  # stack → ranks
        for rank in range(dist.get_world_size()):
            phase, since, process, stack = json.loads(store.get(f"at/{rank}"))
            line = f"{rank:4d}  {since}  {phase:10s}  {process}"
            if stack:
                ranks_of.setdefault(stack, []).append(str(rank))
            else:
                line += ", no answer: stopped, dead or in a call that holds Python's lock"
            lines.append(line)
        for stack, of in ranks_of.items():
            lines.append(f"\nrank {', '.join(of)}, most recent call last:\n{stack}")
        say("\n".join(lines))

    time.sleep(0.5)  # rank 0 may hold the store
    os._exit(1)
