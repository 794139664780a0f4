"""A failure on one of 32 ranks, by the whole start of a run, is told once."""

import re

import pytest

# The start of a run, and then, in place of its steps, all-reduces, until one of the ranks fails.
FAILS = """
import os, signal, sys
import torch
from support.run import launch

def train(cfg, inputs, clock):
    for step in range(100):
        if step == 5 and torch.distributed.get_rank() == 17:
            if cfg.seed == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        torch.distributed.all_reduce(torch.zeros(1))

sys.exit(launch.command(sys.argv[1:], "", lambda cfg: None, train, None, None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "told"),
    [(0, "rank 17, in the phase start: out of GPU memory"), (1, r"rank \d+, in the phase start: another rank is gone")],
)
def test_a_failure_on_one_of_32_ranks_is_told_once(train_forked, tmp_path, seed, told):
    (tmp_path / "fails.py").write_text(FAILS)
    run = train_forked(32, f"seed={seed}", "rollout.prompts_per_step=32", script=tmp_path / "fails.py", code=1)
    (error,) = re.findall("(?m)^error: (.*)", run.text)
    assert re.match(told, error), run.text
