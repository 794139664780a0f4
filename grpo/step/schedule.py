"""Schedules of the keys in section `schedule`: values that are a function of the step."""

import math

SECTIONS = {"lr": "train", "kl_coef": "algo", "entropy_coef": "algo", "temperature": "rollout"}  # of the keys


def scheduled_values(cfg, step) -> dict[str, float]:
    """{dotted key: its value in `step`} of the keys that have a schedule; a function of the step alone.

    A schedule leads from the key's own value, at step 1, to `to`, at step `steps`, where it stays. With the progress x
    from 0 to 1, the share of the change that is made:

      constant   0 until x is 1        linear   x        cosine   (1 - cos(pi x)) / 2
    """
    values = {}
    for name, course in cfg.schedule:
        if course is not None:
            x = min((step - 1) / max((course.steps or cfg.train.steps) - 1, 1), 1.0)
            share = {"constant": float(x == 1), "linear": x, "cosine": (1 - math.cos(math.pi * x)) / 2}
            start = value_of(cfg, name)
            values[f"{SECTIONS[name]}.{name}"] = start + (course.to - start) * share[course.shape]
    return values


def value_of(cfg, name):
    """The value of the key that the schedule `name` is of."""
    return getattr(getattr(cfg, SECTIONS[name]), name)
