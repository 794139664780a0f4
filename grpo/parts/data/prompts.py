"""The prompts of a run: loaded, checked, and taken step by step. Knows no tensors and no rewards.

Data go through one file a stage: tables.py reads rows, tokens.py makes token ids of them, this file makes prompts,
mixing.py puts them in order, and ends.py says what ends their answers.

`cfg` is the section `data`. Invalid data raise a ValueError that names key, file and row or column (docs/data.md).
"""

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy import ndarray
from torch.utils.data import ConcatDataset

from config import DataConfig
from grpo.parts.base import ranks
from grpo.parts.base.require import brief, require_data
from grpo.parts.data import mixing, tokens
from grpo.parts.data.tables import Table, concatenate, hold_small, read_tables, rows_between

# "rows": prompts, hints, answers, sources and their order. Checkpoints keep these: a new formula needs a new name.
FINGERPRINTS = ("rows", "columns besides the prompt", "token ids")
LARGE_BYTES = 16 * 2**20  # a rank keeps a smaller table in memory, and reads the rows of a larger one from its files


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
    table: Table
    rows: list[int] = field(default_factory=list)  # the row of the table that each prompt comes from
    ids: list[array] = field(default_factory=list)  # token ids of each prompt
    hinted: list[array] = field(default_factory=list)  # of each prompt with its hint; empty without data.hint_key
    fingerprint: dict[str, str] = field(default_factory=dict)  # 16 hex digits of each of `FINGERPRINTS`

    @property
    def dropped(self) -> int:
        """Rows whose prompt is too long."""
        return len(self.table) - len(self.rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i) -> Prompt:
        (row,) = rows_between(self.table, self.rows[i], self.rows[i] + 1)
        answer = tokens.lookup(row, self.cfg.answer_key)
        if not isinstance(answer, (list, dict)):  # grpo/step/named_rewards.py says what a reward gets of these
            answer = tokens.answer_text(answer, self.cfg.answer_key)
        asked = np.array(self.hinted[i]) if self.hinted else None
        return Prompt(self.ids[i].tolist(), answer, tokens.source_of(row, self.cfg.source_key), row, asked)


class Mixture(ConcatDataset):
    """Several sets, concatenated, of which `prompt_batch` takes shares: {name: (weight, prompts)}."""

    def __init__(self, sets: dict[str, tuple[float, PromptSet]]):
        self.names = list(sets)
        self.weights = [weight for weight, _ in sets.values()]
        self.sets = [prompts for _, prompts in sets.values()]
        super().__init__(self.sets)
        self.fingerprint = {}
        for name in FINGERPRINTS:
            parts = [[weight, prompts.fingerprint[name]] for weight, prompts in sets.values()]
            self.fingerprint[name] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        self.dropped = sum(prompts.dropped for prompts in self.sets)

    def describe(self, taken) -> str:
        """Share, prompts and passes of each set in a run that takes `taken` prompts, a line each."""
        lines = []
        for name, weight, prompts in zip(self.names, self.weights, self.sets, strict=True):
            share = weight / sum(self.weights)
            passes = taken * share / len(prompts)
            lines.append(f"         {share:.3g} of {name}: {len(prompts)} prompts, {passes:.3g} passes")
        return "\n".join(lines)


# ---------------------------------------------------------------- loading


def load_tokenizer(path):
    """The tokenizer of a Hugging Face folder or hub name. Raises ValueError."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a damaged file may raise any exception
        raise ValueError(f"model.path={path}: its tokenizer cannot be read: {brief(error)}") from None


def check_reading(path, tokenizer, prompts: Sequence[Prompt], cfg):
    """Compare transformers' reading of a model's tokenizer.json with the file itself, on up to 100 of the prompts.

    Raises ValueError if transformers loses text that the file keeps, as a class that does not suit the file does. Warns
    if only the ids differ.
    """
    import tokenizers
    from transformers.utils import cached_file

    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return
    plain = tokenizers.Tokenizer.from_file(file)
    plain.no_truncation()
    plain.no_padding()
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizer_config.json may have others than the file
    plain.add_tokens([*added.values()])

    class_name = type(tokenizer).__name__
    checked = min(len(prompts), 100)
    others = 0
    for number in range(checked):
        text = tokens.prompt_text(tokens.lookup(prompts[number].row, cfg.prompt_key), cfg, tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = plain.encode(text, add_special_tokens=False).ids
        others += ids != wanted

        # Spaces may differ, and tokens that neither shows.
        decode = partial(tokenizer.decode, ids, clean_up_tokenization_spaces=False)
        read, kept = decode(), plain.decode(wanted)
        require_data(
            read.split() == text.split() or decode(skip_special_tokens=True).split() == kept.split(),
            f"model.path={path}: transformers reads {text[:50]!r} as {read[:50]!r}, tokenizer.json as {kept[:50]!r}: "
            f"its class {class_name} does not suit that file, so the model would get other tokens than it knows. Set "
            '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json. For some kinds of models, such as '
            "Qwen2, transformers ignores it; these need a tokenizer of their kind",
        )

    if others:
        ranks.tell(
            f"warning: model.path={path}: {class_name} of transformers gives {others} of {checked} prompts other ids "
            "than tokenizer.json has; see tokenizer_class in tokenizer_config.json"
        )


def load_prompts(cfg, tokenizer, vocab_size, key="train") -> PromptSet | Mixture:
    """Read and tokenise the data named by `data.train` or, with key="eval", by `data.eval`, in the order of the files.

    Raises ValueError, also for a token beyond the `vocab_size` rows of the model's embedding.
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
    return Mixture({name: (weight, load_set(name, *given)) for name, weight in value.items()})


