"""What moves with the steps: courses by hand."""

import pytest

from support.step import schedule
from tests.conftest import tiny_config
from train_grpo import config_at


def test_courses_by_hand():
    cfg = tiny_config(
        "train.steps=5", "train.lr=0.008", "train.warmup_steps=2", "algo.kl_coef=0.08", "algo.entropy_coef=0.5",
        "schedule.lr={shape: cosine}", "schedule.kl_coef={to: 0.04, steps: 3}", "schedule.entropy_coef.shape=constant",
        "schedule.entropy_coef.steps=4", "schedule.temperature={to: 0.6}",
    )  # fmt: skip
    steps = [config_at(cfg, step) for step in range(1, 6)]
    half = 0.5**0.5
    # Of the way to 0: (1 - cos(0, 45, 90, 135, 180 degrees)) / 2; the first step is half of the warm-up.
    lr = [0.5 * 0.008, 0.004 * (1 + half), 0.004, 0.004 * (1 - half), 0.0]
    assert [used.train.lr for used in steps] == pytest.approx(lr, abs=1e-12)
    assert [used.algo.kl_coef for used in steps] == pytest.approx([0.08, 0.06, 0.04, 0.04, 0.04])
    assert [used.algo.entropy_coef for used in steps] == [0.5, 0.5, 0.5, 0.0, 0.0]
    assert [used.rollout.temperature for used in steps] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    shown = {"lr": lr[1], "kl_coef": 0.06, "entropy_coef": 0.5, "temperature": 0.9}
    assert schedule.schedule_metrics(steps[1]) == pytest.approx(
        {f"schedule/{name}": value for name, value in shown.items()}
    )
    assert schedule.schedule_metrics(config_at(tiny_config(), 1)) == {}
