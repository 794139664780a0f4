"""Samples of many lengths in rows of tokens without padding between them: who packs what, and the packed row.

A row predicts: a position holds a token and what is known of the next one, the target. A sample of n tokens has n - 1
such positions. Pure functions of the whole step's samples, so every rank computes the same plan and takes its part.

Rows have no padding, but attention may (`attention_pads`): it then lays a row out as [sequences, longest]. So sequences
of like length share a row, and the cap of a row counts sequences × longest. Where it does not, a row is as good as any
other of as many tokens, and the cap counts these.
"""

import heapq
import math
from dataclasses import fields
from functools import partial

import numpy as np
import torch

import megatron_bridge as bridge
from config import Config, ParallelConfig
from support.attention import uses_varlen
from support.records import Batch, MicroBatch, Rows

# What a row costs, in attended positions a head: each token TOKEN + what it attends to. The rest of a layer takes about
# 18 × hidden such positions by its operations, and by the time of its kernels less; a round number that is low rather
# than high, as padding is moved in memory too. Only how rows are cut and dealt depends on it, never a result.
TOKEN = 4096
ROW = 2048  # tokens; a shorter row takes as long: on a GPU the kernels of a row are launched one after the other
GAIN = 0.002  # by so much must more rows be faster
PIECE = 128  # longest sequence of padding in a row without samples


def attention_pads(dtype: str) -> bool:
    """Whether attention pads the sequences of a row to the longest, on this machine and with model.dtype `dtype`; the
    one place that says so to who packs rows. It asks what attention itself asks."""
    return not uses_varlen(bridge.device(), bridge.DTYPES[dtype])


