"""Which rewards a token answers for: rewards of single tokens, and the steps of an answer that end with them.

A reward function may give a value to each token, or to spans of the text, beside or in place of one for the whole
answer (docs/rewards.md). `at_tokens` finds their tokens, `steps` cuts answers where they stand, `compare` gives each
step an advantage, `spread` gives it to the step's tokens. _K: per step of all answers, in the order of the batch.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy import ndarray

from config import AlgoConfig, UserError
from support.grading import Outcome
from support.packing import Batch

ROW = np.dtype([("place", "i4"), ("reward", "f8")])  # a token's place among its answer's, and the reward there


def at_tokens(
    outcome: Outcome, sample, decode: Callable[[list[int]], str]
) -> tuple[Outcome, dict[str, ndarray] | None]:
    """The outcome with the sum of each part, and the ROWs of the parts that are lists; None where all are numbers.

    `decode` gives the text of token ids as it gave `sample.text`. A list that does not fit the answer makes the outcome
    an error.
    """
    lists = {name: part for name, part in outcome.parts.items() if isinstance(part, list)}
    if not lists:
        return outcome, None
    try:
        rows = {name: rows_of(name, part, sample, decode) for name, part in lists.items()}
    except ValueError as error:
        return Outcome(status="error", error=f"ValueError: {error}"), None
    sums = {name: math.fsum(rows[name]["reward"]) for name in rows}
    return replace(outcome, parts=outcome.parts | sums), rows


def rows_of(name: str, part: list, sample, decode: Callable[[list[int]], str]) -> ndarray:
    """The ROWs of a part, which is a number for each token or a list of spans [start, end, number] of the text, in
    characters. A span's number stands at the token with which the span is complete; where it ends with the text, at the
    answer's last. Raises ValueError."""
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
    return np.array([(place_of(end, sample.text, ids, decode), value) for _, end, value in spans], ROW)


def place_of(end: int, text: str, ids: list[int], decode: Callable[[list[int]], str]) -> int:
    """Place of the token with which the first `end` characters of the text are complete; the last where these are all.

    A token may hold part of a character, so tokens have no texts of their own: this decodes the answer's beginnings,
    about log2(tokens) of them.
    """
    if end == len(text):
        return len(ids) - 1
    return bisect_left(range(len(ids) - 1), True, key=lambda i: decode(ids[: i + 1]).startswith(text[:end]))


def steps(samples: list, batch: Batch, credit: str) -> tuple[ndarray, ndarray, ndarray]:
    """The answers cut into steps, [K] each: a step's first position in the batch, its sample, its reward.

    With credit=process a step ends at each token with a reward of its own, and with the answer; with credit=to_go also
    where one of another answer of the group does, so that steps of the same number begin at the same place. A step has
    the rewards of its tokens, and an answer's last step those of the whole answer too. With credit=answer, and without
    rewards of single tokens, each answer is one step.
    """
    if credit == "answer" or not any(s.token_rewards for s in samples):
        return batch.starts_N, np.arange(len(samples)), np.array([s.reward for s in samples])
    rows = [np.concatenate([np.empty(0, ROW), *(s.token_rewards or {}).values()]) for s in samples]
    ends = {s.group: [] for s in samples}
    for s, own in zip(samples, rows, strict=True):
        ends[s.group].append(own["place"])
    ends = {group: np.unique(np.concatenate(places)) for group, places in ends.items()}
    starts, rewards = [], []
    for s, own, first in zip(samples, rows, batch.starts_N, strict=True):
        last = len(s.response_ids) - 1
        places = ends[s.group] if credit == "to_go" else np.unique(own["place"])
        places = np.append(places[places < last], last)
        whole = sum(v for name, v in s.reward_parts.items() if name not in s.token_rewards) if len(own) else s.reward
        step = np.searchsorted(places, [*own["place"], last])
        rewards.append(np.bincount(step, weights=[*own["reward"], whole], minlength=len(places)))
        starts.append(np.array([0, *(len(s.prompt_ids) + places[:-1])]) + first)
    sample_K = np.repeat(np.arange(len(samples)), [len(each) for each in starts])
    return np.concatenate(starts), sample_K, np.concatenate(rewards)


