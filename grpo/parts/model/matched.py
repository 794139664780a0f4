"""The forward pass in vLLM's arithmetic (model.match_engine), so that its log-probs have the bits of vLLM's.

Each function below computes forward by the operation that vLLM calls, and backward by the formulas of layers.py,
attention.py and experts.py. `attach` puts them into a model. All this is for CPUs; see docs/equal-bits.md.
"""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from grpo.parts.base.by_row import product, queries_of_a_piece, split_queries
from grpo.parts.model import layers, lora  # first: it prepares the process for Megatron-core
from grpo.parts.model.attention import PackedAttention, attend_padded, count_from
from grpo.parts.model.gated_delta import linear_sizes
from grpo.parts.model.routes import Replay

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _gather_along_last_dim,
    _split_along_first_dim,
)
from megatron.core.transformer.moe.moe_layer import MoELayer

# Between layers the sum of residual and output is fp32, because vLLM normalizes it before it is rounded.
OPTIONS = {"fp32_residual_connection": True, "pipeline_dtype": torch.float32}
PAGE = 128  # tokens of a block of keys and values


def supports(hf):
    """Whether all operations of a model are here: it has no linear attention and no shared expert."""
    return not linear_sizes(hf)[0] and not getattr(hf, "shared_expert_intermediate_size", None)


def attach(chunk):
    """Let a model chunk compute as vLLM does."""
    for layer in chunk.decoder.layers:
        layer.self_attn_bda = layer.mlp_bda = residual_sum

    for module in chunk.modules():
        if isinstance(module, layers.RMSNorm):
            module.normalize = Normalization.apply
        elif isinstance(module, PackedAttention):
            module.rotary.rotation = Rotation.apply
            module.attend = Attention.apply
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.is_expert:
            match_linear(module)
        elif isinstance(module, MoELayer):
            module.forward = partial(experts, module, module.forward)


# ---------------------------------------------------------------- linear layers


def match_linear(module):
    """Let a parallel layer compute as vLLM does, with its adapters if it has any."""
    if hasattr(module.weight, "adapter"):
        module._forward_impl = partial(module._forward_impl, product=product)
    else:
        module._forward_impl = linear
    if isinstance(module, RowParallelLinear) and module.tp_group.size() > 1:
        module.forward = partial(row_parallel, module)


def linear(input, weight, bias, *, allreduce_dgrad, sequence_parallel, tp_group, **unused):
    """Replaces Megatron's linear functions and has their arguments; [T (/ tp), 1, in] → [T, 1, out]."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)  # the backward pass reduce-scatters
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)  # the backward pass all-reduces
    return Linear.apply(input, weight, bias)


class Linear(torch.autograd.Function):
    """x weightᵀ + bias; x [..., in] → [..., out]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = grad_bias = None
        rows = grad.flatten(0, -2)
        grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias


def row_parallel(module, x):
    """RowParallelLinear.forward with the sum over tensor-parallel ranks by vLLM, whose ranks are the same."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    options = {"allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
    part = module._forward_impl(x, module.weight, None, **options)
    total = EngineValue.apply(part, tensor_model_parallel_all_reduce(part.detach().clone()))
    if module.sequence_parallel:
        total = scatter_to_sequence_parallel_region(total, group=module.tp_group)
    return total, None


class EngineValue(torch.autograd.Function):
    """The value that vLLM's operation gave, with the gradient of `ours`."""

    @staticmethod
    def forward(ctx, ours, value):
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# ---------------------------------------------------------------- norms, residual, rotary embedding


class Normalization(layers.Normalization):
    """RMS norm of the fp32 sum, rounded, then times the weight; x [..., h], weight [h] → [..., h] in its dtype."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        total = x.float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (total * scale).to(weight.dtype) * weight


class ResidualSum(torch.autograd.Function):
    """x + residual in fp32. What vLLM's next layer adds to is rounded, so the residual, fp32 here, is rounded first."""

    @staticmethod
    def forward(ctx, x, residual):
        ctx.dtype = x.dtype
        return residual.to(x.dtype).float() + x.float()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), grad


