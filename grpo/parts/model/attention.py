"""Attention inside the sequences of a packed row, on CPUs and GPUs.

First what a packed row is, then attention in Megatron's layers, its two kernels, the exchange of tokens between
context-parallel ranks, and last what a model's config.json says of positions and windows.
"""

import importlib.util
import inspect
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen as flash

from grpo.parts.base.ranks import device, to_device
from grpo.parts.model import kernels
from grpo.parts.model.layers import Rotation  # first: it prepares the process for Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import all_to_all

# ---------------------------------------------------------------- a packed row

# A row of T positions holds S sequences, one after another. Where neighbours share a prompt, its positions are computed
# for the first of them only: C of the T positions. Attention has queries at the C positions, and keys at all T.
#
# Context-parallel rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every row, in all layers: token p is number
# p // cp of rank p % cp. Only attention exchanges tokens. Source: Striped Attention, arXiv 2311.09431.


def own_stripe(x):
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


@dataclass(frozen=True)
class Segments:
    """Which keys each query attends to. A row has S segments of keys, one after another, and S segments of queries.

    The queries of a segment are its last tokens. A query attends to its own token and to those before it in the
    segment. With a window it attends to the last `window` of these, its own token included.
    """

    cu_q: Tensor  # [S + 1] int32, where each segment's queries begin, and the end; each segment has at least one
    cu_k: Tensor  # [S + 1] int32, the same for keys
    queries_S: np.ndarray  # how many queries each segment has
    keys_S: np.ndarray
    window: int | None = None

    @classmethod
    def of(cls, keys_S, queries_S, window, to):
        """From the numbers of each segment's keys and queries, [S] arrays, on the device `to`."""
        ends = [torch.from_numpy(np.cumsum([0, *sizes_S], dtype=np.int32)) for sizes_S in (queries_S, keys_S)]
        return cls(to_device(ends[0], to), to_device(ends[1], to), queries_S, keys_S, window)

    @cached_property
    def padding(self):
        """The buckets of `attend_padded`, and the index of each query and of each key in them, end to end."""
        buckets = make_buckets(self.keys_S)
        order = np.argsort(-self.keys_S, kind="stable")  # the longest first, as in the buckets
        start_S = np.empty_like(self.keys_S)  # index of each segment's first key
        start = 0
        for count, longest in buckets:
            members, order = order[:count], order[count:]
            start_S[members] = start + longest * np.arange(count)
            start += count * longest

        queries = count_from(start_S + self.keys_S - self.queries_S, self.queries_S)
        keys = count_from(start_S, self.keys_S)
        to = self.cu_k.device
        return buckets, to_device(queries, to), to_device(keys, to)


def count_from(first_S, sizes_S):
    """`sizes` numbers of each segment, first, first + 1, ..., end to end; [S], [S] → [sum of sizes] int64."""
    begin_S = np.cumsum(sizes_S) - sizes_S
    return torch.from_numpy(np.arange(sizes_S.sum()) + np.repeat(first_S - begin_S, sizes_S))


@dataclass(frozen=True)
class Copies:
    """For each of T positions, the one of C computed positions whose value it has."""

    place: Tensor  # [T]
    order: Tensor  # [T], the positions sorted by their place
    counts: Tensor  # [C], how many positions each of them stands for

    @classmethod
    def of(cls, place, computed, to):
        """From the place of each position, [T], on the device `to`."""
        arrays = (place, np.argsort(place, kind="stable"), np.bincount(place, minlength=computed))
        return cls(*(to_device(torch.from_numpy(array), to) for array in arrays))

    @cached_property
    def ends(self):
        """Where the positions of each place end in `order`, [C]."""
        return self.counts.cumsum(0)

    @cached_property
    def kept(self):
        """The first position of each place, [C]."""
        return self.order[self.ends - self.counts]

    def take(self, x):
        """The value of each position; [C, ...] → [T, ...]."""
        return TakeRows.apply(x, self.place, self.order, self.counts, self.ends)


class TakeRows(torch.autograd.Function):
    """index_select whose backward pass adds up the copies in fp32 and in a fixed order, unlike torch's on a GPU."""

    @staticmethod
    def forward(ctx, x, place, order, counts, ends):
        ctx.save_for_backward(order, counts, ends)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        order, counts, ends = ctx.saved_tensors
        if kernels.runs_on(grad):
            return kernels.sum_copies(grad, order, counts, ends), None, None, None, None
        sums = torch.segment_reduce(grad.float().index_select(0, order), "sum", lengths=counts, unsafe=True)
        return sums.to(grad.dtype), None, None, None, None


