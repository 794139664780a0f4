"""What stands in for parts of Megatron-core gives the same bits; how often it waits is in test_gpu_rehearsal.py."""

import torch

from support.model import fewer_waits, layers  # noqa: F401, layers first: it prepares the process for Megatron-core

# isort: split
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm


def test_megatron_uses_them():
    assert clip_grads.l2_norm_impl is fewer_waits.l2_norm


def test_the_norm_has_the_same_bits():
    random = torch.Generator().manual_seed(0)
    for sizes in ([1], [7, 0, 1000], [3, 5000, 64, 64, 100000]):
        gradients = [torch.randn(size, generator=random) for size in sizes]
        theirs, _ = local_multi_tensor_l2_norm(0, None, [gradients], False)
        ours, _ = fewer_waits.l2_norm(0, None, [gradients], False)
        assert torch.equal(ours, theirs)
