"""What weights and state cost a run on GPU and host, in one table, and on the disk. Further weights add a row."""

from dataclasses import dataclass, replace

import megatron_bridge as bridge

PHASES = ("build", "rollout", "logprob", "train", "update", "sync", "save")  # in each of which a GPU holds other things
PINNED = 2  # torch rounds each pinned tensor up to the next power of two: at most twice its bytes
SAVED = 12  # bytes of a checkpoint for each weight: the weight in fp32 and Adam's two moments


@dataclass(frozen=True)
class Cost:
    """What one kind of weights or state costs: bytes for each weight, and where they lie."""

    of: str  # whose weights are counted: all of the "model", its "trainable" ones, or all of the "teacher"
    split: int  # the ranks over which the bytes of GPU and host are spread
    gpu: float = 0.0
    host: float = 0.0
    phases: tuple[str, ...] = PHASES  # in which it is on the GPU
    waits: bool = False  # on the host in the other phases. Of all kinds that wait, one at a time is on the GPU


def costs(cfg, world_size, on_gpu: bool = True) -> dict[str, Cost]:
    """{kind of weights or state: its cost} of a run. Without a GPU all of it lies in host memory."""
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    share = cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.ep  # the ranks that share one copy of the weights
    gradient_phases = PHASES if cfg.train.offload == "none" else ("build", "train", "update")
    keeps_asleep = cfg.rollout.sleep_level == 1 or not on_gpu
    table = {
        "weights": Cost("model", share, gpu=size),
        "gradients": Cost("trainable", share, gpu=4, phases=gradient_phases),
        "optimizer": optimizer_cost(cfg, world_size),
        "checkpoint": Cost("trainable", world_size, host=SAVED),  # while it is written
        "vLLM": Cost("model", cfg.rollout.tp, host=size if keeps_asleep else 0),  # its weights while it sleeps
    }

    # A further set of weights, which no checkpoint has. If it waits on the host, it comes for the log-probs.
    further = Cost("trainable", share, gpu=size)
    if cfg.algo.reference_on == "host":
        further = replace(further, host=size, phases=("logprob",), waits=True)
    if cfg.algo.kl_coef > 0:
        table["reference"] = further
    if cfg.algo.teacher not in (None, "self"):
        table["teacher"] = replace(further, of="teacher")

    for kind, cost in table.items():
        if on_gpu and cost.waits:
            table[kind] = replace(cost, host=cost.host * PINNED)
        elif not on_gpu:
            beside = 0 if cost.waits else cost.gpu  # what waits is counted on the host already
            table[kind] = replace(cost, gpu=0, host=cost.host + beside)
    return table


def optimizer_cost(cfg, world_size) -> Cost:
    """AdamW's state for each weight, spread over all ranks.

    The two moments take 8 bytes; an fp32 copy of the weight takes 4 more, unless the model is fp32.

    With megatron.optimizer_cpu_offload both and a gradient, 16 bytes, are in host memory. Megatron's own fp32 copy, 4
    bytes, stays on the GPU, except with megatron.use_precision_aware_optimizer.

    With train.offload=optimizer the state waits on the host; if a step has several updates, it stays on the GPU while
    their passes run.
    """
    if cfg.megatron.get("optimizer_cpu_offload"):
        away = host_stepped(cfg)
        copied = 1 - away if cfg.megatron.get("use_precision_aware_optimizer") else 1
        return Cost("trainable", world_size, gpu=8 * (1 - away) + 4 * copied, host=16 * away)

    gpu = 8 if cfg.model.dtype == "fp32" else 12
    if cfg.train.offload != "optimizer":
        return Cost("trainable", world_size, gpu=gpu)

    phases = ("build", "update")
    if cfg.train.updates_per_step * cfg.train.epochs_per_step > 1:
        phases = ("build", "train", "update")
    return Cost("trainable", world_size, gpu=gpu, host=gpu, phases=phases, waits=True)


def host_stepped(cfg) -> float:
    """The share of the weights that AdamW steps in host memory, about: Megatron takes whole weights."""
    if not cfg.megatron.get("optimizer_cpu_offload"):
        return 0.0
    return cfg.megatron.get("optimizer_offload_fraction", 1.0)


def host_bytes(cfg, weights: int, world_size, on_gpu: bool, teacher: int = 0) -> int:
    """About how much host memory a rank takes, for a model of `weights` weights and a teacher of `teacher`."""
    numbers = {"model": weights, "trainable": trained(cfg, weights), "teacher": teacher}
    return int(sum(numbers[cost.of] * cost.host / cost.split for cost in costs(cfg, world_size, on_gpu).values()))


def disk_bytes(cfg, weights: int) -> int:
    """Bytes of a checkpoint and an export, for a model of `weights` weights."""
    return trained(cfg, weights) * SAVED + weights * bridge.DTYPES[cfg.model.dtype].itemsize


def trained(cfg, weights: int) -> int:
    """How many of the weights are trained. Adapters are few and count as none."""
    return 0 if cfg.lora.rank else weights
