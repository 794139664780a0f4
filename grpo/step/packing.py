"""Sequence packing: which samples share a micro-batch, and the packed row of tokens.

A micro-batch is one row; the plan calls the samples that share it a bin. Each position of a row holds a token and its
target, the next token, so a sample of n tokens has n - 1 positions. The plan is a pure function of the samples of the
whole step, so every rank computes the same plan and packs its own part of it.
"""

import heapq
import math
from dataclasses import fields

import numpy as np
import torch

import megatron_bridge as bridge
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.ranks import device, to_device
from grpo.parts.model.attention import count_from, make_buckets, uses_varlen
from grpo.step.records import Batch, MicroBatch, Rows

# The unit of cost is one attended position of one head. A token costs TOKEN, for all of a layer but attention, plus the
# positions that it attends to. By its operations TOKEN would be about 18 × hidden, by the time of its kernels less. It
# is a low round number, since padding also costs memory traffic. Only the plan depends on it, never a result.
TOKEN = 4096
ROW_TOKENS = 2048  # a shorter row is taken to cost as much, since on a GPU kernel launches take its time
ROW_START = 128  # tokens that each row costs besides, so that the plan has few rows
# A position that is a copy counts as so much of a computed one. Its key and value are stored for each answer: at most
# 4 of the 34 × hidden bytes of activations of a layer (arXiv 2205.05198). With linear attention it counts whole.
COPY = 1 / 8
PADDING_PIECE = 128  # tokens of a sequence of padding in a row without samples, at most


