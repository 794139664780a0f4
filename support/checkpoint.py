"""Checkpoints that are complete or absent, checked before use, and readable on any layout.

A checkpoint is a folder: `state.json` (what the caller wants to remember), `rank_*.safetensors` (sharded tensors, each
rank its own part) and `manifest.json` (size and SHA-256 of every other file), written last. All is written under a
temporary name, flushed to the disk, then renamed. Megatron-core's dist_checkpointing says which part of which tensor a
rank holds; here is how parts are stored: as JSON and safetensors, so that nothing that is read can run code, and by a
thread, so that training goes on meanwhile. Every rank must see the same file system.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from safetensors import safe_open
from safetensors.torch import save_file

from config import UserError

FILE_BYTES = 1 << 30  # of a file, about: so much is held twice in memory while it is written
COMPLETE = re.compile(r"step_(\d{6,})$")


class CheckpointError(Exception):
    """A checkpoint could not be written, or cannot be used. The message is for the user."""


# ---------------------------------------------------------------- sharded tensors in safetensors files


class SafetensorsStorage(SaveShardedStrategy, LoadShardedStrategy, LoadCommonStrategy):
    """Megatron's sharded tensors as files `rank_RRRRR_NNN.safetensors` of named boxes.

    A box is called "key@offset" (its place in the whole tensor); the shape of the whole is in the file's metadata.
    `save` only copies the tensors to memory; `write` puts them into files.
    """

    def __init__(self):
        super().__init__("train_grpo_safetensors", 1)
        self.boxes: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def save(self, sharded_state_dict: dict, checkpoint_dir: str) -> None:
        for tensor in nested_values(sharded_state_dict):
            if is_main_replica(tensor.replica_id):
                name = f"{tensor.key}@{','.join(map(str, tensor.global_offset))}"
                self.boxes[name] = tensor.data.detach().to("cpu", copy=True).view(box_shape(tensor))
                self.shapes[tensor.key] = tuple(tensor.global_shape)

    def write(self, folder: Path) -> None:
        """Write this rank's boxes to `folder`."""
        files, held = [{}], 0
        for name, box in self.boxes.items():
            if held and held + box.nbytes > FILE_BYTES:
                files, held = [*files, {}], 0
            files[-1][name], held = box, held + box.nbytes
        for number, boxes in enumerate(files if self.boxes else []):
            shapes = {name: self.shapes[name.rpartition("@")[0]] for name in boxes}
            metadata = {"shapes": json.dumps(shapes)}  # one entry: safetensors writes several in any order
            save_file(boxes, folder / f"rank_{dist.get_rank():05d}_{number:03d}.safetensors", metadata)

    def load(self, sharded_state_dict: dict, checkpoint_dir: str) -> dict:
        """The wanted part of each tensor, put together from the boxes that overlap it. Raises CheckpointError."""
        stored: dict[str, list] = {}  # key → (open file, name of the box, its offset)
        shapes = {}
        for path in sorted(Path(checkpoint_dir).glob("rank_*.safetensors")):
            file = safe_open(path, framework="pt")
            for name, shape in json.loads(file.metadata()["shapes"]).items():
                key, _, offset = name.rpartition("@")
                stored.setdefault(key, []).append((file, name, [int(x) for x in offset.split(",")]))
                shapes[key] = tuple(shape)

        def read(tensor: ShardedTensor) -> torch.Tensor:
            if shapes.get(tensor.key) != tuple(tensor.global_shape):
                raise CheckpointError(
                    f"{checkpoint_dir}: {tensor.key} is {shapes.get(tensor.key, 'missing')}, this model wants "
                    f"{tuple(tensor.global_shape)}; it was saved from another model"
                )
            out, filled = torch.empty(box_shape(tensor), dtype=tensor.dtype), 0
            for file, name, offset in stored[tensor.key]:
                box = file.get_slice(name)
                here, there = overlap(tensor.global_offset, out.shape, offset, box.get_shape())
                if here is not None:
                    out[here] = box[there]
                    filled += out[here].numel()
            if filled != out.numel():
                raise CheckpointError(f"{checkpoint_dir}: {tensor.key} has {filled} of {out.numel()} numbers")
            return out.view(tensor.local_shape)

        return dict_list_map_outplace(read, sharded_state_dict)

    can_handle_sharded_objects = True  # there are none; Megatron asks

    def load_common(self, checkpoint_dir: str) -> dict:
        return {}  # common.pt, which Megatron always writes, is a pickle; state.json stands in its place

    def load_sharded_objects(self, sharded_objects_state_dict: dict, checkpoint_dir: str) -> dict:
        return {}

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict:
        raise CheckpointError("load() checks keys and shapes itself")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        pass  # the manifest has said what this folder is

    def check_version_compatibility(self, loaded_version: int) -> None:
        pass


