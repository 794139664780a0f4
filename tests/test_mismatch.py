"""The bound on the mismatch KL of vLLM against the trainer."""

import math
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from config import TrainingError
from support.base.read_config import load_config
from support.step import gates, metrics
from tests.conftest import REPO


def report_of(difference: float, tokens: int = 100) -> dict[str, float]:
    """What the updates report where the trainer's log-probs are all above vLLM's by `difference`."""
    found = metrics.gap_report(torch.full((tokens,), difference), torch.ones(tokens))
    return {name: value.item() for name, value in found.items()} | {"tokens": tokens}


@pytest.fixture
def check(monkeypatch):
    """check(difference, "section.key=value", ..., experts=...) → None, or it raises what check_gap does."""
    monkeypatch.setattr(gates, "explain_gap", lambda *args: f"beyond {args[-1]:.1e}")
    monkeypatch.setattr(gates.dist, "get_rank", lambda: 0)

    def run(difference: float, *overrides: str, experts: int | None = None, gaps: gates.Gaps | None = None) -> None:
        cfg = load_config(str(REPO / "configs/tiny.yaml"), list(overrides))
        model = [SimpleNamespace(config=SimpleNamespace(num_moe_experts=experts))]
        batch = SimpleNamespace(ref_logp=None)
        gates.check_gap(report_of(difference), 1, batch, [], cfg, model, gaps or gates.Gaps(), lambda: None)

    return run


BF16, OPEN = "model.dtype=bf16", "rollout.max_logp_gap=inf"


def test_k3_of_the_report():
    d = 0.3
    assert report_of(d)["gap_k3"] == pytest.approx(100 * (math.exp(d) - d - 1), rel=1e-5)
    assert report_of(-60.0)["gap_k3"] == 100 * 10  # clamped, as token_kl is


@pytest.mark.parametrize(
    ("options", "experts", "bound"),
    [([BF16], None, 5e-4), ([BF16], 4, 1.5e-2), ([BF16, "rollout.max_mismatch_kl=0.001"], 4, 1e-3)],
)
def test_a_mismatch_kl_beyond_its_bound_stops_the_run(check, options, experts, bound):
    """The bound on |Δ| is out of the way."""
    options = [*options, OPEN, f"rollout.max_mismatch_kl={bound}"]
    message = rf"mismatch KL \(mean k3\) = .*, bound {bound:.1e} \(rollout.max_mismatch_kl\)"
    below, above = gates.Gaps(), gates.Gaps()
    for update in range(4):
        check(math.sqrt(2 * bound) * 0.95, *options, experts=experts, gaps=below)
        if update < 3:
            check(math.sqrt(2 * bound) * 1.05, *options, experts=experts, gaps=above)
    with pytest.raises(TrainingError, match=message):
        check(math.sqrt(2 * bound) * 1.05, *options, experts=experts, gaps=above)
    with pytest.raises(TrainingError, match=message):
        check(math.sqrt(2 * 100 * bound), *options, experts=experts, gaps=below)
    with pytest.raises(TrainingError, match=message):
        check(math.sqrt(2 * 5 * bound), *options, experts=experts)


def test_the_defaults_need_no_key_and_forgive_one_update(check):
    gaps = gates.Gaps()
    check(0.04, BF16, gaps=gaps)  # k3 of 8e-4
    check(0.04, BF16, gaps=gaps)
    with pytest.raises(TrainingError, match=r"bound 5.0e-04 .*\nbeyond 3\.2e-02"):
        check(0.04, BF16, gaps=gaps)
    for _ in range(40):
        check(0.04, BF16, experts=4, gaps=gaps)
    assert len(gaps.recent) == 20


def test_with_a_gap_of_ones_own_the_default_bound_is_told_once(check, capsys):
    gaps = gates.Gaps()
    for _ in range(2):
        check(1.0, BF16, OPEN, gaps=gaps)
    printed = capsys.readouterr().out
    assert printed.count("warning: step 1: trainer and vLLM disagree") == 1
    assert "it goes on, as rollout.max_logp_gap is set and the KL's bound is not" in printed
    check(0.04, BF16, "rollout.vllm.kv_cache_dtype=fp8", gaps=gates.Gaps(first=0.04, recent=deque([(1.0, 100.0)] * 9)))
    assert "it goes on, as rollout.vllm.kv_cache_dtype is set" in capsys.readouterr().out


def test_fp32_and_nan(check):
    check(9e-4)
    with pytest.raises(TrainingError, match="max_logp_gap"):
        check(2e-3)
    with pytest.raises(TrainingError, match=r"bound 1.0e-06 \(rollout.max_mismatch_kl"):
        check(4e-3, OPEN, "rollout.max_mismatch_kl=1e-6")
    with pytest.raises(TrainingError):
        check(math.nan)
