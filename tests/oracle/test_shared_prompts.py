"""Answers that share their prompt's positions: no leak between them, and the same update as without sharing."""

from dataclasses import replace

import pytest
import torch

import train_grpo
from tests.conftest import build_model, tiny_config
from tests.layout_worker import one_layout
from tests.oracle.layouts import make_model, make_plan, whole_error
from tests.oracle.reference import make_samples


def score(batch, folder):
    """Log-probs of the batch under the model of `folder`, all of it in one row."""
    cfg = tiny_config(f"model.path={folder}", "data.train=unused", "train.logprob_max_tokens_per_micro_batch=4096")
    return train_grpo.score(build_model(cfg), batch, cfg)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_an_answer_does_not_see_the_others(world, tmp_path, family):
    """With another answer in one place of the row, all other log-probs are the same bit for bit."""
    make_model(tmp_path, family)
    samples = [train_grpo.Sample(**sample) for sample in make_samples()]
    changed = [*samples]
    changed[5] = replace(samples[5], response_ids=(samples[5].response_ids + 1) % 16)
    before, after = (score(train_grpo.flatten(each), tmp_path) for each in (samples, changed))
    own_F = train_grpo.flatten(samples).seq_id == 5
    assert torch.equal(before[~own_F], after[~own_F])
    assert (before[own_F] - after[own_F]).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "logps", "gradients"), [("fp32", 1e-5, 5e-6), ("bf16", 0.05, 0.02)])
def test_sharing_changes_no_update(world, tmp_path, dtype, logps, gradients):
    layouts = {"on": [], "off": ["train.share_prompts=false"]}
    plan = make_plan(tmp_path, "llama", dtype=dtype, layouts=layouts)
    on, off = (one_layout(plan, name) for name in layouts)
    assert on["shared"] > 0 and off["shared"] == 0
    assert (on["logp"] - off["logp"]).abs().max() < logps
    assert whole_error(on, off) < gradients


def test_the_balancing_loss_of_experts_turns_sharing_off():
    cfg = tiny_config("model.path=m", "data.train=d")
    assert cfg.shares_prompts and not cfg.model_copy(update={"megatron": {"moe_aux_loss_coeff": 0.1}}).shares_prompts
