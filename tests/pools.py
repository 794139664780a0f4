"""A pool of grading processes for a test, and outcomes from it."""

import contextlib

from config import RewardConfig
from grpo.parts.base.processes import REPO
from grpo.step.grading import GradingPool, Outcome

JUDGE = f"{REPO}/tests/judge.py:judge"
FILES = {"code": "rewards/code.py:code", "model": "rewards/model.py:Model", "remote": "rewards/remote.py:remote"}


def pool_of(default="exact", timeout_s=30.0, **keys):
    """A pool of one worker, of a reward or {name: weight}; `keys` of the section `reward`. Knows rewards/ by name."""
    functions = FILES | keys.pop("functions", {})
    return GradingPool(RewardConfig(default=default, timeout_s=timeout_s, functions=functions, **keys))


def grade(pool, jobs: list[tuple[str, str, str, dict]]) -> list[Outcome]:
    """The outcomes of (source, text, answer, row, perhaps token ids and a failure), in their order."""
    for job in jobs:
        pool.submit(*job)
    return pool.collect()


def grade_with(default, jobs: list[tuple], **keys) -> list[Outcome]:
    """The outcomes of jobs as in `grade`, of a pool as in `pool_of` that is closed then."""
    with contextlib.closing(pool_of(default, **keys)) as pool:
        return grade(pool, jobs)


def fenced(program):
    """An answer that is a program."""
    return f"```python\n{program}\n```"
