"""train_grpo.py with the exhibit that MUTANT names, if any. It prints "begins step N" before each step, which tells
what a start says from what a step says.
"""

import os
import sys

import train_grpo
from tests import museum

train_step = train_grpo.train_step


def announced_step(run, step: int) -> tuple:
    """train_grpo.train_step, announced."""
    print(f"begins step {step}", flush=True)
    return train_step(run, step)


if __name__ == "__main__":
    museum.put_in(os.environ)
    train_grpo.train_step = announced_step
    sys.exit(train_grpo.main(sys.argv[1:]))
