"""Checkpoints that are complete or absent, checked before use, and readable on any layout.

A checkpoint is a folder: `state.json` (the caller's own state), `versions.json` (versions of packages and the commit),
`rank_*.safetensors` (the shards of each rank, support/model/shards.py) and `manifest.json` (size and SHA-256 of every
other file), written last. All files are written to a temporary folder and flushed to the disk, then the folder is
renamed. Tensors are stored as safetensors, the rest as JSON, so that reading runs no code. A thread writes the shards
while training continues. Every rank must see the same file system.
"""

import json
import math
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from config import UserError
from support.base import versions
from support.base.files import add_suffix, digest_file, make_temporary_folder, put_in_place, write_synced
from support.base.ranks import gather
from support.base.rollout_files import RolloutWriter
from support.model.shards import CheckpointError, Shard, copy_shards, find_coverage_error, first_failure, write_shards

COMPLETE = re.compile(r"step_(\d{6,})$")

# ---------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes checkpoints to `folder`, one at a time, in the background.

    Keeps the newest `keep_last` (0: all) and those of every `keep_every`-th step (0: none).
    """

    def __init__(self, folder: Path | str, keep_last: int, keep_every: int):
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.step: int | None = None  # of the checkpoint that is being written, else of the last one
        self.state: dict[str, Any] | None = None
        self.thread: threading.Thread | None = None
        self.rollouts = RolloutWriter()  # of the same run: a checkpoint is renamed after the samples before it
        self.sizes: list[tuple[str, int, int]] = []  # name, elements, elements of the tensor, of this rank's shards
        self.digests: dict[str, list] = {}  # of this rank's files
        self.failure: str | None = None  # of this rank's thread

    def start(self, step: int, state: dict[str, Any], sharded: dict) -> None:
        """Copy the tensors and begin to write; the caller may change them afterwards. Called on every rank."""
        self.finish()
        target = self.folder / f"step_{step:06d}"
        failure = None
        if dist.get_rank() == 0:
            try:
                make_temporary_folder(target)
            except OSError as error:
                failure = str(error)
        failure = first_failure(failure)
        if failure is not None:
            raise CheckpointError(self.explain(step, failure))
        temporary = target.with_name(f"{target.name}.tmp")
        shards = copy_shards(sharded)
        self.sizes = [(name, values.numel(), math.prod(shape)) for name, values, shape in shards]
        self.step = step
        self.state = state
        self.failure = None
        self.thread = threading.Thread(target=self._write, args=(temporary, shards), daemon=True)
        self.thread.start()

    def _write(self, temporary: Path, shards: list[Shard]) -> None:
        try:
            self.digests = write_shards(temporary, shards)
        except Exception as error:  # finish() raises it on every rank
            self.failure = f"{type(error).__name__}: {error}"

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written and for the files of samples, then give it its final name.

        Returns its folder, None if none is being written. Called on every rank. Raises CheckpointError on every rank if
        one of them failed, and leaves no incomplete checkpoint.
        """
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        self.rollouts.finish()
        target = self.folder / f"step_{self.step:06d}"
        temporary = self.folder / f"{target.name}.tmp"
        failure = first_failure(self.failure)
        if failure is None:
            failure = find_coverage_error(gather(self.sizes))
        if failure is None:
            digests = merge_dicts(gather(self.digests))
            if dist.get_rank() == 0:
                failure = self._complete(temporary, target, digests)
            failure = first_failure(failure)
        if failure is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self.explain(self.step, failure))
        return target

    def explain(self, step: int, failure: str) -> str:
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}: {failure}; "
            "earlier checkpoints are unchanged. Make room, then go on with resume=auto, or go on in another output_dir "
            "with resume=the newest of them"
        )

    def _complete(self, temporary: Path, target: Path, digests: dict) -> str | None:
        """Write state and manifest, rename the folder, remove old checkpoints; returns the failure, if any."""
        try:
            for name, content in {"state.json": self.state, "versions.json": versions.versions()}.items():
                write_synced(temporary / name, json.dumps(content, indent=1, default=np.ndarray.tolist))
                digests[name] = digest_file(temporary / name)
            write_synced(temporary / "manifest.json", json.dumps(digests, indent=1))
            put_in_place(temporary, target)
            if self.keep_last:
                for path in list_checkpoints(self.folder)[self.keep_last :]:
                    if not (self.keep_every and step_of(path) % self.keep_every == 0):
                        add_suffix(path, "removed")  # first, so that an incomplete folder never has a valid name
            for removed in self.folder.glob("step_*.removed"):
                shutil.rmtree(removed)
        except OSError as error:
            return str(error)
        return None


def merge_dicts(dicts: list[dict]) -> dict:
    """All entries of several dicts with different keys."""
    return {key: value for part in dicts for key, value in part.items()}


