"""Rewards and functions of rollout.turns in processes, which can be killed. As a program, this file is one of them."""

import atexit
import contextlib
import itertools
import json
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import SimpleNamespace

from grpo.parts.base import processes, user_code
from grpo.parts.base.user_code import last_line
from grpo.parts.judge import sandbox
from grpo.step import named_rewards
from grpo.step.named_rewards import Answer, Spec

# ---------------------------------------------------------------- the pool, in the trainer


@dataclass
class Outcome:
    """The result for one answer. `status` is "ok", "timeout" or "error"; a wrong answer is "ok" and has its reward."""

    parts: dict[str, float] = field(default_factory=dict)  # as named_rewards.parts_of; for a turn "reply" and "state"
    status: str = "ok"
    error: str = ""


class RewardKind:
    """A reward as the configuration names it, and what its jobs need."""

    def __init__(self, spec: Spec, cfg):
        functions = [named_rewards.find(name, cfg) for name in named_rewards.weights_of(spec)]
        self.spec = spec
        self.takes_ids = any(map(named_rewards.takes_ids, functions))  # one of its functions asks for token ids


# Whether others come first, its number, its request as JSON, what its Outcome is given to
Job = tuple[bool, int, str, Future]

LOAD_S = 600.0  # wall clock to load a reward: the import of a custom module, a model's weights
MESSAGE_S = 60  # to receive the rest of a message that has begun to come
TURNS = "rollout.turns"  # the key of a request that calls a function of rollout.turns, in place of a reward
MAX_TURN_BYTES = 100_000  # of the text that a function of rollout.turns returns, and of its state as JSON


class GradingPool:
    """Worker processes that grade answers while the caller does something else; `cfg`: the section `reward`."""

    def __init__(self, cfg):
        self.timeout_s = cfg.timeout_s
        self.max_error_frac = cfg.max_error_frac
        self.errors_shown: set[str] = set()  # kinds of errors that the user was warned of
        self.default = RewardKind(cfg.default, cfg)
        self.by_source = {source: RewardKind(spec, cfg) for source, spec in cfg.by_source.items()}
        settings = {name: getattr(cfg, name) for name in ("custom", "options", "functions", "memory_gb")}
        self.workers = [Worker(settings) for _ in range(cfg.workers)]
        self.submitted: list[Future] = []  # since the last `collect`
        self.numbers = itertools.count()  # of the jobs, whose order this is
        self.waiting: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self.closed = False
        self.threads = [threading.Thread(target=self._serve, args=[worker], daemon=True) for worker in self.workers]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)  # a run that ends with an error removes its temporary files too

    def submit(
        self, source: str, text: str, answer: Answer, row: dict, ids: list[int] | None = None,
        failure: Outcome | None = None,
    ) -> None:  # fmt: skip
        """Queue an answer for grading, unless a `failure` of its environment is its Outcome; returns at once."""
        kind = self.by_source.get(source, self.default)
        if failure:
            future = Future()
            future.set_result(failure)
        else:
            future = self._queue(kind.spec, [text, answer, row, ids if kind.takes_ids else None])
        self.submitted.append(future)

    def submit_turn(self, place: str, text: str, row: dict, state: dict) -> Future:
        """Queue a call of the function of rollout.turns at `place`, ahead of all other jobs: vLLM waits for it."""
        return self._queue({TURNS: place}, [text, row, state], first=True)

    def _queue(self, spec: Spec, arguments: list, first: bool = False) -> Future:
        future = Future()
        request = json.dumps({"spec": spec, "arguments": arguments}, default=str)
        self.waiting.put((not first, next(self.numbers), request, future))
        return future

    def collect(self) -> list[Outcome]:
        """Wait for everything submitted since the last call; the outcomes in the order of submission."""
        futures, self.submitted = self.submitted, []
        return [future.result() for future in futures]

    def close(self) -> None:
        atexit.unregister(self.close)
        self.closed = True
        for worker in self.workers:
            self._queue("", [])  # for its thread to wake
            process = worker.process  # its thread may take it away meanwhile
            if process:
                process.kill()
        for thread in self.threads:
            thread.join()

    def _serve(self, worker: "Worker") -> None:
        """The thread of one worker. It starts the process too, which dies with the thread that started it."""
        while True:
            *_, request, future = self.waiting.get()
            if self.closed:
                break
            try:
                future.set_result(self._ask(worker, request))
            except BaseException as error:  # for the caller, who waits for the outcomes
                future.set_exception(error)
                worker.stop()
        worker.stop()

    def _ask(self, worker: "Worker", request: str) -> Outcome:
        if not worker.process:
            worker.start()
            if self.closed:  # `close` may not have seen it
                worker.process.kill()
        worker.send(request)
        fields = worker.receive_outcome(self.timeout_s)
        if fields.pop("restart", False):
            worker.stop()
        return Outcome(**fields)


