"""One clock for what a rank does: its phase, seconds and memory of each, the watchdog, whether a stop was asked for."""

import contextlib
import time
from collections.abc import Iterator

import torch

from support import ranks
from support.memory import Meter
from support.signals import StopSignals
from support.watchdog import Watchdog


class StopRequested(Exception):
    """A signal asks the run to save and stop; raised on every rank, so that all give up the step together."""


class Clock:
    """Every rank makes one after init_process_group, on its main thread: `with clock("train"): ...`.

    `seconds` is {phase: wall seconds} of the step so far, `memory` what its phases took. The watchdog hears of every
    phase and ends a run in which no rank has finished one for `stall_timeout_s` (0: never).
    """

    def __init__(self, stall_timeout_s: float):
        self.watchdog = Watchdog(stall_timeout_s)
        self.signals = StopSignals()
        self.memory = Meter()
        self.start_step()

    @property
    def phase(self) -> str:
        """What the main thread does now; after an exception in a timed block, still that block's phase."""
        return self.watchdog.phase

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C has reached this rank; it may change at any moment and differ between ranks."""
        return self.signals.requested is not None

    def check_stop(self) -> None:
        """Raises StopRequested on every rank if a signal has reached any; all call it at the same place."""
        if ranks.on_any_rank(self.stop_requested):
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
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        self.memory.leave(phase)
        self.enter("step")

    def start_step(self) -> None:
        """Begin to count anew."""
        self.seconds: dict[str, float] = {}
        self.memory.start_step()
        self._step_began = time.perf_counter()

    def step_seconds(self) -> float:
        """Wall seconds since `start_step`."""
        return time.perf_counter() - self._step_began

    def stop(self) -> None:
        """Watch no longer: what follows may take as long as it likes, and a signal saves nothing any more."""
        self.signals.ended = True
        self.watchdog.stop()
