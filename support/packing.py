"""Samples of many lengths in rows of tokens without padding between them: who packs what, and the packed row.

A row predicts: a position holds a token and what is known of the next one, the target. A sample of n tokens has n - 1
such positions. Pure functions of the whole step's samples, so every rank computes the same plan and takes its part.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

import megatron_bridge as bridge
from config import Config


@dataclass(frozen=True)
class Rows:
    """What is known of each predicting position: [F] in a Batch, [1, T] in a MicroBatch. Never written in place.

    Numbers take 4 bytes: int32, float32. The two masks are True and False in a Batch, 1.0 and 0.0 in a MicroBatch.
    """

    tokens: torch.Tensor  # ids
    targets: torch.Tensor  # id of the next token
    mask: torch.Tensor  # where the target is a response token
    trained: torch.Tensor  # the mask, but 0 in answers that are left out of the loss
    rollout_logp: torch.Tensor  # of the target, as vLLM sampled it; 0 where the mask is 0
    advantages: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of each token in the loss; None: log-probs only
    old_logp: torch.Tensor | None = None  # None: one update a step
    ref_logp: torch.Tensor | None = None  # None: no reference model


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """All samples of a step end to end, F positions."""

    lengths_N: np.ndarray  # positions of each sample

    @cached_property
    def starts_N(self) -> np.ndarray:
        """Place of each sample's first position."""
        return np.cumsum(self.lengths_N) - self.lengths_N

    @property
    def seq_id(self) -> torch.Tensor:
        """Number of each position's sample, [F]; made anew at each use, as `position_ids` is."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths_N), dtype=np.int32), self.lengths_N))

    @property
    def position_ids(self) -> torch.Tensor:
        """Place of each token in its own sample, [F]."""
        starts_F = np.repeat(self.starts_N.astype(np.int32), self.lengths_N)
        return torch.from_numpy(np.arange(len(starts_F), dtype=np.int32) - starts_F)

    def per_sample(self, values_F: torch.Tensor) -> np.ndarray:
        """The sum over each sample's positions; [F] → [N] float64."""
        return np.add.reduceat(values_F.numpy(), self.starts_N, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Rows):
    """S sequences in one row of T positions, one after another; what fills the row up is a sequence of its own."""

    position_ids: torch.Tensor  # [1, T], place of the token in its own sample
    seq_id: torch.Tensor  # [1, T], number of the sample in the Batch; -1: padding
    index_T: torch.Tensor  # [positions that are not padding], place of each in the Batch
    cu_seqlens: torch.Tensor  # [S + 1] int32, where sequences begin and end
    max_seqlen: int

    @property
    def sequence_T(self) -> torch.Tensor:
        """Number of each position's sequence in this row, [T]."""
        lengths_S = self.cu_seqlens.diff()
        numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
        return numbers_S.repeat_interleave(lengths_S, output_size=self.tokens.shape[1])


def to_micro_batches(batch: Batch, samples: list[int], max_tokens: int, cfg: Config) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` positions."""
    rank, replicas = bridge.data_parallel()
    multiple = bridge.token_multiple(cfg.parallel)
    lengths_N = batch.lengths_N[samples]
    bins = plan_bins(lengths_N, max_tokens // multiple * multiple, replicas * bridge.micro_batch_multiple(cfg.parallel))
    widths = [max(1, math.ceil(lengths_N[members].sum() / multiple)) * multiple for members in bins]
    if cfg.parallel.vpp > 1:  # the interleaved schedule wants rows of one length
        widths = [max(widths)] * len(bins)
    return [
        pack(batch, [samples[i] for i in members], width, bridge.device())
        for members, width in list(zip(bins, widths, strict=True))[rank::replicas]
    ]


def use_of_rows(micro_batches: list[MicroBatch], cfg: Config) -> dict[str, float]:
    """How well this replica's training micro-batches are used: "fill", the positions of samples in them over those they
    were allowed; "bubble", the share of an update in which a pipeline stage idles.

    With p stages, m micro-batches and v chunks a stage the bubble is (p - 1) / (m v + p - 1): arXiv 2104.04473, 2.2.
    """
    allowed = len(micro_batches) * cfg.train.max_tokens_per_micro_batch
    idle = cfg.parallel.pp - 1
    return {
        "fill": sum(len(mb.index_T) for mb in micro_batches) / allowed,
        "bubble": idle / (len(micro_batches) * cfg.parallel.vpp + idle),
    }


def plan_bins(lengths_N: np.ndarray, max_tokens: int, multiple: int) -> list[list[int]]:
    """Spread samples over bins of at most `max_tokens`: longest first, each into the emptiest bin.

    Returns a multiple of `multiple` (the replicas) bins of sample numbers; replica r takes bins[r::replicas], so all
    have the same number and nearly the same load. Bins may be empty. A pure function: all ranks compute the same plan.
    Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    count = multiple * max(1, math.ceil(lengths_N.sum() / (max_tokens * multiple)))
    while True:
        bins, load_B = [[] for _ in range(count)], np.zeros(count, np.int64)
        for n in np.argsort(-lengths_N, kind="stable"):
            emptiest = load_B.argmin()
            bins[emptiest].append(int(n))
            load_B[emptiest] += lengths_N[n]
        if load_B.max() <= max_tokens:
            return bins
        count += multiple


def pack(batch: Batch, samples: list[int], width: int, device) -> MicroBatch:
    """The numbered samples in one row of `width` positions; without samples a row of padding only."""
    samples_S = np.array(samples, dtype=np.int64)
    lengths_S = batch.lengths_N[samples_S]
    total = int(lengths_S.sum())
    padding = [width - total] if total < width else []  # a sequence of its own
    cu_seqlens = np.cumsum([0, *lengths_S, *padding], dtype=np.int32)
    shift_S = batch.starts_N[samples_S] - cu_seqlens[: len(samples)]  # from the row to the batch
    index_T = torch.from_numpy(np.arange(total) + np.repeat(shift_S, lengths_S))
    position_T = np.arange(width, dtype=np.int32) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    seq_id_T = np.repeat(np.array([*samples, *[-1 for _ in padding]], np.int32), np.diff(cu_seqlens))

    def row(values_F: torch.Tensor | None) -> torch.Tensor | None:
        if values_F is None:
            return None
        values_T = torch.nn.functional.pad(values_F[index_T], (0, width - total))
        return (values_T.float() if values_T.dtype == torch.bool else values_T)[None].to(device)  # [1, T]

    return MicroBatch(
        **{field.name: row(getattr(batch, field.name)) for field in fields(Rows)},
        position_ids=torch.from_numpy(position_T)[None].to(device),
        seq_id=torch.from_numpy(seq_id_T)[None].to(device),
        index_T=index_T,
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        max_seqlen=int(np.diff(cu_seqlens).max()),
    )


def sequence_sum(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The sum over each packed sequence, at each of its tokens; [T], number of each token's sequence [T] → [T]."""
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]


def sequence_mean(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The mean over each sequence's tokens with mask 1 (0 without any), at each of its tokens; [T] each → [T]."""
    return sequence_sum(values_T * mask_T, sequence_T) / sequence_sum(mask_T, sequence_T).clamp(min=1)
