"""Checkpoints that are complete or absent, checked before use, read on any layout and without running code."""

import contextlib
import json
import math
import operator
import re
import shutil
import threading
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo.parts.base import versions
from grpo.parts.base.files import add_suffix, digest_file, make_temporary_folder, put_in_place, write_synced
from grpo.parts.base.ranks import gather
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import require
from grpo.parts.base.rollout_files import RolloutWriter
from grpo.parts.model.shards import CheckpointError, Shard, check_coverage, copy_shards, fail_together, write_shards

COMPLETE = re.compile(r"step_(\d{6,})$")

# ---------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes checkpoints in a thread; keeps the newest `keep_last` (0: all) and each `keep_every`-th step's (0: no)."""

    def __init__(self, folder: Path | str, keep_last: int, keep_every: int):
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.step: int | None = None  # of the checkpoint that is being written, else of the last one
        self.state: dict[str, Any] = {}  # of the caller
        self.target: Path  # its folder; `start` sets this
        self.temporary: Path  # its folder while it is written
        self.thread: threading.Thread | None = None
        self.rollouts = RolloutWriter()  # of the same run: a checkpoint is renamed after the samples before it
        self.sizes: list[tuple[str, int, int]] = []  # name, elements, elements of the tensor, of this rank's shards
        self.digests: dict[str, list] = {}  # of this rank's files
        self.failure: str | None = None  # of this rank's thread

    def start(self, step: int, state: dict[str, Any], sharded: dict) -> None:
        """Copy the tensors and begin to write; the caller may change them afterwards. Called on every rank."""
        self.finish()
        self.step = step
        self.state = state
        self.failure = None
        self.target = self.folder / f"step_{step:06d}"
        self.temporary = self.target.with_name(f"{self.target.name}.tmp")
        with self._explain_failure(), fail_together():
            if dist.get_rank() == 0:
                make_temporary_folder(self.target)
        shards = copy_shards(sharded)
        self.sizes = [(name, values.numel(), math.prod(shape)) for name, values, shape in shards]
        self.thread = threading.Thread(target=self._write, args=(shards,), daemon=True)
        self.thread.start()

    def _write(self, shards: list[Shard]) -> None:
        try:
            self.digests = write_shards(self.temporary, shards)
        except Exception as error:  # finish() raises it on every rank
            self.failure = f"{type(error).__name__}: {error}"

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written and for the files of samples, then give it its final name.

        Returns its folder, None if none is written. CheckpointError on every rank, and no checkpoint, if one fails.
        """
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        self.rollouts.finish()
        with self._explain_failure():
            with fail_together():
                if self.failure is not None:
                    raise CheckpointError(self.failure)
            check_coverage(gather(self.sizes))
            digests = reduce(operator.or_, gather(self.digests))
            with fail_together():
                if dist.get_rank() == 0:
                    self._complete(digests)
        return self.target

    def _complete(self, digests: dict) -> None:
        """Write state and manifest, rename the folder, remove old checkpoints."""
        for name, content in {"state.json": self.state, "versions.json": versions.versions()}.items():
            write_synced(self.temporary / name, json.dumps(content, indent=1, default=np.ndarray.tolist))
            digests[name] = digest_file(self.temporary / name)
        write_synced(self.temporary / "manifest.json", json.dumps(digests, indent=1))
        put_in_place(self.temporary, self.target)
        if self.keep_last:
            for path in list_checkpoints(self.folder)[self.keep_last :]:
                if not (self.keep_every and step_of(path) % self.keep_every == 0):
                    add_suffix(path, "removed")  # first, so that an incomplete folder never has a valid name
        for removed in self.folder.glob("step_*.removed"):
            try:
                shutil.rmtree(removed)
            except OSError as error:  # a file held open on NFS: the new checkpoint is complete
                print(f"warning: {removed} cannot be removed, and is left: {error}", flush=True)

    @contextlib.contextmanager
    def _explain_failure(self) -> Iterator[None]:
        """Where the block raises a CheckpointError, remove what is written, and say what it means for the run."""
        try:
            yield
        except CheckpointError as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {self.step} could not be written to {self.folder}: {error}; earlier "
                "checkpoints are unchanged. Make room, then go on with resume=auto, or go on in another output_dir "
                "with resume=the newest of them"
            ) from None


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
    """How a checkpoint differs from its manifest; None if it is valid. Ranks share the files and return the same."""
    try:
        with fail_together("manifest.json: "):
            files = json.loads((path / "manifest.json").read_text())
        with fail_together():
            mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
            own_digests = {name: digest_file(path / name) for name in mine}
    except CheckpointError as error:
        return str(error)
    digests = reduce(operator.or_, gather(own_digests))
    for name, written in files.items():
        if digests[name] != written:
            return f"{name} has changed since it was written: bytes and SHA-256 are {digests[name]}, were {written}"
    return None


def find_valid_checkpoint(folder: Path) -> Path | None:
    """The newest valid checkpoint, None if there are no checkpoints; the same on every rank.

    Newer ones are quarantined under the name step_N.damaged. Raises CheckpointError if none is valid.
    """
    damaged = []
    for path in gather(list_checkpoints(folder))[0]:  # those that rank 0 sees
        problem = find_damage(path)
        if problem is None:
            set_aside(damaged, "damaged", path)
            return path
        damaged.append(path)
        if dist.get_rank() == 0:
            print(f"warning: {path} is damaged: {problem}", flush=True)
    require(
        not damaged,
        f"every checkpoint in {folder} is damaged, so resume=auto has nothing to go on from; resume=none starts "
        "anew and moves the folder of this run aside",
        CheckpointError,
    )
    return None


def set_aside(checkpoints: list[Path], reason: str, used: Path) -> None:
    """Rename checkpoints to NAME.REASON, so that the run, which goes on from `used`, can save these steps again."""
    if dist.get_rank() == 0:
        for path in checkpoints:
            print(f"{path.name} is now {path.name}.{reason}: the run goes on from {used.name}", flush=True)
            add_suffix(path, reason)


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
    require(not problem, f"resume={resume}: {problem}; give auto, none, or the folder of a checkpoint")
    if chosen.resolve().parent == folder.resolve():
        set_aside([path for path in list_checkpoints(folder) if step_of(path) > step_of(chosen)], "abandoned", chosen)
    return chosen


def check_resumed(path: Path, config: dict[str, Any], data: str) -> int:
    """Print what changed since a checkpoint; returns its step. Raises UserError where the run cannot go on from it."""
    state, steps = read_state(path), config["train"]["steps"]
    require(
        state["data"] == data,
        f"data.train={config['data']['train']}: not the prompts that {path} was trained on, so its position in "
        "them means nothing; use the same data, or start a new run (resume=none) with model.path=an export in hf/",
    )
    require(state["step"] <= steps, f"train.steps={steps}, but {path} is already after step {state['step']}")
    if dist.get_rank() == 0:
        print(f"resume:  after step {state['step']}, from {path}")
        was, now = (dict(dotted_items({**tree, "resume": None})) for tree in (state["config"], config))
        saved_with = json.loads((path / "versions.json").read_text())
        for line in versions.differences(was, now) + versions.differences(saved_with, versions.versions()):
            print(f"         changed: {line}")
    return state["step"]


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that was given to `CheckpointWriter.start`."""
    return json.loads((path / "state.json").read_text())
