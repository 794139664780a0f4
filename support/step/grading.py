"""Rewards computed in worker processes, because only a process can be killed.

An answer that takes longer than `timeout_s` loses its own reward and never stops the run. The functions of
rollout.turns are called in the workers as well (support/step/turns.py). Knows no trainer and no tensors. Started as a
program, this file is the worker.
"""

import atexit
import contextlib
import inspect
import json
import os
import resource
import select
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import reward
from support.base import processes, user_code
from support.base.user_code import last_line
from support.judge import reward_model, sandbox

# ---------------------------------------------------------------- the pool, in the trainer


@dataclass
class Outcome:
    """The result for one answer. `status` is "ok", "timeout" or "error"; a wrong answer is "ok" and has its reward."""

    parts: dict[str, float | list] = field(default_factory=dict)  # as reward.parts_of; for a turn "reply" and "state"
    status: str = "ok"
    error: str = ""


@dataclass
class Ledger:
    """Requests that are submitted together and waited for together."""

    outcomes: list[Outcome | None] = field(default_factory=list)  # in the order of submission; None: not finished
    open: int = 0  # how many are not finished


Job = tuple[Ledger, int, str]  # the index of its outcome in the ledger, its request as JSON

LOAD_S = 600.0  # wall clock to load a reward: the import of a custom module, a model's weights
CHUNK = 32  # answers sent to a worker at once, where each takes less than QUICK_S
QUICK_S = 0.01
TURNS = "rollout.turns"  # the key of a request that calls a function of rollout.turns, in place of a reward
MAX_TURN_CHARS = 100_000  # length of the text that a function of rollout.turns returns, and of its state as JSON


