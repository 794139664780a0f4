"""train_grpo.py that prints "begins step N" before each step, which tells what a start says from what a step says.

The fork server puts the exhibit in (tests/fork_server.py).
"""

import sys

import train_grpo

train_step = train_grpo.train_step


def announced_step(run, step: int) -> tuple:
    """train_grpo.train_step, announced."""
    print(f"begins step {step}", flush=True)
    return train_step(run, step)


if __name__ == "__main__":
    train_grpo.train_step = announced_step
    sys.exit(train_grpo.main(sys.argv[1:]))
