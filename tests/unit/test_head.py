"""Log-probs, entropies and their gradients as HeadLogp has them, in chunks, against float64; layers of stages.

tests/oracle/test_layouts.py has them over tensor-parallel ranks, tests/oracle/test_lora.py with a frozen head.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_bridge as bridge
from grpo.parts.model import head, nucleus
from grpo.parts.model.divergence import OtherModel
from grpo.parts.model.stages import split_layers
from oracle import formulas
from tests.conftest import tiny_config

ON = bridge.device()
M, H, V, CHUNK, TEMPERATURE = 20, 24, 96, 7, 0.8
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}
FUSED = [(dtype, logits, True) for dtype in (torch.bfloat16, torch.float16) for logits in (dtype, torch.float32)]
WAYS = [  # type of the weight, of its logits, whether its gradient is added to main_grad
    *(pytest.param(dtype, dtype, False, marks=pytest.mark.gpu) for dtype in CLOSE),
    pytest.param(torch.float32, torch.float32, True, marks=pytest.mark.gpu),
    *(pytest.param(*way, marks=pytest.mark.gpu(only=True)) for way in FUSED),
]


def inputs(dtype, rows=M):
    """hidden [M, H], weight [V, H], targets [M] with the first and the last, gradients of both results [M]."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(M, H, device=ON).to(dtype), (torch.randn(V, H, device=ON) * 0.3).to(dtype)
    targets = torch.randint(V, (M,), device=ON)
    targets[:2] = torch.tensor([0, V - 1])
    return hidden[:rows], weight, targets[:rows], *torch.randn(2, M, device=ON)[:, :rows]


