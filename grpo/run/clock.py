"""The clock of a rank: its phase, the seconds and memory of each phase, profiler, watchdog, requests to stop."""

import contextlib
import os
import select
import signal
import threading
import time

import torch

from grpo.parts.base import ranks
from grpo.parts.base.memory import Meter
from grpo.run.profiler import Profiler
from grpo.run.watchdog import Watchdog


class StopRequested(Exception):
    """A signal or train.patience asks the run to save and stop; raised on every rank, so that all give up the step."""


class Clock:
    """Every rank makes one after init_process_group, on its main thread: `with clock("train"): ...`.

    `seconds` is {phase: wall seconds} of the step so far, `memory` the memory of its phases. The watchdog ends a run in
    which no rank finishes a phase for `stall_timeout_s`; 0 turns it off.
    """

    def __init__(self, stall_timeout_s: float, profiler: Profiler | None = None):
        self.watchdog = Watchdog(stall_timeout_s)
        self.signals = StopSignals()
        self.memory = Meter()
        self.profiler = profiler
        self.seconds: dict[str, float] = {}
        self.step_start = 0.0
        self.stop_requested = False  # by this rank, for a reason other than a signal

    @property
    def phase(self) -> str:
        """The phase of the main thread. After an exception in a timed block it is still that block's phase."""
        return self.watchdog.at[0]

    def start_step(self, step):
        self.seconds = {}
        self.memory.start_step()
        if self.profiler:
            self.profiler.start_step(step)
        self.step_start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase):
        """Add the seconds of the block to `seconds[phase]`, with its work on the GPU, and note its memory."""
        self.watchdog.enter(phase)
        self.memory.enter(phase)
        start = time.perf_counter()
        with torch.profiler.record_function(phase):
            if torch.cuda.is_available():
                torch.cuda.nvtx.range_push(phase)  # for nsys
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_pop()

        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        self.memory.leave(phase)
        self.watchdog.enter("step")

    def check_stop(self):
        """Raise StopRequested on every rank if one was asked to stop. Early ranks wait here, in "wait"."""
        with self("wait"):
            stop = ranks.on_any_rank(self.stop_requested or self.signals.requested is not None)
        if stop:
            raise StopRequested

    def end_step(self) -> dict[str, float]:
        """{phase: seconds} of the step that ends here, of "other" (between phases), and of "step", their sum."""
        step = time.perf_counter() - self.step_start
        return self.seconds | {"other": step - sum(self.seconds.values()), "step": step}

    def stop(self):
        """Stop the watchdog: the rest may take any time, and a signal does not save the run any more."""
        self.signals.ended = True
        self.watchdog.stop()


# Of Ctrl-C, a scheduler, a terminal that closes, Ctrl-\, and Slurm's --signal=USR1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SAME_REQUEST_S = 2.0  # a scheduler may signal every process while torchrun passes the same signal on


def handle_stop_signals(handler):
    """Set the handler of STOP_SIGNALS. SIGHUP stays ignored if it is, as under nohup."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, handler)


class StopSignals:
    """Notes STOP_SIGNALS: `requested` is the name of the first one on this rank. Make it on the main thread.

    How torchrun passes signals on: docs/dev/field-notes.md.
    """

    def __init__(self):
        self.requested: str | None = None
        self.ended = False  # the run has ended: a signal does not make it save
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A handler waits until the main thread is back in Python; the pipe is written at once, even in a collective.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        handle_stop_signals(lambda *_: None)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, pipe: int):
        first, since = None, 0.0
        while True:
            number = os.read(pipe, 1)[0]
            if number not in STOP_SIGNALS:
                continue

            if first is None:
                first, since = number, time.monotonic()
                self.requested = signal.Signals(number).name
                leave_closed_output()
                if ranks.is_first_rank() and not self.ended:
                    ranks.say(f"{self.requested}: finishing this phase, then saving; a second Ctrl-C stops at once")
            elif signal.SIGINT in (first, number) and time.monotonic() - since >= SAME_REQUEST_S:
                os._exit(130)


def leave_closed_output():
    """Where nobody reads this process's output any more, as after an ssh or a `tee` has ended, write to /dev/null."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)  # errors are reported in any case
    for stream, _ in poll.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
