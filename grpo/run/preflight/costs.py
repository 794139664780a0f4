"""What weights and state cost a run: one table for GPU, host and disk; what keeps further weights adds a row."""

from dataclasses import dataclass, replace

import megatron_bridge as bridge
from config import Config

PHASES = ("build", "rollout", "logprob", "train", "update", "sync", "save")  # of what lies on a GPU
PINNED = 2  # torch rounds pinned memory up to the next power of two, for each tensor: at most twice its bytes
SAVED = 12  # bytes a weight of a checkpoint: the weight in fp32 and Adam's two moments


@dataclass(frozen=True)
class Cost:
    """What one kind of weights or state costs: bytes for each weight, and where they lie."""

    of: str  # whose weights are counted: those of the "model", those that are "trainable", those of the "teacher"
    split: int  # the ranks over which the bytes of GPU and host are spread
    gpu: float = 0.0
    host: float = 0.0
    disk: float = 0.0  # of the whole run
    phases: tuple[str, ...] = PHASES  # in which it is on the GPU
    waits: bool = False  # on the host, in the other phases; of all such kinds one at a time is on the GPU


def costs(cfg: Config, world_size: int, on_gpu: bool = True) -> dict[str, Cost]:
    """{kind of weights or state: its cost} of a run; without a GPU all of it lies in host memory."""
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    share = cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.ep  # the ranks that share one copy of the weights
    gradient_phases = PHASES if cfg.train.offload == "none" else ("build", "train", "update")
    keeps_asleep = cfg.rollout.sleep_level == 1 or not on_gpu
    table = {
        "weights": Cost("model", share, gpu=size, disk=size),  # on the disk: an export
        "gradients": Cost("trainable", share, gpu=4, phases=gradient_phases),
        "optimizer": optimizer_cost(cfg, world_size),
        "checkpoint": Cost("trainable", world_size, host=SAVED, disk=SAVED),  # on the host: while it is written
        "vLLM": Cost("model", cfg.rollout.tp, host=size if keeps_asleep else 0),  # its weights while it sleeps
    }
    # A further set of weights, which no checkpoint has; one that waits on the host comes for the log-probs.
    further = Cost("trainable", share, gpu=size)
    if cfg.algo.reference_on == "host":
        further = replace(further, host=size, phases=("logprob",), waits=True)
    if cfg.algo.kl_coef > 0:
        table["reference"] = further
    if cfg.algo.teacher not in (None, "self"):
        table["teacher"] = replace(further, of="teacher")
    for kind, cost in table.items():
        if on_gpu:
            table[kind] = replace(cost, host=cost.host * (PINNED if cost.waits else 1))
        else:  # all of it lies in host memory; what waits there is counted there already
            table[kind] = replace(cost, gpu=0, host=cost.host + (0 if cost.waits else cost.gpu))
    return table


def optimizer_cost(cfg: Config, world_size: int) -> Cost:
    """AdamW's state for each weight, spread over all ranks.

    Two moments are 8 bytes and, unless the model is fp32, an fp32 copy 4. With megatron.optimizer_cpu_offload these and
    a gradient, 16, are in host memory, and Megatron's own fp32 copy, 4, stays on the GPU; not with
    megatron.use_precision_aware_optimizer. With train.offload=optimizer, several updates a step keep it for the passes.
    """
    if cfg.megatron.get("optimizer_cpu_offload"):
        away = host_stepped(cfg)
        copied = 1 - away if cfg.megatron.get("use_precision_aware_optimizer") else 1
        return Cost("trainable", world_size, gpu=8 * (1 - away) + 4 * copied, host=16 * away)
    gpu = 8 if cfg.model.dtype == "fp32" else 12
    if cfg.train.offload != "optimizer":
        return Cost("trainable", world_size, gpu=gpu)
    one_update = cfg.train.updates_per_step * cfg.train.epochs_per_step == 1
    phases = ("build", "update") if one_update else ("build", "train", "update")
    return Cost("trainable", world_size, gpu=gpu, host=gpu, phases=phases, waits=True)


def host_stepped(cfg: Config) -> float:
    """The share of the weights that AdamW steps in host memory (Megatron takes whole weights, so about)."""
    if not cfg.megatron.get("optimizer_cpu_offload"):
        return 0.0
    return cfg.megatron.get("optimizer_offload_fraction", 1.0)


def host_bytes(cfg: Config, weights: int, world_size: int, on_gpu: bool, teacher: int = 0) -> int:
    """About what a rank holds of host memory, for a model of `weights` weights and a teacher of `teacher`."""
    numbers = counts(cfg, weights, teacher)
    return int(sum(numbers[cost.of] * cost.host / cost.split for cost in costs(cfg, world_size, on_gpu).values()))


def disk_bytes(cfg: Config, weights: int) -> int:
    """Bytes of a checkpoint and an export, for a model of `weights` weights."""
    numbers = counts(cfg, weights)
    return int(sum(numbers[cost.of] * cost.disk for cost in costs(cfg, 1).values()))


def counts(cfg: Config, weights: int, teacher: int = 0) -> dict[str, int]:
    """The numbers of weights that `Cost.of` names. Adapters are few: they count as none."""
    return {"model": weights, "trainable": weights if cfg.lora.rank == 0 else 0, "teacher": teacher}
