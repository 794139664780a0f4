"""Offload gradients, which are just freed, and optimizer state while vLLM samples, when nothing reads them. Offload
activations between forward and backward pass.
"""

from collections.abc import Iterator

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

SMALLEST = 1 << 20  # bytes of an activation that is offloaded: a copy takes time


def state_shards(optimizer) -> Iterator[torch.Tensor]:
    """This rank's fp32 main weights and Adam's moments, each with a storage of its own (not so with fp32 models)."""
    for part in optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            yield from (main, state["exp_avg"], state["exp_avg_sq"])


def offload_state(offload: str | None, model: list, optimizer):
    """Offload what `train.offload` names, before vLLM wakes up. None means gradients, which cost nothing."""
    if offload == "none":
        return
    for chunk in model:
        chunk.offload_grad_buffers()

    if offload == "optimizer":
        shards = [shard for shard in state_shards(optimizer) if shard.numel() and not hasattr(shard, "host")]
        for shard in shards:
            if not hasattr(shard, "pinned"):  # allocate once: pinning again doubles the host memory
                shard.pinned = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
            shard.pinned.copy_(shard.detach(), non_blocking=True)
        torch.cuda.synchronize()  # until all copies are on the host
        for shard in shards:
            shard.host = shard.pinned  # only a shard that is offloaded has this attribute, with its values
            shard.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def take_back_state(optimizer):
    """Copy the optimizer's state back to the GPU, if it is offloaded; before an update."""
    for shard in state_shards(optimizer):
        if hasattr(shard, "host"):
            shard.untyped_storage().resize_(shard.numel() * shard.element_size())
            shard.data.copy_(shard.host, non_blocking=True)
            del shard.host  # `pinned` keeps the buffer


def offloaded_activations(model: list):
    """Inside, what autograd keeps for the backward pass waits on the host. On a CPU it is copied.

    Weights and their views stay where they are, as does what a backward pass recomputes and reads at once.
    """
    weights = {weight.untyped_storage().data_ptr() for chunk in model for weight in chunk.parameters()}
    host = save_on_cpu(pin_memory=True)

    def pack(tensor):
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward or tensor.nbytes < SMALLEST or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        return host.pack_hook(tensor)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)
