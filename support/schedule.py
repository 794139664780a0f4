"""Coefficients that move with the steps: the warm-up of the learning rate, and the courses of `schedule`."""

import functools
import math

from config import Config, Course


def courses(cfg: Config) -> dict[str, Course]:
    """{dotted key: its course} of the keys that have one."""
    s = cfg.schedule
    found = {
        "train.lr": s.lr,
        "algo.kl_coef": s.kl_coef,
        "algo.entropy_coef": s.entropy_coef,
        "rollout.temperature": s.temperature,
    }
    return {key: course for key, course in found.items() if course is not None}


def moved(cfg: Config, step: int) -> dict[str, float]:
    """{dotted key: its value in `step`} of all that moves by itself, a function of the step alone.

    A course leads from the key's own value, at step 1, to `to`, at step `steps`, where it stays. With x the part of the
    way that is behind it, from 0 to 1, the share of the change that is made:

      constant   0 until x is 1        linear   x        cosine   (1 - cos(pi x)) / 2
    The learning rate is also scaled by step / warmup_steps, at most 1.
    """
    values = {"train.lr": cfg.train.lr}
    for key, course in courses(cfg).items():
        way = min((step - 1) / max((course.steps or cfg.train.steps) - 1, 1), 1.0)
        share = {"constant": float(way == 1), "linear": way, "cosine": (1 - math.cos(math.pi * way)) / 2}
        values[key] = value(cfg, key) + (course.to - value(cfg, key)) * share[course.shape]
    return values | {"train.lr": values["train.lr"] * min(1.0, step / max(cfg.train.warmup_steps, 1))}


def metrics(cfg: Config) -> dict[str, float]:
    """{"schedule/name": value} of what has a course, in a step that uses `cfg`."""
    return {f"schedule/{key.split('.')[1]}": value(cfg, key) for key in courses(cfg)}


def value(cfg: Config, key: str) -> float:
    """That of a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)
