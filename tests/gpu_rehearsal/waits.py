"""Counts of what makes the host wait for the GPU, by phase of the run and by the place in the code."""

import collections
import sys
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
BETWEEN = ("/torch/", "/gpu_rehearsal/", "/contextlib.py", "/functools.py", "/_contextlib.py")  # no place of ours


class Waits:
    """`counts` is {(phase, place, kind): number}; a place is "file function", such as "train_grpo.py score"."""

    def __init__(self):
        self.counts: collections.Counter = collections.Counter()
        self.phase: Callable[[], str] = lambda: "start"

    def note(self, kind: str) -> None:
        """The host waits now."""
        self.counts[self.phase(), self.place(), kind] += 1

    def place(self) -> str:
        """The innermost frame that is neither torch's nor the rehearsal's."""
        frame = sys._getframe(1)
        while frame.f_back and any(part in frame.f_code.co_filename for part in BETWEEN):
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        name = file.relative_to(REPO) if file.is_relative_to(REPO) and "/.venv" not in str(file) else file.name
        return f"{name} {frame.f_code.co_name}"
