"""Functions for `rollout.turns`: a game that the demo's model learns (configs/tiny_turns.yaml), and a Python tool."""

import re
import subprocess
from collections.abc import Iterator

from rewards import sandbox


def rows(secrets: str) -> Iterator[dict]:
    """Yield a row for each digit of `data.train`. The digit is to be guessed; the prompt does not contain it."""
    for digit in secrets:
        yield {"prompt": ">", "answer": digit}


def higher_or_lower(text: str, row: dict, state: dict) -> str | None:
    """Reply "+" if the secret digit is higher than the guess, "-" if it is lower. None, the end, for anything else."""
    if not re.fullmatch("[0-9]", text):
        return None
    state["guesses"] = state.get("guesses", 0) + 1
    state["won"] = text == row["answer"]
    if state["won"]:
        return None
    return "+" if text < row["answer"] else "-"


def won(text: str, answer: str, row: dict) -> float:
    """Return 1 if a guess was right, else 0.1 for each guess that was a digit."""
    return 1.0 if row["state"].get("won") else 0.1 * row["state"].get("guesses", 0)


def python(text: str, row: dict, state: dict) -> str | None:
    """Run the last fenced Python block of an answer and reply with its output. None, the end, without a block."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return None
    try:
        output = sandbox.output_of(blocks[-1], "", seconds=5, memory_mb=512, file_mb=16, allow_writes=False)
    except subprocess.TimeoutExpired:
        output = "it took more than 5 seconds"
    if output is None:
        output = "it failed"
    return f"```output\n{output[:2000].rstrip()}\n```\n"
