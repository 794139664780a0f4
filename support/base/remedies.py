"""The remedies of remedies.yaml, as errors of memory, its plan and warnings at the start read them."""

from pathlib import Path
from typing import NamedTuple

import yaml


class Remedy(NamedTuple):
    """What is short, and what to turn, in the order in which to try it."""

    sign: str
    turn: list[str]


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MEMORY = {phase: Remedy(**remedy) for phase, remedy in TABLES["memory"].items()}
HOST_MEMORY = TABLES["host_memory"]
VLLM_MEMORY = TABLES["vllm_memory"]
PLAN = TABLES["plan"]


def try_one_of(turn: list[str]) -> str:
    """The remedies as the end of a sentence: "try a, b or c"."""
    if len(turn) == 1:
        return f"try {turn[0]}"
    return f"try {', '.join(turn[:-1])} or {turn[-1]}"
