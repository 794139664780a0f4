"""A torchrun and all that it started: how the tests and tools/torture.py start, watch, disturb and end a run."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent
TAG = "TORCHRUN_TAG"  # in the environment of all that a torchrun starts


class Torchrun:
    """A running torchrun of `script` with `arguments`, in a session of its own; what it prints goes to a file."""

    def __init__(
        self,
        printed: Path,
        script: str | Path,
        *arguments: str,
        nproc: int = 2,
        options: tuple[str, ...] = ("--standalone",),
        **env: str,
    ):
        self.printed, self.tag = printed, uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={nproc}"]
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        with printed.open("w") as file:
            self.process = subprocess.Popen(
                [*command, str(script), *arguments],
                cwd=REPO,
                env={**os.environ, **settings, "PYTHONPATH": str(REPO), TAG: self.tag, **env},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What was printed so far."""
        return self.printed.read_text(errors="replace")

    @property
    def own_text(self) -> str:
        """The same without the report of torchrun at the end."""
        return re.split(r"\n[WE]\d{4} .*/torch/distributed/", self.text)[0]

    def wait_for(self, what: str | Path, seconds: float = 240) -> None:
        """Wait until the pattern is printed, or the file exists."""
        deadline = time.monotonic() + seconds
        while True:
            running = self.process.poll() is None  # asked first: the last that was printed counts
            if what.exists() if isinstance(what, Path) else re.search(what, self.text):
                return
            assert running and time.monotonic() < deadline, f"no {what} in\n{self.text}"
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """Living processes of this torchrun, itself, vLLM's and the grading ones too, whoever has adopted them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
                alive = process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
                if alive and process.environ().get(TAG) == self.tag:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, int]:
        """Rank → process id, of the living ranks."""
        found = {}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == self.process.pid:
                    found[int(process.environ()["RANK"])] = process.pid
        return found

    def ctrl_c(self) -> None:
        """As a terminal does it: to the group of processes in the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds: float = 600) -> int:
        """Wait for the exit code; nothing that it started may be left."""
        code, deadline = self.process.wait(seconds), time.monotonic() + 10
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"still there after the end: {left}"
        return code

    def kill(self) -> None:
        """SIGKILL to whatever is left."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
