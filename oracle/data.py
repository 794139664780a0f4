"""Rows of the data and the prompts that they become, read apart from the script: pyarrow, jinja2, tokenizers.

`data` is that section of the configuration. Only `rows_of` asks the script, where rows are not in plain files.
"""

import csv
import datetime
import glob
import itertools
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo.parts.base import user_code

END = "⟪the model goes on here⟫ "  # stands in a message that the model continues; its space shows what a template trims


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

    def __new__(cls, text):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self):
        return self.text


def rows_of(name, data, key):
    """The rows of an entry of data.train or data.eval."""
    if data.custom is not None:
        return [*user_code.load_function("data.custom", data.custom)(name)]
    files = files_at(name)
    if files and all(Path(file).suffix in READERS for file in files):
        found = [READERS[Path(file).suffix](file) for file in files]
        if None not in found:
            return [*itertools.chain(*found)]

    # A data set of the hub, an address, a folder, columns of the type Json.
    from grpo.parts.data.tables import read_tables, rows_between

    tables = read_tables(data, name, f"data.{key}")
    return [row for _, table in tables for row in rows_between(table, 0, len(table))]


def files_at(name):
    """The files that a path or a pattern stands for."""
    return [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))


def files_of(data):
    """The files of data.train and data.eval that lie here."""
    names = [
        name for value in (data.train, data.eval) if value for name in ([value] if isinstance(value, str) else value)
    ]
    return [file for name in names for file in files_at(name)]


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

    return rows_of_arrow(pyarrow.parquet.read_table(file))


def read_arrow(file):
    import pyarrow.ipc

    try:
        return rows_of_arrow(pyarrow.ipc.open_file(file).read_all())
    except pyarrow.ArrowInvalid:
        return rows_of_arrow(pyarrow.ipc.open_stream(file).read_all())


READERS = {
    ".json": read_json, ".jsonl": read_json, ".csv": read_csv, ".parquet": read_parquet, ".arrow": read_arrow,
}  # fmt: skip


def rows_of_arrow(table):
    """Rows whose float32 are as short as they were written, and whose messages have only keys of their own."""
    if b'"Json"' in (table.schema.metadata or {}).get(b"huggingface", b""):
        return None
    columns = [[own_value(value, column.type) for value in column.to_pylist()] for column in table.columns]
    return [without_nulls(dict(zip(table.column_names, row, strict=True))) for row in zip(*columns, strict=True)]


def own_value(value, kind):
    """A value of an arrow type."""
    if isinstance(value, dict):
        return {name: own_value(part, kind.field(name).type) for name, part in value.items()}
    if isinstance(value, list):
        return [own_value(part, kind.value_type) for part in value]
    if isinstance(value, float) and str(kind) in ("float", "halffloat"):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


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


def as_text(value):
    """A reference answer; lists and objects stay what they are."""
    return value if isinstance(value, (list, dict)) else str(value)


# ---------------------------------------------------------------- prompts


class Prompts(Sequence):
    """The prompts of rows, without those that are too long; each is made when it is asked for.

    `tokenizer` is what transformers makes of the `folder` of the model: its template, its end token.
    """

    def __init__(self, rows, data, tokenizer, folder):
        self.data = data
        self.write = template_writer(data, tokenizer) if data.chat_template else lambda prompt, hint, row: hint + prompt

        # Tokens have a character at least, and the tokenizer may put a few before. Others are counted.
        texts = [max(self.texts(row), key=len) for row in rows]
        self.encode = encoder(tokenizer, folder, data.chat_template, texts[:50])
        limit = data.max_prompt_tokens
        long = [n for n, text in enumerate(texts) if len(text) + 8 > limit or not text.isascii()]
        sizes = [max(map(len, self.encode(self.texts(rows[n])))) for n in long]
        dropped = {n for n, size in zip(long, sizes, strict=True) if size > limit}
        self.rows = [row for n, row in enumerate(rows) if n not in dropped]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        answer = lookup(row, self.data.answer_key)
        source = lookup(row, self.data.source_key)
        ids, *asked = self.encode(self.texts(row))
        return Prompt(
            ids,
            answer if isinstance(answer, (list, dict)) else str(answer),
            "default" if source is None else str(source),
            row,
            asked[0] if asked else None,
        )

    def texts(self, row):
        """The text of a row's prompt and, with data.hint_key, that with its hint."""
        prompt = lookup(row, self.data.prompt_key)
        hints = [""]
        if self.data.hint_key is not None:
            hints.append(as_json(lookup(row, self.data.hint_key)))
        return [self.write(prompt, hint, row) for hint in hints]


