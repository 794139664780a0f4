"""train_grpo.py, which prints "begins step N" before each step: tests then see which output is of the start."""

import sys

import train_grpo

train_step = train_grpo.train_step


def announced_step(run, step):
    print(f"begins step {step}", flush=True)
    return train_step(run, step)


if __name__ == "__main__":
    train_grpo.train_step = announced_step
    sys.exit(train_grpo.main(sys.argv[1:]))
