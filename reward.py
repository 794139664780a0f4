"""Reward functions that compare texts, and their names. docs/rewards.md lists the names and options.

A reward is a function of the decoded response, the row's reference answer, the whole row, and options of its own:
    def right_and_short(text: str, answer: str, row: dict, limit: int = 200) -> float | dict[str, float]:
        return {"right": float(text.strip() == answer), "short": -0.1 * (len(text) > limit)}

A dict's values are summed, and logged one by one in `reward_parts`. A reward with a parameter `response_ids` gets the
tokens. None means that the reward does not apply to the row, and is left out of the sum. An exception counts as an
error of the sample, not as a wrong answer; so does a row to which no reward applies. To use a function in a file of
your own, set `reward.default=custom reward.custom=my_file.py:right_and_short`; `reward.functions` names several, and
takes those that run something from rewards/; or extend REWARDS. Every grading process imports this file when it starts,
so functions import large packages themselves.
"""

import functools
import logging
import re
from collections.abc import Callable
from decimal import Decimal

# How words, units and braces in LaTeX are read is long, and no part of what a reward is.
from rewards.latex import MAX_EXPRESSION, boxed, is_several, parse_latex, plain_numbers

# ---------------------------------------------------------------- rewards that compare


def exact(text: str, answer: str, row: dict) -> float:
    """1 if the response is the answer, outer white space aside; else 0."""
    return float(text.strip() == answer.strip())


def gsm8k(text: str, answer: str, row: dict, strict: bool = False) -> float:
    """1 if the final number of the response equals the final number of the reference answer; else 0.

    `strict`: a response without "####" is 0, whatever its last number is.
    """
    wanted = reference_number(answer)
    if strict and "####" not in text:
        return 0.0
    return float(final_number(text) == wanted)


# 1,234.5 or 1234.5 or .5, with or without an exponent. NUMBER also takes a "$", a denominator, and a sign, unless that
# follows a digit ("10-5" ends in 5) or is a dash: a hyphen before a blank is a sign only where the text begins.
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"((?:\A\s*-\s|(?<![\d.])(?:-|−\s?))?(?:\$\s?)?{UNSIGNED})(?:/({UNSIGNED}))?")


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or the last number of a text without it; None if there is no number.

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


# What stands between numbers: words, and units such as cm^2. An "e" or "x" between digits is no word, nor is "½".
LETTER = r"[^\W\d_\u00b2-\u00be\u2070-\u2089\u2150-\u215f]"
WORDS = re.compile(rf"(?:{LETTER}{{2,}}|(?![eExX]){LETTER})(?:\^?\{{?[23²³]\}}?(?!\d))?")
# A number that NUMBER would read without its factor, root or rest, or "0,5", whose comma is no separator.
MORE = re.compile(
    r"[√π]|\\(?!text|math|boxed)[a-z]|\d\W*(?:hundred|thousand|[mbtr]+illion|dozen)|and a half|(?<![\d,])0\d*,\d"
)


def reference_number(answer: str) -> Decimal:
    """The number of a reference answer, which may end a solution. Raises ValueError unless there is one, clearly.

    It stands after the last "####" or "=", or in the last sentence. If it stands after "####" or at the start, no other
    number may follow.
    """
    _, marked, tail = answer.rpartition("####")
    stated = re.split(r"=|≈|>>|\n|\.\s+(?=[A-Z])", tail.strip())[-1].strip()
    parts = [part for part in WORDS.split(stated) if any(map(str.isnumeric, part))]
    if not parts:
        raise ValueError(f"the reference answer {answer!r} holds no number")

    several = len(parts) > 1 and (marked or not stated[0].isalpha())
    number = final_number(parts[-1])
    rest, count = NUMBER.subn("", parts[-1])
    if several or number is None or count != 1 or any(map(str.isnumeric, rest)) or MORE.search(stated):
        raise ValueError(
            f"the reference answer {answer!r} is not clearly one number; its last reads as {number}. Write it "
            "as 1234.5, after #### if a solution stands before it"
        )
    return number


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
    """Parse what a reference answer states: LaTeX or a plain expression."""
    stated = stated_expression(answer)
    if is_several(stated):
        raise ValueError(f"the reference answer {answer!r} is not clearly one expression; write it in LaTeX")

    parsed = parse_math(f"\\boxed{{{stated}}}")
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"the reference answer {answer!r} is no mathematical expression")
    return parsed


def stated_expression(answer: str) -> str:
    """What is in the last \\boxed of a reference answer or, without one, after "####"."""
    inside = boxed(answer)
    return answer.rpartition("####")[2].strip().strip("$") if inside is None else inside


def parse_math(text: str) -> list:
    """Parse the last \\boxed of a text, or else its last expression: what math-verify returns, [] for none."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    expression = boxed(text)
    if expression is None:
        last = text.rpartition("####")[2][-MAX_EXPRESSION:]
        return math_verify.parse(plain_numbers(last), parsing_timeout=None)
    return parse_latex(expression) if expression else []


# Patterns for the letter of a choice, the most certain first. "I" before a word is a word, and so is "A", except right
# after "answer is". The quantifiers are possessive (*+): without them a page of blanks takes quadratic time.
CHOICES = [
    re.compile(r"\\boxed\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\{)?\s*\(?([A-Ja-j])\)?(?![A-Za-z])"),
    re.compile(
        r"(?i:\banswer(?:\s++is)?)[\s:*]*+(?:[Oo]ption\s++)?\(?\s*+(?:([A-HJ])|([a-j])(?=\s*[).*]|\s*$)|(I)(?!\s+[a-z]))\b"
    ),
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


# Rewards that compare with the reference, and how an answer gives it: grpo/step/named_rewards.py as_answer. Where a
# row's answer is a list, they take any entry of it.
COMPARING: dict[Callable, str] = {
    exact: "{}",
    gsm8k: "#### {}",
    math_answer: "\\boxed{{{}}}",
    multiple_choice: "Answer: {}",
}


# ---------------------------------------------------------------- rewards of form

# The opening is optional, since some chat templates write it at the end of the prompt (Qwen3.5, R1, QwQ).
THINK = r"(?:\s*<think>)?(?:(?!</?think>).)*+</think>(?:(?!</?think>).)*\S\s*"


def matches_format(text: str, answer: str, row: dict, pattern: str = THINK, row_key: str = "") -> float:
    """1 if the whole response matches the pattern ("." takes line ends), by default <think>…</think> and an answer.

    `row_key` names a column of the data that holds each row's own pattern.
    """
    return float(re.fullmatch(row[row_key] if row_key else pattern, text, re.DOTALL) is not None)


def length_penalty(text: str, answer: str, row: dict, limit: int, buffer: int = 0, unit: str = "characters") -> float:
    """0 up to `limit` characters or words, then falling linearly to -1 at `limit` + `buffer` (0: another `limit`)."""
    count = len(text) if unit == "characters" else len(text.split())
    return -min(1.0, max(0, count - limit) / (buffer or limit))


def check_length(limit: int, buffer: int = 0, unit: str = "characters"):
    """Raises ValueError for options of `length_penalty` that give no number."""
    if unit not in ("characters", "words"):
        raise ValueError(f"length: unit={unit!r}: must be characters or words")
    if (buffer or limit) <= 0:
        raise ValueError(f"length: limit={limit} and buffer={buffer}: one of them must be above 0")


length_penalty.check = check_length


REWARDS: dict[str, Callable] = {
    "exact": exact,
    "gsm8k": gsm8k,
    "math": math_answer,
    "multiple_choice": multiple_choice,
    "format": matches_format,
    "length": length_penalty,
}
