"""train_grpo.py with the exhibit that the environment variable MUTANT names, if any; run on every rank.

Prints "begins step N" before each step, so that what a run says can be told from what the start says.
"""

import os
import sys

import train_grpo
from tests.museum import VARIABLE
from tests.museum.exhibits import EXHIBITS

train_step = train_grpo.train_step


def noted_step(run, step: int) -> tuple:
    """train_grpo.train_step, announced."""
    print(f"begins step {step}", flush=True)
    return train_step(run, step)


if __name__ == "__main__":
    train_grpo.train_step = noted_step
    if os.environ.get(VARIABLE):
        EXHIBITS[os.environ[VARIABLE]].apply()
    sys.exit(train_grpo.main(sys.argv[1:]))
