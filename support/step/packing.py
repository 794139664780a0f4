"""Sequence packing: which samples share a micro-batch, and the packed row of tokens.

A micro-batch is one row; the plan calls the samples that share it a bin. Each position of a row holds a token and its
target, the next token, so a sample of n tokens has n - 1 positions. The plan is a pure function of the samples of the
whole step, so every rank computes the same plan and packs its own part of it.

A row has no padding between its sequences. Where attention has no kernel for sequences of several lengths
(`attention_pads`), attention pads them to [sequences, longest]. Such bins are called padded: they hold sequences of
similar length, and sequences × longest counts against the budget. Otherwise only the tokens of a row count.
"""

import heapq
import math
from dataclasses import fields
from functools import partial

import numpy as np
import torch

import megatron_bridge as bridge
from config import Config, ParallelConfig, TrainingError
from support.model.attention import uses_varlen
from support.model.layers import to_device
from support.step.records import Batch, MicroBatch, Rows, Sample

# The unit of cost is one attended position of one head. A token costs TOKEN, for all of a layer but attention, plus the
# positions that it attends to. By its operations TOKEN would be about 18 × hidden, by the time of its kernels less. It
# is a low round number, since padding also costs memory traffic. Only the plan depends on it, never a result.
TOKEN = 4096
ROW_TOKENS = 2048  # a shorter row is taken to cost as much: on a GPU its time is that of kernel launches
ROW_START = 128  # and each row costs as much as so many tokens besides, so that the plan has few
PADDING_PIECE = 128  # tokens of a sequence of padding in a row without samples, at most


def attention_pads(dtype: str) -> bool:
    """Whether attention pads the sequences of a row to the longest, on this machine and with model.dtype `dtype`."""
    return not uses_varlen(bridge.device(), bridge.DTYPES[dtype])


