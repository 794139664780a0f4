"""Attention inside the sequences of a packed row, on CPU and GPUs, and how context-parallel ranks split a row."""

import dataclasses
import functools
import importlib.util
import inspect
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen as flash

from grpo.parts.base.ranks import device, to_device
from grpo.parts.model.layers import Rotation  # first: it prepares the process for Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer import TransformerConfig

# ---------------------------------------------------------------- a row in stripes

# Rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every packed row, in all layers; only attention exchanges
# tokens (below). So token p is number p // cp of rank p % cp. Source: Striped Attention, arXiv 2311.09431.


def own_stripe(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


# ---------------------------------------------------------------- positions that several samples share


@dataclasses.dataclass(frozen=True)
class Copies:
    """Which of C computed positions each of T positions is."""

    place: torch.Tensor  # [T]
    order: torch.Tensor  # [T], the positions sorted by their place
    counts: torch.Tensor  # [C], how many positions are each of them

    @functools.cached_property
    def kept(self) -> torch.Tensor:
        """The first position that each is, [C]."""
        return self.order[self.counts.cumsum(0) - self.counts]

    @classmethod
    def of(cls, place: np.ndarray, computed: int, to: torch.device) -> "Copies":
        """From the place of each position, [T], on the device `to`."""
        arrays = (place, np.argsort(place, kind="stable"), np.bincount(place, minlength=computed))
        return cls(*(to_device(torch.from_numpy(array), to) for array in arrays))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The value of each position; [C, ...] → [T, ...]."""
        return TakeRows.apply(x, self.place, self.order, self.counts)


class TakeRows(torch.autograd.Function):
    """index_select whose backward pass adds up the copies in fp32 and in a fixed order, unlike torch's on a GPU."""

    @staticmethod
    def forward(ctx, x, place, order, counts):
        ctx.save_for_backward(order, counts)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        order, counts = ctx.saved_tensors
        sums = torch.segment_reduce(grad.float().index_select(0, order), "sum", lengths=counts, unsafe=True)
        return sums.to(grad.dtype), None, None, None


# ---------------------------------------------------------------- which keys a query attends to

SIMILAR = 0.9  # of the longest sequence of a bucket: a shorter one opens the next, unless it lacks less than
FEW_TOKENS = 16
signature_of = functools.cache(inspect.signature)


@dataclasses.dataclass(frozen=True)
class Segments:
    """S segments of keys, one after another, and as many of queries: a segment's queries are the last of its tokens.

    A query attends to its own token and those before it in the segment: to the last `window` of them, its own included,
    or to all (None). Where queries and keys are the same tokens, `cu_q` and `cu_k` are one tensor.
    """

    cu_q: torch.Tensor  # [S + 1] int32, where each segment's queries begin, and the end; each segment has one at least
    cu_k: torch.Tensor  # [S + 1] int32, the same of keys
    queries_S: np.ndarray  # number of each segment's queries
    keys_S: np.ndarray
    window: int | None = None

    @classmethod
    def of(cls, keys_S: np.ndarray, queries_S: np.ndarray, window: int | None, to: torch.device) -> "Segments":
        """From the number of each segment's keys and queries, on the device `to`."""
        cu_k = to_device(torch.from_numpy(np.cumsum([0, *keys_S], dtype=np.int32)), to)
        cu_q = cu_k
        if not np.array_equal(queries_S, keys_S):
            cu_q = to_device(torch.from_numpy(np.cumsum([0, *queries_S], dtype=np.int32)), to)
        return cls(cu_q, cu_k, queries_S, keys_S, window)

    @functools.cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """(segments, keys of the longest) of each bucket of `attend_padded`, which holds segments of similar length."""
        return make_buckets(self.keys_S)

    @functools.cached_property
    def slots(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Index of each query and of each key in the buckets of `attend_padded`, end to end; None: they are the row."""
        starts = np.cumsum([0, *(count * longest for count, longest in self.buckets)])
        buckets = zip(starts[:-1], self.buckets, strict=True)
        sorted_S = np.concatenate([start + longest * np.arange(count) for start, (count, longest) in buckets])
        start_S = np.empty_like(sorted_S)
        start_S[np.argsort(-self.keys_S, kind="stable")] = sorted_S  # index of each segment's first key
        keys = np.arange(self.keys_S.sum()) + np.repeat(start_S - np.cumsum(self.keys_S) + self.keys_S, self.keys_S)
        if len(keys) == starts[-1] and (np.diff(keys) == 1).all():
            keys = None
        if self.cu_q is self.cu_k:
            queries = keys
        else:
            first_S = start_S + self.keys_S - self.queries_S - np.cumsum(self.queries_S) + self.queries_S
            queries = np.arange(self.queries_S.sum()) + np.repeat(first_S, self.queries_S)
        to = self.cu_k.device
        return tuple(None if slots is None else to_device(torch.from_numpy(slots), to) for slots in (queries, keys))


def make_buckets(lengths_S: np.ndarray) -> list[tuple[int, int]]:
    """(number, longest) of each bucket that holds segments of similar length, if the longest come first."""
    buckets: list[tuple[int, int]] = []
    for length in sorted(lengths_S.tolist(), reverse=True):
        count, longest = buckets[-1] if buckets else (0, 0)
        if buckets and length >= min(SIMILAR * longest, longest - FEW_TOKENS):
            buckets[-1] = (count + 1, longest)
        else:
            buckets.append((1, length))
    return buckets


# ---------------------------------------------------------------- two kernels


def uses_varlen(on: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention is `attend_varlen`: on a GPU in bf16 or fp16, unless model.flash_attention=false ends that."""
    return on.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and torch.backends.cuda.flash_sdp_enabled()


def attend_padded(query, key, value, segments: Segments) -> torch.Tensor:
    """Causal attention inside each segment, padded to the longest of its bucket, by scaled_dot_product_attention;
    query [queries, heads, d], key and value [keys, kv_heads, d] → as query.
    """
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # but for FlashAttention, torch takes grouped heads by storing all scores
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    query_slots, key_slots = segments.slots
    sizes = [count * longest for count, longest in segments.buckets]

    def pad(x, slots):  # [tokens, n, d] → [S, n, longest, d] of each bucket
        x = x if x.is_cuda else x.float()  # on the CPU bf16 takes ten times as long
        if slots is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, slots, x)
        parts = zip(x.split(sizes), segments.buckets, strict=True)
        return [part.unflatten(0, bucket).transpose(1, 2) for part, bucket in parts]

    outs = []
    padded = zip(pad(query, query_slots), pad(key, key_slots), pad(value, key_slots), strict=True)
    for part_query, part_key, part_value in padded:
        mask = None  # all tokens before it
        longest = part_key.shape[2]
        if segments.window is not None and segments.window < longest:
            whole = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
            mask = whole.tril().triu(1 - segments.window)
        options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": query.shape[1] != key.shape[1]}
        out = F.scaled_dot_product_attention(part_query, part_key, part_value, **options)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [S * longest, heads, d]
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    if query_slots is not None:
        out = out.index_select(0, query_slots)
    return out.to(query.dtype)


def attend_varlen(query, key, value, segments: Segments) -> torch.Tensor:
    """The same by torch's varlen_attn; its causal mask is aligned to the last query and last key, as Segments are."""
    lengths = (segments.cu_q, segments.cu_k, int(segments.queries_S.max()), int(segments.keys_S.max()))
    left = -1 if segments.window is None else segments.window - 1  # without the query's own token
    # num_splits=1 keeps results independent of the batch. torch 2.11 lacks it, and groups heads without enable_gqa.
    options = {"window_size": (left, 0), "enable_gqa": True, "num_splits": 1}
    known = signature_of(flash.varlen_attn).parameters
    return flash.varlen_attn(query, key, value, *lengths, **{name: options[name] for name in options if name in known})


def use_flash_attention_3(dtype: torch.dtype) -> None:
    """Use FlashAttention 3 on GPUs of compute capability 9.0 with the module flash_attn_interface; not run on one."""
    is_hopper = uses_varlen(device(), dtype) and torch.cuda.get_device_capability() == (9, 0)
    if is_hopper and importlib.util.find_spec("flash_attn_interface") is not None:
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
    return scatter_heads(query, key, value)


def scatter_heads(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of any tensors whose numbers of heads cp divides."""
    cp = mpu.get_context_parallel_world_size()
    parts = torch.cat([x.unflatten(1, (cp, -1)).transpose(0, 1) for x in xs], dim=2)  # [cp, T / cp, sum of n / cp, d]
    stripes = all_to_all(mpu.get_context_parallel_group(), parts.flatten(0, 1))  # concatenated rank by rank
    row = stripes.unflatten(0, (cp, -1)).transpose(0, 1).flatten(0, 1)
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

    cos: torch.Tensor | None = None  # [C / cp, 1, 1, rotated], of each query's position, as Rotation takes them
    sin: torch.Tensor | None = None
    segments: Segments | None = None  # the sequences of the whole row
    copies: Copies | None = None  # which computed position each key of the row is; None: all are computed
    position_T: torch.Tensor | None = None  # [T], of each token in its sequence

    @classmethod
    def of(cls, mb, inv_freq: torch.Tensor, config: TransformerConfig) -> "Packing":
        """That of a micro-batch; `inv_freq` [rotated / 2] as transformers computes it."""
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


def rotary_embedding(hf_config) -> torch.nn.Module:
    """transformers' rotary embedding, for its frequencies; ValueError if it scales attention or varies by length."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    is_partial = hf_config.model_type.startswith("qwen3_5")  # its three axes are one for text
    rope = (Qwen3_5TextRotaryEmbedding if is_partial else LlamaRotaryEmbedding)(hf_config)
    if rope.rope_type not in ("default", "linear", "llama3") or rope.attention_scaling != 1.0:
        raise ValueError(f"rope type {rope.rope_type!r} is not supported; supported are default, linear, llama3")
    return rope


def sliding_window(hf_config) -> int | None:
    """Window of attention in all layers, in tokens, the query's own included; None: no window.

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
        f"sliding_window={window} in its config.json is supported for all layers alike, or for none, and vLLM would "
        "give it to others than transformers does (see use_sliding_window, max_window_layers, layer_types there)"
    )


class Rotary(torch.nn.Module):
    """Rotary embedding of the first numbers of each head, or of all; [C / cp, 1, heads, d] → the same."""

    rotation = staticmethod(Rotation.apply)

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        rotated = packing.cos.shape[-1]
        turned = self.rotation(x[..., :rotated], packing.cos, packing.sin)
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), -1)


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: RoPE, then causal attention inside each sequence of a row, which cp ranks split."""

    def __init__(self, *unused, **options):
        super().__init__()
        self.rotary = Rotary()
        self.attend = None  # attention inside the segments; None: one of the two above

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [C / cp, 1, heads, d], key and value [C / cp, 1, kv_heads, d] → [C / cp, 1, heads * d]."""
        packing = packed_seq_params
        query, key = (self.rotary(x, packing) for x in (query, key))
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        heads = query.shape[1]
        splits = mpu.get_context_parallel_world_size() > 1
        if splits:
            query, key, value = to_heads(query, key, value)
        if packing.copies:
            key, value = packing.copies.take(key), packing.copies.take(value)
        attend = attend_varlen if uses_varlen(query.device, query.dtype) else attend_padded
        out = (self.attend or attend)(query, key, value, packing.segments)
        if splits:
            out = from_heads(out, heads)
        return out.flatten(1).unsqueeze(1)
