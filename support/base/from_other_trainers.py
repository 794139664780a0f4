"""Answers unknown keys with ours where another trainer has one of that name.

The keys are in from_other_trainers.yaml beside this file; tools/translate.py writes whole configurations from them, and
the tables of docs/from-other-trainers.md. support/base/read_config.py imports this file where a key is unknown.
"""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.base.read_config import Loader, dotted_items

FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Row:
    """What stands here for a key of another trainer."""

    ours: str = ""  # our key; "" where there is nothing to set
    note: str = ""  # what to mind
    by: dict | str | None = None  # {their value: ours} or a function of tools/translate.py; None: the same value


Table = dict[str, Row]  # {their key: its row}


@functools.cache
def read_file() -> dict[str, dict]:
    """What the file says; nobody changes it."""
    return yaml.load(FILE.read_text(), Loader)


def read_tables() -> dict[str, Table]:
    """{trainer: its table}."""
    tables = {}
    for trainer, rows in read_file().items():
        if trainer != "defaults":
            tables[trainer] = {theirs: read_row(row) for theirs, row in rows.items()}
    return tables


def read_defaults() -> dict[str, dict[str, Any]]:
    """{trainer: {their key: the value that it has there unless it is set}}, where ours would be another."""
    return read_file()["defaults"]


def read_row(row: str | list) -> Row:
    """The Row of our key alone, or of [our key or null, note] and, where it is not the same, how to get the value."""
    if isinstance(row, str):
        return Row(row)
    ours, note, *by = row
    return Row(ours or "", note, *by)


def answer_keys(unknown: dict[str, Any], legal: list[str]) -> dict[str, str | None]:
    """{key: what to say of it} of unknown keys, {dotted key: value}; None where no other trainer has one like it.

    A section is answered key by key, if any of them has an answer. `legal`: our keys.
    """
    tables = read_tables()
    answers: dict[str, str | None] = {}
    for name, value in unknown.items():
        of_leaves = {key: answer(key, tables, legal) for key, _ in dotted_items({name: value})}
        if not any(of_leaves.values()):
            of_leaves = {name: None}
        answers |= of_leaves
    return answers


def answer(key: str, tables: dict[str, Table], legal: list[str]) -> str | None:
    """What to say of an unknown dotted key; None where no other trainer has it or one like it."""
    pairs = [(trainer, theirs) for trainer, table in tables.items() for theirs in table]
    trainer, theirs = max(pairs, key=lambda pair: likeness(key, pair[1], legal), default=("", ""))
    if not likeness(key, theirs, legal):
        return None
    row = tables[trainer][theirs]
    whose = f"of {trainer}" if key == theirs else f"like {theirs} of {trainer}"
    here = f"here {row.ours}" if row.ours else "nothing to set here"
    line = f"unknown key {key!r}, {whose}; {here}"
    return f"{line}: {row.note}" if row.note else line


def likeness(key: str, theirs: str, legal: list[str]) -> int:
    """How much an unknown key is like one of another trainer; 0: not at all.

    Above 100 where it is that key or in that section, the more the longer it is; else the number of names that both end
    with. One common name counts only if it has a "_" and no key of ours ends with it: then the section of one of ours
    may be misspelt.
    """
    if f"{key}.".startswith(f"{theirs}."):
        return 100 + len(theirs)
    pairs = zip(reversed(key.split(".")), reversed(theirs.split(".")), strict=False)
    common = [name for name, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if len(common) == 1:
        ours = {known.rpartition(".")[2] for known in legal}
        return int("_" in common[0] and common[0] not in ours)
    return len(common)
