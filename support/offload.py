"""What leaves the GPU while vLLM samples: nobody reads gradients between an update and the next, or optimizer state.

Gradients hold nothing then, so their memory is just given back; main weights and Adam's moments go to buffers on the
host, which are made once. Tensors stay the same objects, with an empty storage while they are away. On the CPU the same
moves run between buffers, and change no bit either.
"""

from collections.abc import Iterator

import torch


def what(offload: str | None) -> str:
    """train.offload, and what it is where nobody set it: gradients cost nothing to leave, so on GPUs they do."""
    return offload or ("grads" if torch.cuda.is_available() else "none")


def state_shards(optimizer) -> Iterator[torch.Tensor]:
    """This rank's fp32 main weights and Adam's moments, each with a storage of its own (not so with fp32 models)."""
    for part in optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            yield from (main, state["exp_avg"], state["exp_avg_sq"])


def is_away(shard: torch.Tensor) -> bool:
    """Whether the tensor's values are on the host now, in `shard.host`."""
    return shard.untyped_storage().size() == 0 < shard.numel()


def leave(offload: str | None, model: list, optimizer) -> None:
    """Give the memory of `train.offload` to vLLM; before it wakes up."""
    if what(offload) == "none":
        return
    for chunk in model:
        chunk.offload_grad_buffers()
    if what(offload) == "optimizer":
        shards = [shard for shard in state_shards(optimizer) if shard.numel() and not is_away(shard)]
        for shard in shards:
            if not hasattr(shard, "host"):  # once: pinning anew doubles what the host needs
                shard.host = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
            shard.host.copy_(shard.detach(), non_blocking=True)
        torch.cuda.synchronize()
        for shard in shards:
            shard.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def zero_gradients(model: list, optimizer) -> None:
    """Let gradients be zero, where they are or taken back; before the first micro-batch of an update."""
    optimizer.zero_grad()
    for chunk in model:
        chunk.restore_grad_buffers()
        chunk.zero_grad_buffer()


def take_back_state(optimizer) -> None:
    """Take back the optimizer's state, if it is away; before an update."""
    for shard in filter(is_away, state_shards(optimizer)):
        shard.untyped_storage().resize_(shard.numel() * shard.element_size())
        shard.data.copy_(shard.host, non_blocking=True)
