"""Steps of a run in this process alone: real Megatron-core, real graders, and plain transformers in vLLM's place."""

import cProfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import megatron_bridge as bridge
import train_grpo
from config import TrainingError, UserError
from grpo.parts.model import fp16
from grpo.parts.model.offload import state_shards
from grpo.parts.model.optimizer_state import optimizer_steps, restore, sharded_state
from tests.conftest import REPO, tiny_model, wrap
from tests.layout_worker import equal
from tests.oracle.layouts import FULL
from tests.step.one_rank import EQUAL, PlainEngine, weights


class FlippingEngine(PlainEngine):
    """Every third token of a sequence goes to the best and the third best expert instead of the two best. The answers
    bring their routes if the engine is built to return them, as vLLM's do."""

    def __init__(self, *args):
        super().__init__(*args)
        *_, self.return_routes = args
        self.routes = {}  # layer → experts of the last forward pass, [tokens, k]
        for number, layer in enumerate(self.model.model.layers):
            layer.mlp.gate.forward = partial(self.route, number, layer.mlp.gate)

    def route(self, number, gate, hidden):
        logits = hidden @ gate.weight.T
        experts = logits.topk(3).indices
        experts = torch.where(torch.arange(len(hidden))[:, None] % 3 == 0, experts[:, ::2], experts[:, :2])
        self.routes[number] = experts
        return logits, logits.gather(-1, experts).softmax(-1), experts

    def answer(self, *args):
        found = super().answer(*args)  # its last pass was over all tokens but the last
        routes = torch.stack([*self.routes.values()], dim=1).to(torch.uint8).numpy()
        if self.return_routes:
            found.trace.replay["routes"] = routes
        return found


def test_replayed_routes_close_the_gap_of_an_engine_that_routes_otherwise(build, monkeypatch, tmp_path):
    tiny_model(tmp_path / "moe", "qwen3_moe", tied=False, num_experts=8)
    monkeypatch.setattr(train_grpo, "Engine", FlippingEngine)
    keys = (f"model.path={tmp_path / 'moe'}", "train.epochs_per_step=2", "algo.kl_coef=0.05", "train.lr=0.01")
    keys += ("train.share_prompts=false",)
    metrics, samples, _ = train_grpo.train_step(build(*keys, *FULL, "algo.replay_routes=true"), 1)
    flipped = np.mean([i % 3 == 0 for sample in samples for i in range(sample.positions)])
    assert metrics["logp_gap/max"] < 1e-5 and metrics["routes/missing_frac"] == 0
    assert metrics["routes/differ_frac"] == pytest.approx(flipped, abs=1e-9)
    assert metrics["kl/ref"] > 1e-4  # the reference goes its own way, where no route was flipped
    with pytest.raises(TrainingError, match="trainer and vLLM disagree"):
        train_grpo.train_step(build(*keys), 1)


def test_a_push_that_is_lost_is_caught(build, monkeypatch):
    run = build("train.lr=0.01")
    monkeypatch.setattr(train_grpo, "push_weights", lambda *_: None)
    metrics, *_ = train_grpo.train_step(run, 1)
    assert metrics["logp_gap/max"] < 1e-5
    with pytest.raises(TrainingError, match="did not take up the last weight push"):
        train_grpo.train_step(run, 2)


def test_updates_that_are_no_numbers_are_skipped(build, monkeypatch, capsys):
    run = build("train.max_skipped=2")

    def with_nan(group_advantages, *args):
        found = group_advantages(*args)
        found[3] = np.nan
        return found

    before = weights(run)
    with monkeypatch.context() as broken:
        wrap(broken, train_grpo, "group_advantages", with_nan)
        metrics, *_ = train_grpo.train_step(run, 1)
    assert metrics["update/skipped"] == 1 and equal(before, weights(run))
    assert "1 in a row, the run stops at train.max_skipped=2" in capsys.readouterr().out
    metrics, *_ = train_grpo.train_step(run, 2)
    assert metrics["update/skipped"] == 0 and not equal(before, weights(run))
    wrap(monkeypatch, train_grpo, "group_advantages", with_nan)
    train_grpo.train_step(run, 3)
    with pytest.raises(TrainingError, match=r"2 in a row, the run stops at train\.max_skipped=2"):
        train_grpo.train_step(run, 4)