def residual_sum(training, fused):
    """Replaces Megatron's get_bias_dropout_add. There is neither bias nor dropout."""
    return lambda x_bias, residual, probability: ResidualSum.apply(x_bias[0], residual)


class Rotation(layers.Rotation):
    """Rotary embedding by vLLM's kernel, which rounds once, and in fp32 fuses product and sum."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        from vllm import _custom_ops as ops

        ctx.save_for_backward(cos, sin)
        tokens, _, heads, d = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        table = torch.cat((cos[:, 0, 0, : d // 2], sin[:, 0, 0, d // 2 :]), -1)  # a row for each token
        ops.rotary_embedding(torch.arange(tokens), out.view(tokens, heads * d), None, d, table, True)
        return out


# ---------------------------------------------------------------- attention


class Attention(torch.autograd.Function):
    """Causal attention inside each segment by vLLM's kernel, over keys and values in pages as vLLM caches them;
    query [queries, heads, d], key and value [keys, kv_heads, d] → as query.
    """

    @staticmethod
    def forward(ctx, query, key, value, segments):
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        ctx.save_for_backward(query, key, value)
        ctx.segments = segments
        heads, d = query.shape[1:]
        kv_heads, dtype = key.shape[1], query.dtype
        isa = _get_attn_isa(dtype, PAGE, d)

        # The requests are pieces of the segments' queries, as in vLLM.
        most = queries_of_a_piece(isa, heads, kv_heads)
        segment_P, starts, sizes = split_queries(segments.queries_S, segments.keys_S, most)

        # Each segment has pages of its own, one after another. A page has zeros where there is no token.
        pages_S = -(-segments.keys_S // PAGE)
        first_S = np.cumsum(pages_S) - pages_S
        slots = count_from(first_S * PAGE, segments.keys_S)
        table = torch.from_numpy((first_S[segment_P, None] + np.arange(pages_S.max())).astype(np.int32))
        keys, values = torch.zeros(pages_S.sum(), kv_heads, PAGE * 2, d, dtype=dtype).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), keys, values, slots, isa)

        window = segments.window or -1
        plan = ops.cpu_attn_get_scheduler_metadata(
            len(sizes), heads, kv_heads, d, sizes, dtype, starts, True, window, isa, True
        )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        ops.cpu_attention_with_kv_cache(
            query.contiguous(), keys, values, out, starts, sizes, d**-0.5, True, None, window, table, 0.0, plan, None
        )
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = attend_padded(*inputs, ctx.segments)
        return *torch.autograd.grad(out, inputs, grad), None


# ---------------------------------------------------------------- experts


def experts(layer: MoELayer, forward, hidden, *args, **options):
    """MoELayer.forward with the value of vLLM's kernel, which adds up a token's experts in fp32; [T (/ tp), 1, h].

    For this, each rank gathers the weights of all experts of the layer. The gradient is that of Megatron's `forward`.
    """
    tp, router = layer.tp_group, layer.router
    is_sharded = layer.config.sequence_parallel
    with torch.no_grad():
        rows = _gather_along_first_dim(hidden, tp) if is_sharded else hidden
        rows = rows.flatten(0, -2)
        weights_T, experts_T = choose_experts(product(rows, router.weight.to(rows.dtype)), router)
        fc1, fc2 = whole_experts(layer, "linear_fc1"), whole_experts(layer, "linear_fc2")
        value = run_experts(rows, fc1, fc2, weights_T, experts_T, tp)
    if is_sharded:
        value, experts_T = _split_along_first_dim(value, tp), _split_along_first_dim(experts_T, tp)

    # The gradient goes through the same experts: the recorded ones if there are any, else those of vLLM's router.
    if not isinstance(router.router_replay, Replay):
        router.router_replay = Chosen(experts_T.long())
    ours, bias = forward(hidden, *args, **options)
    return EngineValue.apply(ours, value.view_as(ours)), bias


class Chosen:
    """Gives Megatron's top-k the experts of each token, [tokens, k], that were chosen before."""

    def __init__(self, experts):
        self.experts = experts

    def get_replay_topk(self, scores, k, num_groups, group_topk, choose):
        return scores.gather(-1, self.experts), self.experts


