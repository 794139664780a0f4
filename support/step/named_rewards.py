"""The rewards that a configuration names: found, checked, made, weighed and summed.

`cfg` is the section `reward` of the configuration or, in a grading process, a namespace of its keys.
"""

import functools
import inspect
import json
import math
from collections.abc import Callable

from reward import REWARDS, parse_math
from support.base import user_code

Spec = str | dict[str, float]  # of a reward: a name, or {name: weight}

OWN_PARTS = ("overlong",)  # names in reward_parts that the trainer gives: algo.overlong_buffer
MOVED = {  # names that were in REWARDS -> where they are
    "code": "rewards/code.py:code",
    "model": "rewards/model.py:Model",
    "remote": "rewards/remote.py:remote",
}


def weights_of(spec: Spec) -> dict[str, float]:
    """{name: weight} of a reward written either way. Raises ValueError."""
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(type(w) in (int, float) and math.isfinite(w) for w in weights.values())
    ):
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    return weights


def is_part(part: str, name: str) -> bool:
    """Whether a part of a weighted sum is of the reward `name`: "name" or "name/part"."""
    return f"{part}/".startswith(f"{name}/")


def find(name: str, cfg) -> Callable:
    """The function or class of a name. Raises ValueError that says what is legal."""
    kind = cfg.functions.get(name, name)
    if kind in MOVED:
        raise ValueError(f"the reward {kind!r} is a file now; set reward.functions.{name}={MOVED[kind]}")
    if kind in REWARDS:
        return REWARDS[kind]
    if name == "custom":
        return user_code.load_function("reward.custom", cfg.custom)
    if name in cfg.functions:
        return user_code.load_function(f"reward.functions.{name}", kind)
    raise ValueError(f"unknown reward {name!r}; legal are {', '.join([*REWARDS, 'custom', *cfg.functions])}")


def is_batched(spec: Spec, cfg) -> bool:
    """Whether a reward, or one of a sum, takes many answers at once: a class with a method `batch`."""
    return any(hasattr(find(name, cfg), "batch") for name in weights_of(spec))


def takes_ids(name: str, cfg) -> bool:
    """Whether a reward has a parameter `response_ids`."""
    function = find(name, cfg)
    call = function.__call__ if inspect.isclass(function) else function
    return "response_ids" in inspect.signature(call).parameters


def check(spec: Spec, cfg) -> None:
    """Check a reward without making it. Raises ValueError that says what is legal."""
    for name in cfg.functions:
        if name in REWARDS or name in OWN_PARTS or name == "custom":
            raise ValueError(f"reward.functions.{name}: a reward has this name already; choose another")
    for name in weights_of(spec):
        function = find(name, cfg)
        given = cfg.options.get(name, {})
        check_options(name, function, given)
        if hasattr(function, "check"):
            try:
                function.check(**given)
            except ValueError as error:
                raise ValueError(f"reward.options.{name}: {error}") from None
    for name in cfg.options.keys() - {"custom"}:
        try:
            find(name, cfg)
        except ValueError as error:
            raise ValueError(f"reward.options.{name}: {error}") from None


def check_options(name: str, function: Callable, given: dict) -> None:
    """Raises ValueError for an option that the reward does not have, and for a missing one that it needs."""
    legal = list(inspect.signature(function).parameters.values())
    if not inspect.isclass(function):
        legal = legal[3:]  # without text, answer, row
    legal = [p for p in legal if p.name != "response_ids"]
    names = [p.name for p in legal]
    if any(p.kind is p.VAR_KEYWORD for p in legal):
        return
    for key in given:
        if key not in names:
            raise ValueError(f"unknown option reward.options.{name}.{key}; legal are {', '.join(names) or 'none'}")
    for p in legal:
        if p.default is p.empty and p.name not in given:
            raise ValueError(f"the reward {name!r} needs reward.options.{name}.{p.name}")


# ---------------------------------------------------------------- in a grading process


def load(spec: Spec, cfg, chunk: list[dict]) -> Callable:
    """The reward as a function of (text, answer, row, response_ids) that returns its parts, weighed.

    `chunk`: requests that are graded together, for rewards with `batch`. All that the reward needs is loaded here,
    before an answer's time starts. Parts of a weighted sum are named after its rewards.
    """
    weights = weights_of(spec)
    rewards = {name: make(name, cfg, chunk) for name in weights}

    def grade(text: str, answer: str, row: dict, response_ids: list[int] | None = None) -> dict[str, float]:
        parts = {}
        for name, weight in weights.items():
            for part, number in parts_of(rewards[name](text, answer, row, response_ids), weight).items():
                if isinstance(spec, dict):
                    part = name if part == "reward" else f"{name}/{part}"
                parts[part] = number
        if not parts:
            raise ValueError(
                f"the reward is None ({', '.join(weights)}): it does not apply to this row; legal is a finite number"
            )
        return parts

    return grade


def make(name: str, cfg, chunk: list[dict]) -> Callable:
    """One reward with its options, as a function of (text, answer, row, response_ids)."""
    function = find(name, cfg)
    options = cfg.options.get(name, {})
    if function is REWARDS["math"]:
        parse_math("$1$ or \\boxed{1}")
    if inspect.isclass(function):
        made = user_code.instance(function, json.dumps(options))
    else:
        made = functools.partial(function, **options)
    if is_batched(name, cfg):
        made = batched(made, name, chunk)
    if takes_ids(name, cfg):
        return lambda text, answer, row, ids: made(text, answer, row, response_ids=ids)
    return lambda text, answer, row, ids: made(text, answer, row)


def batched(scorer, name: str, chunk: list[dict]) -> Callable:
    """A reward that takes the value of each answer from one call of `scorer.batch` with the chunk's answers.

    Where that fails, it says so and each is called alone, so that an answer costs its own reward only.
    """
    answers = [request["arguments"][:3] for request in chunk if name in weights_of(request["spec"])]
    value_of_row = {}  # by the identity of the row

    def value(text: str, answer: str, row: dict) -> float | dict | None:
        if answers:
            try:
                values = scorer.batch(answers)
                value_of_row.update({id(row): value for (_, _, row), value in zip(answers, values, strict=True)})
            except Exception as error:  # the user's own, of any class
                print(f"note: the reward {name!r} failed in a batch: {user_code.last_line(error)}", flush=True)
            answers.clear()
        return value_of_row[id(row)] if id(row) in value_of_row else scorer(text, answer, row)

    return value


def parts_of(value: float | dict, weight: float = 1.0) -> dict[str, float]:
    """What a reward function returned, times a weight, by the name of each part.

    A part is a finite number; one that is None is left out. Raises TypeError or ValueError for anything else, and for a
    name of OWN_PARTS.
    """
    parts = {}
    named = value if isinstance(value, dict) else {"reward": value}
    for name, part in named.items():
        if name in OWN_PARTS:
            raise ValueError(f"a reward has a part {name!r}, which is the trainer's own name; choose another")
        if part is None:  # it does not apply to this row
            continue
        if isinstance(part, (list, tuple)):
            raise ValueError(f"{name} is a list: rewards of single tokens need recipes/token_rewards.patch")
        if isinstance(part, str) or not math.isfinite(part):
            raise ValueError(f"a reward must be a finite number; {name} is {part!r}")
        parts[str(name)] = weight * float(part)
    return parts
