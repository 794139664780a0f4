"""The rewards that the configuration names: find them, check them, make them, and weigh their parts.

`cfg` is the section `reward`, or a namespace of its keys. The trainer checks rewards before the start; grading
processes load them.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable

from grpo.parts.base import user_code
from reward import COMPARING, REWARDS, gsm8k, math_answer, parse_math, reference_number, stated_expression

Spec = str | dict[str, float]  # of a reward: a name, or {name: weight}
Answer = str | list | dict  # a row's reference, as grpo.parts.data.prompts.Prompt has it

LARGEST = 1e9  # size of a part times its weight; the squares of a much larger one overflow in the gradients' norm
OWN_PARTS = ("overlong",)  # names in reward_parts that the trainer gives: algo.overlong_buffer


def weights_of(spec: Spec) -> dict[str, float]:
    """{name: weight} of a reward written either way."""
    return {spec: 1.0} if isinstance(spec, str) else spec


def find(name, cfg) -> Callable:
    """The function or class of a name. Raises ValueError for an unknown one."""
    kind = cfg.functions.get(name, name)
    if kind in REWARDS:
        return REWARDS[kind]
    if name == "custom":
        return user_code.load_function("reward.custom", cfg.custom)
    if name in cfg.functions:
        return user_code.load_function(f"reward.functions.{name}", kind)
    names = ", ".join([*REWARDS, "custom", *cfg.functions])
    raise ValueError(
        f"unknown reward {name!r}; it must be one of {names}. reward.functions adds files, such as those in rewards/"
    )


# ---------------------------------------------------------------- checks, in the trainer


def check(spec: Spec, cfg):
    """Check a reward without making it. Raises ValueError."""
    for name in cfg.functions:
        if name in REWARDS or name in OWN_PARTS or name == "custom":
            raise ValueError(f"reward.functions.{name}: a reward has this name already; choose another")
    for name in cfg.options:
        if name not in REWARDS and name not in cfg.functions and name != "custom":
            raise ValueError(f"reward.options.{name}: no reward has this name")

    if not spec:
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    for name in weights_of(spec):
        function = find(name, cfg)
        check_call(function, name)
        try:
            check_options(function, cfg.options.get(name, {}))
        except ValueError as error:
            raise ValueError(f"reward.options.{name}: {error}") from None


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of a call of a reward, which may be a class whose instances are called."""
    call = function.__call__ if inspect.isclass(function) else function
    return dict(inspect.signature(call).parameters)


# Names of parameters whose place shows that a function is made for other arguments, as in verl and TRL. Any other name
# may stand anywhere.
PLACES = {
    "text": 0, "response": 0, "completion": 0, "solution_str": 0, "ground_truth": 1, "reference": 1,
    "row": 2, "data_source": 3, "extra_info": 3, "completions": 3, "prompts": 3,
}  # fmt: skip


def check_call(function: Callable, name):
    """Raises ValueError unless a call with (text, answer, row) gives a reward's parameters what their names say."""
    call = f"the reward {name!r} is called with (text, answer, row)"
    parameters = [p for p in parameters_of(function).values() if p.name != "self"]
    for place, parameter in enumerate(parameters[:3]):
        if PLACES.get(parameter.name, place) != place:
            given = ("text", "answer", "row")[place]
            raise ValueError(
                f"{call}, so {parameter.name!r} would get the {given}. Wrap the function, as docs/rewards.md shows for "
                "those of verl and TRL"
            )
    ids = {p.name: [] for p in parameters if p.name == "response_ids"}
    try:
        inspect.Signature(parameters).bind_partial("text", "answer", {}, **ids)  # options come later
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from None


def check_options(function: Callable, given: dict):
    """Raises ValueError for an option that the reward does not have, and for a missing one that it needs."""
    options = [p for p in inspect.signature(function).parameters.values() if p.name != "response_ids"]
    if not inspect.isclass(function):
        options = options[3:]  # without text, answer, row
    try:
        inspect.Signature(options).bind(**given)
    except TypeError as error:
        names = ", ".join(option.name for option in options)
        raise ValueError(f"{error}; its options are {names or 'none'}") from None
    if hasattr(function, "check"):
        function.check(**given)


