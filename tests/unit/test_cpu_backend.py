"""Matrix products of bf16 and fp16 tensors on a CPU without units for them: through fp32, forward and gradients."""

import pytest
import torch
import torch.nn.functional as F

from support.model import cpu_backend

HALF = (torch.bfloat16, torch.float16)
ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # rows of three experts, one of which has none


@pytest.fixture(autouse=True)
def widened():
    """The replaced kernels, on a machine whose CPU has units for a type too."""
    fast = [dtype for dtype in HALF if cpu_backend.has_units(dtype)]
    kernels = cpu_backend.compute_products_in_fp32(fast) if fast else None
    yield
    if kernels is not None:
        kernels._destroy()


PRODUCTS = {
    "linear": (F.linear, (8, 16), (24, 16)),
    "linear with a bias": (lambda x, w: F.linear(x, w, w.detach()[:, 0]), (8, 16), (24, 16)),
    "linear on [rows, 1, hidden]": (F.linear, (8, 1, 16), (24, 16)),
    "matmul": (torch.matmul, (8, 16), (16, 24)),
    "bmm": (torch.bmm, (4, 8, 16), (4, 16, 8)),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w, offs=ENDS), (8, 16), (3, 16, 24)),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_fp32_rounded_once(name, dtype):
    """Forward and both gradients, bit for bit: the same function of fp32 copies, its results rounded."""
    product, *shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    y, y_fp32 = product(*narrow), product(*wide)
    assert y.dtype is dtype and torch.equal(y, y_fp32.to(dtype))
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(grad)
    y_fp32.backward(grad.float())
    for x, x_fp32 in zip(narrow, wide, strict=True):
        assert x.grad.dtype is dtype and torch.equal(x.grad, x_fp32.grad.to(dtype))
