"""Rows of data as token ids; `cfg` is the section `data`. An invalid row raises a ValueError that names it."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np

from grpo.parts.base.read_config import nearest
from grpo.parts.base.require import require_data
from grpo.parts.data.tables import Table, columns_of

SURROGATE = re.compile("[\ud800-\udfff]")


def prompt_text(value: Any, cfg, tokenizer, hint: str = "") -> str:
    """The text to tokenise for a row's prompt: the prompt itself, or rendered by the tokenizer's chat template.

    A `hint` is inserted before the text, in a list of chat messages before the user's last one. Raises ValueError.
    """
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
    messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in chat]
    parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
    kinds = {part.get("type", "text") for part in parts if isinstance(part, dict)} - {"text"}
    if kinds:
        what = f"a part of type {min(kinds)!r}"
        raise ValueError(f"{key!r} has {what}, and models are trained on text alone: leave such rows out")
    if hint:
        asked = next((m for m in reversed(messages) if m["role"] == "user" and isinstance(m["content"], str)), None)
        if asked is None:
            raise ValueError(f"{key!r} has no text of a user that the hint could stand before (data.hint_key)")
        asked["content"] = hint + asked["content"]
    if cfg.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})
    goes_on = messages[-1]["role"] == "assistant"
    try:
        text = render(tokenizer, messages, cfg, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    except Exception as error:  # a template fails as code does, with any exception
        raise ValueError(f"the tokenizer's chat template refuses {key!r} (data.chat_template): {error}") from None
    for part in parts_of(messages):
        if str(part) in text and str(part) != json.dumps(part, ensure_ascii=False, default=str):
            raise ValueError(
                f"the tokenizer's chat template writes a part of {key!r} as Python does, {str(part)[:60]}: give texts "
                "in its place, or mend the template of model.path"
            )
    return text


def render(tokenizer, messages: list[dict], cfg, **options) -> str:
    """What the chat template writes, which gets `cfg.date` where it asks for today's. Raises what it raises."""
    if cfg.date is not None:
        options["strftime_now"] = cfg.date.strftime
    return tokenizer.apply_chat_template(messages, tokenize=False, **options, **cfg.template_kwargs)


def parts_of(value: list | dict) -> Iterator[list | dict]:
    """The lists and dicts in a list or dict, and in these."""
    parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        if isinstance(part, (list, dict)):
            yield part
            yield from parts_of(part)


def hinted_text(row: dict, cfg, tokenizer) -> str:
    """The text to tokenise for the teacher's prompt: the prompt with the row's hint. Raises ValueError."""
    hint = answer_text(lookup(row, cfg.hint_key), cfg.hint_key)
    return prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer, hint)


def to_ids(texts: list[str], cfg, tokenizer) -> list[list[int]]:
    """Token ids of texts of `prompt_text`, without an end token: the model goes on from them."""
    if adds_end(cfg, tokenizer):
        return [ids[:-1] for ids in tokenizer(texts)["input_ids"]]
    return tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]  # a template brings its own


def adds_end(cfg, tokenizer) -> bool:
    """Whether the tokenizer puts its end token after each text, as for training on whole texts (add_eos_token)."""
    if cfg.chat_template:
        return False
    end = [tokenizer.eos_token_id]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]  # the end token may stand for what is unknown
    return tokenizer("a")["input_ids"][-1:] == end and bare[-1:] != end


def missing_row(source: str, ids: Iterable[int], tokenizer, vocab_size: int, model: str = "model.path") -> str | None:
    """What is wrong with ids from `source` that are beyond the `vocab_size` rows of the model's embedding, else None.

    Such an id ends in an IndexError of the first layer, on a GPU in a device assert; neither names it.
    """
    largest = max(ids, default=0)
    if largest < vocab_size:
        return None
    return (
        f"{source}: the token {tokenizer.convert_ids_to_tokens(largest)!r} has the id {largest}, but the embedding of "
        f"{model} has {vocab_size} rows (vocab_size in config.json). Leave the token out, or add rows to the model: "
        "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64) in transformers"
    )


def check_ids(source: str, *arguments) -> None:
    """Raise ValueError for an id that the model has no row for; with the arguments of `missing_row`."""
    problem = missing_row(source, *arguments)
    require_data(problem is None, str(problem))


def is_chat(value: Any) -> bool:
    """Whether this is a list of chat messages, each with a role and content or tool calls."""
    return isinstance(value, list) and all(
        isinstance(m, dict) and m.get("role") and (m.get("content"), m.get("tool_calls")) != (None, None) for m in value
    )


