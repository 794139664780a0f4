"""train_grpo.py, whose last rank kills itself in its third push of weights and notes when. See checks.py."""

import os
import signal
import sys
from pathlib import Path

import train_grpo
from tools.gpu_checks.checks import FOLDER

push_weights, pushes = train_grpo.push_weights, []


def push_or_die(run: train_grpo.Run) -> None:
    pushes.append(1)
    if len(pushes) == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path(os.environ[FOLDER], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    push_weights(run)


if __name__ == "__main__":
    train_grpo.push_weights = push_or_die
    sys.exit(train_grpo.main(sys.argv[1:]))
