"""What a rank holds once model and optimizer are built, read off its tensors."""

from collections.abc import Iterable

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

import megatron_bridge as bridge


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held_bytes(model: list, optimizer) -> list[int]:
    """Bytes of weights, gradients, optimizer state and a reference on this rank, read off the tensors themselves.

    Not the optimizer's scalars, its numbers of steps, nor what stands for the host's with optimizer_cpu_offload.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = storages(parameter.data for parameter in parameters)
    state = {}
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        adams = [inner.gpu_optimizer] if isinstance(inner, HybridDeviceOptimizer) else [inner]
        mains = [shard for group in part.shard_fp32_from_float16_groups for shard in group if shard is not None]
        stepped = [shard for adam in adams if adam for group in adam.param_groups for shard in group["params"]]
        moments = [m for adam in adams if adam for s in adam.state.values() for n, m in s.items() if n != "step"]
        state |= storages([*mains, *stepped, *moments])
    own = {address: size for address, size in state.items() if address not in weights}
    reference = storages(bridge.copy_weights(model))
    gradients = storages(parameter.main_grad for parameter in parameters if parameter.requires_grad)
    return [sum(table.values()) for table in (weights, gradients, own, reference)]
