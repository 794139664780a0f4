"""Sharded tensors, as Megatron-core's ShardedTensor describes them, in safetensors files that any layout can read."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from config import TrainingError
from grpo.parts.base.files import digest_file, split_by_bytes, sync
from grpo.parts.base.ranks import gather
from grpo.parts.base.require import require

STACKED = re.compile(r"(.*\.layers\.)(\D.*)")  # a key of older commits, one for a weight of all layers
FILE_BYTES = 1 << 30  # the approximate size of a file, which is in memory twice while it is written
Sharded = ShardedTensor | ShardedTensorFactory  # of a model, as Megatron describes it
Shard = tuple[str, torch.Tensor, tuple[int, ...]]  # "key@offset", the values, shape of the whole tensor


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be used. The message is for the user."""


@contextlib.contextmanager
def fail_together(what=""):
    """If the block fails on a rank, raise CheckpointError on every rank, with `what` and the lowest rank's failure.

    Every rank enters the block, which has no collectives.
    """
    failure = None
    try:
        yield
    except (OSError, SafetensorError, ValueError, CheckpointError) as error:
        failure = str(error)
    for rank, text in enumerate(gather(failure)):
        if text is not None:
            raise CheckpointError(f"{what}{text} (rank {rank})")


def expand_factory(tensor: Sharded) -> list[ShardedTensor]:
    """The sharded tensors that a factory makes, such as gate and up of a fused weight; any other tensor itself."""
    return tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]


def shard_shape(tensor):
    """Shape of a shard with all axes of the whole tensor: Megatron leaves out leading axes of size 1."""
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)


# ---------------------------------------------------------------- writing


def copy_shards(sharded: dict[str, Sharded]) -> list[Shard]:
    """Copies in host memory of the shards that this rank has to save, because it has their main replica."""
    shards = []
    for tensor in sharded.values():
        for part in expand_factory(tensor):
            if is_main_replica(part.replica_id):
                offset = ",".join(map(str, part.global_offset))
                values = part.data.detach().to("cpu", copy=True).view(shard_shape(part))
                shards.append((f"{part.key}@{offset}", values, tuple(part.global_shape)))
    return shards


def write_shards(folder, shards: list[Shard]):
    """Write a rank's shards to files `rank_RRRRR_NNN.safetensors`, which are on the disk when this returns.

    The metadata of a file has the shapes of the whole tensors. Returns {file name: its digest}.
    """
    digests = {}
    for number, content in enumerate(split_by_bytes(shards, FILE_BYTES)):
        path = folder / f"rank_{dist.get_rank():05d}_{number:03d}.safetensors"
        tensors = {name: values for name, values, _ in content}
        shapes = {name: shape for name, _, shape in content}
        # One entry of metadata, because safetensors writes several in no fixed order.
        save_file(tensors, path, {"shapes": json.dumps(shapes)})
        sync(path)
        digests[path.name] = digest_file(path)
    return digests


def check_coverage(sizes_of_ranks):
    """Raise CheckpointError unless the shards of all ranks have each element of each tensor once.

    A shard is given by its name, its number of elements and the number of elements of the whole tensor.
    """
    names = Counter()
    saved = Counter()
    wholes = {}
    for sizes in sizes_of_ranks:
        for name, elements, whole in sizes:
            key = name.rpartition("@")[0]
            names[name] += 1
            saved[key] += elements
            wholes[key] = whole

    for name, times in names.items():
        require(times == 1, f"{name} is saved twice", CheckpointError)
    for key, whole in wholes.items():
        require(saved[key] == whole, f"{key} has {saved[key]} of {whole} elements", CheckpointError)


# ---------------------------------------------------------------- reading


def read_sharded(
    path: Path, sharded: dict[str, Sharded], others: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that `sharded` describes, assembled from the stored shards that overlap them, whatever the layout.

    `others` are the kinds of tensors (`kind_of`) that somebody else reads or nobody needs. None means all kinds that
    `sharded` does not have. Called on every rank. Raises CheckpointError on every rank if an element is missing on one
    of them, or if no rank reads a stored tensor whose kind is not in `others`.
    """
    loaded = {}
    read = set()
    with fail_together(f"{path}: "):
        stored = open_shards(path)
        for name, tensor in sharded.items():
            values = []
            for part in expand_factory(tensor):
                values.append(read_shard(stored.get(part.key, []), part))
                read.add(part.key)
            loaded[name] = tensor.merge_fn(values) if isinstance(tensor, ShardedTensorFactory) else values[0]

    # A tensor that no rank reads would be lost in silence.
    read = set().union(*gather(read))
    kinds = {kind_of(key) for key in read}
    for key in sorted(stored.keys() - read):
        kind = kind_of(key)
        elsewhere = others is None or kind in others
        if kind in kinds or not elsewhere:
            raise CheckpointError(f"{path}: nobody reads {key}; it was saved from another model")
    return loaded


def open_shards(path):
    """{key: (open file, name of a shard, its offset, shape of the whole tensor) of each stored shard}."""
    stored = {}
    for file_path in sorted(path.glob("rank_*.safetensors")):
        file = safe_open(file_path, framework="pt")
        for name, shape in json.loads(file.metadata()["shapes"]).items():
            key, _, offset = name.rpartition("@")
            starts = [int(start) for start in offset.split(",")]
            stacked = STACKED.fullmatch(key)
            if stacked:
                layer, *starts = starts
                key = f"{stacked[1]}{layer}.{stacked[2]}"
                shape = shape[1:]
            stored.setdefault(key, []).append((file, name, starts, tuple(shape)))
    return stored


def kind_of(key):
    """The first word of a tensor's key, such as `exp_avg` for a moment of a weight, or the name of a set of weights."""
    return key.partition(".")[0]


def read_shard(candidates, part: ShardedTensor):
    """This rank's shard of a tensor, in host memory, from the stored shards of its key.

    Raises ValueError unless each element is stored once.
    """
    wanted = tuple(part.global_shape)
    shapes = {shape for *_, shape in candidates}
    require(
        shapes == {wanted},
        f"{part.key} is {min(shapes, default='missing')}, this model wants {wanted}; it was saved from another model",
        ValueError,
    )

    out = torch.empty(shard_shape(part), dtype=part.dtype)
    filled = 0
    for file, name, offset, _ in candidates:
        shard = file.get_slice(name)
        here = []  # what both shards have, as slices of `out` and of the stored shard, axis by axis
        there = []
        sizes = shard.get_shape()[-len(offset) :]  # a stacked shard has an axis before them, of one layer
        axes = zip(part.global_offset, out.shape, offset, sizes, strict=True)
        for start, size, stored_start, stored_size in axes:
            first = max(start, stored_start)
            end = min(start + size, stored_start + stored_size)
            here.append(slice(first - start, end - start))
            there.append(slice(first - stored_start, end - stored_start))
        if all(common.start < common.stop for common in here):
            place = out[tuple(here)]
            place.copy_(shard[(..., *there)].view(place.shape))
            filled += place.numel()

    require(filled == out.numel(), f"{part.key} has {filled} of {out.numel()} elements", ValueError)
    return out.view(part.local_shape)
