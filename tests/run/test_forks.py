"""The patches in recipes/ apply to the sources as they are, and run. The patches in docs/exercises/ apply.

They apply with one line of context, so that edits nearby and line numbers do not matter. In a fork whose script differs
from upstream's, a patch that does not apply is skipped (docs/forking.md says how a fork is recognized).
"""

import dataclasses
import math
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_bridge as bridge
from oracle.models import Model, read_weights
from rollout import Trace
from tests.compare_runs import lasting
from tests.conftest import REPO, read_rows, tiny_config, write_rows
from tests.forks import EXERCISES, PATCHES, apply, changed_files, load, server_of, train_fork
from tests.layout_worker import equal


@pytest.mark.parametrize("name", PATCHES | EXERCISES)
def test_a_patch_applies(name, tmp_path):
    apply(name, tmp_path / "fork")


def keys_of(name):
    """The keys of the run that the lines before the diff name."""
    run = re.search(r'make demo ARGS="(.*)"', PATCHES[name].read_text())
    return run[1].split() if run else []


SCRIPT_ALONE = [name for name, path in PATCHES.items() if changed_files(path.read_text()) == ["train_grpo.py"]]


@pytest.mark.parametrize("name", SCRIPT_ALONE)
def test_a_patched_script_is_rehearsed(name, fork):
    fork(name).rehearse(tiny_config(*keys_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PATCHES.keys() - {*SCRIPT_ALONE, "critic", "stale_samples"}))
