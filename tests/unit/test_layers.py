"""Gradients written by hand in support/model/layers.py, in both types.

tests/oracle/test_layouts.py compares them, and the others of the model, with those of plain transformers in float64.
"""

import pytest
import torch
import torch.nn.functional as F

from support.model.layers import Normalization, SwiGLU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_bit_for_bit_that_of_autograd(dtype):
    torch.manual_seed(0)
    x = torch.randn(33, 1, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(33, 1, 32, dtype=dtype)
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up
    assert torch.equal(SwiGLU.apply(x), expected)
    assert torch.equal(torch.autograd.grad(SwiGLU.apply(x), x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_the_norm_is_that_of_torch_in_fp64(dtype, close):
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((33, 1, 64), (64,), (33, 1, 64)))
    found = Normalization.apply(x, weight, 1e-5)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    gradients = (torch.autograd.grad(out, [x, weight], grad.to(out.dtype)) for out in (found, exact))
    for value, expected in [(found, exact), *zip(*gradients, strict=True)]:
        assert value.dtype == dtype and (value - expected).abs().max() < close * expected.abs().max()
