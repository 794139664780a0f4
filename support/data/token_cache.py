"""Large sets, tokenised once a machine by the `datasets` library: its cache files, which every rank memory-maps.

One rank tokenises in several processes, while the others wait for its lock. The files are named by a digest of all
inputs: the tables, by their fingerprints, the options, the tokenizer, versions.

    <HF_DATASETS_CACHE>/train_grpo/<digest>*.arrow   the columns of tokens.tokenise; any of it may be deleted
                                   <digest>.lock     held while they are made
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.base import processes
from support.data.tables import Table, check_text
from support.data.tokens import keys_read, tokenise

LARGE_BYTES = 16 * 2**20  # size of the tables; every rank tokenises smaller sets, which is faster
FORMAT = 2  # version of the cache; increase it when tokens.tokenise gives other columns
MAX_PROCESSES = 16  # each needs a few hundred MB


def tokenise_once(cfg, tokenizer, rows: Table, tables: list[tuple[str, Table]], key: str) -> dict[str, Sequence]:
    """The columns of `tokenise` for the rows of all `tables`, which `key` names, "ids" memory-mapped.

    Raises ValueError for text that is no UTF-8, and where there can be no cache.
    """
    import datasets
    import pyarrow

    root = Path(datasets.config.HF_DATASETS_CACHE, "train_grpo")
    digest = cache_key(cfg, tokenizer, [table for _, table in tables])
    types = {"length": "int32", "digest": "binary", "error": "string"}
    features = {"ids": datasets.List(datasets.Value("int32"))} | {k: datasets.Value(v) for k, v in types.items()}
    keys = keys_read(cfg).values()
    looked_up = {*keys, *(key.partition(".")[0] for key in keys)}
    rows = rows.select_columns([column for column in rows.column_names if column in looked_up])
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f"{digest}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not list(root.glob(f"{digest}*.arrow")):
                check_text(tables, key)
                print(f"{key}: {len(rows)} rows are tokenised once for this machine, into {root}", flush=True)
            tokens = rows.map(
                tokenise_batch,
                batched=True,
                batch_size=1000,
                fn_kwargs={"cfg": cfg, "tokenizer": tokenizer},
                remove_columns=rows.column_names,
                features=datasets.Features(features),
                num_proc=min(len(os.sched_getaffinity(0)), MAX_PROCESSES),
                new_fingerprint=digest,
                cache_file_name=str(root / f"{digest}.arrow"),
            )
    except (OSError, RuntimeError, pyarrow.ArrowInvalid) as error:  # a full disk, a dead process, a file cut off
        raise ValueError(
            f"{key}: its tokens cannot be cached in {root} ({error}); make room there, delete {digest}*, or set "
            "HF_DATASETS_CACHE to another folder"
        ) from None
    return {"ids": tokens.data["ids"]} | {name: tokens.data[name].to_pylist() for name in types}


def tokenise_batch(columns: dict[str, list], cfg, tokenizer) -> dict[str, list]:
    """`tokenise` in a process of Dataset.map, which gives it columns."""
    processes.die_with_parent()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return tokenise(rows, cfg, tokenizer)


def cache_key(cfg, tokenizer, tables: list[Table]) -> str:
    """A digest of all inputs that the tokens of a set depend on, 32 hex digits.

    The library's fingerprint of a table changes with the paths, times and reader of its files.
    """
    import tokenizers
    import transformers

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as saved:
        tokenizer.save_pretrained(saved)
        texts = [(path.name, path.read_bytes().hex()) for path in sorted(Path(saved).iterdir())]
    fingerprints = [table._fingerprint for table in tables]
    options = cfg.model_dump(exclude={"train", "eval", "custom"})
    versions = [FORMAT, tokenizers.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps([versions, fingerprints, options, texts]).encode()).hexdigest()[:32]
