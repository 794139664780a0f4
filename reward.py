"""Reward functions, and how a reward is loaded by its name. docs/rewards.md lists the names and options.

A reward is a function of the decoded response, the row's reference answer, the whole row, and options of its own:
    def right_and_short(text: str, answer: str, row: dict, limit: int = 200) -> float | dict[str, float]:
        return {"right": float(text.strip() == answer), "short": -0.1 * (len(text) > limit)}

A dict's values are summed, and logged one by one in `reward_parts`. A reward with a parameter `response_ids` gets the
tokens. None means that the reward does not apply to the row, and is left out of the sum. An exception counts as an
error of the sample, not as a wrong answer; so does a row to which no reward applies. To use a function in a file of
your own, set `reward.default=custom reward.custom=my_file.py:right_and_short`; `reward.functions` names several; or
extend REWARDS.
Every grading process imports this file when it starts, so functions import large packages themselves.
"""

import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal

from support.base import user_code
from support.judge import code_tests, reward_model

# ---------------------------------------------------------------- rewards that compare


def exact(text: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, outer white space aside; else 0."""
    return float(text.strip() == answer.strip())


def gsm8k(text: str, answer: str, row: dict, strict: bool = False) -> float:
    """1 if the final number of the response equals that of the reference answer; else 0.

    `strict`: a response without "####" is 0, whatever its last number is.
    """
    wanted = final_number(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} holds no number")
    if strict and "####" not in text:
        return 0.0
    return float(final_number(text) == wanted)


# 1,234.5 or 1234.5 or .5, with or without an exponent. NUMBER also takes a sign, unless it follows a digit ("10-5" ends
# in 5), a "$", and a denominator.
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"((?:(?<![\d.])[-−]\s?)?\$?\s?{UNSIGNED})(?:/({UNSIGNED}))?")


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or the last number of a text without it; None if there is none.

    Separators, "$" and units are dropped.
    """
    _, marked, tail = text.rpartition("####")
    found = NUMBER.findall(tail)
    if not found:
        return None
    number = found[0] if marked else found[-1]
    above, below = (re.sub(r"[,$\s]", "", part).replace("−", "-") for part in number)
    if not below:
        return Decimal(above)
    return Decimal(above) / Decimal(below) if Decimal(below) else None


MAX_EXPRESSION = 2000  # characters; parsing time is more than linear


def math_answer(text: str, answer: str, row: dict) -> float:
    """1 if math-verify finds the last \\boxed expression equal to the reference; else 0.

    Without a box the last expression counts, after "####" where that stands. No answer, a box that never closes and an
    expression beyond MAX_EXPRESSION are 0. "50%" is 50, not 0.5.
    """
    import math_verify

    wanted = math_reference(answer)
    # Its own timeouts need signals and do not interrupt C code; here the grading process is killed instead.
    return float(math_verify.verify(wanted, parse_math(text), allow_set_relation_comp=True, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def math_reference(answer: str) -> list:
    """Parse a reference answer: LaTeX or a plain expression, boxed or not, or what follows "####"."""
    bare = answer.rpartition("####")[2].strip().strip("$")
    parsed = parse_math(answer if "\\boxed" in answer else f"\\boxed{{{bare}}}")
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"the reference answer {answer!r} is no mathematical expression")
    return parsed


def parse_math(text: str) -> list:
    """Parse the last \\boxed of a text, or else its last expression: what math-verify returns, [] for none."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    _, boxed, tail = text.rpartition("\\boxed{")
    if not boxed:
        last = text.rpartition("####")[2][-MAX_EXPRESSION:]
        return math_verify.parse(plain_numbers(last), parsing_timeout=None)
    expression = inside_braces(tail[: MAX_EXPRESSION + 1])
    return parse_latex(expression.strip()) if expression else []


@functools.lru_cache(maxsize=4096)  # the answers of a group often agree
def parse_latex(expression: str) -> list:
    """Parse a LaTeX expression without delimiters by math-verify."""
    import math_verify

    # Without "$" and "%" (alone in a box, math-verify cannot read it), and without the thin spaces of 1\,234.
    latex = re.sub(r"(?<!\\)\$|\\?%|(?<=\d)\\[,!:;](?=\d{3})", "", plain_numbers(expression)).replace("\n", " ")
    return math_verify.parse(f"${latex}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)


def plain_numbers(text: str) -> str:
    """Write 1.5e3 as 1500, since math-verify reads "e" as Euler's number, and "−" as "-"."""
    number = re.compile(r"(?<![\w.\\])\d{1,20}(?:\.\d{1,20})?[eE][+-]?\d{1,3}(?![\w.])")
    return number.sub(lambda found: f"{Decimal(found[0]):f}", text.replace("−", "-"))


def inside_braces(text: str) -> str | None:
    """The text up to the brace that closes one opened before the text; None if none does."""
    depth = 1
    for brace in re.finditer(r"\\[{}]|[{}]", text):  # an escaped brace does not count
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[: brace.start()]
    return None


# Patterns for the letter of a choice, the most certain first. "A" and "I" before a word are words. The quantifiers are
# possessive (*+): without them a page of blanks takes quadratic time.
CHOICES = [
    re.compile(r"\\boxed\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\{)?\s*\(?([A-Ja-j])\)?(?![A-Za-z])"),
    re.compile(r"(?i:\banswer(?:\s++is)?)[\s:*]*+(?:[Oo]ption\s++)?\(?\s*+(?:([A-HJ])|([a-j])(?=\s*[).*]|\s*$)|(I))\b"),
    re.compile(r"\(([A-Ja-j])\)"),
    re.compile(r"(?<![\w'’])(?:([B-HJ])|([AI])(?!\s+[a-z]))(?![\w'’])"),
]


def multiple_choice(text: str, answer: str, row: dict) -> float:
    """1 if the response chooses the letter of the reference, A to J; else 0. See `chosen_letter`."""
    wanted = chosen_letter(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} holds no letter from A to J")
    return float(chosen_letter(text) == wanted)


def chosen_letter(text: str) -> str | None:
    """The last match of the first pattern of CHOICES that matches: \\boxed{B}, Answer: B, (B), B; None without one."""
    for pattern in CHOICES:
        found = pattern.findall(text)
        if found:
            return "".join(found[-1]).upper()
    return None


# ---------------------------------------------------------------- rewards of form

THINK = r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S\s*"


def matches_format(text: str, answer: str, row: dict, pattern: str = THINK, row_key: str = "") -> float:
    """1 if the whole response matches the pattern ("." takes line ends), by default <think>…</think> and an answer.

    `row_key` names a column of the data that holds each row's own pattern.
    """
    return float(re.fullmatch(row[row_key] if row_key else pattern, text, re.DOTALL) is not None)


def length_penalty(text: str, answer: str, row: dict, limit: int, buffer: int = 0, unit: str = "characters") -> float:
    """0 up to `limit` characters or words, then falling linearly to -1 at `limit` + `buffer` (0: another `limit`)."""
    if unit not in ("characters", "words"):
        raise ValueError(f"length: unit={unit!r}; legal are characters, words")
    count = len(text) if unit == "characters" else len(text.split())
    return -min(1.0, max(0, count - limit) / (buffer or limit))


# ---------------------------------------------------------------- rewards that run something


def code(
    text: str,
    answer: str,
    row: dict,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    file_mb: int = 16,
    partial: bool = False,
    allow_writes: bool = False,
    prelude: str = "",
) -> float:
    """1 if the last fenced block, after `prelude`, passes all tests of the row (`partial`: the share); no block is 0.

    `code_tests.find_tests` says where tests may be: assert statements, programs' input and output, or calls.
    Raises sandbox.TooLong when one run takes longer than `seconds`, ValueError for a row without tests.
    """
    tests = code_tests.find_tests(row, answer)
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return 0.0
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    return code_tests.share_passed(f"{prelude}\n{blocks[-1]}", tests, partial, **limits)


def model(
    text: str,
    answer: str,
    row: dict,
    path: str,
    device: str = "cpu",
    dtype: str = "float32",
    batch_size: int = 8,
    max_tokens: int = 4096,
    prompt_key: str = "prompt",
    pairs: bool = False,
) -> float:
    """The score that a sequence-classification model gives the response to row[prompt_key], a text or messages.

    `device` cuda is the trainer's own GPU. Of longer conversations the model reads the last `max_tokens`. `pairs`: the
    tokenizer gets question and answer as two texts, as BERT-like models need them.
    """
    return reward_model.scores([(text, row)], path, device, dtype, batch_size, max_tokens, prompt_key, pairs)[0]


def remote(
    text: str, answer: str, row: dict, url: str, timeout_s: float = 5.0, retries: int = 2, backoff_s: float = 0.5
) -> dict[str, float]:
    """What an HTTP endpoint replies to a POST of {"text", "answer", "row"}: {"reward": number}, or other parts.

    Retries without a connection, without a reply in `timeout_s`, and on 408, 429 and 5xx: at once, after 2 `backoff_s`,
    after 4, ... Raises ConnectionError after the last retry, and at once on any other 4xx.
    """
    import requests
    from urllib3.util import Retry

    plan = Retry(
        retries,
        backoff_factor=backoff_s,
        status_forcelist={408, 429, *range(500, 600)},
        allowed_methods=None,  # POST too
        respect_retry_after_header=False,
        raise_on_status=False,
    )
    body = json.dumps({"text": text, "answer": answer, "row": row})
    headers = {"Content-Type": "application/json"}
    adapter = requests.adapters.HTTPAdapter(max_retries=plan)
    with requests.Session() as session:
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        try:
            response = session.post(url, body, timeout=timeout_s, headers=headers)
        except requests.RequestException as error:
            raise ConnectionError(f"{url}: {error}, tried {retries + 1} times") from error
    if not response.ok:
        tries = len(response.raw.retries.history) + 1
        raise ConnectionError(f"{url}: {response.status_code} {response.reason}, tried {tries} times")
    try:
        parts = response.json()
    except requests.JSONDecodeError:
        parts = response.text[:200]
    if not isinstance(parts, dict) or not parts:
        raise ValueError(f"{url} replied {parts!r}; a reward is {{'reward': number}}")
    return parts


# ---------------------------------------------------------------- a reward by its name

OWN_PARTS = ("overlong",)  # names in reward_parts that the trainer gives: algo.overlong_buffer
REWARDS: dict[str, Callable] = {
    "exact": exact,
    "gsm8k": gsm8k,
    "math": math_answer,
    "multiple_choice": multiple_choice,
    "format": matches_format,
    "length": length_penalty,
    "code": code,
    "model": model,
    "remote": remote,
}


def load_reward(
    spec: str | dict[str, float],
    custom: str | None,
    options: dict[str, dict] | None = None,
    functions: dict[str, str] | None = None,
    batched: dict[str, Callable] | None = None,
    build: bool = True,
) -> Callable:
    """Load the reward of a name, or the weighted sum of {name: weight}, as `(text, answer, row, response_ids)`.

    "custom" is loaded from `custom`, "path/to/file.py:function"; `functions` gives further names to such files or to
    REWARDS; `options` are keyword arguments by name; a class gets them in its constructor. `batched` functions replace
    those of their names. Without `build` it only checks: no class is instantiated. Loads no model.
    Raises ValueError that says what is legal.
    """
    options, functions, batched = options or {}, functions or {}, batched or {}
    for name in functions:
        if name in REWARDS or name in OWN_PARTS or name == "custom":
            raise ValueError(f"reward.functions.{name}: a reward has this name already; choose another")
    check_names("", weights_of(spec), functions)
    check_names("reward.options: ", options, functions)
    chosen = {}
    for name in weights_of(spec):
        kind = functions.get(name, name)
        given = options.get(name, {})
        file = ("reward.custom", custom) if name == "custom" else (f"reward.functions.{name}", kind)
        function = REWARDS.get(kind) or user_code.load_function(*file)
        check_options(name, function, given)
        if kind == "model":
            reward_model.check_folder(f"reward.options.{name}.path", given["path"])
            if not build:
                reward_model.check_type(f"reward.options.{name}.path", given["path"])
        if not inspect.isclass(function):
            chosen[name] = accept_ids(functools.partial(batched.get(name, function), **given))
        elif build:
            chosen[name] = accept_ids(user_code.instance(*file, json.dumps(given)))
    return chosen.get(spec) if isinstance(spec, str) else weighted_sum(chosen, spec)


def check_names(where: str, names: Iterable[str], functions: dict[str, str]) -> None:
    """Raises ValueError for a name that is no reward; `where` begins the message."""
    legal = [*REWARDS, "custom", *functions]
    for name in names:
        if name not in legal:
            raise ValueError(f"{where}unknown reward {name!r}; legal are {', '.join(legal)}")


def weighted_sum(rewards: dict[str, Callable], weights: dict[str, float]) -> Callable:
    """The reward whose parts are those of all `rewards` times their weights, named after them."""

    def weighted(text: str, answer: str, row: dict, response_ids: list[int] | None = None) -> dict[str, float]:
        parts = {}
        for name, weight in weights.items():
            value = rewards[name](text, answer, row, response_ids)
            for part, number in parts_of(value, weight).items():
                parts[name if part == "reward" else f"{name}/{part}"] = number
        return parts

    return weighted


def is_part(part: str, name: str) -> bool:
    """Whether a part of a weighted sum is of the reward `name`: "name" or "name/part"."""
    return f"{part}/".startswith(f"{name}/")


def accept_ids(function: Callable) -> Callable:
    """A reward as `(text, answer, row, response_ids)`; the ids go on to one that has a parameter of that name."""
    if "response_ids" in inspect.signature(function).parameters:
        return lambda text, answer, row, ids=None: function(text, answer, row, response_ids=ids)
    return lambda text, answer, row, ids=None: function(text, answer, row)


def weights_of(spec: str | dict[str, float]) -> dict[str, float]:
    """{name: weight} of a reward written either way. Raises ValueError."""
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    legal = isinstance(weights, dict) and bool(weights)
    if not legal or not all(type(w) in (int, float) and math.isfinite(w) for w in weights.values()):
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    return weights


def models_of(spec: str | dict[str, float], functions: dict[str, str]) -> list[str]:
    """Those names of a reward that are reward models."""
    return [name for name in weights_of(spec) if functions.get(name, name) == "model"]


def has_own(spec: str | dict[str, float], functions: dict[str, str]) -> bool:
    """Whether one of a reward's names is a function or class of the user's own."""
    return any(functions.get(name, name) not in REWARDS for name in weights_of(spec))


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
