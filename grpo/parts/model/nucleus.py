"""Replay of the sampler's cut. With rollout.top_p or top_k vLLM draws a token from some ids alone, its nucleus, and the
token's log-prob is of these. `nuclei` of a sample are those of the tokens that the model sampled, -1 after each.
"""

import numpy as np
import torch

from config import TrainingError
from grpo.parts.base.ranks import to_device
from grpo.parts.base.require import require

LOW = -6e4  # a logit of probability 0, in fp16 too; finite, so that 0 times it is 0


def places(mb, own_M: np.ndarray, first: int, vocab: int, chunk: int) -> list[torch.Tensor]:
    """Where the nuclei are in this rank's logits, [rows, vocab] of the ids from `first` on, in the rows that `own_M`
    chooses of mb.rows: of each `chunk` of rows, the places in the flattened logits.
    """
    ids = np.concatenate([np.zeros(0, "i4"), *(mb.nuclei[n] for n in mb.samples)])
    is_end = ids < 0
    require(is_end.sum() == len(own_M), "a token in the mask was not drawn by vLLM: it has no nucleus", TrainingError)
    row = is_end.cumsum() - is_end  # of each id, among mb.rows
    column = ids - first
    is_here = own_M[row] & (column >= 0) & (column < vocab)
    place = ((own_M.cumsum() - 1)[row] * vocab + column)[is_here]
    starts = np.arange(0, max(own_M.sum(), 1), chunk) * vocab
    parts = np.split(place, place.searchsorted(starts[1:]))
    shifted = (torch.from_numpy(part - start) for part, start in zip(parts, starts, strict=True))
    return [to_device(part, mb.tokens.device) for part in shifted]


def cut_logits(logits_M: torch.Tensor, place: torch.Tensor) -> None:
    """Write LOW over the logits [M, V / tp], but for those at `place`; nobody else has them."""
    flat = logits_M.view(-1)
    kept = flat[place]
    flat.fill_(LOW)[place] = kept