def to_micro_batches(
    batch: Batch, samples: list[int], max_tokens, cfg, plan_of: Batch | None = None
) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` computed positions.

    With `plan_of` they are the rows of that batch, which has the same samples in other lengths, and may be longer.
    """
    replicas = bridge.mpu.get_data_parallel_world_size()
    multiple = bridge.token_multiple(cfg.parallel)
    # Layers of linear attention hold all that they compute of each copy of a prompt.
    copy = 1.0 if bridge.has_linear_attention(read_config(cfg.model.path)) else COPY
    bins = plan_rows(plan_of or batch, samples, max_tokens // multiple * multiple, replicas, cfg, copy)

    widths = []
    for members in bins:
        computed = batch.lengths_N[members] - shared_positions(batch, members, cfg.shares_prompts)
        widths.append(max(1, math.ceil(computed.sum() / multiple)) * multiple)
    # The interleaved schedule needs rows of one length, as does a dispatcher that gathers the rows of several replicas.
    if cfg.parallel.vpp > 1 or cfg.megatron.get("moe_token_dispatcher_type") == "allgather":
        widths = [max(widths)] * len(bins)

    rank = bridge.mpu.get_data_parallel_rank()
    own = zip(bins[rank::replicas], widths[rank::replicas], strict=True)
    return [pack(batch, members, width, device(), cfg.shares_prompts) for members, width in own]


def measure_rows(micro_batches: list[MicroBatch], cfg):
    """How well this replica's training micro-batches are used: pack/* and pipeline/bubble of docs/metrics.md."""
    pads = not uses_varlen(device(), bridge.DTYPES[cfg.model.dtype])  # attention pads sequences to the longest
    positions = computed = own = work = shared_work = padded_work = 0
    for mb in micro_batches:
        positions += mb.tokens.shape[1]
        computed += mb.width
        own += int(mb.lengths.sum())
        shared_S = mb.lengths - mb.queries[: len(mb.lengths)]  # positions of each sample that one before it computes
        work += int((mb.lengths**2).sum())
        shared_work += int((shared_S**2).sum())
        padded_work += sum(count * longest**2 for count, longest in make_buckets(mb.sizes)) if pads else 0

    return {
        "real": own - (positions - computed),  # without padding
        "positions": computed,
        "shared": positions - computed,
        "attended": work - shared_work,  # as in plan_bins
        "micro_batches": len(micro_batches),
        "fill": computed / (len(micro_batches) * cfg.train.max_tokens_per_micro_batch),
        "attention_waste": padded_work / work if pads and work else 1.0,
        "bubble": bubble(len(micro_batches), cfg.parallel),
    }


def bubble(micro_batches, parallel):
    """Share of an update in which a stage idles: (p - 1) / (m v + p - 1), p stages, v chunks: arXiv 2104.04473, 2.2."""
    idle = parallel.pp - 1
    return idle / (micro_batches * parallel.vpp + idle)


# ---------------------------------------------------------------- the plan: which samples share a row


def plan_rows(batch: Batch, samples: list[int], max_tokens, replicas, cfg, copy=COPY) -> list[list[int]]:
    """The numbered samples in bins of at most `max_tokens` positions, where a copy counts as `copy` of one.

    Replica r takes bins[r::replicas]. In a bin, the answers to a prompt are side by side. Units of up to `most` answers
    to one prompt are planned, for ever smaller `most`, and the plan that finishes first is taken
    (docs/shared-prompts.md).
    """
    samples = np.asarray(samples, dtype=np.int64)
    prompt_N = batch.same_prompt_N[samples] if cfg.shares_prompts else np.arange(len(samples))
    order = np.lexsort((-batch.lengths_N[samples], prompt_N))  # answers to a prompt side by side, the longest first
    samples, prompt_N = samples[order], prompt_N[order]

    lengths_N = batch.lengths_N[samples].astype(np.int64)
    prompts_N = np.minimum(batch.prompts_N[samples], lengths_N - 1)
    rank_N = np.arange(len(samples)) - np.searchsorted(prompt_N, prompt_N)  # among the answers to the same prompt

    best, plan = math.inf, None
    most = 1 + rank_N.max(initial=0)  # answers of a unit
    while most > 0:
        is_first_N = rank_N % most == 0  # the others of a unit share its prompt
        starts_U = np.flatnonzero(is_first_N)
        shared_N = np.where(is_first_N, 0, prompts_N)
        tokens_U = np.ceil(np.add.reduceat(lengths_N - (1 - copy) * shared_N, starts_U)).astype(np.int64)

        if tokens_U.max(initial=0) <= max_tokens or most == 1:
            attended_U = np.add.reduceat(lengths_N**2 - shared_N**2, starts_U)
            bins, duration = plan_bins(tokens_U, attended_U, max_tokens, replicas, cfg.parallel)
            if duration < best:
                best = duration
                units = np.split(samples, starts_U[1:])
                plan = [[n for u in sorted(members) for n in units[u].tolist()] for members in bins]
        most //= 2
    return plan


def shared_positions(batch: Batch, samples: list[int], shares):
    """How many positions each sample shares with the one before it, [S]: the same prompt's, leaving one as a query."""
    shared_S = np.zeros(len(samples), dtype=np.int64)
    if shares and len(samples) > 1:
        prompt_S = batch.same_prompt_N[samples]
        again_S = np.append(False, prompt_S[1:] == prompt_S[:-1])
        shared_S[again_S] = np.minimum(batch.prompts_N[samples], batch.lengths_N[samples] - 1)[again_S]
    return shared_S


def plan_bins(tokens_N, attended_N, max_tokens, replicas, parallel) -> tuple[list[list[int]], float]:
    """Assign units to bins of at most `max_tokens` positions, so that the slowest replica finishes soonest.

    Returns bins of unit numbers, some perhaps empty, and the planned duration. Replica r takes bins[r::replicas]. Up to
    twice as many bins as the best so far are tried, in steps of a quarter. A bin costs TOKEN for each token plus
    `attended_N`, twice the number of positions that its tokens attend to. Raises ValueError for a unit above
    `max_tokens`.
    """
    if tokens_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {tokens_N.max()} tokens does not fit a micro-batch of {max_tokens}")

    most = len(tokens_N) // replicas  # bins of a replica, if each has a unit
    step = 1  # the number of bins of a replica is a multiple of this
    token = TOKEN
    if parallel.vpp > 1:  # the interleaved schedule needs full rounds, and rows as wide as the widest: equal tokens
        step = parallel.pp
        token *= 100

    cost_N = token * tokens_N + attended_N
    order_N = np.argsort(-cost_N, kind="stable")  # costliest first
    cost_N = cost_N[order_N]

    fewest = tokens_N.sum() / max_tokens / replicas
    rounds = math.ceil(max(fewest, min(parallel.pp, most), 1) / step) * step  # bins of a replica
    best = math.inf
    best_rounds = 0  # 0: the units did not fit so few bins
    while best_rounds == 0 or rounds <= min(most, 2 * best_rounds):
        bin_N = assign_to_cheapest(cost_N.tolist(), tokens_N[order_N].tolist(), max_tokens, rounds * replicas)
        if bin_N is None:
            rounds += step
            continue

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
    return [units.tolist() for units in members], best


def assign_to_cheapest(costs: list[float], lengths: list[int], max_tokens, count):
    """Bin of each unit, the costliest first, each into the cheapest of `count` bins (LPT); None if there is no room."""
    bins = []
    heap = [(0, 0, number) for number in range(count)]  # (cost, tokens, number)
    for unit_cost, length in zip(costs, lengths, strict=True):
        cost, tokens, number = heap[0]
        if tokens + length > max_tokens:
            return None
        heapq.heapreplace(heap, (cost + unit_cost, tokens + length, number))
        bins.append(number)
    return np.array(bins, dtype=np.int64)


def order_bins(cost_B, replicas):
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


def pack(batch: Batch, samples: list[int], width, on, shares=False):
    """The numbered samples in one row of `width` computed positions; without samples a row of padding only.

    `shares`: neighbours with the same prompt compute it once, so that the row is longer than `width`.
    """
    starts_S = batch.starts_N[samples]
    lengths_S = batch.lengths_N[samples]
    shared_S = shared_positions(batch, samples, shares)

    # Padding comes in sequences no longer than the longest sample, which cost no more attention than that does.
    padding = width - int((lengths_S - shared_S).sum())
    piece = int(lengths_S.max(initial=0)) or PADDING_PIECE
    sizes_S = np.append(lengths_S, np.diff([*range(0, padding, piece), padding])).astype(np.int64)

    index = count_from(starts_S, lengths_S)

    def row(values_F):
        zeros = values_F.new_zeros(padding, *values_F.shape[1:])
        return torch.cat([values_F.index_select(0, index), zeros])[None]  # [1, T]

    rows = {}
    for field in fields(Rows):
        values_F = getattr(batch, field.name)
        if values_F is not None:
            rows[field.name] = row(values_F)
    kept, place = share_positions(shared_S, sizes_S) if shared_S.any() else (None, None)
    cu_seqlens = torch.from_numpy(np.cumsum([0, *sizes_S], dtype=np.int32))
    return MicroBatch(
        **{name: to_device(values, on) for name, values in rows.items()},
        rows=np.flatnonzero(rows["mask"]), samples=np.array(samples, dtype=np.int32), starts=starts_S,
        lengths=lengths_S, cu_seqlens=to_device(cu_seqlens, on), sizes=sizes_S, kept=kept, place=place,
        replay={name: kind.row(samples, index, padding, on) for name, kind in batch.replay.items()},
    )  # fmt: skip


def share_positions(shared_S, sizes_S):
    """The computed positions of a row, [C], and which of them each is, [T]: sequence s has `shared_S[s]` of s - 1."""
    starts_S = np.cumsum(sizes_S) - sizes_S
    source_T = np.arange(sizes_S.sum())
    for s in np.flatnonzero(shared_S):  # in order: the sequence before has been given its sources
        source_T[starts_S[s] :][: shared_S[s]] = source_T[starts_S[s - 1] :][: shared_S[s]]
    return np.unique(source_T, return_inverse=True)


def sequence_sum(values_T, sequence_T):
    """The sum over each packed sequence, at each of its tokens; [T], number of each token's sequence [T] → [T]."""
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]


def sequence_mean(values_T, mask_T, sequence_T):
    """The mean over each sequence's tokens with mask 1 (0 without any), at each of its tokens; [T] each → [T]."""
    return sequence_sum(values_T * mask_T, sequence_T) / sequence_sum(mask_T, sequence_T).clamp(min=1)
