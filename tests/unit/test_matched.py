"""The trainer's operations in vLLM's arithmetic: the same bits as vLLM's own, whatever else is in the batch.

tests/oracle/test_equal_bits.py compares whole runs with vLLM, and gradients with float64.
"""

import numpy as np
import pytest
import torch

from grpo.parts.base.by_row import product, queries_of_a_piece
from grpo.parts.model import matched
from grpo.parts.model.attention import Segments
from grpo.run.preflight import equal_bits
from tests.conftest import tiny_config

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("isa, heads, kv_heads, queries", [("vec", 4, 2, 4), ("vec", 9, 3, 8), ("amx", 8, 1, 4)])
def test_a_piece_fills_the_registers_of_the_kernel(isa, heads, kv_heads, queries):
    """Heads of a group go together where their number divides the registers."""
    assert queries_of_a_piece(isa, heads, kv_heads) == queries


@pytest.mark.usefixtures("equal_bits_here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 1536])
def test_a_product_is_vllms_for_any_number_of_rows(dtype, width):
    """For one row torch and oneDNN add up otherwise; 1,536 numbers are SmolLM2's."""
    from vllm import _custom_ops as ops

    x, weight = normal(70, width, dtype=dtype), normal(96, width, dtype=dtype, seed=1)
    theirs = equal_bits.weight_times(ops, weight, x)
    for rows in (1, 2, 5, 70):
        assert torch.equal(product(x[:rows], weight), theirs[:rows])


@pytest.mark.usefixtures("equal_bits_here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 33])
def test_a_query_attends_to_the_same_bits_alone_and_among_others(dtype, window):
    """2,300 tokens as vLLM prefills a prompt, the last 40 as it decodes them, and as a prompt with a cached prefix."""
    tokens, to = 2300, torch.device("cpu")
    query = normal(tokens, 4, 32, dtype=dtype)
    key, value = (normal(tokens, 2, 32, dtype=dtype, seed=seed) for seed in (1, 2))

    def attend(first, last):
        keys, queries = np.array([last]), np.array([last - first])
        segments = Segments.of(keys, queries, window, to)
        return matched.Attention.apply(query[first:last], key[:last], value[:last], segments)

    whole = attend(0, tokens)
    for position in range(tokens - 40, tokens):
        assert torch.equal(attend(position, position + 1), whole[position : position + 1])
    assert torch.equal(attend(1024, tokens), whole[1024:])


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["rollout.tp=2"], "rollout.tp=2 and parallel.tp=1"),
        (["algo.correction=tis"], "algo.correction=tis"),
        (["algo.replay_routes=true", "train.updates_per_step=2"], "algo.replay_routes keeps a step's routes"),
        (["rollout.vllm.quantization=fp8"], "rollout.vllm.quantization=fp8"),
        (["megatron.hidden_dropout=0.1"], "megatron.hidden_dropout=0.1"),
        (["rollout.max_logp_gap=inf"], "rollout.max_logp_gap=inf"),
    ],
)
def test_what_stands_against_equal_bits_is_named_by_its_key(tiny, overrides, says):
    cfg = tiny_config(f"model.path={tiny}/model", *overrides)
    hf = equal_bits.read_config(cfg.model.path)
    assert says in equal_bits.why_not(cfg, hf)


@pytest.mark.usefixtures("equal_bits_here")
def test_they_are_on_by_default_and_make_vllms_log_probs_the_old_ones(tiny):
    cfg = equal_bits.resolve(tiny_config(f"model.path={tiny}/model"))
    assert cfg.model.match_engine is True and cfg.algo.old_logp == "rollout"
    off = equal_bits.resolve(tiny_config(f"model.path={tiny}/model", "rollout.tp=2"))
    assert off.model.match_engine is False and off.algo.old_logp == "trainer"
    evaluated = equal_bits.resolve(tiny_config(f"model.path={tiny}/model", "rollout.tp=2", "data.train=[]"))
    assert evaluated.model.match_engine is True


@pytest.mark.usefixtures("equal_bits_here")
def test_a_kernel_that_depends_on_the_batch_is_named(tiny, monkeypatch):
    """As a CPU would have it whose product of one row adds up otherwise."""
    cfg = tiny_config(f"model.path={tiny}/model", "model.dtype=bf16", "model.match_engine=true")
    monkeypatch.setattr(equal_bits, "product", lambda x, w: x @ w.t() * (1.1 if len(x) == 1 else 1))
    with pytest.raises(equal_bits.UserError, match=r"on this CPU a product over 64 numbers depends"):
        equal_bits.resolve(cfg)