def read_sets(data, key, tokenizer, folder):
    """(weight, prompts) of each set of data.train or data.eval."""
    value = getattr(data, key)
    if key == "eval":  # which has no teacher
        data = data.model_copy(update={"hint_key": None})

    found = []
    for name, weight in value.items() if isinstance(value, dict) else [(value, 1.0)]:
        names = [name] if isinstance(name, str) else name
        rows = [row for one in names for row in rows_of(one, data, key)]
        found.append((weight, Prompts(rows, data, tokenizer, folder)))
    return found


def as_json(value):
    """A value as text: lists and objects as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)


def encoder(tokenizer, folder, is_templated, some):
    """A function from texts to the ids of each, without an end token. A template brings special tokens of its own.

    It reads tokenizer.json. Where transformers reads `some` of the texts otherwise, of which the start of the run has
    warned, or where there is no such file, transformers reads them all.
    """

    def by_transformers(texts, special=not is_templated):
        return tokenizer(texts, add_special_tokens=special)["input_ids"]

    def by_file(texts):
        return [found.ids for found in plain.encode_batch_fast(texts, add_special_tokens=not is_templated)]

    read = by_transformers
    file = Path(folder, "tokenizer.json")
    if file.exists():
        plain = tokenizers.Tokenizer.from_file(str(file))
        plain.no_truncation()
        plain.no_padding()
        plain.add_tokens([*tokenizer.added_tokens_decoder.values()])  # tokenizer_config.json may have others
        if by_file(some) == by_transformers(some):
            read = by_file

    end = [tokenizer.eos_token_id]
    bare, whole = (by_transformers(["a"], special)[0][-1:] for special in (False, not is_templated))
    if whole == end != bare:
        return lambda texts: [ids[:-1] for ids in read(texts)]
    return read


def template_writer(data, tokenizer):
    """A function from a prompt, a hint and their row to what the chat template writes."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    date = data.date or datetime.datetime.now()
    environment.globals |= {"raise_exception": refuse, "strftime_now": date.strftime, **tokenizer.special_tokens_map}

    # Tags around what an assistant writes are for training on whole chats: here they change nothing.
    found = tokenizer.chat_template
    templates = {}
    for name, text in (found if isinstance(found, dict) else {"default": found}).items():
        text = re.sub(r"\{%(-?)\s*generation\b", r"{%\1 if true", text)
        templates[name] = environment.from_string(re.sub(r"\{%(-?)\s*endgeneration\b", r"{%\1 endif", text))

    def write(value, hint, row):
        chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages = [{k: part for k, part in m.items() if part is not None or k == "content"} for m in chat]
        if hint:
            last = max(n for n, m in enumerate(messages) if m["role"] == "user" and isinstance(m.get("content"), str))
            messages[last]["content"] = hint + messages[last]["content"]
        if data.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": data.system_prompt})

        # The row has options of its own; tools may choose another template.
        options = {"tools": None, "documents": None} | data.template_kwargs
        options |= from_json(row.get("chat_template_kwargs")) or {}
        options["tools"] = from_json(row.get("tools")) or options["tools"]
        template = templates["tool_use" if options["tools"] is not None and "tool_use" in templates else "default"]

        # If the last message is the assistant's, the model goes on with its last text.
        continues = messages[-1]["role"] == "assistant"
        if continues:
            messages[-1] = with_end(messages[-1])
        text = template.render(messages=messages, add_generation_prompt=not continues, **options)
        if not continues:
            return text
        before, whole, _ = text.rpartition(END)
        return before if whole else text.rpartition(END.strip())[0].rstrip()

    return write


def refuse(message):
    """What a template calls for messages that it was not made for."""
    raise jinja2.TemplateError(message)


def from_json(value):
    """A column of objects, which may be JSON text."""
    return json.loads(value) if isinstance(value, str) and value else value


def with_end(message):
    """A copy of a message with END after its last text."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + END}
    parts = [dict(part) for part in content]
    last = max(n for n, part in enumerate(parts) if "text" in part)
    parts[last]["text"] += END
    return message | {"content": parts}