def to_micro_batches(batch: Batch, samples: list[int], max_tokens: int, cfg: Config) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` positions with padding."""
    replicas = bridge.mpu.get_data_parallel_world_size()
    multiple = bridge.token_multiple(cfg.parallel)
    lengths_N = batch.lengths_N[samples]
    pads = attention_pads(cfg.model.dtype)
    bins = plan_bins(lengths_N, max_tokens // multiple * multiple, replicas, cfg.parallel, pads)
    widths = [max(1, math.ceil(lengths_N[members].sum() / multiple)) * multiple for members in bins]
    if cfg.parallel.vpp > 1:  # the interleaved schedule needs rows of one length
        widths = [max(widths)] * len(bins)
    micro_batches = []
    own = slice(bridge.mpu.get_data_parallel_rank(), None, replicas)
    for members, width in zip(bins[own], widths[own], strict=True):
        micro_batches.append(pack(batch, [samples[i] for i in members], width, bridge.device()))
    return micro_batches


def measure_rows(micro_batches: list[MicroBatch], cfg: Config) -> dict[str, float]:
    """How well this replica's training micro-batches are used: pack/* and pipeline/bubble of docs/metrics.md."""
    work = sum(int((mb.lengths**2).sum()) for mb in micro_batches)
    if attention_pads(cfg.model.dtype):
        positions = [(len(mb.cu_seqlens) - 1) * mb.max_seqlen for mb in micro_batches]
        done = sum(count * mb.max_seqlen for count, mb in zip(positions, micro_batches, strict=True))
    else:
        positions = [int(mb.lengths.sum()) for mb in micro_batches]
        done = work
    return {
        "real": sum(int(mb.lengths.sum()) for mb in micro_batches),
        "positions": sum(positions),
        "micro_batches": len(micro_batches),
        "fill": sum(positions) / (len(micro_batches) * cfg.train.max_tokens_per_micro_batch),
        "attention_waste": done / work if work else 1.0,
        "bubble": bubble(len(micro_batches), cfg.parallel),
    }


def bubble(micro_batches: int, parallel: ParallelConfig) -> float:
    """Share of an update in which a stage idles: (p - 1) / (m v + p - 1), p stages, v chunks: arXiv 2104.04473, 2.2."""
    idle = parallel.pp - 1
    return idle / (micro_batches * parallel.vpp + idle)


# ---------------------------------------------------------------- the plan: which samples share a row


def plan_bins(
    lengths_N: np.ndarray, max_tokens: int, replicas: int, parallel: ParallelConfig, padded: bool
) -> list[list[int]]:
    """Assign samples to bins of at most `max_tokens` positions, so that the slowest replica finishes soonest.

    Returns bins of sample numbers, some perhaps empty; replica r takes bins[r::replicas]. Up to twice as many bins as
    the best so far are tried, in steps of a quarter, for the least cost of the slowest replica, pipeline bubble
    included; a replica has at least as many as there are stages, if samples suffice. A bin costs TOKEN for each token
    plus the squared length of each sequence, in a `padded` bin the square of the longest for each. A padded bin holds
    sequences of similar length, and sequences × longest is within `max_tokens`, with the padding to a multiple of
    tp · cp. Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    order_N = np.argsort(-lengths_N, kind="stable")  # longest first
    lengths_N = lengths_N[order_N]
    most = len(order_N) // replicas  # bins of a replica, if each has a sample
    step = 1  # the number of bins of a replica is a multiple of this
    token = TOKEN
    if parallel.vpp > 1:  # the interleaved schedule needs full rounds, and rows as wide as the widest: equal tokens
        step = parallel.pp
        token *= 100
    cost_N = token * lengths_N + lengths_N.astype(np.float64) ** 2
    if padded:
        room_N = np.maximum(max_tokens // (lengths_N + bridge.token_multiple(parallel) - 1), 1)
        full_N = full_bins(room_N.tolist())
        divide = partial(cut_sorted, cost_N, room_N, full_N)
        fewest = full_N[0]
    else:
        divide = partial(assign_to_cheapest, cost_N.tolist(), lengths_N.tolist(), max_tokens)
        fewest = lengths_N.sum() / max_tokens
    rounds = math.ceil(max(fewest / replicas, min(parallel.pp, most), 1) / step) * step  # bins of a replica
    best = math.inf
    best_rounds = 0  # 0: the samples did not fit so few bins
    while best_rounds == 0 or rounds <= min(most, 2 * best_rounds):
        bin_N = divide(rounds * replicas)
        if bin_N is None:
            rounds += step
            continue
        if padded:
            longest_N = lengths_N[np.searchsorted(bin_N, bin_N)]
            cost_N = token * lengths_N + longest_N.astype(np.float64) ** 2
        cost_B = np.bincount(bin_N, weights=cost_N, minlength=rounds * replicas)
        place_B = order_bins(cost_B, replicas)
        loads = np.bincount(place_B % replicas, weights=np.maximum(cost_B, token * ROW_TOKENS) + token * ROW_START)
        duration = loads.max() / (1 - bubble(rounds, parallel))
        if duration < best:
            best = duration
            best_rounds = rounds
            place_N = place_B[bin_N]
        rounds += max(rounds // 4 // step, 1) * step
    ends = np.cumsum(np.bincount(place_N, minlength=best_rounds * replicas))[:-1]
    members = np.split(order_N[np.argsort(place_N, kind="stable")], ends)
    return [samples.tolist() for samples in members]


def full_bins(rooms: list[int]) -> np.ndarray:
    """How many bins hold the samples from each on, [N + 1], if each bin takes as many as its first leaves room for."""
    bins = [0] * (len(rooms) + 1)
    for i, room in reversed([*enumerate(rooms)]):
        bins[i] = 1 + bins[min(i + room, len(rooms))]
    return np.array(bins)


def cut_sorted(cost_N: np.ndarray, room_N: np.ndarray, full_N: np.ndarray, count: int) -> np.ndarray | None:
    """Bin of each sample, for padded bins, [N]: `count` runs of the sorted samples that cost about the same.

    `room_N` says how many sequences fit into a bin whose longest is this one; `full_N` is `full_bins` of it. Returns
    None where `count` bins are too few.
    """
    if full_N[0] > count:
        return None
    done = np.cumsum([0, *cost_N])
    middle_N = (done[1:] + done[:-1]) / 2
    sizes = []
    start = 0
    while start < len(cost_N):
        left = count - len(sizes)
        share = np.searchsorted(middle_N, done[start] + (done[-1] - done[start]) / left)  # an equal one of what is left
        fits = np.searchsorted(-full_N, 1 - left)  # the first sample from which on the other bins hold all
        sizes.append(min(max(share, fits, start + 1) - start, room_N[start]))
        start += sizes[-1]
    return np.repeat(np.arange(len(sizes)), sizes)


def assign_to_cheapest(costs: list[float], lengths: list[int], max_tokens: int, count: int) -> np.ndarray | None:
    """Bin of each sample, for bins without padding: longest first, each into the cheapest of `count` bins (LPT).

    Returns None where the cheapest bin has no room for a sample's tokens.
    """
    bins = []
    heap = [(0, 0, number) for number in range(count)]  # (cost, tokens, number)
    for sample_cost, length in zip(costs, lengths, strict=True):
        cost, tokens, number = heap[0]
        if tokens + length > max_tokens:
            return None
        heapq.heapreplace(heap, (cost + sample_cost, tokens + length, number))
        bins.append(number)
    return np.array(bins, dtype=np.int64)


def order_bins(cost_B: np.ndarray, replicas: int) -> np.ndarray:
    """Place of each bin in the order of bins, [B]; place p is of replica p % replicas (LPT scheduling in rounds)."""
    place_B = np.zeros(len(cost_B), dtype=np.int64)
    loads = np.zeros(replicas)  # [replicas]
    # Bins of a round cost about the same, so replicas that share a layer's experts wait little for each other.
    rounds = np.argsort(-cost_B, kind="stable").reshape(-1, replicas)
    for number, bins in enumerate(rounds):
        least_first = np.argsort(loads, kind="stable")
        place_B[bins] = number * replicas + least_first
        loads[least_first] += cost_B[bins]
    return place_B


# ---------------------------------------------------------------- the packed row


def pack(batch: Batch, samples: list[int], width: int, device) -> MicroBatch:
    """The numbered samples in one row of `width` positions; without samples a row of padding only."""
    starts_S = batch.starts_N[samples]
    lengths_S = batch.lengths_N[samples]
    padding = width - int(lengths_S.sum())
    padded_S = lengths_S
    if padding:
        padded_S = add_padding(lengths_S, padding)
    cu_seqlens = np.cumsum([0, *padded_S], dtype=np.int32)
    pieces = [slice(start, start + length) for start, length in zip(starts_S, lengths_S, strict=True)]

    def row(values_F: torch.Tensor) -> torch.Tensor:
        zeros = values_F.new_zeros(padding, *values_F.shape[1:])
        return torch.cat([*(values_F[piece] for piece in pieces), zeros])[None]  # [1, T]

    known = {field.name: getattr(batch, field.name) for field in fields(Rows)}
    rows = {name: row(values_F) for name, values_F in known.items() if values_F is not None}
    return MicroBatch(
        **{name: to_device(values, device) for name, values in rows.items()},
        rows=np.flatnonzero(rows["mask"]),
        samples=np.array(samples, dtype=np.int32),
        starts=starts_S,
        lengths=lengths_S,
        cu_seqlens=to_device(torch.from_numpy(cu_seqlens), device),
        max_seqlen=int(np.diff(cu_seqlens).max()),
    )


def add_padding(lengths_S: np.ndarray, padding: int) -> np.ndarray:
    """Lengths of the sequences of a row, with `padding` (above 0) at its end.

    The padding lengthens the last sequence, or is sequences of its own, none longer than the longest sample: whichever
    leaves fewer positions after attention's own padding.
    """
    piece = int(lengths_S.max(initial=0)) or min(PADDING_PIECE, padding)
    pieces = np.diff([*range(0, padding, piece), padding])
    if len(lengths_S):
        longer_S = np.append(lengths_S[:-1], lengths_S[-1] + padding)
        if len(longer_S) * longer_S.max() < (len(longer_S) + len(pieces)) * piece:
            return longer_S
    return np.append(lengths_S, pieces).astype(np.int64)


def sequence_sum(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The sum over each packed sequence, at each of its tokens; [T], number of each token's sequence [T] → [T]."""
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]


def sequence_mean(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The mean over each sequence's tokens with mask 1 (0 without any), at each of its tokens; [T] each → [T]."""
    return sequence_sum(values_T * mask_T, sequence_T) / sequence_sum(mask_T, sequence_T).clamp(min=1)


def route_rows(samples: list[Sample], lengths_N: np.ndarray) -> torch.Tensor:
    """The routes of the samples end to end, [F, layers, k] uint8 or int16, given each sample's number of positions.

    `routes` of a sample is [tokens, layers, k], the experts as vLLM numbers them. vLLM returns routes for every token
    but the last, which are the sample's positions. Where it returns fewer (an engine may not keep those of a cached
    prompt), they belong to the last positions; the first get 0, no route. Other values are expert + 1. Raises
    TrainingError for more routes than positions, and for a route with the same expert twice.
    """
    routes_N = [np.asarray(s.routes) for s in samples]
    largest = max(int(routes.max(initial=0)) for routes in routes_N)
    rows_F = np.zeros((lengths_N.sum(), *routes_N[0].shape[1:]), np.uint8 if largest < 255 else np.int16)
    for routes, length, end in zip(routes_N, lengths_N, np.cumsum(lengths_N), strict=True):
        if len(routes) > length:
            raise TrainingError(f"vLLM returned routes for {len(routes)} tokens of a sample of {length} that predict")
        if routes.shape[2] > 1 and (routes[..., 0] == routes[..., 1]).any():
            raise TrainingError("vLLM returned a route with one expert twice: it did not note where each token went")
        rows_F[end - len(routes) : end] = routes.astype(rows_F.dtype) + 1
    return torch.from_numpy(rows_F)
