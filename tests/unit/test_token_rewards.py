"""The recipe for a reward of each token: what a reward function may return, and what each token then answers for."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from config import AlgoConfig, UserError
from examples.tiny_reward import digits_in_place, each_digit
from tests.forks import load

S = math.sqrt(0.3) + 1e-6


@pytest.fixture
def script(fork):
    """The script with the recipe, as a module."""
    return fork("token_rewards")


def made(script, group, length, **parts):
    """An answer to a prompt of two tokens, with a number or a list for each part of its reward."""
    sample = script.Sample(group, [1, 2], [3] * length, [-1.0] * length, True, "", "")
    sample.token_rewards = None  # a field of the recipe
    script.set_rewards(sample, parts)
    return sample


def advantages(script, samples, **keys):
    """Of each response token of each answer; a prompt's positions have those of the first."""
    batch = script.add_advantages(samples, script.flatten(samples), AlgoConfig(**keys))
    answers = np.split(batch.advantages.numpy(), batch.starts_N[1:])
    assert all(answer[0] == answer[1] == np.float32(s.advantage) for answer, s in zip(answers, samples, strict=True))
    return [answer[1:].tolist() for answer in answers]


@pytest.mark.parametrize("kind, by", [("dr_grpo", 1.0), ("grpo", S)])
def test_process_supervision_by_hand(script, kind, by):
    """Steps worth 1, 0; 1, 1; 0. Their mean is 3/5, their variance (3 · 0.4² + 2 · 0.6²) / 4 = 0.3."""
    samples = [
        made(script, 4, 4, own=[0.0, 1.0, 0.0, 0.0]),
        made(script, 4, 3, own=[0.0, 1.0, 0.0], right=1.0),  # a number counts at the last token
        made(script, 4, 2, own=[0.0, 0.0]),
        made(script, 5, 2, own=[1.0, 1.0]),  # equal steps
        made(script, 5, 1, right=1.0),  # of another source
        made(script, 5, 1),  # the reward failed
    ]
    assert [s.reward for s in samples] == [1, 2, 0, 2, 1, 0]
    assert samples[1].reward_parts == {"own": 1, "right": 1}
    # The other group: 1, 1; 1; 0, of mean 3/4 and variance (3 / 16 + 9 / 16) / 3 = 1/4.
    of = by if kind == "dr_grpo" else 0.5 + 1e-6
    want = [np.array([-0.2, -0.2, -0.6, -0.6]) / by, np.array([0.8, 0.8, 0.4]) / by, np.array([-0.6, -0.6]) / by]
    want += [np.array([0.5, 0.25]) / of, np.array([0.25]) / of, np.array([-0.75]) / of]
    for got, wanted in zip(advantages(script, samples, advantage=kind), want, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)


def test_a_penalty_on_the_length_counts_at_the_last_token(script):
    sample = made(script, 0, 4, own=[0.0, 1.0, 0.0, 0.0])
    script.penalize_length([sample], AlgoConfig(overlong_buffer=4, overlong_coef=1.0), limit=6)
    assert sample.token_rewards.tolist() == [0, 1, 0, -0.5] and sample.reward == 0.5


@pytest.mark.parametrize("keys", [{"advantage": "gdpo"}, {"kl_coef": 0.1, "kl_in": "reward"}])
def test_what_needs_one_reward_an_answer_is_refused(script, keys):
    with pytest.raises(UserError, match="rewards of tokens"):
        script.step_advantages([made(script, 0, 2, own=[1.0, 0.0])], AlgoConfig(**keys))


def test_a_list_has_a_number_for_each_token(script, tmp_path, monkeypatch):
    """And a weight multiplies each of them. The demo's example has the reward of digits_in_place in total."""
    rewards = load("forked_rewards", tmp_path / "fork/grpo/step/named_rewards.py", monkeypatch)
    monkeypatch.setattr(rewards, "find", lambda name, cfg: {"custom": each_digit, "sum": digits_in_place}[name])
    grade = rewards.load({"custom": 2.0, "sum": 1.0}, SimpleNamespace(options={}))
    assert grade("2513", "2413", {}, [5, 8, 4, 6, 1]) == {"parts": {"custom": [0.5, 0, 0.5, 0.5, 0], "sum": 0.75}}
    with pytest.raises(ValueError, match="reward has 4 rewards for 3 tokens"):
        rewards.load("custom", SimpleNamespace(options={}))("2513", "2413", {}, [5, 8, 4])
    for wrong in ([1.0, math.nan], [1.0, "1"]):
        with pytest.raises((ValueError, TypeError)):
            rewards.parts_of(wrong)
