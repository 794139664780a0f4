"""Gradients that are written by hand (support/model/layers.py): against autograd, and without the copies they avoid."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from support.model.layers import Normalization, Rotation, Split, SwiGLU


def test_the_gradients_are_those_of_the_formulas():
    torch.manual_seed(0)
    x = torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, 1, 1, 2, dtype=torch.float64)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    assert gradcheck(SwiGLU.apply, x)
    assert gradcheck(lambda x: Split.apply(x, 2, [6, 2, 4]), x)
    assert gradcheck(lambda x: Rotation.apply(x.unflatten(2, (3, 4)), cos, sin), x)
    turned = Rotation.apply(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 1.0]))
    assert turned.tolist() == [-4, 3]  # by 90 degrees


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


def test_no_gradient_is_put_together_from_copies():
    x = torch.randn(33, 1, 64, requires_grad=True)
    for out in (SwiGLU.apply(x), torch.cat(Split.apply(x, 2, [48, 16]), 2)):
        loss = out.square().sum()
        with profile(activities=[ProfilerActivity.CPU]) as record:
            loss.backward()
        done = {event.key for event in record.key_averages()}
        assert "aten::mul" in done and "aten::cat" not in done
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda t: t):
        SwiGLU.apply(x)
    assert saved == [x.numel()]  # the product of the first matrix alone


@pytest.mark.slow
def test_routers_do_not_need_the_cpus_backend():
    """Megatron 0.16 reads a name of Transformer Engine in each router's forward pass; on a GPU too it is there."""
    code = (
        "from support.model import cpu_backend\n"
        "cpu_backend.install = lambda: None\n"  # as on a GPU, where nothing is patched
        "import support.model.layers\n"
        "from megatron.core.transformer.moe import moe_utils\n"
        "assert moe_utils.te_general_gemm is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
