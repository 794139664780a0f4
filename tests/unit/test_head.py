"""Log-probs, entropies and their gradients as HeadLogp has them, in chunks and over two tensor-parallel ranks, against
float64.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

import megatron_bridge as bridge
from support.model.layers import add_product

ON = bridge.device()
M, H, V, CHUNK, TEMPERATURE = 20, 24, 96, 7, 0.8
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}
FUSED = [(dtype, logits, True) for dtype in (torch.bfloat16, torch.float16) for logits in (dtype, torch.float32)]
WAYS = [  # type of the weight, of its logits, whether its gradient is added to main_grad
    *(pytest.param(dtype, dtype, False, marks=pytest.mark.gpu) for dtype in CLOSE),
    pytest.param(torch.float32, torch.float32, True, marks=pytest.mark.gpu),
    *(pytest.param(*way, marks=pytest.mark.gpu(only=True)) for way in FUSED),
]


class Ranks:
    """Two threads as tensor-parallel ranks."""

    def __init__(self, size: int):
        self.local, self.barrier = threading.local(), threading.Barrier(size)
        self.parts: list = [None] * size

    def all_reduce(self, x, op=bridge.dist.ReduceOp.SUM, group=None):
        self.parts[self.local.rank] = x.clone()
        self.barrier.wait()
        parts = torch.stack(self.parts)
        self.barrier.wait()
        x.copy_(parts.amax(0) if op == bridge.dist.ReduceOp.MAX else parts.sum(0))

    def run(self, function) -> list:
        results: list = [None] * len(self.parts)

        def call(rank):
            self.local.rank = rank
            results[rank] = function(rank)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(self.parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture(params=[1, 2])
def ranks(request, monkeypatch):
    ranks = Ranks(request.param)
    monkeypatch.setattr(bridge, "LOGITS_CHUNK", CHUNK)
    monkeypatch.setattr(bridge.dist, "all_reduce", ranks.all_reduce)
    group = SimpleNamespace(rank=lambda: ranks.local.rank)
    monkeypatch.setattr(bridge.mpu, "get_tensor_model_parallel_group", lambda: group)
    return ranks


def inputs(dtype: torch.dtype, rows: int = M) -> tuple[torch.Tensor, ...]:
    """hidden [M, H], weight [V, H], targets [M] with the first and last of each half, gradients of both results [M]."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(M, H, device=ON).to(dtype), (torch.randn(V, H, device=ON) * 0.3).to(dtype)
    targets = torch.randint(V, (M,), device=ON)
    targets[:4] = torch.tensor([0, V // 2 - 1, V // 2, V - 1])
    return hidden[:rows], weight, targets[:rows], *torch.randn(2, M, device=ON)[:, :rows]


def exact(hidden, weight, targets, grad_logp, grad_entropy) -> list[torch.Tensor]:
    """Log-probs, entropies, the gradients of hidden states and weight, in float64 by autograd."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logp_MV = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, -1)
    results = logp_MV.gather(1, targets[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1)
    return [*results, *torch.autograd.grad(results, (hidden, weight), (grad_logp.double(), grad_entropy.double()))]


@pytest.mark.parametrize("rows", [M, 0])
@pytest.mark.parametrize(("dtype", "logits", "fused"), WAYS)
def test_the_head_is_that_of_float64(ranks, dtype, logits, fused, rows):
    hidden, weight, targets, *grads = inputs(dtype, rows)
    size = len(ranks.parts)
    halves = [half.clone().requires_grad_() for half in weight.chunk(size)]
    for half in halves:
        half.main_grad = torch.ones(half.shape, device=ON)

    def run(rank):
        own = hidden.clone().requires_grad_()
        results = bridge.HeadLogp.apply(own, halves[rank], targets, TEMPERATURE, True, logits, fused)
        first = torch.autograd.grad(results, (own, halves[rank]), grads, retain_graph=not fused)
        if not fused:  # the second time no logits are kept
            second = torch.autograd.grad(results, (own, halves[rank]), grads)
            assert all(map(torch.equal, first, second))
        return [*(x.detach() for x in results), *first]

    found = ranks.run(run)
    logp, entropy, grad_hidden, grad_weight = zip(*found, strict=True)
    if fused:
        assert all(half.grad_added_to_main_grad for half in halves)
        grad_weight = [half.main_grad - 1 for half in halves]
    close = CLOSE[dtype]
    wanted = exact(hidden, weight, targets, *grads)
    compared = (logp[-1], entropy[-1], sum(x.double() for x in grad_hidden), torch.cat(grad_weight))
    for name, own, expected in zip(("logp", "entropy", "hidden", "weight"), compared, wanted, strict=True):
        error = ((own.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        assert error < (1e-6 if logits is torch.float32 and name in ("logp", "entropy") else close), (name, error)


def test_a_frozen_head_and_an_entropy_without_a_gradient(ranks):
    hidden, weight, targets, grad_logp, _ = inputs(torch.float32)
    halves = weight.chunk(len(ranks.parts))

    def run(rank):
        own = hidden.clone().requires_grad_()
        logp_M, _ = bridge.HeadLogp.apply(own, halves[rank], targets, TEMPERATURE, False, torch.float32, True)
        return torch.autograd.grad(logp_M, own, grad_logp)[0]

    wanted = exact(hidden, weight, targets, grad_logp, torch.zeros(M))[2]
    assert (sum(ranks.run(run)) - wanted).norm() < 1e-6 * wanted.norm()
    assert not any(half.requires_grad for half in halves)


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("rows", [300, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_added_in_fp32(dtype, rows):
    torch.manual_seed(0)
    x, grad = torch.randn(rows, 64, device=ON).to(dtype), torch.randn(rows, 48, device=ON).to(dtype)
    main = torch.full((48, 64), 1000.0, device=ON)
    add_product(x, grad, main)
    assert (main - 1000 - grad.double().t() @ x.double()).abs().max() < 1e-3
