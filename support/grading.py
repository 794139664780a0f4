"""Rewards by name, and their grading. Knows no trainer and no tensors; the functions are in reward_functions.py.

Grading runs in worker processes (this file, started as a program), because only a process can be killed: an answer that
takes longer than `timeout_s` costs its own reward, never the run.
"""

import atexit
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import os
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reward import REWARDS, load_model, model, model_scores, parse_math
from support import sandbox

# ---------------------------------------------------------------- a reward by its name


def load_reward(
    spec: str | dict[str, float],
    custom: str | None,
    options: dict[str, dict] | None = None,
    known: dict[str, Callable] = REWARDS,
) -> Callable:
    """The function `(text, answer, row)` behind a reward's name, or behind {name: weight}, their weighted sum.

    "custom" is read from `custom`, "path/to/file.py:function"; `options` are keyword arguments by name. Loads no model.
    Raises ValueError that says what is legal.
    """
    options = options or {}
    for where, names in (("", weights_of(spec)), ("reward.options: ", options)):
        for name in names:
            if name not in known and name != "custom":
                raise ValueError(f"{where}unknown reward {name!r}; legal are {', '.join([*known, 'custom'])}")
    functions = {}
    for name in weights_of(spec):
        function = load_custom(custom) if name == "custom" else known[name]
        check_options(name, REWARDS.get(name, function), options.get(name, {}))
        functions[name] = functools.partial(function, **options.get(name, {}))
    if isinstance(spec, str):
        return functions[spec]

    def weighted(text: str, answer: str, row: dict) -> dict[str, float]:
        parts = {}
        for name, weight in spec.items():
            for part, value in parts_of(functions[name](text, answer, row)).items():
                parts[name if part == "reward" else f"{name}/{part}"] = weight * value
        return parts

    return weighted


def weights_of(spec: str | dict[str, float]) -> dict[str, float]:
    """{name: weight} of a reward written either way. Raises ValueError."""
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    numbers = isinstance(weights, dict) and all(type(w) in (int, float) and math.isfinite(w) for w in weights.values())
    if not numbers or not weights:
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    return weights


def check_options(name: str, function: Callable, given: dict) -> None:
    """Raises ValueError for options that the reward does not have, and for those that it lacks."""
    legal = list(inspect.signature(function).parameters.values())[3:]
    names = [p.name for p in legal]
    if any(p.kind is p.VAR_KEYWORD for p in legal):
        return
    for key in given:
        if key not in names:
            raise ValueError(f"unknown option reward.options.{name}.{key}; legal are {', '.join(names) or 'none'}")
    for p in legal:
        if p.default is p.empty and p.name not in given:
            raise ValueError(f"the reward {name!r} needs reward.options.{name}.{p.name}")


@functools.lru_cache
def load_custom(custom: str | None) -> Callable:
    """The function of "path/to/file.py:function". Raises ValueError."""
    path, _, function = (custom or "").rpartition(":")
    if not path or not os.path.isfile(path):
        raise ValueError(f"reward.custom={custom!r}: give path/to/file.py:function, a file that exists")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
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


REPO = str(Path(__file__).resolve().parent.parent)  # where the worker finds its modules, whatever its folder
LOAD_S = 600.0  # wall clock for what comes before an answer is graded: a custom module's import, a model's weights
CHUNK = 32  # answers sent to a worker at once, where each takes less than QUICK_S
QUICK_S = 0.01


