"""The reward functions: what an answer is worth. docs/rewards.md lists them and their options.

A reward is `def reward(text: str, answer: str, row: dict, **options) -> float | dict[str, float]`: the decoded
response, the row's reference answer, the whole row. A dict's values are summed and kept apart in `reward_parts`.
"""

import functools
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from decimal import Decimal

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
    tests, pairs = row.get("tests"), list(zip(row.get("inputs") or [], row.get("outputs") or [], strict=True))
    if not tests and not pairs:
        raise ValueError("the row has no tests: give assert statements in `tests`, or `inputs` and `outputs`")
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return 0.0
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    if tests:
        passed, total = sandbox.passed_tests(blocks[-1], tests, **limits), len(tests)
    else:
        passed, total = 0, len(pairs)
        for stdin, wanted in pairs:
            output = sandbox.output_of(blocks[-1], stdin, **limits)
            passed += output is not None and lines_of(output) == lines_of(wanted)
            if not partial and not passed:
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
    return model_scores([(text, row)], path, device, dtype, batch_size, max_tokens, prompt_key)[0]


def model_scores(
    answers: list[tuple[str, dict]],
    path: str,
    device: str = "cpu",
    dtype: str = "float32",
    batch_size: int = 8,
    max_tokens: int = 4096,
    prompt_key: str = "prompt",
) -> list[float]:
    """`model` of many (response, row), in batches: the first logit of each."""
    import torch

    scorer, tokenizer = load_model(path, device, dtype)
    texts = []
    for text, row in answers:
        prompt = row[prompt_key]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages.append({"role": "assistant", "content": text})
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            texts.append((prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)) + text)
    scores = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[start : start + batch_size],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            add_special_tokens=not tokenizer.chat_template,  # a template writes its own
            return_tensors="pt",
        ).to(scorer.device)
        with torch.inference_mode():
            scores += scorer(**batch).logits[:, 0].float().tolist()
    return scores


@functools.lru_cache(maxsize=1)
def load_model(path: str, device: str, dtype: str) -> tuple:
    """The reward model, in evaluation mode, and its tokenizer."""
    import torch
    import transformers

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True
    )
    scorer.config.pad_token_id = tokenizer.pad_token_id
    return scorer.to(device).eval(), tokenizer


def remote(
    text: str, answer: str, row: dict, url: str, timeout_s: float = 5.0, retries: int = 2, backoff_s: float = 0.5
) -> dict[str, float]:
    """What an HTTP endpoint replies to a POST of {"text", "answer", "row"}: {"reward": number}, or other parts.

    Tried again after `backoff_s`, then twice that, and so on. Raises ConnectionError after the last of the retries.
    """
    body = json.dumps({"text": text, "answer": answer, "row": row}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                parts = json.load(response)
        except (OSError, ValueError) as error:  # no connection, an HTTP error, a time out, a reply that is no JSON
            problem = error
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429):
                break  # the request itself is refused
            continue
        if not isinstance(parts, dict) or not parts:
            raise ValueError(f"{url} replied {parts!r}; a reward is {{'reward': number}}")
        return parts
    raise ConnectionError(f"{url}: {problem}, tried {attempt + 1} times") from problem


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
