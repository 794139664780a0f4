"""Large sets, tokenised once a machine: the token ids are in a file that every rank memory-maps.

One rank builds the cache, in a process of its own so that no rank needs the memory; the others wait for its lock. The
folder is named by a digest of all inputs: the files (path, size, time), the options, the tokenizer, versions. Started
as a program, this file is the builder.

    <HF_DATASETS_CACHE>/train_grpo/<digest>/   ids, ends, rows: arrays of Tokens; meta.json: the rest, and checksums
                                   <digest>.lock, <digest>.error   held during a build; the error of invalid data

Any of it may be deleted; a damaged cache is built again.
"""

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from config import DataConfig
from support.base import processes
from support.base.files import complete_folder
from support.data.tables import Source, Table, load_tables
from support.data.tokens import Block, Tokens, check_columns, jobs_of, join_blocks, tokenise

LARGE_BYTES = 16 * 2**20  # size of the files; every rank tokenises smaller sets, which is faster than a build
FORMAT = 1  # version of the cache; increase it when tokens.py or this file writes other contents
MAX_PROCESSES = 16  # of a build; each needs a few hundred MB
ARRAYS = {"ids": np.int32, "ends": np.int64, "rows": np.int64}

# ---------------------------------------------------------------- in a rank


def load_or_build(
    cfg, tokenizer, sources: list[Source], files: list[str], value: str | list[str], key: str
) -> Tokens | None:
    """The tokens of a set, memory-mapped from the cache, which is built if needed; None where there can be no cache.

    `files` are those of the sources, `value` the user's value at `key`. Raises ValueError for invalid data.
    """
    import datasets

    root = Path(datasets.config.HF_DATASETS_CACHE, "train_grpo")
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as saved:
        tokenizer.save_pretrained(saved)
        folder = root / cache_key(cfg, sources, files, saved)
        failure = folder.with_suffix(".error")
        tokens = open_cached(folder)
        if tokens is not None:
            return tokens
        try:
            root.mkdir(parents=True, exist_ok=True)
            before = stamp(failure)
            with hold_lock(folder.with_suffix(".lock")):
                if stamp(failure) != before:  # while this rank waited, another one found invalid data
                    raise ValueError(failure.read_text())
                tokens = open_cached(folder)
                if tokens is None:
                    print(f"{key}: {value} is tokenised once for this machine, into {folder}", flush=True)
                    try:
                        build_in_process(cfg, sources, saved, folder, value, key)
                    except ValueError as error:
                        failure.write_text(str(error))
                        raise
                    tokens = open_cached(folder)
        except OSError as error:
            print(f"note: {key}={value}: no cache in {root} ({error}), so every rank tokenises it", flush=True)
        return tokens


