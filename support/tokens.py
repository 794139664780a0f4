"""Rows of data as token ids: what is a prompt and an answer in a row, and the prompts of a set in one array.

`cfg` is the `data` section of the configuration. A row that is no good is a ValueError that names it.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from support.tables import Table, check_text, columns_of, rows_of


def prompt_text(value: Any, cfg, tokenizer, hint: str = "") -> str:
    """The text to tokenise for a row's prompt: itself, or written out by the tokenizer's chat template.

    A `hint` stands right before the text, in a list of chat messages before the user's last. Raises ValueError.
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
    """The text to tokenise for what the teacher is asked: the prompt with the row's hint. Raises ValueError."""
    hint = answer_text(lookup(row, cfg.hint_key), cfg.hint_key)
    return prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer, hint)


def to_ids(texts: list[str], cfg, tokenizer) -> list[list[int]]:
    """Token ids of texts of `prompt_text`."""
    return tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]  # a template brings its own


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


def source_of(row: dict, key: str) -> str:
    """A row's source as text; "default" where it has none."""
    source = lookup(row, key)
    return "default" if source is None else str(source)


# ---------------------------------------------------------------- many rows

BLOCK = 1000  # rows that are read and tokenised together


@dataclass(frozen=True)
class Block:
    """The prompts of some rows."""

    ids: ndarray  # int32 [tokens], of one prompt after the other
    lengths: ndarray  # int64 [prompts]
    rows: ndarray  # int64 [prompts]: the row of the set that each is of
    digests: bytes  # 16 of each prompt, which change with a token id, the answer or the source
    dropped: int  # rows whose prompt, with its hint, is too long
    shortest: int  # tokens of the shortest prompt with its hint, dropped or not


@dataclass(frozen=True)
class Tokens:
    """The prompts of a set."""

    ids: ndarray  # int32 [tokens], of one prompt after the other; may be mapped from a file
    ends: ndarray  # int64 [prompts]: where each ends in `ids`
    rows: ndarray  # int64 [prompts]: the row of the set that each is of
    dropped: int  # rows whose prompt is too long
    fingerprint: str  # 16 hex digits that change with any token id, answer, source, or the order of the prompts


def check_columns(cfg, tables: list[tuple[str, Table]]) -> None:
    """Raises ValueError for a key that no row has. Without `source_key` at its default every source is "default"."""
    file, table = tables[0]
    names = columns_of(table)
    for option in ("prompt_key", "answer_key", "source_key", *["hint_key"] * (cfg.hint_key is not None)):
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
        for start in range(0, len(table) if columns else 0, BLOCK):
            yield from rows_of(table, start, start + BLOCK, columns)


def columns_for(table: Table, keys: list[str]) -> list[str]:
    """The columns that `lookup` of these keys reads."""
    wanted = [*keys, *(key.partition(".")[0] for key in keys)]
    return wanted if isinstance(table, list) else [column for column in table.column_names if column in wanted]


def jobs_of(tables: list[tuple[str, Table]]) -> list[tuple[int, int, int]]:
    """The blocks of a set: table, first row in it, first row in the set."""
    starts = np.cumsum([0, *(len(table) for _, table in tables)]).tolist()
    return [(t, i, starts[t] + i) for t, (_, table) in enumerate(tables) for i in range(0, len(table), BLOCK)]


def tokenise(cfg, tokenizer, tables: list[tuple[str, Table]], key: str, job: tuple[int, int, int]) -> Block:
    """The prompts of one block of `jobs_of(tables)`, which is data.train or data.eval, the `key`. Raises ValueError."""
    (name, table), start, first = tables[job[0]], job[1], job[2]
    if not isinstance(table, list):
        check_text(name, table.select(range(start, min(start + BLOCK, len(table)))), key)
    keys = [cfg.prompt_key, cfg.answer_key, cfg.source_key, *filter(None, [cfg.hint_key])]
    rows = rows_of(table, start, start + BLOCK, columns_for(table, keys))
    texts, answers, hinted = [], [], []
    for i, row in enumerate(rows, start + 1):
        try:
            texts.append(prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer))
            answers.append(answer_text(lookup(row, cfg.answer_key), cfg.answer_key))
            hinted += [hinted_text(row, cfg, tokenizer)] if cfg.hint_key is not None else []
        except ValueError as error:
            raise ValueError(f"{key}: {name}, row {i}: {error}") from None
    all_ids = to_ids(texts, cfg, tokenizer)
    asked = to_ids(hinted, cfg, tokenizer) if hinted else all_ids  # looked at here, made again when a step needs them
    lengths = [max(len(ids), len(longer)) for ids, longer in zip(all_ids, asked, strict=True)]
    kept, arrays, digests = [], [np.zeros(0, np.int32)], []
    for i, (ids, answer, row) in enumerate(zip(all_ids, answers, rows, strict=True)):
        if not ids:
            raise ValueError(
                f"{key}: {name}, row {start + i + 1}: {cfg.prompt_key!r} is empty: no tokens (data.prompt_key, or the "
                "tokenizer of model.path)"
            )
        if lengths[i] <= cfg.max_prompt_tokens:
            kept.append(i)
            arrays.append(np.array(ids, np.int32))
            known = np.array([*ids, *asked[i]], np.int32) if hinted else arrays[-1]
            digests.append(digest_of(known, answer, source_of(row, cfg.source_key)))
    return Block(
        np.concatenate(arrays),
        np.array([len(all_ids[i]) for i in kept], np.int64),
        np.array(kept, np.int64) + first,
        b"".join(digests),
        len(rows) - len(kept),
        min(lengths),
    )


def digest_of(ids: ndarray, answer: str, source: str) -> bytes:
    """16 bytes that change with each of these."""
    text = f"{len(answer)},{len(source)}:{answer}{source}".encode(errors="surrogatepass")
    return hashlib.blake2b(ids.tobytes() + text, digest_size=16).digest()


def join(blocks: Iterable[Block], cfg, name: str, keep: Callable[[ndarray], Any]) -> Tokens:
    """The prompts of all blocks of the set `name`. Raises ValueError where there are none.

    Their ids go to `keep`, block by block, since they may not fit into memory; those of the result are empty.
    """
    lengths, rows, digest, dropped, shortest = [], [], hashlib.sha256(), 0, None
    for block in blocks:
        keep(block.ids)
        lengths.append(block.lengths)
        rows.append(block.rows)
        digest.update(block.digests)
        dropped += block.dropped
        shortest = min(block.shortest, shortest or block.shortest)
    ends, rows = np.cumsum(np.concatenate(lengths)), np.concatenate(rows)
    if not len(rows):
        raise ValueError(
            f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all {dropped} prompts of {name} are longer; the shortest "
            f"has {shortest} tokens"
        )
    return Tokens(np.zeros(0, np.int32), ends, rows, dropped, digest.hexdigest()[:16])
