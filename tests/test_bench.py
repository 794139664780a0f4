"""What tools/bench.py counts, and the lengths it makes."""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2ForCausalLM

from tests.conftest import REPO

sys.path.insert(0, str(REPO / "tools"))
import bench_rounds
import bench_works

# As the model cards on the hub have them.
PARAMETERS = {"qwen2.5-0.5b": 0.49e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-7b": 7.61e9, "qwen3-30b-a3b": 30.5e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_as_many_weights_as_their_cards_say(name):
    assert bench_works.count(bench_works.MODELS[name]) == pytest.approx(PARAMETERS[name], rel=0.01)


def test_operations_of_a_model_worked_by_hand():
    c = bench_works.QWEN2 | bench_works.sizes(hidden=4, layers=2, heads=2, kv_heads=1, ffn=8, vocab=10, tied=True)
    layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k and v, o, feed-forward
    weights = 2 * layer + 4 * 10
    attention = 2 * 2 * 2 * (3**2 + 5**2)  # layers, heads, their dimension, tokens of the two sequences
    assert bench_works.train_flops(c, [3, 5]) == 6 * weights * (3 + 5) + 6 * attention


def test_experts_count_as_many_as_a_token_meets():
    c = bench_works.MODELS["qwen3-30b-a3b"]
    active = sum(out * inp * times for out, inp, times in bench_works.matmuls(c))
    embedding = c["vocab_size"] * c["hidden_size"]  # a lookup is no product
    assert active + embedding == pytest.approx(3.3e9, rel=0.02)  # A3B


@pytest.mark.parametrize("work", ["tiny-natural", "small-bf16-natural"])
def test_the_end_token_has_its_chance_everywhere(tmp_path, work):
    work = bench_works.WORKS[work]
    folder, _ = bench_works.make_inputs(tmp_path, replace(work, model="tiny"))
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        logits = model(torch.randint(2, 512, (2, 32))).logits.float()
    chance = logits.softmax(-1)[..., 0]
    wanted = bench_works.END_CHANCE[work.lengths]
    assert chance.min() > 0.8 * wanted and chance.max() < 1.25 * wanted


def test_the_tables_of_the_page_are_those_of_the_results():
    found = bench_rounds.rows_by_work(bench_works.read_results(bench_rounds.RESULTS))
    assert list(found) == list(bench_works.WORKS)
    text = bench_rounds.PAGE.read_text()
    assert bench_rounds.with_tables(text, found) == text, "python tools/bench_rounds.py --table writes them anew"


def test_results_are_read_as_they_were_written(tmp_path):
    rows = [
        {"model": "tiny", "dtype": "bf16", "lengths": "tail", "max_tokens": 9, "system": "ours", "round": n, "ranks": 2}
        | {"date": "2026-01-02", "machine": "2 cores, old", "commit": "1e10", "step": 1, "tokens_per_s": 1234.56}
        for n in (1, 2)
    ]
    file = tmp_path / "new/results.csv"
    for row in rows:  # a second run is added below the first
        bench_works.add_results(file, [row])
    assert bench_works.read_results(file) == rows
    assert bench_works.work_of(rows[0]) == bench_works.Work("tiny", "bf16", "tail", 9)
    assert bench_works.read_results(tmp_path / "none.csv") == []


def test_trl_runs_in_the_setting_that_was_the_fastest_for_the_work(tmp_path, monkeypatch):
    rates = {"micro_batch=32 generate=32": (10, 90, 20), "micro_batch=8 generate=8 dtype=fp32": (30, 40, 25)}
    for setting, numbers in rates.items():
        rows = [
            vars(bench_works.WORKS["tiny-tail"]) | {"system": "trl", "setting": setting, "tokens_per_s": n}
            for n in numbers
        ]
        bench_works.add_results(tmp_path / "settings.csv", [row | {"round": 1, "ranks": 2, "step": 1} for row in rows])
    monkeypatch.setattr(bench_rounds, "SETTINGS", tmp_path / "settings.csv")
    assert bench_rounds.fastest_setting("tiny-tail", "trl") == bench_works.TrlSetting(8, 8, "fp32")  # by the median
    with pytest.raises(SystemExit, match="tiny-64"):
        bench_rounds.fastest_setting("tiny-64", "trl")


def test_answers_of_one_length_are_tuned_by_micro_batch_alone():
    works = bench_works.WORKS
    fixed = bench_works.trl_settings(works["small-bf16-64"], has_bf16_units=False)
    assert {(s.generate, s.dtype) for s in fixed} == {(32, "fp32")}
    natural = bench_works.trl_settings(works["small-bf16-natural"], has_bf16_units=True)
    assert bench_works.TrlSetting(8, 8) in natural and {s.dtype for s in natural} == {""}
    assert all(bench_works.TrlSetting.parse(str(s)) == s for s in fixed + natural)


def test_a_rank_asks_for_the_memory_of_its_own_gpu_alone(monkeypatch):
    """Asking another one makes a context there, of half a GiB."""
    import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 9))
    assert bench.own_free_bytes() == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.memory, "host_free_bytes", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert bench.own_free_bytes() == 2


def test_rates_and_shares_worked_by_hand():
    row = {"ranks": 2, "tokens_per_s": 100.0, "step_s": 2.0, "train_flops": 1e9, "bare_tokens_per_s": 250.0}
    row |= {"train_s": 0.5, "logprob_s": 0.25, "matmul_flops_per_s": 4e9}
    row |= {"push_digests_s": 0.01, "push_gather_s": 0.02, "push_compare_s": 0.01}
    table = bench_works.summary([row])
    assert table["MFU of train %"] == pytest.approx(100 * 1e9 / 0.5 / 8e9)
    assert table["MFU of log-probs %"] == pytest.approx(100 * 1e9 / 3 / 0.25 / 8e9)
    assert table["MFU of step %"] == pytest.approx(100 * 4e9 / 3 / 2 / 8e9)
    assert (table["step ÷ bare vLLM"], table["push check % of step"]) == pytest.approx((2.5, 2.0))
    assert bench_rounds.phase_rates([row], "train") == [400.0]
