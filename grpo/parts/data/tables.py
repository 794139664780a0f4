"""The first stage: rows, read from the files or the hub data set that a name stands for.

JSON and csv are read here, into memory, everything else by the `datasets` library. docs/data.md says what is allowed.
Anything else is a ValueError that names the key, the file and the line or column. datasets is imported where it is
used, since it takes seconds of each rank's start.
"""

import contextlib
import csv
import glob
import json
import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

from grpo.parts.base import user_code
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import brief, require_data

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
ALLOWED = f"use a file ending in {', '.join(KINDS)}, a glob, a folder, a hub name like owner/name:split, or a list"
# name, name:split or name:config:split, where the split may be a slice such as train[:100]
HUB_NAME = re.compile(r"([\w-]+|\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)(?=:))?(?::([\w.-]+(?:\[.*\])?))?")
TEMPLATE_KEYS = {"chat_template_kwargs": dict, "tools": list}  # columns for the chat template, as TRL names them

Table = Any  # a datasets.Dataset, or else a list of dicts
Source = tuple[str, dict]  # name of a file or hub data set, arguments of datasets.load_dataset


def read_tables(cfg, value: str | list[str], key) -> list[tuple[str, Table]]:
    """(name, table) of everything that `value`, given at `key`, stands for. Raises ValueError."""
    require_data(bool(value), f"{key}={value}: nothing to read; {ALLOWED}")
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    if cfg.custom is not None:
        return [(name, custom_rows(cfg.custom, name, key)) for name in names]

    sources = [source for name in names for source in find_sources(name, cfg.split, key)]
    kinds = {arguments["path"]: file for file, arguments in sources if "data_files" in arguments}
    require_data(len(kinds) <= 1, f"{key} mixes file types ({', '.join(kinds.values())}); give files of one type")

    return [(name, read_table(name, arguments, key)) for name, arguments in sources]


