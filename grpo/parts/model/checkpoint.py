"""Checkpoints that are complete or absent, checked before use, read on any layout and without running code."""

import contextlib
import json
import math
import re
import shutil
import threading
from pathlib import Path

import torch.distributed as dist

from grpo.parts.base import versions
from grpo.parts.base.files import add_suffix, digest_file, make_temporary_folder, put_in_place, write_synced
from grpo.parts.base.ranks import gather, is_first_rank
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import require
from grpo.parts.base.rollout_files import RolloutWriter
from grpo.parts.model.shards import CheckpointError, check_coverage, copy_shards, fail_together, write_shards

COMPLETE = re.compile(r"step_(\d{6,})$")

# ---------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes checkpoints in a thread, and removes old ones.

    It keeps the newest `keep_last` checkpoints (0 keeps all), and those whose step is a multiple of `keep_every`.
    """

    def __init__(self, folder, keep_last, keep_every):
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.step = 0  # of the checkpoint that is being written, or else of the last one; 0 before
        self.thread = None  # None if no checkpoint is being written
        self.rollouts = RolloutWriter()  # of the same run: a checkpoint gets its name after the samples before it

    def start(self, step, state: dict, sharded: dict):
        """Copy the tensors and begin to write; the caller may change them afterwards. Called on every rank."""
        self.finish()
        self.step = step
        self.state = state
        self.target = self.folder / f"step_{step:06d}"
        self.temporary = self.target.with_name(f"{self.target.name}.tmp")
        with self._explain_failure(), fail_together():
            if is_first_rank():
                make_temporary_folder(self.target)

        shards = copy_shards(sharded)
        self.sizes = [(name, values.numel(), math.prod(shape)) for name, values, shape in shards]
        self.failure = None
        self.thread = threading.Thread(target=self._write, args=(shards,), daemon=True)
        self.thread.start()

    def _write(self, shards):
        try:
            self.digests = write_shards(self.temporary, shards)
        except Exception as error:  # `finish` raises it on every rank
            self.failure = f"{type(error).__name__}: {error}"

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written and for the files of samples, then give it its final name.

        Returns its folder, or None if no checkpoint is being written. If a rank fails, there is no checkpoint, and
        every rank raises CheckpointError.
        """
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        self.rollouts.finish()

        with self._explain_failure():
            with fail_together():
                require(self.failure is None, self.failure, CheckpointError)
            check_coverage(gather(self.sizes))
            digests = {}
            for written in gather(self.digests):
                digests |= written
            with fail_together():
                if is_first_rank():
                    self._complete(digests)
                    self._remove_old()
        return self.target

    def _complete(self, digests):
        """Write state, versions and manifest, and give the folder its final name."""
        for name, content in (("state.json", self.state), ("versions.json", versions.versions())):
            write_synced(self.temporary / name, json.dumps(content, indent=1))
            digests[name] = digest_file(self.temporary / name)
        write_synced(self.temporary / "manifest.json", json.dumps(digests, indent=1))
        put_in_place(self.temporary, self.target)

    def _remove_old(self):
        if self.keep_last:
            for path in list_checkpoints(self.folder)[self.keep_last :]:
                if not (self.keep_every and step_of(path) % self.keep_every == 0):
                    add_suffix(path, "removed")  # first, so that an incomplete folder never has a valid name
        for removed in self.folder.glob("step_*.removed"):
            shutil.rmtree(removed, ignore_errors=True)  # what is left, such as a file open on NFS, goes next time

    @contextlib.contextmanager
    def _explain_failure(self):
        """If the block raises a CheckpointError, remove the new folder, and say what this means for the run."""
        try:
            yield
        except CheckpointError as error:
            if is_first_rank():
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {self.step} could not be written to {self.folder}: {error}. Earlier "
                "checkpoints are unchanged. Make room, then go on with resume=auto, or go on in another output_dir "
                "with resume=FOLDER of the newest of them"
            ) from None


# ---------------------------------------------------------------- finding and reading


def step_of(path):
    """The step of a checkpoint's folder."""
    return int(COMPLETE.match(path.name)[1])


def list_checkpoints(folder) -> list[Path]:
    """The complete checkpoints in a folder, newest first."""
    complete = [path for path in folder.glob("step_*") if COMPLETE.match(path.name)]
    return sorted(complete, key=step_of, reverse=True)


def read_state(path):
    """The `state` that was given to `CheckpointWriter.start`."""
    return json.loads((path / "state.json").read_text())


