"""What a rank will hold of weights, gradients, optimizer state, reference, past weights and teacher, counted before
anything is built.

Megatron's own model, buffers and shares of its distributed optimizer, on torch's meta device, where tensors take no
memory, in a world of process groups that connect nobody: so every layout and every stage is as a run will have it, to
the byte. Needs config.json of the model alone.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import megatron_bridge as bridge
from config import Config, LoraConfig, ParallelConfig

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

META = torch.device("meta")
FURTHER = ("reference", "past", "teacher")  # what algo.reference_on is about
KINDS = ("weights", "gradients", "optimizer", *FURTHER)


@dataclass(frozen=True)
class Held:
    """What one rank holds from phase to phase, in bytes, and what follows from its weights."""

    weights: int  # with the padding of Megatron's buffers
    frozen: int  # of them, those beside the adapters, which are in no buffer
    gradients: int
    optimizer: int  # on the GPU
    reference: int
    past: int  # with rollout.lag
    teacher: int  # another model than this
    update: int  # what Adam makes for a moment: one fp32 number for each weight that it steps on the GPU
    push: int  # peak of one bucket on its way to vLLM
    export: int  # the same, to an export
    merged: int  # peak of adding adapters to what a layer computes with at once: a weight, or all its experts' fc1
    largest: int  # numbers in the largest weight that is trained
    whole: int  # numbers in the weights of this stage, on all ranks together

    def all(self, *but: str) -> dict[str, int]:
        """{kind: bytes} of the kinds that there are on the GPU, when those named are not."""
        return {kind: size for kind in KINDS if kind not in but and (size := getattr(self, kind))}


class OnMeta(TorchFunctionMode):
    """Wherever code names a device, it is the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        named = {"device": META} if kwargs.get("device") is not None else {}
        return function(*(META if isinstance(value, torch.device) else value for value in args), **(kwargs | named))


@contextlib.contextmanager
def fake_process_groups(parallel: ParallelConfig, world_size: int, rank: int, seed: int = 0) -> Iterator[None]:
    """Make this process `rank` of a fake process group of `world_size` ranks, with Megatron's groups; nothing is sent.

    There must be no process group yet; afterwards there is none again.
    """
    hook = sys.excepthook
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL wraps every group in one that connects
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    sys.excepthook = hook  # torch would print the rank before every line of a traceback
    try:
        with warnings.catch_warnings(action="ignore"):  # the run itself will give them
            bridge.init_model_parallel(parallel, seed)
            yield
    finally:
        bridge.mpu.destroy_model_parallel()
        dist.destroy_process_group()
        dist.set_debug_level(level)


def build_on_meta(path: str, cfg: Config, trained: LoraConfig | None) -> list:
    """The chunks of the model of `path` that this rank of a fake process group holds, without memory or weights."""
    extra = {**cfg.megatron, "perform_initialization": False}
    dtype = bridge.DTYPES[cfg.model.dtype]
    with META, OnMeta():
        return bridge.build_model(path, cfg.parallel, dtype, extra, weights=False, trained=trained)


