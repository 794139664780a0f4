"""Gradients written by hand, against autograd, and what they save; which layers a pipeline stage has."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import megatron_bridge as bridge
from support.model.layers import Normalization, Rotation, Split, SwiGLU
from support.model.stages import split_layers


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


def test_log_probs_and_entropies_of_a_vocabulary_have_their_gradients(world):
    bridge.mpu.initialize_model_parallel()
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7])
    wanted = torch.distributions.Categorical(logits=logits / 0.7)
    torch.testing.assert_close(
        bridge.VocabParallelLogp.apply(logits, targets, 0.7, True), (wanted.log_prob(targets), wanted.entropy())
    )
    assert gradcheck(lambda at: bridge.VocabParallelLogp.apply(at, targets, 0.7, True), logits)


BOTH = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "options", "expected"),
    [
        (94, 8, 1, BOTH, [[11], *[[12]] * 6, [11]]),
        (94, 4, 2, BOTH, [[11, 12], [12, 12], [12, 12], [12, 11]]),
        (30, 2, 1, {"num_layers_in_first_pipeline_stage": 14}, [[14], [16]]),
        (16, 3, 2, {"num_layers_in_last_pipeline_stage": 4}, [[3, 3], [3, 3], [2, 2]]),
        (9, 3, 1, {f"num_layers_in_{x}_pipeline_stage": n for x, n in (("first", 1), ("last", 2))}, [[1], [6], [2]]),
        (4, 2, 2, {"pipeline_model_parallel_layout": "Ett||t|tL"}, [[2, 1], [0, 1]]),
    ],
)
def test_layers_of_uneven_stages(layers, pp, vpp, options, expected):
    """Their numbers go on from chunk to chunk over all stages."""
    stages = split_layers(layers, pp, vpp, **options)
    assert [[len(chunk) for chunk in stage] for stage in stages] == expected
    assert [n for chunks in zip(*stages, strict=True) for chunk in chunks for n in chunk] == [*range(layers)]
