"""Gradients written by hand, against autograd, and what they save; which layers a pipeline stage has."""

import pytest
import torch
import torch.nn.functional as F

from support.model.layers import Normalization
from support.model.stages import split_layers


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_the_norm_is_that_of_torch_in_fp64(dtype, close):
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((33, 1, 64), (64,), (33, 1, 64)))
    found = Normalization.apply(x, weight, 1e-5)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    gradients = (torch.autograd.grad(out, [x, weight], grad.to(out.dtype)) for out in (found, exact))
    for value, expected in [(found, exact), *zip(*gradients, strict=True)]:
        assert value.dtype == dtype and (value - expected).abs().max() < close * expected.abs().max()


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
