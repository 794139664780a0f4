"""train_grpo.py with one fault: an advantage is NaN in the steps 2, 4, 5 and 6.

A helper of test_checkpoint.py, run by torchrun.
"""

import sys

import numpy as np

import train_grpo

group_advantages, calls = train_grpo.group_advantages, []


def broken(*args) -> np.ndarray:
    calls.append(1)
    advantages_N = group_advantages(*args)
    if len(calls) - 1 not in (2, 4, 5, 6):  # the first call is the rehearsal
        return advantages_N
    return np.where(np.arange(len(advantages_N)) == 3, np.nan, advantages_N)


train_grpo.group_advantages = broken
if __name__ == "__main__":
    sys.exit(train_grpo.main(sys.argv[1:]))
