"""Data as tables: the files or the hub data set that a name stands for, read with the `datasets` library, JSON apart.

docs/data.md says what is legal; all else is a ValueError that names the key, the file and the line or column. datasets
and pandas are imported where they are used: they take seconds of each rank's start.
"""

import glob
import json
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from grpo.parts.base import user_code
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import require_data

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
LEGAL = f"a file ending in {', '.join(KINDS)}, a glob, a folder, a hub name like owner/name:split, or a list of these"
# name, name:split or name:config:split, where the split may be a slice such as train[:100]
HUB_NAME = re.compile(r"([\w-]+|\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)(?=:))?(?::([\w.-]+(?:\[.*\])?))?")

Table = Any  # a datasets.Dataset, JsonLines, or a list of rows: of a JSON list, or of a function of the user's
Source = tuple[str, dict]  # name of a file or hub data set, arguments of datasets.load_dataset


def read_tables(cfg, value: str | list[str], key: str) -> list[tuple[str, Table]]:
    """(name, table) of all that `value`, given at `key`, stands for. Raises ValueError."""
    require_data(bool(value), f"{key}={value}: nothing to read; legal is {LEGAL}")
    names = [value] if isinstance(value, str) else list(map(str, value))
    if cfg.custom is not None:
        return [(name, custom_rows(cfg.custom, name, key)) for name in names]
    sources = [source for name in names for source in find_sources(name, cfg.split, key)]
    kinds = {arguments["path"]: file for file, arguments in sources if "data_files" in arguments}
    require_data(len(kinds) <= 1, f"{key} mixes file types ({', '.join(kinds.values())}); give files of one type")
    import datasets
    import pyarrow

    # Else each local file waits seconds for a network that is not there.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, and we say that ourselves
    tables = [(name, read_table(name, arguments, key)) for name, arguments in sources]
    pyarrow.default_memory_pool().release_unused()  # else a rank keeps what converting the files took
    return tables


def custom_rows(place: str, name: str, key: str) -> list[dict]:
    """The rows that the user's function `place`, data.custom, yields for a name in `key`. Raises ValueError."""
    function = user_code.load_function("data.custom", place)
    try:
        rows = list(function(name))
    except (Exception, SystemExit) as error:
        raise ValueError(f"data.custom={place}: for {key}={name} it failed: {user_code.last_line(error)}") from error
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"data.custom={place}: row {i} of {key}={name} is a {type(row).__name__}, not a dict")
    require_data(len(rows) > 0, f"data.custom={place}: it yields no rows for {key}={name}")
    return rows


class JsonFloat(float):
    """A number of a JSON file that is not whole; as text it is what the file has: 1.50 stays 1.50."""

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return str(self.text)


@dataclass
class JsonLines(Sequence):
    """The rows of JSON files, each parsed when it is read: a column has no type, so a row is what its line says."""

    files: list[mmap.mmap]
    places: ndarray  # int64 [rows, 3]: file, and where in it the row's line begins and ends

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> dict:
        file, start, end = self.places[i]
        return json.loads(self.files[file][start:end].decode(), parse_float=JsonFloat)