def cache_key(cfg, sources: list[Source], files: list[str], tokenizer: str) -> str:
    """A digest of all inputs that the tokens of a set depend on, 32 hex digits; `tokenizer` is a folder."""
    import tokenizers
    import transformers

    states = [(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    texts = [(path.name, path.read_bytes().hex()) for path in sorted(Path(tokenizer).iterdir())]
    kinds = [[arguments.get(name) for name in ("path", "name", "split")] for _, arguments in sources]
    options = cfg.model_dump(exclude={"train", "eval", "split", "custom"})
    versions = [FORMAT, tokenizers.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps([versions, kinds, states, options, texts]).encode()).hexdigest()[:32]


def open_cached(folder: Path) -> Tokens | None:
    """The tokens in a folder of the cache; None where there are none, or a checksum differs."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if any(checksum(folder / name) != meta["checksums"][name] for name in ARRAYS):
            return None
        ids = np.memmap(folder / "ids", ARRAYS["ids"], mode="r")
        ends, rows = (np.fromfile(folder / name, ARRAYS[name]) for name in ("ends", "rows"))
        return Tokens(ids, ends, rows, meta["dropped"], meta["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> int:
    """CRC-32 of a file, read and not mapped, so that the rank does not hold it."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait for the lock of a file and hold it. Raises OSError where the file system has no locks."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when the file is written; None where there is no file."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def build_in_process(cfg, sources: list[Source], tokenizer: str, folder: Path, value: Any, key: str) -> None:
    """Build the folder in another process. Raises ValueError for invalid data, OSError where it cannot write."""
    import datasets

    job = {"cfg": cfg.model_dump(), "sources": sources, "tokenizer": tokenizer, "folder": str(folder), "value": value}
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with processes.start_module("support.data.token_cache", env=env, **pipes) as process:
        try:
            output, _ = process.communicate(json.dumps({**job, "key": key}))
        finally:
            process.kill()  # where Ctrl-C interrupts the wait; it does nothing to a process that has ended
    outcome = json.loads(output.splitlines()[-1]) if output else {}
    if "bad data" in outcome:
        raise ValueError(outcome["bad data"])
    if process.returncode:
        raise OSError(outcome.get("failed", f"the process that tokenises ended with exit code {process.returncode}"))


# ---------------------------------------------------------------- the builder, and its helpers


def main() -> int:
    """Run the job on standard input; the last line of standard output is its failure. Returns the exit code."""
    processes.die_with_parent()
    replies = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard error
    job = json.load(sys.stdin)
    outcome = {}
    try:
        build(DataConfig(**job.pop("cfg")), **job)
    except ValueError as error:
        outcome = {"bad data": str(error)}
    except (OSError, EOFError) as error:
        outcome = {"failed": str(error) or "a process that tokenises was killed"}
    os.write(replies, json.dumps(outcome).encode() + b"\n")
    return 1 if outcome else 0


def build(cfg, sources: list, tokenizer: str, folder: str, value: Any, key: str) -> None:
    """Tokenise a set and write its folder. Raises ValueError for invalid data, OSError and EOFError."""
    import transformers

    tables = load_tables(sources, key)
    check_columns(cfg, tables)
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer)
    with complete_folder(Path(folder)) as part:
        with (part / "ids").open("wb") as file:
            tokens = join_blocks(
                tokenise_in_parallel(cfg, loaded, tables, key), cfg, value, lambda ids: file.write(ids.data)
            )
        tokens.ends.tofile(part / "ends")
        tokens.rows.tofile(part / "rows")
        checksums = {name: checksum(part / name) for name in ARRAYS}
        meta = {"dropped": tokens.dropped, "fingerprint": tokens.fingerprint, "checksums": checksums}
        (part / "meta.json").write_text(json.dumps(meta))


def tokenise_in_parallel(cfg, tokenizer, tables: list[tuple[str, Table]], key: str) -> Iterator[Block]:
    """The blocks of a set in order, made by several processes. Raises ValueError; EOFError if a process died."""
    jobs = jobs_of(tables)
    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(jobs))
    context = multiprocessing.get_context("fork")  # the processes share the tokenizer and the mapped tables
    readers = []
    for number in range(count):
        reader, writer = context.Pipe(duplex=False)
        arguments = cfg, tokenizer, tables, key, jobs[number::count], writer
        context.Process(target=send_blocks, args=arguments, daemon=True).start()
        writer.close()  # so that the end of the process ends the pipe
        readers.append(reader)
    for number in range(len(jobs)):
        block = readers[number % count].recv()
        if isinstance(block, str):
            raise ValueError(block)
        yield block


def send_blocks(cfg, tokenizer, tables: list, key: str, jobs: list, writer) -> None:
    """One process: send its blocks one by one, or the error of the first invalid one, after which it ends."""
    processes.die_with_parent()
    for job in jobs:
        try:
            writer.send(tokenise(cfg, tokenizer, tables, key, job))
        except ValueError as error:
            writer.send(str(error))
            return


if __name__ == "__main__":
    sys.exit(main())