def answer_text(value: Any, key: str) -> str:
    """A row's reference answer as text: numbers as a JSON file or Python writes them, lists and objects as JSON.

    Raises ValueError.
    """
    if value is None:
        raise ValueError(f"{key!r} is null")
    if isinstance(value, (list, dict)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            raise ValueError(f"{key!r} holds a NaN or an infinite number: {value}") from None
    if str(value) in ("nan", "inf", "-inf") and isinstance(value, float):
        raise ValueError(f"{key!r} is {value}, not a number")
    if not isinstance(value, (str, int, float, Decimal)):  # a date: the text in the file cannot be recovered
        raise ValueError(f"{key!r} was read as a {type(value).__name__}; legal are text, numbers, lists and objects")
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


def check_columns(cfg, table: Table, name: str) -> None:
    """Raises ValueError for a key that no row of the table `name` has, but for `source_key` at its default."""
    columns = columns_of(table)
    for option in MEANT:
        key = getattr(cfg, option)
        if key not in (None, *columns) and (option, key) != ("source_key", "source"):
            meant = meant_column(option, key, columns)
            raise ValueError(
                f"data.{option}={key!r}: no such column in {name}; "
                f"{f'the nearest is {meant!r}, ' if meant else ''}all are {', '.join(columns)}"
            )


# What data sets call the column of an option, the likeliest first: verl's extra_info.answer is a whole solution.
MEANT = {
    "prompt_key": "prompt question problem query instruction messages conversations input",
    "answer_key": "ground_truth answer final_answer expected_answer solution answers target label",
    "source_key": "data_source source dataset task ability",
    "hint_key": "hint hints solution rationale",
}


def meant_column(option: str, key: str, columns: list[str]) -> str | None:
    """The column that a wrong `key` of an option may mean: the nearest by letters, else one of its meaning."""
    above, _, own = key.rpartition(".")
    beside = {column.rpartition(".")[2]: column for column in columns if column.rpartition(".")[0] == above}
    near = nearest(own, beside)
    if near:
        return beside[near]
    words = [*MEANT[option].split(), own]
    return next((column for word in words for column in columns if column.rpartition(".")[2] == word), None)


def tokenise(rows: list[dict], cfg, tokenizer, vocab_size: int) -> dict[str, list]:
    """Columns with a value for each row.

    "ids": int32 array, the prompt; empty where it is too long. "length": tokens of the prompt, with its hint. "digest":
    16 bytes that change with prompt, hint, answer and source, as the row has them. "error": what is wrong, else None.
    """
    texts = []  # (prompt, prompt with the hint, answer) of each row
    errors = []
    for row in rows:
        try:
            if row.get("images"):
                raise ValueError("'images' is not empty, and models are trained on text alone: leave such rows out")
            prompt = prompt_text(lookup(row, cfg.prompt_key), cfg, tokenizer)
            answer = answer_text(lookup(row, cfg.answer_key), cfg.answer_key)
            with_hint = hinted_text(row, cfg, tokenizer) if cfg.hint_key is not None else ""
            if SURROGATE.search(prompt + with_hint):
                raise ValueError(f"{cfg.prompt_key!r} has half of a surrogate pair, which is no text")
            texts.append((prompt, with_hint, answer))
            errors.append(None)
        except ValueError as problem:
            texts.append(("", "", ""))
            errors.append(str(problem))
    prompts = to_ids([prompt for prompt, _, _ in texts], cfg, tokenizer)
    hinted = [[] for _ in rows]
    if cfg.hint_key is not None:  # for lengths and digests alone
        hinted = to_ids([with_hint for _, with_hint, _ in texts], cfg, tokenizer)
    keys = [key for key in (cfg.prompt_key, cfg.answer_key, cfg.hint_key) if key is not None]
    columns = {"ids": [], "length": [], "digest": [], "error": errors}
    for i, (ids, with_hint) in enumerate(zip(prompts, hinted, strict=True)):
        length = max(len(ids), len(with_hint))
        if errors[i] is None and not ids:
            errors[i] = f"{cfg.prompt_key!r} is empty: no tokens (data.prompt_key, or the tokenizer of model.path)"
        if errors[i] is None and length <= cfg.max_prompt_tokens:
            name = f"{cfg.prompt_key!r}, as the chat template writes it" if cfg.chat_template else repr(cfg.prompt_key)
            problem = missing_row(name, ids, tokenizer, vocab_size)
            errors[i] = problem or missing_row(f"the hint {cfg.hint_key!r}", with_hint, tokenizer, vocab_size)
        read = [source_of(rows[i], cfg.source_key), *(lookup(rows[i], key) for key in keys)]
        inputs = json.dumps(read, default=str, sort_keys=True).encode()
        columns["ids"].append(np.array(ids if length <= cfg.max_prompt_tokens else [], np.int32))
        columns["length"].append(length)
        columns["digest"].append(hashlib.blake2b(inputs, digest_size=16).digest())
    return columns
