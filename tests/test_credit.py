"""Rewards of single tokens: where they fall, what each token then answers for, and that a layout does not enter."""

import itertools
import math
from dataclasses import replace
from statistics import mean, stdev
from types import SimpleNamespace

import make_tiny
import numpy as np
import pytest
import torch
import transformers

from config import AlgoConfig, RewardConfig, UserError
from support.base.read_config import load_config
from support.step import credit
from support.step.grading import GradingPool, Outcome
from tests.conftest import EXACT, REPO
from tests.oracle.plain import grad_norm, response_logps
from tests.test_exact import LAYOUTS, policies
from tests.test_reward import grade
from train_grpo import Sample, flatten, give_credit, penalize_length

# ---------------------------------------------------------------- from spans to tokens

WORDS = ["Zoë ", "says", ":\n", "日本", " 😀", "👩‍🚀", " costs", " 5", "€", "."]


@pytest.fixture(scope="module")
def bpe():
    """A byte-level tokenizer that knows no letter beyond ASCII as a token."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tiny.bpe_tokenizer(["she says: this costs 5 and that costs 6."] * 3, 300),
        eos_token="<eos>", pad_token="<pad>",
    )  # fmt: skip


def answer_of(bpe, ids: list[int]) -> SimpleNamespace:
    """A sample's fields, with the text as the trainer decodes it."""
    text = bpe.batch_decode([ids], skip_special_tokens=True)[0]
    return SimpleNamespace(response_ids=np.array(ids, "i4"), text=text)


def places(bpe, sample, spans: list) -> list[int]:
    outcome, rows = credit.locate_rewards(Outcome({"reward": spans}), sample, bpe)
    assert outcome.status == "ok" and outcome.parts == {"reward": math.fsum(value for _, _, value in spans)}
    return rows["reward"]["place"].tolist()


def test_a_span_counts_at_the_token_with_which_it_is_complete(bpe):
    """Words whose tokens are known, as each was encoded alone; special tokens, which the text leaves out, between."""
    ids, ends = [], []
    for number, word in enumerate(WORDS):
        ids += bpe.encode(word)
        ends.append(len(ids) - 1)
        ids += [bpe.pad_token_id] * (number == 4)
    ids.append(bpe.eos_token_id)
    assert len(ids) > 2 * sum(map(len, WORDS[3:6]))  # letters of several tokens
    sample = answer_of(bpe, ids)
    assert sample.text == "".join(WORDS)
    at = np.cumsum([0, *map(len, WORDS)]).tolist()
    spans = [[a, b, 1.0] for a, b in itertools.pairwise(at)]
    ends[-1] = len(ids) - 1  # what ends with the text counts where the answer ends
    assert places(bpe, sample, spans) == ends
    # Each letter: the token with its last byte. The bytes of a token are known from its name, a letter for a byte.
    bytes_T = np.cumsum([0 if i < 2 else len(bpe.convert_ids_to_tokens(i)) for i in ids])
    letters = range(1, len(sample.text))
    want = [int((bytes_T >= len(sample.text[:end].encode())).argmax()) for end in letters]
    assert places(bpe, sample, [[0, end, 0.5] for end in letters]) == want


def test_an_answer_that_is_cut_off_within_a_letter(bpe):
    ids = [*bpe.encode("ab"), *bpe.encode("日")[:-1]]
    sample = answer_of(bpe, ids)
    assert sample.text == "ab�"
    assert places(bpe, sample, [[0, 2, 1.0], [2, 3, -1.0]]) == [len(bpe.encode("ab")) - 1, len(ids) - 1]
    assert places(bpe, answer_of(bpe, [bpe.eos_token_id]), [[0, 0, 1.0]]) == [0]  # an answer without a text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([1.0, 2.0], "reward has 2 values for the 3 tokens"), ([[1, 0, 1.0]], "the span 1, 0 is not within the text's"),
        ([[0, 3, 1.0]], "the span 0, 3 is not"), ([[-1, 1, 1.0]], "the span -1, 1 is not"),
        ([[0, 1, 1.0], 0.5], "mixes numbers and spans"),
    ],
)  # fmt: skip
def test_a_list_that_does_not_fit_is_an_error_of_the_sample(part, message):
    sample = SimpleNamespace(response_ids=np.arange(3), text="ab")
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "ab")
    outcome, rows = credit.locate_rewards(Outcome({"good": 1.0, "reward": part}), sample, tokenizer)
    assert outcome.status == "error" and message in outcome.error and outcome.parts == {} and rows is None
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "abc")
    outcome, _ = credit.locate_rewards(Outcome({"reward": [[0, 1, 1.0]]}), sample, tokenizer)
    assert "spans of a text that is not the one of the answer's tokens" in outcome.error


