"""Run rewards and the functions of `rollout.turns` in grading processes, which can be killed.

The trainer has a GradingPool. As a program, this file is one of the pool's processes.
"""

import atexit
import contextlib
import itertools
import json
import os
import pickle
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
from grpo.step import named_rewards
from grpo.step.named_rewards import Answer, Spec

# ---------------------------------------------------------------- the pool, in the trainer


@dataclass
class Outcome:
    """The result for one answer. `status` is "ok", "timeout" or "error". A wrong answer is "ok" with its reward."""

    parts: dict[str, float] = field(default_factory=dict)  # as named_rewards.parts_of; for a turn "reply" and "state"
    status: str = "ok"
    error: str = ""


# Whether other jobs go first, the job's number, its request pickled, the future of its Outcome.
Job = tuple[bool, int, bytes, Future]

LOAD_S = 600.0  # seconds of wall clock to load a reward: the import of a custom module, a model's weights
MESSAGE_S = 60  # to receive the rest of a message that has begun to come
TURNS = "rollout.turns"  # the key of a request that calls a function of rollout.turns instead of a reward
MAX_TURN_BYTES = 100_000  # of the text that a function of rollout.turns returns, and of its state as JSON


class GradingPool:
    """Worker processes that grade answers while the caller does something else. `cfg` is the section `reward`."""

    def __init__(self, cfg):
        self.timeout_s = cfg.timeout_s
        self.max_error_frac = cfg.max_error_frac
        self.errors_shown: set[str] = set()  # kinds of errors that the user was warned of
        self.default = cfg.default
        self.by_source = cfg.by_source

        self.waiting: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self.numbers = itertools.count()  # of the jobs, which are done in this order
        self.submitted: list[Future] = []  # since the last `collect`
        self.closed = False

        self.workers = [Worker(cfg.model_dump()) for _ in range(cfg.workers)]
        self.threads = [threading.Thread(target=self._serve, args=[worker], daemon=True) for worker in self.workers]
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)  # a run that ends with an error removes its temporary files too

    def submit(
        self, source, text, answer: Answer, row: dict, ids: list[int] | None = None,
        failure: Outcome | None = None,
    ):  # fmt: skip
        """Queue an answer for grading and return at once. The Outcome is `failure`, if its environment failed."""
        if failure:
            future = Future()
            future.set_result(failure)
        else:
            spec = self.by_source.get(source, self.default)
            future = self._queue(spec, [text, answer, row, ids])
        self.submitted.append(future)

    def submit_turn(self, place, text, row: dict, state: dict) -> Future:
        """Queue a call of the function of rollout.turns at `place`, before all other jobs, since vLLM waits for it."""
        return self._queue({TURNS: place}, [text, row, state], first=True)

    def collect(self) -> list[Outcome]:
        """Wait for everything submitted since the last call. Returns the outcomes in the order of submission."""
        futures, self.submitted = self.submitted, []
        return [future.result() for future in futures]

    def close(self):
        """Kill the workers and wait for their threads."""
        atexit.unregister(self.close)
        self.closed = True
        for worker in self.workers:
            self._queue("", [])  # wakes its thread
            process = worker.process  # read once, since its thread may set it to None
            if process:
                process.kill()
        for thread in self.threads:
            thread.join()

    def _queue(self, spec: Spec, arguments: list, first=False) -> Future:
        future = Future()
        request, failure = attempt(pickle.dumps, {"spec": spec, "arguments": arguments})
        if failure:  # the row has what cannot be sent, such as a lambda
            future.set_result(Outcome(**failure))
        else:
            self.waiting.put((not first, next(self.numbers), request, future))
        return future

    def _serve(self, worker: "Worker"):
        """The thread of one worker. It also starts the process, which dies with the thread that started it."""
        while True:
            _, _, request, future = self.waiting.get()
            if self.closed:
                break
            try:
                future.set_result(self._ask(worker, request))
            except BaseException as error:  # it is raised in the caller, who waits for the outcomes
                future.set_exception(error)
                worker.stop()
        worker.stop()

    def _ask(self, worker: "Worker", request) -> Outcome:
        """Send a request to the worker, which is started if it has no process, and wait for the outcome."""
        if not worker.process:
            worker.start()
            if self.closed:  # `close` may have come before the process
                worker.process.kill()
        worker.send(request)

        fields = worker.receive_outcome(self.timeout_s)
        if fields.pop("restart", False):
            worker.stop()
        return Outcome(**fields)