def box_shape(tensor: ShardedTensor) -> tuple[int, ...]:
    """Shape of a rank's part with the axes of the whole tensor: Megatron leaves out leading ones of size 1."""
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)


def overlap(offset: tuple, shape: tuple, other_offset: tuple, other_shape: tuple) -> tuple:
    """Slices, in each of two boxes, of the part they share; (None, None) if they share nothing."""
    starts = [max(a, b) for a, b in zip(offset, other_offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None, None
    return tuple(
        tuple(slice(start - o, end - o) for start, end, o in zip(starts, ends, origin, strict=True))
        for origin in (offset, other_offset)
    )


# ---------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes checkpoints to `folder`, one at a time, in the background; keeps the newest `keep_last` (0: all) and those
    of every `keep_every`-th step (0: none)."""

    def __init__(self, folder: Path, keep_last: int, keep_every: int):
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self.step, self.state, self.thread, self.failure = None, None, None, None

    def start(self, step: int, state: dict[str, Any], sharded: dict) -> None:
        """Copy the tensors and begin to write; training may go on and change them. Called on every rank."""
        self.finish()
        temporary, storage = self.folder / f"step_{step:06d}.tmp", SafetensorsStorage()
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(sharded, str(temporary), storage)
        except OSError as error:  # on rank 0, which writes small files here
            raise CheckpointError(self.explain(step, str(error))) from None
        self.step, self.state, self.failure = step, state, None
        self.thread = threading.Thread(target=self._write, args=(storage, temporary), daemon=True)
        self.thread.start()

    def _write(self, storage: SafetensorsStorage, temporary: Path) -> None:
        try:
            storage.write(temporary)
        except Exception as error:  # told by finish(), on every rank
            self.failure = f"{type(error).__name__}: {error}"

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written, and give it its name; returns it, None if there is none.

        Called on every rank. Raises CheckpointError on every rank if one of them failed, and leaves no half checkpoint.
        """
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        target = self.folder / f"step_{self.step:06d}"
        temporary = self.folder / f"{target.name}.tmp"
        failure = first_failure(self.failure)
        if failure is None:
            names = sorted(path.name for path in temporary.iterdir() if path.name != "common.pt")
            digests, failure = digest_files(temporary, names, synced=True)
        if failure is None:
            failure = first_failure(self._complete(temporary, target, digests) if dist.get_rank() == 0 else None)
        if failure is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self.explain(self.step, failure))
        return target

    def explain(self, step: int, failure: str) -> str:
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}: {failure}; "
            "the ones before are as they were. Make room, then go on with resume=auto, or go on in another output_dir "
            "with resume=the newest of them"
        )

    def _complete(self, temporary: Path, target: Path, digests: dict) -> str | None:
        """Write state and manifest, rename, remove old checkpoints; returns what went wrong."""
        try:
            (temporary / "common.pt").unlink()
            write_synced(temporary / "state.json", json.dumps(self.state, indent=1))
            digests["state.json"] = digest(temporary / "state.json")
            write_synced(temporary / "manifest.json", json.dumps(digests, indent=1))
            put_in_place(temporary, target)
            for path in complete(self.folder)[self.keep_last :] if self.keep_last else []:
                if not (self.keep_every and step_of(path) % self.keep_every == 0):
                    put_aside(path, "removed")  # so that no half one ever has the name of a whole one
            for removed in self.folder.glob("step_*.removed"):
                shutil.rmtree(removed)
        except OSError as error:
            return str(error)
        return None


def first_failure(failure: str | None) -> str | None:
    """The first rank's failure, if any rank has one; the same on every rank."""
    failures = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((f"{text} (rank {rank})" for rank, text in enumerate(failures) if text is not None), None)


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, target: Path) -> None:
    """Give a folder, whose files are on the disk, its final name; one that has it already is replaced as a whole."""
    sync(temporary)
    if target.exists():
        put_aside(target, "replaced")
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(target.with_name(f"{target.name}.replaced"), ignore_errors=True)


