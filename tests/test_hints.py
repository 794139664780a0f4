"""Hints: made-up runs, and whether a rule speaks of them."""

import pytest

from support.run.hints import WINDOW, hints

CALM = {
    "entropy": 1.0, "groups/zero_std_frac": 0.2, "reward/mean": 0.5, "tokens/response_mean": 100.0,
    "tokens/response_max": 300.0, "tokens/truncated_frac": 0.0, "ratio/clip_frac": 0.01, "logp_gap/mean": 1e-4,
    "time/rollout": 5.0, "time/step": 10.0, "pipeline/bubble": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "end", "key"),
    [
        ("entropy_collapse", {"entropy": 0.1, "groups/zero_std_frac": 0.4, "reward/mean": 0.3}, "algo.clip_high=0.28"),
        ("length_explosion", {"tokens/response_mean": 200.0, "tokens/truncated_frac": 0.3}, "algo.overlong_buffer"),
        ("equal_groups", {"groups/zero_std_frac": 0.6}, "algo.max_rounds=4"),
        ("clipped_ratios", {"ratio/clip_frac": 0.3}, "train.lr"),
        ("growing_gap", {"logp_gap/mean": 2e-3}, "algo.correction=tis"),
        ("long_tail", {"tokens/response_max": 900.0, "time/rollout": 8.0}, "rollout.max_new_tokens"),
        ("idle_stages", {"pipeline/bubble": 0.33}, "parallel.vpp=2"),
        ("idle_gpu", {"gpu/busy": 0.2}, "rollout.gpu_memory_utilization"),
        ("uneven_experts", {"moe/load": 6.0}, "megatron.moe_aux_loss_coeff"),
        ("frequent_evaluation", {"time/eval_frac": 0.3}, "train.eval_every"),
    ],
)
def test_a_rule_speaks_of_what_it_is_for_alone(rule, end, key):
    calm = [dict(CALM) for _ in range(2 * WINDOW)]
    assert hints(calm) == {} == hints(calm[:WINDOW] + [CALM | end] * (WINDOW - 1))
    found = hints([*calm, *([CALM | end] * WINDOW)])
    assert list(found) == [rule] and key in found[rule]


def test_a_run_that_has_learnt_its_task_is_left_alone():
    end = {"entropy": 0.02, "groups/zero_std_frac": 0.9, "reward/mean": 0.98}
    assert hints([CALM] * WINDOW + [CALM | end] * WINDOW) == {}
