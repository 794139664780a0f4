"""Write the tables of remedies in docs/tuning.md, from support/base/remedies.yaml.

    python -m tools.tuning

tests/test_tuning.py holds that the page has them as they are.
"""

import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from support.base import remedies  # noqa: E402

PAGE = REPO / "docs/tuning.md"
WITH_KEYS = "algo|data|eval|megatron|model|parallel|reward|rollout|schedule|train"
KEY = re.compile(rf"\b(?:{WITH_KEYS})\.\w+(?:\.\w+)*(?:=[\w.]+)?")


def join_keys(turn: tuple[str, ...]) -> str:
    """The remedies as a cell of a table, keys as code."""
    return "; ".join(KEY.sub(lambda key: f"`{key[0]}`", text) for text in turn)


def memory_table() -> str:
    """Phase, or who ran out of memory, and what to turn."""
    lines = ["| out of memory in | turn, in this order |", "|---|---|"]
    lines += [f"| {phase} | {join_keys(remedy.turn)} |" for phase, remedy in remedies.MEMORY.items() if phase != "eval"]
    lines += [f'| vLLM, "{words}" | {join_keys(turn)} |' for words, turn in remedies.VLLM_MEMORY.items()]
    lines.append(f"| host memory | {join_keys(remedies.HOST_MEMORY)} |")
    return "\n".join(lines) + "\n"


def metrics_table() -> str:
    """What the metrics show, and what to turn."""
    lines = ["| what the metrics show | try |", "|---|---|"]
    lines += [f"| {remedy.sign} | {join_keys(remedy.turn)} |" for remedy in remedies.METRICS.values()]
    return "\n".join(lines) + "\n"


def dead_table() -> str:
    """What shows that a run cannot learn, and what to turn."""
    lines = ["| what shows it | turn |", "|---|---|"]
    lines += [f"| {remedy.sign} | {join_keys(remedy.turn)} |" for remedy in remedies.DEAD.values()]
    return "\n".join(lines) + "\n"


def write_tables(page: str) -> str:
    """The text of the page with its tables as the lists are now."""
    for table in (memory_table(), metrics_table(), dead_table()):
        head = table[: table.index("\n")]
        before, found, rest = page.partition(head)
        if not found:
            raise ValueError(f"{PAGE} has no table that begins {head!r}")
        page = before + table + rest[rest.index("\n\n") + 1 :]
    return page


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
