"""Linear attention (grpo/parts/model/gated_delta.py): the rule in chunks, and fla's kernels.

tests/oracle/test_layouts.py compares whole models with transformers.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf_model

import megatron_bridge as bridge
from config import ParallelConfig
from grpo.parts.model import gated_delta as delta
from grpo.parts.model.attention import Packing, Segments
from tests.oracle.reference import delta_by_steps, relative

HF = hf_model.Qwen3_5TextConfig(
    hidden_size=64, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=48, architectures=["Qwen3_5ForCausalLM"],
)  # fmt: skip


def packing(lengths):
    positions = torch.cat([*map(torch.arange, lengths)]).to(bridge.device())
    segments = Segments.of(np.array(lengths), np.array(lengths), window=None, to=bridge.device())
    return Packing(segments=segments, position_T=positions, copies=None)


def arguments(tokens, dtype):
    """q, k, v, g and beta of 2 heads: the first keeps most of its state from token to token, the second little."""
    torch.manual_seed(0)
    shapes = [(tokens, 2, 16), (tokens, 2, 16), (tokens, 2, 24), (tokens, 2), (tokens, 2)]
    q, k, v, a, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, -F.softplus(a) * torch.tensor([0.02, 8.0]), b.sigmoid())]


def in_chunks(q, k, v, g, beta, lengths):
    return delta.gated_delta(delta.unit(q), delta.unit(k), v, g, beta, np.array(lengths))


def with_gradients(out, xs):
    grad = torch.arange(out.numel(), device=out.device).sin().view_as(out)
    return [out, *torch.autograd.grad(out, xs, grad.to(out.dtype))]


@pytest.mark.parametrize("lengths", [[1, 63, 64, 65, 3], [7] * 30])
def test_the_rule_in_chunks_is_the_rule_by_steps(lengths):
    xs = arguments(sum(lengths), torch.float64)
    sequences = zip(*(x[None].split(lengths, 1) for x in xs), strict=True)
    wanted = torch.cat([delta_by_steps(*sequence)[0][0] for sequence in sequences])
    errors = map(relative, with_gradients(in_chunks(*xs, lengths), xs), with_gradients(wanted, xs))
    assert max(errors) < 1e-12


def test_a_sequence_gives_the_same_bits_in_any_row():
    lengths = [65, 3, 130]
    xs = arguments(sum(lengths), torch.float32)
    sequences = zip(*(x.split(lengths) for x in xs), lengths, strict=True)
    apart = torch.cat([in_chunks(*sequence, [length]) for *sequence, length in sequences])
    pairs = zip(with_gradients(in_chunks(*xs, lengths), xs), with_gradients(apart, xs), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.gpu(only=True)
def test_the_kernels_of_fla_are_the_plain_form(world, monkeypatch):
    """Output and gradients in bf16; in Triton's interpreter they are 0.6 to 1.5% apart, which is rounding."""
    torch.manual_seed(0)
    bridge.init_model_parallel(ParallelConfig(), seed=0)
    config = bridge.transformer_config(HF, ParallelConfig(), torch.float32, {"gradient_accumulation_fusion": False})
    layer = delta.GatedDeltaNet(config, 1, ProcessGroupCollection.use_mpu_process_groups()).to(bridge.device())
    for weight in layer.parameters():
        weight.data = 0.2 * torch.randn_like(weight)
    layer.norm.data += 1
    layer.dt_bias.data += 1
    layer.A_log.data -= 1  # a state that lasts

    layer.bfloat16()
    xs = [torch.randn(201, 1, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(), *layer.parameters()]
    found = with_gradients(layer(xs[0], packing([70, 1, 130]))[0], xs)
    monkeypatch.setattr(delta, "uses_fla", lambda on, dtype: False)
    plain = with_gradients(layer(xs[0], packing([70, 1, 130]))[0], xs)
    assert max(map(relative, found, plain)) < 3e-2
