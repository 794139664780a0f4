"""Rows of data as token ids: the prompt and the answer of a row, and the prompts of a set in one array.

`cfg` is the `data` section of the configuration. An invalid row raises a ValueError that names it.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from support.data.tables import Table, check_text, columns_of, rows_of


def prompt_text(value: Any, cfg, tokenizer, hint: str = "") -> str:
    """The text to tokenise for a row's prompt: the prompt itself, or rendered by the tokenizer's chat template.

    A `hint` is inserted before the text, in a list of chat messages before the user's last one. Raises ValueError.
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
        return hint + value
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    # A column gives all its messages the same keys; null stands for one that this message does not have.
    messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in chat]
    if hint:
        asked = next((m for m in reversed(messages) if m["role"] == "user" and isinstance(m["content"], str)), None)
        if asked is None:
            raise ValueError(f"{key!r} has no text of a user that the hint could stand before (data.hint_key)")
        asked["content"] = hint + asked["content"]
    if cfg.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **cfg.template_kwargs
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise the first, or fail as code does
        raise ValueError(f"the tokenizer's chat template refuses {key!r} (data.chat_template): {error}") from None


def hinted_text(row: dict, cfg, tokenizer) -> str:
    """The text to tokenise for the teacher's prompt: the prompt with the row's hint. Raises ValueError."""
    hint = answer_text(lookup(row, cfg.hint_key), cfg.hint_key)
    return prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer, hint)


def to_ids(texts: list[str], cfg, tokenizer) -> list[list[int]]:
    """Token ids of texts of `prompt_text`."""
    return tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]  # a template brings its own


def is_chat(value: Any) -> bool:
    """Whether this is a list of chat messages, each with a role and content or tool calls."""
    return isinstance(value, list) and all(
        isinstance(m, dict) and m.get("role") and (m.get("content"), m.get("tool_calls")) != (None, None) for m in value
    )


def answer_text(value: Any, key: str) -> str:
    """A row's reference answer as text: numbers as Python writes them, lists and objects as JSON. Raises ValueError."""
    if value is None:
        raise ValueError(f"{key!r} is null")
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if not isinstance(value, (str, int, float)):  # a date: the text in the file cannot be recovered
        raise ValueError(
            f"{key!r} was read as a {type(value).__name__}; legal are text, numbers, lists and objects. Where a JSON "
            "file has only dates, its reader turns them into such; parquet keeps them as text"
        )
    return str(value)


def lookup(row: dict, key: str) -> Any:
    """row[key] or, for a dotted key that is no column itself, the nested value. None where there is none."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    return lookup(row[head], rest) if rest and isinstance(row.get(head), dict) else None


def source_of(row: dict, key: str) -> str:
    """A row's source as text; "default" where it has none."""
    source = lookup(row, key)
    return "default" if source is None else str(source)


# ---------------------------------------------------------------- many rows

ROWS_PER_BLOCK = 1000  # rows that are read and tokenised together


@dataclass(frozen=True)
class Block:
    """The prompts of some rows."""

    ids: ndarray  # int32 [tokens], the prompts concatenated
    lengths: ndarray  # int64 [prompts]
    rows: ndarray  # int64 [prompts]: the row of the set that each prompt comes from
    digests: bytes  # 16 bytes per prompt, which change with a token id, the answer or the source
    dropped: int  # rows whose prompt, with its hint, is too long
    shortest: int  # tokens of the shortest prompt with its hint, dropped or not


@dataclass(frozen=True)
class Tokens:
    """The prompts of a set."""

    ids: ndarray  # int32 [tokens], the prompts concatenated; may be memory-mapped from a file
    ends: ndarray  # int64 [prompts]: where each prompt ends in `ids`
    rows: ndarray  # int64 [prompts]: the row of the set that each prompt comes from
    dropped: int  # rows whose prompt is too long
    fingerprint: str  # 16 hex digits that change with any token id, answer, source, or the order of the prompts


def check_columns(cfg, tables: list[tuple[str, Table]]) -> None:
    """Raises ValueError for a key that no row has. Without `source_key` at its default every source is "default"."""
    file, table = tables[0]
    names = columns_of(table)
    options = ["prompt_key", "answer_key", "source_key"]
    if cfg.hint_key is not None:
        options.append("hint_key")
    for option in options:
        key = getattr(cfg, option)
        known = key in names or any(lookup(row, key) is not None for row in all_rows(tables, [key]))
        if not known and (option, key) != ("source_key", "source"):
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"data.{option}={key!r}: no such column in {file}; the nearest is {near!r}, all are {', '.join(names)}"
            )


