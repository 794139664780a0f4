"""What weights and state cost a run: one table for GPU, host and disk, and the exact count of a rank.

`costs` is the table: bytes a weight of each kind, and where they lie. The plan, the check of host memory and the check
of the disk read it, so a feature that keeps further weights adds its row here alone.

`count` makes the GPU's part exact, before anything is built: it reads the sizes off Megatron's own model, gradient
buffers and distributed optimizer, built on torch's meta device, where tensors take no memory, in a fake process group.
So every layout and every stage is counted to the byte. It needs config.json of the model alone.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import megatron_bridge as bridge
from config import Config, LoraConfig, ParallelConfig

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

META = torch.device("meta")
PHASES = ("build", "rollout", "logprob", "train", "update", "sync", "save")  # of what lies on a GPU
SAVED = 12  # bytes a weight of a checkpoint: the weight in fp32 and Adam's two moments

# ---------------------------------------------------------------- the table of costs


@dataclass(frozen=True)
class Cost:
    """What one kind of weights or state costs: bytes for each weight, and where they lie."""

    of: str  # whose weights are counted: those of the "model", those that are "trained", those of the "teacher"
    split: int  # the ranks over which the bytes of GPU and host are spread
    gpu: float = 0.0
    host: float = 0.0
    disk: float = 0.0  # of the whole run
    phases: tuple[str, ...] = PHASES  # in which it is on the GPU
    waits: bool = False  # on the host, in the other phases; of all such kinds one at a time is on the GPU


def costs(cfg: Config, world_size: int, on_gpu: bool = True) -> dict[str, Cost]:
    """{kind of weights or state: its cost} of a run; without a GPU all of it lies in host memory."""
    a, r = cfg.algo, cfg.rollout
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    gradient_phases = PHASES if cfg.train.offload == "none" else ("build", "train", "update")
    keeps_asleep = r.sleep_level == 1 or not on_gpu
    table = {
        "weights": Cost("model", replica_ranks(cfg), gpu=size, disk=size),  # on the disk: an export
        "gradients": Cost("trained", replica_ranks(cfg), gpu=4, phases=gradient_phases),
        "optimizer": optimizer_cost(cfg, world_size),
        "checkpoint": Cost("trained", world_size, host=SAVED, disk=SAVED),  # on the host: while it is written
        "vLLM": Cost("model", r.tp, host=size if keeps_asleep else 0),  # its weights while it sleeps
    }
    if a.kl_coef > 0:
        table["reference"] = weight_set(cfg, "trained")
    if a.teacher not in (None, "self"):
        table["teacher"] = weight_set(cfg, "teacher")
    if not on_gpu:  # all of it lies in host memory; what waits there is counted there already
        for kind, cost in table.items():
            moved = 0 if cost.waits else cost.gpu
            table[kind] = replace(cost, gpu=0, host=cost.host + moved)
    return table


def replica_ranks(cfg: Config) -> int:
    """The ranks that share one copy of the weights."""
    return cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.ep


def optimizer_cost(cfg: Config, world_size: int) -> Cost:
    """AdamW's state for each weight, spread over all ranks.

    Two moments are 8 bytes and, of bf16 weights, an fp32 copy 4. With megatron.optimizer_cpu_offload these and a
    gradient, 16, are in host memory, and Megatron's own fp32 copy, 4, stays on the GPU; not with
    megatron.use_precision_aware_optimizer. Its number of steps, a scalar a weight on the host, is not counted.
    With train.offload=optimizer the state is on the GPU from the build to the first push and in each update; where a
    step has several updates, in the passes of the later ones too.
    """
    if cfg.megatron.get("optimizer_cpu_offload"):
        away = host_stepped(cfg)
        copied = 1 - away if cfg.megatron.get("use_precision_aware_optimizer") else 1
        return Cost("trained", world_size, gpu=8 * (1 - away) + 4 * copied, host=16 * away)
    gpu = 8 if cfg.model.dtype == "fp32" else 12
    if cfg.train.offload != "optimizer":
        return Cost("trained", world_size, gpu=gpu)
    one_update = cfg.train.updates_per_step * cfg.train.epochs_per_step == 1
    phases = ("build", "update") if one_update else ("build", "train", "update")
    return Cost("trained", world_size, gpu=gpu, host=gpu, phases=phases, waits=True)


def host_stepped(cfg: Config) -> float:
    """The share of the weights that AdamW steps in host memory (Megatron takes whole weights, so about)."""
    if not cfg.megatron.get("optimizer_cpu_offload"):
        return 0.0
    return cfg.megatron.get("optimizer_offload_fraction", 1.0)


def weight_set(cfg: Config, of: str) -> Cost:
    """A further set of weights, which no checkpoint has: the reference, or a teacher.

    Where algo.reference_on keeps it on the host, it comes to the GPU for the log-probs.
    """
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    if cfg.algo.reference_on == "gpu":
        return Cost(of, replica_ranks(cfg), gpu=size)
    return Cost(of, replica_ranks(cfg), gpu=size, host=size, phases=("logprob",), waits=True)


def weights_of(cfg: Config, weights: int, teacher: int = 0) -> dict[str, int]:
    """{what `Cost.of` may be: its number of weights} of a model and a teacher. Adapters are few: they count as none."""
    return {"model": weights, "trained": weights if cfg.lora.rank == 0 else 0, "teacher": teacher}


def host_bytes(cfg: Config, weights: int, world_size: int, on_gpu: bool, teacher: int = 0) -> int:
    """About what a rank holds of host memory, for a model of `weights` weights and a teacher of `teacher`."""
    numbers = weights_of(cfg, weights, teacher)
    table = costs(cfg, world_size, on_gpu).values()
    return int(sum(numbers[cost.of] * cost.host / cost.split for cost in table))


def disk_bytes(cfg: Config, weights: int) -> int:
    """Bytes of a checkpoint and an export, for a model of `weights` weights."""
    numbers = weights_of(cfg, weights)
    return int(sum(numbers[cost.of] * cost.disk for cost in costs(cfg, 1).values()))


# ---------------------------------------------------------------- the exact count of a rank


@dataclass(frozen=True)
class Held:
    """What one rank holds on its GPU, in bytes, and what follows from its weights."""

    gpu: dict[str, int]  # kind of `costs` → bytes while it is on the GPU; with the padding of Megatron's buffers
    frozen: int  # of the weights, those beside the adapters, which are in no buffer
    update: int  # what Adam allocates while it steps: one fp32 element for each weight that it steps on the GPU
    push: int  # peak of one bucket on its way to vLLM
    export: int  # the same, to an export
    merged: int  # peak of adding adapters to what a layer computes with at once: a weight, or all its experts' fc1
    largest: int  # elements of the largest weight that is trained
    stage_weights: int  # elements of this stage's weights, on all ranks together


class OnMeta(TorchFunctionMode):
    """Wherever code names a device, it is the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        return function(*(META if isinstance(value, torch.device) else value for value in args), **kwargs)


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