def test_patched_sources_dry_run(name, tiny, tmp_path):
    """In a process of their own, since the patch changes more than the script; two more are trained with."""
    apply(name, tmp_path / "fork")
    run = [tmp_path / "fork/train_grpo.py", "--config", "configs/tiny.yaml", "--dry-run", *keys_of(name)]
    inputs = [f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}"]
    done = subprocess.run([sys.executable, *run, *inputs], cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_patch_is_on_a_page():
    pages = (REPO / "docs/forking.md").read_text() + (REPO / "docs/recipes.md").read_text()
    assert sorted(re.findall(r"\(\.\./recipes/(\w+)\.patch\)", pages)) == list(PATCHES)


# ---------------------------------------------------------------- worked by hand


def test_clip_cov_by_hand(fork):
    module = fork("clip_cov")
    samples = [module.Sample(0, [1], [2, 3], logp, True, "", "") for logp in ([-1.0, -2.0], [-3.0, -4.0])]
    batch = dataclasses.replace(module.flatten(samples), advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    # Log-probs less their mean: 1.5, 0.5, -0.5, -1.5; so the products are 1.5, 0.5, 0.5, 1.5.
    assert module.clip_cov(batch, share=0.5).tolist() == [0, 1, -1, 0]
    first = dataclasses.replace(batch, advantages=torch.tensor([2.0, 1.0, -1.0, -1.0]))
    assert module.clip_cov(first, share=0.0).tolist() == [0, 1, -1, -1]


def test_the_policys_likeliest_tokens_by_hand(world, tmp_path, monkeypatch):
    """p = (1/2, 1/4, 1/8, 1/8) and q = (1/8, 1/8, 1/4, 1/2). The policy's two likeliest tokens are told apart, so the
    rest has 1/4 of p and 3/4 of q."""
    apply("student_top_k", tmp_path / "fork")
    patched = load("patched", tmp_path / "fork/grpo/parts/model/divergence.py", monkeypatch)
    bridge.init_model_parallel(tiny_config().parallel, seed=0)

    logits, other = (torch.tensor([values]).log() for values in ([4.0, 2, 1, 1], [1.0, 1, 2, 4]))
    known = patched.Known(*(torch.tensor([value]) for value in (0.0, math.log(8), 0.0, math.log(8))))
    how = patched.OtherModel(None, None, False, kind="reverse", top_k=2)
    group = bridge.mpu.get_tensor_model_parallel_group()
    found, _ = patched.diverge(how, logits, other, known, 1.0, group)
    wanted = 1 / 2 * math.log(4) + 1 / 4 * math.log(2) + 1 / 4 * math.log(1 / 3)
    assert found.item() == pytest.approx(wanted, abs=1e-6)


def test_the_optimal_baseline_by_hand(fork):
    advantages = fork("opo").group_advantages
    # Rewards 1, 0, 0, 3 over 1, 2, 1, 4 tokens: baseline (1 + 12) / 8.
    got = advantages(np.array([1.0, 0, 0, 3]), np.full(4, 5), "opo", np.array([1, 2, 1, 4]))
    np.testing.assert_allclose(got, [-5 / 8, -13 / 8, -13 / 8, 11 / 8], rtol=1e-12)
    # A group that is left out of the loss, with no trained token, has a baseline too.
    assert advantages(np.array([1.0, 0]), np.zeros(2), "opo", np.array([0, 0])).tolist() == [1, 0]


def test_the_advantages_and_the_loss_of_a_critic_by_hand(fork):
    critic = fork("critic").critic
    rewards = np.array([0, 0, 2.0, 1])
    values = np.array([0.5, 1, -1, 3])
    samples = np.array([0, 0, 0, 1])
    # gamma 1/2, lambda 1/2. Last token: 2 + 1 = 3. Before it: 0 - 1/2 - 1 = -3/2, and 3/4 more: -3/4. First: 0 + 1/2 -
    # 1/2 = 0, and -3/16 more. The other answer: 1 - 3.
    assert critic.generalized_advantages(rewards, values, samples, 0.5, 0.5).tolist() == [-3 / 16, -3 / 4, 3, -2]
    # Old values 0, returns 1, clip 1/2: 1/4 is within, 2 is held at 1/2, and the larger square counts; weights 1 and 2.
    mb = SimpleNamespace(values=torch.zeros(1, 2), returns=torch.ones(1, 2), weights=torch.tensor([[1.0, 2]]))
    loss, tokens, _ = critic.value_loss(mb, torch.tensor([0.25, 2]), None, clip=0.5)
    assert (loss.item(), tokens.item()) == (0.75**2 / 2 + 2 * 1 / 2, 2)


def test_the_credit_of_a_critic_by_hand(fork):
    """A prompt's tokens and an environment's have no values; the reward is at the last token."""
    module = fork("critic")
    talk = module.Sample(0, [1, 1], [2, 3, 2], [-1.0, 0, -1], True, "", "", Trace(turns=[1, 1, 1]), reward=1.25)
    short = module.Sample(0, [1], [2], [-1.0], False, "", "", reward=0.5)
    batch, logp = module.flatten([talk, short]), torch.tensor([9, 0.5, 9, -1.5, 0.5])
    assert batch.mask.tolist() == [False, True, False, True, True]
    added = [("values", torch.Tensor, None), ("returns", torch.Tensor, None)]  # as in grpo/step of the fork
    forked = dataclasses.make_dataclass("Batch", added, bases=(module.Batch,), frozen=True, kw_only=True)
    known = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    known |= {"values": torch.tensor([9.0, 1, 9, 2, 3]), "old_logp": logp, "ref_logp": logp - 0.25}
    algo = SimpleNamespace(advantage="gae", gae_gamma=1, gae_lambda=1, kl_coef=1, kl_in="reward", kl="k1")
    got = module.add_advantages([talk, short], forked(**known), algo)
    # KL costs each sampled token 1/4. The talk's last one then gets 1, its first that less 1/4; the other 1/4.
    assert got.returns.tolist() == [0, 0.75, 0, 1, 0.25]
    # Less the values: -1/4, -1, -11/4, of mean -4/3; the environment's token has the advantage of its step.
    white = (np.array([-0.25, -1, -2.75]) + 4 / 3) / np.std([-0.25, -1, -2.75], ddof=1)
    np.testing.assert_allclose(got.advantages, white[[0, 0, 0, 1, 2]], rtol=1e-6)
    np.testing.assert_allclose(talk.advantages, white[[0, 0, 1]], rtol=1e-6)
    assert talk.advantage == pytest.approx(white[0], rel=1e-6)


def test_a_conversation_of_several_samples_counts_once_in_its_group(fork):
    module = fork("template_history")
    samples = [module.Sample(0, [1], [2], [-1.0], True, "", "", reward=r) for r in (1.0, 1.0, 1.0, 0.0)]
    for sample, turn in zip(samples, (0, 1, 2, 0), strict=True):
        sample.turn = turn
    algo = SimpleNamespace(advantage="dr_grpo", kl_coef=0)
    got = module.add_advantages(samples, module.flatten(samples), algo)
    assert got.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]  # less the mean of 1 and 0, not of 1, 1, 1 and 0


@pytest.mark.slow
def test_a_critic_goes_on_as_if_it_had_not_been_stopped(tiny, tmp_path):
    """And learns the same on one rank, and on two that share a layer or the layers, as on two replicas."""
    keys = ("algo.advantage=gae", "algo.critic_lr=1e-3", "train.steps=4", "train.save_every=2", "train.keep_last=0")
    keys += ("rollout.prompts_per_step=4", "rollout.group_size=4", "train.updates_per_step=2")

    sources = tmp_path / "fork"
    with server_of("critic", sources) as server:
        train = partial(train_fork, server, sources, tiny)
        whole = train(tmp_path / "whole", *keys)
        resumed = train(tmp_path / "resumed", *keys, f"resume={whole.out}/checkpoints/step_000002")
        layouts = ([], ["parallel.tp=2"], ["parallel.tp=2", "parallel.sp=false"], ["parallel.pp=2"])
        others = [
            train(tmp_path / f"layout{number}", *keys, "train.steps=2", *layout, nproc=2 if layout else 1)
            for number, layout in enumerate(layouts)
        ]

    for was, now in zip(whole.metrics[2:], resumed.metrics, strict=True):
        for name in ("reward/mean", "loss/total", "grad_norm", *(name for name in was if name.startswith("critic/"))):
            assert was[name] == now[name], name
    assert equal(whole.weights(4), resumed.weights(4))

    for layout, other in zip(layouts, others, strict=True):
        for was, now in zip(whole.metrics, other.metrics, strict=False):
            for name in ("critic/value_mean", "critic/squared_error", "grad_norm"):
                assert was[name] == pytest.approx(now[name], rel=1e-4, abs=1e-7), (layout, name)


@pytest.mark.slow
def test_a_run_with_past_weights_goes_on_with_the_same_bits_and_on_another_layout(tiny, tmp_path):
    """vLLM samples with the export of two steps before and evaluates the present weights, which are sharded."""
    write_rows(tmp_path / "eval.jsonl", read_rows(tiny / "train.jsonl")[:2])
    keys = (
        "rollout.prompts_per_step=4", "rollout.group_size=8", "train.warmup_steps=0", "train.save_every=2",
        "megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true", "train.export_every=1",
        "train.lr=0.01", "algo.entropy_coef=0", "rollout.lag=2", "algo.kl_coef=0.05", "algo.reference_every=3",
        "rollout.max_logp_gap=1e-4", "algo.moving_reference=true",
        "algo.teacher=self", "data.hint_key=answer", f"data.eval={tmp_path / 'eval.jsonl'}", "train.eval_every=3",
        "algo.correction=tis", "train.steps=4",
    )  # fmt: skip

    sources = tmp_path / "fork"
    with server_of("stale_samples", sources) as server:
        train = partial(train_fork, server, sources, tiny)
        straight = train(tmp_path / "straight", *keys)
        resume = f"resume={straight.out}/checkpoints/step_000002"
        resumed = train(tmp_path / "resumed", *keys, resume)
        on_stages = train(tmp_path / "stages", *keys, resume, "parallel.pp=2")

    sampled_with = {
        ("step", 3): tiny / "model", ("step", 4): straight.out / "hf/step_000001",
        ("eval", 3): straight.out / "hf/step_000003",
    }  # fmt: skip
    for (kind, step), folder in sampled_with.items():
        model, weights = Model(folder), read_weights(folder, "fp32", tied=True)
        for row in straight.rollouts(step, kind):
            (logp,) = model.answers_logp(weights, [row["prompt_ids"]], [row["response_ids"]], 1.0)
            assert (logp - torch.tensor(row["rollout_logp"])).abs().max() < 1e-4, (kind, step)

    steps = [line for line in straight.metrics if line["step"] > 0]  # the first line is an evaluation alone
    assert all(line["logp_gap/max"] < 1e-5 for line in steps)
    assert [line["mismatch/k3"] > 1e-6 for line in steps] == [False, True, True, True]
    assert [line["kl/k2"] > 1e-9 for line in steps] == [False, True, True, False]  # taken anew at step 4

    assert lasting(resumed.metrics) == lasting(steps)[2:]
    assert equal(resumed.weights(4), straight.weights(4))
    for was, now in zip(steps[2:], on_stages.metrics, strict=True):
        for key in ("loss/total", "grad_norm", "kl/ref", "kl/teacher", "mismatch/k3", "reward/mean"):
            assert now[key] == pytest.approx(was[key], rel=1e-4, abs=1e-6), (key, was[key], now[key])