def all_rows(tables: list[tuple[str, Table]], keys: list[str]) -> Iterator[dict]:
    """All rows, with the columns that `lookup` of these keys reads; none where there are no such columns."""
    for _, table in tables:
        columns = columns_for(table, keys)
        if not columns:
            continue
        for start in range(0, len(table), ROWS_PER_BLOCK):
            yield from rows_of(table, start, start + ROWS_PER_BLOCK, columns)


def columns_for(table: Table, keys: list[str]) -> list[str]:
    """The columns that `lookup` of these keys reads."""
    wanted = [*keys, *(key.partition(".")[0] for key in keys)]
    return wanted if isinstance(table, list) else [column for column in table.column_names if column in wanted]


def jobs_of(tables: list[tuple[str, Table]]) -> list[tuple[int, int, int]]:
    """The blocks of a set, each as (index of its table, first row in the table, first row in the set)."""
    jobs = []
    rows_before = 0  # in earlier tables
    for number, (_, table) in enumerate(tables):
        jobs += [(number, start, rows_before + start) for start in range(0, len(table), ROWS_PER_BLOCK)]
        rows_before += len(table)
    return jobs


def tokenise(cfg, tokenizer, tables: list[tuple[str, Table]], key: str, job: tuple[int, int, int]) -> Block:
    """The prompts of one block of `jobs_of(tables)`. `key`: data.train or data.eval, for errors. Raises ValueError."""
    number, start, first = job
    name, table = tables[number]
    if not isinstance(table, list):
        check_text(name, table.select(range(start, min(start + ROWS_PER_BLOCK, len(table)))), key)
    keys = [cfg.prompt_key, cfg.answer_key, cfg.source_key]
    if cfg.hint_key:
        keys.append(cfg.hint_key)
    rows = rows_of(table, start, start + ROWS_PER_BLOCK, columns_for(table, keys))
    texts, answers, hinted = [], [], []
    for i, row in enumerate(rows, start + 1):
        try:
            texts.append(prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer))
            answers.append(answer_text(lookup(row, cfg.answer_key), cfg.answer_key))
            if cfg.hint_key is not None:
                hinted.append(hinted_text(row, cfg, tokenizer))
        except ValueError as error:
            raise ValueError(f"{key}: {name}, row {i}: {error}") from None
    all_ids = to_ids(texts, cfg, tokenizer)
    hinted_ids = to_ids(hinted, cfg, tokenizer) if hinted else all_ids  # for lengths and digests alone
    lengths = [max(len(ids), len(with_hint)) for ids, with_hint in zip(all_ids, hinted_ids, strict=True)]
    kept = []
    arrays = [np.zeros(0, np.int32)]
    digests = []
    for i, (ids, answer, row) in enumerate(zip(all_ids, answers, rows, strict=True)):
        if not ids:
            raise ValueError(
                f"{key}: {name}, row {start + i + 1}: {cfg.prompt_key!r} is empty: no tokens (data.prompt_key, or the "
                "tokenizer of model.path)"
            )
        if lengths[i] <= cfg.max_prompt_tokens:
            kept.append(i)
            arrays.append(np.array(ids, np.int32))
            digested = np.array([*ids, *hinted_ids[i]], np.int32) if hinted else arrays[-1]
            digests.append(digest_of(digested, answer, source_of(row, cfg.source_key)))
    return Block(
        ids=np.concatenate(arrays),
        lengths=np.array([len(all_ids[i]) for i in kept], np.int64),
        rows=np.array(kept, np.int64) + first,
        digests=b"".join(digests),
        dropped=len(rows) - len(kept),
        shortest=min(lengths),
    )


def digest_of(ids: ndarray, answer: str, source: str) -> bytes:
    """16 bytes that change with each of these."""
    text = f"{len(answer)},{len(source)}:{answer}{source}".encode(errors="surrogatepass")
    return hashlib.blake2b(ids.tobytes() + text, digest_size=16).digest()


def join_blocks(blocks: Iterable[Block], cfg, name: str, store_ids: Callable[[ndarray], Any]) -> Tokens:
    """The prompts of all blocks of the set `name`. Raises ValueError where there are none.

    Token ids are passed to `store_ids`, block by block, since they may not fit into memory; the result has none.
    """
    lengths, rows, shortest_of_blocks = [], [], []
    digest = hashlib.sha256()
    dropped = 0
    for block in blocks:
        store_ids(block.ids)
        lengths.append(block.lengths)
        rows.append(block.rows)
        shortest_of_blocks.append(block.shortest)
        digest.update(block.digests)
        dropped += block.dropped
    ends = np.cumsum(np.concatenate(lengths))
    rows = np.concatenate(rows)
    if not len(rows):
        raise ValueError(
            f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all {dropped} prompts of {name} are longer; the shortest "
            f"has {min(shortest_of_blocks)} tokens"
        )
    return Tokens(np.zeros(0, np.int32), ends, rows, dropped, digest.hexdigest()[:16])