def load_set(value: str | list[str], cfg, tokenizer, vocab_size, key) -> PromptSet:
    """The prompts of the files or data sets `value`, given at `key`.

    Raises ValueError if a row is invalid, if all prompts are too long, or if all become the same tokens.
    """
    parts = read_tables(cfg, value, key)
    table = concatenate(parts, key)
    first_name, _ = parts[0]
    tokens.check_columns(cfg, table, first_name)
    table = hold_small(table, LARGE_BYTES)

    prompts = PromptSet(cfg, table)
    digests = {name: hashlib.sha256() for name in FINGERPRINTS}
    shortest = math.inf
    for number, row in enumerate(tokens.tokenise(table, parts, cfg, tokenizer, vocab_size, key)):
        shortest = min(shortest, row.length)
        if row.length > cfg.max_prompt_tokens:
            continue
        prompts.rows.append(number)
        prompts.ids.append(array("i", row.ids))
        if cfg.hint_key is not None:
            prompts.hinted.append(array("i", row.hinted))
        digests["rows"].update(row.digest)
        digests["columns besides the prompt"].update(row.others.encode())
        digests["token ids"].update(array("i", [row.length, *row.ids, *row.hinted]))
    prompts.fingerprint = {name: digest.hexdigest()[:16] for name, digest in digests.items()}

    require_data(
        len(prompts) > 0,
        f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all prompts of {value} are longer; "
        f"the shortest has {shortest} tokens",
    )
    check_they_differ(prompts, value, key)
    return prompts


def check_they_differ(prompts: PromptSet, value: str | list[str], key):
    """Raises ValueError if all prompts have the same tokens, but other texts."""
    first = prompts.ids[0]
    if len(prompts) == 1 or any(ids != first for ids in prompts.ids):
        return
    rows = rows_between(prompts.table, 0, len(prompts.table))
    texts = {str(tokens.lookup(row, prompts.cfg.prompt_key)) for row in rows}
    require_data(
        len(texts) == 1,
        f"{key}: all prompts of {value} have the same tokens, {first[:8].tolist()}, but other texts: the tokenizer of "
        "model.path (has it a tokenizer.json?) or its chat template leaves them out",
    )


def check_opening(prompt: Prompt, cfg, tokenizer):
    """ValueError if a text begins with less than half of the chat template's opening: a date in it may differ."""
    if not cfg.chat_template:
        return
    opening, _ = tokens.template_around(tokens.own_options(prompt.row, cfg), tokenizer)

    # Both are compared as their tokens are decoded: a tokenizer may change or drop characters.
    begins = "".join(tokenizer.decode(prompt.ids).split())
    opens = "".join(tokenizer.decode(tokenizer.encode(opening, add_special_tokens=False)).split())
    is_text = isinstance(tokens.lookup(prompt.row, cfg.prompt_key), str)
    require_data(
        begins.startswith(opens[: len(opens) // 2 + 1]) or not is_text,
        f"a prompt begins with {begins[: len(opens)]!r}, not with the chat template's opening {opening!r}: it was not "
        "rendered by the template (data.chat_template)",
    )


# ---------------------------------------------------------------- taking


def prompt_batch(prompts: Sequence[Prompt], taken, size, seed) -> list[Prompt]:
    """The `size` prompts after the first `taken` of an endless stream, which is reshuffled each epoch.

    Each set of a Mixture has a stream of its own, and the weights decide how many are taken of each.
    """
    sets = [prompts]
    drawn = [(0, number) for number in range(taken, taken + size)]
    if isinstance(prompts, Mixture):
        sets = prompts.sets
        drawn = mixing.draw_sets(prompts.weights, taken, size, seed)
    places = shuffle_epochs(drawn, [len(each) for each in sets], seed)
    return [sets[chosen][index] for chosen, index in places]


def shuffle_epochs(drawn: list[tuple[int, int]], sizes: list[int], seed) -> list[tuple[int, int]]:
    """(set, index in it) of each (set, number in the set's endless stream), which is reshuffled after each epoch."""
    orders = {}  # (set, epoch) → order of the set's prompts
    places = []
    for chosen, number in drawn:
        epoch, index = divmod(number, sizes[chosen])
        if (chosen, epoch) not in orders:
            orders[chosen, epoch] = np.random.default_rng([seed, epoch, chosen]).permutation(sizes[chosen])
        places.append((chosen, int(orders[chosen, epoch][index])))
    return places


def sampling_seed(seed, step, group) -> int:
    """Seed of a group's answers in vLLM. It depends on nothing else, so neither do the answers (engines, layout)."""
    return int(np.random.SeedSequence([seed, step, group]).generate_state(1)[0])
