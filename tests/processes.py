"""Start, watch and kill a torchrun with all its processes, for the tests."""

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import psutil

from grpo.parts.base.processes import REPO

TAG = "TORCHRUN_TAG"  # environment variable of all processes that a torchrun starts


def wait_until(condition: Callable[[], object], seconds=20):
    """Raises AssertionError where the condition does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Torchrun:
    """A running torchrun of `script` with `arguments` in a new session. Its output goes to the file `printed`."""

    def __init__(
        self, printed, script, *arguments, nproc=2,
        options: tuple[str, ...] = ("--standalone", "--local-addr=localhost"), **env,
    ):  # fmt: skip
        self.printed = printed
        self.tag = uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={nproc}"]
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **settings, "PYTHONPATH": str(REPO), TAG: self.tag, **env}
        with printed.open("w") as file:
            output = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process = subprocess.Popen([*command, str(script), *arguments], cwd=REPO, env=env, **output)

    @property
    def text(self):
        """The output so far."""
        return self.printed.read_text(errors="replace")

    @property
    def own_text(self):
        """The output so far, without torchrun's error report at the end."""
        return re.split(r"\n[WE]\d{4} .*\btorch/distributed/", self.text)[0]

    def wait_for(self, what):
        """Wait until the pattern `what` is in the output. Raises AssertionError."""
        deadline = time.monotonic() + 240
        while True:
            running = self.process.poll() is None  # before reading the output, which may still end with `what`
            if re.search(what, self.text):
                return
            assert running and time.monotonic() < deadline, f"no {what} in\n{self.text}"
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """Return the live processes of this torchrun: itself, ranks, vLLM's and grading processes, orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                alive = process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
                if alive and process.environ().get(TAG) == self.tag:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, int]:
        """Return {rank: process id} of the live ranks."""
        found = {}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == self.process.pid:
                    found[int(process.environ()["RANK"])] = process.pid
        return found

    def end(self, seconds=600):
        """Wait for the exit and return its code. Raises AssertionError if a process is left 10 s later."""
        code = self.process.wait(seconds)
        wait_until(lambda: not self.family(), seconds=10)
        return code

    def kill(self):
        """Send SIGKILL to all processes that are left."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