def custom_rows(place, name, key) -> list[dict]:
    """The rows that the user's function `place`, data.custom, yields for a name in `key`. Raises ValueError."""
    function = user_code.load_function("data.custom", place)
    try:
        rows = list(function(name))
    except (Exception, SystemExit) as error:
        raise ValueError(f"data.custom={place}: for {key}={name} it failed: {user_code.last_line(error)}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"data.custom={place}: row {number} of {key}={name} is a {type(row).__name__}, not a dict")
    require_data(len(rows) > 0, f"data.custom={place}: it yields no rows for {key}={name}")
    return rows


# ---------------------------------------------------------------- which files


def find_sources(name, split, key) -> list[Source]:
    """(name, arguments of datasets.load_dataset) of each file, or of the hub data set, that `name` stands for."""
    folder, named = name, []
    if not os.path.exists(name):
        folder, *named = name.split(":", 2)
    hub = HUB_NAME.fullmatch(name)
    if os.path.isfile(name) or "://" in name:
        files = [name]
    elif os.path.isdir(folder):
        files = folder_files(folder, named, split, key)
    elif hub and Path(name).suffix not in KINDS:
        return [(name, {"path": hub[1], "name": hub[2], "split": hub[3] or split})]
    else:
        files = sorted(file for file in glob.glob(name, recursive=True) if os.path.isfile(file))

    require_data(bool(files), f"{key}={name}: no such file; {ALLOWED}")
    sources = []
    for file in files:
        kind = KINDS.get(Path(file).suffix)
        require_data(kind is not None, f"{key}: {file} is of no known type; {ALLOWED}")
        sources.append((file, {"path": kind, "data_files": file, "split": "train"}))
    return sources


def folder_files(folder, named: list[str], split, key) -> list[str]:
    """The data files of a folder. If its README.md or the names of its files make several splits, those of one.

    `named` is [], [split] or [configuration, split].
    """
    try:
        splits = quiet_datasets().load_dataset_builder(folder, *named[:-1]).config.data_files
    except Exception as error:  # a card may be any text
        raise ValueError(f"{key}: {folder} (use FOLDER:SPLIT or FOLDER:CONFIGURATION:SPLIT): {brief(error)}") from None
    wanted = named[-1] if named else split if len(splits) > 1 else next(iter(splits))

    # Dataset.save_to_disk and Dataset.map write further files beside the data.
    beside = re.compile(r"state\.json|cache-.*\.arrow")
    files = []
    for file in sorted(splits.get(wanted, [])):
        path = Path(file)
        if path.suffix in KINDS and not beside.fullmatch(path.name):
            files.append(str(path))
    require_data(
        bool(files),
        f"{key}: {folder} has no data files of the split {wanted!r}; give {folder}:split with one of "
        f"{', '.join(map(str, splits))}",
    )
    return files


# ---------------------------------------------------------------- one file


def read_table(name, arguments: dict, key) -> Table:
    """The rows of one file or hub data set. Raises ValueError that names it, and line or column where known."""
    file = arguments.get("data_files", "")
    if "://" in file:
        file = quiet_datasets().DownloadManager().download(file)
    if arguments["path"] == "json":  # arrow would give a column one type, and all its objects the same keys
        return read_json(file, f"{key}: {name}")
    try:
        return read_csv(file) if arguments["path"] == "csv" else read_arrow(arguments)
    except Exception as error:  # datasets raises many kinds, of its own, pyarrow, the hub, the file system
        while error.__cause__:
            error = error.__cause__
        problem = brief(error)
        if "corresponds to no data" in problem or "BatchSize must be greater than 0" in problem:
            problem = "it has no rows"
        raise ValueError(f"{key}: {name}: {problem}") from None


def quiet_datasets():
    """The module `datasets`."""
    import datasets

    # Without this, each local file waits seconds for a network that is not there.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, and our error says that
    return datasets


def read_arrow(arguments: dict) -> Table:
    """What datasets.load_dataset returns."""
    import pyarrow

    table = quiet_datasets().load_dataset(**arguments)
    table.data.validate(full=True)  # not all readers check that text is UTF-8
    pyarrow.default_memory_pool().release_unused()  # a rank would keep what converting the file took
    return table


def read_csv(file) -> list[dict]:
    """The rows of a CSV file, every column as text, so that 007 stays 007. Only an empty field is null."""
    rows = []
    with open(file, newline="", encoding="utf-8-sig") as opened:
        for number, row in enumerate(csv.DictReader(opened), 1):
            if None in row:
                raise ValueError(
                    f"row {number} has more fields than the header; a text with commas must stand in quotes"
                )
            rows.append({column: text or None for column, text in row.items()})
    require_data(bool(rows), "it has no rows")
    return rows


class JsonFloat(float):
    """A number of a JSON file that is not whole. As text it is what the file has: 1.50 stays 1.50."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text

    def __reduce__(self):  # a reward gets a plain float
        return float, (float(self),)


def parse_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, which may begin with a mark, as Windows writes it.

    Raises ValueError, and RecursionError if too many lists or objects are inside each other.
    """
    return json.loads(content.decode("utf-8-sig").rstrip(), parse_float=JsonFloat)


def read_json(file, label) -> list[dict]:
    """The rows of a JSON file: a list of objects, or an object on each line. Raises ValueError, after `label`."""
    content = Path(file).read_bytes()
    is_list = content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")

    rows = []
    where = label
    try:
        for number, item in enumerate(parse_json(content) if is_list else content.split(b"\n"), 1):
            where = f"{label}, {'row' if is_list else 'line'} {number}"
            if is_list or item.strip():
                rows.append(item if is_list else parse_json(item))
                require_data(isinstance(rows[-1], dict), "not a JSON object")
    except RecursionError:
        raise ValueError(f"{where}: too many lists or objects are inside each other") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    require_data(bool(rows), f"{label} has no rows")
    return rows


# ---------------------------------------------------------------- tables, whatever they were read from


def is_arrow(table: Table) -> bool:
    """Whether a table is a datasets.Dataset, which takes seconds to import."""
    return hasattr(table, "features")


def columns_of(table: Table) -> list[str]:
    """The names of a table's columns, and with dots the names inside objects."""
    names = []
    rows = table
    if is_arrow(table):
        names = [*table.features, *table.features.flatten()]
        rows = rows_between(table, 0, 100)  # for the names in columns of type Json
    names += (key for row in rows for key in (*row, *dict(dotted_items(row))))
    return list(dict.fromkeys(map(str, names)))


def concatenate(tables: list[tuple[str, Table]], key) -> Table:
    """All tables of `key` as one. A column that one of them lacks is null there. Raises ValueError."""
    parts = [table for _, table in tables]
    if not is_arrow(parts[0]):
        return [*chain(*parts)]
    try:
        return quiet_datasets().concatenate_datasets(parts)
    except ValueError as error:
        raise ValueError(f"{key}: a column must have one type in all files: {error}") from None


def hold_small(table: Table, limit) -> Table:
    """The table as a list of its rows, unless these lie in files of `limit` bytes or more."""
    is_large = is_arrow(table) and table.data.nbytes >= limit
    return table if is_large else rows_between(table, 0, len(table))


def rows_between(table: Table, start, stop) -> list[dict]:
    """The rows of a table from `start` up to `stop`."""
    if not is_arrow(table):
        return table[start:stop]

    part = table.data.slice(start, stop - start)
    rows = [own_keys(row) for row in part.to_pylist()]
    for column in part.schema:
        if re.search("float|json", str(column.type)):  # arrow calls float64 "double"
            for row in rows:
                row[column.name] = as_written(row[column.name], column.type)
    return rows


def as_written(value: Any, kind) -> Any:
    """A value of an arrow type. JSON of the type Json is decoded, each null and key as its text has it.

    A float32 becomes the shortest decimal that reads as it: 0.1, not 0.10000000149.
    """
    if isinstance(value, dict):
        return {key: as_written(item, kind.field(key).type) for key, item in value.items()}
    if isinstance(value, list):
        return [as_written(item, kind.value_type) for item in value]
    if isinstance(value, float):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, str) and "json" in str(kind):
        with contextlib.suppress(ValueError, RecursionError):  # `datasets` leaves a text such as 007 as it is
            return parse_json(value.encode())
    return value


def own_keys(value: Any, in_chat=False) -> Any:
    """A row of arrow without the nulls in its messages and TEMPLATE_KEYS, where arrow gives each all others' keys."""
    if isinstance(value, list):
        in_chat = in_chat or all(isinstance(item, dict) and "role" in item for item in value)
        return [own_keys(item, in_chat) for item in value]
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if not in_chat or item is not None or key == "content":
                kept[key] = own_keys(item, in_chat or key in TEMPLATE_KEYS)
        return kept
    return value
