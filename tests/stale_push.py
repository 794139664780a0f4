"""train_grpo.py with one fault: the weight push after the first step is skipped.

A helper of test_engine.py, run by torchrun.
"""

import sys

import train_grpo

push_weights, pushes = train_grpo.push_weights, []


def push_but_once(*args) -> None:
    pushes.append(1)
    if len(pushes) != 2:  # 1 is the push at the start
        push_weights(*args)


train_grpo.push_weights = push_but_once
if __name__ == "__main__":
    sys.exit(train_grpo.main(sys.argv[1:]))
