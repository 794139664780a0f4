"""Rewards of several parts, each normalized within its group (algo.advantage=gdpo)."""

import numpy as np

from grpo.step.named_rewards import OWN_PARTS, weights_of
from grpo.step.records import Sample


def normalize_parts(samples: list[Sample], reward, overlong_coef):
    """The reward of each answer with algo.advantage=gdpo, [N]: its parts, normalized one by one, then summed.

    sum_k w_k (r_k - m_k) / (s_k + 1e-4), where w_k is the weight of part k in the reward and r_k the part without it,
    m_k and s_k its mean and std (ddof 1) over the answers of the group that have it. A part of equal values adds 0. An
    answer whose grading failed has 0 in every part.
    Source: GDPO, arXiv 2601.05242; eps as in TRL's multi_objective_aggregation=normalize_then_sum.
    """
    rewards_N = np.zeros(len(samples))

    names = {}  # group → the parts that its answers have
    for s in samples:
        names.setdefault(s.group, {}).update(s.reward_parts)
    members = {}  # (group, part) → numbers of the samples that have it
    for n, s in enumerate(samples):
        for name in s.reward_parts if s.graded == "ok" else names[s.group]:
            members.setdefault((s.group, name), []).append(n)

    for (_, name), numbers in members.items():
        values = np.array([samples[n].reward_parts.get(name, 0.0) for n in numbers])  # w_k r_k
        if values.min() < values.max():
            spec = reward.by_source.get(samples[numbers[0]].source, reward.default)
            # A part is named "reward" or "reward/part".
            weights = [weight for key, weight in weights_of(spec).items() if f"{name}/".startswith(f"{key}/")]
            weight = overlong_coef if name in OWN_PARTS else next(iter(weights), 1.0)  # 1: a reward of one name
            rewards_N[numbers] += (values - values.mean()) / (values.std(ddof=1) / abs(weight) + 1e-4)
    return rewards_N
