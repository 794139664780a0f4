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


# 1,234.5 or 1234.5 or .5, with or without an exponent. NUMBER also takes a sign, unless it follows a digit ("10-5" ends
# in 5), a "$", and a denominator.
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"((?:(?<![\d.])[-−]\s?)?\$?\s?{UNSIGNED})(?:/({UNSIGNED}))?")


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
# A number that NUMBER would read without its factor, root or rest.
MORE = re.compile(r"[√π]|\\(?!text|math|boxed)[a-z]|\d\W*(?:hundred|thousand|[mbtr]+illion|dozen)|and a half")


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
    rest, count = NUMBER.subn("", parts[-1])
    unclear = several or count != 1 or any(map(str.isnumeric, rest)) or MORE.search(stated)
    number = final_number(parts[-1])
    if unclear or number is None or re.search(r"(?<![\d,])0\d*,\d", parts[-1]):
        raise ValueError(
            f"the reference answer {answer!r} is not clearly one number; its last reads as {number}. Write it "
            "as 1234.5, after #### if a solution stands before it"
        )
    return number


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
    stated = boxed(answer)
    if stated is None:
        stated = answer.rpartition("####")[2].strip().strip("$")
    if SEVERAL.search(words_as_text(stated)):
        raise ValueError(f"the reference answer {answer!r} is not clearly one expression; write it in LaTeX")

    parsed = parse_math(f"\\boxed{{{stated}}}")
    if all(isinstance(part, str) for part in parsed):
        raise ValueError(f"the reference answer {answer!r} is no mathematical expression")
    return parsed


def parse_math(text: str) -> list:
    """Parse the last \\boxed of a text, or else its last expression: what math-verify returns, [] for none."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    expression = boxed(text)
    if expression is None:
        last = text.rpartition("####")[2][-MAX_EXPRESSION:]
        return math_verify.parse(plain_numbers(last), parsing_timeout=None)
    return parse_latex(expression) if expression else []


def boxed(text: str) -> str | None:
    """What is in the last \\boxed of a text, "" if it never closes or is too long; None without a box."""
    _, found, tail = text.rpartition("\\boxed{")
    return (inside_braces(tail[: MAX_EXPRESSION + 1]) or "").strip() if found else None


@functools.lru_cache(maxsize=4096)  # the answers of a group often agree
def parse_latex(expression: str) -> list:
    """Parse a LaTeX expression without delimiters by math-verify."""
    import math_verify

    # Without "$" and "%" (alone in a box, math-verify cannot read it), and without the thin spaces of 1\,234.
    latex = re.sub(r"(?<!\\)\$|\\?%|percent|(?<=\d)\\[,!:;](?=\d{3})", "", words_as_text(plain_numbers(expression)))
    latex = latex.replace("\n", " ")
    return math_verify.parse(f"${latex}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)


# LaTeX that is left alone, or a run of letters and spaces.
LETTERS = re.compile(
    r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|"
    r"([A-Za-z]+(?:[ '-]+[A-Za-z]+)*)(?![A-Za-z^_])"
)
FUNCTION = re.compile(r"\b(pi|theta|(?:arc)?(?:sin|cos|tan)|log|ln|exp)\b")
NO_WORD = re.compile(rf"and|or|mod|infinity|sqrt|{FUNCTION.pattern}")
OTHER_BASE = re.compile(r"(\d[\d.]*)_\{?(?!10\b)(\d+)\}?")
UNIT = re.compile(r"(?<=\d)\s*([kcmd]?m/(?:s|h|min)|(?:[kcmd]m|ft|in|yd|mi)(?=\^\{?[23]))")  # that math-verify lacks
SCALED = re.compile(r"(\d[\d,]*(?:\.\d+)?)(\s*(?:\\text\{\s*)?)(thousand|million|billion|trillion)\b")
ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# A number that is followed by a unit and by another number, or is cut by spaces or points.
SEVERAL = re.compile(
    r"\d\s*\\text\{(?!\s*(?:and|or)\s*\}).*\d\s*\\text\{[^{}]*\}\W*$|^-?\d+(?:\s+[\d/]+)+$|^\d+(?:\.\d+){2,}$"
)


def words_as_text(latex: str) -> str:
    """Write words as \\text, since their letters would be factors. math-verify drops a text after a number, as a unit.

    3.5 million becomes 3500000, and 12_8 a text that is not 12.
    """
    latex = SCALED.sub(lambda found: f"{Decimal(found[1].replace(',', '')).scaleb(ZEROS[found[3]]):f}{found[2]}", latex)
    latex = OTHER_BASE.sub(r"\\text{\1base\2}", latex)
    latex = UNIT.sub(r"\\text{\1}", latex)
    return LETTERS.sub(letters_as_text, latex)


def letters_as_text(found: re.Match) -> str:
    """A match of LETTERS: \\text if it holds a word, else factors and names of functions.

    A word has four letters, or three and no digit before them. One is a vowel. Factors of a product stand in the order
    of the alphabet or are close in it, and a word's letters are neither.
    """
    letters = found[1]
    if not letters:
        return found[0]

    shortest = 3 if found.string[: found.start()][-1:] in ("", " ") else 4
    is_word = letters == found.string and letters.lower() in ("no", "on", "up", "ok")
    for word in re.split("[ '-]+", letters):
        lower = word.lower()
        if len(word) >= shortest and not word.isupper() and not NO_WORD.fullmatch(lower):
            in_order = sorted(lower) == list(lower) or ord(max(lower)) - ord(min(lower)) <= len(word)
            is_word |= re.search("[aeiou]", lower) is not None and not in_order
    return f"\\text{{{letters}}}" if is_word else FUNCTION.sub(r"\\\1", letters)


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
    if unit not in ("characters", "words"):
        raise ValueError(f"length: unit={unit!r}: must be characters or words")
    count = len(text) if unit == "characters" else len(text.split())
    return -min(1.0, max(0, count - limit) / (buffer or limit))


REWARDS: dict[str, Callable] = {
    "exact": exact,
    "gsm8k": gsm8k,
    "math": math_answer,
    "multiple_choice": multiple_choice,
    "format": matches_format,
    "length": length_penalty,
}
