"""The Triton kernels against float64, on a GPU and in Triton's interpreter; matrix products of a CPU against fp32."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from grpo.parts.model import cpu_backend, kernels, nucleus
from tests.oracle.reference import relative
from tests.processes import REPO

# Relative error: one rounding of the result. The interpreter cuts bf16 off.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 5e-4}


def logits(dtype, on):
    """Rows of 5,000, more than a block, with targets that are mostly on other ranks; their gradient, also in bf16."""
    temperature = 0.7
    logits_M, grads_M = (3 * torch.randn(9, 5000, device=on)).to(dtype), torch.randn(2, 9, device=on)
    logits_M[7, 2049:] = logits_M[8, :4096] = nucleus.LOW  # the first or the last block of a row, as a cut has it
    local_M = torch.tensor([0, 4999, 5000, -1, -3000, 9000, 7, 2048, 4096], device=on)
    here_M = (local_M >= 0) & (local_M < 5000)

    exact_M = (logits_M.double() / temperature).requires_grad_()
    max_M, log_z_M = exact_M.detach().amax(-1), exact_M.logsumexp(-1)
    probs_M = exact_M.softmax(-1)
    target_M = exact_M.gather(1, local_M.clamp(0, 4999)[:, None])[:, 0] * here_M
    entropy_M = log_z_M - (probs_M * exact_M).sum(-1)
    (wanted,) = torch.autograd.grad((target_M - log_z_M, entropy_M), exact_M, (*grads_M.double(),))

    top_M, sum_M, weighted_M, found_M = kernels.logits_stats(logits_M, local_M, temperature)
    of_target = torch.where(here_M, target_M - max_M, 0.0).detach()
    values = (top_M + sum_M.log(), log_z_M), (sum_M.log() - weighted_M / sum_M, entropy_M), (found_M, of_target)

    known_M = (local_M, top_M, sum_M.log(), sum_M.log() - weighted_M / sum_M, *grads_M)
    errors = [relative(found, exact.detach()) for found, exact in values]
    assert max(errors) < 1e-6, errors
    half = kernels.logits_grad(logits_M.clone(), *known_M, temperature=temperature, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16 and relative(half, wanted / temperature) < CLOSE[torch.bfloat16]
    return [
        relative(kernels.logits_grad(logits_M, *known_M, temperature=temperature, dtype=dtype), wanted / temperature)
    ]


def swiglu(dtype, on):
    x, grad = torch.randn(33, 1, 600, device=on).to(dtype), torch.randn(33, 1, 300, device=on).to(dtype)
    exact = x.double().requires_grad_()
    wanted = F.silu(exact[..., :300]) * exact[..., 300:]
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double())
    assert kernels.swiglu(x[:0]).shape == (0, 1, 300)  # an expert without tokens
    return [relative(kernels.swiglu(x), wanted.detach()), relative(kernels.swiglu_grad(x, grad), wanted_grad)]


def rotation(dtype, on):
    """Five heads of 64, a part of wider ones, as keys are of query, key and value; then back."""
    x = torch.randn(33, 1, 5, 192, device=on).to(dtype)[..., 64:128]
    angles = torch.rand(33, 1, 1, 32, device=on)
    cos, sin = torch.cat((angles.cos(),) * 2, -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    wide, c, s = x.double(), cos.double(), sin.double()
    forward = wide * c + wide.roll(32, -1) * s
    back = wide * c - wide.roll(32, -1) * s
    spread = x.transpose(-1, -2).contiguous().transpose(-1, -2)  # its last dimension is not the innermost
    found = [kernels.rotate(x, cos, sin, 1.0), kernels.rotate(spread, cos, sin, -1.0)]
    return [relative(value, exact) for value, exact in zip(found, (forward, back), strict=True)]


def copies(dtype, on):
    """One row taken once, one three times and one never, of 2 heads of 700: more than a block."""
    grad = torch.randn(4, 2, 700, device=on).to(dtype)
    order, counts = torch.tensor([1, 0, 2, 3], device=on), torch.tensor([1, 3, 0], device=on)
    wide = grad.double()
    wanted = torch.stack((wide[1], wide[[0, 2, 3]].sum(0), 0 * wide[0]))
    return [relative(kernels.sum_copies(grad, order, counts, counts.cumsum(0)), wanted)]


KERNELS = [logits, swiglu, rotation, copies]


def check(of, dtype, on):
    torch.manual_seed(0)
    errors = of(dtype, on)
    assert max(errors) < CLOSE[dtype], (of.__name__, dtype, errors)


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("of", KERNELS)
def test_on_a_gpu(of, dtype):
    check(of, dtype, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not isinstance(kernels.triton, ModuleType), reason="no Triton")
def test_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.unit.test_kernels"], cwd=REPO, env=env, check=True)


# ---------------------------------------------------------------- products of a CPU without units for bf16 or fp16

HALF = (torch.bfloat16, torch.float16)
ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # rows of three experts, one of which has none


@pytest.fixture
def widened():
    """The replaced kernels, on a machine whose CPU has units for a type too."""
    fast = [dtype for dtype in HALF if cpu_backend.has_units(dtype)]
    kernels = cpu_backend.compute_products_in_fp32(fast) if fast else None
    yield
    if kernels is not None:
        kernels._destroy()


PRODUCTS = {
    "linear": (F.linear, (8, 16), (24, 16)),
    "matmul": (torch.matmul, (8, 16), (16, 24)),
    "bmm": (torch.bmm, (4, 8, 16), (4, 16, 8)),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w, offs=ENDS), (8, 16), (3, 16, 24)),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_fp32_rounded_once(widened, name, dtype):
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


if __name__ == "__main__":
    for of in KERNELS:
        for dtype in (torch.float32, torch.bfloat16):
            check(of, dtype, "cpu")
