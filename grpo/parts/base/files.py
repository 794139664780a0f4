"""The files of a run, its lock, and safe writing of files and folders to the disk."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from config import UserError
from grpo.parts.base.require import require
from grpo.parts.base.versions import versions


def log_metrics(out: Path, metrics: dict):
    """Add a line to metrics.jsonl and wait until it is on the disk. NaN and infinity become null."""
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(metrics, enc_hook=float) + b"\n")
    sync(out / "metrics.jsonl")


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl that are of training steps; [] if there is no such file."""
    log = out / "metrics.jsonl"
    if not log.exists():
        return []
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


# ---------------------------------------------------------------- the output folder


def lock_output_dir(path: Path) -> IO | None:
    """Lock the output folder `path` for this process. Keep the returned file open. Raises UserError if it is in use.

    The lock is on the file `path`.lock beside the folder, and ends with the process, however it dies. If the file
    system has no locks, this warns and returns None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = Path(f"{os.path.abspath(path)}.lock")
    try:
        file = place.open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = place.read_text().strip() or "another process"
        raise UserError(
            f"output_dir={path} is in use by {owner}. Two runs in one output folder would mix; choose another"
        ) from None
    except OSError as error:  # some network file systems have no locks
        print(f"warning: output_dir={path} cannot be locked ({error.strerror}); start no second run in it", flush=True)
        return None

    # Other processes read here who has the lock.
    file.truncate(0)
    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file


def holds_run(path: Path) -> bool:
    """Whether the folder is of an earlier run, or has at least its checkpoints."""
    return (path / "versions.json").exists() or any(path.glob("checkpoints/step_*/manifest.json"))


def continues(path: Path, resume) -> bool:
    """Whether a run continues in the folder: from its newest checkpoint, or from one that is in it."""
    return resume == "auto" or (resume != "none" and Path(resume).resolve().is_relative_to(path.resolve()))


def check_output_dir(path: Path, resume, inputs: dict):
    """A run must not move aside what it reads, nor write over files of others. Raises UserError.

    `inputs`: {key: the names of files or folders that are given there, which may be patterns or have a :suffix}.
    """
    reused = holds_run(path)
    for key, names in inputs.items():
        for name in [] if continues(path, resume) else names:
            folder = nearest_existing(Path(re.split(r"[:*?\[]", name)[0])).resolve()
            own_config = reused and Path(name).absolute() == path.absolute() / "config.yaml"
            require(
                own_config or not folder.is_relative_to(path.resolve()),
                f"output_dir={path} holds {key}={name}, which would move aside with an earlier run in this folder; "
                "choose a folder of its own",
            )

    for name in ("config.yaml", "metrics.jsonl", "rollouts/*.jsonl"):
        found = next(path.glob(name), None)
        require(
            reused or found is None,
            f"output_dir={path}: {found} is not of an earlier run (there is no versions.json), and this run would "
            "write over it; choose another folder",
        )


def open_output_dir(path: Path, config_yaml, resume, step):
    """Prepare the output folder, which is locked, for the steps after `step`, as `resume` says. Raises UserError."""
    try:
        if holds_run(path) and not continues(path, resume):  # never mixed with an earlier run
            number = 1
            while path.with_name(f"{path.name}.{number}").exists():
                number += 1
            aside = path.rename(path.with_name(f"{path.name}.{number}"))
            print(f"moved the earlier run in {path} to {aside}")

        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        write_synced(path / "versions.json", json.dumps(versions(), indent=1) + "\n")  # first: `holds_run` reads it
        (path / "config.yaml").write_text(config_yaml)
        drop_later_steps(path, step)
    except (OSError, ValueError) as error:
        raise UserError(f"output_dir={path}: {error}") from None


def drop_later_steps(path: Path, step):
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
        ours = re.fullmatch(r"(?:step|eval|updates)_(\d+)\.jsonl(\.tmp)?", file.name)
        if ours and (int(ours[1]) > step or step == 0 or ours[2]):
            file.unlink()
    for unfinished in path.glob("checkpoints/step_*.tmp"):
        shutil.rmtree(unfinished)


# ---------------------------------------------------------------- writing to the disk


def try_to_write(folder: Path) -> OSError | None:
    """The system's error if it refuses a small file in `folder`, or in the nearest above it; None if it writes it."""
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_existing(folder), prefix=".writable-") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def write_synced(path: Path, text):
    """Write a file and wait until it is on the disk."""
    path.write_text(text)
    sync(path)


def sync(path: Path):
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill. If the block ends without an error, it becomes `target`, complete and on the disk."""
    temporary = make_temporary_folder(target)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_temporary_folder(target: Path) -> Path:
    """An empty folder `target`.tmp. One that a killed process has left is removed first."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def put_in_place(temporary: Path, target: Path):
    """Give a folder, whose files are on the disk, its final name. A folder of this name is replaced as a whole."""
    sync(temporary)
    if target.exists():
        add_suffix(target, "replaced")
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(target.with_name(f"{target.name}.replaced"), ignore_errors=True)


def add_suffix(folder: Path, reason):
    """Rename a folder to NAME.REASON, so that nothing takes it for a valid checkpoint, export or cache any more."""
    target = folder.with_name(f"{folder.name}.{reason}")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


def digest_file(path: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def split_by_bytes(tensors: Iterable[tuple], limit) -> Iterator[list[tuple]]:
    """Divide (name, tensor, ...) items into lists of consecutive ones, each with at most `limit` bytes or one item."""
    part, size = [], 0
    for item in tensors:
        nbytes = item[1].nbytes
        if part and size + nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    if part:
        yield part