def choose_experts(logits, router):
    """The weights, fp32, and the numbers of each token's k experts as vLLM's router chooses; [T, E] → [T, k] each."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    renormalize = not router.config.moe_router_pre_softmax
    return select_experts(logits, logits, router.topk, use_grouped_topk=False, renormalize=renormalize)


def whole_experts(layer, name):
    """The weights `name` of all experts of a layer, [E, out, in], from the ranks that have them."""
    weights = []
    for expert in layer.experts.local_experts:
        weight = getattr(expert, name).weight
        weights.append(lora.merged_weight(weight) if hasattr(weight, "adapter") else weight)
    own = torch.stack(weights)  # [experts of this rank, out, in], of which etp ranks have parts
    group, etp = mpu.get_expert_tensor_and_model_parallel_group(), mpu.get_expert_tensor_parallel_world_size()
    if group.size() == 1:
        return own

    parts = _gather_along_first_dim(own, group).unflatten(0, (-1, etp, len(own)))  # [ep, etp, experts of a rank, ...]
    if name == "linear_fc2":  # split by columns
        return parts.permute(0, 2, 3, 1, 4).flatten(3, 4).flatten(0, 1)
    gate_up = parts.unflatten(3, (2, -1))  # each split by rows
    return gate_up.permute(0, 2, 3, 1, 4, 5).flatten(2, 4).flatten(0, 1)


def run_experts(rows, fc1, fc2, weights_T, experts_T, tp):
    """vLLM's kernel on the rows [T, h], where each of `tp` ranks has a part of every expert; the sum over ranks."""
    from vllm import _custom_ops as ops
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts

    has_tiles = torch.cpu._is_amx_tile_supported() and rows.dtype is torch.bfloat16
    kernel = X86CPUUnquantizedExperts if has_tiles else CPUUnquantizedExperts

    # This rank's part of each expert. Its width is rounded up with zeros, as vLLM does.
    gate_up = fc1.unflatten(1, (2, -1)).chunk(tp.size(), 2)[tp.rank()]  # [E, 2, ffn / tp, h]
    down = fc2.chunk(tp.size(), 2)[tp.rank()]
    missing = -down.shape[2] % kernel._intermediate_alignment()
    gate_up, down = F.pad(gate_up, (0, 0, 0, missing)).flatten(1, 2), F.pad(down, (0, missing))

    # In the order of the kernel.
    gate_up = ops.cpu_prepack_moe_weight(gate_up.contiguous(), kernel.isa)
    down = ops.cpu_prepack_moe_weight(down.contiguous(), kernel.isa)
    out = torch.empty_like(rows)
    ops.cpu_fused_moe(out, rows.contiguous(), gate_up, down, None, None, weights_T, experts_T, "silu", kernel.isa)
    return tensor_model_parallel_all_reduce(out) if tp.size() > 1 else out


# ---------------------------------------------------------------- the head


def logp_stats(logits_M, targets_M, temperature, with_entropy):
    """Log-prob of the target by torch's log_softmax of whole rows, as in vLLM; entropy, log Z and 0; [4, M] fp32.

    logits [M, V / tp], of l = logit / temperature. logits_grad takes the last two for max l and the log of the sum of
    exp(l - max l): with log Z as the maximum, this sum is 1.
    """
    logits_M = _gather_along_last_dim(logits_M, mpu.get_tensor_model_parallel_group())
    stats = torch.zeros(4, len(logits_M))
    logp_M, entropy_M, log_z_M, _ = stats
    for rows in layers.row_blocks(logits_M):
        scaled = logits_M[rows].float() / temperature
        logp = scaled.log_softmax(-1)
        column = targets_M[rows, None]
        logp_M[rows] = logp.gather(-1, column)[:, 0]
        log_z_M[rows] = scaled.gather(-1, column)[:, 0] - logp_M[rows]
        entropy_M[rows] = math.nan
        if with_entropy:
            entropy_M[rows] = -(logp.exp() * logp).sum(-1)
    return stats
