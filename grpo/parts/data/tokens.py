"""The stage from a row to token ids. `cfg` is the section `data`. An invalid row raises a ValueError that names it."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from grpo.parts.base import ranks
from grpo.parts.base.read_config import nearest
from grpo.parts.data.tables import TEMPLATE_KEYS, Table, columns_of, rows_between

BLOCK = 2000  # rows tokenised at once
SURROGATE = re.compile("[\ud800-\udfff]")
MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})  # columns
NO_MEDIA = {"", "None", "[]", "[None]", "{}", "False", "0"}  # their values, as texts, where a row has none
MARKUP = re.compile(r"<[^<>\s]+>|\[[/|\w]+\]")  # <|im_start|>, [INST] and what else opens or closes a chat message
ENCODE = json.JSONEncoder(default=str, sort_keys=True).encode
# A value that JSON lacks counts by its type: the text of a set or an object may differ between two starts.
ENCODE_OTHERS = json.JSONEncoder(default=lambda value: type(value).__name__, skipkeys=True).encode


class TokenisedRow(NamedTuple):
    """What is kept of a row when the data are read."""

    ids: list[int]  # of the prompt
    hinted: list[int]  # of the prompt with its hint, or the same ids without data.hint_key
    length: int  # tokens of the longer of them
    digest: bytes  # 16 bytes that change with the row's prompt, hint, answer and source
    others: str  # its columns but the prompt, as JSON


def tokenise(table: Table, parts: list[tuple[str, Table]], cfg, tokenizer, vocab_size, key) -> Iterator[TokenisedRow]:
    """Yield the rows of a table, which has the `parts` (name, table) that were read for `key`. Raises ValueError."""
    rendered = templated_text(cfg, tokenizer)
    first = answered = 0
    with_tools = False
    for name, part in parts:
        for start in range(0, len(part), BLOCK):
            stop = min(start + BLOCK, len(part))
            rows = rows_between(table, first + start, first + stop)
            labels = [f"{key}: {name}, row {number + 1}" for number in range(start, stop)]
            yield from tokenise_block(rows, labels, cfg, tokenizer, vocab_size, rendered)
            answered += sum(ends_with_answer(row, cfg) for row in rows)
            # Tools are longer than "null", "None" or "[]".
            with_tools = with_tools or any(len(str(row.get("tools"))) > 4 for row in rows)
        first += len(part)

    if answered > first / 2:
        ranks.tell(
            f"warning: {key}: {answered} of {first} prompts end with an assistant's message that has the row's answer "
            f"in it, and the model goes on after it; leave this message out of data.prompt_key={cfg.prompt_key!r}"
        )
    if with_tools and cfg.chat_template and "tools" not in str(tokenizer.chat_template):
        ranks.tell(f"warning: {key}: rows have 'tools', which the tokenizer's chat template does not write")


def tokenise_block(rows: list[dict], labels: list[str], cfg, tokenizer, vocab_size, rendered) -> Iterator[TokenisedRow]:
    """Yield rows, tokenised together. Errors begin with a row's label. `rendered` is of `templated_text`."""
    texts, hinted_texts = [], []
    for row, label in zip(rows, labels, strict=True):
        try:
            text, hinted = row_texts(row, cfg, tokenizer, rendered)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{label}: {error}") from None
        texts.append(text)
        hinted_texts.append(hinted)

    # Tokenise all at once, which is faster, then check each.
    all_ids = to_ids(texts, cfg, tokenizer)
    all_hinted = all_ids if cfg.hint_key is None else to_ids(hinted_texts, cfg, tokenizer)
    bos = tokenizer.bos_token
    for row, label, text, ids, hinted in zip(rows, labels, texts, all_ids, all_hinted, strict=True):
        length = max(len(ids), len(hinted))
        if not ids:
            raise ValueError(f"{label}: {cfg.prompt_key!r} is empty: the tokenizer of model.path makes no tokens of it")
        if ids[:2] == [tokenizer.bos_token_id] * 2 and bos in text:
            raise ValueError(f"{label}: {cfg.prompt_key!r} begins with two {bos!r}: its text has one already")
        if length <= cfg.max_prompt_tokens:
            check_ids(f"{label}: {cfg.prompt_key!r}", ids, tokenizer, vocab_size)
            check_ids(f"{label}: the hint {cfg.hint_key!r}", hinted, tokenizer, vocab_size)
        others = ENCODE_OTHERS([value for column, value in row.items() if column != cfg.prompt_key])
        yield TokenisedRow(ids, hinted, length, digest_of(row, cfg), others)


def digest_of(row: dict, cfg) -> bytes:
    """16 bytes that change with the row's source, prompt, answer, hint, and what else its template gets."""
    keys = [key for key in (cfg.prompt_key, cfg.answer_key, cfg.hint_key) if key is not None]
    values = [source_of(row, cfg.source_key), *(lookup(row, key) for key in keys)]
    values += [row[key] for key in TEMPLATE_KEYS if row.get(key)]
    return hashlib.blake2b(ENCODE(values).encode(), digest_size=16).digest()


