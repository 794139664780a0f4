"""No dead knobs: every key of the configuration is read by what trains."""

import re

import pytest

from config import RewardConfig
from support.base.read_config import KEYS
from support.step.grading import GradingPool
from tests.conftest import REPO

LOOKS = REPO / "support/check/checks.py"  # only looks at the configuration: a key that nothing else reads is dead


def test_every_key_is_read():
    """As an attribute, or by a name that is handed to getattr."""
    program = {*REPO.glob("*.py"), *REPO.glob("support/**/*.py")} - {LOOKS}
    text = "\n".join(path.read_text() for path in program)
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r'"(\w+)"', text)}
    handed_over = {f"reward.{key}" for key in RewardConfig.model_fields}  # as a whole, see the next test
    unread = [key for key in KEYS if key not in handed_over and key.rpartition(".")[2] not in read]
    assert not unread


@pytest.mark.parametrize(
    "key, value",
    [
        ("default", "gsm8k"), ("by_source", {"a": "exact"}), ("custom", "file.py:f"), ("timeout_s", 3.0),
        ("functions", {"a": "math"}), ("workers", 2), ("options", {"math": {}}), ("memory_gb", 1.0),
    ],
)  # fmt: skip
def test_reward_keys_reach_the_grading_processes(key, value):
    def built(cfg: RewardConfig) -> dict:
        pool = GradingPool(cfg)
        state = pool.workers[0].settings | {"default": pool.default.spec, "workers": len(pool.workers)}
        state["timeout_s"] = pool.timeout_s
        state["by_source"] = {source: kind.spec for source, kind in pool.by_source.items()}
        pool.close()
        return state

    assert built(RewardConfig(**{key: value})) == {**built(RewardConfig()), key: value}
