"""One step recomputed with plain transformers from the dumped rollouts: same loss, same gradient norm, on every layout.

The reference knows nothing of packing, micro-batches or Megatron: one unpadded sequence at a time, float32, autograd.
"""

import json
import math
from statistics import mean, stdev

import pytest
import torch
import transformers

RECOMPUTE = [f"megatron.recompute_{k}" for k in ("granularity=full", "method=uniform", "num_layers=1")]
LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["parallel.tp=2", "rollout.tp=1"]),
    "pp2": (2, ["parallel.pp=2", "rollout.tp=2", *RECOMPUTE]),
    "tp2pp2": (4, ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2"]),
}
QUICK = (("dp2", 0.0), ("tp2pp2", 0.05))  # in `make test`
TEMPERATURE = 0.8


def response_logps(model, row: dict, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Log-probs of the response tokens, [response length]."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logps = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[len(row["prompt_ids"]) - 1 :]


def reference_step(policy_path, reference_path, rollouts: list[dict], kl_coef: float) -> tuple[float, float, float]:
    """(loss, gradient norm, mean k3) of the first update of a step in which nothing has moved yet: the ratio is 1."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
    tokens = sum(len(row["response_ids"]) for row in rollouts)
    groups: dict[int, list[float]] = {}
    for row in rollouts:
        groups.setdefault(row["group"], []).append(row["reward"])
    loss = kl = 0.0
    for row in rollouts:
        rewards = groups[row["group"]]
        advantage = 0.0 if len(set(rewards)) == 1 else (row["reward"] - mean(rewards)) / (stdev(rewards) + 1e-6)
        assert advantage == pytest.approx(row["advantage"], rel=1e-9, abs=1e-12)
        logp = response_logps(policy, row)
        with torch.no_grad():
            d = response_logps(reference, row)
        d = d - logp
        k3 = d.exp() - d - 1
        pg = -advantage * (logp - logp.detach()).exp()
        part = (pg + kl_coef * k3).sum() / tokens
        part.backward()
        loss, kl = loss + part.item(), kl + k3.sum().item() / tokens
    norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in policy.parameters()))
    return loss, norm, kl


@pytest.mark.parametrize(
    ("layout", "kl_coef"),
    [
        pytest.param(layout, kl, marks=[] if (layout, kl) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for kl in (0.0, 0.05)
    ],
)
def test_step_equals_plain_transformers(train, tiny, layout, kl_coef):
    nproc, overrides = LAYOUTS[layout]
    run = train(
        nproc, *overrides, f"algo.kl_coef={kl_coef}", "algo.entropy_coef=0", "train.steps=2", "train.export_every=1",
        "train.warmup_steps=0", "rollout.prompts_per_step=5", "rollout.group_size=4",
        f"rollout.temperature={TEMPERATURE}",
        "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=48",
    )  # fmt: skip
    assert run.code == 0, run.text
    # At step 2 the policy is the export of step 1, so this also checks the export and, through the KL, the reference.
    policies = [tiny / "model", run.out / "hf/step_000001"]
    for step, (policy, metrics) in enumerate(zip(policies, run.metrics, strict=True), start=1):
        loss, norm, kl = reference_step(policy, tiny / "model", run.rollouts(step), kl_coef)
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["logp_gap/max"] < 1e-5
        if kl_coef:
            assert metrics["kl/ref"] == pytest.approx(kl, rel=1e-3, abs=1e-9)
            assert (kl > 1e-4) == (step == 2)
        else:
            assert metrics["kl/ref"] is None


def test_several_updates_a_step_use_the_log_probs_from_before_the_first(train, tiny):
    run = train(
        2, "train.steps=2", "train.updates_per_step=2", "train.epochs_per_step=2", "train.lr=0.01", "algo.kl_coef=0.05",
        "rollout.prompts_per_step=4", "rollout.group_size=4",
    )  # fmt: skip
    assert run.code == 0, run.text
    for metrics in run.metrics:
        assert metrics["logp_gap/max"] < 1e-5  # measured against log-probs scored before the first update
        assert metrics["ratio/clip_frac"] > 0  # later updates have moved away from them
    report = json.dumps(run.metrics[0])
    assert "NaN" not in report and "Infinity" not in report


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_of_equal_rewards(train, tiny):
    run = train(
        2, "train.steps=2", "algo.entropy_coef=0", "algo.max_rounds=2", "rollout.prompts_per_step=8",
        "rollout.group_size=2", f"rollout.temperature={TEMPERATURE}", "rollout.tp=1",
    )  # fmt: skip
    assert run.code == 0, run.text
    prompts = []
    for step, metrics in enumerate(run.metrics, start=1):
        rows = run.rollouts(step)
        groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        prompts += [tuple(group[0]["prompt_ids"]) for group in groups]
        assert all(group[0]["group"] == group[1]["group"] == i for i, group in enumerate(groups))
        mixed = [i for i, (a, b) in enumerate(groups) if a["reward"] != b["reward"]]
        first_round = sum(i < 8 for i in mixed)
        assert metrics["groups/sampled"] == len(groups) == 16 - first_round and metrics["groups/rounds"] == 2
        assert metrics["groups/trained"] == len(mixed) < 8
        assert f"step {step}: after 2 rounds {len(mixed)} of 8 groups have mixed rewards" in run.text
        assert [i for i, (a, b) in enumerate(groups) if a["advantage"] or b["advantage"]] == mixed
        if step == 1:
            loss, norm, _ = reference_step(
                tiny / "model", tiny / "model", [row for row in rows if row["group"] in mixed], 0.0
            )
            assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert len(set(prompts)) == len(prompts)  # the stream goes on, across rounds and steps


@pytest.mark.slow
def test_kl_in_the_reward_overlong_penalty_and_masked_answers(train, tiny):
    run = train(
        2, "train.steps=2", "train.export_every=1", "train.warmup_steps=0", "algo.entropy_coef=0",
        "algo.loss=reinforce", "algo.advantage=rloo",
        "algo.kl_coef=0.5", "algo.kl=k1", "algo.kl_in=reward", "algo.mask_truncated=true",
        "algo.overlong_buffer=4", "algo.loss_norm=seq_mean_token_mean", "rollout.max_new_tokens=12",
        "rollout.prompts_per_step=4", "rollout.group_size=8",
    )  # fmt: skip
    assert run.code == 0, run.text
    policies = [tiny / "model", run.out / "hf/step_000001"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    for step, (path, metrics) in enumerate(zip(policies, run.metrics, strict=True), start=1):
        policy, rows = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), run.rollouts(step)
        shaped, loss, kls = [], 0.0, []
        for row in rows:
            logp, ref = (response_logps(model, row, 1.0).detach() for model in (policy, reference))
            kls.append((logp - ref).sum().item())
            shaped.append(row["reward"] - 0.5 * kls[-1])
            length = len(row["response_ids"])
            assert row["reward_parts"]["overlong"] == -max(0, length - 8) / 4
            assert sum(row["reward_parts"].values()) == pytest.approx(row["reward"])
        kept = [row for row in rows if row["finished"]]
        assert 0 < len(kept) < len(rows)
        for i, row in enumerate(rows):
            others = [shaped[j] for j, other in enumerate(rows) if other["group"] == row["group"] and j != i]
            assert row["advantage"] == pytest.approx(shaped[i] - mean(others), rel=1e-3, abs=1e-5)
            if row["finished"]:
                loss -= row["advantage"] * response_logps(policy, row, 1.0).mean().item() / len(kept)
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4)
        assert (max(map(abs, kls)) > 1e-3) == (step == 2)