def digest(path: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def digest_files(folder: Path, names: list[str], synced: bool = False) -> tuple[dict[str, list], str | None]:
    """({name: digest}, failure) of files in `folder`, the work spread over the ranks; the same on every rank.

    `synced` waits for each file to be on the disk.
    """
    mine, failure = {}, None
    try:
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            if synced:
                sync(folder / name)
            mine[name] = digest(folder / name)
    except OSError as error:
        failure = str(error)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {name: found for part in everywhere for name, found in part.items()}, first_failure(failure)


# ---------------------------------------------------------------- finding and reading


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(COMPLETE.match(path.name)[1])


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, newest first."""
    found = [path for path in folder.glob("step_*") if COMPLETE.match(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, compared with its manifest; None if nothing. The same on every rank."""
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
    found, failure = digest_files(path, sorted(files))
    if failure:
        return failure
    for name, (size, sha) in files.items():
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes, {size} were written"
        if found[name][1] != sha:
            return f"{name} has changed since it was written (SHA-256)"
    return None


def sound_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is as it was written, None if there are no checkpoints; the same on every rank.

    Newer ones that are damaged are put aside under the name step_N.damaged. Raises CheckpointError if all are.
    """
    first, paths = dist.get_rank() == 0, [complete(folder)]
    dist.broadcast_object_list(paths)
    for number, path in enumerate(paths[0]):
        problem = damage(path)
        if problem is None:
            for damaged in paths[0][:number] if first else []:
                print(f"going back to {path.name}; {damaged.name} is now {damaged.name}.damaged", flush=True)
                put_aside(damaged, "damaged")
            return path
        if first:
            print(f"warning: {path} is damaged: {problem}", flush=True)
    if paths[0]:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged, so resume=auto has nothing to go on from; resume=none starts "
            "anew and moves the folder of this run aside"
        )
    return None


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from: for "none" none, for "auto" the newest sound one in `folder`, else the one named.

    The same on every rank. Raises UserError, or CheckpointError where all in `folder` are damaged.
    """
    if resume == "none":
        return None
    if resume == "auto":
        found = sound_checkpoint(folder)
        if found is None and dist.get_rank() == 0:
            print(f"resume:  no checkpoint in {folder}, so from the start", flush=True)
        return found
    chosen = Path(resume)
    problem = damage(chosen)
    if problem:
        raise UserError(f"resume={resume}: {problem}; give auto, none, or the folder of a checkpoint")
    if dist.get_rank() == 0 and chosen.resolve().parent == folder.resolve():
        set_aside_after(chosen)
    return chosen


def check_resumed(path: Path, config: dict[str, Any], data: str) -> int:
    """The step that a checkpoint was saved after, once it is sure that a run with this configuration and fingerprint of
    its data can go on from it; says what changed. Raises UserError.
    """
    state, steps = read_state(path), config["train"]["steps"]
    if state["data"] != data:
        raise UserError(
            f"data.train={config['data']['train']}: not the prompts that {path} was trained on, so its place among "
            "them means nothing; use the same data, or start a new run (resume=none) with model.path=an export in hf/"
        )
    if state["step"] > steps:
        raise UserError(f"train.steps={steps}, but {path} is already after step {state['step']}")
    if dist.get_rank() == 0:
        print(f"resume:  after step {state['step']}, from {path}")
        for section, was in state["config"].items():
            for key, value in was.items() if isinstance(was, dict) else [(None, was)]:
                new = config.get(section) if key is None else config.get(section, {}).get(key)
                if new != value and section != "resume":
                    print(f"         changed: {section}{'.' * bool(key)}{key or ''}: {value} → {new}")
    return state["step"]


def put_aside(path: Path, why: str) -> None:
    """Rename a checkpoint so that it is not taken for one any more."""
    target = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def set_aside_after(path: Path) -> None:
    """Put those checkpoints aside that a run which goes on from `path` will write anew."""
    for later in complete(path.parent):
        if step_of(later) > step_of(path):
            print(f"{later} is now {later.name}.abandoned: the run goes on from {path.name}", flush=True)
            put_aside(later, "abandoned")


def read_state(path: Path) -> dict[str, Any]:
    """What the caller of `start` wanted to remember."""
    return json.loads((path / "state.json").read_text())


def load_sharded(path: Path, sharded: dict) -> dict:
    """The tensors that `sharded` describes, on whatever layout they were saved. Raises CheckpointError."""
    storage = SafetensorsStorage()
    return dist_checkpointing.load(sharded, str(path), storage, storage)
