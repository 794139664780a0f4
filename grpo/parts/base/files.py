"""The files of a run, its lock, and how files and folders are written safely to the disk."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from config import UserError
from grpo.parts.base.versions import versions


def log_metrics(out: Path, metrics: dict) -> None:
    """Add a line to metrics.jsonl, on the disk before this returns; null for NaN and infinity."""
    numbers = {key: value if value is None or math.isfinite(value) else None for key, value in metrics.items()}
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(numbers, default=float) + "\n")
    sync(out / "metrics.jsonl")


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl that are of training steps; none where there is no such file."""
    log = out / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


# ---------------------------------------------------------------- the output folder


def lock_output_dir(path: Path) -> IO | None:
    """Lock the output folder `path` for this process; keep the returned file open. Raises UserError.

    The lock is on the file `path`.lock beside the folder, and ends with the process, however it dies. It warns, and
    returns None, where the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = Path(f"{os.path.abspath(path)}.lock")
    try:
        file = place.open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = place.read_text().strip() or "another process"
        raise UserError(
            f"output_dir={path} is in use by {owner}: two runs in one output folder would mix; choose another"
        ) from None
    except OSError as error:  # some network file systems have no locks
        print(f"warning: output_dir={path} cannot be locked ({error.strerror}); start no second run in it", flush=True)
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file


def open_output_dir(path: Path, config_yaml: str, resume: str, step: int) -> None:
    """Prepare the output folder, which is locked, for the steps after `step`, as `resume` says. Raises UserError."""
    try:
        if resume == "none" and (path / "metrics.jsonl").exists():  # never mixed with an earlier run
            number = 1
            while path.with_name(f"{path.name}.{number}").exists():
                number += 1
            aside = path.rename(path.with_name(f"{path.name}.{number}"))
            print(f"moved the earlier run in {path} to {aside}")
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(config_yaml)
        drop_later_steps(path, step)
        write_synced(path / "versions.json", json.dumps(versions(), indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"output_dir={path}: {error}") from None


def drop_later_steps(path: Path, step: int) -> None:
    """Remove from an output folder what was written for the steps after `step`, and what is not complete."""
    log = path / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    kept = []
    for line in lines:
        if not line.endswith("\n"):
            print(f"{log} ends in half a line, which is dropped")
        elif step and json.loads(line)["step"] <= step:
            kept.append(line)
    log.with_suffix(".tmp").write_text("".join(kept))
    log.with_suffix(".tmp").rename(log)
    for file in (path / "rollouts").iterdir():
        ours = re.fullmatch(r"(step|eval)_(\d+)\.jsonl(\.tmp)?", file.name)
        if ours and (int(ours[2]) > step or step == 0 or ours[3]):
            file.unlink()


# ---------------------------------------------------------------- writing to the disk


def try_to_write(folder: Path) -> OSError | None:
    """What the system says where it refuses a small file in `folder` or the nearest above; None where it writes it."""
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_existing(folder), prefix=".writable-") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `target`, complete and on the disk, where the block ends without an error."""
    temporary = make_temporary_folder(target)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_temporary_folder(target: Path) -> Path:
    """An empty folder `target`.tmp, in place of one that a killed process has left."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a folder, whose files are on the disk, its final name; one that has it already is replaced as a whole."""
    sync(temporary)
    if target.exists():
        add_suffix(target, "replaced")
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(target.with_name(f"{target.name}.replaced"), ignore_errors=True)


def add_suffix(folder: Path, reason: str) -> None:
    """Rename a folder to NAME.REASON, so that nothing takes it for a valid checkpoint, export or cache any more."""
    target = folder.with_name(f"{folder.name}.{reason}")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


def digest_file(path: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def split_by_bytes(tensors: Iterable[tuple], limit: int) -> Iterator[list[tuple]]:
    """Consecutive (name, tensor, ...), as lists of `limit` bytes at most each, or of one larger tensor."""
    part = []
    size = 0
    for item in tensors:
        if part and size + item[1].nbytes > limit:
            yield part
            part = []
            size = 0
        part.append(item)
        size += item[1].nbytes
    if part:
        yield part
