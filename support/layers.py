"""Layers of a Megatron-core model that need no Transformer Engine and know packed rows, on the CPU and on GPUs alike.

Norm, activation, attention (which also turns queries and keys) and router are given to Megatron's layer spec
(megatron_bridge.build_model). Importing this file prepares the process for Megatron-core, which is imported here first.
"""

import dataclasses
import importlib.util
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from support import cpu_backend

# What every run without Transformer Engine and Apex says, and nobody needs to act on.
for said in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    r"\s*The 'megatron.core.transformer.custom_layers",
    "`torch.distributed",
):
    warnings.filterwarnings("ignore", said)

if not torch.cuda.is_available():
    cpu_backend.install()  # before Megatron-core is imported

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import optimizer_config
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

# Megatron-core 0.16 asks for the version of Transformer Engine, for use_precision_aware_optimizer, where there is none.
if importlib.util.find_spec("transformer_engine") is None:
    optimizer_config.is_te_min_version = lambda *args, **kwargs: False


def device() -> torch.device:
    """Where tensors of this rank live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# ---------------------------------------------------------------- context parallelism

# Rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every packed row, so each has the same share of positions
# that attend to few tokens and of those that attend to many. Source: Striped Attention, arXiv 2311.09431; keys and
# values are gathered whole instead of passed around a ring.


def own_stripe(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


def gather_stripes(x: torch.Tensor, summed_gradient: bool) -> torch.Tensor:
    """All ranks' tokens, in the order of the row; [T / cp, ...] → [T, ...].

    `summed_gradient`: every rank uses the result for a part of the loss of its own, so the gradients of all ranks add
    up. Without it every rank computes the same whole loss, and each takes the gradient of its own tokens.
    """
    cp = mpu.get_context_parallel_world_size()
    if cp == 1:
        return x
    gathered = gather_from_sequence_parallel_region(x, summed_gradient, mpu.get_context_parallel_group())
    return gathered.unflatten(0, (cp, -1)).transpose(0, 1).flatten(0, 1)  # rank by rank → [T, ...]


# ---------------------------------------------------------------- gradients without copies


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up of [gate, up]; [..., 2 f] → [..., f]. Keeps its input alone; one tensor takes both gradients."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grads


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Activation of every feed-forward block, for Megatron's layer spec; [..., 2 f] → [..., f]."""
    return SwiGLU.apply(gate_up)


class Split(torch.autograd.Function):
    """torch.split; one tensor takes the gradients of all parts, which stay views."""

    @staticmethod
    def forward(ctx, x, dim, sizes):
        ctx.dim, ctx.sizes = dim, sizes
        return x.split(sizes, dim)

    @staticmethod
    def backward(ctx, *grads):
        shape = list(grads[0].shape)
        shape[ctx.dim] = sum(ctx.sizes)
        whole = grads[0].new_empty(shape)
        for part, grad in zip(whole.split(ctx.sizes, ctx.dim), grads, strict=True):
            part.copy_(grad)
        return whole, None, None


attention.SplitAlongDim = Split.apply  # Transformer Engine's, for query, key and value, where that is installed


