"""The oracle's own cut of a sampler's distribution, and its own replay of routes."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers

from oracle import models, nuclei
from oracle.trainer import Answer

LOGITS = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
CUTS = {  # (top_p, top_k) → the ids that are left
    (1.0, 3): {0, 2, 3}, (0.3, -1): {0}, (0.4001, -1): {0, 2}, (0.95, -1): {0, 1, 2, 3}, (0.75, 3): {0, 2},
    (0.8, 9): {0, 2, 3},
}  # fmt: skip


def sampling(top_p, top_k):
    return SimpleNamespace(top_p=top_p, top_k=top_k)


@pytest.mark.parametrize("cut", CUTS)
def test_a_nucleus(cut):
    must, may = nuclei.bounds_of(LOGITS, sampling(*cut))
    assert {*must[0].nonzero()[:, 0].tolist()} == CUTS[cut] and torch.equal(must, may)


GIVEN = {  # the recorded nucleus of token 0 → what is wrong with it, at top_p=0.71 and log-probs within 0.001
    (0, 2, 3): "",
    (0, 2): "it is drawn from 2 ids, without 3",
    (0, 1, 2, 3): "it is drawn from 4 ids, with 1",
    (2, 3): "the token 0 is not among the 2 ids that it was drawn from",
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_recorded_nucleus_is_judged(given):
    must, may = nuclei.bounds_of(LOGITS, sampling(0.71, -1), slack=0.001)
    assert nuclei.difference([*given], 0, must[0], may[0]) == GIVEN[given]


def test_only_ids_at_the_border_may_differ():
    for top_p in (0.7, 0.7 - 1e-6, 0.7 + 1e-6):  # of {0, 2}
        must, may = nuclei.bounds_of(LOGITS, sampling(top_p, -1), slack=0.001)
        assert [nuclei.difference(ids, 0, must[0], may[0]) for ids in ([0, 2], [0, 2, 3])] == ["", ""]
    tied = torch.tensor([[1.0, 0.0, 1e-5, -9.0]])
    must, may = nuclei.bounds_of(tied.log_softmax(-1), sampling(1.0, 2), slack=0.001)
    assert [nuclei.difference(ids, 0, must[0], may[0]) for ids in ([0, 1], [0, 2])] == ["", ""]
    assert nuclei.difference([0, 3], 0, must[0], may[0])


def test_recorded_nuclei_belong_to_the_sampled_tokens():
    row = {"response_ids": [5, 6, 7], "nuclei": [5, 9, -1, 7, -1]}
    assert nuclei.nuclei_of(row, [0, 2]) == [[5, 9], nuclei.WHOLE, [7]]
    assert nuclei.nuclei_of({"response_ids": [5]}, [0]) is None


def test_log_probs_are_over_the_nucleus():
    logp = nuclei.cut(LOGITS.expand(2, -1), [[0, 2], nuclei.WHOLE]).log_softmax(-1)
    assert logp[0].exp().tolist() == pytest.approx([4 / 7, 0, 3 / 7, 0]) and torch.allclose(logp[1], LOGITS[0])
    assert (logp.exp() * logp).isfinite().all(), "so its entropy is a number"


GROUP = {"group": 3, "response_ids": [0, 2]}
FOUND = {  # the nuclei that a run recorded for the tokens of GROUP → what is wrong, their sizes, ours
    (0, 2, -1, 2, 0, -1): ("", [2, 2], [2, 2]),
    (0, 2, -1, 2, -1): ("it is drawn from 1 ids, without 0", [2, 1], [2, 2]),
    (0, 2, -1): ("group 3: 1 nuclei of 2 tokens", [], []),
    None: None,
}


@pytest.mark.parametrize("given", FOUND)
def test_nuclei_of_a_step(given):
    """Those that are not recorded are ours, and the token."""
    row = GROUP if given is None else GROUP | {"nuclei": [*given]}
    answer = Answer(row, [0, 1], True, sampling(0.6, -1), None, nuclei.nuclei_of(row, [0, 1]), {})
    passes = Mock(side_effect=lambda answers, *given, **options: [[(a, LOGITS.expand(2, -1)) for a in answers]])
    trainer = SimpleNamespace(passes=passes, current=None)
    state = SimpleNamespace(trainer=trainer, report=SimpleNamespace(bounds={"token: rollout_logp": (5e-4, 0.0)}))
    assert nuclei.fill_nuclei(state, [answer]) == FOUND[given]
    assert given or answer.nuclei == [[0, 2], [0, 2]]
    assert nuclei.fill_nuclei(state, [replace(answer, sampling=sampling(1, -1))]) is None


@pytest.mark.parametrize("normed", [True, False])
def test_routes_are_kept_while_the_weights_move(normed):
    config = transformers.Qwen3MoeConfig(hidden_size=4, num_experts=6, num_experts_per_tok=2, norm_topk_prob=normed)
    gate = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(config)
    module = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": gate})})
    hidden = torch.randn(2, 3, 4)
    routes = [[], []]

    def pass_of(seed, rows=hidden):
        gate.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
        plain = gate(rows)
        with models.routed(module, routes, rows.shape[:2]):
            return plain, gate(rows)

    plain, first = pass_of(0)
    assert all(map(torch.equal, plain, first)) and [len(row) for row in routes] == [1, 1]

    plain, other = pass_of(1)
    assert torch.equal(other[2], first[2]) and not torch.equal(plain[2], other[2])
    wanted = plain[0].softmax(-1).gather(-1, first[2])
    assert torch.allclose(other[1], wanted / wanted.sum(-1, keepdim=True) if normed else wanted)

    _, longer = pass_of(0, torch.cat([hidden, hidden[:, :1]], 1))  # with more padding
    assert torch.equal(longer[2].view(2, 4, 2)[:, :3], first[2].view(2, 3, 2))
