"""Updates that are skipped for a loss or gradient that is NaN or infinite: how many in a row, and where it began."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, TrainingError
from support.base import ranks
from support.base.require import require
from support.model import fp16
from support.step.records import MicroBatch


def check_finite(report: dict, in_a_row: int, path: Path, micro_batches: list[MicroBatch], run, cfg: Config) -> int:
    """The number of updates in a row, with this one, that were skipped because loss or gradient is NaN or infinite.

    Warns of a skipped update and writes its micro-batches to `path`. Two kinds do not count: a gradient of exactly 0
    sets the number to 0, and an overflow of the gradient in fp16 that a lower loss scale can end leaves it as it was.
    Raises TrainingError at train.max_skipped, or if a dynamic loss scale can fall no lower. `run`: the run's Checks.
    Every rank calls this.
    """
    if math.isfinite(report["grad_norm"]):
        return 0
    lower = fp16.loss_scale(run.optimizer)
    if math.isfinite(report["loss"]) and lower is not None and lower < report["loss_scale"]:
        if dist.get_rank() == 0:
            print(
                f"the gradient overflowed: update skipped, loss scale {report['loss_scale']:g} → {lower:g}", flush=True
            )
        return in_a_row
    if bridge.reports_loss():
        write_micro_batches(path, micro_batches)
    is_last = in_a_row + 1 >= cfg.train.max_skipped
    count = f"{in_a_row + 1} in a row, the run stops at train.max_skipped={cfg.train.max_skipped}"
    what, where = "a gradient is NaN or infinite", f"first that of {weight_of_overflow(run.model)}"
    if not math.isfinite(report["loss"]):
        passes = partial(run.passes.run_schedule, run.model, micro_batches, cfg.rollout.temperature)
        what, where = f"the loss is {report['loss']}", layer_of_overflow(run.model, passes)
    elif fp16.scaler_state(run.optimizer):
        is_last, count = True, f"the loss scale is at megatron.min_loss_scale={lower:g} and can fall no lower"
    if cfg.model.dtype == "fp16":
        where += f"; fp16 holds numbers up to 65504 (loss scale {report['loss_scale']:g}): try model.dtype=bf16"
    message = f"{what}, {where}; the update was skipped, its micro-batches are in {path}_rank_*.safetensors; {count}"
    require(not is_last, message, TrainingError)
    if dist.get_rank() == 0:
        print(f"warning: {message}", flush=True)
    return in_a_row + 1


def weight_of_overflow(model: list) -> str:
    """The weight nearest to the loss whose gradient is NaN or infinite: the backward pass met it first."""
    own = bridge.named_weights(model) | bridge.named_weights(model, factors=True)
    found = [name for name, weight in own.items() if weight.requires_grad and not weight.main_grad.isfinite().all()]
    names = dict.fromkeys(name for part in ranks.gather(found) for name in part)
    return max(names, key=partial(bridge.position, hf=model[0].hf_config), default="a weight of another replica")


def layer_of_overflow(model: list, forward: Callable[[], list]) -> str:
    """Where activations are NaN or infinite first in a forward pass over the micro-batches."""
    chunks = [bridge.unwrap_model(chunk) for chunk in model]
    numbers = {layer: layer.layer_number for chunk in chunks for layer in chunk.decoder.layers}  # from 1
    numbers |= {chunk.embedding: 0 for chunk in chunks if chunk.pre_process}
    found = []

    def note(module, args, output) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if module in numbers and not output.isfinite().all():
            found.append(numbers[module])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        forward()
    finally:
        hook.remove()
    first = min(layer for part in ranks.gather(found) for layer in [*part, math.inf])
    if first == math.inf:
        return "though the outputs of all layers are finite: it began in the head or in the loss"
    return f"first in the output of layer {first}" if first else "first in the embeddings"


def write_micro_batches(path: Path, micro_batches: list[MicroBatch]) -> None:
    """Write this rank's micro-batches to `path`_rank_R.safetensors, each tensor as "number of the micro-batch.name"."""
    tensors = {f"{i}.seq_id": mb.seq_id for i, mb in enumerate(micro_batches)}
    for i, mb in enumerate(micro_batches):
        tensors |= {f"{i}.{name}": value for name, value in vars(mb).items() if torch.is_tensor(value)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, f"{path}_rank_{dist.get_rank():05d}.safetensors")
