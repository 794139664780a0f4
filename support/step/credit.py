"""Credit assignment for rewards of single tokens: answers are divided into steps, compared with those of their group.

A reward function may return a value for each token, or for spans of the text, beside or instead of one for the whole
answer (docs/rewards.md). `locate_rewards` finds their tokens, `compare_steps` divides answers at such rewards and
chooses the steps to compare, and `spread_advantages` copies the advantage of a step to its tokens. _K: per step of all
answers, in the order of the batch. _C: per comparison; an answer with fewer steps than others of its group repeats its
last step in the comparisons that it lacks.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy import ndarray

from config import RewardConfig, RewardSpec
from reward import OWN_PARTS, is_part
from support.step.grading import Outcome
from support.step.records import Batch, Sample

ROW = np.dtype([("place", "i4"), ("reward", "f8")])  # a token's place among its answer's, and the reward there


@dataclass(frozen=True)
class Steps:
    """The steps of all answers of a batch, and the comparisons that give their advantages."""

    starts_K: ndarray  # first position of each step in the batch
    sample_K: ndarray  # number of its sample
    rewards_C: ndarray  # the sum of rewards from a step on (reward-to-go)
    groups_C: ndarray  # steps that are compared with each other have the same number
    tokens_C: ndarray  # trained tokens of the step, 0 in a repeated last step
    own_C: ndarray  # bool, False for a repeated last step; the others are the steps in the order of K


def locate_rewards(outcome: Outcome, sample: Sample, tokenizer) -> tuple[Outcome, dict[str, ndarray] | None]:
    """The outcome with the sum of each part, and the ROWs of the parts that are lists.

    A list that does not fit the answer makes the outcome an error, without ROWs.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=True)  # as the sample's text was decoded
    lists = {name: part for name, part in outcome.parts.items() if isinstance(part, list)}
    try:
        rows = {name: reward_rows(name, part, sample, decode) for name, part in lists.items()}
    except ValueError as error:
        return Outcome(status="error", error=f"ValueError: {error}"), None
    sums = {name: math.fsum(rows[name]["reward"]) for name in rows}
    return replace(outcome, parts=outcome.parts | sums), rows


def reward_rows(name: str, part: list, sample: Sample, decode: Callable[[list[int]], str]) -> ndarray:
    """The ROWs of a part, which is a number for each token or a list of spans [start, end, number] of the text, in
    characters. The reward of a span is at the token that completes the span; where it ends with the text, at the
    answer's last token. Raises ValueError.
    """
    ids = sample.response_ids.tolist()
    spans = [value for value in part if isinstance(value, list)]
    if not spans and part:
        if len(part) != len(ids):
            raise ValueError(f"{name} has {len(part)} values for the {len(ids)} tokens of the answer")
        return np.array([*enumerate(part)], ROW)
    if len(spans) < len(part):
        raise ValueError(f"{name} mixes numbers and spans")
    if spans and decode(ids) != sample.text:
        raise ValueError(f"{name} has spans of a text that is not the one of the answer's tokens")
    for start, end, _ in spans:
        if not 0 <= start <= end <= len(sample.text):
            raise ValueError(f"{name}: the span {start}, {end} is not within the text's {len(sample.text)} characters")
    return np.array([(token_at(end, sample.text, ids, decode), value) for _, end, value in spans], ROW)


def token_at(end: int, text: str, ids: list[int], decode: Callable[[list[int]], str]) -> int:
    """Place of the token that completes the first `end` characters of the text; the last token for the whole text.

    A token may hold a part of a character, so tokens have no texts of their own. This is a binary search that decodes
    about log2(tokens) prefixes of the answer.
    """
    if end == len(text):
        return len(ids) - 1
    return bisect_left(range(len(ids) - 1), True, key=lambda i: decode(ids[: i + 1]).startswith(text[:end]))


def divide_answers(samples: list[Sample], batch: Batch) -> tuple[ndarray, ndarray, ndarray]:
    """The steps of the answers, [K] each: a step's first position in the batch, its sample, its reward.

    A step ends at each token at which an answer of the group has a reward of its own, and with the answer: steps of the
    same number begin at the same place. A step has the rewards of its tokens; an answer's last step also has those of
    the whole answer.
    """
    rows = [np.concatenate([np.empty(0, ROW), *(s.token_rewards or {}).values()]) for s in samples]
    ends = {s.group: [] for s in samples}
    for s, own in zip(samples, rows, strict=True):
        ends[s.group].append(own["place"])
    ends = {group: np.unique(np.concatenate(places)) for group, places in ends.items()}
    starts, rewards = [], []
    for s, own, first in zip(samples, rows, batch.starts_N, strict=True):
        last = len(s.response_ids) - 1
        places = ends[s.group]
        places = np.append(places[places < last], last)
        whole = s.reward
        if len(own):
            whole = sum(value for name, value in s.reward_parts.items() if name not in s.token_rewards)
        step = np.searchsorted(places, [*own["place"], last])
        rewards.append(np.bincount(step, weights=[*own["reward"], whole], minlength=len(places)))
        starts.append(np.array([0, *(len(s.prompt_ids) + places[:-1])]) + first)
    sample_K = np.repeat(np.arange(len(samples)), [len(each) for each in starts])
    return np.concatenate(starts), sample_K, np.concatenate(rewards)


