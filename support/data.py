"""Prompts from files or the hub: reading, tokenising, and the order steps see them in. Knows no tensors, no rewards.

`cfg` is the `data` section of the configuration. What is wrong with the data is a ValueError that names the key, the
file and the row or column. docs/data.md says what is legal.
datasets, pandas and transformers are imported where they are used: together they take seconds of each rank's start.
"""

import difflib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
LEGAL = f"a file ending in {', '.join(KINDS)}, a glob, a folder, a hub name like owner/name:split, or a list of these"
# name, name:split or name:config:split, where the split may be a slice such as train[:100]
HUB_NAME = re.compile(r"([\w-]+|\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)(?=:))?(?::([\w.-]+(?:\[.*\])?))?")


@dataclass
class Prompt:
    """One row of the data: its token ids, its source, and the row itself for the reward."""

    ids: list[int]
    answer: str
    source: str
    row: dict


def load_tokenizer(path: str):
    """The tokenizer of a Hugging Face folder or hub name. Raises ValueError."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a damaged file fails as code does, with any exception
        problem = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model.path={path}: its tokenizer cannot be read: {type(error).__name__}: {problem}"
        ) from None


def load_prompts(cfg, tokenizer, key: str = "train") -> tuple[list[Prompt], int]:
    """Read and tokenise the data named by `data.train` or, with key="eval", by `data.eval`.

    Returns the prompts in the order of the files and how many were dropped as too long. Raises ValueError.
    """
    if not cfg.chat_template and (cfg.system_prompt is not None or cfg.template_kwargs):
        raise ValueError("data.system_prompt and data.template_kwargs have an effect only with data.chat_template=true")
    tables = load_tables(getattr(cfg, key), cfg.split, f"data.{key}")
    rows = [(f"data.{key}: {name}, row {i}", row) for name, table in tables for i, row in enumerate(rows_of(table), 1)]
    check_columns(cfg, tables, rows)
    texts, answers = [], []
    for place, row in rows:
        try:
            texts.append(prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer))
            answers.append(answer_text(lookup(row, cfg.answer_key), cfg.answer_key))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    all_ids = tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]  # a template brings its own
    prompts = []
    for ids, answer, (place, row) in zip(all_ids, answers, rows, strict=True):
        if not ids:
            raise ValueError(
                f"{place}: {cfg.prompt_key!r} is empty: no tokens (data.prompt_key, or the tokenizer of model.path)"
            )
        source = lookup(row, cfg.source_key)
        if len(ids) <= cfg.max_prompt_tokens:
            prompts.append(Prompt(ids, answer, "default" if source is None else str(source), row))
    if not prompts:
        raise ValueError(
            f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all {len(rows)} prompts of {getattr(cfg, key)} are "
            f"longer; the shortest has {min(map(len, all_ids))} tokens"
        )
    return prompts, len(rows) - len(prompts)


def prompt_text(value: Any, cfg, tokenizer) -> str:
    """The text to tokenise for a row's prompt: itself, or written out by the tokenizer's chat template.

    Raises ValueError.
    """
    import jinja2

    key = cfg.prompt_key
    if value in (None, "", []):
        raise ValueError(f"{key!r} is {'null' if value is None else 'empty'}")
    if not isinstance(value, str) and not is_chat(value):
        raise ValueError(f"{key!r} is neither text nor a list of messages {{role, content}}: {str(value)[:80]}")
    if not cfg.chat_template:
        if isinstance(value, list):
            raise ValueError(f"{key!r} is a list of chat messages, which needs data.chat_template=true")
        return value
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    # A column gives all its messages the same keys; null stands for one that this message does not have.
    messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in chat]
    if cfg.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **cfg.template_kwargs
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise the first, or fail as code does
        raise ValueError(f"the tokenizer's chat template refuses {key!r} (data.chat_template): {error}") from None


def is_chat(value: Any) -> bool:
    """Whether this is a list of chat messages, each with a role and something said (or called)."""
    return isinstance(value, list) and all(
        isinstance(m, dict) and m.get("role") and (m.get("content"), m.get("tool_calls")) != (None, None) for m in value
    )


def answer_text(value: Any, key: str) -> str:
    """A row's reference answer as text: numbers as Python writes them, lists and objects as JSON. Raises ValueError."""
    if value is None:
        raise ValueError(f"{key!r} is null")
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if not isinstance(value, (str, int, float)):  # a date, whose text in the file is lost
        raise ValueError(
            f"{key!r} was read as a {type(value).__name__}; legal are text, numbers, lists and objects. Where a JSON "
            "file has only dates, its reader turns them into such; parquet keeps them as text"
        )
    return str(value)