class Worker:
    """A grading process, seen from the trainer. It gets settings as JSON and pickled requests, and replies in JSON."""

    def __init__(self, settings: dict):
        self.settings = settings
        self.process: subprocess.Popen | None = None

    def start(self):
        """Start the process. What its rewards print goes to standard error."""
        self.folder = tempfile.mkdtemp(prefix="grading-")
        ours, theirs = socket.socketpair()
        # A reward that writes the beginning of a message into its pipe must not hang the run.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_S, 0))
        self.pipe = Connection(ours.detach())
        path = os.pathsep.join(filter(None, [str(processes.REPO), *sys.path]))  # where the classes of a row are found

        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo.step.grading", str(theirs.fileno())],  # -P: only our modules
            env={**os.environ, "TMPDIR": self.folder, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C does not reach it
        )
        theirs.close()
        self.send(json.dumps(self.settings).encode())

    def send(self, message: bytes):
        """Send a message, which the process waits for. If it is dead, `receive_outcome` will say so."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def receive_outcome(self, seconds) -> dict:
        """The fields of the next Outcome, and perhaps "restart". A process that is late or dead is stopped."""
        try:
            if not self.pipe.poll(LOAD_S):
                self.stop()
                return {"status": "error", "error": f"loading the reward took more than {LOAD_S:.0f} s"}

            # The first message: the reward is loaded, and the answer's time begins.
            waits = self.pipe.recv_bytes()
            if not self.pipe.poll(seconds):
                self.stop()
                if waits:
                    return {"status": "error", "error": f"TimeoutError: no reply within reward.timeout_s={seconds:g}"}
                return {"status": "timeout"}
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError, ValueError):  # ValueError if a reward has written into its pipe
            return {"status": "error", "error": f"the grading process died (exit code {self.stop()})"}

    def stop(self) -> int | None:
        """Kill the process, if there is one, and all it started, and remove its files. Returns its exit code."""
        if not self.process:
            return None
        process, self.process = self.process, None
        processes.kill_family(process.pid)
        code = process.wait()
        self.pipe.close()
        # A reward may have nested the folder deeper than shutil.rmtree can follow.
        subprocess.run(["rm", "-rf", self.folder], stderr=subprocess.DEVNULL, check=False)
        return code


# ---------------------------------------------------------------- the worker


def serve_requests(descriptor):
    """Grade what comes over the trainer's pipe: settings, then requests, one after the other.

    The reply to a request is a message once its reward is loaded, empty unless that waits for another machine, then the
    fields of an Outcome as JSON.
    """
    processes.die_with_parent(adopt=True)
    # The descriptor itself stays open until the process has ended, so that the trainer sees the exit code.
    pipe = Connection(os.dup(descriptor))
    os.set_inheritable(descriptor, False)

    settings = json.loads(pipe.recv_bytes())
    if settings["memory_gb"]:
        size = int(settings["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    cfg = SimpleNamespace(**settings)

    loaded = {}  # spec as JSON → (function, None) or (None, why it cannot be loaded)
    while True:
        request, failure = attempt(pickle.loads, pipe.recv_bytes())
        function = None
        if not failure:
            key = json.dumps(request["spec"])
            if key not in loaded:
                loaded[key] = attempt(load, request["spec"], cfg)
            function, failure = loaded[key]
        pipe.send_bytes(b"waits" if getattr(function, "waits", False) else b"")

        if not failure:
            value, failure = attempt(function, *request["arguments"])
        pipe.send_bytes(json.dumps(failure or value).encode())


def attempt(function: Callable, *args) -> tuple:
    """(value, None) of a function, or (None, fields of a failed Outcome). "restart" stands for a new worker."""
    try:
        return function(*args), None
    except subprocess.TimeoutExpired:  # of a program that the reward ran
        return None, {"status": "timeout"}
    except MemoryError as error:
        return None, {"status": "error", "error": last_line(error), "restart": True}
    except Exception as error:
        return None, {"status": "error", "error": last_line(error)}


def load(spec: Spec, cfg) -> Callable:
    """The function that a request calls: of a reward, or of rollout.turns."""
    if isinstance(spec, dict) and TURNS in spec:
        return load_turn_function(spec[TURNS])
    return named_rewards.load(spec, cfg)


def load_turn_function(place) -> Callable:
    """The function of rollout.turns at `place`, which returns {"parts": {"reply", "state"}}.

    It raises TypeError or ValueError if the user's function returns no text, or too much.
    """
    function = user_code.load_function(TURNS, place)

    def take_turn(text, row: dict, state: dict) -> dict:
        reply = function(text, row, state)
        if not isinstance(reply, str | None):
            raise TypeError(f"it returned a {type(reply).__name__}; it must return a text or None")
        check_size("the text", (reply or "").encode())
        check_size("the state", json.dumps(state))
        return {"parts": {"reply": reply, "state": state}}

    return take_turn


def check_size(what: str, content: bytes | str):
    """Raises ValueError for more than a function of rollout.turns may return."""
    if len(content) > MAX_TURN_BYTES:
        raise ValueError(f"{what} that it returned has {len(content)} bytes; at most {MAX_TURN_BYTES} are allowed")


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the trainer has ended
        serve_requests(int(sys.argv[1]))