def compare_steps(samples: list[Sample], batch: Batch, kl_F: torch.Tensor, kl_coef: float) -> Steps:
    """The steps of the answers, and which of them are compared to compute their advantages.

    With r_ij the reward of step j of answer i, of K_i steps, minus kl_coef times the sum of its tokens' `kl_F`: step j
    of answer i has the advantage of R_ij among the R_ij of all answers i of the group, where R_ij = sum_k>=j r_ik, and
    R_iK_i beyond the end of an answer. This is reward-to-go with a baseline for each place.
    """
    starts_K, sample_K, rewards_K = divide_answers(samples, batch)
    rewards_K = rewards_K - kl_coef * batch.sums(kl_F, starts_K)
    tokens_K = batch.sums(batch.trained, starts_K)
    group_N = np.unique([s.group for s in samples], return_inverse=True)[1]
    count_N = np.bincount(sample_K)
    first_N = np.cumsum(count_N) - count_N
    most = np.zeros(group_N.max() + 1, np.int64)  # [groups], steps of the group's longest answer
    np.maximum.at(most, group_N, count_N)
    size_N = most[group_N]  # comparisons that an answer is part of
    sample_C = np.repeat(np.arange(len(samples)), size_N)
    step_C = np.arange(len(sample_C)) - np.repeat(np.cumsum(size_N) - size_N, size_N)
    last_C = count_N[sample_C] - 1
    of_C = first_N[sample_C] + np.minimum(step_C, last_C)
    return Steps(
        starts_K=starts_K,
        sample_K=sample_K,
        rewards_C=reward_to_go(rewards_K, sample_K)[of_C],
        groups_C=group_N[sample_C] * most.max() + step_C,
        tokens_C=np.where(step_C <= last_C, tokens_K[of_C], 0),
        own_C=step_C <= last_C,
    )


def normalize_parts(samples: list[Sample], reward: RewardConfig, overlong_coef: float) -> ndarray:
    """The reward of each answer with algo.advantage=gdpo, [N]: its parts, normalized one by one, then summed.

    sum_k w_k (r_k - m_k) / (s_k + 1e-4), where w_k is the weight of part k in the reward and r_k the part without it,
    m_k and s_k its mean and std (ddof 1) over the answers of the group that have it. A part of equal values adds 0.
    Source: GDPO, arXiv 2601.05242; eps as in TRL's multi_objective_aggregation=normalize_then_sum.
    """
    rewards_N = np.zeros(len(samples))
    members = {}  # (group, part) → numbers of the samples that have it
    for n, s in enumerate(samples):
        for name in s.reward_parts:
            members.setdefault((s.group, name), []).append(n)
    for (_, name), numbers in members.items():
        values = np.array([samples[n].reward_parts[name] for n in numbers])  # w_k r_k
        if values.min() < values.max():
            spec = reward.by_source.get(samples[numbers[0]].source, reward.default)
            weight = overlong_coef if name in OWN_PARTS else weight_of_part(name, spec)
            rewards_N[numbers] += (values - values.mean()) / (values.std(ddof=1) / abs(weight) + 1e-4)
    return rewards_N


def weight_of_part(part: str, spec: RewardSpec) -> float:
    """The weight that a part, "name" or "name/part", has in a reward."""
    if isinstance(spec, str):
        return 1.0
    return next(weight for name, weight in spec.items() if is_part(part, name))


def reward_to_go(values_K: ndarray, sample_K: ndarray) -> ndarray:
    """The sum over the steps of an answer from each one on, [K] → [K]; the value itself where there is one step."""
    sums_K = values_K.copy()
    count_N = np.bincount(sample_K)
    first_N = np.cumsum(count_N) - count_N
    for n in np.flatnonzero(count_N > 1):
        mine = slice(first_N[n], first_N[n] + count_N[n])
        sums_K[mine] = sums_K[mine][::-1].cumsum()[::-1]
    return sums_K


def spread_advantages(advantages_C: ndarray, steps: Steps, samples: list[Sample], batch: Batch) -> torch.Tensor:
    """The advantage of each position, its step's, [F] float32, given those of the comparisons.

    Also sets each sample's `advantage` to that of its first step, and, where it has several steps, its
    tokens["advantages"] to that of each response token.
    """
    advantages_K = advantages_C[steps.own_C]
    advantages_F = np.repeat(advantages_K.astype("f4"), np.diff(steps.starts_K, append=batch.lengths_N.sum()))
    count_N = np.bincount(steps.sample_K)
    for sample, advantage in zip(samples, advantages_K[np.cumsum(count_N) - count_N].tolist(), strict=True):
        sample.advantage = advantage
    for n in np.flatnonzero(count_N > 1):
        end = batch.starts_N[n] + batch.lengths_N[n]
        samples[n].tokens["advantages"] = advantages_F[end - len(samples[n].response_ids) : end]
    return torch.from_numpy(advantages_F)