class Rotation(torch.autograd.Function):
    """Rotary embedding: the halves (a, b) of each head become (a cos - b sin, b cos + a sin).

    x [T, 1, heads, d], cos = (cos, cos) and sin = (-sin, sin) [T, 1, 1, d] → [T, 1, heads, d]. Keeps no copy of x.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


class Normalization(torch.autograd.Function):
    """RMS norm of the last dimension in fp32, for the CPU, where torch's own makes three times as many copies.

    x [..., h], weight [h] → [..., h].
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (size.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, weight = x * scale, weight.float()
        product = grad * normed  # [..., h] fp32
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).unsqueeze(-1) / x.shape[-1]
        torch.mul(grad, weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return product.to(x.dtype), grad_weight.to(x.dtype), None


# ---------------------------------------------------------------- layers


class RMSNorm(torch.nn.Module):
    """RMS norm whose weight is marked for sequence parallelism, which Megatron's own torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return Normalization.apply(x, self.weight, self.eps)


@dataclasses.dataclass
class Packing(PackedSeqParams):
    """Where the S sequences of a packed row lie.

    Rides through Megatron's layers to core attention. This rank's queries are a stripe of the row under context
    parallelism, else all of it; its keys are always the whole row.
    """

    cos: torch.Tensor | None = None  # [T / cp, 1, 1, head_dim], of each query's position, as Rotation wants them
    sin: torch.Tensor | None = None
    query_slot: torch.Tensor | None = None  # [T / cp], place of each query in a padded [S * max_seqlen_q] layout
    key_slot: torch.Tensor | None = None  # [T], place of each key in a padded [S * max_seqlen_kv] layout
    mask: torch.Tensor | None = None  # [S, 1, max_seqlen_q, max_seqlen_kv], True where a query sees a key; None: causal

    @classmethod
    def of(cls, mb, inv_freq: torch.Tensor, dtype: torch.dtype) -> "Packing":
        """That of a micro-batch; `inv_freq` [head_dim / 2] as transformers computes it, `dtype` that of the layers."""
        starts_S, lengths_S = mb.cu_seqlens[:-1].long(), mb.cu_seqlens.diff()
        sequences, position_T = len(lengths_S), mb.position_ids[0]
        sequence_T = torch.arange(sequences, device=starts_S.device).repeat_interleave(
            lengths_S, output_size=len(position_T)
        )
        key_slot_T = sequence_T * mb.max_seqlen + position_T
        query_slot, max_queries, mask = key_slot_T, mb.max_seqlen, None
        cp = mpu.get_context_parallel_world_size()
        if cp > 1:
            first_S = (starts_S - mpu.get_context_parallel_rank() + cp - 1) // cp  # first query of each, in the stripe
            sequence, max_queries = own_stripe(sequence_T), -(-mb.max_seqlen // cp)
            place = torch.arange(len(sequence), device=sequence.device) - first_S[sequence]
            query_slot = sequence * max_queries + place  # [T / cp]
            position = position_T.new_zeros(sequences * max_queries).index_copy(0, query_slot, own_stripe(position_T))
            keys = torch.arange(mb.max_seqlen, device=position.device)
            mask = (position[:, None] >= keys).view(sequences, 1, max_queries, mb.max_seqlen)
        angles = torch.outer(own_stripe(position_T).float(), inv_freq)[:, None, None]
        return cls(
            qkv_format="sbhd",  # keeps Megatron from its own per-sequence loop over "thd"
            cu_seqlens_q=mb.cu_seqlens,
            cu_seqlens_kv=mb.cu_seqlens,
            max_seqlen_q=max_queries,
            max_seqlen_kv=mb.max_seqlen,
            cos=torch.cat((angles.cos(), angles.cos()), -1).to(dtype),
            sin=torch.cat((-angles.sin(), angles.sin()), -1).to(dtype),
            query_slot=query_slot,
            key_slot=key_slot_T,
            mask=mask,
        )


def rotary_embedding(hf_config) -> torch.nn.Module:
    """transformers' own rotary embedding, for its frequencies (Llama 3 scaling included).

    Raises ValueError for a type that scales attention or changes with the length.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(hf_config)
    if rope.rope_type not in ("default", "linear", "llama3") or rope.attention_scaling != 1.0:
        raise ValueError(f"rope type {rope.rope_type!r} is not supported; supported are default, linear, llama3")
    return rope


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence: pad to [S, max_seqlen], one scaled_dot_product_attention, unpad.

    Padding stands right of every real token, so the causal mask alone keeps it out. No Transformer Engine, CPU and GPU
    alike. A row whose sequences are all of one length is not copied. Under context parallelism the keys and values of
    the other ranks are gathered first.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [T / cp, 1, heads, d], key and value [T / cp, 1, kv_heads, d] → [T / cp, 1, heads * d]."""
        packing, sequences = packed_seq_params, len(packed_seq_params.cu_seqlens_q) - 1
        query, key = (Rotation.apply(x, packing.cos, packing.sin) for x in (query, key))
        if mpu.get_context_parallel_world_size() > 1:
            key, value = gather_stripes(torch.stack((key, value), dim=1), summed_gradient=True).unbind(1)  # [T, 1, ...]

        def pad(x, slot, width):  # [tokens, 1, n, d] → [S, n, width, d]
            x = x.squeeze(1) if x.is_cuda else x.squeeze(1).float()  # on the CPU bf16 takes ten times as long
            if len(x) < sequences * width:
                x = x.new_zeros(sequences * width, *x.shape[1:]).index_copy_(0, slot, x)
            return x.unflatten(0, (sequences, width)).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            pad(query, packing.query_slot, packing.max_seqlen_q),
            *(pad(x, packing.key_slot, packing.max_seqlen_kv) for x in (key, value)),
            attn_mask=packing.mask,
            is_causal=packing.mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        out = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [S * max_seqlen_q, heads * d]
        if len(query) < len(out):
            out = out.index_select(0, packing.query_slot)
        return out.unsqueeze(1).to(query.dtype)  # [T / cp, 1, heads * d]


class Router(TopKRouter):
    """Megatron's router with a balancing loss that does not depend on tp and cp, and a count of each expert's load.

    Megatron weighs the loss with the tokens of the rank; here it is those of the whole micro-batch. `padding_mask` is
    True where no response token is predicted, so loss and load speak of the tokens that are trained, and the weight
    matches the denominator of `token_mean`.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.load = torch.zeros(config.num_moe_experts, device=device())  # tokens of each expert, until `expert_load`

    def forward(self, input, padding_mask=None):
        probs, routing_map = super().forward(input, padding_mask)
        if self.training:  # full recompute counts everything twice: only ratios are read
            self.load = self.load + (routing_map & ~padding_mask.reshape(-1, 1)).sum(0)
        return probs, routing_map

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        """Switch Transformer's loss, arXiv 2101.03961 eq. 4, over the micro-batch: coefficient · E · sum_e f_e P_e."""
        coefficient, experts = self.get_aux_loss_coeff("aux_loss"), self.config.num_moe_experts
        tokens_E = routing_map.sum(0).float()
        dist.all_reduce(tokens_E, group=self.tp_cp_group)
        tokens = tokens_E.sum() / self.topk
        share_E = scores_for_aux_loss.sum(0)  # this rank's part of tokens · P_e
        loss = coefficient * experts * (tokens_E * share_E).sum() / (tokens * self.topk).clamp(min=1)
        return MoEAuxLossAutoScaler.apply(probs, loss)


class HiddenGPT(GPTModel):
    """A GPTModel that ends with the last hidden state, so that logits are made only where a log-prob is wanted.

    `inv_freq`, set once it is built, are the frequencies of its rotary embedding.
    """

    def _postprocess(self, hidden_states, *args, **kwargs) -> torch.Tensor:
        return hidden_states
