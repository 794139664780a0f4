"""Sharded tensors, as Megatron-core's ShardedTensor describes them, in safetensors files that any layout can read."""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator
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

FILE_BYTES = 1 << 30  # size of a file, about; so many bytes are in memory twice while it is written
Shard = tuple[str, torch.Tensor, tuple[int, ...]]  # "key@offset", the values, shape of the whole tensor


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be used. The message is for the user."""


@contextlib.contextmanager
def fail_together(what: str = "") -> Iterator[None]:
    """Where the block fails on a rank, raise CheckpointError on every rank: `what`, and the failure of the lowest one.

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


# ---------------------------------------------------------------- writing


def expand_factory(tensor: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The sharded tensors that a factory makes, such as gate and up of a fused weight; any other tensor itself."""
    return tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]


def copy_shards(sharded: dict[str, ShardedTensor | ShardedTensorFactory]) -> list[Shard]:
    """Copies in host memory of the shards this rank has to save: those of which it holds the main replica."""
    shards = []
    for tensor in sharded.values():
        for part in expand_factory(tensor):
            if is_main_replica(part.replica_id):
                name = f"{part.key}@{','.join(map(str, part.global_offset))}"
                values = part.data.detach().to("cpu", copy=True).view(shard_shape(part))
                shards.append((name, values, tuple(part.global_shape)))
    return shards


def write_shards(folder: Path, shards: list[Shard]) -> dict[str, list]:
    """Write a rank's shards to files `rank_RRRRR_NNN.safetensors`, on the disk before this returns.

    The metadata of a file has the shapes of the whole tensors. Returns {file name: its digest}.
    """
    digests = {}
    for number, content in enumerate(split_by_bytes(shards, FILE_BYTES)):
        path = folder / f"rank_{dist.get_rank():05d}_{number:03d}.safetensors"
        shapes = json.dumps({name: shape for name, _, shape in content})
        # One entry of metadata: safetensors writes several in no fixed order.
        save_file({name: values for name, values, _ in content}, path, {"shapes": shapes})
        sync(path)
        digests[path.name] = digest_file(path)
    return digests


def check_coverage(sizes_of_ranks: list[list[tuple[str, int, int]]]) -> None:
    """CheckpointError unless all ranks' shards (name, elements, those of the whole tensor) hold each element once."""
    shards = list(itertools.chain(*sizes_of_ranks))
    twice = [name for name, times in Counter(name for name, _, _ in shards).items() if times > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is saved twice")
    saved = Counter()
    for name, elements, _ in shards:
        saved[name.rpartition("@")[0]] += elements
    for name, _, whole in shards:
        key = name.rpartition("@")[0]
        require(saved[key] == whole, f"{key} has {saved[key]} of {whole} elements", CheckpointError)


# ---------------------------------------------------------------- reading


def read_sharded(
    path: Path, sharded: dict[str, ShardedTensor | ShardedTensorFactory], others: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that `sharded` describes, assembled from the stored shards that overlap them, whatever the layout.

    `others`: kinds of tensors (kind_of) that somebody else reads or nobody needs; None: all but those of `sharded`.
    Called on every rank. Raises CheckpointError on every rank if an element is missing on one of them, or if a tensor
    is stored that no rank reads and that is of no such kind.
    """
    loaded = {}
    stored = {}  # key → (open file, name of a shard, its offset, shape of the whole tensor) of each of its shards
    with fail_together(f"{path}: "):
        for file_path in sorted(path.glob("rank_*.safetensors")):
            file = safe_open(file_path, framework="pt")
            for name, shape in json.loads(file.metadata()["shapes"]).items():
                key, _, offset = name.rpartition("@")
                stored.setdefault(key, []).append((file, name, [int(x) for x in offset.split(",")], tuple(shape)))
        for name, tensor in sharded.items():
            parts = [read_shard(stored, part) for part in expand_factory(tensor)]
            loaded[name] = tensor.merge_fn(parts) if isinstance(tensor, ShardedTensorFactory) else parts[0]
    read = set(itertools.chain(*gather([part.key for tensor in sharded.values() for part in expand_factory(tensor)])))
    kinds = {kind_of(key) for key in read}
    unread = [key for key in stored if key not in read]
    unread = [key for key in unread if kind_of(key) in kinds or (others is not None and kind_of(key) not in others)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(f"{path}: nobody reads {min(unread)}{more}; it was saved from another model")
    return loaded


def kind_of(key: str) -> str:
    """The first word of a tensor's key: what it is of a weight (the weight itself, a moment, a set's name)."""
    return key.partition(".")[0]


def read_shard(stored: dict[str, list[tuple]], part: ShardedTensor) -> torch.Tensor:
    """This rank's shard of a tensor, in host memory. Raises ValueError unless each element is stored once."""
    candidates = stored.get(part.key, [])
    shapes = {shape for *_, shape in candidates}
    require(
        shapes == {tuple(part.global_shape)},
        f"{part.key} is {min(shapes, default='missing')}, this model wants {tuple(part.global_shape)}; it was "
        "saved from another model",
        ValueError,
    )
    out = torch.empty(shard_shape(part), dtype=part.dtype)
    filled = 0
    for file, name, offset, _ in candidates:
        shard = file.get_slice(name)
        sides = zip(part.global_offset, out.shape, offset, shard.get_shape(), strict=True)
        common = [(a, b, max(a, b), min(a + n, b + m)) for a, n, b, m in sides]  # of each axis
        if all(start < end for _, _, start, end in common):
            here = tuple(slice(start - a, end - a) for a, _, start, end in common)
            out[here] = shard[tuple(slice(start - b, end - b) for _, b, start, end in common)]
            filled += out[here].numel()
    require(filled == out.numel(), f"{part.key} has {filled} of {out.numel()} elements", ValueError)
    return out.view(part.local_shape)


def shard_shape(tensor: ShardedTensor) -> tuple[int, ...]:
    """Shape of a shard with all axes of the whole tensor: Megatron leaves out leading axes of size 1."""
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