def read_json(file: str, name: str, key: str) -> Table:
    """A file of JSON with a list of objects, or an object on each line. Raises ValueError."""
    with open(file, "rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 3 if content[:3] == b"\xef\xbb\xbf" else 0  # a mark of UTF-8, as Windows writes it
    where = name
    try:
        if content[begin : begin + 4096].lstrip()[:1] == b"[":
            rows = json.loads(content[begin:].decode(), parse_float=JsonFloat)
            kind, numbers = "row", range(len(rows))
        else:
            ends = np.append(np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")), len(content))
            places = np.stack([np.zeros_like(ends), np.append(begin, ends[:-1] + 1), ends], axis=1)
            kind, numbers = "line", [n for n, (_, a, b) in enumerate(places) if content[a:b].strip()]
            rows = JsonLines([content], places[numbers])
        for i, number in enumerate(numbers):
            where = f"{name}, {kind} {number + 1}"
            require_data(isinstance(rows[i], dict), "not a JSON object")
    except ValueError as error:
        fault = f"not UTF-8, at byte {error.start}" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{key}: {where}: {fault}") from None
    require_data(len(rows) > 0, f"{key}: {name} has no rows")
    return rows


def columns_of(table: Table) -> list[str]:
    """The names of a table's columns, and of those inside dicts with dots."""
    if isinstance(table, (list, JsonLines)):
        names = (key for row in table for key in (*row, *dict(dotted_items(row))))
    else:
        names = [*table.features, *table.features.flatten()]
    return list(dict.fromkeys(map(str, names)))


def concatenate(tables: list[tuple[str, Table]], key: str) -> Table:
    """The tables of all that `key` names as one; a column that one of them lacks is null there. Raises ValueError."""
    import datasets

    parts = [table for _, table in tables]
    if all(isinstance(part, JsonLines) for part in parts):
        places = [part.places + np.array([number, 0, 0]) for number, part in enumerate(parts)]
        return JsonLines([part.files[0] for part in parts], np.concatenate(places))
    if isinstance(parts[0], (list, JsonLines)):
        return [row for rows in parts for row in rows]
    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise ValueError(f"{key}: a column must have one type in all files: {error}") from None


def rows_between(table: Table, start: int, stop: int) -> list[dict]:
    """The rows of a table from `start` up to `stop`, or to its end."""
    if isinstance(table, (list, JsonLines)):
        return [table[number] for number in range(start, min(stop, len(table)))]
    return [own_keys(row) for row in table.data.slice(start, stop - start).to_pylist()]


def own_keys(value: Any, chat: bool = False) -> Any:
    """A row of arrow without the nulls in its chat messages, where arrow gives each the keys of all others."""
    if isinstance(value, list):
        chat = chat or all(isinstance(item, dict) and "role" in item for item in value)
        return [own_keys(item, chat) for item in value]
    if isinstance(value, dict):
        lacks = {key for key, item in value.items() if chat and item is None and key != "content"}
        return {key: own_keys(item, chat) for key, item in value.items() if key not in lacks}
    return value


def held(table: Table, largest: int) -> Table:
    """The table as a list of its rows, if it takes less than `largest` bytes."""
    if isinstance(table, list):
        return table
    size = (table.places[:, 2] - table.places[:, 1]).sum() if isinstance(table, JsonLines) else table.data.nbytes
    return rows_between(table, 0, len(table)) if size < largest else table


def find_sources(name: str, split: str, key: str) -> list[Source]:
    """(name, arguments of datasets.load_dataset) of each file, or of the hub data set, that `name` stands for."""
    folder, _, named_split = (name, "", "") if os.path.exists(name) else name.partition(":")
    hub = HUB_NAME.fullmatch(name)
    if os.path.isfile(name) or "://" in name:
        files = [name]
    elif os.path.isdir(folder):
        files = folder_files(folder, named_split, split, key)
    elif hub and Path(name).suffix not in KINDS:
        return [(name, {"path": hub[1], "name": hub[2], "split": hub[3] or split})]
    else:
        files = sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())
    require_data(bool(files), f"{key}={name}: no such file; legal is {LEGAL}")
    for file in files:
        require_data(Path(file).suffix in KINDS, f"{key}: {file} is of no known type; legal is {LEGAL}")
    return [(file, {"path": KINDS[Path(file).suffix], "data_files": file, "split": "train"}) for file in files]


def folder_files(folder: str, named_split: str, split: str, key: str) -> list[str]:
    """The data files of a folder; of one that has several splits, by the names of its files, those of one split."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    try:
        splits = DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
    except EmptyDatasetError:
        raise ValueError(f"{key}: the folder {folder} is empty") from None
    wanted = named_split or (split if len(splits) > 1 else next(iter(splits)))
    # Dataset.save_to_disk and Dataset.map write further files beside the data.
    beside = re.compile(r"state\.json|cache-.*\.arrow")
    found = map(Path, sorted(splits.get(wanted, [])))
    files = [str(file) for file in found if file.suffix in KINDS and not beside.fullmatch(file.name)]
    require_data(
        bool(files),
        f"{key}: {folder} has no files of the split {wanted!r}; legal is {folder}:split with "
        f"{', '.join(map(str, splits))}, of files that end in {', '.join(KINDS)}",
    )
    return files


def read_table(name: str, arguments: dict, key: str) -> Any:
    """One file or hub data set as a datasets.Dataset; ValueError that names it, and line or column where known."""
    import datasets

    file = arguments.get("data_files", "")
    require_data(not Path(file).is_file() or Path(file).stat().st_size > 0, f"{key}: {name} is empty")
    if arguments["path"] == "json":  # arrow would give a column one type, and all its objects the same keys
        return read_json(datasets.DownloadManager().download(file) if "://" in file else file, name, key)
    try:
        if arguments["path"] == "csv":
            arguments = {**arguments, **csv_options(file)}
        table = datasets.load_dataset(**arguments)
        table.data.validate(full=True)  # not all readers check that text is UTF-8
        return table
    except Exception as error:  # datasets raises many kinds, of its own, pyarrow, pandas, the hub, the file system
        while error.__cause__:
            error = error.__cause__
        library = f": {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, UnicodeError):
            library = ": not UTF-8"
        elif str(getattr(error, "filename", "")).startswith(str(datasets.config.HF_CACHE_HOME)):
            library += ". The library writes what it reads there: set HF_HOME to a folder that can be written"
        if "corresponds to no data" in library or "BatchSize must be greater than 0" in library:
            library = " has no rows"
        raise ValueError(f"{key}: {name}{library}") from None


def csv_options(file: str) -> dict:
    """Options that read every column of a CSV file as text, so that 007 stays 007; only an empty field is null."""
    import datasets
    import pandas

    start = pandas.read_csv(file, nrows=1, dtype=str)
    require_data(
        isinstance(start.index, pandas.RangeIndex),
        "row 1 has more fields than the header; a text with commas must stand in quotes",
    )
    features = datasets.Features({str(column): datasets.Value("string") for column in start.columns})
    return {"features": features, "keep_default_na": False, "na_values": [""]}
