"""What the trainer and vLLM must do alike on a CPU, so that a token's bits do not depend on its batch.

With model.match_engine both call these functions: the trainer in grpo/parts/model/matched.py, vLLM through
grpo/parts/engine/invariant.py.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4  # with fewer rows the kernels of linear layers sum in another order


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out]; the bits of a row do not depend on the other rows.

    In fp32 vLLM calls oneDNN, where torch would take MKL. A bias is added before the only rounding.
    """
    x_2d = x.flatten(0, -2)
    rows = at_least(ROWS, x_2d)
    if weight.dtype is torch.float32:
        out = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        out = F.linear(rows, weight, bias)
    return out[: len(x_2d)].unflatten(0, x.shape[:-1])


def at_least(rows: int, x: Tensor) -> Tensor:
    """x [n, k], with rows of zeros below it if n is less than `rows`."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x


def split_queries(queries_S: np.ndarray, keys_S: np.ndarray, most: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Cut each segment's queries into pieces of at most `most`; returns each piece's segment, where its queries begin,
    and how many keys it has, the last two int32 as vLLM's kernel takes them.

    [S], [S] → [P], [P + 1], [P]. The last query of a piece attends to its last key. vLLM's kernel divides keys into
    tiles by the number of queries that it gets, and sums tile by tile. So the trainer and vLLM both give it the same
    pieces.
    """
    count_S = -(-queries_S // most)
    segment_P = np.repeat(np.arange(len(queries_S)), count_S)

    # The number of a piece in its segment, and where its queries end there.
    before_S = np.cumsum(count_S) - count_S
    number_P = np.arange(len(segment_P)) - before_S[segment_P]
    end_P = np.minimum((number_P + 1) * most, queries_S[segment_P])

    starts = np.cumsum([0, *(end_P - number_P * most)], dtype=np.int32)
    keys_P = (keys_S - queries_S)[segment_P] + end_P
    return segment_P, torch.from_numpy(starts), torch.from_numpy(keys_P.astype(np.int32))


def queries_of_a_piece(isa: str, heads: int, kv_heads: int) -> int:
    """How many queries vLLM's kernel holds in registers: of 8 heads, with AMX of 32. A group's heads go together."""
    most = 32 if isa == "amx" else 8
    group = heads // kv_heads
    return most // group if most % group == 0 else most