class Grader:
    """Worker processes that grade answers while the caller does something else.

    `by_source` picks the reward of a source, else `default`. `timeout_s`: wall clock an answer, from when a worker
    starts on it. `memory_gb`: address space of a worker, 0 for no limit. Where a reward uses `model`, one more worker
    loads it, without that limit. `max_error_frac` is the caller's.
    """

    def __init__(
        self,
        default: str | dict[str, float],
        by_source: dict[str, str | dict[str, float]],
        custom: str | None,
        timeout_s: float,
        workers: int,
        options: dict[str, dict] | None = None,
        memory_gb: float = 4.0,
        max_error_frac: float = 0.0,
    ):
        self.default, self.by_source, self.custom, self.options = default, by_source, custom, options or {}
        self.timeout_s, self.memory_gb = timeout_s, memory_gb
        self.lock = threading.Condition()  # of all that follows
        self.batch_size = self.options.get("model", {}).get("batch_size", 8)
        self.waiting = {False: deque(), True: deque()}  # (place in grades, request), by whether it needs the model
        self.grades: list[Grade | None] = []  # None: not graded yet
        self.open, self.closed, self.failure = 0, False, None
        kinds = [False] * workers
        if any("model" in weights_of(spec) for spec in [default, *by_source.values()]):
            kinds.append(True)
        self.workers: list[Worker | None] = [None] * len(kinds)
        self.threads = [threading.Thread(target=self._serve, args=job, daemon=True) for job in enumerate(kinds)]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)  # a run that ends with an error leaves no files behind either

    def submit(self, source: str, text: str, answer: str, row: dict) -> None:
        """Have an answer graded; returns at once."""
        spec = self.by_source.get(source, self.default)
        request = json.dumps({"spec": spec, "text": text, "answer": answer, "row": row}, default=str)
        with self.lock:
            self.waiting["model" in weights_of(spec)].append((len(self.grades), request))
            self.grades.append(None)
            self.open += 1
            self.lock.notify_all()

    def collect(self) -> list[Grade]:
        """Wait for everything submitted since the last call; the grades in the order of submission."""
        with self.lock:
            self.lock.wait_for(lambda: not self.open or self.failure)
            if self.failure:
                raise RuntimeError("grading failed") from self.failure
            grades, self.grades = self.grades, []
        return grades

    def grade(self, jobs: list[tuple[str, str, str, dict]]) -> list[Grade]:
        """Grades of (source, text, answer, row) jobs, in their order."""
        for job in jobs:
            self.submit(*job)
        return self.collect()

    def close(self) -> None:
        """End the workers and all they started."""
        atexit.unregister(self.close)
        with self.lock:
            self.closed = True
            self.lock.notify_all()
            for worker in filter(None, self.workers):
                worker.process.kill()
        for thread in self.threads:
            thread.join()

    def _serve(self, slot: int, with_model: bool) -> None:
        """The thread of one worker; starting it here ties the worker's life to this thread's."""
        try:
            size = 1
            while jobs := self._take(with_model, size):
                start = time.monotonic()
                left = self._ask(slot, jobs, with_model)
                quick = time.monotonic() - start < QUICK_S * (len(jobs) - len(left))
                size = CHUNK if quick else 1
                with self.lock:
                    self.waiting[with_model].extendleft(reversed(left))
                    self.lock.notify_all()
        except BaseException as error:
            with self.lock:
                self.failure = error
                self.lock.notify_all()
        finally:
            self._stop(slot)

    def _take(self, with_model: bool, size: int) -> list[tuple[int, str]]:
        """Up to `size` jobs, fewer near the end so that all workers have some; none when the grader is closed."""
        waiting = self.waiting[with_model]
        with self.lock:
            self.lock.wait_for(lambda: waiting or self.closed)
            size = self.batch_size if with_model else min(size, 1 + len(waiting) // (2 * len(self.workers)))
            return [] if self.closed else [waiting.popleft() for _ in range(min(size, len(waiting)))]

    def _ask(self, slot: int, jobs: list[tuple[int, str]], with_model: bool) -> list[tuple[int, str]]:
        """Have the worker grade the jobs; returns those that it did not come to before it was killed."""
        worker = self.workers[slot] or self._start(slot, with_model)
        with contextlib.suppress(BrokenPipeError):  # it is dead: reading finds out
            worker.send("[" + ",".join(request for _, request in jobs) + "]")
        for place, (index, _) in enumerate(jobs):
            began = worker.line(LOAD_S)
            reply = worker.line(self.timeout_s) if began else began
            if reply:
                grade = json.loads(reply)
                worn = grade.pop("worn", False)
                self._settle([index], Grade(**grade))
                if worn:
                    self._stop(slot)
                    return jobs[place + 1 :]
                continue
            code = self._stop(slot)
            failed = jobs[place:] if with_model else jobs[place : place + 1]  # the model takes all of them at once
            if began and reply is None:
                grade = Grade(status="timeout")
            elif reply is None:
                grade = Grade(status="error", error=f"loading the reward took more than {LOAD_S:.0f} s")
            else:
                grade = Grade(status="error", error=f"the grading process died (exit code {code})")
            self._settle([index for index, _ in failed], grade)
            return jobs[place + len(failed) :]
        return []

    def _settle(self, places: list[int], grade: Grade) -> None:
        with self.lock:
            for place in places:
                self.grades[place] = grade
            self.open -= len(places)
            if not self.open:
                self.lock.notify_all()

    def _start(self, slot: int, with_model: bool) -> "Worker":
        settings = {"custom": self.custom, "options": self.options, "with_model": with_model}
        worker = Worker({**settings, "memory_gb": 0 if with_model else self.memory_gb})
        with self.lock:
            self.workers[slot] = worker
            if self.closed:
                worker.process.kill()
        return worker

    def _stop(self, slot: int) -> int | None:
        """Kill a worker, if there is one, with all it started; returns its exit code."""
        with self.lock:
            worker, self.workers[slot] = self.workers[slot], None
        return worker.stop() if worker else None


class Worker:
    """A grading process, seen from the trainer: a line in is a list of requests, a line out a grade."""

    def __init__(self, settings: dict):
        self.folder = tempfile.mkdtemp(prefix="grading-")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.grading"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={
                **os.environ,
                "TMPDIR": self.folder,
                "PYTHONPATH": os.pathsep.join(path for path in (REPO, os.environ.get("PYTHONPATH")) if path),
            },
            start_new_session=True,
        )
        self.unread = bytearray()
        with contextlib.suppress(BrokenPipeError):
            self.send(json.dumps(settings))

    def send(self, line: str) -> None:
        """Write a line; the worker is reading whenever this is called. Raises BrokenPipeError."""
        left = memoryview(line.encode() + b"\n")
        while left:
            left = left[self.process.stdin.write(left) :]

    def line(self, seconds: float) -> bytes | None:
        """The next line with its end; empty if the worker is dead, None if it wrote none for so long."""
        deadline = time.monotonic() + seconds
        poll = select.poll()  # select.select cannot watch the high descriptors of a large trainer
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self.unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return b""
            self.unread += data
        line, end, self.unread = self.unread.partition(b"\n")
        return bytes(line + end)

    def stop(self) -> int:
        """Kill it and all it started, remove its files; returns its exit code."""
        sandbox.kill_family(self.process.pid)
        code = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        sandbox.remove_tree(self.folder)
        return code


