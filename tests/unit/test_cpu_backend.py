"""Matrix products of bf16 tensors on a CPU without bf16 units: through fp32, forward and both gradients."""

import pytest
import torch
import torch.nn.functional as F

from support.model import cpu_backend

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # rows of three experts, one of which has none


@pytest.fixture(autouse=True)
def widened():
    """The replaced kernels, on a machine whose CPU has bf16 units too."""
    kernels = None
    if cpu_backend.has_bf16_units():
        kernels = cpu_backend.compute_bf16_products_in_fp32()
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


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_fp32_rounded_once(name):
    """Forward and both gradients, bit for bit: the same function of fp32 copies, its results rounded."""
    product, *shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    y, y_fp32 = product(*narrow), product(*wide)
    assert y.dtype is torch.bfloat16 and torch.equal(y, y_fp32.bfloat16())
    grad = torch.randn(y.shape, generator=generator).bfloat16()
    y.backward(grad)
    y_fp32.backward(grad.float())
    for x, x_fp32 in zip(narrow, wide, strict=True):
        assert x.grad.dtype is torch.bfloat16 and torch.equal(x.grad, x_fp32.grad.bfloat16())


def test_other_types_go_to_torchs_own_kernels():
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    assert (x @ y).dtype is torch.float32
    assert (x.double() @ y.double()).dtype is torch.float64
    assert torch.equal(torch.arange(4).reshape(2, 2) @ torch.arange(4).reshape(2, 2), torch.tensor([[2, 3], [6, 11]]))
