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
MIN_GAIN = 0.002  # plan_bins adds micro-batches only while each trial saves more than this share of the time
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

    Returns bins of sample numbers, some perhaps empty; replica r takes bins[r::replicas]. More bins are tried while
    they reduce the cost of the slowest replica, pipeline bubble included; a replica has at least as many as there are
    stages, if samples suffice. A bin costs TOKEN for each token plus the squared length of each sequence, in a `padded`
    bin the square of the longest for each. A padded bin holds sequences of similar length, and sequences × longest is
    within `max_tokens`, with the padding to a multiple of tp · cp. Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    order_N = np.argsort(-lengths_N, kind="stable")  # longest first
    sorted_N = lengths_N[order_N]
    most = len(sorted_N) // replicas  # bins of a replica, if each has a sample
    step = 1  # the number of bins of a replica is a multiple of this
    token = TOKEN
    if parallel.vpp > 1:  # the interleaved schedule needs full rounds, and rows as wide as the widest: equal tokens
        step = parallel.pp
        token *= 100
    if padded:
        room_N = np.maximum(max_tokens // (sorted_N + bridge.token_multiple(parallel) - 1), 1)
        divide = partial(cut_sorted, sorted_N.tolist(), np.cumsum([0, *sorted_N]).tolist(), room_N.tolist(), token)
        fewest = divide(len(sorted_N), even=False).max(initial=0) + 1
    else:
        divide = partial(assign_to_cheapest, sorted_N.tolist(), max_tokens, token)
        fewest = math.ceil(sorted_N.sum() / max_tokens)
    rounds = math.ceil(max(fewest / replicas, min(parallel.pp, most), 1) / step) * step  # bins of a replica
    best = math.inf
    while best == math.inf or rounds <= most:
        count = rounds * replicas
        bin_N = divide(count)
        if bin_N is None:  # the samples do not fit so few bins
            rounds += step
            continue
        cost_B = bin_costs(sorted_N, bin_N, count, token, padded)
        place_B = order_bins(cost_B, replicas)
        loads = np.bincount(place_B % replicas, weights=np.maximum(cost_B, token * ROW_TOKENS))
        duration = loads.max() / (1 - bubble(rounds, parallel))
        if duration > best * (1 - MIN_GAIN):
            break
        best = duration
        place_N = place_B[bin_N]
        bins = count
        rounds += max(rounds // 4 // step, 1) * step
    ends = np.cumsum(np.bincount(place_N, minlength=bins))[:-1]
    members = np.split(order_N[np.argsort(place_N, kind="stable")], ends)
    return [samples.tolist() for samples in members]


def cut_sorted(
    lengths: list[int], sums: list[int], rooms: list[int], token: int, count: int, even: bool = True
) -> np.ndarray | None:
    """Bin of each sample, for padded bins, [N]; None where `count` bins are too few.

    A bin is a run of the samples sorted by length. Bins cost about the same or, with `even` False, are each as full as
    possible. `lengths` descend; `sums[i]` is the sum of lengths[:i]; `rooms[i]` is how many sequences fit into a bin
    whose longest is sample i.
    """
    high = math.inf
    sizes = cut_at_cost(high, lengths, sums, rooms, token, count)
    if sizes is None:
        return None
    if even:
        low = token * sums[-1] / count  # below the cost of any cut
        for _ in range(7):  # bisection towards the least cost of a bin at which `count` bins are enough
            middle = math.sqrt(low * min(high, 2 * low))
            closer = cut_at_cost(middle, lengths, sums, rooms, token, count)
            if closer is None:
                low = middle
            else:
                high = middle
                sizes = closer
    return np.repeat(np.arange(len(sizes)), sizes)


def cut_at_cost(
    target: float, lengths: list[int], sums: list[int], rooms: list[int], token: int, count: int
) -> list[int] | None:
    """Sizes of bins of cost `target`, for `cut_sorted`; None where more than `count` are needed."""
    sizes = []
    start = 0
    carry = 0.0
    while start < len(lengths):
        if len(sizes) == count:
            return None
        square = lengths[start] ** 2
        goal = target + carry
        room = min(rooms[start], len(lengths) - start)
        sample_cost = token * lengths[start] + square
        size = int(min(goal / sample_cost, room))  # an estimate, as if all were as long as the first
        if size < room:  # corrected with the lengths that they have
            missing = goal - token * (sums[start + size] - sums[start]) - size * square
            size = int(min(max(size + missing / (token * lengths[start + size] + square) + 0.5, 1), room))
        carry = goal - token * (sums[start + size] - sums[start]) - size * square  # made up for by the next bin
        carry = min(max(carry, -sample_cost / 2), sample_cost / 2)
        sizes.append(size)
        start += size
    return sizes


def assign_to_cheapest(lengths: list[int], max_tokens: int, token: int, count: int) -> np.ndarray | None:
    """Bin of each sample, for bins without padding: longest first, each into the cheapest of `count` bins (LPT).

    `lengths` descend. Returns None where the cheapest bin has no room for a sample's tokens.
    """
    bins = []
    heap = [(0, 0, number) for number in range(count)]  # (cost, tokens, number)
    for length in lengths:
        cost, tokens, number = heap[0]
        if tokens + length > max_tokens:
            return None
        heapq.heapreplace(heap, (cost + (token + length) * length, tokens + length, number))
        bins.append(number)
    return np.array(bins, dtype=np.int64)


def bin_costs(lengths_N: np.ndarray, bin_N: np.ndarray, count: int, token: int, padded: bool) -> np.ndarray:
    """The cost of each of `count` bins, [B], given the bin of each sample."""
    square_N = lengths_N.astype(np.float64) ** 2
    if padded:
        longest_B = np.zeros(count)
        np.maximum.at(longest_B, bin_N, square_N)
        square_N = longest_B[bin_N]
    return np.bincount(bin_N, weights=token * lengths_N + square_N, minlength=count)


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
