"""The first stage: rows, read from the files or the hub data set that a name stands for.

JSON is read here, everything else by the `datasets` library. docs/data.md says what is allowed. Anything else is a
ValueError that names the key, the file and the line or column. datasets and pandas are imported where they are used,
since they take seconds of each rank's start.
"""

import contextlib
import glob
import json
import os
import pickle
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import ConcatDataset

from config import RankError
from grpo.parts.base import user_code
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import require_data

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
ALLOWED = f"use a file ending in {', '.join(KINDS)}, a glob, a folder, a hub name like owner/name:split, or a list"
# name, name:split or name:config:split, where the split may be a slice such as train[:100]
HUB_NAME = re.compile(r"([\w-]+|\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)(?=:))?(?::([\w.-]+(?:\[.*\])?))?")
OPENING = re.compile(r"[^\[]*\[[ \t\r\n]*")  # of a JSON list
COMMA = re.compile(r"[ \t\r\n]*(?:,[ \t\r\n]*|(?=\]\s*\Z))")  # between its items, or before its end

TEMPLATE_KEYS = {"chat_template_kwargs": dict, "tools": list}  # columns for the chat template, as TRL names them

Table = Any  # a datasets.Dataset, or else a sequence of dicts
Source = tuple[str, dict]  # name of a file or hub data set, arguments of datasets.load_dataset


def read_tables(cfg, value: str | list[str], key) -> list[tuple[str, Table]]:
    """(name, table) of everything that `value`, given at `key`, stands for. Raises ValueError."""
    require_data(bool(value), f"{key}={value}: nothing to read; {ALLOWED}")
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    if cfg.custom is not None:
        return [(name, custom_rows(cfg.custom, name, key)) for name in names]

    if any("://" in name or KINDS.get(Path(name).suffix) != "json" for name in names):
        set_up_datasets()
    sources = [source for name in names for source in find_sources(name, cfg.split, key)]
    kinds = {arguments["path"]: file for file, arguments in sources if "data_files" in arguments}
    require_data(len(kinds) <= 1, f"{key} mixes file types ({', '.join(kinds.values())}); give files of one type")

    tables = [(name, read_table(name, arguments, key)) for name, arguments in sources]
    if is_arrow(tables[0][1]):
        import pyarrow

        pyarrow.default_memory_pool().release_unused()  # a rank would keep what converting the files took
    return tables


def set_up_datasets():
    import datasets

    # Without this, each local file waits seconds for a network that is not there.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, and our error says that


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
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    card = Path(folder, "README.md")
    try:
        if named[1:] or (card.is_file() and re.search(rb"^configs:", card.read_bytes(), re.MULTILINE)):
            splits = datasets.load_dataset_builder(folder, *named[:-1]).config.data_files
        else:
            splits = DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
    except Exception as error:  # a card may be any text
        problem = " ".join(str(error).split())
        raise ValueError(f"{key}: {folder} (use FOLDER:SPLIT or FOLDER:CONFIGURATION:SPLIT): {problem}") from None
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
    # Arrow would give a column of JSON one type, and all its objects the same keys.
    is_json = arguments["path"] == "json"
    if is_json and "://" not in arguments["data_files"]:
        return read_json(arguments["data_files"], f"{key}: {name}")

    import datasets

    if is_json:
        return read_json(datasets.DownloadManager().download(arguments["data_files"]), f"{key}: {name}")
    try:
        if arguments["path"] == "csv":
            arguments = arguments | csv_options(arguments["data_files"])
        table = datasets.load_dataset(**arguments)
        table.data.validate(full=True)  # not all readers check that text is UTF-8
    except Exception as error:  # datasets raises many kinds, of its own, pyarrow, pandas, the hub, the file system
        while error.__cause__:
            error = error.__cause__
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "corresponds to no data" in problem or "BatchSize must be greater than 0" in problem:
            problem = "it has no rows"
        raise ValueError(f"{key}: {name}: {problem}") from None
    return table


def csv_options(file) -> dict:
    """Options that read every column of a CSV file as text, so that 007 stays 007. Only an empty field is null."""
    import datasets
    import pandas

    start = pandas.read_csv(file, nrows=1, dtype=str)
    require_data(
        isinstance(start.index, pandas.RangeIndex),
        "row 1 has more fields than the header; a text with commas must stand in quotes",
    )
    features = datasets.Features({str(column): datasets.Value("string") for column in start.columns})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


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
    value = json.loads(content.decode("utf-8-sig").rstrip(), parse_float=JsonFloat)
    if content.count(b"[") + content.count(b"{") > 200:
        pickle.dumps(value)  # as the grading will, which fails at half the depth that json allows
    return value


@dataclass
class JsonRows(Sequence):
    """The rows of a JSON file, each read when it is needed. A column has no type: a row is what its text says.

    Raises RankError if a row is no longer what it was.
    """

    opened: BinaryIO  # not mapped: reading a mapped file that was cut ends the process
    places: array = field(default_factory=lambda: array("q"))  # first byte, bytes and CRC-32 of each row

    def __len__(self):
        return len(self.places) // 3

    def __getitem__(self, i) -> dict:
        start, size, crc = self.places[3 * i : 3 * i + 3]
        text = os.pread(self.opened.fileno(), size, start)
        if zlib.crc32(text) != crc:
            name = self.opened.name
            raise RankError(f"{name} was changed while the run reads it: restore it, then go on with resume=auto")
        return parse_json(text)


def read_json(file, label) -> JsonRows:
    """The rows of a JSON file: a list of objects, or an object on each line. Raises ValueError, after `label`."""
    opened = open(file, "rb")  # noqa: SIM115 (its rows are read later)
    is_list = opened.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    pieces = list_items(opened.read()) if is_list else lines(opened)

    rows = JsonRows(opened)
    where = label
    try:
        for number, (start, text) in enumerate(pieces, 1):
            where = f"{label}, {'row' if is_list else 'line'} {number}"
            if text.strip():
                require_data(isinstance(parse_json(text), dict), "not a JSON object")
                rows.places.extend((start, len(text), zlib.crc32(text)))
            where = label
    except RecursionError:
        raise ValueError(f"{where}: too many lists or objects are inside each other") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

    require_data(len(rows) > 0, f"{label} has no rows")
    return rows


def lines(opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(first byte, text) of each line of a file."""
    for line in opened:
        yield opened.tell() - len(line), line


def list_items(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(first byte, text) of each item of a JSON list. Raises ValueError."""
    text = content.decode("latin-1")  # one character for each byte, so that places in it are places in the file
    decoder = json.JSONDecoder()
    start = OPENING.match(text).end()
    while text[start : start + 1] != "]":
        _, stop = decoder.raw_decode(text, start)
        yield start, content[start:stop]

        comma = COMMA.match(text, stop)
        if comma is None:
            raise json.JSONDecodeError("Expecting ',' or the end of the list", text, stop)
        start = comma.end()


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
        return ConcatDataset(parts)

    import datasets

    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise ValueError(f"{key}: a column must have one type in all files: {error}") from None


def hold_small(table: Table, limit) -> Table:
    """The table as a list of its rows, if it takes fewer than `limit` bytes."""
    if is_arrow(table):
        size = table.data.nbytes
    else:
        size = sum(sum(part.places[1::3]) for part in table.datasets if isinstance(part, JsonRows))
    return rows_between(table, 0, len(table)) if size < limit else table


def rows_between(table: Table, start, stop) -> list[dict]:
    """The rows of a table from `start` up to `stop`."""
    if not is_arrow(table):
        return [table[number] for number in range(start, stop)]

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