# ---------------------------------------------------------------- the worker


def serve_requests() -> None:
    """Grade what comes on standard input. For each answer an empty line when its clock starts, then a line of JSON."""
    requests, replies = os.fdopen(os.dup(0)), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # what a reward function reads or prints must not mix with requests and replies
    os.dup2(2, 1)
    sandbox.die_with_parent(adopt=True)
    settings = json.loads(requests.readline())
    if settings["memory_gb"]:
        size = int(settings["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    loaded = {}
    for line in requests:
        chunk = json.loads(line)
        if settings["with_model"]:  # the function knows the chunk, to score it in one go
            loaded = {}
        for request in chunk:
            spec = request.pop("spec")
            key = json.dumps(spec)
            if key not in loaded:
                loaded[key] = attempt(prepare, spec, settings, chunk)
            function, failure = loaded[key]
            os.write(replies, b"\n")
            value, failure = (None, failure) if failure else attempt(function, **request)
            os.write(replies, json.dumps(failure or {"parts": value}).encode() + b"\n")


def attempt(function: Callable, *args, **kwargs) -> tuple:
    """The function's value and None, or None and the fields of a failed Grade; "worn" asks for a new worker."""
    try:
        return function(*args, **kwargs), None
    except sandbox.TooLong:
        return None, {"status": "timeout"}
    except Exception as error:
        worn = {"worn": True} if isinstance(error, MemoryError) else {}
        return None, {"status": "error", "error": last_line(error), **worn}


def prepare(spec: str | dict[str, float], settings: dict, chunk: list[dict]) -> Callable:
    """`load_reward`, returning parts, with what it needs loaded, so that no answer's time pays for that."""
    options, names, known, scores = settings["options"], weights_of(spec), dict(REWARDS), {}

    def scored(text: str, answer: str, row: dict, **options) -> float:
        if not scores:
            values = model_scores([(request["text"], request["row"]) for request in chunk], **options)
            scores.update({id(request["row"]): value for request, value in zip(chunk, values, strict=True)})
        return scores[id(row)]

    if settings["with_model"]:
        known["model"] = scored
    function = load_reward(spec, settings["custom"], options, known)
    if "math" in names:
        parse_math("$1$ or \\boxed{1}")
    if "model" in names:
        chosen = {p.name: p.default for p in inspect.signature(model).parameters.values()} | options["model"]
        load_model(chosen["path"], chosen["device"], chosen["dtype"])
    return lambda **request: parts_of(function(**request))


if __name__ == "__main__":
    serve_requests()
