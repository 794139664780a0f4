"""How LaTeX is made ready for math-verify. reward.py has what `math` does with it, and leaves these details here."""

import functools
import re
from decimal import Decimal

MAX_EXPRESSION = 2000  # characters; parsing time is more than linear


def boxed(text: str) -> str | None:
    """What is in the last \\boxed of a text, "" if it never closes or is too long; None without a box."""
    _, found, tail = text.rpartition("\\boxed{")
    return (inside_braces(tail[: MAX_EXPRESSION + 1]) or "").strip() if found else None


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


def plain_numbers(text: str) -> str:
    """Write 1.5e3 as 1500, since math-verify reads "e" as Euler's number, and "−" as "-"."""
    number = re.compile(r"(?<![\w.\\])\d{1,20}(?:\.\d{1,20})?[eE][+-]?\d{1,3}(?![\w.])")
    return number.sub(lambda found: f"{Decimal(found[0]):f}", text.replace("−", "-"))


@functools.lru_cache(maxsize=4096)  # the answers of a group often agree
def parse_latex(expression: str) -> list:
    """Parse a LaTeX expression without delimiters by math-verify."""
    import math_verify

    # Without "$" and "%" (alone in a box, math-verify cannot read it), and without the thin spaces of 1\,234.
    latex = re.sub(r"(?<!\\)\$|\\?%|percent|(?<=\d)\\[,!:;](?=\d{3})", "", words_as_text(plain_numbers(expression)))
    latex = latex.replace("\n", " ")
    return math_verify.parse(f"${latex}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)


def is_several(expression: str) -> bool:
    """Whether a number is followed by a unit and by another number, or is cut by spaces or points."""
    return SEVERAL.search(words_as_text(expression)) is not None


# ---------------------------------------------------------------- words

SEVERAL = re.compile(
    r"\d\s*\\text\{(?!\s*(?:and|or)\s*\}).*\d\s*\\text\{[^{}]*\}\W*$|^-?\d+(?:\s+[\d/]+)+$|^\d+(?:\.\d+){2,}$"
)
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
