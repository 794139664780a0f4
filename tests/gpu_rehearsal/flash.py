"""The values of FlashAttention on rows of several sequences, by the CPU in fp32: what varlen_attn gives on a GPU."""

import torch


def attended(cu_q, cu_k, left, right, causal):
    """Which key each query attends to, [queries, keys]; the last query of a sequence is at its last key."""
    cu_q, cu_k = cu_q.long(), cu_k.long()
    queries, keys = torch.arange(int(cu_q[-1])), torch.arange(int(cu_k[-1]))
    sequence_q = torch.searchsorted(cu_q, queries, right=True)  # from 1
    sequence_k = torch.searchsorted(cu_k, keys, right=True)
    place = (queries + (cu_k - cu_q)[sequence_q])[:, None]  # of each query among the keys
    mask = sequence_q[:, None] == sequence_k
    if causal or right == 0:
        mask &= keys <= place
    if left is not None and left >= 0:
        mask &= keys >= place - left
    return mask


def products(query, key, cu_q, cu_k, options, causal):
    """(key in fp32 for every head of a query, scaled products [heads, queries, keys], scale)."""
    heads_per_key = query.shape[1] // key.shape[1]
    scale = options.get("scale") or query.shape[-1] ** -0.5
    key = key.float().repeat_interleave(heads_per_key, 1)
    mask = attended(cu_q, cu_k, options.get("window_size_left"), options.get("window_size_right"), causal)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    return key, scores.masked_fill(~mask, -torch.inf), scale


def forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
    """Values of aten._flash_attention_forward: result, log-sum-exp [heads, queries], random state, unused, mask."""
    _, scores, _ = products(query, key, cu_q, cu_k, options, causal)
    value = value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
    random_state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, scores.logsumexp(-1), random_state, unused, query.new_zeros(0)


def backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, random_state, unused, **options
):
    """Values of aten._flash_attention_backward: the gradients of query, key and value."""
    group = query.shape[1] // key.shape[1]
    keys, scores, scale = products(query, key, cu_q, cu_k, options, causal)
    probabilities = (scores - lse[..., None]).exp()
    grad = grad.float()
    values = value.float().repeat_interleave(group, 1)
    inner = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out.float()).sum(-1).t()[..., None]
    grad_scores = probabilities * inner * scale
    grad_query = torch.einsum("hqk,khd->qhd", grad_scores, keys)
    grad_key = torch.einsum("hqk,qhd->khd", grad_scores, query.float()).unflatten(1, (-1, group)).sum(2)
    grad_value = torch.einsum("hqk,qhd->khd", probabilities, grad).unflatten(1, (-1, group)).sum(2)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
