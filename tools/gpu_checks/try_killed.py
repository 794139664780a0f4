"""Run train_grpo.py; its last rank kills itself before its third update, while the others wait. See checks.py."""

import os
import signal
import sys
from pathlib import Path

import train_grpo
from tools.gpu_checks.checks import FOLDER

forward_backward = train_grpo.forward_backward
updates = []


def update_or_die(*args) -> dict[str, float]:
    """Call forward_backward; on the last rank, send SIGKILL to this process at the third call."""
    updates.append(1)
    if len(updates) == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path(os.environ[FOLDER], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return forward_backward(*args)


if __name__ == "__main__":
    train_grpo.forward_backward = update_or_die
    sys.exit(train_grpo.main(sys.argv[1:]))
