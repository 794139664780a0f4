"""Checkpoints that are complete or absent, checked before use, and readable on any layout.

A checkpoint is a folder: `state.json` (what the caller wants to remember), `versions.json` (what it was saved with),
`rank_*.safetensors` (sharded tensors, each rank its own part) and `manifest.json` (size and SHA-256 of every other
file), written last. All is written under a temporary name, flushed to the disk, then renamed. Megatron-core's
ShardedTensor says which part of which tensor a rank holds; here is how parts are stored: as JSON and safetensors, so
that nothing that is read can run code, and by a thread, so that training goes on meanwhile. Every rank must see the
same file system.
"""

import itertools
import json
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from config import TrainingError, UserError
from support import versions
from support.files import add_suffix, digest, make_temporary_folder, put_in_place, sync, write_synced
from support.ranks import gather
from support.rollout_files import RolloutWriter

FILE_BYTES = 1 << 30  # of a file, about: so much is held twice in memory while it is written
COMPLETE = re.compile(r"step_(\d{6,})$")


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be used. The message is for the user."""


# ---------------------------------------------------------------- sharded tensors in safetensors files

Box = tuple[str, torch.Tensor, tuple[int, ...]]  # "key@offset", the values, shape of the whole tensor


def described(tensor: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The sharded tensors of a description: a factory has several, such as gate and up of a joined weight."""
    return tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]


def own_boxes(sharded: dict[str, ShardedTensor | ShardedTensorFactory]) -> list[Box]:
    """Copies, in host memory, of what this rank has to save: the parts of which it holds the main replica."""
    parts = [part for tensor in sharded.values() for part in described(tensor) if is_main_replica(part.replica_id)]
    return [
        (
            f"{part.key}@{','.join(map(str, part.global_offset))}",
            part.data.detach().to("cpu", copy=True).view(box_shape(part)),
            tuple(part.global_shape),
        )
        for part in parts
    ]


def write_boxes(folder: Path, boxes: list[Box]) -> dict[str, list]:
    """Write a rank's boxes to files `rank_RRRRR_NNN.safetensors`, on the disk before this returns.

    The metadata of a file has the shapes of the whole tensors. Returns {name of the file: its digest}.
    """
    files, held = [], 0
    for box in boxes:
        if not files or held + box[1].nbytes > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(box)
        held += box[1].nbytes
    digests = {}
    for number, part in enumerate(files):
        path = folder / f"rank_{dist.get_rank():05d}_{number:03d}.safetensors"
        shapes = json.dumps({name: shape for name, _, shape in part})
        save_file({name: values for name, values, _ in part}, path, {"shapes": shapes})  # several have no fixed order
        sync(path)
        digests[path.name] = digest(path)
    return digests


def saved_wrongly(sizes_of_ranks: list[list[tuple[str, int, int]]]) -> str | None:
    """What is wrong where the ranks' boxes do not hold every number once; None if they do.

    A box is told by its name, its numbers and those of the whole tensor.
    """
    names, held, wanted = set(), Counter(), {}
    for name, size, whole in itertools.chain(*sizes_of_ranks):
        if name in names:
            return f"{name} is saved twice"
        names.add(name)
        key = name.rpartition("@")[0]
        held[key] += size
        wanted[key] = whole
    return next((f"{key} has {held[key]} of {wanted[key]} numbers" for key in wanted if held[key] != wanted[key]), None)