FP16 = ("model.dtype=fp16", "rollout.max_logp_gap=inf", "train.max_skipped=1", "train.lr=0.01")


def test_an_overflow_skips_the_update_and_halves_the_loss_scale(build, capsys):
    """As often as it takes, which is no error; then the run trains."""
    run, before, scales = build(*FP16, f"megatron.initial_loss_scale={2**15}"), None, []
    for step in range(1, 12):
        before = weights(run)
        metrics, *_ = train_grpo.train_step(run, step)
        scales.append(metrics["loss_scale"])
        moved = not equal(before, weights(run))
        assert moved == (metrics["update/overflow"] == 0) == (metrics["update/skipped"] == 0)
        if moved:
            break

    assert moved and len(scales) > 1 and scales == [2.0 ** (15 - n) for n in range(len(scales))]
    assert f"overflowed: update skipped, loss scale 32768 → {scales[1]:g}" in capsys.readouterr().out

    state = fp16.scaler_state(run.optimizer)
    assert (state["scale"], state["growth_tracker"]) == (scales[-1], 1)
    fp16.set_scaler_state(run.optimizer, {**state, "scale": 4.0})
    assert fp16.scaler_state(run.optimizer) == {**state, "scale": 4.0} and fp16.loss_scale(run.optimizer) == 4


def test_with_hysteresis_a_later_overflow_halves_the_loss_scale(build, capsys):
    run = build(*FP16, "megatron.initial_loss_scale=1048576", "megatron.hysteresis=2")
    for step in (1, 2):
        assert train_grpo.train_step(run, step)[0]["update/overflow"] == 1
    text = capsys.readouterr().out
    assert "loss scale 1.04858e+06 → 1.04858e+06" in text and "loss scale 1.04858e+06 → 524288" in text


@pytest.mark.parametrize(
    "keys, end",
    [
        (["megatron.loss_scale=1048576"], "1 in a row"),
        (["megatron.initial_loss_scale=1048576", "megatron.min_loss_scale=1048576", "train.max_skipped=9"], "no lower"),
    ],
)
def test_an_overflow_that_no_lower_scale_can_end_stops_the_run(build, keys, end):
    run = build(*FP16, *keys)
    found = r"a gradient is NaN or infinite; fp16 .*loss scale 1.04858e\+06.*try model.dtype=bf16"
    with pytest.raises(TrainingError, match=f"{found}.*{end}"):
        train_grpo.train_step(run, 1)


def test_activations_that_overflow_stop_the_run_with_the_layer(build):
    run = build(*FP16)
    for name in ("linear_fc1", "linear_fc2"):
        bridge.named_weights(run.model)[f"decoder.layers.1.mlp.{name}.weight"].data.mul_(10000)
    with pytest.raises(TrainingError, match=r"the loss is nan, first in the output of layer 2; fp16 holds"):
        train_grpo.train_step(run, 1)


