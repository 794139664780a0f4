"""Rewards: what an answer is worth. Knows no models and no tensors.

A reward is `def reward(text: str, answer: str, row: dict) -> float | dict[str, float]`: the decoded response, the row's
reference answer, the whole row. A dict's values are summed and kept apart in `reward_parts`.

Grading runs in worker processes (this file, started as a program), because only a process can be killed: an answer that
takes longer than `timeout_s` costs its own reward, never the run.
"""

import importlib.util
import json
import math
import queue
import re
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

# ---------------------------------------------------------------- reward functions


def exact(text: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, outer white space aside; else 0."""
    return float(text.strip() == answer.strip())


def gsm8k(text: str, answer: str, row: dict) -> float:
    """1 if the final number of the response equals that of the reference answer; else 0."""
    wanted = final_number(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} holds no number")
    return float(final_number(text) == wanted)


# A sign that does not follow a digit ("10-5" ends in 5), then 1,234.5 or 1234.5 or .5; a "$" may stand between.
NUMBER = re.compile(r"(?:(?<![\d.])[-−]\s?)?\$?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+")


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or the last number of a text without it; separators, "$" and units dropped."""
    _, marked, tail = text.rpartition("####")
    found = NUMBER.findall(tail)
    if not found:
        return None
    return Decimal(re.sub(r"[,$\s]", "", found[0 if marked else -1]).replace("−", "-"))


REWARDS: dict[str, Callable] = {"exact": exact, "gsm8k": gsm8k}


def load_reward(name: str, custom: str | None) -> Callable:
    """The function behind a reward's name; "custom" is read from `custom`, "path/to/file.py:function".

    Raises ValueError that says what is legal.
    """
    if name in REWARDS:
        return REWARDS[name]
    if name != "custom":
        raise ValueError(f"unknown reward {name!r}; legal are {', '.join([*REWARDS, 'custom'])}")
    path, _, function = (custom or "").rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"reward.custom={custom!r}: give path/to/file.py:function, a file that exists")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward.custom={custom}: importing it failed: {last_line(error)}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"reward.custom={custom}: {path} has no function {function!r}")
    return getattr(module, function)


def last_line(error: BaseException) -> str:
    """The last line of the traceback, with the place that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def parts_of(value: float | dict) -> dict[str, float]:
    """What a reward function returned, as {part: finite float}. Raises TypeError or ValueError for anything else."""
    parts = value if isinstance(value, dict) else {"reward": value}
    for name, part in parts.items():
        if isinstance(part, str) or not math.isfinite(part):
            raise ValueError(f"a reward must be a finite number; {name} is {part!r}")
    return {str(name): float(part) for name, part in parts.items()}


# ---------------------------------------------------------------- grading


@dataclass
class Grade:
    """The outcome for one answer; `status` is "ok", "timeout" or "error": wrong and failed are never mixed up."""

    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    error: str = ""


class Grader:
    """A few worker processes that grade answers. `by_source` picks the reward of a source, else `default`."""

    def __init__(self, default: str, by_source: dict[str, str], custom: str | None, timeout_s: float, workers: int):
        self.default, self.by_source, self.custom, self.timeout_s = default, by_source, custom, timeout_s
        self.workers = [self._start() for _ in range(workers)]

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, __file__, self.custom or ""]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def grade(self, jobs: list[tuple[str, str, str, dict]]) -> list[Grade]:
        """Grades of (source, text, answer, row) jobs, in their order."""
        grades: list[Grade | None] = [None] * len(jobs)
        waiting = queue.SimpleQueue()
        for job in enumerate(jobs):
            waiting.put(job)

        def serve(worker: int) -> None:
            while True:
                try:
                    i, (source, text, answer, row) = waiting.get_nowait()
                except queue.Empty:
                    return
                name = self.by_source.get(source, self.default)
                grades[i] = self._ask(worker, {"name": name, "text": text, "answer": answer, "row": row})

        threads = [threading.Thread(target=serve, args=(w,)) for w in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return grades

    def _ask(self, worker: int, request: dict) -> Grade:
        process = self.workers[worker]
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            readable, _, _ = select.select([process.stdout], [], [], self.timeout_s)
            reply = process.stdout.readline() if readable else None
        except BrokenPipeError:
            reply = ""
        if reply:
            return Grade(**json.loads(reply))
        process.kill()
        process.wait()
        self.workers[worker] = self._start()
        if reply is None:
            return Grade(status="timeout")
        return Grade(status="error", error=f"the grading process died (exit code {process.returncode})")

    def close(self) -> None:
        """End the workers."""
        for process in self.workers:
            process.kill()
            process.wait()


def serve_requests(custom: str | None) -> None:
    """The worker: a JSON request a line on standard input, a JSON grade a line on standard output."""
    replies, sys.stdout = sys.stdout, sys.stderr  # what a reward function prints must not mix with the replies
    functions = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("name")
        try:
            if name not in functions:
                functions[name] = load_reward(name, custom)
            grade = {"parts": parts_of(functions[name](**request))}
        except Exception as error:
            grade = {"status": "error", "error": last_line(error)}
        print(json.dumps(grade), file=replies, flush=True)


if __name__ == "__main__":
    serve_requests(sys.argv[1] or None)
