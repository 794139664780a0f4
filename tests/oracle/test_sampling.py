"""Bets on synthetic answers, and answers that are asked for again: a healthy sampler passes, others do not."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from oracle import again
from oracle.answers import answer_problem, judge_parts
from oracle.sampling import Bets, look

END, VOCABULARY, LIMIT = 0, 20, 12
GROUPS, ANSWERS, STEPS = 8, 8, 4


def model(prompt):
    """The log-probs of each token of an answer to a prompt, [limit, vocabulary]."""
    generator = torch.Generator().manual_seed(prompt)
    return (1.5 * torch.randn(LIMIT, VOCABULARY, generator=generator)).log_softmax(-1)


def draw(logps, seed):
    """The tokens of an answer, by exponential noise as vLLM draws them."""
    noise = torch.empty(logps.shape).exponential_(generator=torch.Generator().manual_seed(seed))
    ids = (logps.exp() / noise).argmax(-1).tolist()
    return ids[: ids.index(END) + 1] if END in ids else ids


def bets_on(change=lambda logps: logps, seed_of=lambda *numbers: hash(numbers), copied=0):
    """The bets of a run whose sampler draws from changed log-probs, and copies the last answers of each group."""
    bets = Bets()
    for step in range(STEPS):
        answers = []
        for group in range(GROUPS):
            logps = model(100 * step + group)
            changed = change(logps)
            said = [draw(changed, seed_of(step, group, number)) for number in range(ANSWERS - copied)]
            answers += [answer(group, ids, logps[: len(ids)]) for ids in said + said[:copied]]
        bets.add(answers, {END})
    return bets


def answer(group, ids, logps):
    """An answer of these tokens, which the model gives these log-probs."""
    tokens = torch.tensor(ids)
    before = logps.gather(1, tokens[:, None])[:, 0]
    row = {"group": group, "response_ids": ids, "turns": [len(ids)]}
    return SimpleNamespace(row=row, sampled=range(len(ids)), before=before, seen=look(logps, tokens, {END}))


def without_end(logps):
    """Log-probs whose first three tokens are not the end."""
    return torch.cat([logps[:3].index_fill(1, torch.tensor(END), -torch.inf), logps[3:]]).log_softmax(-1)


def likeliest(logps):
    """Log-probs of the likeliest tokens alone, of probability 0.9."""
    sorted_p, order = logps.exp().sort(descending=True)
    cut = (sorted_p.cumsum(-1) - sorted_p > 0.9).gather(1, order.argsort(-1))
    return logps.masked_fill(cut, -torch.inf).log_softmax(-1)


RIGHT = {
    "exact": lambda logps: logps,
    "rounding": lambda logps: logps + 0.02 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("sampler", RIGHT)
def test_a_right_sampler_wins_no_bet(sampler):
    assert not bets_on(RIGHT[sampler]).won()


WRONG = {  # alternative that wins → what the sampler does
    "temperature is 0.8": {"change": lambda logps: (logps / 0.75).log_softmax(-1)},
    "likeliest tokens alone, of probability 0.9": {"change": likeliest},
    "none of the first 2": {"change": without_end},
    "of the one before it": {"seed_of": lambda step, group, number: hash((step, number))},
    "number in the step before": {"seed_of": lambda step, group, number: hash((group, number))},
    "copies": {"copied": 2},
}


@pytest.mark.parametrize("words", WRONG)
def test_another_sampler_wins_its_bet(words):
    bets = bets_on(**WRONG[words])
    assert words in bets.won(), (bets.won(), bets.stakes)


# ---------------------------------------------------------------- asked again


def asked(count, turned, gap=0.0):
    """Requests of four tokens, and answers of which some differ from the second token on."""
    requests = [{"tokens": [1, 2, 3, 4], "logps": [-1.0] * 4, "step": 1, "name": "answer"} for _ in range(count)]
    answers = [[1, 9 if n < turned else 2, 3, 4] for n in range(count)]
    return requests, [(ids, [-1.0 - gap] * 4) for ids in answers]


AGAIN = [  # answers, how many of them differ, mean |Δ|, dtype, what is said
    (32, 0, 0.0, "fp32", ""), (32, 1, 1e-6, "fp32", ""), (32, 4, 0.02, "bf16", ""), (32, 2, 0.002, "fp16", ""),
    (32, 4, 1e-6, "fp32", "4 of 32"), (32, 30, 0.01, "bf16", "30 of 32"), (32, 30, 0.01, "fp16", "30 of 32"),
]  # fmt: skip


@pytest.mark.parametrize(("count", "turned", "gap", "dtype", "said"), AGAIN)
def test_only_answers_that_rounding_turns_may_differ(count, turned, gap, dtype, said):
    problem, _ = again.difference(*asked(count, turned, gap), dtype)
    assert problem.startswith(said) and bool(problem) == bool(said), problem


# ---------------------------------------------------------------- how answers and conversations end

ENDINGS = [  # a conversation of at most 8 tokens and 2 turns → what is wrong with it
    ({"turns": [2], "ended": "done"}, ""),
    ({"turns": [2, 2, 2], "ended": "max_turns"}, ""),
    ({"turns": [2], "ended": "limit", "finished": False}, ""),  # the reply left no room
    ({"turns": [2, 2, 4], "response_ids": [5, 0, 5, 5, 5, 5, 5, 5], "ended": "limit", "finished": False}, ""),
    ({"turns": [2], "ended": "max_turns"}, "ended by 'max_turns' after 1 turns"),
    ({"turns": [2], "ended": "limit"}, "ended by 'limit' after 1 turns"),
    ({"turns": [2], "ended": "error"}, "ended by 'error' after 1 turns"),
    ({"turns": [3], "response_ids": [5, 0, 0], "ended": "done"}, "the end token 0 is inside of a turn"),
    ({"turns": [2], "response_ids": [5, 5], "ended": "limit", "finished": False}, "it has 2 tokens, the limit is 8"),
]


@pytest.mark.parametrize(("fields", "wrong"), ENDINGS)
def test_a_conversation_ends_for_the_reason_that_is_recorded(fields, wrong):
    rollout = SimpleNamespace(turns="game.py:play", max_turns=2, stop=[], stop_token_ids=[])
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "text")
    state = SimpleNamespace(cfg=SimpleNamespace(rollout=rollout), ends={0}, tokenizer=tokenizer)
    row = {"finished": True, "text": "text", "graded": "ok", "response_ids": [5, 0] * (sum(fields["turns"]) // 2)}
    problem = answer_problem(state, row | fields, rollout, 8)
    assert wrong in problem and bool(problem) == bool(wrong), problem


def test_an_environment_hears_that_an_evaluation_ended_by_its_own_stop_text():
    training, evaluation = (SimpleNamespace(stop=stop, stop_token_ids=[]) for stop in ([], ["="]))
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join(map(chr, ids)))
    grader = Mock(**{"parts.return_value": ({}, None)})
    cfg = SimpleNamespace(rollout=training)
    state = SimpleNamespace(cfg=cfg, ends={0}, tokenizer=tokenizer, grader=grader, late="", report=Mock())
    row = {"turns": [2], "response_ids": [ord("7"), ord("=")], "reward": 0.0, "text": "7="}
    judge_parts(state, row, None, {}, evaluation)
    grader.parts.assert_called_once_with(row, None, ["7="], True)