@dataclass
class Packing(PackedSeqParams):
    """What core attention needs to know of a packed row. Megatron's layers pass it on."""

    cos: Tensor | None = None  # [C / cp, 1, 1, rotated], of each query's position, as Rotation takes them
    sin: Tensor | None = None
    segments: Segments | None = None  # the sequences of the whole row
    copies: Copies | None = None  # which computed position each key of the row is; None means all are computed
    position_T: Tensor | None = None  # [T], of each token in its sequence

    @classmethod
    def of(cls, mb, inv_freq, config):
        """The packing of a micro-batch, with `inv_freq` [rotated / 2] as transformers computes it."""
        window = config.window_size and config.window_size[0] + 1
        on = mb.tokens.device
        position_T = mb.position_ids[0]
        angles = torch.outer(own_stripe(mb.computed(position_T)).float(), inv_freq)[:, None, None]
        cos, sin = angles.cos(), angles.sin()

        return cls(
            qkv_format="sbhd",  # with "thd" Megatron would loop over the sequences itself
            cos=torch.cat((cos, cos), -1).to(config.params_dtype),
            sin=torch.cat((-sin, sin), -1).to(config.params_dtype),
            segments=Segments.of(mb.sizes, mb.queries, window, on),
            copies=None if mb.place is None else Copies.of(mb.place, mb.width, on),
            position_T=position_T,
        )


# ---------------------------------------------------------------- in Megatron's layers


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: rotary embedding, then causal attention inside each sequence of a row."""

    def __init__(self, *unused, **options):
        super().__init__()
        self.rotary = Rotary()
        self.attend = attend  # matched.py puts its own in place

    def forward(self, query, key, value, attention_mask, packed_seq_params, **unused):
        """query [C / cp, 1, heads, d], key and value [C / cp, 1, kv_heads, d] → [C / cp, 1, heads * d]."""
        packing = packed_seq_params
        query, key = self.rotary(query, packing), self.rotary(key, packing)
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        heads = query.shape[1]

        # A stripe lacks most keys, so each context-parallel rank gets all tokens for its share of the heads.
        is_split = mpu.get_context_parallel_world_size() > 1
        if is_split:
            query, key, value = to_heads(query, key, value)

        if packing.copies:
            key, value = packing.copies.take(key), packing.copies.take(value)
        out = self.attend(query, key, value, packing.segments)
        if is_split:
            out = from_heads(out, heads)
        return out.flatten(1).unsqueeze(1)


class Rotary(torch.nn.Module):
    """Rotary embedding of the first numbers of each head, or of all; [C / cp, 1, heads, d] → the same."""

    rotation = staticmethod(Rotation.apply)

    def forward(self, x, packing):
        rotated = packing.cos.shape[-1]
        turned = self.rotation(x[..., :rotated], packing.cos, packing.sin)
        if rotated == x.shape[-1]:
            return turned
        return torch.cat((turned, x[..., rotated:]), -1)


# ---------------------------------------------------------------- two kernels


def attend(query, key, value, segments):
    """Causal attention inside each segment; query [queries, heads, d], key and value [keys, kv_heads, d] → as query."""
    kernel = attend_varlen if uses_varlen(query.device, query.dtype) else attend_padded
    return kernel(query, key, value, segments)


def uses_varlen(on, dtype):
    """Whether `attend` is `attend_varlen`: on a GPU in bf16 or fp16, unless model.flash_attention is false."""
    return on.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and torch.backends.cuda.flash_sdp_enabled()


def use_flash_attention_3(dtype):
    """Let torch use FlashAttention 3 on a GPU of compute capability 9.0 that has the module flash_attn_interface.

    This has not been run on such a GPU.
    """
    is_hopper = uses_varlen(device(), dtype) and torch.cuda.get_device_capability() == (9, 0)
    if is_hopper and importlib.util.find_spec("flash_attn_interface"):
        torch.nn.attention.activate_flash_attention_impl("FA3")


def attend_varlen(query, key, value, segments: Segments):
    """`attend` by torch's varlen_attn. Its causal mask ends at the last query and the last key, as Segments do."""
    left = -1  # all tokens before the query's own
    if segments.window is not None:
        left = segments.window - 1
    options = {"window_size": (left, 0)}
    # With one split a result does not depend on the batch. torch 2.11 has neither option, and groups heads anyway.
    if "num_splits" in inspect.signature(flash.varlen_attn).parameters:
        options |= {"enable_gqa": True, "num_splits": 1}
    longest = int(segments.queries_S.max()), int(segments.keys_S.max())
    return flash.varlen_attn(query, key, value, segments.cu_q, segments.cu_k, *longest, **options)