def exact(hidden, weight, targets, grad_logp, grad_entropy, is_out=None):
    """Log-probs, entropies, the gradients of hidden states and weight, in float64 by autograd; `is_out` [M, V]: tokens
    without a probability."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits_MV = hidden @ weight.t() / TEMPERATURE
    logp_MV = torch.log_softmax(logits_MV if is_out is None else logits_MV.masked_fill(is_out, -1e9), -1)
    results = logp_MV.gather(1, targets[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1)
    return [*results, *torch.autograd.grad(results, (hidden, weight), (grad_logp.double(), grad_entropy.double()))]


def cut(targets, is_cut):
    """(where the head cuts, which of all ids are out [M, V]); None and None without a cut. 1 to V ids are left to each
    target, which is one of them."""
    if not is_cut:
        return None, None
    is_out = torch.rand(len(targets), V) < torch.linspace(0, 1, len(targets))[:, None]
    is_out = is_out.scatter(1, targets.cpu()[:, None], False)
    nuclei = [i for out in is_out for i in (*(~out).nonzero()[:, 0].tolist(), -1)]
    row = SimpleNamespace(replay={"nuclei": nucleus.Nuclei([np.array(nuclei, "i4")])}, tokens=targets)
    return nucleus.places(row, np.ones(len(targets), bool), 0, V, CHUNK), is_out.to(ON)


@pytest.mark.parametrize("rows, is_cut", [(M, False), (0, False), (M, True), (0, True)])
@pytest.mark.parametrize("dtype, logits, fused", WAYS)
def test_the_head_is_that_of_float64(world, monkeypatch, dtype, logits, fused, rows, is_cut):
    bridge.init_model_parallel(tiny_config().parallel, seed=0)
    monkeypatch.setattr(head, "LOGITS_CHUNK", CHUNK)

    hidden, weight, targets, *grads = inputs(dtype, rows)
    own = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    own[1].main_grad = torch.ones(weight.shape, device=ON)
    cuts, is_out = cut(targets, is_cut)

    results = head.HeadLogp.apply(*own, targets, TEMPERATURE, True, logits, fused, cuts)
    grad_hidden, grad_weight = torch.autograd.grad(results, own, grads, retain_graph=not fused)
    if fused:
        assert own[1].grad_added_to_main_grad
        grad_weight = own[1].main_grad - 1
    else:  # the second time no logits are kept
        assert all(map(torch.equal, (grad_hidden, grad_weight), torch.autograd.grad(results, own, grads)))

    found = (*results, grad_hidden, grad_weight)
    wanted = exact(hidden, weight, targets, *grads, is_out)
    for name, own, expected in zip(("logp", "entropy", "hidden", "weight"), found, wanted, strict=True):
        error = ((own.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        close = 1e-6 if logits is torch.float32 and name in ("logp", "entropy") else CLOSE[dtype]
        assert error < close, (name, error)


DIVERGENCES = [("reverse", 0), ("forward", 0), ("jsd", 0), ("reverse", 7), ("forward", 7), ("jsd", 7)]


@pytest.mark.parametrize("rows, is_cut", [(M, False), (0, False), (M, True)])
@pytest.mark.parametrize("kind, top_k", DIVERGENCES)
def test_a_divergence_is_that_of_float64(world, monkeypatch, kind, top_k, rows, is_cut):
    """In chunks, beside log-prob and entropy, from a model of another width; of distributions cut to a nucleus too."""
    bridge.init_model_parallel(tiny_config().parallel, seed=0)
    monkeypatch.setattr(head, "LOGITS_CHUNK", CHUNK)
    hidden, weight, targets, *grads = inputs(torch.float32, rows)
    grads.append(torch.randn(rows))
    of_other = torch.randn(rows, 2 * H), torch.randn(V, 2 * H) * 0.3
    cuts, is_out = cut(targets, is_cut)

    own = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    other = OtherModel(*of_other, matches=False, kind=kind, beta=0.3, top_k=top_k)
    found = head.HeadLogp.apply(*own, targets, TEMPERATURE, True, torch.float32, False, cuts, False, [other])
    grads_found = torch.autograd.grad(found[:3], own, grads)

    own = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp, logq = (
        (logits / TEMPERATURE if is_out is None else (logits / TEMPERATURE).masked_fill(is_out, -1e9)).log_softmax(-1)
        for logits in (own[0] @ own[1].t(), of_other[0].double() @ of_other[1].double().t())
    )
    (own_logp, own_entropy), of_the_other = (
        (values.gather(1, targets[:, None])[:, 0], -(values.exp() * values).sum(-1)) for values in (logp, logq)
    )
    wanted = [own_logp, own_entropy, formulas.divergence(logp, logq, kind, 0.3, top_k), *of_the_other]
    grads_wanted = torch.autograd.grad(wanted[:3], own, [grad.double() for grad in grads])
    for one, expected in zip((*found, *grads_found), (*wanted, *grads_wanted), strict=True):
        assert (one.double() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("kind, top_k", DIVERGENCES)
def test_a_divergence_of_a_model_from_itself_is_0(kind, top_k):
    logp = torch.randn(M, V, dtype=torch.float64).log_softmax(-1)
    assert (formulas.divergence(logp, logp, kind, 0.3, top_k).abs() < 1e-12).all()


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_with_the_rest_as_one_event_a_divergence_is_never_above_the_whole(kind):
    logp, logq = torch.randn(2, M, V, dtype=torch.float64).mul(2).log_softmax(-1)
    parts = [formulas.divergence(logp, logq, kind, 0.3, top_k) for top_k in (1, 7, 40, V)]
    for part, more in itertools.pairwise(parts):  # of ever more events
        assert (part >= 0).all() and (part <= more + 1e-12).all()
    torch.testing.assert_close(parts[-1], formulas.divergence(logp, logq, kind, 0.3))


BOTH = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    "layers, pp, vpp, options, expected",
    [
        (94, 8, 1, BOTH, [[11], *[[12]] * 6, [11]]),
        (16, 3, 2, {"num_layers_in_last_pipeline_stage": 4}, [[3, 3], [3, 3], [2, 2]]),
        (4, 2, 2, {"pipeline_model_parallel_layout": "Ett||t|tL"}, [[2, 1], [0, 1]]),
    ],
)
def test_layers_of_uneven_stages(layers, pp, vpp, options, expected):
    """Their numbers go on from chunk to chunk over all stages."""
    stages = split_layers(layers, pp, vpp, **options)
    assert [[len(chunk) for chunk in stage] for stage in stages] == expected
    assert [n for chunks in zip(*stages, strict=True) for chunk in chunks for n in chunk] == [*range(layers)]
