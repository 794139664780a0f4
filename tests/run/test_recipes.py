"""The larger recipes, worked by hand and in a real run."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers

from config import UserError
from tests.compare_runs import lasting
from tests.conftest import read_rows, write_rows
from tests.forks import server_of, train_fork
from tests.layout_worker import equal
from tests.oracle.plain import chosen, token_logps

# ---------------------------------------------------------------- past weights and a reference that follows


def test_what_a_checkpoint_does_not_have_is_refused(fork, tmp_path):
    past_weights = fork("stale_samples").past_weights

    def check(was: dict, lag: int = 0, every: int = 0) -> None:
        (tmp_path / "state.json").write_text(json.dumps({"config": {"rollout": was, "algo": was}}))
        algo = SimpleNamespace(kl_coef=0.1, reference_every=every)
        past_weights.check_resumed(tmp_path, SimpleNamespace(rollout=SimpleNamespace(lag=lag), algo=algo))

    check({}, every=3)
    check({"lag": 4, "reference_every": 3}, lag=2, every=9)
    with pytest.raises(UserError, match=r"rollout\.lag=2, but .* has no weights of more than 1 steps before"):
        check({"lag": 1}, lag=2)
    with pytest.raises(UserError, match=r"algo\.reference_every=0, but the reference in .* is no longer"):
        check({"reference_every": 5})


@pytest.mark.slow
def test_a_run_with_past_weights_goes_on_with_the_same_bits_and_on_another_layout(tiny, tmp_path):
    """vLLM sampled with the export of so many steps before and evaluates the present one, where weights are sharded."""
    write_rows(tmp_path / "eval.jsonl", read_rows(tiny / "train.jsonl")[:2])
    keys = (
        "rollout.prompts_per_step=4", "rollout.group_size=8", "train.warmup_steps=0", "train.save_every=2",
        "megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true", "train.export_every=1",
        "train.lr=0.01", "algo.entropy_coef=0", "rollout.lag=2", "algo.kl_coef=0.05", "algo.reference_every=3",
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
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in straight.rollouts(step, kind):
            logp = chosen(token_logps(model, row, temperature=1.0), row)
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
