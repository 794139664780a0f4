"""What stands in for parts of Megatron-core gives the same bits; how often it waits is in test_gpu_rehearsal.py."""

import pytest
import torch

from support.model import fewer_waits, layers  # noqa: F401, layers first: it prepares the process for Megatron-core

# isort: split
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.utils import local_multi_tensor_l2_norm

TOKENS, EXPERTS, K, HIDDEN = 50, 8, 3, 16


def test_megatron_uses_them():
    assert clip_grads.l2_norm_impl is fewer_waits.l2_norm
    assert token_dispatcher.permute is fewer_waits.permute is not moe_utils.permute
    assert moe_layer.MoEAlltoAllTokenDispatcher is fewer_waits.Dispatcher


def test_the_norm_has_the_same_bits():
    random = torch.Generator().manual_seed(0)
    for sizes in ([1], [7, 0, 1000], [3, 5000, 64, 64, 100000]):
        gradients = [torch.randn(size, generator=random) for size in sizes]
        theirs, _ = local_multi_tensor_l2_norm(0, None, [gradients], False)
        ours, _ = fewer_waits.l2_norm(0, None, [gradients], False)
        assert torch.equal(ours, theirs)


def routed(unused: int = 0):
    """Tokens, which K experts each goes to, and weights; the last `unused` experts get no token."""
    random = torch.Generator().manual_seed(1)
    scores = torch.rand(TOKENS, EXPERTS, generator=random)
    scores[:, EXPERTS - unused :] = -1
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(K).indices, True)
    tokens = torch.randn(TOKENS, HIDDEN, generator=random).requires_grad_()
    return tokens, routing_map, (scores.softmax(-1) * routing_map).detach().requires_grad_()


@pytest.mark.parametrize("unused", [0, 2, EXPERTS - K])
def test_permuted_tokens_have_the_same_bits(unused):
    results = []
    for permute in (moe_utils.permute, fewer_waits.permute):
        tokens, routing_map, probs = routed(unused)
        rows, weights, order = permute(tokens, routing_map, probs=probs, num_out_tokens=TOKENS * K)
        (rows.square().sum(-1) * weights).sum().backward()
        results.append((rows, weights, order, tokens.grad, probs.grad))
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


def test_a_router_that_drops_tokens_is_noticed():
    tokens, routing_map, probs = routed()
    routing_map[0] = False
    with pytest.raises(IndexError):
        fewer_waits.permute(tokens, routing_map, probs=probs, num_out_tokens=TOKENS * K)
