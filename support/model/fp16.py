"""What fp16 needs and bf16 does not: Megatron's loss scale, and a look at weights that the type cannot hold."""

import math

import torch
import torch.distributed as dist

from support.base import ranks
from support.base.require import require

LOST = 0.01  # share of a weight's numbers that may become 0


def initial_scale(tokens: int, least: float) -> float:
    """The loss scale to begin with, a power of two from `least` to 128, for rows of so many tokens.

    A row's losses are added up, so its gradients grow with its tokens. SmolLM2 with rows of up to 2,048 tokens
    overflows at 256 and not at 128; between 1 and 1,024 the scale changed no gradient by more than 1e-5.
    """
    return max(2.0 ** min(math.floor(17 - math.log2(tokens)), 7), least)


def loss_scalers(optimizer) -> list:
    """Megatron's loss scalers, one for each part of the optimizer, in the same state; [] unless the model is fp16."""
    return [part.grad_scaler for part in optimizer.chained_optimizers if part.grad_scaler]


def loss_scale(optimizer) -> float | None:
    """What the loss is multiplied by before the backward pass; None unless the model is fp16."""
    return next((scaler.scale.item() for scaler in loss_scalers(optimizer)), None)


def scaler_state(optimizer) -> dict[str, float]:
    """The state of a dynamic loss scale, as JSON takes it; {} where there is none, or a constant one."""
    return {name: float(value) for s in loss_scalers(optimizer)[:1] for name, value in s.state_dict().items()}


def set_scaler_state(optimizer, state: dict[str, float]) -> None:
    """Set the loss scale to a `scaler_state`; {} leaves it as it is."""
    if state:
        for scaler in loss_scalers(optimizer):
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]])})


def rounding_defect(name: str, shard: torch.Tensor) -> tuple[str, str] | None:
    """(kind, text) of what a `shard` of a weight loses in fp16; None: no more than precision."""
    rounded = shard.half()
    if rounded.isinf().any():
        return "large", f"{name} (up to {shard.abs().max():.3g})"
    lost = ((shard != 0) & (rounded == 0)).float().mean().item()
    return ("small", f"{name} ({lost:.0%})") if lost > LOST else None


def report_rounding(found: list[tuple[str, str]], path: str) -> None:
    """Raise UserError, on every rank, if rounding made a weight of the folder `path` infinite; warn of many zeros."""
    everywhere = dict.fromkeys(defect for part in ranks.gather(found) for defect in part)
    texts = {kind: [text for which, text in everywhere if which == kind] for kind in ("large", "small")}
    require(
        not texts["large"],
        f"model.dtype=fp16: it holds numbers up to 65504, and {path} has larger ones in "
        f"{', '.join(texts['large'][:4])}; use model.dtype=bf16",
    )
    if texts["small"] and dist.get_rank() == 0:
        print(
            f"warning: fp16 rounds numbers below 2^-25 to 0; these weights of {path} lose a share of theirs: "
            f"{', '.join(texts['small'][:4])}; try model.dtype=bf16",
            flush=True,
        )
