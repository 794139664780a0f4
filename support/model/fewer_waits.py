"""Parts of Megatron-core 0.16 that make the host wait less often for the GPU. On the CPU results are the same bit for
bit. layers.py installs them; tests/test_gpu_rehearsal.py counts the waits.
"""

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm


def l2_norm(chunk_size, overflow, tensor_lists: list, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """In place of local_multi_tensor_l2_norm, which reads the norm of each gradient from the GPU; → [1], None."""
    (gradients,) = tensor_lists
    return torch.stack(torch._foreach_norm(gradients)).norm().reshape(1), None


def install() -> None:
    """Put it into Megatron-core."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # Transformer Engine and Apex have kernels
        clip_grads.l2_norm_impl = l2_norm
