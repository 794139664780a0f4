"""The check of the first update: no false alarm on any layout, no bit changed, and faults that it must find."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
import train_grpo
from config import TrainConfig, TrainingError
from support.proof import update
from support.proof.adam import adamw
from support.proof.update import FirstUpdate, Probe
from tests.test_layouts import DENSE_LAYOUTS, LAYOUTS, MOE_LAYOUTS, make_plan
from tests.test_step import build  # noqa: F401, a fixture

BASE = ("train.lr=1e-3", "train.weight_decay=0.1", "train.clip_grad=0.05")  # which clips
FAULTS = {  # fault of tests/update_worker.py → what the message has to say
    "summed_twice": "moved along the gradient",
    "scaled_by_accumulation": "moved along the gradient",
    "divided_by_positions": "moved along the gradient",
    "not_reduced": "the gradient predicts",
    "another_micro_batch": "the gradient predicts",
    "norms_missing": "weights whose gradient is 0",
    "one_norm_missing": "decoder.layers.2.input_layernorm.weight",
    "layer_halved": "the gradient predicts",
    "clipped_twice": "exp_avg of",
    "stale_lr": "param of",
}
MISSED = {  # faults below the bound: bf16 rounds, and a move changes which experts are chosen
    ("qwen3_moe", "fp32"): set(),
    ("qwen2", "bf16"): {"layer_halved"},
    ("qwen3_moe", "bf16"): {"layer_halved", "not_reduced", "divided_by_positions"},
}


def run_cases(server, folder, nproc: int, family: str, cases: dict[str, dict], *common: str) -> dict[str, dict]:
    """What tests/update_worker.py found in each case."""
    plan = make_plan(folder, family, *BASE, *common)
    file, out = folder / "cases.json", folder / "found.json"
    file.write_text(json.dumps({**plan, "common": plan["overrides"], "cases": cases, "out": str(out)}))
    code = server.run(folder / "printed.txt", "tests/update_worker.py", str(file), nproc=nproc, seconds=1800)
    assert code == 0, (folder / "printed.txt").read_text()
    return json.loads(out.read_text())


def test_adamw_is_that_of_a_hand_computed_step_and_of_torch():
    train = TrainConfig(adam_beta1=0.9, adam_beta2=0.99, lr=0.1, weight_decay=0.2)
    numbers = {"param": 2.0, "exp_avg": 0.5, "exp_avg_sq": 0.04}
    state = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
    found = adamw(state, torch.tensor([1.0], dtype=torch.float64), 1, eps=0.0, train=train)
    # mean 0.9 · 0.5 + 0.1 = 0.55, over 1 - 0.81; square 0.99 · 0.04 + 0.01 = 0.0496, over 1 - 0.9801
    step = 0.1 * (0.55 / 0.19) / math.sqrt(0.0496 / 0.0199)
    assert found["exp_avg"].item() == pytest.approx(0.55, rel=1e-12)
    assert found["exp_avg_sq"].item() == pytest.approx(0.0496, rel=1e-12)
    assert found["param"].item() == pytest.approx(2.0 * 0.98 - step, rel=1e-12)

    weight = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.2)
    state = {"param": weight.detach().clone(), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    for steps, gradient in enumerate(([0.1, -3.0], [0.2, 1e-6], [-5.0, 0.0])):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        state = adamw(state, weight.grad, steps, eps=1e-8, train=train)
        assert torch.allclose(state["param"], weight.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("faults", [("not_reduced", "clipped_twice"), pytest.param(FAULTS, marks=pytest.mark.slow)])
def test_a_planted_fault_is_found_and_a_healthy_update_keeps_its_bits(fork_server, tmp_path, faults):
    """On two replicas, with old log-probs too."""
    cases = {"none": {"keys": []}, "old": {"keys": [], "old": True}}
    cases |= {fault: {"keys": [], "fault": fault} for fault in faults}
    found = run_cases(fork_server, tmp_path, 2, "qwen2", cases)
    for name in ("none", "old"):
        assert found[name]["error"] == "" and found[name]["same"], found[name]
    for fault in faults:
        error = found[fault]["error"]
        assert "the update is not what its formulas say" in error and FAULTS[fault] in error, (fault, found[fault])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), MISSED)
def test_what_is_found_in_bf16_and_with_experts(fork_server, tmp_path, family, dtype):
    cases = {fault: {"keys": [], "fault": fault} for fault in FAULTS}
    found = run_cases(fork_server, tmp_path, 2, family, cases, f"model.dtype={dtype}")
    assert {fault for fault, case in found.items() if not case["error"]} == MISSED[family, dtype], found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_no_layout_gives_a_false_alarm_or_changes_a_bit(fork_server, tmp_path, family, dtype):
    layouts = LAYOUTS | (MOE_LAYOUTS if family == "qwen3_moe" else DENSE_LAYOUTS)
    cases = {layout: {"keys": keys} for layout, keys in layouts.items()}
    cases["LoRA"] = {"keys": ["lora.rank=4"]}
    cases["LoRA, trained"] = {"keys": ["lora.rank=4"], "trained_adapters": True}
    found = {}
    for name, case in cases.items():  # each in processes of its own: together they take twice as long
        found |= run_cases(fork_server, tmp_path, 4, family, {name: case}, f"model.dtype={dtype}")
    wrong = {name: case for name, case in found.items() if case["error"] or not case["same"]}
    assert not wrong


def test_a_step_is_watched_once_and_after_a_resume_its_state_is_compared(build):  # noqa: F811
    run = build("train.lr=0.01")
    train_grpo.train_step(run, 1)
    assert run.checks.first_update.done and run.checks.first_update.updates == 1
    run.checks.first_update = FirstUpdate(run.model, run.optimizer, None)
    run.checks.first_update.updates = 3
    with pytest.raises(TrainingError, match=r"Adam's step count of .* is 1, though 3 updates were made"):
        train_grpo.train_step(run, 2)
    run.checks.first_update = FirstUpdate(run.model, run.optimizer, None)
    run.checks.first_update.updates = 1
    for part in run.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg_sq"].zero_()
    with pytest.raises(TrainingError, match="moments are all 0 after 1 updates"):
        train_grpo.train_step(run, 2)


def test_a_later_step_is_compared_with_adamw_again(build, monkeypatch):  # noqa: F811
    monkeypatch.setattr(update, "EVERY", 2)
    run = build("train.lr=0.01")
    for step in (1, 2, 3):
        train_grpo.train_step(run, step)
    assert run.checks.first_update.updates == 3
    train_grpo.train_step(run, 4)
    step = bridge.optimizer_step
    monkeypatch.setattr(bridge, "optimizer_step", lambda optimizer, lr, offloaded: step(optimizer, lr * 0.9, offloaded))
    with pytest.raises(TrainingError, match=r"step 5: the update is not .*\n  param of"):
        train_grpo.train_step(run, 5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scaled", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_gradient_of_almost_zero_is_no_wrong_gradient(build, tiny, tmp_path, scaled, dtype):  # noqa: F811
    """Equal rewards and logits that are nearly equal: the entropy, at its ceiling, changes by third order."""
    shutil.copytree(tiny / "model", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    save_file(weights | {scaled: weights[scaled] * 0.03}, file)
    equal = ("reward.default=length", "reward.options={length: {limit: 1000}}", "algo.entropy_coef=0.01")
    run = build("train.lr=0.01", *equal, f"model.path={tmp_path / 'model'}", f"model.dtype={dtype}")
    train_grpo.train_step(run, 1)
    assert run.checks.first_update.compared and run.checks.first_update.done


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_of_rounding_alone_is_no_wrong_gradient(build, dtype):  # noqa: F811
    """Equal rewards and a KL of a reference that is still the policy: the gradient is the rounding of two passes."""
    equal = ("reward.default=length", "reward.options={length: {limit: 1000}}", "algo.entropy_coef=0")
    run = build("algo.kl_coef=0.05", "train.updates_per_step=2", f"model.dtype={dtype}", *equal)
    train_grpo.train_step(run, 1)


def test_a_step_without_a_trained_token_leaves_the_check_to_the_next(build):  # noqa: F811
    """All answers are truncated, and masked."""
    run = build("algo.mask_truncated=true")
    run.engine.model.config.eos_token_id = -1
    train_grpo.train_step(run, 1)
    assert not run.checks.first_update.compared and not run.checks.first_update.done


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_gradient_stops_in_fp32_and_warns_in_bf16(build, monkeypatch, capsys, dtype):  # noqa: F811
    forward_backward = train_grpo.forward_backward

    def doubled(model, *args):
        report = forward_backward(model, *args)
        for weight in model[0].parameters():
            weight.main_grad.mul_(2)
        return report

    monkeypatch.setattr(train_grpo, "forward_backward", doubled)
    run = build("train.lr=0.01", f"model.dtype={dtype}")
    if dtype == "fp32":
        with pytest.raises(TrainingError, match=r"the gradient predicts .*, 2 times that"):
            train_grpo.train_step(run, 1)
    else:
        train_grpo.train_step(run, 1)
        assert "warning: step 1: the update is not what its formulas say" in capsys.readouterr().out


def test_a_loss_of_something_else_is_not_judged_and_said_so(build, monkeypatch, capsys):  # noqa: F811
    grpo_loss = train_grpo.grpo_loss
    scale = torch.ones((), requires_grad=True)

    def learned(*args, **kwargs):
        loss, denominator, report = grpo_loss(*args, **kwargs)
        return loss * scale, denominator, report

    monkeypatch.setattr(train_grpo, "grpo_loss", learned)
    run = build("train.lr=0.01")
    train_grpo.train_step(run, 1)
    assert "the loss is not a function of the trained tokens' log-probs and entropies alone" in capsys.readouterr().out


def test_moves_that_rounding_hides_are_said(build, monkeypatch, capsys):  # noqa: F811
    """Neither a token's move nor the loss's change is resolved."""
    compare = Probe.compare
    monkeypatch.setattr(Probe, "compare", lambda *args: compare(*args)._replace(noise=math.inf, bound=math.inf))
    train_grpo.train_step(build("train.lr=0.01"), 1)
    said = "the gradient of the first update was not checked along the gradient, in random direction 1, in random"
    assert said in capsys.readouterr().out
