"""vLLM 0.32 on a CPU, so that an answer's bits do not depend on what else is in the batch (model.match_engine).

Three things make them depend on it:

- With fewer rows than ROWS a linear layer sums in another order.
- On a CPU with AMX small layers have a kernel of their own, whose order depends on the number of rows.
- Attention divides keys into tiles by the number of a request's queries.

`prepare` changes all three, before vLLM starts.
"""

from dataclasses import replace

import numpy as np
import torch

from grpo.parts.base.by_row import ROWS, at_least, product, queries_of_a_piece, split_queries


def prepare():
    """Patch vLLM's linear layers, its head and the plan of its attention."""
    from vllm.model_executor.layers import logits_processor, utils
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    gemm = utils.cpu_unquantized_gemm
    apply_head = logits_processor.LogitsProcessor._apply_head
    build = Builder.build

    def by_row(layer, x, weight, bias=None):
        rows = x.flatten(0, -2)
        out = gemm(layer, at_least(ROWS, rows), weight, bias)
        return out[: len(rows)].unflatten(0, x.shape[:-1])

    def head_by_row(self, head, hidden, bias):
        if self.head_dtype in (None, hidden.dtype):
            logits = apply_head(self, head, at_least(ROWS, hidden), bias)
            return logits[: len(hidden)]
        return product(hidden.to(self.head_dtype), head.weight.to(self.head_dtype), bias)

    def build_in_pieces(self, common_prefix_len, common, fast_build=False):
        most = queries_of_a_piece(self.isa, self.num_heads, self.num_kv_heads)
        if common.max_query_len > most:  # else each request is one piece
            queries_S = np.diff(common.query_start_loc.numpy())
            segment_P, starts, sizes = split_queries(queries_S, common.seq_lens.numpy(), most)
            common = replace(
                common,
                num_reqs=len(sizes),
                query_start_loc=starts,
                seq_lens=sizes,
                block_table_tensor=common.block_table_tensor[torch.from_numpy(segment_P)],
            )
        return build(self, common_prefix_len, common, fast_build)

    utils.cpu_unquantized_gemm = by_row
    utils.check_cpu_sgl_kernel = lambda *shape_and_dtype: False
    logits_processor.LogitsProcessor._apply_head = head_by_row
    Builder.build = build_in_pieces