REWARDS = """
import numpy as np
def tokens(text, answer, row, response_ids, scale=1):
    return {"each": [scale * i for i in response_ids], "whole": 0.25}
def spans(text, answer, row):
    return [(0, np.int64(len(text)), np.float32(0.5))] if text else []
def bad(text, answer, row):
    return {"nan": [1.0, float("nan")], "index": [(0.5, 1, 1.0)], "text": ["1"], "short": [(1, 2)]}[text]
class Counts:
    def __init__(self, most):
        self.most = most
    def __call__(self, text, answer, row, response_ids):
        return min(len(response_ids), self.most)
"""


def test_lists_and_ids_pass_the_grading_processes(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(REWARDS)
    functions = {name: f"{path}:{name}" for name in ("tokens", "spans", "bad")} | {"counts": f"{path}:Counts"}
    options = {"tokens": {"scale": 2}, "counts": {"most": 2}}
    spec = {"tokens": 0.5, "spans": 2, "counts": 1.0, "exact": 1.0}
    pool = GradingPool(spec, {"bad": "bad"}, None, 10.0, 1, options=options, functions=functions)
    pool.submit("s", "ab", "ab", {}, [7, 8, 9])
    pool.submit("s", "", "ab", {}, [7])
    both = pool.collect()
    failed = grade(pool, [("bad", text, "", {}) for text in ("nan", "index", "text", "short")])
    pool.close()
    assert both[0].parts == {
        "tokens/each": [7.0, 8.0, 9.0], "tokens/whole": 0.125, "spans": [[0, 2, 1.0]], "counts": 2.0, "exact": 1.0
    }  # fmt: skip
    assert both[1].parts == {"tokens/each": [7.0], "tokens/whole": 0.125, "spans": [], "counts": 1.0, "exact": 0.0}
    assert [outcome.status for outcome in failed] == ["error"] * 4
    assert "reward is nan" in failed[0].error and "reward is '1'" in failed[2].error


# ---------------------------------------------------------------- from rewards to advantages


def made(group: int, length: int, rows: list | None, **parts: float) -> Sample:
    """An answer to a prompt of two tokens; rows: (place, reward) of its single tokens."""
    sample = Sample(group, [1, 2], [3] * length, [-1.0] * length, True, "", "")
    sample.reward_parts = dict(parts)
    if rows is not None:
        sample.token_rewards = {"own": np.array(rows, credit.ROW)}
        sample.reward_parts["own"] = sum(value for _, value in rows)
    sample.reward = sum(sample.reward_parts.values())
    return sample


def advantages(samples: list[Sample], **keys) -> list[list[float]]:
    """Of each response token of each answer, as the samples note them, which is how the batch has them."""
    batch = give_credit(samples, flatten(samples), AlgoConfig(**keys))
    lengths = [len(s.response_ids) for s in samples]
    noted = [s.tokens.get("advantages", np.full(n, s.advantage, "f4")) for s, n in zip(samples, lengths, strict=True)]
    assert batch.advantages[batch.mask].tolist() == np.concatenate(noted).tolist()
    assert [answer[0] for answer in noted] == [np.float32(s.advantage) for s in samples]
    return [answer.tolist() for answer in noted]


def three() -> list[Sample]:
    """Steps worth 1, 0 (of two tokens each); 0, 1, 1 (a token each, the last by a number); 0 (an empty list)."""
    return [made(4, 4, [(1, 1), (3, 0)]), made(4, 3, [(0, 0), (1, 1)], right=1.0), made(4, 2, [])]


E = 1e-6
S = math.sqrt(1 / 3) + E


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        # From each token on: 1, 1, 0, 0; 2, 2, 1; 0, 0. The first two: mean 1, std 1. The third: 0, 1 and 0 (held):
        # mean 1/3, variance (1 + 4 + 1) / 9 / 2; so the fourth, with 1 and 0 held.
        ({"advantage": "dr_grpo"}, [[0, 0, -1 / 3, -1 / 3], [1, 1, 2 / 3], [-1, -1]]),
        ({}, [[0, 0, -1 / 3 / S, -1 / 3 / S], [1 / (1 + E), 1 / (1 + E), 2 / 3 / S], [-1 / (1 + E)] * 2]),
        # Against the mean of the others: 1, 1/2, 3/2; 1/2, 0.
        ({"advantage": "rloo"}, [[0, 0, -1 / 2, -1 / 2], [1.5, 1.5, 1], [-1.5, -1.5]]),
        ({"credit": "answer", "advantage": "dr_grpo"}, [[0] * 4, [1] * 3, [-1] * 2]),
    ],
)
def test_credit_by_hand(keys, want):
    for got, wanted in zip(advantages(three(), **keys), want, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_with_the_overlong_penalty_by_hand():
    """Limit 4, buffer 2: the answers of 4, 3 and 2 tokens lose 1, 1/2 and 0 at their ends."""
    samples = three()
    penalize_length(samples, AlgoConfig(overlong_buffer=2), 4)
    # From each token on: 0, 0, -1, -1; 1.5, 1.5, 0.5; 0, 0. Means 1/2, and of -1, 0.5 and 0 (held) -1/6.
    want = [[-1 / 2, -1 / 2, -5 / 6, -5 / 6], [1, 1, 2 / 3], [-1 / 2, -1 / 2]]
    for got, wanted in zip(advantages(samples, advantage="dr_grpo"), want, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)


def test_with_kl_in_the_reward_by_hand():
    samples = [made(0, 4, [(1, 1), (3, 0)]), made(0, 2, None)]
    batch = flatten(samples)
    kl = torch.zeros(len(batch.mask))
    kl[batch.mask] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    kl[~batch.mask] = 9.0  # of the prompts, which does not count
    batch = replace(batch, old_logp=kl, ref_logp=torch.zeros_like(kl))
    algo = AlgoConfig(advantage="dr_grpo", kl_in="reward", kl="k1", kl_coef=1.0)
    give_credit(samples, batch, algo)
    # Steps 1 - 0.3, 0 - 0.7; 0 - 1. To go 0, -0.7; -1. Means -1/2 and, with -1 held, -0.85.
    assert samples[0].tokens["advantages"].tolist() == pytest.approx([0.5, 0.5, 0.15, 0.15], rel=1e-5)
    assert samples[1].advantage == pytest.approx(-0.5, rel=1e-6) and not samples[1].tokens


KINDS = ("grpo", "dr_grpo", "rloo", "grpo_loo", "max_rl", "reinforce_pp")


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_a_list_of_zeros_that_ends_with_it(kind):
    """Bit for bit, as is a span that ends with the text: credit is finer only where rewards are."""
    rng = np.random.default_rng(0)
    groups, lengths, worth = rng.integers(0, 4, 24), rng.integers(1, 9, 24), rng.choice([0.0, 0.1, 1.0], 24)
    answers = [*zip(groups.tolist(), lengths.tolist(), worth.tolist(), strict=True)]
    number = advantages([made(g, n, None, own=r) for g, n, r in answers], advantage=kind, credit="answer")
    zeros = [made(g, n, [(i, r * (i == n - 1)) for i in range(n)]) for g, n, r in answers]
    span = [made(g, n, [(n - 1, r)]) for g, n, r in answers]
    for samples in (zeros, span, [made(g, n, None, own=r) for g, n, r in answers]):
        assert advantages(samples, advantage=kind) == number


@pytest.mark.parametrize("kind", ["grpo_batch", "gdpo"])
def test_what_is_scaled_by_the_batch_compares_whole_answers(kind):
    """Steps would count an answer of many of them more often in the batch's std."""
    rewards = RewardConfig(default={"own": 1.0, "right": 1.0})
    found = []
    for ends in ([(0, 1.0), (4, 2.0)], [(4, 3.0)]):
        samples = [made(0, 5, ends), made(0, 3, [(2, 1.0)]), made(1, 2, [(1, 0.0)]), made(1, 2, [(0, 0.5)])]
        batch = give_credit(samples, flatten(samples), AlgoConfig(advantage=kind), rewards)
        found.append(batch.advantages[batch.mask].tolist())
    assert found[0] == found[1] and found[0][0] == found[0][4] != 0


def test_answers_that_agree_get_exactly_zero():
    samples = [made(0, 5, [(1, 0.1), (2, 0.1), (4, 0.3)]) for _ in range(3)]
    assert all(a == 0 for answer in advantages(samples) for a in answer)


@pytest.mark.parametrize("kind", KINDS)
def test_credit_to_go_against_a_loop(kind):
    """Token by token, from the definition; numbers, lists and both in one batch, and answers that are left out."""
    rng = np.random.default_rng(3)
    samples = []
    for n in range(40):
        length = int(rng.integers(1, 12))
        own = sorted(rng.choice(length, int(rng.integers(0, length + 1)), replace=False).tolist())
        rows = [(place, rng.choice([0.0, 0.25, 1.0])) for place in own] if n % 5 else None
        samples.append(made(n % 6, length, rows, right=rng.choice([0.0, 0.5, 1.0])))
        samples[-1].finished = n % 7 > 0
    batch = give_credit(samples, flatten(samples, mask_truncated=True), AlgoConfig(advantage=kind))
    values = []  # of each answer: the reward from each token on
    for s in samples:
        r = [0.0] * len(s.response_ids)
        for place, value in () if s.token_rewards is None else s.token_rewards["own"].tolist():
            r[place] += value
        r[-1] += s.reward_parts["right"]
        values.append([sum(r[t:]) for t in range(len(r))])
    want = []
    for n, s in enumerate(samples):
        others = [values[m] for m, other in enumerate(samples) if other.group == s.group and m != n]
        for t, v in enumerate(values[n]):
            rest = [mine[min(t, len(mine) - 1)] for mine in others]
            everyone = [v, *rest]
            if max(everyone) - min(everyone) < 1e-9:
                want.append(0.0)
            elif kind == "grpo_loo":
                want.append((v - mean(rest)) / (stdev(rest) + 1e-6 if max(rest) - min(rest) > 1e-9 else 1))
            else:
                base = mean(rest) if kind == "rloo" else mean(everyone)
                scale = {"grpo": stdev(everyone) + 1e-6, "max_rl": base}.get(kind, 1)
                want.append((v - base) / scale)
    if kind == "reinforce_pp":
        kept = [a for a, trained in zip(want, batch.trained[batch.mask].tolist(), strict=True) if trained]
        want = [(a - mean(kept)) / math.sqrt(stdev(kept) ** 2 + 1e-8) for a in want]
    np.testing.assert_allclose(batch.advantages[batch.mask].numpy(), want, rtol=2e-6, atol=1e-6)


def test_names_are_checked_when_the_configuration_is_read():
    with pytest.raises(UserError, match=r"algo.credit='gae': must be 'to_go' or 'answer'"):
        load_config(str(REPO / "configs/tiny.yaml"), ["algo.credit=gae"])


# ---------------------------------------------------------------- in a run


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2pp2", "cp2"])
def test_a_step_with_token_rewards_equals_plain_transformers(train_forked, tiny, layout):
    """Loss and gradient of both steps, from what rollouts/ holds; with the overlong penalty."""
    nproc, overrides = {**LAYOUTS, "cp2": (2, ["parallel.cp=2"])}[layout]
    run = train_forked(
        nproc, *EXACT, *overrides, "train.steps=2", "rollout.prompts_per_step=5", "rollout.group_size=4",
        "reward.custom=tools/tiny_reward.py:each_digit", "algo.overlong_buffer=2", "algo.advantage=dr_grpo",
    )  # fmt: skip
    assert run.code == 0, run.text
    for path, metrics in zip(policies(run, tiny / "model"), run.metrics, strict=True):
        policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        rows, loss = run.rollouts(metrics["step"]), 0.0
        for row in rows:
            row["r"] = {place: value for place, value in row["token_rewards"]["reward"]}
            late, places = row["reward_parts"]["overlong"], range(len(row["response_ids"]))
            row["to_go"] = [sum(v for place, v in row["r"].items() if place >= t) + late for t in places]
            assert row["reward"] == pytest.approx(row["to_go"][0])
        for row in rows:
            group = [other["to_go"] for other in rows if other["group"] == row["group"]]
            means = [mean(values[min(t, len(values) - 1)] for values in group) for t in range(len(row["to_go"]))]
            advantage_T = torch.tensor(row["to_go"]) - torch.tensor(means)
            noted = row.get("advantages") or [row["advantage"]] * len(means)
            torch.testing.assert_close(torch.tensor(noted), advantage_T, rtol=1e-5, atol=1e-6)
            logp = response_logps(policy, row)
            part = -(advantage_T * (logp - logp.detach()).exp()).sum() / sum(len(r["response_ids"]) for r in rows)
            part.backward()
            loss += part.item()
        assert any("advantages" in row for row in rows)
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
        assert metrics["grad_norm"] == pytest.approx(grad_norm(policy.parameters()), rel=1e-4)