def lookup(row: dict, key: str) -> Any:
    """row[key] or, for a dotted key that is no column itself, the value inside. None where there is nothing."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    return lookup(row[head], rest) if rest and isinstance(row.get(head), dict) else None


def check_columns(cfg, tables: list[tuple[str, Any]], rows: list[tuple[str, dict]]) -> None:
    """Raises ValueError for a key that no row has. Without `source_key` at its default every source is "default"."""
    file, table = tables[0]
    names = list(dict.fromkeys([*table.features, *table.features.flatten()]))  # those inside dicts with dots
    for option in ("prompt_key", "answer_key", "source_key"):
        key = getattr(cfg, option)
        known = key in names or any(lookup(row, key) is not None for _, row in rows)
        if not known and (option, key) != ("source_key", "source"):
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"data.{option}={key!r}: no such column in {file}; the nearest is {near!r}, all are {', '.join(names)}"
            )


def fingerprint(prompts: list[Prompt]) -> str:
    """16 hex digits that change with any token id, answer, source, or the order of the prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.ids, prompt.answer, prompt.source]).encode() + b"\n")
    return digest.hexdigest()[:16]


def rows_of(table: Any) -> Iterator[dict]:
    """The rows of a datasets.Dataset, read a thousand at a time, which takes a fifth of the time."""
    for block in table.iter(1000):
        for values in zip(*block.values(), strict=True):
            yield dict(zip(block, values, strict=True))


def load_tables(value: Any, split: str, key: str) -> list[tuple[str, Any]]:
    """(name, datasets.Dataset) of every file or hub data set that `value` stands for, all of one schema.

    Raises ValueError.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = (
        False  # or each local file waits seconds for a network that is not there
    )
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, and we say that ourselves
    names = [str(name) for name in (value if isinstance(value, (list, tuple)) else [value] if value else [])]
    if not names:
        raise ValueError(f"{key}={value}: nothing to read; legal is {LEGAL}")
    sources = [source for name in names for source in find_sources(name, split, key)]
    kinds = {arguments["path"]: file for file, arguments in sources if "data_files" in arguments}
    if len(kinds) > 1:
        raise ValueError(f"{key} mixes file types ({', '.join(kinds.values())}); give files of one type")
    tables = [(name, read_table(name, arguments, key)) for name, arguments in sources]
    first_name, first = tables[0]
    for name, table in tables[1:]:
        for column in sorted({*first.features, *table.features}):
            a = first.features.get(column, "absent")
            b = table.features.get(column, "absent")
            if a != b and datasets.Value("null") not in (a, b):
                raise ValueError(
                    f"{key}: {first_name} and {name} differ in the column {column!r}: {a} and {b}; "
                    "all files must have the same columns"
                )
    return tables


def find_sources(name: str, split: str, key: str) -> list[tuple[str, dict]]:
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
    if not files:
        raise ValueError(f"{key}={name}: no such file; legal is {LEGAL}")
    for file in files:
        if Path(file).suffix not in KINDS:
            raise ValueError(f"{key}: {file} is of no known type; legal is {LEGAL}")
    return [(file, {"path": KINDS[Path(file).suffix], "data_files": file, "split": "train"}) for file in files]


def folder_files(folder: str, named_split: str, split: str, key: str) -> list[str]:
    """The data files of a folder; of one that has several splits, by the names of its files, those of one split."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    try:
        splits = DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
    except EmptyDatasetError:
        splits = {}
    found: dict[str, list[str]] = {}
    for part, files in splits.items():
        for file in sorted(files):
            # what Dataset.save_to_disk and Dataset.map write beside the data is none
            if Path(file).suffix in KINDS and not re.fullmatch(r"state\.json|cache-.*\.arrow", Path(file).name):
                found.setdefault(str(part), []).append(file)
    if not found:
        raise ValueError(f"{key}: the folder {folder} has no data files; they end in {', '.join(KINDS)}")
    wanted = named_split or (split if len(found) > 1 else next(iter(found)))
    if wanted not in found:
        raise ValueError(f"{key}: {folder} has no split {wanted!r}; legal is {folder}:split with {', '.join(found)}")
    return found[wanted]


