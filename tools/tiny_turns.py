"""Environments of `rollout.turns`: a game that the demo's model learns (configs/tiny_turns.yaml), and a Python tool."""

import re
from collections.abc import Iterator

from support import sandbox


def rows(secrets: str) -> Iterator[dict]:
    """A row for each digit of `data.train`, to be guessed; nothing in the prompt tells which."""
    for digit in secrets:
        yield {"prompt": ">", "answer": digit}


def higher_or_lower(text: str, row: dict, state: dict) -> str | None:
    """ "+" if the secret digit is higher than the guess, "-" if it is lower; the end if it is right, or no digit."""
    if not re.fullmatch("[0-9]", text):
        return None
    state["guesses"] = state.get("guesses", 0) + 1
    state["won"] = text == row["answer"]
    return None if state["won"] else "+" if text < row["answer"] else "-"


def won(text: str, answer: str, row: dict) -> float:
    """1 for the right guess, however late; else 0.1 for each guess that was a digit."""
    return 1.0 if row["state"].get("won") else 0.1 * row["state"].get("guesses", 0)


def python(text: str, row: dict, state: dict) -> str | None:
    """Run the last fenced Python block of an answer and show what it prints; the end where there is none."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return None
    try:
        output = sandbox.output_of(blocks[-1], "", seconds=5, memory_mb=512, file_mb=16, allow_writes=False)
    except sandbox.TooLong:
        output = "it took more than 5 seconds"
    return f"```output\n{'it failed' if output is None else output[:2000].rstrip()}\n```\n"