# ---------------------------------------------------------------- in a grading process


def load(spec: Spec, cfg) -> Callable:
    """The reward as a function of (text, answer, row, response_ids). It returns {"parts": its parts, weighed}.

    All that it needs is loaded here, before an answer's time starts. The parts of a weighted sum are named after its
    rewards.
    """
    weights = weights_of(spec)
    rewards = {name: make(name, cfg) for name in weights}

    def grade(text, answer: Answer, row: dict, response_ids: list[int] | None = None) -> dict[str, dict]:
        parts = {}
        for name, weight in weights.items():
            value = rewards[name](text, answer, row, response_ids)
            for part, number in parts_of(value, weight).items():
                if isinstance(spec, dict):
                    part = name if part == "reward" else f"{name}/{part}"
                parts[part] = number
        if not parts:
            raise ValueError(f"the reward is None ({', '.join(weights)}): no reward applies to this row")
        return {"parts": parts}

    # If a reward waits for another machine, the answer is not to blame for the time.
    grade.waits = any(hasattr(find(name, cfg), "waits") for name in weights)
    return grade


def make(name, cfg) -> Callable:
    """One reward with its options, as a function of (text, answer, row, response_ids)."""
    function = find(name, cfg)
    options = cfg.options.get(name, {})
    if function is REWARDS["math"]:
        parse_math("$1$ or \\boxed{1}")  # imports math-verify
    if inspect.isclass(function):
        made = user_code.instance(function, json.dumps(options))
    else:
        made = functools.partial(function, **options)
    takes_ids = "response_ids" in parameters_of(function)

    def reward(text, answer: Answer, row: dict, ids: list[int] | None) -> float | dict:
        given = {"response_ids": ids} if takes_ids else {}
        return max(made(text, one, row, **given) for one in answers_for(function, answer))

    return reward


def answers_for(function: Callable, answer: Answer) -> list[str]:
    """The reference answers that a reward is computed with, of which the best counts.

    A reward that compares gets each entry of a list. Any other gets one text, with lists and objects as JSON. Raises
    ValueError for what no text can be compared with.
    """
    if isinstance(answer, str):
        return [answer]
    if function not in COMPARING:
        return [json.dumps(answer, ensure_ascii=False, default=str)]
    if not isinstance(answer, list) or not answer or not all(isinstance(one, (str, int, float)) for one in answer):
        raise ValueError(
            f"the reference answer {answer!r} is not a text, a number or a list of them; check data.answer_key"
        )
    return [str(one) for one in answer]


def as_answer(function: Callable, reference: str) -> str:
    """A reference as a right answer would give it to a function of COMPARING: "#### 7", "\\boxed{7}", "Answer: B"."""
    return COMPARING[function].format(bare_reference(function, reference))


def bare_reference(function: Callable, reference: str) -> str:
    """What a reference of a function of COMPARING states, without the solution that leads to it: "7"."""
    if function is gsm8k:
        with contextlib.suppress(ValueError):  # the reward will raise it
            return str(reference_number(reference))
    if function is math_answer:
        return stated_expression(reference)
    return reference


def parts_of(value: float | dict, weight: float = 1.0) -> dict[str, float]:
    """The parts of what a reward returned, times a weight. A single value is named "reward". None is left out.

    Raises ValueError or TypeError for what is no number, or beyond LARGEST.
    """
    returned = value if isinstance(value, dict) else {"reward": value}
    parts = {}
    for name, part in returned.items():
        if name in OWN_PARTS:
            raise ValueError(f"a reward has a part {name!r}, which is the trainer's own name; choose another")
        if part is None:  # it does not apply to this row
            continue

        if isinstance(part, (list, tuple)):
            raise ValueError(f"{name} is a list: a reward for each token needs recipes/token_rewards.patch")
        if isinstance(part, str) or not abs(part) <= LARGEST / max(1, abs(weight)):
            raise ValueError(
                f"a reward must be a finite number, at most {LARGEST:g} in size; {name} is {part!r}, times {weight:g}"
            )
        parts[str(name)] = weight * float(part)
    return parts