def to_micro_batches(batch: Batch, samples: list[int], max_tokens: int, cfg: Config) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` positions, padded ones too."""
    rank, replicas = bridge.data_parallel()
    multiple = bridge.token_multiple(cfg.parallel)
    lengths_N = batch.lengths_N[samples]
    pads = attention_pads(cfg.model.dtype)
    bins = plan_bins(lengths_N, max_tokens // multiple * multiple, replicas, cfg.parallel, pads)
    widths = [max(1, math.ceil(lengths_N[members].sum() / multiple)) * multiple for members in bins]
    if cfg.parallel.vpp > 1:  # the interleaved schedule wants rows of one length
        widths = [max(widths)] * len(bins)
    return [
        pack(batch, [samples[i] for i in members], width, bridge.device())
        for members, width in list(zip(bins, widths, strict=True))[rank::replicas]
    ]


def use_of_rows(micro_batches: list[MicroBatch], cfg: Config) -> dict[str, float]:
    """How well this replica's training micro-batches are used: "fill", the positions in them, padded ones too, over
    those they were allowed; "attention_waste", the attention work over that of the samples without padding (1: none);
    "bubble", the share of an update in which a pipeline stage idles."""
    sizes = [len(mb.cu_seqlens) - 1 for mb in micro_batches]
    wanted = sum(int((mb.lengths**2).sum()) for mb in micro_batches)
    if attention_pads(cfg.model.dtype):
        positions = [size * mb.max_seqlen for size, mb in zip(sizes, micro_batches, strict=True)]
        done = sum(n * mb.max_seqlen for n, mb in zip(positions, micro_batches, strict=True))
    else:
        positions, done = [int(mb.lengths.sum()) for mb in micro_batches], wanted
    return {
        "fill": sum(positions) / (len(micro_batches) * cfg.train.max_tokens_per_micro_batch),
        "attention_waste": done / wanted if wanted else 1.0,
        "bubble": bubble(len(micro_batches), cfg.parallel),
    }


def bubble(micro_batches: int, parallel: ParallelConfig) -> float:
    """Share of an update in which a pipeline stage idles: (p - 1) / (m v + p - 1) with p stages, m micro-batches and v
    chunks a stage. Source: arXiv 2104.04473, 2.2."""
    idle = parallel.pp - 1
    return idle / (micro_batches * parallel.vpp + idle)


# ---------------------------------------------------------------- who packs what


def plan_bins(
    lengths_N: np.ndarray,
    max_tokens: int,
    replicas: int,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008, frozen
    padded: bool = True,
) -> list[list[int]]:
    """Spread samples over bins of at most `max_tokens` positions, so that the slowest replica is done soonest.

    A bin costs TOKEN for each token, and the square of a length for each sequence: of the longest in the bin where
    attention is `padded`, else of its own. Padded bins hold sequences of like length, and sequences × longest is within
    `max_tokens` (with what fills a row up to a multiple of tp · cp); else bins are alike, and their tokens are.

    Returns bins of sample numbers, as many for each replica: replica r takes bins[r::replicas], which cost about the
    same for all. They are as many as make the costliest replica and the pipeline bubble least, and not fewer than
    pipeline stages. Bins may be empty. A pure function: all ranks compute the same plan.
    Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    order_N = np.argsort(-lengths_N, kind="stable")  # longest first
    sorted_N = lengths_N[order_N]
    most = len(sorted_N) // replicas  # bins of a replica that have a sample each
    step = bridge.micro_batch_multiple(parallel)
    # Interleaved stages get rows as wide as the widest: then it is tokens that bins should have in equal number.
    token = TOKEN * (100 if parallel.vpp > 1 else 1)
    if padded:
        room_N = np.maximum(max_tokens // (sorted_N + bridge.token_multiple(parallel) - 1), 1)
        divide = partial(cut_alike, sorted_N.tolist(), np.cumsum([0, *sorted_N]).tolist(), room_N.tolist(), token)
        fewest = divide(len(sorted_N), even=False).max(initial=0) + 1
    else:
        divide = partial(spread, sorted_N.tolist(), max_tokens, token)
        fewest = math.ceil(sorted_N.sum() / max_tokens)
    rounds = math.ceil(max(fewest / replicas, min(parallel.pp, most), 1) / step) * step
    best = math.inf
    while best == math.inf or rounds <= most:
        count = rounds * replicas
        bin_N = divide(count)
        if bin_N is None:  # no place for one: one round more
            rounds += step
            continue
        cost_B = bin_costs(sorted_N, bin_N, count, token, padded)
        place_B = deal(cost_B, replicas)
        load_R = np.bincount(place_B % replicas, weights=np.maximum(cost_B, token * ROW))
        duration = load_R.max() / (1 - bubble(rounds, parallel))
        if duration > best * (1 - GAIN):
            break
        best, place_N, wanted = duration, place_B[bin_N], count
        rounds += max(rounds // 4 // step, 1) * step
    ends = np.cumsum(np.bincount(place_N, minlength=wanted))[:-1]
    return [members.tolist() for members in np.split(order_N[np.argsort(place_N, kind="stable")], ends)]


def cut_alike(
    lengths: list[int], sums: list[int], rooms: list[int], token: int, count: int, even: bool = True
) -> np.ndarray | None:
    """Bin of each sample where neighbours share one: at most `count` bins that cost about the same, or, not `even`, as
    full as they can be. None where these are more than `count`.

    `lengths` fall; `sums`: of those before, and of all; `rooms`: sequences that a bin can hold that begins with this.
    """

    def cut(target: float) -> list[int] | None:
        """Sizes of bins that cost `target` each: what one has too little or too much, up to half a sample, is made up
        for by the next."""
        sizes, start, carry = [], 0, 0.0
        while start < len(lengths):
            if len(sizes) == count:
                return None
            square, goal, room = lengths[start] ** 2, target + carry, min(rooms[start], len(lengths) - start)
            one = token * lengths[start] + square
            size = int(min(goal / one, room))  # as if all were as long; then with the lengths that they have
            if size < room:
                missing = goal - token * (sums[start + size] - sums[start]) - size * square
                size = int(min(max(size + missing / (token * lengths[start + size] + square) + 0.5, 1), room))
            carry = goal - token * (sums[start + size] - sums[start]) - size * square
            carry = min(max(carry, -one / 2), one / 2)
            sizes.append(size)
            start += size
        return sizes

    high = math.inf  # as full as there is room
    sizes = cut(high)
    if even and sizes is not None:
        low = token * sums[-1] / count  # less than any can do
        for _ in range(7):  # nearer to the least cost that will do
            middle = math.sqrt(low * min(high, 2 * low))
            closer = cut(middle)
            low, high, sizes = (middle, high, sizes) if closer is None else (low, middle, closer)
    return None if sizes is None else np.repeat(np.arange(len(sizes)), sizes)


def spread(lengths: list[int], max_tokens: int, token: int, count: int) -> np.ndarray | None:
    """Bin of each sample, dealt longest first into the cheapest of `count` bins; None where that one has no room for
    its tokens. `lengths` fall."""
    bins, heap = [], [(0, 0, number) for number in range(count)]  # (cost, tokens, number)
    for length in lengths:
        cost, tokens, number = heap[0]
        if tokens + length > max_tokens:
            return None
        heapq.heapreplace(heap, (cost + (token + length) * length, tokens + length, number))
        bins.append(number)
    return np.array(bins, dtype=np.int64)


def bin_costs(lengths_N: np.ndarray, bin_N: np.ndarray, count: int, token: int, padded: bool) -> np.ndarray:
    """What each of `count` bins costs, [B], given the bin of each sample."""
    square_N = lengths_N.astype(np.float64) ** 2
    if padded:
        longest_B = np.zeros(count)
        np.maximum.at(longest_B, bin_N, square_N)
        square_N = longest_B[bin_N]
    return np.bincount(bin_N, weights=token * lengths_N + square_N, minlength=count)


def deal(cost_B: np.ndarray, replicas: int) -> np.ndarray:
    """Place of each bin, [B]. In rounds of bins that cost about the same, so that replicas that meet in a layer's
    experts wait little: the costliest that are left go one to each, the first to the replica with least so far."""
    place_B, load_R = np.zeros(len(cost_B), dtype=np.int64), np.zeros(replicas)
    for number, bins in enumerate(np.argsort(-cost_B, kind="stable").reshape(-1, replicas)):
        takers = np.argsort(load_R, kind="stable")
        place_B[bins] = number * replicas + takers
        load_R[takers] += cost_B[bins]
    return place_B


def pack(batch: Batch, samples: list[int], width: int, device) -> MicroBatch:
    """The numbered samples in one row of `width` positions; without samples a row of padding only."""
    starts_S, lengths_S = batch.starts_N[samples], batch.lengths_N[samples]
    padding = width - int(lengths_S.sum())
    cu_seqlens = np.cumsum([0, *with_padding(lengths_S, padding)], dtype=np.int32)
    pieces = [slice(start, start + length) for start, length in zip(starts_S, lengths_S, strict=True)]

    def row(values_F: torch.Tensor | None) -> torch.Tensor | None:
        if values_F is None:
            return None
        filler = values_F.new_zeros(padding, *values_F.shape[1:])
        values_T = torch.cat([*(values_F[piece] for piece in pieces), filler])
        return values_T[None].to(device)  # [1, T]

    return MicroBatch(
        **{field.name: row(getattr(batch, field.name)) for field in fields(Rows)},
        samples=np.array(samples, dtype=np.int32),
        starts=starts_S,
        lengths=lengths_S,
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        max_seqlen=int(np.diff(cu_seqlens).max()),
    )


def with_padding(lengths_S: np.ndarray, padding: int) -> np.ndarray:
    """The sequences' lengths in a row that `padding` positions fill up: the last sequence goes on over them, or they
    are sequences of their own, none longer than the longest; whichever is less where all are padded to the longest."""
    piece = int(lengths_S.max(initial=0)) or min(PIECE, padding)
    pieces = np.diff([*range(0, padding, piece), padding]) if padding else []
    if len(lengths_S):
        longer = np.append(lengths_S[:-1], lengths_S[-1] + padding)
        if len(longer) * longer.max() < (len(longer) + len(pieces)) * piece:
            return longer
    return np.append(lengths_S, pieces).astype(np.int64)


def sequence_sum(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The sum over each packed sequence, at each of its tokens; [T], number of each token's sequence [T] → [T]."""
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]


def sequence_mean(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The mean over each sequence's tokens with mask 1 (0 without any), at each of its tokens; [T] each → [T]."""
    return sequence_sum(values_T * mask_T, sequence_T) / sequence_sum(mask_T, sequence_T).clamp(min=1)
