"""The check of the first update: faults that it must find, no bit changed, and no false alarm; of every layout
test_layouts.py shows the last."""

import math
import shutil

import pytest
import torch
from megatron.core.optimizer import optimizer as megatron_optimizer
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
import train_grpo
from config import TrainingError
from support.proof.update import Change, FirstUpdate, Probe, second_step
from tests.conftest import tiny_model, wrap
from tests.step.test_step import EQUAL, build, weights  # noqa: F401, a fixture


@pytest.fixture
def moe(tmp_path) -> str:
    """The override of a model with experts."""
    return f"model.path={tiny_model(tmp_path / 'moe', 'qwen3_moe', tied=False)}"


@pytest.mark.parametrize("sizes", [[1e-9, 0.05, 1e-5, -1e-5], [3e-5, 1e-5, -1e-5], [1e-5, -1e-5]])
def test_a_move_is_made_to_fit(monkeypatch, sizes):
    # A move changes log-probs by 100 times its size; 1e-9 is lost in rounding, so the largest is tried after it.
    monkeypatch.setattr(Probe, "move", lambda _, direction, size: (direction(size), torch.zeros(())))
    monkeypatch.setattr(Probe, "compare", lambda _, up, down, __: Change(0, 0, 0, 1, 0, moved=50 * (up[0] - down[0])))
    probe, tried = Probe([], [], None, [[0.0]], tokens=1, slope2=1.0, nonlinear=0.02, smooth=True), []
    probe.change_along(lambda size: tried.append(size) or [size if abs(size) > 1e-6 else 0.0], sizes[0], shift=1e-3)
    assert tried == pytest.approx(sizes)


# ---------------------------------------------------------------- planted faults; the museum has more


def scale_gradient(monkeypatch, factor: float, piece: str = "") -> None:
    """The gradient of the weights with this piece in their names, times a factor."""

    def scaled(forward_backward, model, *args) -> dict:
        report = forward_backward(model, *args)
        for name, weight in bridge.named_weights(model).items():
            if piece in name:
                weight.main_grad.mul_(factor)
        return report

    wrap(monkeypatch, train_grpo, "forward_backward", scaled)


def train_on_other_micro_batches(monkeypatch) -> None:
    wrap(
        monkeypatch, train_grpo, "forward_backward",
        lambda train, model, optimizer, rows, cfg: train(model, optimizer, [rows[0], *rows[:-1]], cfg),
    )  # fmt: skip


def scale_loss(monkeypatch, factor) -> None:
    """The loss of each micro-batch, times a factor."""

    def scaled(grpo_loss, *args, **kwargs):
        loss, denominator, report = grpo_loss(*args, **kwargs)
        return loss * factor, denominator, report

    wrap(monkeypatch, train_grpo, "grpo_loss", scaled)


def clip_twice(monkeypatch) -> None:
    def twice(clip, *args, **kwargs) -> None:
        clip(*args, **kwargs)
        clip(*args, **kwargs)

    wrap(monkeypatch, megatron_optimizer, "clip_grad_by_total_norm_fp32", twice)


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("plant", "arguments", "message"),
    [
        (scale_gradient, (0.5, ".layers.1."), "the gradient predicts"),
        (scale_gradient, (0, "decoder.layers.1.input_layernorm.weight"),
         r"weights whose gradient is 0, among them decoder\.layers\.1\.input_layernorm\.weight"),
        (train_on_other_micro_batches, (), "the gradient predicts"), (clip_twice, (), "exp_avg of"),
    ],
)  # fmt: skip
def test_a_planted_fault_stops_the_run(build, monkeypatch, moe, plant, arguments, message, experts):  # noqa: F811
    plant(monkeypatch, *arguments)
    run = build("train.lr=0.001", "train.clip_grad=0.05", *([moe] if experts else []))
    with pytest.raises(TrainingError, match=rf"(?s)step 1: the update is not what its formulas say\n.*{message}"):
        train_grpo.train_step(run, 1)


@pytest.mark.parametrize(
    "keys", ["", "model.dtype=bf16", "model.dtype=fp16", "lora.rank=4", pytest.param("experts", marks=pytest.mark.slow)]
)
def test_the_check_changes_no_bit(build, moe, keys):  # noqa: F811
    keys = [moe if keys == "experts" else key for key in keys.split()]
    found = []
    for is_on in ("true", "false"):
        run = build("train.lr=0.01", *keys, f"train.check_update={is_on}")
        metrics, _ = train_grpo.train_step(run, 1)
        assert run.checks.first_update.done == (is_on == "true")
        found.append([metrics["grad_norm"], *weights(run).values()])
    with_it, without = found
    assert with_it[0] == without[0] and all(map(torch.equal, with_it[1:], without[1:]))


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
        train_grpo.train_step(run, 3)


