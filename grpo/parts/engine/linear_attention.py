"""Qwen3.5 in vLLM: its language model alone, and on a CPU plain torch where vLLM 0.32 has no kernels for it."""

import importlib.util
import platform
import sys
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.ranks import tell


def prepare(path, dtype):
    """Prepare vLLM, before it starts, for a Qwen3.5 in the folder `path`, in this model.dtype. Others need nothing.

    Returns options of the engine.
    """
    hf = read_config(path)
    if not hf.model_type.startswith("qwen3_5"):
        return {}
    register_language_models()
    options = {"enable_prefix_caching": False}  # with it vLLM wants chunked prefill
    if torch.cuda.device_count():
        return options

    if not has_kernels(hf, dtype):
        needs = "bf16, heads of 128 numbers, and AVX-512 BF16 or AMX"
        tell(f"note: vLLM computes linear attention in plain torch, which is slower: its kernels for CPUs need {needs}")
        use_plain_torch()
    return options | {"kv_cache_memory_bytes": 2**30}  # the cache has the states too


def register_language_models():
    """Let vLLM build only the language model of a Qwen3.5, on a machine without torchvision."""
    # vLLM imports image processors, which import torchvision.
    absent = []
    if importlib.util.find_spec("torchvision") is None:
        parts = ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional")
        absent = [f"torchvision{part}" for part in parts]
    for name in absent:
        sys.modules[name] = ModuleType(name)
    from vllm import ModelRegistry
    from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.utils import WeightsMapper

    for name in absent:
        del sys.modules[name]

    # The whole model's name stands for its language model too, which skips the weights for images.
    for name in ("Qwen3_5", "Qwen3_5Moe"):
        family = getattr(qwen3_5, f"{name}ForCausalLM")
        ModelRegistry.register_model(f"{name}ForCausalLM", family)
        mapper = family.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix={"model.visual.": None})
        text_alone = type(f"{name}LanguageModel", (family,), {"hf_to_vllm_mapper": mapper})
        ModelRegistry.register_model(f"{name}ForConditionalGeneration", text_alone)


# ---------------------------------------------------------------- on a CPU


def has_kernels(hf, dtype):
    """Whether vLLM's kernels for CPUs compute this model here: in bf16 and with heads of 128 numbers alone."""
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    widths = hf.linear_key_head_dim, hf.linear_value_head_dim
    return dtype == "bf16" and widths == (128, 128) and (units or platform.machine() == "aarch64")


def use_plain_torch():
    """Replace vLLM's kernels by transformers' functions, and its convolution's by its own plain torch."""
    import vllm._custom_ops as ops
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def attend(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
        """vLLM's cpu_gdn_attention_core, which refuses other types than bf16."""
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata:  # None in a profiling run
            metadata = context.attn_metadata[layer.prefix]
            gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, mixed_qkv, b, a, core_attn_out)

    # Where this is true vLLM packs the convolution's weight, for a kernel that computes in bf16 alone.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    gdn_attention.cpu_gdn_attention_core = attend
    ops.fused_gdn_gating_cpu = gates
    ops.chunk_gated_delta_rule_cpu = prefill
    ops.fused_sigmoid_gating_delta_rule_update_cpu = decode


def gates(A_log, a, b, dt_bias):
    """The log decay g and beta of each token and value head, [T, H] each, in fp32."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def prefill(query, key, value, g, beta, initial_state, cu_seqlens, initial_state_indices, **unused):
    """Outputs [1, T, H, e] of sequences end to end; their states [slots, H, d, e] change in place."""
    out = torch.empty_like(value)
    for slot, (begin, end) in zip(initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=True):
        row = [x[:, begin:end] for x in (query, key, value, g[None], beta[None])]
        out[:, begin:end] = attend_rows(*row, initial_state, [slot])
    return out, None


def decode(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, **unused):
    """Outputs [N, 1, H, e] of a token of each of N sequences, q, k and v [1, N, ...]; their states change in place."""
    g, beta = gates(A_log, a, b, dt_bias)
    rows = [x.transpose(0, 1) for x in (q, k, v, g[None], beta[None])]
    return attend_rows(*rows, initial_state_source, initial_state_indices)


def attend_rows(q, k, v, g, beta, states, slots):
    """Outputs [N, T, H, e] of N sequences of T tokens, from their `slots` of the states, which change in place."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    repeat = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) for x in (q, k))
    how = {"initial_state": states[slots].float(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, after = torch_recurrent_gated_delta_rule(q, k, v, g, beta, **how)
    states[slots] = after.to(states.dtype)
    return out