def read_table(name: str, arguments: dict, key: str) -> Any:
    """One file or hub data set as a datasets.Dataset.

    Raises ValueError that names it, and the line or column where that is known.
    """
    import datasets
    import pyarrow

    file = arguments.get("data_files", "")
    if Path(file).is_file() and not Path(file).stat().st_size:
        raise ValueError(f"{key}: {name} is empty")
    try:
        if arguments["path"] == "json":  # mixed columns are refused: the library would read the text "007" as 7
            arguments = {**arguments, "on_mixed_types": None, "parse_agent_traces": False}
        elif arguments["path"] == "csv":
            arguments = {**arguments, **csv_options(file)}
        table = datasets.load_dataset(**arguments)
    except Exception as error:  # datasets raises many kinds, of its own, pyarrow, pandas, the hub, the file system
        while error.__cause__:
            error = error.__cause__
        library = f": {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "corresponds to no data" in library or "BatchSize must be greater than 0" in library:
            library = " has no rows"
        raise ValueError(f"{key}: {name}{find_fault(file) or library}") from None
    for column in table.column_names:
        try:
            table.data[column].validate(full=True)
        except pyarrow.ArrowInvalid as error:  # not all readers check for UTF-8
            raise ValueError(f"{key}: {name}{find_fault(file) or f', column {column!r}: {error}'}") from None
    return table


def csv_options(file: str) -> dict:
    """Options that read every column of a CSV file as text, so that 007 stays 007; only an empty field is null."""
    import datasets
    import pandas

    start = pandas.read_csv(file, nrows=1, dtype=str)
    if not isinstance(start.index, pandas.RangeIndex):  # pandas would silently take the first field as an index
        raise ValueError("row 1 has more fields than the header; a text with commas must stand in quotes")
    features = datasets.Features({str(column): datasets.Value("string") for column in start.columns})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def find_fault(file: str) -> str:
    """What is wrong with a text file that could not be read, as ", line 7: ..."; "" if that cannot be told."""
    kind = KINDS.get(Path(file).suffix)
    if kind not in ("json", "csv") or not Path(file).is_file():
        return ""
    data = Path(file).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return f", line {line}: invalid UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
    if kind == "csv":
        return ""
    whole = text.lstrip().startswith("[")
    for i, document in enumerate([text] if whole else text.split("\n")):
        try:
            if document.strip() and not isinstance(json.loads(document), list if whole else dict):
                return f", line {i + 1}: not a JSON object"
        except json.JSONDecodeError as error:
            return f", line {i + error.lineno}: not JSON ({error.msg})"
    return ""


def prompt_batch(prompts: list[Prompt], taken: int, size: int, seed: int) -> list[Prompt]:
    """The `size` prompts after the first `taken` of an endless stream that is shuffled anew each epoch.

    A pure function of its arguments: the last partial batch of an epoch is filled from the next, and `taken` is all a
    resumed run needs to know.
    """
    batch, orders = [], {}
    for i in range(taken, taken + size):
        epoch, place = divmod(i, len(prompts))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        batch.append(prompts[orders[epoch][place]])
    return batch


def sampling_seed(seed: int, step: int, group: int) -> int:
    """Seed of a group's answers in vLLM. It depends on nothing else, so neither do the answers (engines, layout)."""
    return int(np.random.SeedSequence([seed, step, group]).generate_state(1)[0])
