"""One step recomputed with plain transformers from the dumped rollouts: same loss, same gradient norm, on every layout.

The reference knows nothing of packing, micro-batches or Megatron: one unpadded sequence at a time, float32, autograd.
"""

from statistics import mean, stdev

import pytest
import torch
import transformers

from tests.conftest import EXACT
from tests.oracle.plain import grad_norm, response_logps, sampled

RECOMPUTE = [f"megatron.recompute_{k}" for k in ("granularity=full", "method=uniform", "num_layers=1")]
LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["parallel.tp=2", "rollout.tp=1"]),
    "pp2": (2, ["parallel.pp=2", "rollout.tp=2", *RECOMPUTE]),
    "tp2pp2": (4, ["parallel.tp=2", "parallel.pp=2", "rollout.tp=2"]),
}


def of_mixed_groups(rows: list[dict]) -> list[dict]:
    """The samples that a step with algo.max_rounds above 1 trains on: of groups whose rewards differ."""
    rewards: dict[int, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["group"], set()).add(row["reward"])
    return [row for row in rows if len(rewards[row["group"]]) > 1]


def reference_step(
    policy_path, reference_path, rollouts: list[dict], kl_coef: float, temperature: float
) -> tuple[float, float, float]:
    """(loss, gradient norm, mean k3) of the first update of a step in which nothing has moved yet: the ratio is 1."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
    tokens = sum(sampled(row).sum().item() for row in rollouts)
    groups: dict[int, list[float]] = {}
    for row in rollouts:
        groups.setdefault(row["group"], []).append(row["reward"])
    loss = kl = 0.0
    for row in rollouts:
        rewards = groups[row["group"]]
        advantage = 0.0 if len(set(rewards)) == 1 else (row["reward"] - mean(rewards)) / (stdev(rewards) + 1e-6)
        assert advantage == pytest.approx(row["advantage"], rel=1e-9, abs=1e-12)
        mine, recorded = sampled(row), torch.tensor(row["rollout_logp"])  # an environment's tokens do not count
        logp = response_logps(policy, row, temperature)[mine]
        assert (logp - recorded[mine]).abs().max() < 1e-4 and not recorded[~mine].any()
        with torch.no_grad():
            d = response_logps(reference, row, temperature)[mine]
        d = d - logp
        k3 = d.exp() - d - 1
        pg = -advantage * (logp - logp.detach()).exp()
        part = (pg + kl_coef * k3).sum() / tokens
        part.backward()
        loss, kl = loss + part.item(), kl + k3.sum().item() / tokens
    return loss, grad_norm(policy.parameters()), kl


def check_step(
    metrics: dict, rows: list[dict], policy_path, reference_path, kl_coef: float, temperature: float = 1.0
) -> None:
    """The step's loss and gradient norm on the samples `rows` are those of plain transformers; vLLM's log-probs too."""
    loss, norm, kl = reference_step(policy_path, reference_path, rows, kl_coef, temperature)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["logp_gap/max"] < 1e-5
    if kl_coef:
        assert metrics["kl/ref"] == pytest.approx(kl, rel=1e-3, abs=1e-9)
        assert (kl > 1e-4) == (metrics["step"] > 1)
    else:
        assert metrics["kl/ref"] is None


def policies(run, model) -> list:
    """The weights that each step samples with: the model, then the exports, which this checks by the way."""
    return [model, *sorted(run.out.glob("hf/step_*"))[:-1]]


def test_every_step_equals_plain_transformers(shared, tiny):
    """The first of its two updates; through the KL this also checks the reference."""
    for policy, metrics in zip(policies(shared, tiny / "model"), shared.metrics[1:], strict=True):
        trained = of_mixed_groups(shared.rollouts(metrics["step"]))
        check_step(metrics, trained, policy, tiny / "model", kl_coef=0.05)


def test_several_updates_a_step_use_the_log_probs_from_before_the_first(shared):
    for metrics in shared.metrics[1:]:
        assert metrics["logp_gap/max"] < 1e-5  # measured against log-probs scored before the first update
        assert metrics["ratio/clip_frac"] > 0  # the second has moved away from them


def test_dynamic_sampling_replaces_groups_of_equal_rewards(shared):
    prompts, replaced = [], 0
    for metrics in shared.metrics[1:]:
        rows = shared.rollouts(metrics["step"])
        groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        assert all(row["group"] == number for number, group in enumerate(groups) for row in group)
        prompts += [tuple(group[0]["prompt_ids"]) for group in groups]
        mixed = sorted({row["group"] for row in of_mixed_groups(rows)})
        first_round = sum(number < 5 for number in mixed)
        assert metrics["groups/sampled"] == len(groups) == 10 - first_round
        assert metrics["groups/rounds"] == (1 if first_round == 5 else 2)
        assert metrics["groups/trained"] == len(mixed) and len(mixed) < 5
        assert f"step {metrics['step']}: after 2 rounds {len(mixed)} of 5 groups have mixed rewards" in shared.text
        assert [number for number, group in enumerate(groups) if any(row["advantage"] for row in group)] == mixed
        replaced += len(groups) - 5
    assert replaced and len(set(prompts)) == len(prompts)  # the stream goes on, across rounds and steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_equals_plain_transformers(train_forked, tiny, layout):
    nproc, overrides = LAYOUTS[layout]
    run = train_forked(
        nproc, *EXACT, *overrides, "algo.kl_coef=0.05", "train.steps=2", "rollout.prompts_per_step=5",
        "rollout.group_size=4",
    )  # fmt: skip
    assert run.code == 0, run.text
    for policy, metrics in zip(policies(run, tiny / "model"), run.metrics, strict=True):
        check_step(metrics, run.rollouts(metrics["step"]), policy, tiny / "model", kl_coef=0.05)
