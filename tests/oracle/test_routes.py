"""Replayed routes: the trainer sends each token where vLLM sent it, on every layout, and computes what plain
transformers does with the same routes; where they are the trainer's own nothing changes by a bit."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from config import TrainingError, UserError
from grpo.parts.base import versions
from grpo.parts.model.routes import Routes
from grpo.run.preflight import configuration
from tests.conftest import tiny_config
from tests.layout_worker import one_layout
from tests.oracle import layouts
from tests.oracle.reference import float64_model, make_samples, reference

LAYERS = 4
EXPERTS = 4
K = 2
RECOMPUTE_MOE = ["megatron.recompute_granularity=selective", "megatron.recompute_modules=[moe]"]
LAYOUTS = {  # on 4 ranks
    **{name: layouts.MOE_LAYOUTS[name] for name in ("EP4·DP4, overlap", "EP2·TP2·ETP2·DP2", "CP2·EP2·DP2")},
    "PP2·EP2·DP2, recompute of experts": ["parallel.pp=2", "parallel.ep=2", *RECOMPUTE_MOE],
    "TP2·PP2·VPP2, overlap, full recompute": layouts.LAYOUTS["TP2·PP2·VPP2, overlap, full recompute"],
}


def test_routes_end_to_end():
    """One above the expert's number, 0 for none: the first token of the second sample, whose prompt was cached."""
    samples = [np.array(r, np.uint8) for r in ([[[0, 1]], [[2, 0]]], [[[3, 1]]])]
    found = Routes.concatenate(samples, np.array([2, 2])).experts
    assert found.tolist() == [[[1, 2]], [[3, 1]], [[0, 0]], [[4, 2]]] and found.dtype == torch.uint8
    samples[1] = np.array([[[255, 1]]], np.uint8)  # of 256 experts
    assert Routes.concatenate(samples, np.array([2, 1])).experts.max() == 256
    with pytest.raises(TrainingError, match="routes for 2 tokens of a sample of 1"):
        Routes.concatenate(samples, np.array([1, 2]))
    samples[1] = np.zeros((2, 1, 2), np.uint8)
    with pytest.raises(TrainingError, match="one expert twice"):
        Routes.concatenate(samples, np.array([2, 2]))


def test_what_cannot_be_replayed_is_refused(tiny, tmp_path, monkeypatch):
    """vLLM 0.26 refuses routes with its second model runner, which is ours on a GPU, and has them with the first."""

    def cfg(model, *keys):
        return tiny_config(f"model.path={model}", "data.train=unused", "algo.replay_routes=true", *keys)

    with pytest.raises(UserError, match=r"algo\.replay_routes=true: model\.path=\S+ has no experts"):
        configuration.check_routes(cfg(tiny / "model"))
    with pytest.raises(UserError, match=r"leave out rollout\.vllm\.enable_prefix_caching"):
        configuration.check_config(cfg(tiny / "model", "rollout.vllm.enable_prefix_caching=false"), 1)
    layouts.make_model(tmp_path / "model", "qwen3_moe")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(versions, "installed", lambda package: "0.26.0")
    with pytest.raises(UserError, match=r"algo\.replay_routes=true: vLLM 0\.26\.0 .* VLLM_USE_V2_MODEL_RUNNER=0"):
        configuration.check_routes(cfg(tmp_path / "model"))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    configuration.check_routes(cfg(tmp_path / "model"))


def routed_samples():
    """make_samples, each token sent to two experts at random in every layer, the tokens of a prompt alike
    in most answers to it. Every third sample has no routes of its first two tokens.
    """
    rng = np.random.default_rng(5)
    samples = make_samples()
    of_prompt = rng.random((4, 8, LAYERS, EXPERTS)).argsort(-1)[..., :K]  # of each group
    for n, s in enumerate(samples):
        prompt = len(s["prompt_ids"])
        tokens = len(s["prompt_ids"]) + len(s["response_ids"]) - 1
        drawn = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :K]
        if n % 4 != 3:
            drawn[:prompt] = of_prompt[s["group"], : min(prompt, tokens)]
        s["routes"] = drawn[min(2, tokens - 1) * (n % 3 == 0) :].tolist()
    return samples


def forced_gate(gate, routes_N, hidden):
    """transformers' router on one sequence after the other, with the routes of its tokens; -1: its own choice."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    given = torch.from_numpy(routes_N.pop(0))  # [tokens, k]
    experts = torch.where(given < 0, logits.topk(K).indices, given)
    return logits, logits.gather(-1, experts).softmax(-1), experts


def forced_model(folder, samples):
    """A model for one forward pass of each sample, in their order."""
    model = float64_model(folder)
    for number, layer in enumerate(model.module.model.layers):
        routes_N = []
        for s in samples:
            tokens = len(s["prompt_ids"]) + len(s["response_ids"])
            given = np.full((tokens, K), -1)
            given[tokens - 1 - len(s["routes"]) : tokens - 1] = np.array(s["routes"]).reshape(-1, LAYERS, K)[:, number]
            routes_N.append(given)
        layer.mlp.gate.forward = partial(forced_gate, layer.mlp.gate, routes_N)
    return model


def routed_plan(folder, **plan):
    plan = layouts.make_plan(folder, "qwen3_moe", **plan)
    (folder / "samples.json").write_text(json.dumps(routed_samples()))
    return plan


def test_forced_routes_equal_plain_transformers(world, tmp_path):
    """Log-probs, loss and every gradient; without the routes log-probs are far off."""
    plan = routed_plan(tmp_path, layouts={"plain": [], "full recompute": layouts.FULL})
    found = {name: one_layout(plan, name) for name in plan["layouts"]}
    samples = routed_samples()
    wanted = reference(tmp_path / "model", found["plain"], samples, forced_model(tmp_path / "model", samples))
    for each in found.values():
        assert each["shared"] > 0
        layouts.check_update(each, wanted)
    (tmp_path / "samples.json").write_text(json.dumps(make_samples()))
    assert (one_layout(plan, "plain")["logp"] - wanted["logp"]).abs().max() > 0.1


@pytest.mark.slow
def test_forced_routes_on_every_layout(fork_server, tmp_path):
    (found,) = layouts.run_worker(fork_server, tmp_path, 4, routed_plan(tmp_path, layouts=LAYOUTS))
    samples = routed_samples()
    given = next(iter(found.values()))
    wanted = reference(tmp_path / "model", given, samples, forced_model(tmp_path / "model", samples))
    for each in found.values():
        layouts.check_update(each, wanted)