def find_checkpoint(resume, folder) -> Path | None:
    """The checkpoint to resume from, the same on every rank.

    "none" means None, "auto" the newest valid checkpoint in `folder`, and anything else is the path of a checkpoint.
    Raises UserError, or CheckpointError if all checkpoints in `folder` are damaged.
    """
    if resume == "none":
        return None
    if resume == "auto":
        found = find_valid_checkpoint(folder)
        if found is None and is_first_rank():
            print(f"resume:  no checkpoint in {folder}, so from the start")
        return found

    chosen = Path(resume)
    problem = find_damage(chosen)
    require(not problem, f"resume={resume}: {problem}; give auto, none, or the folder of a checkpoint")
    if chosen.resolve().parent == folder.resolve():
        done = read_state(chosen)["step"]  # its name may be another, such as step_N.abandoned
        later = [path for path in list_checkpoints(folder) if step_of(path) > done]
        set_aside(later, "abandoned", chosen)
    return chosen


def find_valid_checkpoint(folder) -> Path | None:
    """The newest valid checkpoint, the same on every rank. None if there are no checkpoints.

    Newer ones are renamed to step_N.damaged. Raises CheckpointError if none is valid.
    """
    damaged = []
    for path in gather(list_checkpoints(folder))[0]:  # the list of rank 0
        problem = find_damage(path)
        if problem is None:
            set_aside(damaged, "damaged", path)
            return path
        damaged.append(path)
        if is_first_rank():
            print(f"warning: {path} is damaged: {problem}", flush=True)

    require(
        not damaged,
        f"every checkpoint in {folder} is damaged, so resume=auto has nothing to go on from. resume=none starts "
        "anew and moves the folder of this run aside",
        CheckpointError,
    )
    return None


def find_damage(path) -> str | None:
    """How a checkpoint differs from its manifest, the same on every rank. None if it is valid."""
    try:
        with fail_together():
            digests = json.loads((path / "manifest.json").read_text())
            files = {"state.json", "versions.json", *(file.name for file in path.glob("*.safetensors"))}
            unlisted = files.difference(digests if isinstance(digests, dict) else ())
            require(not unlisted, f"manifest.json does not list {', '.join(sorted(unlisted))}", CheckpointError)

            for name in sorted(digests)[dist.get_rank() :: dist.get_world_size()]:  # the ranks share the files
                was = digests[name]
                now = digest_file(path / name)
                require(
                    now == was,
                    f"{name} has changed since it was written: bytes and SHA-256 are {now}, were {was}",
                    CheckpointError,
                )
    except CheckpointError as error:
        return str(error)
    return None


def set_aside(checkpoints, reason, used):
    """Rename checkpoints to NAME.REASON, so that the run, which resumes from `used`, can save these steps again."""
    if is_first_rank():
        for path in checkpoints:
            print(f"{path.name} is now {path.name}.{reason}: the run goes on from {used.name}")
            add_suffix(path, reason)


def check_resumed(path, config: dict, data: dict[str, str]):
    """Print what changed since a checkpoint. Returns its step. Raises UserError if the run cannot resume from it.

    `data` is the fingerprint of the training prompts.
    """
    state = read_state(path)
    steps = config["train"]["steps"]
    was = state["data"]
    if isinstance(was, str):  # of an older commit, whose formula may be another
        was = {"rows": was} if was == data["rows"] else {}
    require(
        was.get("rows", data["rows"]) == data["rows"],
        f"data.train={config['data']['train']}: not the prompts that {path} was trained on, so its position in "
        "them means nothing. Use the same data, or start a new run (resume=none) with model.path=an export in hf/",
    )
    require(state["step"] <= steps, f"train.steps={steps}, but {path} is already after step {state['step']}")

    if is_first_rank():
        print(f"resume:  after step {state['step']}, from {path}")
        if "rows" not in was:
            print(f"warning: {path} is of another commit: its fingerprint of data.train cannot be compared")
        for name in was:
            if was[name] != data.get(name, was[name]):
                print(f"         changed: data.train, {name}")

        was = dict(dotted_items({**state["config"], "resume": None}))
        now = dict(dotted_items({**config, "resume": None}))
        saved_with = json.loads((path / "versions.json").read_text())
        for line in versions.differences(was, now) + versions.differences(saved_with, versions.versions()):
            print(f"         changed: {line}")
    return state["step"]
