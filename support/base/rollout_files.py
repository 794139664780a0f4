"""Files of samples, written by a process in the background.

It is no thread, since formatting numbers as text holds Python's lock (GIL) and would block the training loop and vLLM.
Started as a program, this file is that process. A file is complete or absent: it has a temporary name until it is on
the disk.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.base import processes

# ---------------------------------------------------------------- in the trainer


def as_row(sample) -> dict:
    """The row of a Sample: its fields that are not None, with those in `tokens` beside them, and without `routes`,
    which is larger than all others together.
    """
    row = {name: value for name, value in vars(sample).items() if value is not None and name != "routes"}
    return row | row.pop("tokens", {})


class RolloutWriter:
    """Writes files of samples in order. One is being written and one may be queued; then `write` blocks.

    The next `write` or `finish` raises a failure: the OSError itself, TrainingError for a dead process. Python waits
    for the thread at its end, so a run that fails writes its last samples too.
    """

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.jobs = deque()

    def write(self, path: Path, samples: list) -> None:
        """Queue all samples, as they are now, to be written to `path`, a JSON object a line."""
        self._wait(unfinished=1)
        self.jobs.append(self.thread.submit(write_in_process, str(path), [as_row(sample) for sample in samples]))

    def finish(self) -> None:
        """Wait until all files are on the disk."""
        self._wait(unfinished=0)

    def _wait(self, unfinished: int) -> None:
        while self.jobs and (len(self.jobs) > unfinished or self.jobs[0].done()):
            self.jobs[0].result()  # a failure stays the first, and is raised each time
            self.jobs.popleft()


def write_in_process(path: str, rows: list[dict]) -> None:
    """Have a process write a file. Raises the process's exception."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = processes.start_module("support.base.rollout_files", path, ignore_sigterm=True, **pipes)
    reply, _ = process.communicate(pickle.dumps(rows, protocol=5))
    if not reply:
        from config import TrainingError  # here, since the process imports this file and needs no pydantic

        raise TrainingError(
            f"the process that writes {path} died (exit code {process.returncode}), maybe killed as host memory ran "
            "out. Go on with resume=auto"
        )
    failure = pickle.loads(reply)
    if failure is not None:
        raise failure


# ---------------------------------------------------------------- the process


def write_rows(path: str, rows: list[dict]) -> None:
    """Write a JSON object a line, numpy arrays as lists. Raises OSError and then leaves no file."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=lambda array: array.tolist()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def main() -> None:
    """Write the pickled rows on standard input to the file argv[1]; reply with None or the exception, pickled."""
    processes.die_with_parent()
    failure = None
    try:
        write_rows(sys.argv[1], pickle.load(sys.stdin.buffer))
    except Exception as error:
        failure = error
    pickle.dump(failure, sys.stdout.buffer)


if __name__ == "__main__":
    main()
