"""What the benchmarks count, and the lengths they make."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks import against_trl, works
from support.step import throughput

# As the model cards on the hub have them.
PARAMETERS = {"qwen2.5-0.5b": 0.49e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-7b": 7.61e9, "qwen3-30b-a3b": 30.5e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_as_many_weights_as_their_cards_say(name):
    c = works.MODELS[name]
    shapes = [*works.other_shapes(c).values(), *[*works.layer_shapes(c, 0).values()] * c["num_hidden_layers"]]
    assert sum(map(math.prod, shapes)) == pytest.approx(PARAMETERS[name], rel=0.01)


def test_operations_of_a_model_worked_by_hand():
    c = works.QWEN2 | works.sizes(hidden=4, layers=2, heads=2, kv_heads=1, ffn=8, vocab=10, tied=True)
    layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k and v, o, feed-forward
    weights = 2 * layer + 4 * 10
    attention = 2 * 2 * 2 * (3**2 + 5**2)  # layers, heads, their dimension, tokens of the two sequences
    assert throughput.train_flops(SimpleNamespace(**c), 3 + 5, 3**2 + 5**2) == 6 * weights * (3 + 5) + 6 * attention


def test_experts_count_as_many_as_a_token_meets():
    c = works.MODELS["qwen3-30b-a3b"]
    active = sum(out * inp * times for out, inp, times in works.matmuls(c))
    # The embedding is a lookup, no product; A3B.
    assert active + c["vocab_size"] * c["hidden_size"] == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize("name", ["tiny-natural", "small-bf16-natural"])
def test_the_end_token_has_its_chance_everywhere(tmp_path, name):
    work = works.WORKS[name]
    folder, _ = works.make_inputs(tmp_path, replace(work, model="tiny"))
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        logits = model(torch.randint(2, 512, (2, 32))).logits.float()
    chance = logits.softmax(-1)[..., 0]
    wanted = works.END_CHANCE[work.lengths]
    assert chance.min() > 0.8 * wanted and chance.max() < 1.25 * wanted


def test_rates_and_shares_worked_by_hand():
    row = {"ranks": 2, "tokens_per_s": 100.0, "step_s": 2.0, "train_flops": 1e9, "bare_tokens_per_s": 250.0,
           "train_s": 0.5, "logprob_s": 0.25, "matmul_flops_per_s": 4e9}  # fmt: skip
    table = works.summary([row])
    assert table["MFU of train %"] == pytest.approx(100 * 1e9 / 0.5 / 8e9)
    assert table["MFU of log-probs %"] == pytest.approx(100 * 1e9 / 3 / 0.25 / 8e9)
    assert table["MFU of step %"] == pytest.approx(100 * 4e9 / 3 / 2 / 8e9)
    assert table["step ÷ bare vLLM"] == pytest.approx(2.5)
    assert against_trl.phase_rates([row], "train") == [400.0]
