"""Attention inside the sequences of a packed row, on the CPU and on GPUs, and how context-parallel ranks share a row.

`varlen` and `padded` compute the same from plain tensors: FlashAttention as it is in torch, for bf16 and fp16 on a GPU,
and torch's scaled_dot_product_attention for the rest. PackedAttention is what Megatron's layer spec is given.
"""

import dataclasses
import functools
import importlib.util
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen as flash

from support.layers import Rotation, device  # first: it prepares the process for Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

# ---------------------------------------------------------------- a row in stripes

# Rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every packed row, in all layers; only inside attention do
# tokens change hands (below). Source of the stripes: Striped Attention, arXiv 2311.09431.


def own_stripe(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


def gather_stripes(x: torch.Tensor, summed_gradient: bool) -> torch.Tensor:
    """All ranks' tokens, in the order of the row; [T / cp, ...] → [T, ...].

    `summed_gradient`: every rank uses the result for a part of the loss of its own, so the gradients of all ranks add
    up. Without it every rank computes the same whole loss, and each takes the gradient of its own tokens.
    """
    if mpu.get_context_parallel_world_size() == 1:
        return x
    return in_row_order(gather_from_sequence_parallel_region(x, summed_gradient, mpu.get_context_parallel_group()))


def in_row_order(x: torch.Tensor) -> torch.Tensor:
    """Stripes that stand rank by rank, woven into a row; [T, ...]."""
    return x.unflatten(0, (mpu.get_context_parallel_world_size(), -1)).transpose(0, 1).flatten(0, 1)


# ---------------------------------------------------------------- who sees whom


@dataclasses.dataclass(frozen=True)
class Segments:
    """S segments of keys, one after another, and as many of queries: a segment's queries are the last of its tokens.

    A query sees its own token and those before it in the segment: the last `window` of them, its own among these, or
    all of them (None). Where queries and keys are the same tokens, `cu_q` and `cu_k` are one tensor.
    """

    cu_q: torch.Tensor  # [S + 1] int32, where queries begin and end; no segment is without one
    cu_k: torch.Tensor  # [S + 1] int32, the same of keys
    max_q: int  # the longest
    max_k: int
    window: int | None = None

    @functools.cached_property
    def query_slot(self) -> torch.Tensor:
        """Place of each query in a padded [S * max_q] layout, [queries]."""
        return slots(self.cu_q, self.max_q)

    @functools.cached_property
    def key_slot(self) -> torch.Tensor:
        """Place of each key in a padded [S * max_k] layout, [keys]."""
        return self.query_slot if self.cu_k is self.cu_q else slots(self.cu_k, self.max_k)

    @functools.cached_property
    def mask(self) -> torch.Tensor | None:
        """True where a query of the padded layout sees a key, [S or 1, 1, max_q, max_k].

        None where the causal mask is all: padding stands right of every real token, so it keeps that out too.
        """
        position = torch.arange(self.max_q, device=self.cu_q.device)[None]  # of each query among its keys, [S or 1, Q]
        if self.cu_k is not self.cu_q:
            lengths_S = self.cu_k.diff()[:, None]
            # Padding stays at the last key, so that no query sees none: not every kernel has a result for that.
            position = (position + lengths_S - self.cu_q.diff()[:, None]).minimum(lengths_S - 1)
        elif self.window is None or self.window >= self.max_k:
            return None
        keys, position = torch.arange(self.max_k, device=position.device), position[:, None, :, None]
        seen = keys <= position
        return seen if self.window is None else seen & (keys > position - self.window)


def slots(cu_seqlens: torch.Tensor, width: int) -> torch.Tensor:
    """Place of each token in a layout that pads every segment to `width`; [S + 1] → [tokens]."""
    lengths_S = cu_seqlens.diff()
    segment = torch.arange(len(lengths_S), device=cu_seqlens.device).repeat_interleave(lengths_S)
    return segment * width + torch.arange(len(segment), device=segment.device) - cu_seqlens[segment]


# ---------------------------------------------------------------- two ways to compute it


def uses_varlen(on: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention there is `varlen`, which pads nothing, and not `padded`: torch's kernel is for GPUs, and for
    these types."""
    return on.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def attend(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """Causal attention inside each segment; query [queries, heads, d], key and value [keys, kv_heads, d] → [queries,
    heads, d]. `scale` of the products, None: d ** -0.5."""
    return (varlen if uses_varlen(query.device, query.dtype) else padded)(query, key, value, segments, scale)


def padded(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """`attend` by padding to [S, longest] and one scaled_dot_product_attention. Where all segments have one length
    nothing is copied."""
    sequences = len(segments.cu_q) - 1

    def pad(x, slot, width):  # [tokens, n, d] → [S, n, width, d]
        x = x if x.is_cuda else x.float()  # on the CPU bf16 takes ten times as long
        if len(x) < sequences * width:
            x = x.new_zeros(sequences * width, *x.shape[1:]).index_copy_(0, slot, x)
        return x.unflatten(0, (sequences, width)).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        pad(query, segments.query_slot, segments.max_q),
        *(pad(x, segments.key_slot, segments.max_k) for x in (key, value)),
        attn_mask=segments.mask,
        is_causal=segments.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    out = out.transpose(1, 2).flatten(0, 1)  # [S * max_q, heads, d]
    if len(query) < len(out):
        out = out.index_select(0, segments.query_slot)
    return out.to(query.dtype)


def varlen(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """`attend` by torch's varlen_attn, for bf16 and fp16 on a GPU. Its causal mask is aligned to the last query and the
    last key, as Segments are. Raises RuntimeError where this torch has no windows."""
    lengths = segments.cu_q, segments.cu_k, segments.max_q, segments.max_k
    return flash.varlen_attn(query, key, value, *lengths, **varlen_options(flash.varlen_attn, segments.window, scale))


@functools.cache
def varlen_options(varlen_attn, window: int | None, scale: float | None) -> dict:
    """What to give `varlen_attn` besides tensors and lengths: what its signature has of it, which differs by version.

    torch 2.10 has is_causal; 2.11 windows, whose (left, right) do not count the query's own token, and scale; 2.12 asks
    that grouped heads be announced, and can be told not to split a sequence as its batch suggests.
    """
    left = -1 if window is None else window - 1
    options = {"is_causal": True, "window_size": (left, 0), "scale": scale, "enable_gqa": True, "num_splits": 1}
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known and (window, scale) != (None, None):
        raise RuntimeError(f"torch {torch.__version__} has no sliding window in varlen_attn; use 2.11 or newer")
    return {name: value for name, value in options.items() if name in known}


def use_flash_attention_3(dtype: torch.dtype) -> None:
    """Let torch's attention run FlashAttention 3, where that is installed (the module flash_attn_interface) and the GPU
    is the kind it is for, compute capability 9.0. Else torch's own FlashAttention 2 stays. Not run on a GPU yet."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # torch 2.11 and newer
    installed = activate and importlib.util.find_spec("flash_attn_interface")
    if installed and uses_varlen(device(), dtype) and torch.cuda.get_device_capability() == (9, 0):
        activate("FA3")


# ---------------------------------------------------------------- context parallelism

# Each rank holds a stripe of the row, which no causal kernel can express. So for the time of attention queries go to
# where a kernel can work, and results come back; two ways, by what the model's heads allow:
#
# by heads   where the heads of a tensor-parallel rank, of queries as of keys, divide by cp: each rank gets all tokens
#            for its share of the heads. All ranks do the same work.      DeepSpeed-Ulysses, arXiv 2309.14509
# by chunks  elsewhere: each sequence is cut into 2 cp chunks, and rank r gets the queries of chunks r and 2 cp - 1 - r,
#            an early and a late one, so the work is the same but for rounding; keys are gathered whole, and each chunk
#            takes those up to its end.                                   Llama 3, arXiv 2407.21783, 3.3.2


def splits_by_heads(config: TransformerConfig) -> bool:
    """Whether context parallelism splits attention by heads; else by chunks."""
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    return config.num_attention_heads % ranks == config.num_query_groups % ranks == 0


def to_heads(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All tokens of the row for this rank's share of the heads; each [T / cp, n, d], n may differ → [T, n / cp, d]."""
    cp = mpu.get_context_parallel_world_size()
    parts = torch.cat([x.unflatten(1, (cp, -1)).transpose(0, 1) for x in xs], dim=2)  # [cp, T / cp, sum of n / cp, d]
    row = in_row_order(all_to_all(mpu.get_context_parallel_group(), parts.flatten(0, 1)))
    return row.split([x.shape[1] // cp for x in xs], dim=1)


def from_heads(x: torch.Tensor) -> torch.Tensor:
    """This rank's stripe for all heads; [T, n / cp, d] → [T / cp, n, d]."""
    cp = mpu.get_context_parallel_world_size()
    stripes = x.unflatten(0, (-1, cp)).transpose(0, 1).flatten(0, 1)  # rank by rank
    parts = all_to_all(mpu.get_context_parallel_group(), stripes).unflatten(0, (cp, -1))  # [cp, T / cp, n / cp, d]
    return parts.transpose(0, 1).flatten(1, 2)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The queries that a rank takes from all stripes, and the keys they need."""

    segments: Segments  # a chunk each
    send: torch.Tensor  # [T / cp], this rank's tokens, sorted by the rank that takes them
    sent: list[int]  # how many each rank takes of them
    received: list[int]  # how many this rank takes of each stripe
    order: torch.Tensor  # [queries], where among those received each query stands
    keys: torch.Tensor  # [keys], place in the row of each segment's keys, one segment after another

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, rank: int, cp: int, window: int | None) -> "Chunks":
        """What `rank` of `cp` takes of a row; chunk c of n tokens begins at floor(n c / 2 cp). Waits for the GPU."""
        ends = cu_seqlens.long().cpu()
        starts_S, lengths_S = ends[:-1], ends.diff()
        number = torch.arange(2 * cp + 1)
        bounds = lengths_S[:, None] * number // (2 * cp)  # [S, 2 cp + 1], in the sequence
        takers = number[:-1].minimum(2 * cp - 1 - number[:-1])  # of each chunk
        taker_T = takers.repeat(len(lengths_S)).repeat_interleave(bounds.diff().flatten())
        queries = (taker_T == rank).nonzero()[:, 0]  # places in the row
        own = taker_T[rank::cp]
        arrival = (queries % cp).argsort(stable=True)  # stripe by stripe
        reach = lengths_S.max() if window is None else window - 1
        first = (bounds[:, :-1] - reach).clamp(min=0)  # [S, 2 cp], the first key of each chunk, in the sequence
        taken = (takers == rank) & (bounds.diff() > 0)
        end, first, start = bounds[:, 1:][taken], first[taken], starts_S[:, None].expand_as(taken)[taken]
        lengths_q, lengths_k = bounds.diff()[taken], end - first  # of each segment
        cu_q, cu_k = (F.pad(lengths.cumsum(0), (1, 0)) for lengths in (lengths_q, lengths_k))
        keys = torch.arange(int(cu_k[-1])) + (start + first - cu_k[:-1]).repeat_interleave(lengths_k)
        if len(queries) == 0:  # sequences of fewer tokens than chunks; one made-up query keeps the ranks in step
            cu_q = cu_k = torch.tensor([0, 1])
            keys = torch.tensor([0])
        to = cu_seqlens.device
        return cls(
            Segments(cu_q.int().to(to), cu_k.int().to(to), int(cu_q.diff().max()), int(cu_k.diff().max()), window),
            own.argsort(stable=True).to(to),
            own.bincount(minlength=cp).tolist(),
            (queries % cp).bincount(minlength=cp).tolist(),
            arrival.argsort().to(to),
            keys.to(to),
        )

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The queries of this rank's chunks; [T / cp, heads, d] → [queries, heads, d]."""
        group = mpu.get_context_parallel_group()
        x = all_to_all(group, x.index_select(0, self.send), self.received, self.sent).index_select(0, self.order)
        return x if len(x) else F.pad(x, (0, 0, 0, 0, 0, 1))

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of `take`; [queries, heads, d] → [T / cp, heads, d]."""
        x = x[: len(self.order)]
        x = torch.empty_like(x).index_copy(0, self.order, x)
        x = all_to_all(mpu.get_context_parallel_group(), x, self.sent, self.received)
        return torch.empty_like(x).index_copy(0, self.send, x)


# ---------------------------------------------------------------- in Megatron's layers


@dataclasses.dataclass
class Packing(PackedSeqParams):
    """Of a packed row, what core attention needs; rides through Megatron's layers."""

    cos: torch.Tensor | None = None  # [T / cp, 1, 1, head_dim], of each query's position, as Rotation wants them
    sin: torch.Tensor | None = None
    segments: Segments | None = None  # the sequences of the whole row
    chunks: Chunks | None = None  # where context parallelism splits by chunks

    @classmethod
    def of(cls, mb, inv_freq: torch.Tensor, config: TransformerConfig) -> "Packing":
        """That of a micro-batch; `inv_freq` [head_dim / 2] as transformers computes it."""
        window = config.window_size and config.window_size[0] + 1
        rank, cp = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        by_chunks = cp > 1 and not splits_by_heads(config)
        angles = torch.outer(own_stripe(mb.position_ids[0]).float(), inv_freq)[:, None, None]
        return cls(
            qkv_format="sbhd",  # keeps Megatron from its own per-sequence loop over "thd"
            cos=torch.cat((angles.cos(), angles.cos()), -1).to(config.params_dtype),
            sin=torch.cat((-angles.sin(), angles.sin()), -1).to(config.params_dtype),
            segments=Segments(mb.cu_seqlens, mb.cu_seqlens, mb.max_seqlen, mb.max_seqlen, window),
            chunks=Chunks.of(mb.cu_seqlens, rank, cp, window) if by_chunks else None,
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


def sliding_window(hf_config) -> int | None:
    """Tokens that each layer attends to, the query's own among them; None: all before it.

    Raises ValueError where transformers and vLLM read config.json differently: vLLM 0.32 gives one window to all layers
    or to none (to none of Qwen3's if some have no window, and Qwen2 does not start then), also where transformers knows
    no window (Llama).
    """
    window = getattr(hf_config, "sliding_window", None)
    if not window:
        return None
    kinds = set(getattr(hf_config, "layer_types", None) or ["sliding_attention"])
    if kinds == {"full_attention"} and hasattr(type(hf_config), "layer_types"):  # transformers reads them
        return None
    if kinds == {"sliding_attention"} and hasattr(type(hf_config), "sliding_window"):
        return window
    raise ValueError(
        f"sliding_window={window} in its config.json is supported for all layers alike, or for none, and vLLM would "
        "give it to others than transformers does (see use_sliding_window, max_window_layers, layer_types there)"
    )


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: causal, inside each sequence of a packed row, which cp ranks share."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [T / cp, 1, heads, d], key and value [T / cp, 1, kv_heads, d] → [T / cp, 1, heads * d]."""
        packing, chunks = packed_seq_params, packed_seq_params.chunks
        query, key = (Rotation.apply(x, packing.cos, packing.sin) for x in (query, key))
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if mpu.get_context_parallel_world_size() == 1:
            out = attend(query, key, value, packing.segments, self.softmax_scale)
        elif chunks is None:
            out = from_heads(attend(*to_heads(query, key, value), packing.segments, self.softmax_scale))
        else:
            row = gather_stripes(torch.stack((key, value), dim=1), summed_gradient=True)  # [T, 2, kv_heads, d]
            key, value = row.index_select(0, chunks.keys).unbind(1)
            out = chunks.give_back(attend(chunks.take(query), key, value, chunks.segments, self.softmax_scale))
        return out.flatten(1).unsqueeze(1)
