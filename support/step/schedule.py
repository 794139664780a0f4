"""Schedules of the keys in section `schedule`: values that are a function of the step."""

import functools
import math

from config import Config, Course


def courses(cfg: Config) -> dict[str, Course]:
    """{dotted key: its schedule} of the keys that have one."""
    s = cfg.schedule
    found = {
        "train.lr": s.lr,
        "algo.kl_coef": s.kl_coef,
        "algo.entropy_coef": s.entropy_coef,
        "rollout.temperature": s.temperature,
    }
    return {key: course for key, course in found.items() if course is not None}


def scheduled_values(cfg: Config, step: int) -> dict[str, float]:
    """{dotted key: its value in `step`} of the keys that have a schedule; a function of the step alone.

    A schedule leads from the key's own value, at step 1, to `to`, at step `steps`, where it stays. With the progress x
    from 0 to 1, the share of the change that is made:

      constant   0 until x is 1        linear   x        cosine   (1 - cos(pi x)) / 2
    """
    values = {}
    for key, course in courses(cfg).items():
        x = min((step - 1) / max((course.steps or cfg.train.steps) - 1, 1), 1.0)
        share = {"constant": float(x == 1), "linear": x, "cosine": (1 - math.cos(math.pi * x)) / 2}
        values[key] = value_of(cfg, key) + (course.to - value_of(cfg, key)) * share[course.shape]
    return values


def schedule_metrics(cfg: Config) -> dict[str, float]:
    """{"schedule/name": value} of the keys that have a schedule, in a step that uses `cfg`."""
    return {f"schedule/{key.split('.')[1]}": value_of(cfg, key) for key in courses(cfg)}


def value_of(cfg: Config, key: str) -> float:
    """The value of a dotted key, such as algo.kl_coef."""
    return functools.reduce(getattr, key.split("."), cfg)
