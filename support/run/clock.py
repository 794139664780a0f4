"""The clock of a rank: its phase, the seconds and memory of each phase, timeline, watchdog, requests to stop."""

import contextlib
import time
from collections.abc import Iterator

import torch

from support.base import ranks
from support.base.memory import Meter
from support.run.signals import StopSignals
from support.run.timeline import Timeline
from support.run.watchdog import Watchdog


class StopRequested(Exception):
    """A signal asks the run to save and stop; raised on every rank, so that all give up the step together."""


class Clock:
    """Every rank makes one after init_process_group, on its main thread: `with clock("train"): ...`.

    `seconds` is {phase: wall seconds} of the step so far, `memory` the memory of its phases. `timeline` records phases
    in its window. The watchdog ends a run in which no rank finishes a phase for `stall_timeout_s` (0: never).
    """

    def __init__(self, stall_timeout_s: float, timeline: Timeline | None = None):
        self.watchdog = Watchdog(stall_timeout_s)
        self.signals = StopSignals()
        self.memory = Meter()
        self.timeline = timeline or Timeline()
        self.seconds: dict[str, float] = {}
        self._step_start: float | None = None  # None between steps
        self._last_end = 0.0  # when the last phase of the step ended

    @property
    def phase(self) -> str:
        """The phase of the main thread; after an exception in a timed block, still that block's phase."""
        return self.watchdog.phase

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C has reached this rank; it may change at any moment and differ between ranks."""
        return self.signals.requested is not None

    def check_stop(self) -> None:
        """Raises StopRequested on every rank if a signal has reached any of them.

        All ranks call it at the same place. A rank that is early waits there, in the phase "wait".
        """
        with self("wait"):
            stop = ranks.on_any_rank(self.stop_requested)
        if stop:
            self.timeline.close()
            raise StopRequested

    def enter(self, phase: str) -> None:
        """Begin a phase that is not timed."""
        self.watchdog.enter(phase)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to `seconds[phase]`, its work on the GPU included; note its memory."""
        self.enter(phase)
        self.memory.enter(phase)
        start = time.perf_counter()
        self._add_other(start)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + end - start
        self.timeline.add(phase, start, end)
        self._last_end = end
        self.memory.leave(phase)
        self.enter("step")

    def _add_other(self, now: float) -> None:
        """Add the time since the last phase to the phase "other", so that the phases sum to the step."""
        if self._step_start is not None:
            self.seconds["other"] = self.seconds.get("other", 0.0) + now - self._last_end
            self.timeline.add("other", self._last_end, now)

    def start_step(self, step: int) -> None:
        """Begin a step with no seconds and no memory counted."""
        self.seconds = {}
        self.memory.start_step()
        self.timeline.start_step(step)
        self._step_start = self._last_end = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """{phase: seconds} of the step that ends here, and of "step", their sum. All ranks call this together."""
        end = time.perf_counter()
        self._add_other(end)
        self.timeline.add("step", self._step_start, end)
        seconds = self.seconds | {"step": end - self._step_start}
        self._step_start = None
        self.timeline.end_step()
        return seconds

    def stop(self) -> None:
        """Stop the watchdog: the rest may take any time, and a signal does not save the run any more."""
        self.signals.ended = True
        self.watchdog.stop()
