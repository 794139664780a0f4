"""Prompts from files: reading, tokenising, and the order in which steps see them. Knows no tensors and no rewards.

`cfg` is the `data` section of the configuration. What is wrong with the data is a ValueError that names the key.
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np


@dataclass
class Prompt:
    """One row of the data: its token ids, its source, and the row itself for the reward."""

    ids: list[int]
    answer: str
    source: str
    row: dict


def load_prompts(cfg, tokenizer) -> tuple[list[Prompt], int]:
    """Read and tokenise the training data; returns the prompts and how many were dropped as too long.

    Raises ValueError.
    """
    table = load_table(cfg.train, cfg.split)
    for key in ("prompt_key", "answer_key"):
        if getattr(cfg, key) not in table.column_names:
            raise ValueError(
                f"data.{key}={getattr(cfg, key)!r}: no such column in {cfg.train}; "
                f"its columns are {', '.join(table.column_names)}"
            )
    if not len(table):
        raise ValueError(f"data.train={cfg.train} has no rows")
    for key in (cfg.prompt_key, cfg.answer_key):
        if None in table[key]:
            raise ValueError(f"data.train={cfg.train}: row {list(table[key]).index(None) + 1} has no {key!r} (null)")
    texts = table[cfg.prompt_key]
    if cfg.chat_template:
        messages = [text if isinstance(text, list) else [{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    else:
        encoded = tokenizer(list(texts))
    prompts = [
        Prompt(ids, str(row[cfg.answer_key]), str(row.get(cfg.source_key, "default")), row)
        for ids, row in zip(encoded["input_ids"], table, strict=True)
        if 0 < len(ids) <= cfg.max_prompt_tokens
    ]
    if not prompts:
        raise ValueError(
            f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all {len(table)} prompts of {cfg.train} are longer "
            f"(or empty); the shortest has {min(map(len, encoded['input_ids']))} tokens"
        )
    return prompts, len(table) - len(prompts)


def load_table(train: Any, split: str):
    """A `datasets.Dataset` from local files or, for a name that is no path, from the hub. Raises ValueError."""
    datasets.disable_progress_bars()
    names = [str(name) for name in (train if isinstance(train, (list, tuple)) else [train])]
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
    if all(Path(name).suffix in kinds for name in names):
        files = [file for name in names for file in (sorted(glob.glob(name)) or [name])]
        absent = [file for file in files if "://" not in file and not Path(file).is_file()]
        if absent:
            raise ValueError(f"data.train: no such file {absent[0]}")
        if not any("://" in file or Path(file).stat().st_size for file in files):
            raise ValueError(f"data.train={train} is empty")
        suffixes = {Path(file).suffix for file in files}
        if len({kinds[suffix] for suffix in suffixes}) > 1:
            raise ValueError(f"data.train mixes file types {', '.join(sorted(suffixes))}; give files of one type")
        source, options = kinds[suffixes.pop()], {"data_files": files, "split": "train"}
    elif len(names) == 1 and not Path(names[0]).exists():
        source, options = names[0], {"split": split}
    else:
        raise ValueError(f"data.train={train}: legal are files ending in {', '.join(kinds)}, or one hub name")
    try:
        return datasets.load_dataset(source, **options)
    except Exception as error:  # datasets raises many kinds: bad JSON, bad schema, unreachable hub
        cause = error.__cause__ or error
        raise ValueError(f"data.train={train}: {type(cause).__name__}: {str(cause).strip().splitlines()[0]}") from None


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