# ---------------------------------------------------------------- the texts of a row


def row_texts(row: dict, cfg, tokenizer, rendered=None) -> tuple[str, str]:
    """A row's prompt, and its prompt with its hint, as texts to tokenise. Checks the answer too. Raises ValueError.

    The second text is "" without data.hint_key. No message may match `rendered`, of `templated_text`.
    """
    cfg = own_options(row, cfg)
    value = lookup(row, cfg.prompt_key)
    text = prompt_text(value, cfg, tokenizer, rendered=rendered)

    # An empty column is harmless, unless the prompt shows that something belongs in it.
    for column in MEDIA.intersection(row):
        mark = f"<{column.removesuffix('s')}>"
        if mark in text or str(row[column]) not in NO_MEDIA:
            raise ValueError(
                f"{column!r} is not empty, or its {mark} is in the prompt, and models are trained on text alone: "
                "leave such rows out"
            )

    answer_text(lookup(row, cfg.answer_key), cfg.answer_key)
    hinted = ""
    if cfg.hint_key is not None:
        hint = answer_text(lookup(row, cfg.hint_key), cfg.hint_key)
        hinted = prompt_text(value, cfg, tokenizer, hint)
    if SURROGATE.search(text + hinted):
        raise ValueError(f"{cfg.prompt_key!r} has half of a surrogate pair, which is no text")
    return text, hinted


def own_options(row: dict, cfg) -> Any:
    """`cfg` with the row's own options of its chat template, also if they are JSON text. Raises ValueError."""
    own = {}
    for key, kind in TEMPLATE_KEYS.items() if cfg.chat_template else ():
        value = row.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if value and not isinstance(value, kind):
            raise ValueError(f"{key!r} must be a {kind.__name__}, or one as JSON text: {str(value)[:80]}")
        if value:
            own.update({key: value} if key == "tools" else value)
    return cfg.model_copy(update={"template_kwargs": {**cfg.template_kwargs, **own}}) if own else cfg


def template_around(cfg, tokenizer) -> tuple[str, str]:
    """What the chat template writes before and after a user's text, after data.system_prompt. "" if it refuses."""
    mark = "⟦text⟧"
    messages = [{"role": "user", "content": mark}]
    if cfg.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})
    try:
        opening, _, closing = render(tokenizer, messages, cfg, add_generation_prompt=True).partition(mark)
    except Exception:  # a template may raise any exception for other messages than it is made for
        return "", ""
    return opening, closing


def templated_text(cfg, tokenizer) -> re.Pattern | None:
    """Matches a text that has been through the chat template. Its system prompt, and so its opening, may differ."""
    if not cfg.chat_template:
        return None
    opening, closing = template_around(cfg, tokenizer)
    begins = [*MARKUP.findall(opening), MARKUP.sub("", opening).strip()]
    ends = [*MARKUP.findall(closing), closing.strip()]
    if not any(begins) or not ends[0]:
        return None
    return re.compile(rf"\s*(?:{'|'.join(map(re.escape, filter(None, begins)))}).*{re.escape(ends[0])}", re.DOTALL)


def ends_with_answer(row: dict, cfg) -> bool:
    """Whether a prompt ends with a message of the assistant that has the row's answer in it."""
    chat = lookup(row, cfg.prompt_key)
    if isinstance(chat, str) or chat[-1]["role"] != "assistant":
        return False
    answer = lookup(row, cfg.answer_key)
    answers = answer if isinstance(answer, list) else [answer]
    return any(str(each) in str(chat[-1].get("content")) for each in answers if each != "")


def prompt_text(value: Any, cfg, tokenizer, hint="", rendered=None) -> str:
    """The text to tokenise for a row's prompt: the prompt itself, or what the tokenizer's chat template writes.

    A `hint` goes before the text; in a list of chat messages, before the user's last one. Raises ValueError.
    """
    key = cfg.prompt_key
    if value in (None, "", []):
        raise ValueError(f"{key!r} is empty")
    if not isinstance(value, str) and not is_chat(value):
        raise ValueError(f"{key!r} is neither text nor a list of messages {{role, content}}: {str(value)[:80]}")
    if not cfg.chat_template:
        if isinstance(value, list):
            raise ValueError(f"{key!r} is a list of chat messages, which needs data.chat_template=true")
        return hint + value

    # The template gets copies of the messages, with the hint and the system prompt.
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = [own_message(message, key) for message in chat]
    if rendered and any(rendered.match(str(message.get("content"))) for message in messages):
        raise ValueError(
            f"{key!r} begins as the chat template does, so it has been through a template already; use "
            "data.chat_template=false, or its plain messages"
        )
    if hint:
        users = [m for m in messages if m["role"] == "user" and isinstance(m.get("content"), str)]
        if not users:
            raise ValueError(f"{key!r} has no text of a user that the hint could stand before (data.hint_key)")
        users[-1]["content"] = hint + users[-1]["content"]
    if cfg.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})

    # If the last message is the assistant's, the model goes on with it.
    continues = messages[-1]["role"] == "assistant"
    try:
        text = render(tokenizer, messages, cfg, add_generation_prompt=not continues, continue_final_message=continues)
    except Exception as error:  # a template may raise any exception
        raise ValueError(f"the tokenizer's chat template refuses {key!r} (data.chat_template): {error}") from None

    # Templates made for texts alone write a list or dict as Python does, and no error says so.
    for part in parts_of(messages):
        if str(part) in text and str(part) != json.dumps(part, ensure_ascii=False, default=str):
            raise ValueError(
                f"the tokenizer's chat template writes a part of {key!r} as Python does, {str(part)[:60]}: give texts "
                "in its place, or mend the template of model.path"
            )
    return text