@pytest.fixture
def repeatable(monkeypatch):
    """Kernels of a GPU add up in one order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_what_leaves_while_vllm_samples_comes_back_the_same(repeatable, build):
    """Two steps with two updates each; what a checkpoint holds after them, and a resume reads; that it was away."""
    bf16 = ("model.dtype=bf16", "train.updates_per_step=2", "algo.kl_coef=0.05", "rollout.max_logp_gap=inf")
    found = {}
    for offload, reference in (("none", "gpu"), ("grads", "gpu"), ("optimizer", "host")):
        where = (f"train.offload={offload}", f"algo.reference_on={reference}")
        run = build(*bf16, *where)
        metrics = [train_grpo.train_step(run, step)[0] for step in (1, 2)]
        buffers = [buffer for chunk in run.model for buffer in chunk.buffers]
        assert all((buffer.grad_data.untyped_storage().size() == 0) == (offload != "none") for buffer in buffers)
        assert all(hasattr(shard, "host") == (offload == "optimizer") for shard in state_shards(run.optimizer))
        saved = sharded_state(run.model, run.optimizer, loading=False)
        losses = [[m[name] for name in ("loss/total", "kl/ref", "grad_norm", "reward/mean")] for m in metrics]
        found[offload] = (losses, weights(run), {key: part.data for key, part in saved.items()})

    losses, trained, saved = found["none"]
    assert all(loss[2] > 0 for loss in losses) and len(saved) > 20
    for other in ("grads", "optimizer"):
        assert found[other][0] == losses
        assert equal(found[other][1], trained) and equal(found[other][2], saved)

    # A resume reads the same.
    train_grpo.save(run, 2)
    checkpoint = run.writer.finish()
    run = build(*bf16, *where)
    assert all(hasattr(shard, "host") for shard in state_shards(run.optimizer))
    restore(checkpoint, run.model, run.optimizer)
    train_grpo.push_weights(run)
    read = sharded_state(run.model, run.optimizer, loading=False)
    assert equal({key: part.data for key, part in read.items()}, saved) and equal(trained, weights(run))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_step_without_a_gradient_changes_nothing_and_says_so(build, capsys, entropy_coef):
    """Every group's rewards are equal. Without KL or entropy in the loss Adam would move by momentum alone."""
    run = build("train.lr=0.01", f"algo.entropy_coef={entropy_coef}", "algo.max_rounds=2", *EQUAL)
    before = weights(run)
    metrics, samples, _ = train_grpo.train_step(run, 1)
    assert metrics["groups/zero_std_frac"] == 1 and metrics["groups/rounds"] == 2 and len(samples) == 32
    assert metrics["logp_gap/max"] < 1e-5 and run.guard.skipped == 0  # the update was computed, and nothing is NaN
    moved = not equal(before, weights(run))
    said = "no gradient (equal rewards in every group" in capsys.readouterr().out
    found = (metrics["grad_norm"] > 0, metrics["update/skipped"], optimizer_steps(run.optimizer), moved, said)
    assert found == ((True, 0, 1, True, False) if entropy_coef else (False, 1, 0, False, True))


def test_a_reward_that_raises_stops_the_run_with_its_row(build, tmp_path):
    (tmp_path / "broken.py").write_text("def f(text, answer, row):\n    return row['bonus']\n")
    run = build(f"reward.custom={tmp_path / 'broken.py'}:f")
    with pytest.raises(UserError) as error:
        train_grpo.train_step(run, 1)
    assert "the reward of source 'reverse' failed: KeyError: 'bonus' (broken.py, line 2)" in str(error.value)
    assert "row: {'prompt': '" in str(error.value) and "16 of 16 samples failed" in str(error.value)


def test_budgets_reach_their_own_phase(build, monkeypatch):
    cut = mock.Mock(side_effect=train_grpo.to_micro_batches)
    monkeypatch.setattr(train_grpo, "to_micro_batches", cut)
    budgets = ("train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=48")
    train_grpo.train_step(build("algo.kl_coef=0.1", "train.updates_per_step=2", *budgets), 1)
    # Old and reference log-probs; then two updates, and at the first the rounding of eight answers.
    packed = [(len(samples), max_tokens) for _, samples, max_tokens, _ in (call.args for call in cut.mock_calls)]
    assert packed == [(16, 48), (16, 48), (8, 64), (8, 48), (8, 48), (8, 64)]


# The files of grpo/ that a default step on a CPU does not enter, whatever folder they are in.
OFF = {"gdpo", "lora", "mixing", "nucleus", "offload", "routes", "schedule", "teacher", "turns"}


def test_a_default_step_enters_no_capability_that_is_off(build):
    """In its main thread, of the code in the script, beside it and in grpo/."""
    files = {*REPO.glob("*.py"), *REPO.glob("grpo/**/*.py")}
    assert {path.stem for path in files} >= OFF, "a file that is renamed is renamed in OFF too"
    profile = cProfile.Profile()
    profile.runcall(train_grpo.train_step, build(), 1)
    codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]  # a text is a built-in's
    entered = {(Path(code.co_filename).resolve(), code.co_qualname) for code in codes}
    assert {"train_grpo", "packing"} <= {path.stem for path, _ in entered if path in files}  # the profile sees both
    off = sorted(f"{path}: {function}" for path, function in entered if path in files and path.stem in OFF)
    assert not off, "a default step runs functions of capabilities that are off:\n" + "\n".join(off)
