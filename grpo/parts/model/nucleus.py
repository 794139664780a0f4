"""Replay of the sampler's cut. With rollout.top_p or top_k vLLM draws a token from some ids alone, its nucleus, and the
token's log-prob is over these ids.
"""

from dataclasses import dataclass

import numpy as np
import torch

from config import TrainingError
from grpo.parts.base.ranks import to_device
from grpo.parts.base.require import require

LOW = -6e4  # a logit of probability 0, in fp16 too; finite, so that 0 times it is 0


@dataclass(frozen=True)
class Nuclei:
    """The nuclei of samples: for each sample the nuclei of its tokens end to end, int32 ids, with -1 after each."""

    ids: list[np.ndarray]

    @classmethod
    def concatenate(cls, ids: list[np.ndarray], lengths_N):
        """Of a batch; `ids` of each sample."""
        return cls(ids)

    @staticmethod
    def join(before, ids):
        """Of a conversation: the nuclei of its turns before, then of one more."""
        return np.concatenate([before, ids])

    def take(self, samples: list[int], index_F) -> "Nuclei":
        return Nuclei([self.ids[n] for n in samples])

    def row(self, samples: list[int], index_T, padding, device) -> "Nuclei":
        return self.take(samples, index_T)

    def of_positions(self):
        """Prompts have none."""
        return ()

    def for_other_weights(self):
        """The same: all models compute their log-probs over the ids from which vLLM drew."""
        return self

    def mean_size(self):
        """Mean number of ids in a nucleus."""
        ids = np.concatenate(self.ids)
        return len(ids) / (ids < 0).sum() - 1


def places(mb, own_M, first, vocab, chunk) -> list[torch.Tensor]:
    """Where the nuclei are in this rank's logits, [rows, vocab], whose first id is `first`.

    The rows are those of mb.rows that `own_M` chooses. For each `chunk` of rows: the places in the flattened logits.
    """
    ids = np.concatenate([np.zeros(0, "i4"), *mb.replay["nuclei"].ids])
    is_end = ids < 0
    require(is_end.sum() == len(own_M), "a token in the mask was not drawn by vLLM: it has no nucleus", TrainingError)
    row = is_end.cumsum() - is_end  # of each id, among mb.rows
    column = ids - first
    is_here = own_M[row] & (column >= 0) & (column < vocab)
    row, column = (own_M.cumsum() - 1)[row[is_here]], column[is_here]

    on = mb.tokens.device
    starts = range(0, max(own_M.sum(), 1), chunk)
    ends = row.searchsorted(starts[1:])
    parts = np.split(row * vocab + column, ends)
    return [to_device(torch.from_numpy(part - start * vocab), on) for part, start in zip(parts, starts, strict=True)]


def cut_logits(logits_M, place):
    """Write LOW over the logits [M, V / tp] except at `place`. Nobody else has these logits."""
    flat = logits_M.view(-1)
    kept = flat[place]
    flat.fill_(LOW)[place] = kept
