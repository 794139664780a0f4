"""The whole script on 16 ranks, with as many engines or half as many, gives what it gives on two; over a kill too."""

import json
import re

import pytest

from tests.conftest import REPO

JOB = (
    "rollout.prompts_per_step=16", "rollout.group_size=4", "train.steps=4", "train.save_every=1", "train.lr=0.003",
    "train.warmup_steps=0", "train.updates_per_step=2", "algo.kl_coef=0.05", "resume=auto",
)  # fmt: skip
SAME = ("loss/total", "kl/ref", "grad_norm", "reward/mean", "entropy", "tokens/response_mean")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("rollout.tp=2", "parallel.tp=2", "parallel.pp=2")])
def test_sixteen_ranks_train_as_two_do(start, train_forked, tmp_path, keys):
    """One of 16 dies in the third step; eight go on."""
    few = train_forked(2, *JOB, out=tmp_path / "few")
    assert few.code == 0, few.text
    kill = json.dumps(["update", 5, 0.0, "one"])
    died = start(16, *JOB, *keys, script=REPO / "tests/faults/killed.py", out=tmp_path / "many", KILL=kill)
    assert died.end() == 1 and "the kill is done" in died.text and len(died.metrics) == 2, died.text
    many = train_forked(8, *JOB, out=tmp_path / "many")
    assert many.code == 0 and re.search("resume:  after step 2, .* 16 ranks", many.text), many.text
    for here, there in zip(few.metrics, many.metrics, strict=True):
        assert {name: here[name] for name in SAME} == pytest.approx({name: there[name] for name in SAME}, rel=1e-4)
    for name, weight in few.weights(4).items():
        assert (weight - many.weights(4)[name]).abs().max() < 1e-4, name
