"""Past weights that vLLM samples with, a reference that is taken anew, and both after a resume."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import megatron_bridge as bridge
import train_grpo
from config import TrainingError, UserError
from support import checks, shards, weight_sets
from support.read_config import load_config
from tests.conftest import REPO, read_rows, write_rows
from tests.test_checkpoint import equal, lasting
from tests.test_exact import response_logps
from tests.test_step import build, weights  # noqa: F401, a fixture

FAST = ("train.lr=0.01", "algo.entropy_coef=0")


def settings(**keys: int) -> SimpleNamespace:
    a = SimpleNamespace(kl_coef=float(keys.get("every", 0) > 0), reference_every=keys.get("every", 0))
    return SimpleNamespace(
        algo=SimpleNamespace(**vars(a), reference_on="gpu"), rollout=SimpleNamespace(lag=keys.get("lag", 0))
    )


def test_the_sets_of_each_step_by_hand():
    """A model of one weight, which is s after step s."""
    model, cfg = [torch.nn.Linear(1, 1, bias=False)], settings(lag=3, every=2)
    model[0].weight.data.fill_(0.0)
    sets = weight_sets.initial_sets(model, cfg)
    sampled, references = [], []
    for step in range(1, 8):
        sampled.append(weight_sets.sampling_weights(sets)[0].item())
        weight_sets.move_sets(sets, model, step, cfg)
        references.append(sets["reference"][0].item())
        model[0].weight.data.fill_(float(step))
    assert sampled == [0, 0, 0, 0, 1, 2, 3]  # step s: after step s - 1 - 3
    assert references == [0, 0, 2, 2, 4, 4, 6]
    assert {name: part[0].item() for name, part in sets.items()} == {
        "reference": 6,
        "past_1": 6,
        "past_2": 5,
        "past_3": 4,
    }
    assert weight_sets.sampling_weights({}) is None and weight_sets.initial_sets(model, settings()) == {}


@pytest.mark.parametrize(("lag", "rank"), [(1, 0), (2, 0), (2, 4)])
def test_vllm_samples_with_weights_of_so_many_steps_before(build, tiny, tmp_path, monkeypatch, lag, rank):  # noqa: F811
    """The gap stays that of two computations, the mismatch is that of age; an evaluation has the present weights."""
    write_rows(tmp_path / "eval.jsonl", read_rows(tiny / "train.jsonl")[:2])
    run = build(f"rollout.lag={lag}", f"lora.rank={rank}", f"data.eval={tmp_path / 'eval.jsonl'}", *FAST)
    after, seen = [weights(run)], []  # after[s]: after step s
    generate = run.engine.generate

    def watched(*args):
        seen.append({name: run.engine.model.state_dict()[name].clone() for name in after[0]})
        yield from generate(*args)

    monkeypatch.setattr(run.engine, "generate", watched)
    for step in range(1, 5):
        metrics, _ = train_grpo.train_step(run, step)
        after.append(weights(run))
        train_grpo.evaluate(run)
        sampled, evaluated = seen[-2:]
        assert all(weight.equal(after[max(step - 1 - lag, 0)][name]) for name, weight in sampled.items())
        assert all(weight.equal(after[step][name]) for name, weight in evaluated.items())
        assert metrics["logp_gap/max"] < 1e-5
        assert (metrics["mismatch/k3"] > 1e-6) == (metrics["mismatch/ess"] < 1 - 1e-6) == (step > 1)


def test_a_lost_push_of_past_weights_is_caught(build, monkeypatch):  # noqa: F811
    run = build("rollout.lag=1", *FAST)
    train_grpo.train_step(run, 1)  # and pushes the initial weights once more
    monkeypatch.setattr(train_grpo, "push_weights", lambda *_: None)
    train_grpo.train_step(run, 2)
    with pytest.raises(TrainingError, match="did not take up the last weight push"):
        train_grpo.train_step(run, 3)


def test_the_correction_weighs_the_age_of_the_samples(build, monkeypatch):  # noqa: F811
    """tis: the loss is the mean of -A min(w, bound), w = exp(present - sampling log-prob)."""
    kept, forward_backward = [], train_grpo.forward_backward

    def watched(model, optimizer, micro_batches, cfg):
        kept.append((batches[-1], train_grpo.score(model, batches[-1], cfg)))
        return forward_backward(model, optimizer, micro_batches, cfg)

    batches, credit = [], train_grpo.give_credit
    monkeypatch.setattr(train_grpo, "give_credit", lambda *args: batches.append(credit(*args)) or batches[-1])
    run = build("rollout.lag=2", "algo.correction=tis", "algo.correction_high=1.05", *FAST)
    monkeypatch.setattr(train_grpo, "forward_backward", watched)
    for step in (1, 2, 3):
        metrics, _ = train_grpo.train_step(run, step)
        batch, present_F = kept[-1]
        w_F = (present_F - batch.rollout_logp).exp()
        wanted = (-batch.advantages * w_F.clamp(max=1.05))[batch.mask].mean().item()
        assert metrics["loss/policy"] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert (w_F[batch.mask] > 1.05).any() and (batch.sampler_logp - present_F).abs().max() > 0.01


def test_the_reference_is_taken_anew(build):  # noqa: F811
    run = build("algo.kl_coef=0.05", "algo.reference_every=2", *FAST)
    initial, found = weights(run), []
    for step in range(1, 6):
        metrics, _ = train_grpo.train_step(run, step)
        found.append(metrics["kl/k2"] > 1e-9)
        if step == 2:
            second = weights(run)
    assert found == [False, True, False, True, False]
    with bridge.swapped_weights(run.model, run.sets["reference"]):
        assert not any(
            weight.equal(second[name]) or weight.equal(initial[name]) for name, weight in weights(run).items()
        )


ALL_ON = (
    *FAST, "rollout.lag=2", "algo.kl_coef=0.05", "algo.reference_every=3", "algo.teacher=self", "data.hint_key=answer",
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_goes_on_with_the_same_bits(build, rank):  # noqa: F811
    """Lag, reference and teacher, of adapters too; from a checkpoint of a step at which no set is an initial one."""
    keys = (*ALL_ON, f"lora.rank={rank}")
    straight = build(*keys)
    wanted = []
    for step in range(1, 8):
        wanted.append(train_grpo.train_step(straight, step)[0])
        if step == 4:
            train_grpo.save(straight, step)
            path = straight.writer.finish()
    trained, sets = weights(straight), straight.sets
    bridge.mpu.destroy_model_parallel()

    resumed = build(*keys, checkpoint=(path, 4))
    found = [train_grpo.train_step(resumed, step)[0] for step in range(5, 8)]
    lasting = ("loss/total", "kl/ref", "kl/teacher", "grad_norm", "reward/mean", "mismatch/k3", "logp_gap/max")
    assert [[m[name] for name in lasting] for m in found] == [[m[name] for name in lasting] for m in wanted[4:]]
    assert all(weight.equal(trained[name]) for name, weight in weights(resumed).items())
    assert resumed.sets.keys() == sets.keys() == {"reference", "past_1", "past_2"}
    assert all(torch.equal(a, b) for name in sets for a, b in zip(sets[name], resumed.sets[name], strict=True))
    keys = {key.partition(".")[0] for key in shards.index_shards(path)}
    assert keys == {"param", "exp_avg", "exp_avg_sq", "reference", "past_1", "past_2"}


@pytest.mark.slow
def test_a_real_run_goes_on_with_the_same_bits_and_on_another_layout(train, tiny, tmp_path):
    """What vLLM sampled with was in truth the export of so many steps before, also where weights lie spread."""
    keys = (
        "rollout.prompts_per_step=4", "rollout.group_size=8", "train.warmup_steps=0", "train.save_every=2",
        "megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true", "train.export_every=1", *ALL_ON,
    )  # fmt: skip
    straight = train(2, "train.steps=4", *keys, out=tmp_path / "straight")
    assert straight.code == 0, straight.text
    for step, folder in {3: tiny / "model", 4: straight.out / "hf/step_000001"}.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in straight.rollouts(step):
            logp = response_logps(model, row, temperature=1.0)
            assert (logp - torch.tensor(row["rollout_logp"])).abs().max() < 1e-4
    for layout in ([], ["parallel.pp=2"]):
        out = tmp_path / f"resumed{len(layout)}"
        resumed = train(
            2, "train.steps=4", *keys, *layout, f"resume={straight.out}/checkpoints/step_000002", out=out
        )  # fmt: skip
        assert resumed.code == 0, resumed.text
        if not layout:
            assert lasting(resumed.metrics) == lasting(straight.metrics)[2:]
            assert equal(resumed.weights(4), straight.weights(4))
        for was, now in zip(straight.metrics[2:], resumed.metrics, strict=True):
            for key in ("loss/total", "grad_norm", "kl/ref", "kl/teacher", "mismatch/k3", "reward/mean"):
                assert now[key] == pytest.approx(was[key], rel=1e-4, abs=1e-6), (key, was[key], now[key])


def test_without_the_keys_a_checkpoint_has_what_it_had(build):  # noqa: F811
    run = build("algo.kl_coef=0.05")
    train_grpo.save(run, 1)
    path = run.writer.finish()
    assert {key.partition(".")[0] for key in shards.index_shards(path)} == {"param", "exp_avg", "exp_avg_sq"}


def test_what_a_checkpoint_does_not_have_is_refused():
    def check(was: dict, **now: int) -> None:
        weight_sets.check_resumed({"rollout": was, "algo": was}, settings(**now), Path("step_000004"))

    check({}, every=3), check({"lag": 4, "reference_every": 3}, lag=2, every=9)
    with pytest.raises(UserError, match=r"rollout\.lag=2, but step_000004 has no weights of more than 1 steps before"):
        check({"lag": 1}, lag=2)
    off = settings()
    off.algo.kl_coef = 0.1
    with pytest.raises(UserError, match=r"algo\.reference_every=0, but the reference in step_000004 is no longer"):
        weight_sets.check_resumed({"rollout": {}, "algo": {"reference_every": 5}}, off, Path("step_000004"))


def test_a_reference_that_is_not_there_is_not_taken_anew(tiny):
    cfg = load_config(str(REPO / "configs/tiny.yaml"), [f"model.path={tiny}", "algo.reference_every=5"])
    with pytest.raises(UserError, match=r"algo\.reference_every=5, but algo\.kl_coef=0 keeps no reference"):
        checks.check_config(cfg, 1)
