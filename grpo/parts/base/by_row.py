"""What the trainer and vLLM must do alike on a CPU, so that a token's bits do not depend on the batch it is in.

With model.match_engine both call these: the trainer in grpo/parts/model/matched.py, vLLM by
grpo/parts/engine/invariant.py.
"""

import numpy as np
import torch
import torch.nn.functional as F

ROWS = 4  # for fewer rows the kernels of linear layers sum in another order


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out], each row by itself: others do not change its bits.

    In fp32 vLLM calls oneDNN, where torch would take MKL. A bias is added before the only rounding.
    """
    rows = at_least(ROWS, x.flatten(0, -2))
    if weight.dtype is torch.float32:
        out = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        out = F.linear(rows, weight, bias)
    return out[: x.numel() // x.shape[-1]].unflatten(0, x.shape[:-1])


def at_least(rows: int, x: torch.Tensor) -> torch.Tensor:
    """x [n, k] with rows of zeros below, so that there are so many."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x


def split_queries(queries_S: np.ndarray, keys_S: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """Cut each segment's queries into pieces of at most `most`: the segment of each of P pieces, its queries, its keys.

    [S], [S] → [P], [P], [P]. The last query of a piece attends to its last key. vLLM's kernel divides keys into tiles
    by the number of queries it is given, and sums tile by tile: so both sides give it the same few.
    """
    count_S = -(-queries_S // most)
    segment_P = np.repeat(np.arange(len(queries_S)), count_S)
    number_P = np.arange(len(segment_P)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
    end_P = np.minimum((number_P + 1) * most, queries_S[segment_P])
    return segment_P, end_P - number_P * most, (keys_S - queries_S)[segment_P] + end_P


def queries_of_a_piece(isa: str, heads: int, kv_heads: int) -> int:
    """How many queries vLLM's kernel holds in registers: of 8 heads, with AMX 32; the heads of a group go together."""
    most = 32 if isa == "amx" else 8
    group = heads // kv_heads
    return most // group if most % group == 0 else most