def count(cfg: Config, world_size: int, rank: int) -> Held:
    """What `rank` of `world_size` will hold. Needs no process group, and must not find one."""
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    table = costs(cfg, world_size)
    with fake_process_groups(cfg.parallel, world_size, rank, cfg.seed):
        model = build_on_meta(cfg.model.path, cfg, cfg.lora)
        teacher = build_on_meta(cfg.algo.teacher, cfg, None) if "teacher" in table else []
        hf = model[0].hf_config
        own = bridge.named_weights(model)
        trained = bridge.named_weights(model, factors=True) or own
        frozen = 0 if trained is own else sum(weight.nbytes for weight in own.values())
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        stepped = sum(optimizer_share(buffer) for buffer in buffers)
        gpu = {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers) + frozen,
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": int(stepped * table["optimizer"].gpu),
        }
        one_set = {
            "trained": sum(weight.nbytes for weight in bridge.copy_weights(model)),
            "teacher": sum(weight.nbytes for chunk in teacher for weight in chunk.parameters()),
        }
        for kind, cost in table.items():
            if cost.gpu and kind not in gpu:  # further sets of weights
                gpu[kind] = int(cost.gpu / size) * one_set[cost.of]
        shapes = {name: weight.shape for name, weight in own.items()}
        adapted = cfg.lora.rank > 0
        return Held(
            gpu=gpu,
            frozen=frozen,
            update=int(4 * stepped * (1 - host_stepped(cfg))),
            push=push_bytes(shapes, hf, cfg.rollout.sync_bucket_mb << 20, size, adapted),
            export=push_bytes(shapes, hf, bridge.BUCKET_BYTES, size, adapted),
            merged=merged_bytes(own),
            largest=max(weight.numel() for weight in trained.values()),
            stage_weights=count_stage(shapes, hf),
        )


def optimizer_share(buffer) -> int:
    """Weights of one of Megatron's buffers that this rank's share of the distributed optimizer steps."""
    share = 0
    for bucket_ranges in DistributedOptimizer._build_gbuf_range_map(buffer).values():
        for bucket in bucket_ranges:
            share += sum(ranges["param"].size for ranges in bucket["param_map"].values())
    return share


def count_stage(shapes: dict[str, torch.Size], hf) -> int:
    """Elements of a stage's weights on all its ranks together; a tied head is counted with the embedding."""
    elements = 0
    for name, shape in shapes.items():
        if name == "output_layer.weight" and hf.tie_word_embeddings:
            continue
        join, _ = bridge.rule_of(bridge.expert_of(name, hf, 0), hf)
        shards = 1 if bridge.SPLIT_DIM[join] is None else bridge.shard_group(name)[0].size()
        elements += shape.numel() * shards
    return elements


def merged_bytes(own: dict[str, torch.nn.Parameter]) -> int:
    """Peak of adding adapters to a rank's weights (support/model/lora.py): the sum of one in fp32 and as it is, with
    those of the other experts of its layer, which are computed with at once.
    """
    adapted = Counter()
    for name, weight in own.items():
        if hasattr(weight, "adapter"):
            adapted[bridge.EXPERT.sub("", name), weight.numel()] += weight.nbytes
    return max((together + 4 * numel for (_, numel), together in adapted.items()), default=0)


def push_bytes(shapes: dict[str, torch.Size], hf, limit: int, size: int, adapted: bool = False) -> int:
    """Peak of `bridge.hf_weights` on a stage with weights of these shapes, of `size` bytes an element.

    A bucket of `limit` bytes, and then either this rank's part of it (where adapters are added, twice) or one joined
    tensor and a part of that.
    """
    peak = 0
    for _, names in bridge.buckets([shapes], hf, limit // size):
        own = [shapes[name].numel() for name in names]
        ranks, split = bridge.shard_group(names[0])
        parts = 2 if adapted else 1
        peak = max(peak, sum(own) * (ranks.size() + parts), sum(own) * ranks.size() + 2 * max(own) * split)
    return peak * size
