"""The prompts of a run, and the order in which steps take them. Knows no tensors, no rewards.

`cfg`: the section `data`. Invalid data raises a ValueError that names key, file and row or column (docs/data.md).
"""

import hashlib
import itertools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray
from torch.utils.data import ConcatDataset

from config import DataConfig
from grpo.parts.base.require import require_data
from grpo.parts.data import mixing, tokens
from grpo.parts.data.tables import Table, concatenate, held, read_tables, rows_between

LARGE_BYTES = 16 * 2**20  # a rank reads rows of such tables where they are mapped, and holds the rows of smaller ones
BLOCK = 2000  # rows tokenised at once


@dataclass
class Prompt:
    """One row of the data: its token ids, its source, and the row itself for the reward."""

    ids: list[int]
    answer: str | list | dict
    source: str
    row: dict
    asked: ndarray | None = None  # int32, the prompt with its hint, for the teacher; None without data.hint_key


@dataclass
class PromptSet(Sequence):
    """The prompts of one set. Each is made when it is read, from its row of the `table`."""

    cfg: DataConfig
    tokenizer: Any
    table: Table
    ids: Any  # pyarrow lists: of each row of the table the token ids of its prompt; empty where it is too long
    rows: ndarray  # int64 [prompts]: the row of the table that each prompt comes from
    fingerprint: str  # 16 hex digits that change with any prompt, hint, answer, source, or the order of the rows

    @property
    def dropped(self) -> int:
        """Rows whose prompt is too long."""
        return len(self.table) - len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Prompt:
        number = int(self.rows[operator.index(i)])
        ids = self.ids[number].as_py()
        (row,) = rows_between(self.table, number, number + 1)
        answer = tokens.lookup(row, self.cfg.answer_key)
        if not isinstance(answer, (list, dict)):  # a reward gets those by its kind: grpo/step/named_rewards.py
            answer = tokens.answer_text(answer, self.cfg.answer_key)
        asked = None
        if self.cfg.hint_key is not None:
            (hinted_ids,) = tokens.to_ids([tokens.hinted_text(row, self.cfg, self.tokenizer)], self.cfg, self.tokenizer)
            asked = np.array(hinted_ids, np.int32)
        return Prompt(ids, answer, tokens.source_of(row, self.cfg.source_key), row, asked)


class Mixture(ConcatDataset):
    """Several sets, concatenated, of which `prompt_batch` takes shares: {name: (weight, prompts)}."""

    def __init__(self, sets: dict[str, tuple[float, PromptSet]]):
        self.names = list(sets)
        self.weights, self.sets = zip(*sets.values(), strict=True)
        super().__init__(self.sets)
        parts = [[weight, part.fingerprint] for weight, part in sets.values()]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        self.dropped = sum(part.dropped for part in self.sets)

    def describe(self, taken: int) -> str:
        """Share, prompts and passes of each set in a run that takes so many prompts; a line each."""
        shares = np.array(self.weights) / sum(self.weights)
        return "\n".join(
            f"         {share:.3g} of {name}: {len(part)} prompts, {taken * share / len(part):.3g} passes"
            for name, share, part in zip(self.names, shares, self.sets, strict=True)
        )


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


def load_prompts(cfg, tokenizer, vocab_size: int, key: str = "train") -> PromptSet | Mixture:
    """Read and tokenise the data named by `data.train` or, with key="eval", by `data.eval`, in the order of the files.

    Raises ValueError, for a token beyond the `vocab_size` rows of the model's embedding too.
    """
    require_data(
        cfg.chat_template or (cfg.system_prompt is None and not cfg.template_kwargs),
        "data.system_prompt and data.template_kwargs have an effect only with data.chat_template=true",
    )
    if key == "eval":
        cfg = cfg.model_copy(update={"hint_key": None})  # an evaluation has no teacher
    if cfg.system_prompt is not None:
        (ids,) = tokens.to_ids([cfg.system_prompt], cfg, tokenizer)
        tokens.check_ids("data.system_prompt", ids, tokenizer, vocab_size)
    value = getattr(cfg, key)
    given = (cfg, tokenizer, vocab_size, f"data.{key}")
    if not isinstance(value, dict) or not value:
        return load_set(value, *given)
    return Mixture({name: (share, load_set(name, *given)) for name, share in value.items()})


