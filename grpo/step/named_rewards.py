"""The rewards that `cfg`, the section `reward` or a namespace of its keys, names: found, checked, made, weighed."""

import functools
import inspect
import json
import math
from collections.abc import Callable

from grpo.parts.base import user_code
from reward import COMPARING, REWARDS, parse_math

Spec = str | dict[str, float]  # of a reward: a name, or {name: weight}
Answer = str | list | dict  # a row's reference, as grpo.parts.data.prompts.Prompt has it

OWN_PARTS = ("overlong",)  # names in reward_parts that the trainer gives: algo.overlong_buffer


def weights_of(spec: Spec) -> dict[str, float]:
    """{name: weight} of a reward written either way."""
    return {spec: 1.0} if isinstance(spec, str) else spec


def find(name: str, cfg) -> Callable:
    """The function or class of a name. Raises ValueError that says what is legal."""
    kind = cfg.functions.get(name, name)
    if kind in REWARDS:
        return REWARDS[kind]
    if name == "custom":
        return user_code.load_function("reward.custom", cfg.custom)
    if name in cfg.functions:
        return user_code.load_function(f"reward.functions.{name}", kind)
    raise ValueError(f"unknown reward {name!r}; legal are {legal_names(cfg)}")


def legal_names(cfg) -> str:
    return f"{', '.join([*REWARDS, 'custom', *cfg.functions])}; reward.functions names files, such as those of rewards/"


def takes_ids(function: Callable) -> bool:
    """Whether a reward has a parameter `response_ids`."""
    call = function.__call__ if inspect.isclass(function) else function
    return "response_ids" in inspect.signature(call).parameters


def check(spec: Spec, cfg) -> None:
    """Check a reward without making it. Raises ValueError that says what is legal."""
    for name in cfg.functions:
        if name in REWARDS or name in OWN_PARTS or name == "custom":
            raise ValueError(f"reward.functions.{name}: a reward has this name already; choose another")
    for name in cfg.options:
        if name not in REWARDS and name not in cfg.functions and name != "custom":
            raise ValueError(f"reward.options.{name}: unknown reward; legal are {legal_names(cfg)}")
    if not spec:
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    for name in weights_of(spec):
        function = find(name, cfg)
        check_call(function, name)
        try:
            check_options(function, cfg.options.get(name, {}))
        except ValueError as error:
            raise ValueError(f"reward.options.{name}: {error}") from None


def check_options(function: Callable, given: dict) -> None:
    """Raises ValueError for an option that the reward does not have, and for a missing one that it needs."""
    options = [p for p in inspect.signature(function).parameters.values() if p.name != "response_ids"]
    if not inspect.isclass(function):
        options = options[3:]  # without text, answer, row
    legal = [p.name for p in options]
    try:
        inspect.Signature(options).bind(**given)
    except TypeError as error:
        raise ValueError(f"{error}; legal are {', '.join(legal) or 'none'}") from None
    if hasattr(function, "check"):
        function.check(**given)


# Names of parameters whose place shows that other arguments are meant, such as those of verl and TRL. Others are free.
PLACES = {
    "text": 0, "response": 0, "completion": 0, "solution_str": 0, "ground_truth": 1, "reference": 1,
    "row": 2, "data_source": 3, "extra_info": 3, "completions": 3, "prompts": 3,
}  # fmt: skip


def check_call(function: Callable, name: str) -> None:
    """Raises ValueError unless a call with (text, answer, row) gives a reward's parameters what their names say."""
    call = function.__call__ if inspect.isclass(function) else function
    taken = [p for p in inspect.signature(call).parameters.values() if p.name not in ("self", "response_ids")][:3]
    for place, parameter in enumerate(taken):
        if PLACES.get(parameter.name, place) != place:
            gets = ("text", "answer", "row")[place]
            raise ValueError(
                f"the reward {name!r} is called with (text, answer, row), so {parameter.name!r} would get the {gets}. "
                "Wrap verl's: def reward(text, answer, row): return compute_score(row['data_source'], text, answer, "
                "row.get('extra_info')); or TRL's: return f([text], answer=[answer])[0]"
            )
    try:
        inspect.Signature(taken).bind("text", "answer", {})
    except TypeError as error:
        raise ValueError(f"the reward {name!r} is called with (text, answer, row): {error}") from None


# ---------------------------------------------------------------- in a grading process


def load(spec: Spec, cfg) -> Callable:
    """The reward as a function of (text, answer, row, response_ids) that returns {"parts": its parts, weighed}.

    All that it needs is loaded here, before an answer's time starts. Parts of a weighted sum are named after rewards.
    """
    weights = weights_of(spec)
    rewards = {name: make(name, cfg) for name in weights}

    def grade(text: str, answer: Answer, row: dict, response_ids: list[int] | None = None) -> dict[str, dict]:
        parts = {}
        for name, weight in weights.items():
            value = rewards[name](text, answer, row, response_ids)
            for part, number in parts_of(value, weight).items():
                if isinstance(spec, dict):
                    part = name if part == "reward" else f"{name}/{part}"
                parts[part] = number
        if not parts:
            raise ValueError(
                f"the reward is None ({', '.join(weights)}): it does not apply to this row; legal is a finite number"
            )
        return {"parts": parts}

    return grade


def make(name: str, cfg) -> Callable:
    """One reward with its options, as a function of (text, answer, row, response_ids)."""
    function = find(name, cfg)
    options = cfg.options.get(name, {})
    if function is REWARDS["math"]:
        parse_math("$1$ or \\boxed{1}")
    if inspect.isclass(function):
        made = user_code.instance(function, json.dumps(options))
    else:
        made = functools.partial(function, **options)
    with_ids = takes_ids(function)

    def reward(text: str, answer: Answer, row: dict, ids: list[int] | None) -> float | dict:
        given = {"response_ids": ids} if with_ids else {}
        return max(made(text, one, row, **given) for one in answers_for(function, answer))

    return reward


def answers_for(function: Callable, answer: Answer) -> list[str]:
    """The reference answers that a reward is computed with, of which the best counts.

    One for each entry of a list where the reward compares, else one, with lists and objects as JSON. Raises ValueError
    for what no text can be compared with.
    """
    if isinstance(answer, str) or function not in COMPARING:
        return [answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)]
    if not isinstance(answer, list) or not answer or not all(isinstance(one, (str, int, float)) for one in answer):
        raise ValueError(
            f"the reference answer {answer!r} is no text, number or list of them: is it data.answer_key's?"
        )
    return [str(one) for one in answer]


def parts_of(value: float | dict, weight: float = 1.0) -> dict[str, float]:
    """The parts of what a reward returned, times a weight; a single value is named "reward", and None is left out.

    Raises TypeError or ValueError for what is no number.
    """
    returned = value if isinstance(value, dict) else {"reward": value}
    parts = {}
    for name, part in returned.items():
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
