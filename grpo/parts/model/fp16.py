"""What fp16 needs and bf16 does not: Megatron's loss scale."""

import math

import torch


def initial_scale(tokens, least):
    """The loss scale to begin with, a power of two from `least` to 128, for rows of `tokens` tokens.

    A row's losses are added up, so its gradients grow with its tokens. SmolLM2 with rows of up to 2,048 tokens
    overflows at 256 and not at 128; between 1 and 1,024 the scale changed no gradient by more than 1e-5.
    """
    exponent = math.floor(17 - math.log2(tokens))
    return max(2.0 ** min(exponent, 7), least)


def loss_scalers(optimizer):
    """Megatron's loss scalers, one for each part of the optimizer, in the same state. [] unless the model is fp16."""
    return [part.grad_scaler for part in optimizer.chained_optimizers if part.grad_scaler]


def loss_scale(optimizer) -> float | None:
    """What the loss is multiplied by before the backward pass. None unless the model is fp16."""
    scalers = loss_scalers(optimizer)
    return scalers[0].scale.item() if scalers else None


def scaler_state(optimizer) -> dict[str, float]:
    """The state of a dynamic loss scale, for JSON. {} if there is no loss scale, or a constant one."""
    scalers = loss_scalers(optimizer)
    if not scalers:
        return {}
    return {name: float(value) for name, value in scalers[0].state_dict().items()}


def set_scaler_state(optimizer, state: dict[str, float] | None):
    """Set the loss scale to a `scaler_state`. {} and None leave it as it is."""
    if state:
        for scaler in loss_scalers(optimizer):
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]])})
