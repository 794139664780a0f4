"""The whole script on 16 ranks with eight engines gives what it gives on two, over a kill; the start and end of 32."""

import re

import pytest

from support.base.memory import host_free_bytes

JOB = (
    "rollout.prompts_per_step=16", "rollout.group_size=4", "train.steps=4", "train.save_every=1", "train.lr=0.003",
    "train.warmup_steps=0", "train.updates_per_step=2", "algo.kl_coef=0.05", "resume=auto",
)  # fmt: skip
SAME = ("loss/total", "kl/ref", "grad_norm", "reward/mean", "entropy", "tokens/response_mean")

# The demo's reward; in the third step of the run in `many`, once, it kills the rank that asks for it.
KILLER = """
import os, pathlib, signal, sys
sys.path.insert(0, "tools")
from tiny_reward import digits_in_place

def reward(text, answer, row):
    folder = pathlib.Path(__file__).parent
    log = folder / "many/metrics.jsonl"
    if log.exists() and len(log.read_text().splitlines()) == 2 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return digits_in_place(text, answer, row)
"""


@pytest.mark.slow
def test_sixteen_ranks_train_as_two_do(train_forked, tmp_path):
    """One of 16 dies in the third step, before the second checkpoint is complete; eight go on from the first."""
    if host_free_bytes() < 21e9:
        pytest.skip("16 ranks with vLLM take 21 GB")
    (tmp_path / "killer.py").write_text(KILLER)
    job = (*JOB, f"reward.custom={tmp_path / 'killer.py'}:reward")
    few = train_forked(2, *job, out=tmp_path / "few")
    killed = train_forked(16, *job, "rollout.tp=2", "parallel.tp=2", "parallel.pp=2", out=tmp_path / "many")
    assert killed.code == 1 and len(killed.metrics) == 2, killed.text
    many = train_forked(8, *job, out=tmp_path / "many")
    assert "resume:  after step 1" in many.text, many.text
    assert (few.code, many.code) == (0, 0), few.text + many.text
    for here, there in zip(few.metrics, many.metrics, strict=True):
        assert {name: here[name] for name in SAME} == pytest.approx({name: there[name] for name in SAME}, rel=1e-4)
    for name, weight in few.weights(4).items():
        assert (weight - many.weights(4)[name]).abs().mean() < 1e-5, name  # Adam enlarges rounding of single gradients


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