def load_set(value: str | list[str], cfg, tokenizer, vocab_size: int, key: str) -> PromptSet:
    """The prompts of the files or data sets `value`, given at `key`. ValueError: a row is invalid, or all too long."""
    import pyarrow

    tables = read_tables(cfg, value, key)
    table = concatenate(tables, key)
    tokens.check_columns(cfg, table, tables[0][0])
    table = held(table, LARGE_BYTES)
    ids, columns = [], {"length": [], "digest": [], "error": []}
    for start in range(0, len(table), BLOCK):
        block = tokens.tokenise(rows_between(table, start, start + BLOCK), cfg, tokenizer, vocab_size)
        ids.append(pyarrow.array(block["ids"], pyarrow.list_(pyarrow.int32())))
        for name, column in columns.items():
            column += block[name]
    errors = iter(columns["error"])
    for name, part in tables:
        for number, error in enumerate(itertools.islice(errors, len(part)), 1):
            if error is not None:
                raise ValueError(f"{key}: {name}, row {number}: {error}")
    lengths = np.array(columns["length"])
    rows = np.flatnonzero(lengths <= cfg.max_prompt_tokens)
    if not len(rows):
        all_longer = f"all {len(lengths)} prompts of {value} are longer; the shortest has {lengths.min()} tokens"
        raise ValueError(f"data.max_prompt_tokens={cfg.max_prompt_tokens}: {all_longer}")
    prompts = pyarrow.chunked_array(ids)
    if len(rows) > 1 and all(prompts[int(row)].equals(prompts[int(rows[0])]) for row in rows):
        texts = {str(tokens.lookup(row, cfg.prompt_key)) for row in rows_between(table, 0, len(table))}
        require_data(
            len(texts) == 1,
            f"{key}: all {len(rows)} prompts of {value} have the same tokens, {prompts[int(rows[0])].as_py()[:8]}, but "
            "other texts: the tokenizer of model.path (has it a tokenizer.json?) or its chat template leaves them out",
        )
    digest = hashlib.sha256(b"".join(columns["digest"][row] for row in rows)).hexdigest()[:16]
    return PromptSet(cfg, tokenizer, table, prompts, rows, digest)


def check_opening(prompt: Prompt, cfg, tokenizer) -> None:
    """Raise ValueError where a prompt begins twice, with the chat template's opening or its first token, or where a
    text begins with less than half of that opening (a date in it may differ).
    """
    require_data(
        prompt.ids[:2] != [tokenizer.bos_token_id] * 2,
        f"a prompt begins with two {tokenizer.bos_token!r}: its text has one already (data.prompt_key)",
    )
    if not cfg.chat_template:
        return
    mark = "⟦text⟧"
    messages = [{"role": "user", "content": mark}]  # made here, apart from prompt_text
    if cfg.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": cfg.system_prompt})
    try:
        text = tokens.render(tokenizer, messages, cfg, add_generation_prompt=True)
    except Exception:  # a template that takes other messages than this one fails as code does, with any exception
        return
    opening, _, _ = text.partition(mark)
    require_data(
        not opening or not tokenizer.decode(prompt.ids).startswith(opening + opening),
        f"a prompt begins with {opening + opening!r}, the chat template's opening twice: the data have been "
        "through a template already; use data.chat_template=false, or their plain messages",
    )
    # Both as tokens say them: a tokenizer may change or drop characters.
    begins, opens = (
        "".join(tokenizer.decode(ids).split())
        for ids in (prompt.ids, tokenizer.encode(opening, add_special_tokens=False))
    )
    require_data(
        begins.startswith(opens[: len(opens) // 2 + 1]) or not isinstance(prompt.row.get(cfg.prompt_key), str),
        f"a prompt begins with {begins[: len(opens)]!r}, not with the chat template's opening {opening!r}: it was not "
        "rendered by the template (data.chat_template)",
    )


def prompt_batch(prompts: Sequence[Prompt], taken: int, size: int, seed: int) -> list[Prompt]:
    """The `size` prompts after the first `taken` of an endless stream, reshuffled each epoch; a Mixture: one a set."""
    if isinstance(prompts, Mixture):
        sets = prompts.sets
        drawn = mixing.draw_sets(prompts.weights, taken, size, seed)
    else:
        sets = [prompts]
        drawn = [(0, number) for number in range(taken, taken + size)]
    return [sets[chosen][index] for chosen, index in shuffle_epochs(drawn, [len(part) for part in sets], seed)]


def shuffle_epochs(drawn: list[tuple[int, int]], sizes: list[int], seed: int) -> list[tuple[int, int]]:
    """(set, index in it) of each (set, number in the set's endless stream), which is reshuffled after each epoch."""
    orders = {}  # (set, epoch) → order of the set's prompts
    places = []
    for chosen, number in drawn:
        epoch, index = divmod(number, sizes[chosen])
        if (chosen, epoch) not in orders:
            orders[chosen, epoch] = np.random.default_rng([seed, epoch, chosen]).permutation(sizes[chosen])
        places.append((chosen, int(orders[chosen, epoch][index])))
    return places


def sampling_seed(seed: int, step: int, group: int) -> int:
    """Seed of a group's answers in vLLM. It depends on nothing else, so neither do the answers (engines, layout)."""
    return int(np.random.SeedSequence([seed, step, group]).generate_state(1)[0])
