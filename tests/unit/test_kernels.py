"""The Triton kernels against float64: on a GPU, and on a CPU in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from support.model import kernels
from tests.processes import REPO

# Relative error: one rounding of the result. The interpreter cuts bf16 off.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 5e-4}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def swiglu(dtype: torch.dtype, on: str) -> list[float]:
    x, grad = torch.randn(33, 1, 600, device=on).to(dtype), torch.randn(33, 1, 300, device=on).to(dtype)
    exact = x.double().requires_grad_()
    wanted = F.silu(exact[..., :300]) * exact[..., 300:]
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double())
    assert kernels.swiglu(x[:0]).shape == (0, 1, 300)  # an expert without tokens
    return [relative(kernels.swiglu(x), wanted.detach()), relative(kernels.swiglu_grad(x, grad), wanted_grad)]


def rotation(dtype: torch.dtype, on: str) -> list[float]:
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


KERNELS = [swiglu, rotation]


def check(of, dtype: torch.dtype, on: str) -> None:
    torch.manual_seed(0)
    errors = of(dtype, on)
    assert max(errors) < CLOSE[dtype], (of.__name__, dtype, errors)


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("of", KERNELS)
def test_on_a_gpu(of, dtype):
    check(of, dtype, "cuda")


@pytest.mark.skipif(not isinstance(kernels.triton, ModuleType), reason="no Triton")
def test_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.unit.test_kernels"], cwd=REPO, env=env, check=True)


if __name__ == "__main__":
    for of in KERNELS:
        for dtype in CLOSE:
            check(of, dtype, "cpu")
