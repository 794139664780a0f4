"""Linear attention: the rule in chunks (grpo/parts/model/gated_delta.py), fla's kernels, and vLLM's on a CPU.

tests/oracle/test_layouts.py compares whole models with transformers.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf_model

import megatron_bridge as bridge
from config import ParallelConfig
from grpo.parts.engine import linear_attention as in_vllm
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


def test_vllm_in_plain_torch_passes_the_state_from_prompt_to_answer():
    """Three prompts at once, then a token of each, with 2 key heads and 4 value heads. Slots have another order."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, width) for heads, width in ((2, 16), (2, 16), (4, 24)))
    a, b = torch.randn(2, 12, 4)
    A_log, dt_bias = torch.randn(2, 4)
    g, beta = in_vllm.gates(A_log, a, b, dt_bias)

    states, slots = torch.zeros(4, 4, 16, 24), torch.tensor([2, 0, 3])
    ends = torch.tensor([0, 5, 6, 9])
    prompts, _ = in_vllm.prefill(q[:, :9], k[:, :9], v[:, :9], g[:9], beta[:9], states, ends, slots)
    answers = in_vllm.decode(A_log, dt_bias, q[:, 9:], k[:, 9:], v[:, 9:], a[9:], b[9:], states, slots)

    for n, (begin, end) in enumerate(pairwise(ends.tolist())):
        whole = [*range(begin, end), 9 + n]
        xs = [x.repeat_interleave(4 // x.shape[2], 2)[:, whole].double() for x in (q, k, v)]
        wanted, _ = delta_by_steps(*xs, g[None, whole].double(), beta[None, whole].double())
        assert relative(torch.cat([prompts[0, begin:end], answers[n]]), wanted[0]) < 1e-6


@pytest.mark.parametrize(
    "dtype, width, units, has", [("bf16", 128, True, True), ("fp32", 128, True, False), ("bf16", 64, True, False),
                                 ("bf16", 128, False, False)],
)  # fmt: skip
def test_vllms_kernels_for_cpus_are_used_where_they_exist(monkeypatch, dtype, width, units, has):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(in_vllm.platform, "machine", lambda: "x86_64")
    hf = hf_model.Qwen3_5TextConfig(linear_key_head_dim=width, linear_value_head_dim=128)
    assert in_vllm.has_kernels(hf, dtype) is has


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
