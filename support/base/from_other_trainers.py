"""Answers unknown keys with ours where verl, TRL or ROLL has one of that name.

The tables of docs/from-other-trainers.md are the data. support/base/read_config.py imports this file where a key is
unknown.
"""

import itertools
import re
from typing import Any

from support.base.processes import REPO
from support.base.read_config import dotted_items

PAGE = REPO / "docs/from-other-trainers.md"
ROW = re.compile(r"^\| `(.+)` \| (?:`(.+)`|–) \| (?:(.+) )?\|$", re.MULTILINE)
Table = dict[str, tuple[str, str]]  # {their key: (ours, or "" where there is nothing to set; what to mind)}


def read_tables() -> dict[str, Table]:
    """{trainer: its table} of the page; {} in a copy without it."""
    if not PAGE.exists():
        return {}
    tables = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        trainer, _, rows = section.partition("\n")
        tables[trainer] = {theirs: (ours, note) for theirs, ours, note in ROW.findall(rows)}
    return tables


def answer_keys(unknown: dict[str, Any], legal: list[str]) -> dict[str, str | None]:
    """{key: what to say of it} of unknown keys, {dotted key: value}; None where no other trainer has one like it.

    A section is answered key by key, if any of them has an answer. `legal`: our keys.
    """
    tables = read_tables()
    answers: dict[str, str | None] = {}
    for name, value in unknown.items():
        of_leaves = {key: translate(key, tables, legal) for key, _ in dotted_items({name: value})}
        if not any(of_leaves.values()):
            of_leaves = {name: None}
        answers |= of_leaves
    return answers


def translate(key: str, tables: dict[str, Table], legal: list[str]) -> str | None:
    """What to say of an unknown dotted key; None where no other trainer has it or one like it."""
    pairs = [(trainer, theirs) for trainer, table in tables.items() for theirs in table]
    trainer, theirs = max(pairs, key=lambda pair: likeness(key, pair[1], legal), default=("", ""))
    if not likeness(key, theirs, legal):
        return None
    ours, note = tables[trainer][theirs]
    whose = f"of {trainer}" if key == theirs else f"like {theirs} of {trainer}"
    here = f"here {ours}" if ours else "nothing to set here"
    line = f"unknown key {key!r}, {whose}; {here}"
    return f"{line}: {note}" if note else line


def likeness(key: str, theirs: str, legal: list[str]) -> int:
    """How much an unknown key is like one of another trainer; 0: not at all.

    100 where it is that key or in that section; else the number of names that both end with. One common name counts
    only if it has a "_" and no key of ours ends with it: then the section of one of ours may be misspelt.
    """
    if f"{key}.".startswith(f"{theirs}."):
        return 100
    pairs = zip(reversed(key.split(".")), reversed(theirs.split(".")), strict=False)
    common = [name for name, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if len(common) == 1:
        ours = {known.rpartition(".")[2] for known in legal}
        return int("_" in common[0] and common[0] not in ours)
    return len(common)