def digest_files(folder: Path, names: list[str]) -> tuple[dict[str, list], str | None]:
    """({name: digest}, failure) of files in `folder`, computed by all ranks together; the same on every rank."""
    mine, failure = {}, None
    try:
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            mine[name] = digest_file(folder / name)
    except OSError as error:
        failure = str(error)
    return merge_dicts(gather(mine)), first_failure(failure)


# ---------------------------------------------------------------- finding and reading


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(COMPLETE.match(path.name)[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.glob("step_*") if COMPLETE.match(path.name)), key=step_of, reverse=True)


def find_damage(path: Path) -> str | None:
    """How a checkpoint differs from its manifest; None if it is valid. The same on every rank."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = {name: [int(size), str(sha)] for name, (size, sha) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        files, failure = {}, f"manifest.json: {type(error).__name__}: {error}"
    else:
        failure = None if files else "manifest.json names no files"
    failure = first_failure(failure)
    if failure:
        return failure
    digests, failure = digest_files(path, sorted(files))
    if failure:
        return failure
    for name, (size, sha) in files.items():
        if digests[name][0] != size:
            return f"{name} has {digests[name][0]} bytes, {size} were written"
        if digests[name][1] != sha:
            return f"{name} has changed since it was written (SHA-256)"
    return None


def find_valid_checkpoint(folder: Path) -> Path | None:
    """The newest valid checkpoint, None if there are no checkpoints; the same on every rank.

    Newer ones are quarantined under the name step_N.damaged. Raises CheckpointError if none is valid.
    """
    is_first = dist.get_rank() == 0
    paths = [list_checkpoints(folder)]
    dist.broadcast_object_list(paths)
    checkpoints = paths[0]
    damaged = []
    for path in checkpoints:
        problem = find_damage(path)
        if problem is None:
            if is_first:
                quarantine(damaged, path)
            return path
        damaged.append(path)
        if is_first:
            print(f"warning: {path} is damaged: {problem}", flush=True)
    if checkpoints:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged, so resume=auto has nothing to go on from; resume=none starts "
            "anew and moves the folder of this run aside"
        )
    return None


def quarantine(damaged: list[Path], valid: Path) -> None:
    """Rename damaged checkpoints, so that the run can save these steps again after it has gone back to `valid`."""
    for path in damaged:
        print(f"going back to {valid.name}; {path.name} is now {path.name}.damaged", flush=True)
        add_suffix(path, "damaged")


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from: for "none" none, for "auto" the newest valid one in `folder`, else the one named.

    The same on every rank. Raises UserError, or CheckpointError where all in `folder` are damaged.
    """
    if resume == "none":
        return None
    if resume == "auto":
        found = find_valid_checkpoint(folder)
        if found is None and dist.get_rank() == 0:
            print(f"resume:  no checkpoint in {folder}, so from the start", flush=True)
        return found
    chosen = Path(resume)
    problem = find_damage(chosen)
    if problem:
        raise UserError(f"resume={resume}: {problem}; give auto, none, or the folder of a checkpoint")
    if dist.get_rank() == 0 and chosen.resolve().parent == folder.resolve():
        abandon_after(chosen)
    return chosen


def check_resumed(path: Path, config: dict[str, Any], data: str) -> int:
    """Check that a run with this configuration and data fingerprint can go on from a checkpoint, and print the changes.

    Returns the step that the checkpoint was saved after. Raises UserError.
    """
    state, steps = read_state(path), config["train"]["steps"]
    if state["data"] != data:
        raise UserError(
            f"data.train={config['data']['train']}: not the prompts that {path} was trained on, so its position in "
            "them means nothing; use the same data, or start a new run (resume=none) with model.path=an export in hf/"
        )
    if state["step"] > steps:
        raise UserError(f"train.steps={steps}, but {path} is already after step {state['step']}")
    if dist.get_rank() == 0:
        print(f"resume:  after step {state['step']}, from {path}")
        changes = compare_configs(state["config"], config)
        saved_with = path / "versions.json"  # older checkpoints have none
        if saved_with.exists():
            changes += versions.differences(json.loads(saved_with.read_text()), versions.versions())
        for line in changes:
            print(f"         changed: {line}")
    return state["step"]


def compare_configs(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys of a saved configuration that have another value now: "train.lr: 1.0 → 2.0"."""
    changes = []
    for section, old in was.items():
        new = now.get(section)
        if isinstance(old, dict):
            keys = new or {}
            changes += [
                f"{section}.{key}: {value} → {keys.get(key)}" for key, value in old.items() if keys.get(key) != value
            ]
        elif old != new and section != "resume":
            changes.append(f"{section}: {old} → {new}")
    return changes


def abandon_after(path: Path) -> None:
    """Rename the later checkpoints, which a run that goes on from `path` will write again."""
    for later in list_checkpoints(path.parent):
        if step_of(later) > step_of(path):
            print(f"{later} is now {later.name}.abandoned: the run goes on from {path.name}", flush=True)
            add_suffix(later, "abandoned")


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that was given to `CheckpointWriter.start`."""
    return json.loads((path / "state.json").read_text())
