"""The remedies of remedies.yaml, as errors of memory, its plan, warnings at the start and hints from metrics read them.

Those of a machine are in support/check/gpu_rows.py and tools/doctor.py, which answer where no package is installed.
"""

from pathlib import Path
from typing import NamedTuple

import yaml


class Remedy(NamedTuple):
    """What is short, slow or wrong, and what to turn, in the order in which to try it."""

    sign: str
    turn: list[str]


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MEMORY = {phase: Remedy(**remedy) for phase, remedy in TABLES["memory"].items()}
DEAD = {rule: Remedy(**remedy) for rule, remedy in TABLES["dead"].items()}
METRICS = {rule: Remedy(**remedy) for rule, remedy in TABLES["metrics"].items()}
HOST_MEMORY = TABLES["host_memory"]
VLLM_MEMORY = TABLES["vllm_memory"]
PLAN = TABLES["plan"]


def try_one_of(turn: list[str]) -> str:
    """The remedies as the end of a sentence: "try a, b or c"."""
    if len(turn) == 1:
        return f"try {turn[0]}"
    return f"try {', '.join(turn[:-1])} or {turn[-1]}"