def test_a_later_step_is_compared_with_adamw_again(build, monkeypatch):  # noqa: F811
    """Healthy steps are those of torch's AdamW, which Megatron-core takes here."""
    monkeypatch.setattr("support.proof.update.EVERY", 2)
    run = build("train.lr=0.01", "train.weight_decay=0.2", "train.adam_beta2=0.99")
    for step in (1, 2, 3):
        train_grpo.train_step(run, step)
    assert run.checks.first_update.updates == 3
    train_grpo.train_step(run, 4)
    wrap(monkeypatch, bridge, "optimizer_step", lambda step, optimizer, lr, *more: step(optimizer, lr * 0.9, *more))
    with pytest.raises(TrainingError, match=r"step 5: the update is not .*\n  param of"):
        train_grpo.train_step(run, 5)


@pytest.mark.parametrize("scaled", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_gradient_of_almost_zero_is_no_wrong_gradient(build, tiny, tmp_path, scaled):  # noqa: F811
    """Equal rewards and logits that are nearly equal: the entropy, at its ceiling, changes by third order."""
    shutil.copytree(tiny / "model", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    saved = load_file(file)
    save_file(saved | {scaled: saved[scaled] * 0.03}, file)
    run = build("train.lr=0.01", "algo.entropy_coef=0.01", *EQUAL, f"model.path={tmp_path / 'model'}")
    train_grpo.train_step(run, 1)
    assert run.checks.first_update.compared and run.checks.first_update.done


def test_a_gradient_of_rounding_alone_is_no_wrong_gradient(build):  # noqa: F811
    """Equal rewards and a KL of a reference that is still the policy: the gradient is the rounding of two passes."""
    train_grpo.train_step(build("algo.kl_coef=0.05", "train.updates_per_step=2", "algo.entropy_coef=0", *EQUAL), 1)


def test_a_step_without_a_trained_token_leaves_the_check_to_the_next(build):  # noqa: F811
    """All answers are truncated, and masked."""
    run = build("algo.mask_truncated=true")
    run.engine.model.config.eos_token_id = -1
    train_grpo.train_step(run, 1)
    assert not run.checks.first_update.compared and not run.checks.first_update.done


def test_a_wrong_gradient_is_a_warning_in_bf16(build, monkeypatch, capsys):  # noqa: F811
    scale_gradient(monkeypatch, 2)
    train_grpo.train_step(build("train.lr=0.01", "model.dtype=bf16"), 1)
    assert "warning: step 1: the update is not what its formulas say" in capsys.readouterr().out


def test_a_loss_that_goes_wrong_later_is_found_in_the_step_that_the_seed_draws(build, monkeypatch):  # noqa: F811
    run = build("train.lr=0.01", "train.steps=2")
    train_grpo.train_step(run, 1)
    assert second_step(run.cfg) == 2
    scale_loss(monkeypatch, 2)
    cause = "(?s)moved along the gradient, .*, 2 times that.*the whole gradient is 2 times what it should be"
    with pytest.raises(TrainingError, match=cause):
        train_grpo.train_step(run, 2)


def test_a_loss_of_something_else_is_not_judged_and_said_so(build, monkeypatch, capsys):  # noqa: F811
    """Here it has a learned scale."""
    scale_loss(monkeypatch, torch.ones((), requires_grad=True))
    train_grpo.train_step(build("train.lr=0.01"), 1)
    assert "the loss is not a function of the trained tokens' log-probs and entropies alone" in capsys.readouterr().out


def test_moves_that_rounding_hides_are_said(build, monkeypatch, capsys):  # noqa: F811
    """Neither a token's move nor the loss's change is resolved."""
    hidden = {"noise": math.inf, "bound": math.inf}
    monkeypatch.setattr(Probe, "compare", lambda *args, compare=Probe.compare: compare(*args)._replace(**hidden))
    train_grpo.train_step(build("train.lr=0.01"), 1)
    said = "the gradient of this update was not checked along the gradient, in random direction 1: moves"
    assert said in capsys.readouterr().out
