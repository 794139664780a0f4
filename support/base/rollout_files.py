"""Files of samples, written by a process in the background.

It is no thread, since formatting numbers as text holds Python's lock (GIL) and would block the training loop and vLLM.
Started as a program, this file is that process. A file is complete or absent: it has a temporary name until it is on
the disk.
"""

import atexit
import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from pathlib import Path

from support.base import processes

TEMPORARY = ".tmp"  # suffix of a file that is not complete

# ---------------------------------------------------------------- in the trainer


def as_row(sample) -> dict:
    """The row of a Sample: its fields that are not None, with those in `tokens` beside them.

    `routes` is left out, since it is larger than all others together.
    """
    row = {name: value for name, value in vars(sample).items() if value is not None and name != "routes"}
    tokens = row.pop("tokens", {})
    return row | tokens


class RolloutWriter:
    """Writes files of samples in order. One is being written and one may be queued; then `write` blocks.

    The next `write` or `finish` raises a failure: the OSError itself, TrainingError for a dead process.
    """

    def __init__(self):
        self.jobs = queue.Queue(maxsize=1)
        self.process: subprocess.Popen | None = None
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def write(self, path: Path, samples: list) -> None:
        """Queue all samples, as they are now, to be written to `path`, a JSON object a line."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True)
            self.thread.start()
            atexit.register(self.close)  # a run that ends with an error writes its last samples too
        self._check()
        self.jobs.put((str(path), [as_row(sample) for sample in samples]))

    def finish(self) -> None:
        """Wait until all files are on the disk."""
        self.jobs.join()
        self._check()

    def close(self) -> None:
        """Write the queued file, then end the process."""
        atexit.unregister(self.close)
        if self.thread is not None:
            self.jobs.put(None)
            self.thread.join()
            self.thread = None

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _serve(self) -> None:
        """The thread that feeds the process. After a failure it discards jobs, so that no caller blocks."""
        while (job := self.jobs.get()) is not None:
            try:
                if self.failure is None:
                    self._send(job)
            except Exception as error:
                self.failure = error
            job = None  # frees its memory while the thread waits for the next one
            self.jobs.task_done()
        self.jobs.task_done()
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # the process ends when it has read all
            self.process.wait()
            self.process.stdout.close()

    def _send(self, job: tuple[str, list[dict]]) -> None:
        """Have the process write a file. Raises the process's exception."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = processes.start_module("support.base.rollout_files", **pipes)
        try:
            pickle.dump(job, self.process.stdin, protocol=5)
            self.process.stdin.flush()
            failure = pickle.load(self.process.stdout)
        except (BrokenPipeError, EOFError):
            from config import TrainingError  # here, since the process imports this file and needs no pydantic

            raise TrainingError(
                f"the process that writes {job[0]} died (exit code {self.process.wait()}), maybe killed as host memory "
                "ran out. Go on with resume=auto"
            ) from None
        if failure is not None:
            raise failure


# ---------------------------------------------------------------- the process


def write_rows(path: str, rows: list[dict]) -> None:
    """Write a JSON object a line, numpy arrays as lists. Raises OSError and then leaves no file."""
    temporary = path + TEMPORARY
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


def serve() -> None:
    """Write the files on standard input, each a pickled (path, rows); reply with None or the exception, pickled."""
    processes.ignore_sigterm()
    processes.die_with_parent()
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while jobs.peek(1):
        path, rows = pickle.load(jobs)
        failure = None
        try:
            write_rows(path, rows)
        except Exception as error:
            failure = error
        del rows  # frees their memory while the process waits
        pickle.dump(failure, replies)
        replies.flush()


if __name__ == "__main__":
    serve()