def is_chat(value: Any) -> bool:
    """Whether this is a list of chat messages, each with a role, and with content or tool calls."""
    if not isinstance(value, list):
        return False
    for message in value:
        if not isinstance(message, dict) or not message.get("role"):
            return False
        if message.get("content") is None and message.get("tool_calls") is None:
            return False
    return True


def own_message(message: dict, key) -> dict:
    """A copy of a chat message without keys that are null. Raises ValueError if it has parts that are no text."""
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            what = f"a part of type {part['type']!r}"
            raise ValueError(f"{key!r} has {what}, and models are trained on text alone: leave such rows out")
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def parts_of(value: list | dict) -> Iterator[list | dict]:
    """The lists and dicts in a list or dict, and in these."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (list, dict)):
            yield part
            yield from parts_of(part)


def render(tokenizer, messages: list[dict], cfg, **options) -> str:
    """What the chat template writes. It gets `cfg.date` if it asks for today's. Raises what the template raises."""
    if cfg.date is not None:
        options["strftime_now"] = cfg.date.strftime
    return tokenizer.apply_chat_template(messages, tokenize=False, **options, **cfg.template_kwargs)


def answer_text(value: Any, key) -> str:
    """A row's reference answer as text: numbers as a JSON file or Python writes them, lists and objects as JSON.

    Raises ValueError.
    """
    if value is None:
        raise ValueError(f"{key!r} is null")
    if isinstance(value, (list, dict)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            raise ValueError(f"{key!r} has a NaN or an infinite number: {value}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key!r} is {value}, not a number")
    if not isinstance(value, (str, int, float, Decimal)):  # such as a date, whose text in the file is lost
        raise ValueError(f"{key!r} is a {type(value).__name__}; it must be a text, a number, a list or an object")
    return str(value)


# ---------------------------------------------------------------- the columns of a row


def lookup(row: dict, key) -> Any:
    """row[key] or, for a dotted key that is no column itself, the nested value. None if there is neither."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    return lookup(row[head], rest) if rest and isinstance(row.get(head), dict) else None


def source_of(row: dict, key) -> str:
    """A row's source as text, "default" if it has none."""
    source = lookup(row, key)
    return "default" if source is None else str(source)


def check_columns(cfg, table: Table, name):
    """Raises ValueError for a key that no row of the table `name` has. The default of `source_key` may be missing."""
    columns = columns_of(table)
    for option in ("prompt_key", "answer_key", "source_key", "hint_key"):
        key = getattr(cfg, option)
        if key is None or key in columns or (option, key) == ("source_key", "source"):
            continue
        near = nearest(key, columns)
        advice = f"the nearest is {near!r}, " if near else ""
        raise ValueError(f"data.{option}={key!r}: no such column in {name}; {advice}all are {', '.join(columns)}")


# ---------------------------------------------------------------- token ids


def to_ids(texts: list[str], cfg, tokenizer) -> list[list[int]]:
    """Token ids of texts of `prompt_text`, without an end token, since the model goes on from them."""
    if adds_end(cfg, tokenizer):
        return [ids[:-1] for ids in tokenizer(texts)["input_ids"]]
    return tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]  # a template brings its own


def adds_end(cfg, tokenizer) -> bool:
    """Whether the tokenizer puts its end token after each text, as for training on whole texts (add_eos_token)."""
    if cfg.chat_template:
        return False
    end = [tokenizer.eos_token_id]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]  # the end token may stand for an unknown character
    return tokenizer("a")["input_ids"][-1:] == end and bare[-1:] != end


def check_ids(source, ids: Iterable[int], tokenizer, vocab_size, model="model.path"):
    """Raises ValueError for an id from `source` that is beyond the `vocab_size` rows of the model's embedding.

    Such an id ends in an IndexError of the first layer, on a GPU in a device assert. Neither names it.
    """
    largest = max(ids, default=0)
    if largest < vocab_size:
        return
    raise ValueError(
        f"{source}: the token {tokenizer.convert_ids_to_tokens(largest)!r} has the id {largest}, but the embedding of "
        f"{model} has {vocab_size} rows (vocab_size in config.json). Leave the token out, or add rows to the model: "
        "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64) in transformers"
    )