class Worker:
    """A grading process, seen from the trainer: a message in is a request, as JSON; see serve_requests."""

    def __init__(self, settings: dict):
        self.settings = settings
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process. What its rewards print goes to standard error."""
        self.folder = tempfile.mkdtemp(prefix="grading-")
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_S, 0))
        self.pipe = Connection(ours.detach())
        path = os.pathsep.join(filter(None, [str(processes.REPO), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo.step.grading", str(theirs.fileno())],  # -P: only our modules
            env={**os.environ, "TMPDIR": self.folder, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C does not reach it
        )
        theirs.close()
        self.send(json.dumps(self.settings))

    def send(self, text: str) -> None:
        """Send a message, which the process is waiting for; to a dead one, nothing: receiving its reply says so."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(text.encode())

    def receive_outcome(self, seconds: float) -> dict:
        """The fields of the next Outcome, and perhaps "restart". A process that is late or dead is stopped."""
        failure = {"status": "error", "error": f"loading the reward took more than {LOAD_S:.0f} s"}
        try:
            if self.pipe.poll(LOAD_S):
                self.pipe.recv_bytes()  # it starts on the answer
                failure = {"status": "timeout"}
                if self.pipe.poll(seconds):
                    return json.loads(self.pipe.recv_bytes())
            self.stop()
        except (EOFError, OSError, ValueError):  # a reward may write into its pipe
            failure = {"status": "error", "error": f"the grading process died (exit code {self.stop()})"}
        return failure

    def stop(self) -> int | None:
        """Kill the process, if there is one, and all it started, and remove its files; returns its exit code."""
        if not self.process:
            return None
        process, self.process = self.process, None
        processes.kill_family(process.pid)
        code = process.wait()
        self.pipe.close()
        sandbox.remove_tree(self.folder)
        return code


# ---------------------------------------------------------------- the worker


def serve_requests(descriptor: int) -> None:
    """Grade what comes over a pipe: settings, then requests. An answer is an empty message at its start, then JSON."""
    processes.die_with_parent(adopt=True)
    pipe = Connection(os.dup(descriptor))
    os.set_inheritable(descriptor, False)  # open until the process has ended and has its exit code
    settings = json.loads(pipe.recv_bytes())
    if settings["memory_gb"]:
        size = int(settings["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    cfg = SimpleNamespace(**settings)
    loaded = {}
    while True:
        request = json.loads(pipe.recv_bytes())
        key = json.dumps(request["spec"])
        if key not in loaded:
            loaded[key] = attempt(load, request["spec"], cfg)
        function, failure = loaded[key]
        pipe.send_bytes(b"")
        if not failure:
            value, failure = attempt(function, *request["arguments"])
        pipe.send_bytes(json.dumps(failure or value, default=float).encode())


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


def load(spec: Spec, cfg: SimpleNamespace) -> Callable:
    if isinstance(spec, dict) and TURNS in spec:
        return load_turn_function(spec[TURNS])
    return named_rewards.load(spec, cfg)


def load_turn_function(place: str) -> Callable:
    """The function of rollout.turns, giving {"parts": {"reply", "state"}}; TypeError, ValueError for an illegal one."""
    function = user_code.load_function(TURNS, place)

    def take_turn(text: str, row: dict, state: dict) -> dict:
        reply = function(text, row, state)
        if not isinstance(reply, str | None):
            raise TypeError(f"it returned a {type(reply).__name__}; legal are a text and None")
        for what, size in (("the text", len((reply or "").encode())), ("the state", len(json.dumps(state)))):
            if size > MAX_TURN_BYTES:
                raise ValueError(f"{what} that it returned has {size} bytes; at most {MAX_TURN_BYTES} are legal")
        return {"parts": {"reply": reply, "state": state}}

    return take_turn


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the trainer has ended
        serve_requests(int(sys.argv[1]))
