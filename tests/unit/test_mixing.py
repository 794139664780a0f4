"""Sets mixed by weight: the shares hold early and late, each set is passed evenly, and a resume changes nothing."""

import re
from collections import Counter

import numpy as np
import pytest

from config import DataConfig
from grpo.parts.data.mixing import draw_sets
from grpo.parts.data.prompts import Mixture, load_prompts, prompt_batch, shuffle_epochs
from tests.conftest import write_rows


def draw_prompts(sizes, weights, taken, size, seed):
    return shuffle_epochs(draw_sets(weights, taken, size, seed), sizes, seed)


@pytest.mark.parametrize("weights", [[5, 0.5, 0.013], [1e-4, 1, 2, 3, 4, 5, 6, 7]])
def test_the_shares_hold_from_a_thousand_prompts_on(weights):
    sets = np.array([chosen for chosen, _ in draw_sets(weights, 0, 30_000, seed=5)])
    for chosen, weight in enumerate(weights):
        so_far = np.cumsum(sets == chosen)[999:] / np.arange(1000, 30_001)
        assert abs(so_far - weight / sum(weights)).max() < 0.01
        assert abs(so_far[-1] - weight / sum(weights)) < 2e-4


def test_a_stream_is_the_same_however_it_is_taken():
    """tests/oracle/test_check.py compares what it is with the oracle's."""
    sizes, weights = [10, 25], [0.7, 0.3]
    found = draw_prompts(sizes, weights, 0, 1000, seed=3)
    assert found == [step for taken in range(0, 1000, 8) for step in draw_prompts(sizes, weights, taken, 8, seed=3)]
    assert draw_prompts(sizes, weights, 0, 1000, seed=4) != found


def test_sets_of_other_columns_and_types_mix(tokenizer, tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}>", "answer": "1", "level": 3} for i in range(6)])
    (tmp_path / "b.csv").write_text("prompt,answer,source\n" + "".join(f"9{i}>,2,other\n" for i in range(4)))
    write_rows(tmp_path / "c.jsonl", [{"question": "1>", "answer": "1"}])
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")

    def load(train):
        return load_prompts(DataConfig(train=train, max_prompt_tokens=3), tokenizer, 16)

    mixed = load({a: 0.75, b: 0.25})
    assert isinstance(mixed, Mixture) and (len(mixed), mixed.dropped) == (10, 0)
    assert [p.answer for p in mixed] == ["1"] * 6 + ["2"] * 4 and mixed[9].row["source"] == "other"
    batch = prompt_batch(mixed, 0, 400, seed=0)
    assert Counter(p.source for p in batch) == {"default": 300, "other": 100}
    assert batch[300:] == prompt_batch(mixed, 300, 100, seed=0)
    assert re.findall(r"\S+ of \S+: .*", mixed.describe(400)) == [
        f"0.75 of {a}: 6 prompts, 50 passes", f"0.25 of {b}: 4 prompts, 25 passes",
    ]  # fmt: skip
    assert len({str(load(train).fingerprint) for train in ({a: 3, b: 1}, {b: 1, a: 3}, {a: 1, b: 1}, a)}) == 4
    with pytest.raises(ValueError, match=r"^data\.train={}: nothing to read"):
        load({})
    with pytest.raises(ValueError, match=r"data\.prompt_key='prompt': no such column in .*c\.jsonl"):
        load({a: 1, str(tmp_path / "c.jsonl"): 1})
