"""Files of samples. Each is complete or absent, since it has a temporary name until it is on the disk."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from grpo.parts.base.files import sync

# msgspec writes numbers ten times as fast as json, which would hold Python's lock (GIL) for a second of a large step.
ENCODER = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())


def write_rows(path: Path, rows: list[dict]):
    """Write a JSON object per line, numpy arrays as lists, NaN as null. Raises OSError, and then leaves no file."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for row in rows:  # one at a time, so that other threads run in between
                file.write(ENCODER.encode(row) + b"\n")
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RolloutWriter:
    """Writes files of samples in a thread: `write` waits for those before.

    The next `write` or `finish` raises a failure. Python waits for the thread, so a failing run writes its last file.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.last: Future | None = None

    def write(self, files: dict[Path, list[dict]]) -> None:
        """Begin to write {path: its rows}, in this order."""
        self.finish()
        self.last = self.thread.submit(lambda: [write_rows(path, rows) for path, rows in files.items()])

    def finish(self):
        """Wait until the last file is on the disk."""
        if self.last:
            self.last.result()  # raises a failure each time
