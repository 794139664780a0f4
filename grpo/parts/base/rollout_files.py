"""Files of samples: each is complete or absent, as it has a temporary name until it is on the disk."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from grpo.parts.base.files import sync

# msgspec writes numbers ten times as fast as json, which would hold Python's lock (GIL) for a second of a large step.
ENCODER = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a JSON object a line, numpy arrays as lists. Raises OSError and then leaves no file."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for row in rows:  # one at a time: other threads run in between
                file.write(ENCODER.encode(row) + b"\n")
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class RolloutWriter:
    """Writes files of samples in a thread, one at a time: `write` waits for the file before.

    The next `write` or `finish` raises a failure. Python waits for the thread, so a run that fails writes its last.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.last: Future | None = None

    def write(self, path: Path, rows: list[dict]) -> None:
        """Begin to write the rows to `path`."""
        self.finish()
        self.last = self.thread.submit(write_rows, path, rows)

    def finish(self) -> None:
        """Wait until the last file is on the disk."""
        if self.last:
            self.last.result()  # raises a failure each time