def stage_shapes(cfg: Config, world_size: int) -> list[dict[str, torch.Size]]:
    """Of each pipeline stage {Megatron's name of a weight: its shape on the stage's first rank}."""
    p, stages = cfg.parallel, []
    for stage in range(p.pp):
        with fake_process_groups(p, world_size, stage * world_size // p.pp, cfg.seed):
            own = bridge.named_weights(build_on_meta(cfg.model.path, cfg, cfg.lora))
            stages.append({name: weight.shape for name, weight in own.items()})
    return stages


def count(cfg: Config, world_size: int, rank: int) -> Held:
    """What `rank` of `world_size` will hold. Needs no process group, and must not find one."""
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    with fake_process_groups(cfg.parallel, world_size, rank, cfg.seed):
        model = build_on_meta(cfg.model.path, cfg, cfg.lora)
        other = [] if cfg.algo.teacher in (None, "self") else build_on_meta(cfg.algo.teacher, cfg, None)
        hf, own = model[0].hf_config, bridge.named_weights(model)
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        ranges = [part for buffer in buffers for part in DistributedOptimizer._build_gbuf_range_map(buffer).values()]
        share = sum(place["param"].size for part in ranges for held in part for place in held["param_map"].values())
        optimizer, away = adam_bytes(cfg, share)
        copy = sum(weight.nbytes for weight in bridge.copy_weights(model))
        trained = bridge.named_weights(model, factors=True) or own
        frozen = 0 if trained is own else sum(weight.nbytes for weight in own.values())
        shapes = {name: weight.shape for name, weight in own.items()}
        whole = 0
        for name, weight in own.items():
            join, _ = bridge.rule_of(bridge.expert_of(name, hf, 0), hf)
            if name != "output_layer.weight" or not hf.tie_word_embeddings:
                split = bridge.SPLIT_DIM[join] is not None
                whole += weight.numel() * (bridge.shard_group(name)[0].size() if split else 1)
        return Held(
            weights=sum(buffer.param_data.nbytes for buffer in buffers) + frozen,
            frozen=frozen,
            gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer=optimizer,
            reference=copy * (cfg.algo.kl_coef > 0),
            past=copy * cfg.rollout.lag,
            teacher=sum(weight.nbytes for chunk in other for weight in chunk.parameters()),
            update=4 * (share - away),
            push=push_bytes(shapes, hf, cfg.rollout.sync_bucket_mb << 20, size, cfg.lora.rank > 0),
            export=push_bytes(shapes, hf, bridge.BUCKET_BYTES, size, cfg.lora.rank > 0),
            merged=merged_bytes(own),
            largest=max(weight.numel() for weight in trained.values()),
            whole=whole,
        )


def adam_bytes(cfg: Config, share: int) -> tuple[int, int]:
    """(bytes of AdamW's state for `share` weights on the GPU, weights that it steps in host memory).

    8 of moments a weight and, of bf16 weights, 4 of an fp32 copy. With megatron.optimizer_cpu_offload these and a
    gradient, 16, are in host memory, and Megatron's own fp32 copy, 4, stays on the GPU; not with
    megatron.use_precision_aware_optimizer. Its number of steps, a scalar a weight on the host, is not counted.
    """
    if not cfg.megatron.get("optimizer_cpu_offload"):
        return share * (8 if cfg.model.dtype == "fp32" else 12), 0
    away = int(share * cfg.megatron.get("optimizer_offload_fraction", 1.0))  # Megatron takes whole weights
    precise = cfg.megatron.get("use_precision_aware_optimizer")
    return 8 * (share - away) + 4 * (share - away if precise else share), away


def merged_bytes(own: dict[str, torch.nn.Parameter]) -> int:
    """Peak of adding adapters to a rank's weights (support/lora.py): the sum of one in fp32 and as it is, with those of
    the other experts of its layer, which are computed with at once."""
    adapted = Counter()
    for name, weight in own.items():
        if hasattr(weight, "adapter"):
            adapted[bridge.EXPERT.sub("", name), weight.numel()] += weight.nbytes
    return max((together + 4 * numel for (_, numel), together in adapted.items()), default=0)


def push_bytes(shapes: dict[str, torch.Size], hf, limit: int, size: int, adapted: bool = False) -> int:
    """Peak of `bridge.hf_weights` on a stage with weights of these shapes: the bucket, and then either this rank's part
    of it (where adapters are added, twice) or one joined tensor and a part of that."""
    peak = 0
    for _, names in bridge.buckets([shapes], hf, limit // size):
        own = [shapes[name].numel() for name in names]
        ranks, split = bridge.shard_group(names[0])
        peak = max(peak, sum(own) * (ranks.size() + 1 + adapted), sum(own) * ranks.size() + 2 * max(own) * split)
    return peak * size
