"""The recipe for rewards of single tokens: where they fall, and what each token then answers for."""

import itertools
import math
from types import SimpleNamespace

import make_tiny
import numpy as np
import pytest
import transformers

from config import AlgoConfig, RewardConfig
from grpo.step.grading import Outcome

E = 1e-6
S = math.sqrt(1 / 3) + E
U = 0.5 / (math.sqrt(0.3) + E)


@pytest.fixture
def script(fork):
    """The script with the recipe, as a module; `credit` is the recipe's new file."""
    return fork("token_rewards")


def test_a_span_counts_at_the_token_with_which_it_is_complete(script):
    """A tokenizer of bytes and words whose tokens are known; special tokens, which the text leaves out, between."""
    bpe = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tiny.bpe_tokenizer(["she says: this costs 5 and that costs 6."] * 3, 300),
        eos_token="<eos>", pad_token="<pad>",
    )  # fmt: skip

    def places(ids: list[int], spans) -> list[int]:
        text = bpe.batch_decode([ids], skip_special_tokens=True)[0]
        sample = SimpleNamespace(response_ids=np.array(ids, "i4"), text=text)
        outcome, rows = script.credit.locate_rewards(Outcome({"reward": spans}), sample, bpe)
        assert outcome.status == "ok" and outcome.parts == {"reward": math.fsum(value for _, _, value in spans)}
        return rows["reward"]["place"].tolist()

    words = ["Zoë ", "says", ":\n", "日本", " 😀", "👩‍🚀", " costs", " 5", "€", "."]
    ids, ends = [], []
    for number, word in enumerate(words):
        ids += bpe.encode(word)
        ends.append(len(ids) - 1)
        ids += [bpe.pad_token_id] * (number == 4)
    ids.append(bpe.eos_token_id)
    ends[-1] = len(ids) - 1  # what ends with the text counts where the answer ends
    assert places(ids, [[a, b, 1.0] for a, b in itertools.pairwise(np.cumsum([0, *map(len, words)]).tolist())]) == ends
    cut = [*bpe.encode("ab"), *bpe.encode("日")[:-1]]  # within a letter
    assert places(cut, [[0, 2, 1.0], [2, 3, -1.0]]) == [len(bpe.encode("ab")) - 1, len(cut) - 1]
    assert places([bpe.eos_token_id], [[0, 0, 1.0]]) == [0]  # an answer without a text


def made(script, group, length, rows: list | None, **parts):
    """An answer to a prompt of two tokens; rows: (place, reward) of its single tokens."""
    sample = script.Sample(group, [1, 2], [3] * length, [-1.0] * length, True, "", "")
    sample.reward_parts = dict(parts)
    sample.token_rewards = None
    if rows is not None:
        sample.token_rewards = {"own": np.array(rows, script.credit.ROW)}
        sample.reward_parts["own"] = sum(value for _, value in rows)
    sample.reward = sum(sample.reward_parts.values())
    return sample


def advantages(script, samples, credit="to_go", **keys) -> list[list[float]]:
    """Of each response token of each answer, as the samples note them, which is how the batch has them."""
    algo = AlgoConfig(**keys).model_copy(update={"credit": credit})
    batch = script.add_advantages(samples, script.flatten(samples), algo, RewardConfig(default={"own": 1.0}))
    noted = [s.tokens.get("advantages", np.full(len(s.response_ids), s.advantage, "f4")) for s in samples]
    assert batch.advantages[batch.mask].tolist() == np.concatenate(noted).tolist()
    return [answer.tolist() for answer in noted]


@pytest.mark.parametrize(
    "keys, want",
    [
        # From each token on: 1, 1, 0, 0; 2, 2, 1; 0, 0. The first two: mean 1, std 1. The third: 0, 1 and 0 (held):
        # mean 1/3, variance (1 + 4 + 1) / 9 / 2; so the fourth, with 1 and 0 held.
        ({"advantage": "dr_grpo"}, [[0, 0, -1 / 3, -1 / 3], [1, 1, 2 / 3], [-1, -1]]),
        ({}, [[0, 0, -1 / 3 / S, -1 / 3 / S], [1 / (1 + E), 1 / (1 + E), 2 / 3 / S], [-1 / (1 + E)] * 2]),
        # Against the mean of the others: 1, 1/2, 3/2; 1/2, 0.
        ({"advantage": "rloo"}, [[0, 0, -1 / 2, -1 / 2], [1.5, 1.5, 1], [-1.5, -1.5]]),
        ({"advantage": "dr_grpo", "credit": "answer"}, [[0] * 4, [1] * 3, [-1] * 2]),
        # Six steps: three of 1, three of 0: mean 1/2, variance 6/4/5. Each is U or -U; then added up from the end.
        ({"credit": "process"}, [[0, 0, -U, -U], [U, 2 * U, U], [-U, -U]]),
    ],
)
def test_credit_by_hand(script, keys, want):
    """Steps worth 1, 0 (of two tokens each); 0, 1, 1 (a token each, the last by a number); 0 (an empty list)."""
    rows = ([(1, 1), (3, 0)], [(0, 0), (1, 1)], [])
    samples = [made(script, 4, 4, rows[0]), made(script, 4, 3, rows[1], right=1.0), made(script, 4, 2, rows[2])]
    for got, wanted in zip(advantages(script, samples, **keys), want, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    agreeing = [made(script, 0, 5, [(1, 0.1), (2, 0.1), (4, 0.3)]) for _ in range(3)]
    if keys.get("credit") != "process":  # which compares the steps of an answer with each other too
        assert all(a == 0 for answer in advantages(script, agreeing, **keys) for a in answer)


@pytest.mark.parametrize("kind", ["grpo", "grpo_loo", "reinforce_pp", "grpo_batch", "gdpo"])
def test_a_number_is_a_list_of_zeros_that_ends_with_it(script, kind):
    """Bit for bit: credit is finer only where rewards are. grpo_batch and gdpo compare whole answers in any case."""
    rng = np.random.default_rng(0)
    groups, lengths, worth = rng.integers(0, 4, 24), rng.integers(1, 9, 24), rng.choice([0.0, 0.1, 1.0], 24)
    answers = [*zip(groups.tolist(), lengths.tolist(), worth.tolist(), strict=True)]
    number = advantages(script, [made(script, g, n, None, own=r) for g, n, r in answers], advantage=kind)
    zeros = [made(script, g, n, [(i, r * (i == n - 1)) for i in range(n)]) for g, n, r in answers]
    assert advantages(script, zeros, advantage=kind) == number
    if kind in ("grpo_batch", "gdpo"):
        assert advantages(script, [made(script, g, n, [(0, r)]) for g, n, r in answers], advantage=kind) == number
