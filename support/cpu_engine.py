"""What vLLM 0.32 needs on the CPU to run beside a trainer: names of its own in shared memory, and packed weights that
take up a push. Nothing here is called where there is a GPU."""

import os

import torch


def name_shared_memory_after_this_run() -> str:
    """Make vLLM's CPU shared memory carry a name of this torchrun only; returns the prefix of its files in /dev/shm.

    vLLM 0.32 gives it the same name in every external-launcher run, so that a second run, or a dead one, breaks the
    next.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as shm

    prefix, group_name = f"train-grpo-{os.getppid()}", shm.make_group_name
    shm.make_group_name = staticmethod(lambda communicator: prefix + group_name(communicator).replace("/", ""))
    return prefix


def unpack_experts(model: torch.nn.Module) -> None:
    """On the CPU vLLM packs experts once; a reload packs them anew only where it finds no kernel (vLLM 0.32)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_lm_head(model: torch.nn.Module) -> None:
    """On the CPU vLLM keeps a packed copy of a tied output layer, which a reload leaves stale (vLLM 0.32)."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(head, "quant_method", None) is not None:
        head.quant_method.process_weights_after_loading(head)
