"""What an answer is worth: reward functions, and a reward by its name. docs/rewards.md lists the names and options.

A reward is a function of the decoded response, the row's reference answer, the whole row, and options of its own:
    def right_and_short(text: str, answer: str, row: dict, limit: int = 200) -> float | dict[str, float]:
        return {"right": float(text.strip() == answer), "short": -0.1 * (len(text) > limit)}

A dict's values are summed and kept apart in `reward_parts`. An exception is an error of the sample, told apart from a
wrong answer. In a file of its own this is `reward.default=custom reward.custom=my_file.py:right_and_short`; written
here and entered in REWARDS below it has a name, for `reward.by_source` and weighted sums too.
Every grading process reads this file when it starts, so large packages are imported by the functions that use them.
"""

import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import traceback
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from support import sandbox

# ---------------------------------------------------------------- rewards that compare


def exact(text: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, outer white space aside; else 0."""
    return float(text.strip() == answer.strip())


def gsm8k(text: str, answer: str, row: dict) -> float:
    """1 if the final number of the response equals that of the reference answer; else 0."""
    wanted = final_number(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} holds no number")
    return float(final_number(text) == wanted)


# 1,234.5 or 1234.5 or .5, perhaps with an exponent. Before it may stand a sign that does not follow a digit ("10-5"
# ends in 5) and a "$", behind it a denominator.
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"((?:(?<![\d.])[-−]\s?)?\$?\s?{UNSIGNED})(?:/({UNSIGNED}))?")


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or the last number of a text without it; separators, "$" and units dropped."""
    _, marked, tail = text.rpartition("####")
    found = NUMBER.findall(tail)
    if not found:
        return None
    above, below = (re.sub(r"[,$\s]", "", part).replace("−", "-") for part in found[0 if marked else -1])
    if not below:
        return Decimal(above)
    return Decimal(above) / Decimal(below) if Decimal(below) else None


MAX_EXPRESSION = 2000  # characters; parsing takes more than linear time


def math_answer(text: str, answer: str, row: dict) -> float:
    """1 if math-verify finds the last \\boxed expression equal to the reference; else 0.

    Without a box the last expression counts, after "####" where that stands. No answer, a box that never closes and an
    expression beyond MAX_EXPRESSION are 0. "50%" is 50, not 0.5.
    """
    import math_verify

    wanted = math_reference(answer)
    # Its own timeouts need signals and miss what C code does; here the worker is killed instead.
    return float(math_verify.verify(wanted, parse_math(text), allow_set_relation_comp=True, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def math_reference(answer: str) -> list:
    """A reference answer, parsed: LaTeX or a plain expression, boxed or not, or what follows "####"."""
    bare = answer.rpartition("####")[2].strip().strip("$")
    parsed = parse_math(answer if "\\boxed" in answer else f"\\boxed{{{bare}}}")
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"the reference answer {answer!r} is no mathematical expression")
    return parsed


def parse_math(text: str) -> list:
    """What math-verify reads in the last \\boxed, or else last in the text: an expression and its source, or []."""
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
    """A LaTeX expression without its delimiters, as math-verify reads it."""
    import math_verify

    # Without "$" and "%" (alone in a box, math-verify cannot read it), and without the thin spaces of 1\,234.
    latex = re.sub(r"(?<!\\)\$|\\?%|(?<=\d)\\[,!:;](?=\d{3})", "", plain_numbers(expression)).replace("\n", " ")
    return math_verify.parse(f"${latex}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)


def plain_numbers(text: str) -> str:
    """1.5e3 written as 1500, since math-verify takes the "e" for Euler's; "−" as "-"."""
    number = re.compile(r"(?<![\w.\\])\d{1,20}(?:\.\d{1,20})?[eE][+-]?\d{1,3}(?![\w.])")
    return number.sub(lambda found: f"{Decimal(found[0]):f}", text.replace("−", "-"))


def inside_braces(text: str) -> str | None:
    """The text up to the brace that closes one opened before it; None if none does."""
    depth = 1
    for brace in re.finditer(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[: brace.start()]
    return None


# Where the letter of a choice stands, from the surest place to the least. "A" and "I" before a word are words. The
# quantifiers are possessive (*+) lest a page of blanks takes quadratic time.
CHOICES = [
    re.compile(r"\\boxed\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\{)?\s*\(?([A-Ja-j])\)?(?![A-Za-z])"),
    re.compile(r"(?i:\banswer(?:\s++is)?)[\s:*]*+(?:[Oo]ption\s++)?\(?\s*+(?:([A-HJ])|([a-j])(?=\s*[).*]|\s*$)|(I))\b"),
    re.compile(r"\(([A-Ja-j])\)"),
    re.compile(r"(?<![\w'’])(?:([B-HJ])|([AI])(?!\s+[a-z]))(?![\w'’])"),
]


def multiple_choice(text: str, answer: str, row: dict) -> float:
    """1 if the response chooses the letter of the reference, A to J; else 0. The last of the surest places counts."""
    wanted = chosen_letter(answer)
    if wanted is None:
        raise ValueError(f"the reference answer {answer!r} holds no letter from A to J")
    return float(chosen_letter(text) == wanted)


def chosen_letter(text: str) -> str | None:
    """The letter in "\\boxed{B}", "Answer: B", "(B)", or the last that stands alone; None without one."""
    for place in CHOICES:
        found = place.findall(text)
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
    """0 up to `limit` characters or words, then falling, to -1 at `limit` + `buffer` (0: another `limit`)."""
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
) -> float:
    """1 if the last fenced block passes all tests of the row (`partial`: the share that it passes); no block is 0.

    The tests are assert statements in row["tests"], or the programs' input and output in row["inputs"], row["outputs"].
    Raises sandbox.TooLong when one run takes longer than `seconds`, ValueError for a row without tests.
    """
    tests = row.get("tests")
    pairs = list(zip(row.get("inputs") or [], row.get("outputs") or [], strict=True))
    if not tests and not pairs:
        raise ValueError("the row has no tests: give assert statements in `tests`, or `inputs` and `outputs`")
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return 0.0
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    if tests:
        total = len(tests)
        passed = sandbox.passed_tests(blocks[-1], tests, **limits)
    else:
        total = len(pairs)
        passed = 0
        for number, (stdin, wanted) in enumerate(pairs, 1):
            output = sandbox.output_of(blocks[-1], stdin, **limits)
            passed += output is not None and lines_of(output) == lines_of(wanted)
            if not partial and passed < number:
                return 0.0
    return passed / total if partial else float(passed == total)


def lines_of(output: str) -> list[str]:
    """Lines without white space at their ends or empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


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
) -> float:
    """The score a sequence-classification reward model gives the response to row[prompt_key], a text or messages.

    `device` cuda is the trainer's own GPU. Of longer conversations the last `max_tokens` count.
    """
    from support import reward_model  # its packages take seconds

    return reward_model.scores([(text, row)], path, device, dtype, batch_size, max_tokens, prompt_key)[0]


def remote(
    text: str, answer: str, row: dict, url: str, timeout_s: float = 5.0, retries: int = 2, backoff_s: float = 0.5
) -> dict[str, float]:
    """What an HTTP endpoint replies to a POST of {"text", "answer", "row"}: {"reward": number}, or other parts.

    No connection, no reply in `timeout_s`, 408, 429 and 5xx are tried again: at once, after 2 `backoff_s`, after 4, ...
    Raises ConnectionError after the last of the retries, and at once where the request is refused (other 4xx).
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
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=plan))
        try:
            response = session.post(url, body, timeout=timeout_s, headers={"Content-Type": "application/json"})
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
    known: dict[str, Callable] = REWARDS,
) -> Callable:
    """The function `(text, answer, row)` behind a reward's name, or behind {name: weight}, their weighted sum.

    "custom" is read from `custom`, "path/to/file.py:function"; `options` are keyword arguments by name. Loads no model.
    Raises ValueError that says what is legal.
    """
    options = options or {}
    for where, names in (("", weights_of(spec)), ("reward.options: ", options)):
        for name in names:
            if name not in known and name != "custom":
                raise ValueError(f"{where}unknown reward {name!r}; legal are {', '.join([*known, 'custom'])}")
    functions = {}
    for name in weights_of(spec):
        function = load_custom(custom) if name == "custom" else known[name]
        check_options(name, REWARDS.get(name, function), options.get(name, {}))
        functions[name] = functools.partial(function, **options.get(name, {}))
    if isinstance(spec, str):
        return functions[spec]

    def weighted(text: str, answer: str, row: dict) -> dict[str, float]:
        parts = {}
        for name, weight in spec.items():
            for part, value in parts_of(functions[name](text, answer, row)).items():
                parts[name if part == "reward" else f"{name}/{part}"] = weight * value
        return parts

    return weighted