def compare(
    rewards_K: ndarray, sample_K: ndarray, groups_N: ndarray, tokens_K: ndarray, algo: AlgoConfig, advantages: Callable
) -> ndarray:
    """The advantage of each step, [K] float64, given its reward, its sample, the samples' groups and its tokens.

    With r_ij the reward of step j of answer i, of K_i steps, and A(x) what `advantages(values, groups,
    algo.advantage, tokens)` makes of values that are compared with each other:

      to_go    A(R_ij) among the R_ij of all answers i of the group, R_ij = sum_k>=j r_ik; beyond the end of an answer
               its last, R_iK_i. Reward-to-go with a baseline for each place
      process  sum_k>=j A(r_ik), among all steps of the group     DeepSeekMath, arXiv 2402.03300, 4.1.3
      answer   A(r_i1), the answer being one step
    Where each answer is one step they are the same.
    """
    if algo.credit == "process":
        return to_go(advantages(rewards_K, groups_N[sample_K], algo.advantage, tokens_K), sample_K)
    if algo.credit not in ("to_go", "answer"):
        raise UserError(f"algo.credit={algo.credit!r}: legal is to_go | process | answer")
    count_N = np.bincount(sample_K)
    first_N = np.cumsum(count_N) - count_N
    group_N = np.unique(groups_N, return_inverse=True)[1]
    most_G = np.zeros(group_N.max() + 1, np.int64)
    np.maximum.at(most_G, group_N, count_N)
    size_N = most_G[group_N]  # comparisons that an answer is part of
    sample_C = np.repeat(np.arange(len(groups_N)), size_N)
    step_C = np.arange(len(sample_C)) - np.repeat(np.cumsum(size_N) - size_N, size_N)
    last_C = count_N[sample_C] - 1
    of_C = first_N[sample_C] + np.minimum(step_C, last_C)
    tokens_C = np.where(step_C <= last_C, tokens_K[of_C], 0)
    values_C = to_go(rewards_K, sample_K)[of_C]
    groups_C = group_N[sample_C] * most_G.max() + step_C
    return advantages(values_C, groups_C, algo.advantage, tokens_C)[step_C <= last_C]


def to_go(values_K: ndarray, sample_K: ndarray) -> ndarray:
    """The sum over the steps of an answer from each one on, [K] → [K]; the value itself where there is one step."""
    sums_K, count_N = values_K.copy(), np.bincount(sample_K)
    first_N = np.cumsum(count_N) - count_N
    for n in np.flatnonzero(count_N > 1):
        mine = slice(first_N[n], first_N[n] + count_N[n])
        sums_K[mine] = sums_K[mine][::-1].cumsum()[::-1]
    return sums_K


def spread(advantages_K: ndarray, starts_K: ndarray, sample_K: ndarray, samples: list, batch: Batch) -> torch.Tensor:
    """The advantage of each position, its step's, [F] float32.

    Each sample notes that of its first step; where it has several also tokens["advantages"], of each response token.
    """
    advantages_F = np.repeat(advantages_K.astype("f4"), np.diff(starts_K, append=batch.lengths_N.sum()))
    count_N = np.bincount(sample_K)
    for sample, advantage in zip(samples, advantages_K[np.cumsum(count_N) - count_N].tolist(), strict=True):
        sample.advantage = advantage
    for n in np.flatnonzero(count_N > 1):
        end = batch.starts_N[n] + batch.lengths_N[n]
        samples[n].tokens["advantages"] = advantages_F[end - len(samples[n].response_ids) : end]
    return torch.from_numpy(advantages_F)