def read_sharded(
    path: Path, sharded: dict[str, ShardedTensor | ShardedTensorFactory], others: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that `sharded` describes, put together from the boxes that overlap them, whatever layout saved them.

    `others`: kinds of tensors, the first words of their keys, that somebody else reads or nobody needs; None: all kinds
    but those of `sharded`. Called on every rank. Raises CheckpointError on every rank if one of them misses a number,
    or if there is a tensor that no rank reads and that is of no such kind.
    """
    loaded, stored, failure = {}, {}, None
    try:
        stored = stored_boxes(path)
        for name, tensor in sharded.items():
            parts = [read_part(stored, part) for part in described(tensor)]
            loaded[name] = tensor.merge_fn(parts) if isinstance(tensor, ShardedTensorFactory) else parts[0]
    except (OSError, SafetensorError, ValueError) as error:
        failure = str(error)
    failure = first_failure(failure)
    if failure is not None:
        raise CheckpointError(f"{path}: {failure}")
    own = [part.key for tensor in sharded.values() for part in described(tensor)]
    read = {key for keys in gather(own) for key in keys}
    kinds = {kind_of(key) for key in read}
    unread = [key for key in stored if key not in read]
    unread = [key for key in unread if kind_of(key) in kinds or (others is not None and kind_of(key) not in others)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(f"{path}: nobody reads {min(unread)}{more}; it was saved from another model")
    return loaded


def kind_of(key: str) -> str:
    """The first word of a tensor's key: what it is of a weight."""
    return key.partition(".")[0]


def stored_boxes(path: Path) -> dict[str, list[tuple]]:
    """Key → (open file, name of a box, its offset, shape of the whole tensor) of every box in a checkpoint."""
    stored = {}
    for file_path in sorted(path.glob("rank_*.safetensors")):
        file = safe_open(file_path, framework="pt")
        for name, shape in json.loads(file.metadata()["shapes"]).items():
            key, _, offset = name.rpartition("@")
            stored.setdefault(key, []).append((file, name, [int(x) for x in offset.split(",")], tuple(shape)))
    return stored


def read_part(stored: dict[str, list[tuple]], part: ShardedTensor) -> torch.Tensor:
    """This rank's part of a tensor, in host memory. Raises ValueError where the boxes do not hold each number once."""
    boxes = stored.get(part.key, [])
    shapes = {shape for *_, shape in boxes}
    if shapes != {tuple(part.global_shape)}:
        raise ValueError(
            f"{part.key} is {min(shapes, default='missing')}, this model wants {tuple(part.global_shape)}; it was "
            "saved from another model"
        )
    out, filled = torch.empty(box_shape(part), dtype=part.dtype), 0
    for file, name, offset, _ in boxes:
        box = file.get_slice(name)
        here, there = overlap(part.global_offset, out.shape, offset, box.get_shape())
        if here is not None:
            out[here] = box[there]
            filled += out[here].numel()
    if filled != out.numel():
        raise ValueError(f"{part.key} has {filled} of {out.numel()} numbers")
    return out.view(part.local_shape)


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
        self.step, self.state, self.thread = None, None, None
        self.rollouts = RolloutWriter()  # of the same run: a checkpoint gets its name after the samples before it
        self.sizes, self.digests, self.failure = [], {}, None  # of this rank's boxes, of its files; what went wrong

    def start(self, step: int, state: dict[str, Any], sharded: dict) -> None:
        """Copy the tensors and begin to write; training may go on and change them. Called on every rank."""
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
        boxes = own_boxes(sharded)
        self.sizes = [(name, values.numel(), math.prod(shape)) for name, values, shape in boxes]
        self.step, self.state, self.failure = step, state, None
        self.thread = threading.Thread(target=self._write, args=(temporary, boxes), daemon=True)
        self.thread.start()

    def _write(self, temporary: Path, boxes: list[Box]) -> None:
        try:
            self.digests = write_boxes(temporary, boxes)
        except Exception as error:  # told by finish(), on every rank
            self.failure = f"{type(error).__name__}: {error}"

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written, and for the files of samples, and give it its name; returns
        it, None if there is none.

        Called on every rank. Raises CheckpointError on every rank if one of them failed, and leaves no half checkpoint.
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
            failure = saved_wrongly(gather(self.sizes))
        if failure is None:
            digests = {name: found for part in gather(self.digests) for name, found in part.items()}
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
            for name, content in {"state.json": self.state, "versions.json": versions.versions()}.items():
                write_synced(temporary / name, json.dumps(content, indent=1, default=np.ndarray.tolist))
                digests[name] = digest(temporary / name)
            write_synced(temporary / "manifest.json", json.dumps(digests, indent=1))
            put_in_place(temporary, target)
            for path in complete(self.folder)[self.keep_last :] if self.keep_last else []:
                if not (self.keep_every and step_of(path) % self.keep_every == 0):
                    add_suffix(path, "removed")  # so that no half one ever has the name of a whole one
            for removed in self.folder.glob("step_*.removed"):
                shutil.rmtree(removed)
        except OSError as error:
            return str(error)
        return None


def first_failure(failure: str | None) -> str | None:
    """The first rank's failure, if any rank has one; the same on every rank."""
    return next((f"{text} (rank {rank})" for rank, text in enumerate(gather(failure)) if text is not None), None)


def digest_files(folder: Path, names: list[str]) -> tuple[dict[str, list], str | None]:
    """({name: digest}, failure) of files in `folder`, the work spread over the ranks; the same on every rank."""
    mine, failure = {}, None
    try:
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            mine[name] = digest(folder / name)
    except OSError as error:
        failure = str(error)
    return {name: found for part in gather(mine) for name, found in part.items()}, first_failure(failure)


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
                add_suffix(damaged, "damaged")
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
        made = path / "versions.json"  # checkpoints of before there was this file have none
        for line in versions.differences(json.loads(made.read_text()), versions.versions()) if made.exists() else []:
            print(f"         changed: {line}")
    return state["step"]


def set_aside_after(path: Path) -> None:
    """Put those checkpoints aside that a run which goes on from `path` will write anew."""
    for later in complete(path.parent):
        if step_of(later) > step_of(path):
            print(f"{later} is now {later.name}.abandoned: the run goes on from {path.name}", flush=True)
            add_suffix(later, "abandoned")


def read_state(path: Path) -> dict[str, Any]:
    """What the caller of `start` wanted to remember."""
    return json.loads((path / "state.json").read_text())
