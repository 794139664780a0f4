"""Files of samples: each is complete or absent, as it has a temporary name until it is on the disk."""

import contextlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from support.base.files import write_synced


def as_row(sample) -> dict:
    """The row of a Sample: its fields that are not None, with those in `tokens` beside them, and without `routes`,
    which is larger than all others together.
    """
    row = {name: value for name, value in vars(sample).items() if value is not None and name != "routes"}
    return row | row.pop("tokens", {})


# msgspec writes numbers ten times as fast as json, which would hold Python's lock (GIL) for a second of a large step.
ENCODER = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises OSError and then leaves none."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write_synced(temporary, content)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class RolloutWriter:
    """Writes files of samples in order, in a thread. One is being written and one may be queued; then `write` blocks.

    The next `write` or `finish` raises a failure. Python waits for the thread at its end, so a run that fails writes
    its last samples too.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.jobs = deque()

    def write(self, path: Path, samples: Iterable) -> None:
        """Queue all samples, as they are now, to be written to `path`, a JSON object a line, numpy arrays as lists."""
        self._wait(unfinished=1)
        content = ENCODER.encode_lines(map(as_row, samples))
        self.jobs.append(self.thread.submit(write_file, path, content))

    def finish(self) -> None:
        """Wait until all files are on the disk."""
        self._wait(unfinished=0)

    def _wait(self, unfinished: int) -> None:
        while self.jobs and (len(self.jobs) > unfinished or self.jobs[0].done()):
            self.jobs[0].result()  # a failure stays the first, and is raised each time
            self.jobs.popleft()
