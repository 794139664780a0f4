"""Steps of real runs from the dumped rollouts: the loss, the gradient and the sampled groups.

tests/oracle repeats the same run in full.
"""

import pytest

from tests.oracle.plain import reference_step


def of_mixed_groups(rows: list[dict]) -> list[dict]:
    """The samples that a step with algo.max_rounds above 1 trains on: of groups whose rewards differ."""
    rewards: dict[int, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["group"], set()).add(row["reward"])
    return [row for row in rows if len(rewards[row["group"]]) > 1]


def check_step(metrics: dict, rows: list[dict], policy_path, reference_path, kl_coef: float) -> None:
    """The step's loss and gradient norm on the samples `rows` are those of plain transformers; vLLM's log-probs too."""
    loss, norm, _ = reference_step(policy_path, reference_path, rows, kl_coef)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["logp_gap/max"] < 1e-5


def policies(run, model) -> list:
    """The weights that each step samples with: the model, then the exports, which this checks by the way."""
    return [model, *sorted(run.out.glob("hf/step_*"))[:-1]]


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