def attend_padded(query, key, value, segments):
    """`attend` by scaled_dot_product_attention, with each segment padded to the longest of its bucket."""
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # outside FlashAttention, torch takes grouped heads by storing all scores
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)

    buckets, query_slots, key_slots = segments.padding
    queries = pad(query, query_slots, buckets)
    keys = pad(key, key_slots, buckets)
    values = pad(value, key_slots, buckets)

    outs = []
    for part_query, part_key, part_value in zip(queries, keys, values, strict=True):
        longest = part_key.shape[2]
        mask = None  # a query sees all tokens before its own
        if segments.window is not None and segments.window < longest:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(1 - segments.window)
        out = F.scaled_dot_product_attention(
            part_query,
            part_key,
            part_value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [count * longest, heads, d]
    return torch.cat(outs).index_select(0, query_slots).to(query.dtype)


def pad(x, slots, buckets) -> list[Tensor]:
    """x [tokens, n, d] at its slots, with zeros elsewhere; [count, n, longest, d] of each bucket."""
    if not x.is_cuda:
        x = x.float()  # a CPU takes ten times as long in bf16
    sizes = [count * longest for count, longest in buckets]
    padded = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, slots, x)
    parts = zip(padded.split(sizes), buckets, strict=True)
    return [part.unflatten(0, bucket).transpose(1, 2) for part, bucket in parts]


SIMILAR = 0.9  # a segment joins a bucket if it has this share of the tokens of its longest segment,
FEW_TOKENS = 16  # or lacks at most this number of them: a further call would cost more than the padding


def make_buckets(lengths_S) -> list[tuple[int, int]]:
    """(number of segments, length of the longest) of each bucket of segments of similar length, the longest first."""
    lengths = sorted(lengths_S.tolist(), reverse=True)
    buckets = [(0, lengths[0])]
    for length in lengths:
        count, longest = buckets[-1]
        if length >= min(SIMILAR * longest, longest - FEW_TOKENS):
            buckets[-1] = (count + 1, longest)
        else:
            buckets.append((1, length))
    return buckets


# ---------------------------------------------------------------- context parallelism

# Each rank holds a stripe of the row, for which no causal kernel exists. So attention redistributes heads: each rank
# gets all tokens for its share of them, and sends the results back. Source: DeepSpeed-Ulysses, arXiv 2309.14509.


def to_heads(query, key, value):
    """All tokens of the row for this rank's share of the heads; [T / cp, n, d] each → [T, n / cp, d] each.

    Key-value heads are repeated until cp divides their number. If cp does not divide the number of query heads, each of
    these gets key-value heads of its own, and heads of zeros are added.
    """
    cp = mpu.get_context_parallel_world_size()
    heads, kv_heads = query.shape[1], key.shape[1]
    missing = -heads % cp
    repeated = heads if missing else math.lcm(kv_heads, cp)
    if repeated > kv_heads:
        copies = repeated // kv_heads
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return scatter_heads(query, key, value)


def scatter_heads(*xs):
    """`to_heads` of any tensors whose numbers of heads cp divides."""
    cp = mpu.get_context_parallel_world_size()
    parts = torch.cat([x.unflatten(1, (cp, -1)).transpose(0, 1) for x in xs], dim=2)  # [cp, T / cp, sum of n / cp, d]
    stripes = all_to_all(mpu.get_context_parallel_group(), parts.flatten(0, 1))  # concatenated rank by rank
    row = stripes.unflatten(0, (cp, -1)).transpose(0, 1).flatten(0, 1)
    return row.split([x.shape[1] // cp for x in xs], dim=1)


def from_heads(x, heads):
    """This rank's stripe for all heads, without the added heads of zeros; [T, n / cp, d] → [T / cp, heads, d]."""
    cp = mpu.get_context_parallel_world_size()
    stripes = x.unflatten(0, (-1, cp)).transpose(0, 1).flatten(0, 1)  # rank by rank
    parts = all_to_all(mpu.get_context_parallel_group(), stripes).unflatten(0, (cp, -1))  # [cp, T / cp, n / cp, d]
    return parts.transpose(0, 1).flatten(1, 2)[:, :heads]


# ---------------------------------------------------------------- what config.json says


def rotary_embedding(hf_config):
    """transformers' rotary embedding, for its frequencies. ValueError if it scales attention or varies by length."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    embedding = LlamaRotaryEmbedding
    if hf_config.model_type.startswith("qwen3_5"):  # rotates a part of each head; its three axes are one for text
        embedding = Qwen3_5TextRotaryEmbedding
    rope = embedding(hf_config)
    if rope.rope_type not in ("default", "linear", "llama3") or rope.attention_scaling != 1.0:
        raise ValueError(f"rope type {rope.rope_type!r} is not supported; it must be default, linear or llama3")
    return rope


def sliding_window(hf_config) -> int | None:
    """The window of attention in all layers, in tokens, the query's own included. None means no window.

    Raises ValueError where transformers and vLLM read config.json differently; docs/dev/field-notes.md says how.
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
        f"sliding_window={window} in config.json is supported for all layers alike or for none, and vLLM would give it "
        "to other layers than transformers does: see use_sliding_window, max_window_layers and layer_types there"
    )
