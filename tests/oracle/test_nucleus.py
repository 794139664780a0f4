"""Replayed cuts of rollout.top_p and top_k: an update with the ids that each token was drawn from is, on every layout,
equal to plain transformers whose other logits are masked; a run's gap to vLLM is rounding."""

import json

import numpy as np
import pytest

from config import LoraConfig, UserError
from grpo.parts.base import versions
from grpo.run.preflight import configuration
from tests.conftest import EXACT, tiny_config
from tests.layout_worker import one_layout
from tests.oracle import layouts
from tests.oracle.reference import make_samples, reference

LAYOUTS = {  # on 4 ranks
    name: layouts.layouts_of("qwen2")[name]
    for name in ("TP4", "TP2·CP2", "PP2·CP2", "TP2·DP2, without SP", "TP2·PP2·VPP2, overlap, full recompute")
}


def cut_samples():
    """The samples of make_samples, each token drawn from 1 to 16 of the 16 ids, in any order."""
    rng = np.random.default_rng(6)
    samples = make_samples()
    for s in samples:
        s["nuclei"] = []
        for token in s["response_ids"]:
            others = rng.permutation(16)[: rng.integers(16)]
            s["nuclei"] += [*others[others != token].tolist(), token, -1]
    return samples


def cut_plan(folder, *overrides, **plan):
    plan = layouts.make_plan(folder, "qwen2", *overrides, **plan)
    (folder / "samples.json").write_text(json.dumps(cut_samples()))
    return plan


def test_a_cut_update_equals_plain_transformers(world, tmp_path):
    """Log-probs, loss and every gradient, of adapters too; with the whole vocabulary log-probs are far off."""
    found = one_layout(cut_plan(tmp_path, layouts={"plain": []}), "plain")
    wanted = reference(tmp_path / "model", found, cut_samples())
    layouts.check_update(found, wanted)
    adapted = one_layout(cut_plan(tmp_path, "lora.rank=8", layouts={"lora": []}), "lora")
    layouts.check_update(adapted, reference(tmp_path / "model", adapted, cut_samples(), lora=LoraConfig(rank=8)))
    whole = one_layout(layouts.make_plan(tmp_path, "qwen2", layouts={"plain": []}), "plain")
    assert (whole["logp"] - wanted["logp"]).abs().max() > 0.1


def test_a_sampler_that_returns_no_nuclei_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "0.26.0")
    keys = ("model.path=m", "data.train=d", "rollout.top_k=5")
    with pytest.raises(
        UserError, match=r"rollout\.top_k=5: vLLM 0\.26\.0 does not say .* or rollout\.max_logp_gap=inf"
    ):
        configuration.check_sampling(tiny_config(*keys))
    configuration.check_sampling(tiny_config(*keys, "rollout.max_logp_gap=inf"))


def test_the_gap_of_a_cut_run_is_rounding(train_forked, tiny):
    """Of adapters too, which are pushed; beside greedy evaluations, of which vLLM returns no nuclei."""
    keys = ("rollout.top_p=0.9", "lora.rank=4", "parallel.tp=2", "train.updates_per_step=2", "algo.kl_coef=0.05")
    small = ("train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.temperature=0.7")
    greedy = (f"data.eval={tiny / 'train.jsonl'}", "train.eval_every=2", "eval.temperature=0")
    run = train_forked(2, *small, *EXACT, *greedy, *keys, code=0)
    assert all(m["logp_gap/max"] < 1e-5 and 1 < m["nucleus/size"] < 16 for m in run.metrics[1:])


@pytest.mark.slow
def test_a_cut_update_on_every_layout(fork_server, tmp_path):
    (found,) = layouts.run_worker(fork_server, tmp_path, 4, cut_plan(tmp_path, layouts=LAYOUTS))
    wanted = reference(tmp_path / "model", next(iter(found.values())), cut_samples())
    for each in found.values():
        layouts.check_update(each, wanted)
