"""vLLM's linear attention in plain torch, for runs of Qwen3.5 that its kernels for CPUs cannot compute."""

import torch
import torch.nn.functional as F
import vllm._custom_ops as ops

import megatron_bridge as bridge
from grpo.parts.base.hf_folder import read_config
from grpo.run.preflight import linear_attention
from tests.museum import Exhibit

# Its kernels compute in bf16 alone. What replaces them computes in every dtype.
ALL_DTYPES = Exhibit("", "", "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core",
    "mixed_qkv.dtype == torch.bfloat16", "True")  # fmt: skip


def emulate_where_needed():
    """Replace vLLM's kernels where a run is in fp32, as make check's twins are, or this CPU lacks their units."""

    def prepare(cfg):
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        linear = bridge.has_linear_attention(read_config(cfg.model.path))
        if linear and not (has_units and cfg.model.dtype == "bf16"):
            emulate()

    linear_attention.check_cpu = prepare


def emulate():
    """Replace vLLM's kernels in this process."""
    torch.cpu._is_avx512_bf16_supported = lambda: False  # else vLLM packs the convolution's weight for bf16
    ALL_DTYPES.apply()
    ops.fused_gdn_gating_cpu = gates
    ops.chunk_gated_delta_rule_cpu = prefill
    ops.fused_sigmoid_gating_delta_rule_update_cpu = decode


def gates(A_log, a, b, dt_bias):
    """The log decay and beta of each token and head."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def prefill(query, key, value, g, beta, initial_state, cu_seqlens, initial_state_indices, **unused):
    """Outputs [1, T, value heads, e] of sequences end to end; their states [slots, heads, d, e] change in place."""
    out = torch.empty_like(value)
    for n, slot in enumerate(initial_state_indices.tolist()):
        for t in range(int(cu_seqlens[n]), int(cu_seqlens[n + 1])):
            step = (x[0, t] for x in (query, key, value))
            out[0, t] = one_token(initial_state[slot], *step, g[t], beta[t])
    return out, None


def decode(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, **unused):
    """The same for one token of each sequence, [T, 1, value heads, e]."""
    g, beta = gates(A_log, a, b, dt_bias)
    ends = range(len(initial_state_indices) + 1)
    out, _ = prefill(q, k, v, g, beta, initial_state_source, ends, initial_state_indices)
    return out.transpose(0, 1)


def one_token(state, q, k, v, g, beta):
    """The output [heads, e] of a token, and the state [heads, d, e] after it, in place."""
    repeat = len(v) // len(q)
    q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(repeat, 0)[:, None] for x in (q, k))
    held = state.float() * g.exp()[:, None, None]
    held = held + k.mT @ ((v.float()[:, None] - k @ held) * beta[:, None, None])
    state.copy_(held)
    return (q * q.shape[-1] ** -0.5 @ held)[:, 0].to(v.dtype)
