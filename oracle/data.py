"""Rows of the data and the prompts that they become, read apart from the script.

`data` is that section of the configuration. Only `rows_of` asks the script, for rows that are in no plain file.
"""

import csv
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """A row of the data: the token ids of its prompt, its source, and what its reward gets."""

    ids: list[int]
    answer: str | list | dict
    source: str
    row: dict
    asked: list[int] | None  # the prompt with its hint, for the teacher


# ---------------------------------------------------------------- rows


class Written(float):
    """A number of a JSON text, which stays as it is written: 1.50."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def rows_of(name, data, key):
    """The rows of an entry of data.train or data.eval."""
    files = files_at(name)
    if data.custom is None and files and all(map(is_plain, files)):
        return [row for file in files for row in READERS[Path(file).suffix](file)]

    # A data set of the hub, an address, a folder, another kind of file, the user's own function.
    from grpo.parts.data.tables import read_tables, rows_between

    tables = read_tables(data, name, f"data.{key}")
    return [row for _, table in tables for row in rows_between(table, 0, len(table))]


def files_at(name):
    """The files that a path or a pattern stands for."""
    return [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))


def is_plain(file):
    """Whether READERS give what the file says. Of parquet they do not know float32 and the type Json of datasets."""
    if Path(file).suffix != ".parquet":
        return Path(file).suffix in READERS
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(file)
    return "float" not in str(schema.types) and '"Json"' not in str(schema.metadata)  # float64 is "double"


def read_json(file):
    """An object on each line, or a list of objects."""
    text = Path(file).read_text("utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text, parse_float=Written)
    return [json.loads(line, parse_float=Written) for line in text.split("\n") if line.strip()]


def read_csv(file):
    """All columns are text; an empty field is null."""
    with open(file, newline="", encoding="utf-8-sig") as opened:
        return [{name: text or None for name, text in row.items()} for row in csv.DictReader(opened)]


def read_parquet(file):
    import pyarrow.parquet

    return [without_nulls(row) for row in pyarrow.parquet.read_table(file).to_pylist()]


READERS = {".json": read_json, ".jsonl": read_json, ".csv": read_csv, ".parquet": read_parquet}


def without_nulls(value, in_chat=False):
    """Arrow gives each message the keys of all others, as nulls; the content alone may be one."""
    if isinstance(value, list):
        in_chat = in_chat or all(isinstance(part, dict) and "role" in part for part in value)
        return [without_nulls(part, in_chat) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_nulls(part, in_chat or name in ("tools", "chat_template_kwargs"))
        for name, part in value.items()
        if not in_chat or part is not None or name == "content"
    }


def lookup(row, key):
    """The column of this name or, at a dot, the field of an object."""
    if key in row or "." not in key:
        return row.get(key)
    first, rest = key.split(".", 1)
    return lookup(row[first], rest) if isinstance(row.get(first), dict) else None


# ---------------------------------------------------------------- prompts


class Prompts(Sequence):
    """The prompts of rows, without those that are too long; each is made when it is asked for."""

    def __init__(self, rows, data, tokenizer):
        self.data = data
        self.tokenizer = tokenizer

        # The model goes on from a prompt, so the end token that some tokenizers add to a text is left out.
        bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        self.adds_end = not data.chat_template and bare[-1:] != [tokenizer.eos_token_id] == whole[-1:]
        self.rows = [row for row in rows if max(map(len, self.ids_of(row))) <= data.max_prompt_tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        answer = lookup(row, self.data.answer_key)
        source = lookup(row, self.data.source_key)
        ids, *asked = self.ids_of(row)
        return Prompt(
            ids,
            answer if isinstance(answer, (list, dict)) else str(answer),
            "default" if source is None else str(source),
            row,
            asked[0] if asked else None,
        )

    def ids_of(self, row):
        """The token ids of a row's prompt and, with data.hint_key, of that with its hint."""
        texts = [self.text_of(row, "")]
        if self.data.hint_key is not None:
            hint = lookup(row, self.data.hint_key)
            is_tree = isinstance(hint, (list, dict))
            texts.append(self.text_of(row, json.dumps(hint, ensure_ascii=False) if is_tree else str(hint)))

        # A template writes special tokens of its own.
        found = self.tokenizer(texts, add_special_tokens=not self.data.chat_template)["input_ids"]
        return [ids[:-1] for ids in found] if self.adds_end else found

    def text_of(self, row, hint):
        """The text of a row's prompt, with the hint before what the user says last."""
        data = self.data
        value = lookup(row, data.prompt_key)
        if not data.chat_template:
            return hint + value

        chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages = [{k: part for k, part in m.items() if part is not None or k == "content"} for m in chat]
        if hint:
            last = [m for m in messages if m["role"] == "user" and isinstance(m.get("content"), str)][-1]
            last["content"] = hint + last["content"]
        if data.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": data.system_prompt})

        # The row may have options of its own. If the last message is the assistant's, the model goes on with it.
        options = data.template_kwargs | (from_json(row.get("chat_template_kwargs")) or {})
        if tools := from_json(row.get("tools")):
            options["tools"] = tools
        if data.date is not None:
            options["strftime_now"] = data.date.strftime
        goes_on = messages[-1]["role"] == "assistant"
        options |= {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)


def from_json(value):
    """A column of objects, which may be JSON text."""
    return json.loads(value) if isinstance(value, str) and value else value


def names_of(value):
    """The names that data.train or data.eval has, or one set of a mixture."""
    return [value] if isinstance(value, str) else [*(value or ())]


def files_of(data):
    """The files of data.train and data.eval that lie here."""
    return [file for value in (data.train, data.eval) for name in names_of(value) for file in files_at(name)]


def read_sets(data, key, tokenizer):
    """(weight, prompts) of each set of data.train or data.eval."""
    value = getattr(data, key)
    if key == "eval":  # which has no teacher
        data = data.model_copy(update={"hint_key": None})

    found = []
    for part, weight in value.items() if isinstance(value, dict) else [(value, 1.0)]:
        rows = [row for name in names_of(part) for row in rows_of(name, data, key)]
        found.append((weight, Prompts(rows, data, tokenizer)))
    return found
