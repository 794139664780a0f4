"""Offload gradients, which are just freed, and optimizer state while vLLM samples, when nothing reads them."""

from collections.abc import Iterator

import torch


def state_shards(optimizer) -> Iterator[torch.Tensor]:
    """This rank's fp32 main weights and Adam's moments, each with a storage of its own (not so with fp32 models)."""
    for part in optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            yield from (main, state["exp_avg"], state["exp_avg_sq"])


def is_away(shard: torch.Tensor) -> bool:
    """Whether the tensor is offloaded: only then it has an attribute `host`, with its values."""
    return hasattr(shard, "host")


def offload_state(offload: str | None, model: list, optimizer) -> None:
    """Offload what `train.offload` names; before vLLM wakes up. Default on a GPU: gradients, which cost nothing."""
    mode = offload or ("grads" if torch.cuda.is_available() else "none")
    if mode == "none":
        return
    for chunk in model:
        chunk.offload_grad_buffers()
    if mode == "optimizer":
        shards = [shard for shard in state_shards(optimizer) if shard.numel() and not is_away(shard)]
        for shard in shards:
            if not hasattr(shard, "pinned"):  # allocate once: pinning again doubles the host memory
                shard.pinned = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
            shard.pinned.copy_(shard.detach(), non_blocking=True)
        torch.cuda.synchronize()
        for shard in shards:
            shard.host = shard.pinned
            shard.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def take_back_state(optimizer) -> None:
    """Copy the optimizer's state back to the GPU, if it is offloaded; before an update."""
    for shard in filter(is_away, state_shards(optimizer)):
        shard.untyped_storage().resize_(shard.numel() * shard.element_size())
        shard.data.copy_(shard.host, non_blocking=True)
        del shard.host  # `pinned` keeps the buffer
