"""Attention inside the sequences of a packed row, on the CPU and on GPUs, and how context-parallel ranks split a row.

`attend_varlen` and `attend_padded` compute the same from plain tensors: the first by torch's FlashAttention, for bf16
and fp16 on a GPU, the second by torch's scaled_dot_product_attention. PackedAttention goes into Megatron's layer spec.
"""

import dataclasses
import functools
import importlib.util
import inspect
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen as flash

from support.model.layers import Rotation, device  # first: it prepares the process for Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

# ---------------------------------------------------------------- a row in stripes

# Rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every packed row, in all layers; only attention exchanges
# tokens (below). Source of the stripes: Striped Attention, arXiv 2311.09431.


def own_stripe(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


def stripe_rows(rows: np.ndarray) -> np.ndarray:
    """Those of the given positions of a row that this rank holds, as positions in its stripe."""
    cp = mpu.get_context_parallel_world_size()
    return rows[rows % cp == mpu.get_context_parallel_rank()] // cp


def gather_stripes(x: torch.Tensor, summed_gradient: bool) -> torch.Tensor:
    """All-gather the tokens of all ranks, in the order of the row; [T / cp, ...] → [T, ...].

    `summed_gradient`: each rank computes another part of the loss from it; else all the same loss, from own tokens.
    """
    if mpu.get_context_parallel_world_size() == 1:
        return x
    return interleave(gather_from_sequence_parallel_region(x, summed_gradient, mpu.get_context_parallel_group()))


def interleave(x: torch.Tensor) -> torch.Tensor:
    """The row of stripes that are concatenated rank by rank; [T, ...] → [T, ...]."""
    return x.unflatten(0, (mpu.get_context_parallel_world_size(), -1)).transpose(0, 1).flatten(0, 1)


# ---------------------------------------------------------------- which keys a query attends to


@dataclasses.dataclass(frozen=True)
class Segments:
    """S segments of keys, one after another, and as many of queries: a segment's queries are the last of its tokens.

    A query attends to its own token and those before it in the segment: to the last `window` of them, its own included,
    or to all (None). Where queries and keys are the same tokens, `cu_q` and `cu_k` are one tensor.
    """

    cu_q: torch.Tensor  # [S + 1] int32, where each segment's queries begin, and the end; each segment has one at least
    cu_k: torch.Tensor  # [S + 1] int32, the same of keys
    max_q: int  # queries of the longest segment
    max_k: int
    queries: int  # of all segments
    keys: int
    window: int | None = None

    @functools.cached_property
    def query_slot(self) -> torch.Tensor:
        """Index of each query in a padded [S * max_q] layout, [queries]."""
        return slots(self.cu_q, self.max_q, self.queries)

    @functools.cached_property
    def key_slot(self) -> torch.Tensor:
        """Index of each key in a padded [S * max_k] layout, [keys]."""
        return self.query_slot if self.cu_k is self.cu_q else slots(self.cu_k, self.max_k, self.keys)

    @functools.cached_property
    def mask(self) -> torch.Tensor | None:
        """True where a query of the padded layout attends to a key, [S or 1, 1, max_q, max_k]; None: where causal."""
        position = torch.arange(self.max_q, device=self.cu_q.device)[None]  # of each query among its keys, [S or 1, Q]
        if self.cu_k is not self.cu_q:
            last_S = self.cu_k.diff()[:, None] - 1  # position of a segment's last key
            first_S = last_S + 1 - self.cu_q.diff()[:, None]  # and of its first query
            # Padding gets the position of the last key: not every kernel has a result for a query without keys.
            position = (position + first_S).minimum(last_S)
        elif self.window is None or self.window >= self.max_k:
            return None
        keys = torch.arange(self.max_k, device=position.device)
        position = position[:, None, :, None]
        mask = keys <= position
        return mask if self.window is None else mask & (keys > position - self.window)


def slots(cu_seqlens: torch.Tensor, width: int, tokens: int) -> torch.Tensor:
    """Index of each of the `tokens` in a layout that pads every segment to `width`; [S + 1] → [tokens]."""
    lengths_S = cu_seqlens.diff()
    numbers_S = torch.arange(len(lengths_S), device=cu_seqlens.device)
    segment = numbers_S.repeat_interleave(lengths_S, output_size=tokens)  # the host need not wait for the sum
    position = torch.arange(tokens, device=segment.device) - cu_seqlens[segment]  # in its segment
    return segment * width + position


# ---------------------------------------------------------------- two kernels


def uses_varlen(on: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention is `attend_varlen`, without padding: torch has the kernel on GPUs, for these types.

    model.flash_attention=false turns FlashAttention off in torch itself, for the whole process.
    """
    return on.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and torch.backends.cuda.flash_sdp_enabled()


def attend(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """Causal attention inside each segment; query [queries, heads, d], key and value [keys, kv_heads, d] → as query."""
    if uses_varlen(query.device, query.dtype):
        return attend_varlen(query, key, value, segments, scale)
    return attend_padded(query, key, value, segments, scale)


def attend_padded(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """`attend` by padding to [S, longest] and scaled_dot_product_attention; segments of one length are not copied."""
    sequences = len(segments.cu_q) - 1
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # but for FlashAttention, torch takes grouped heads by storing all scores
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))

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


def attend_varlen(query, key, value, segments: Segments, scale: float | None = None) -> torch.Tensor:
    """`attend` by torch's varlen_attn, for bf16 and fp16 on a GPU.

    Its causal mask is aligned to the last query and the last key, as Segments are. Raises RuntimeError where this torch
    has no windows.
    """
    lengths = (segments.cu_q, segments.cu_k, segments.max_q, segments.max_k)
    options = varlen_options(flash.varlen_attn, segments.window, scale)
    return flash.varlen_attn(query, key, value, *lengths, **options)


@functools.cache
def varlen_options(varlen_attn, window: int | None, scale: float | None) -> dict:
    """Options of `varlen_attn` besides tensors and lengths: those that the signature of this torch version has.

    torch 2.10 has is_causal; 2.11 scale, and windows whose (left, right) exclude the query's own token; 2.12 needs
    enable_gqa for grouped heads, and its num_splits=1 keeps results independent of the batch.
    """
    left = -1 if window is None else window - 1
    options = {"is_causal": True, "window_size": (left, 0), "scale": scale, "enable_gqa": True, "num_splits": 1}
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known and (window, scale) != (None, None):
        raise RuntimeError(f"torch {torch.__version__} has no sliding window in varlen_attn; use 2.11 or newer")
    return {name: value for name, value in options.items() if name in known}


def has_flash_attention_3(dtype: torch.dtype) -> bool:
    """Whether attention can use FlashAttention 3: on GPUs of compute capability 9.0, with the module
    flash_attn_interface.
    """
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):  # before torch 2.11
        return False
    if not uses_varlen(device(), dtype) or torch.cuda.get_device_capability() != (9, 0):
        return False
    return importlib.util.find_spec("flash_attn_interface") is not None


def use_flash_attention_3(dtype: torch.dtype) -> None:
    """Make torch's attention use FlashAttention 3 where it can; else torch keeps its own FlashAttention 2.

    Not run on a GPU yet.
    """
    if has_flash_attention_3(dtype):
        torch.nn.attention.activate_flash_attention_impl("FA3")


# ---------------------------------------------------------------- context parallelism

# Each rank holds a stripe of the row, for which no causal kernel exists. So attention redistributes heads: each rank
# gets all tokens for its share of them, and sends the results back. DeepSpeed-Ulysses, arXiv 2309.14509.


def to_heads(query, key, value) -> tuple[torch.Tensor, ...]:
    """All tokens of the row for this rank's share of the heads; [T / cp, n, d] each → [T, n / cp, d] each.

    Key-value heads are repeated until cp divides their number. Where it does not divide that of the queries, each of
    these gets key-value heads of its own, and heads of zeros are added.
    """
    cp = mpu.get_context_parallel_world_size()
    heads, kv_heads = query.shape[1], key.shape[1]
    missing = -heads % cp
    copies = (heads if missing else math.lcm(kv_heads, cp)) // kv_heads
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    xs = (query, key, value)
    parts = torch.cat([x.unflatten(1, (cp, -1)).transpose(0, 1) for x in xs], dim=2)  # [cp, T / cp, sum of n / cp, d]
    row = interleave(all_to_all(mpu.get_context_parallel_group(), parts.flatten(0, 1)))
    return row.split([x.shape[1] // cp for x in xs], dim=1)


def from_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """This rank's stripe for all heads, those of zeros left out; [T, n / cp, d] → [T / cp, heads, d]."""
    cp = mpu.get_context_parallel_world_size()
    stripes = x.unflatten(0, (-1, cp)).transpose(0, 1).flatten(0, 1)  # rank by rank
    parts = all_to_all(mpu.get_context_parallel_group(), stripes).unflatten(0, (cp, -1))  # [cp, T / cp, n / cp, d]
    return parts.transpose(0, 1).flatten(1, 2)[:, :heads]


# ---------------------------------------------------------------- in Megatron's layers


@dataclasses.dataclass
class Packing(PackedSeqParams):
    """What core attention needs to know of a packed row; Megatron's layers pass it on."""

    cos: torch.Tensor | None = None  # [T / cp, 1, 1, head_dim], of each query's position, as Rotation takes them
    sin: torch.Tensor | None = None
    segments: Segments | None = None  # the sequences of the whole row

    @classmethod
    def of(cls, mb, inv_freq: torch.Tensor, config: TransformerConfig) -> "Packing":
        """That of a micro-batch; `inv_freq` [head_dim / 2] as transformers computes it."""
        window = config.window_size and config.window_size[0] + 1
        longest = mb.max_seqlen
        tokens = mb.tokens.shape[1]
        angles = torch.outer(own_stripe(mb.position_ids[0]).float(), inv_freq)[:, None, None]
        cos, sin = angles.cos(), angles.sin()
        return cls(
            qkv_format="sbhd",  # with "thd" Megatron would loop over the sequences itself
            cos=torch.cat((cos, cos), -1).to(config.params_dtype),
            sin=torch.cat((-sin, sin), -1).to(config.params_dtype),
            segments=Segments(mb.cu_seqlens, mb.cu_seqlens, longest, longest, tokens, tokens, window),
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
    """Window of attention in all layers, in tokens, the query's own included; None: no window.

    Raises ValueError where transformers and vLLM read config.json differently: vLLM 0.32 gives one window to all layers
    or to none (to none of Qwen3's if some have no window, and Qwen2 does not start then), also where transformers has
    no window (Llama).
    """
    window = getattr(hf_config, "sliding_window", None)
    if not window:
        return None
    kinds = set(getattr(hf_config, "layer_types", None) or ["sliding_attention"])
    if kinds == {"full_attention"} and hasattr(type(hf_config), "layer_types"):  # transformers reads layer_types
        return None
    if kinds == {"sliding_attention"} and hasattr(type(hf_config), "sliding_window"):
        return window
    raise ValueError(
        f"sliding_window={window} in its config.json is supported for all layers alike, or for none, and vLLM would "
        "give it to others than transformers does (see use_sliding_window, max_window_layers, layer_types there)"
    )


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: RoPE, then causal attention inside each sequence of a row, which cp ranks split."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [T / cp, 1, heads, d], key and value [T / cp, 1, kv_heads, d] → [T / cp, 1, heads * d]."""
        packing = packed_seq_params
        query, key = (Rotation.apply(x, packing.cos, packing.sin) for x in (query, key))
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if mpu.get_context_parallel_world_size() == 1:
            out = attend(query, key, value, packing.segments, self.softmax_scale)
        else:
            out = attend(*to_heads(query, key, value), packing.segments, self.softmax_scale)
            out = from_heads(out, query.shape[1])
        return out.flatten(1).unsqueeze(1)