class GradingPool:
    """Worker processes that grade answers while the caller does something else.

    A source has the reward in `by_source`, else `default`. `timeout_s`: wall clock per answer, from when a worker
    starts on it. `memory_gb`: address space of a worker, 0 for no limit. Where rewards use reward models, one more
    worker loads all of them, without that limit.
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
        functions: dict[str, str] | None = None,
    ):
        self.default = default
        self.by_source = by_source
        self.custom = custom
        self.options = options or {}
        self.functions = functions or {}
        self.timeout_s = timeout_s
        self.memory_gb = memory_gb
        self.lock = threading.Condition()  # guards all attributes below
        models = [name for spec in [default, *by_source.values()] for name in reward.models_of(spec, self.functions)]
        self.batch_size = max([self.options.get(name, {}).get("batch_size", 8) for name in models], default=8)
        self.waiting = {False: deque(), True: deque()}  # jobs, keyed by whether they need a model
        self.submitted = Ledger()  # since the last `collect`
        self.closed = False
        self.failure: BaseException | None = None  # of a thread, for the caller
        with_model = [False for _ in range(workers)]  # of each worker
        if models:
            with_model.append(True)
        self.workers: list[Worker | None] = [None for _ in with_model]
        self.threads = [
            threading.Thread(target=self._serve, args=slot_and_kind, daemon=True)
            for slot_and_kind in enumerate(with_model)
        ]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)  # a run that ends with an error removes its temporary files too

    def submit(
        self,
        source: str,
        text: str,
        answer: str,
        row: dict,
        ids: list[int] | None = None,
        failure: Outcome | None = None,
    ) -> None:
        """Queue an answer for grading; returns at once. Rewards of the user's own may ask for its token `ids`.

        `failure`: the outcome of an answer whose environment failed, which is not graded.
        """
        if failure:
            self.submitted.outcomes.append(failure)
            return
        spec = self.by_source.get(source, self.default)
        ids = ids if reward.has_own(spec, self.functions) else None
        queue = self.waiting[bool(reward.models_of(spec, self.functions))]
        self._put(queue.append, self.submitted, {"spec": spec, "arguments": [text, answer, row, ids]})

    def submit_turn(self, ledger: Ledger, place: str, text: str, row: dict, state: dict) -> None:
        """Queue a call of the function of rollout.turns at `place`, ahead of all other jobs: vLLM waits for it."""
        self._put(self.waiting[False].appendleft, ledger, {"spec": {TURNS: place}, "arguments": [text, row, state]})

    def _put(self, put: Callable[[Job], None], ledger: Ledger, request: dict) -> None:
        request = json.dumps(request, default=str)
        with self.lock:
            put((ledger, len(ledger.outcomes), request))
            ledger.outcomes.append(None)
            ledger.open += 1
            self.lock.notify_all()

    def collect(self) -> list[Outcome]:
        """Wait for everything submitted since the last call; the outcomes in the order of submission."""
        ledger, self.submitted = self.submitted, Ledger()
        return self.wait(ledger)

    def wait(self, ledger: Ledger) -> list[Outcome]:
        """The outcomes of a ledger, once all are there."""
        with self.lock:
            self.lock.wait_for(lambda: not ledger.open or self.failure)
            if self.failure:
                raise RuntimeError("grading failed") from self.failure
        return ledger.outcomes

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
        """The thread of one worker. It starts the process too, which dies with the thread that started it."""
        try:
            size = 1
            while True:
                jobs = self._take(with_model, size)
                if not jobs:
                    return
                start = time.monotonic()
                ungraded = self._ask(slot, jobs, with_model)
                quick = time.monotonic() - start < QUICK_S * (len(jobs) - len(ungraded))
                size = CHUNK if quick else 1
                with self.lock:
                    self.waiting[with_model].extendleft(reversed(ungraded))
                    self.lock.notify_all()
        except BaseException as error:
            with self.lock:
                self.failure = error
                self.lock.notify_all()
        finally:
            self._stop(slot)

    def _take(self, with_model: bool, size: int) -> list[Job]:
        """Up to `size` jobs, fewer when few are left so that all workers have some; none when the pool is closed."""
        waiting = self.waiting[with_model]
        with self.lock:
            self.lock.wait_for(lambda: waiting or self.closed)
            if self.closed:
                return []
            size = self.batch_size if with_model else min(size, 1 + len(waiting) // (2 * len(self.workers)))
            return [waiting.popleft() for _ in range(min(size, len(waiting)))]

    def _ask(self, slot: int, jobs: list[Job], with_model: bool) -> list[Job]:
        """Have the worker grade the jobs; returns the jobs it had not started when it was stopped."""
        worker = self.workers[slot] or self._start(slot, with_model)
        with contextlib.suppress(BrokenPipeError):  # the worker is dead: reading its reply says so
            worker.send("[" + ",".join(request for *_, request in jobs) + "]")
        for number, job in enumerate(jobs):
            started = worker.read_line(LOAD_S)
            reply = worker.read_line(self.timeout_s) if started else started
            if reply:
                fields = json.loads(reply)
                restart = fields.pop("restart", False)
                self._settle([job], Outcome(**fields))
                if restart:
                    self._stop(slot)
                    return jobs[number + 1 :]
                continue
            code = self._stop(slot)
            failed = jobs[number:] if with_model else [job]  # a model scores all of them in one batch
            if started and reply is None:
                outcome = Outcome(status="timeout")
            elif reply is None:
                outcome = Outcome(status="error", error=f"loading the reward took more than {LOAD_S:.0f} s")
            else:
                outcome = Outcome(status="error", error=f"the grading process died (exit code {code})")
            self._settle(failed, outcome)
            return jobs[number + len(failed) :]
        return []

    def _settle(self, jobs: list[Job], outcome: Outcome) -> None:
        """Give jobs their outcome, and wake up who waits for the last one of a ledger."""
        with self.lock:
            for ledger, index, _ in jobs:
                ledger.outcomes[index] = outcome
                ledger.open -= 1
                if not ledger.open:
                    self.lock.notify_all()

    def _start(self, slot: int, with_model: bool) -> "Worker":
        worker = Worker(
            {
                "custom": self.custom,
                "options": self.options,
                "functions": self.functions,
                "with_model": with_model,
                "memory_gb": 0 if with_model else self.memory_gb,
            }
        )
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
    """A grading process, seen from the trainer: a line in is a list of requests, a line out an outcome."""

    def __init__(self, settings: dict):
        self.folder = tempfile.mkdtemp(prefix="grading-")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self.process = processes.start_module("support.step.grading", env={"TMPDIR": self.folder}, **pipes)
        self.unread = bytearray()
        with contextlib.suppress(BrokenPipeError):
            self.send(json.dumps(settings))

    def send(self, line: str) -> None:
        """Write a line; the worker is reading whenever this is called. Raises BrokenPipeError."""
        unsent = memoryview(line.encode() + b"\n")
        while unsent:
            written = self.process.stdin.write(unsent)
            unsent = unsent[written:]

    def read_line(self, seconds: float) -> bytes | None:
        """The next line with its end; empty if the worker is dead, None if none came within `seconds`."""
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
        """Kill the worker and all it started, remove its files; returns its exit code."""
        processes.kill_family(self.process.pid)
        code = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        sandbox.remove_tree(self.folder)
        return code


# ---------------------------------------------------------------- the worker


def serve_requests() -> None:
    """Grade requests from standard input. Writes an empty line when an answer's time starts, then a line of JSON."""
    requests = os.fdopen(os.dup(0))
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a reward function must not read requests, nor print into replies
    os.dup2(2, 1)
    processes.die_with_parent(adopt=True)
    settings = json.loads(requests.readline())
    if settings["memory_gb"]:
        size = int(settings["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    loaded = {}
    for line in requests:
        chunk = json.loads(line)
        if settings["with_model"]:  # a function that is loaded scores one chunk, in a batch
            loaded = {}
        for request in chunk:
            key = json.dumps(request["spec"])
            if key not in loaded:
                loaded[key] = attempt(load_reward_function, request["spec"], settings, chunk)
            function, failure = loaded[key]
            os.write(replies, b"\n")
            if not failure:
                value, failure = attempt(function, *request["arguments"])
            os.write(replies, json.dumps(failure or {"parts": value}).encode() + b"\n")


def attempt(function: Callable, *args) -> tuple:
    """(value, None) of a function, or (None, fields of a failed Outcome). "restart" asks for a new worker."""
    try:
        return function(*args), None
    except sandbox.TooLong:
        return None, {"status": "timeout"}
    except MemoryError as error:
        return None, {"status": "error", "error": last_line(error), "restart": True}
    except Exception as error:
        return None, {"status": "error", "error": last_line(error)}


def load_reward_function(spec: str | dict[str, float], settings: dict, chunk: list[dict]) -> Callable:
    """The function of `reward.load_reward`, returning parts. All it needs is loaded before an answer's time starts."""
    if isinstance(spec, dict) and TURNS in spec:
        return load_turn_function(spec[TURNS])
    models = reward.models_of(spec, settings["functions"])
    batched = {name: batched_model(name, chunk) for name in models}
    function = reward.load_reward(spec, settings["custom"], settings["options"], settings["functions"], batched)
    if any(settings["functions"].get(name, name) == "math" for name in reward.weights_of(spec)):
        reward.parse_math("$1$ or \\boxed{1}")
    for name in models:
        options = model_options(settings["options"][name])
        reward_model.load(options["path"], options["device"], options["dtype"])
    return lambda *arguments: reward.parts_of(function(*arguments))


def load_turn_function(place: str) -> Callable:
    """The function of rollout.turns, returning {"reply": text or None, "state": dict}.

    It raises TypeError or ValueError for a reply that is no text, a state that is no JSON, or one that is too long.
    """
    function = user_code.load_function(TURNS, place)

    def take_turn(text: str, row: dict, state: dict) -> dict:
        reply = function(text, row, state)
        if not isinstance(reply, str | None):
            raise TypeError(f"it returned a {type(reply).__name__}; legal are a text and None")
        for what, size in (("the text", len((reply or "").encode())), ("the state", len(json.dumps(state)))):
            if size > MAX_TURN_CHARS:
                raise ValueError(f"{what} that it returned has {size} characters; at most {MAX_TURN_CHARS} are legal")
        return {"reply": reply, "state": state}

    return take_turn


def batched_model(name: str, chunk: list[dict]) -> Callable:
    """`reward.model` for the requests of a chunk that use it by this name; the first call scores all of them."""
    score_of_row = {}  # by the identity of the row

    def score(text: str, answer: str, row: dict, **options) -> float:
        if not score_of_row:
            arguments = [request["arguments"] for request in chunk if name in reward.weights_of(request["spec"])]
            values = reward_model.scores([(text, row) for text, _, row, _ in arguments], **model_options(options))
            score_of_row.update({id(row): value for (_, _, row, _), value in zip(arguments, values, strict=True)})
        return score_of_row[id(row)]

    return score


def model_options(given: dict) -> dict:
    """All options of `reward.model`: those that are given, the others with their defaults."""
    options = list(inspect.signature(reward.model).parameters.values())[3:]  # after response, answer and row
    return {option.name: option.default for option in options} | given


if __name__ == "__main__":
    serve_requests()