def weights_of(spec: str | dict[str, float]) -> dict[str, float]:
    """{name: weight} of a reward written either way. Raises ValueError."""
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    numbers = isinstance(weights, dict) and all(type(w) in (int, float) and math.isfinite(w) for w in weights.values())
    if not numbers or not weights:
        raise ValueError(f"{spec!r} is no reward; give a name, or {{name: weight, name: weight}}")
    return weights


def check_options(name: str, function: Callable, given: dict) -> None:
    """Raises ValueError for options that the reward does not have, and for those that it lacks."""
    legal = list(inspect.signature(function).parameters.values())[3:]
    names = [p.name for p in legal]
    if any(p.kind is p.VAR_KEYWORD for p in legal):
        return
    for key in given:
        if key not in names:
            raise ValueError(f"unknown option reward.options.{name}.{key}; legal are {', '.join(names) or 'none'}")
    for p in legal:
        if p.default is p.empty and p.name not in given:
            raise ValueError(f"the reward {name!r} needs reward.options.{name}.{p.name}")


@functools.lru_cache
def load_custom(custom: str | None) -> Callable:
    """The function of "path/to/file.py:function". Raises ValueError."""
    path, _, function = (custom or "").rpartition(":")
    if not path or not os.path.isfile(path):
        raise ValueError(f"reward.custom={custom!r}: give path/to/file.py:function, a file that exists")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward.custom={custom}: importing it failed: {last_line(error)}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"reward.custom={custom}: {path} has no function {function!r}")
    return getattr(module, function)


def last_line(error: BaseException) -> str:
    """The last line of the traceback, with the place that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def parts_of(value: float | dict) -> dict[str, float]:
    """What a reward function returned, as {part: finite float}. Raises TypeError or ValueError for anything else."""
    parts = value if isinstance(value, dict) else {"reward": value}
    for name, part in parts.items():
        if isinstance(part, str) or not math.isfinite(part):
            raise ValueError(f"a reward must be a finite number; {name} is {part!r}")
    return {str(name): float(part) for name, part in parts.items()}
