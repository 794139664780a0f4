"""One clock for what a rank does: its phase, seconds and memory of each, timeline, watchdog, requests to stop."""

import contextlib
import time
from collections.abc import Iterator

import torch

from support import ranks
from support.memory import Meter
from support.signals import StopSignals
from support.timeline import Timeline
from support.watchdog import Watchdog


class StopRequested(Exception):
    """A signal asks the run to save and stop; raised on every rank, so that all give up the step together."""


class Clock:
    """Every rank makes one after init_process_group, on its main thread: `with clock("train"): ...`.

    `seconds` is {phase: wall seconds} of the step so far, `memory` what its phases took; `timeline` records them where
    it is asked to. The watchdog hears of every phase and ends a run in which no rank has finished one for
    `stall_timeout_s` (0: never).
    """

    def __init__(self, stall_timeout_s: float, timeline: Timeline | None = None):
        self.watchdog = Watchdog(stall_timeout_s)
        self.signals = StopSignals()
        self.memory = Meter()
        self.timeline = timeline or Timeline()
        self.seconds: dict[str, float] = {}
        self._began: float | None = None  # when the step did, None between steps
        self._free_since = 0.0  # when its last phase ended

    @property
    def phase(self) -> str:
        """What the main thread does now; after an exception in a timed block, still that block's phase."""
        return self.watchdog.phase

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C has reached this rank; it may change at any moment and differ between ranks."""
        return self.signals.requested is not None

    def check_stop(self) -> None:
        """Raises StopRequested on every rank if a signal has reached any; all call it at the same place, and who is
        early waits there, which is the phase "wait"."""
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
        self._between(start)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + end - start
        self.timeline.add(phase, start, end)
        self._free_since = end
        self.memory.leave(phase)
        self.enter("step")

    def _between(self, now: float) -> None:
        """What no phase of the step has had until now is the phase "other", so that the phases are all of it."""
        if self._began is not None:
            self.seconds["other"] = self.seconds.get("other", 0.0) + now - self._free_since
            self.timeline.add("other", self._free_since, now)

    def start_step(self, step: int) -> None:
        """Begin to count anew."""
        self.seconds = {}
        self.memory.start_step()
        self.timeline.start_step(step)
        self._began = self._free_since = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """{phase: seconds} of the step that ends here, and of "step", their sum. All ranks call this together."""
        end = time.perf_counter()
        self._between(end)
        self.timeline.add("step", self._began, end)
        seconds = self.seconds | {"step": end - self._began}
        self._began = None
        self.timeline.end_step()
        return seconds

    def stop(self) -> None:
        """Watch no longer: what follows may take as long as it likes, and a signal saves nothing any more."""
        self.signals.ended = True
        self.watchdog.stop()
