"""LoRA: on every layout the gradient of each factor, the loss and the log-probs equal plain transformers in float64.
What is pushed and exported is the sum of weights and adapters, as PEFT merges it (pip install peft).
"""

from pathlib import Path

import pytest
import torch
import transformers

from config import LoraConfig, UserError
from grpo.parts.model import lora
from oracle.models import merge_factors
from tests.conftest import tiny_config
from tests.layout_worker import one_layout
from tests.oracle.layouts import Results, check_held, check_update, make_model, make_plan, run_cases
from tests.oracle.reference import file_weights, made_up_factors, reference, relative

RANK = 8
ALPHA = 12.0
LORA = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}")
ALL = ("qkv", "proj", "fc1", "fc2")


def check(found, wanted):
    """The factors are those that were drawn; what is exported is what is pushed, the sum of weights and adapters."""
    merged = [name for name in wanted if name.startswith("merged.")]
    assert {name for name in found if name.startswith("merged.")} == {*merged}
    assert max(relative(found[name], wanted[name]) for name in merged) < 1e-6
    check_update(found, wanted)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2_moe", ALL),
        ("qwen3_moe", ("qkv", "fc1")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen3", ("qkv", "fc2")), ("qwen3_5_text", ALL), ("qwen3_moe", ("fc1", "fc2")))
        ),
    ],
)
def test_the_gradients_of_factors_are_those_of_plain_transformers(world, tmp_path, family, targets):
    plan = make_plan(tmp_path, family, *LORA, f"lora.targets=[{','.join(targets)}]", layouts={"one": []})
    found = one_layout(plan, "one")
    check(found, reference(tmp_path / "model", found, lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=targets)))


# In `make test`: the axes that meet in one factor.
QUICK = {"qwen3_moe": ("EP2·TP2·ETP2·DP2",)}
SLOW = {
    "qwen2": (
        "DP4", "TP2·DP2, without SP", "TP4", "TP2·PP2", "TP2·CP2", "CP4", "PP2·VPP2·DP2",
        "TP2·PP2·VPP2, overlap, full recompute", "CP2·DP2, overlap, selective recompute",
    ),
    "qwen2_moe": ("EP2·DP4", "EP2·TP2·ETP1·DP2", "EP2·TP2·ETP2·DP2", "ETP2·DP4"),
    "qwen3_moe": (
        "EP4·DP4, overlap", "EP2·TP2·ETP1·DP2", "CP2·EP2·DP2", "PP2·EP2·DP2", "TP2·PP2·VPP2, overlap, full recompute",
    ),
    "qwen3_5_moe_text": ("TP2·CP2", "EP2·TP2·ETP2·DP2", "TP2·PP2·VPP2, overlap, full recompute"),
}  # fmt: skip
CASES = [
    *(pytest.param(family, layout) for family, layouts in QUICK.items() for layout in layouts),
    *(pytest.param(family, layout, marks=pytest.mark.slow) for family, layouts in SLOW.items() for layout in layouts),
]
MORE = {"ETP2·DP4": ["parallel.etp=2"]}  # an expert is split over ranks that are replicas elsewhere


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory) -> Results:
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    return run_cases(request, fork_server, tmp_path_factory, *LORA, more=MORE, lora=lora)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradients_do_not_depend_on_the_layout(results, family, layout):
    found, wanted, plan = results[family]
    check(found[layout], wanted)
    check_held(found[layout]["held"], plan, layout)


@pytest.mark.parametrize(("family", "targets"), [("qwen2", ALL), ("qwen3_moe", ("qkv", "proj"))])
def test_peft_loads_the_export_and_merges_it_to_the_same_weights(world, tmp_path, family, targets):
    peft = pytest.importorskip("peft")
    make_model(tmp_path / "model", family)
    adapters = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets)
    weights = file_weights(tmp_path / "model")
    factors = made_up_factors(weights, adapters)
    cfg = tiny_config(*LORA, f"lora.targets=[{','.join(targets)}]", f"output_dir={tmp_path}")
    base = str(tmp_path / "model")
    lora.export_adapter(((name, factor.float()) for name, factor in factors.items()), base, cfg, step=1)

    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter/step_000001").merge_and_unload().state_dict()
    merged = merge_factors(weights, factors, adapters, "fp32")
    for name in factors:
        if name.endswith("lora_A.weight"):
            weight = name.replace("lora_A.", "")
            assert relative(adapted[weight], merged[weight]) < 1e-6, name


def test_adapters_of_experts_are_not_written(world, tmp_path, capsys):
    factors = [("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(2, 2))]
    lora.export_adapter(factors, "base", tiny_config(f"output_dir={tmp_path}"), step=1)
    assert "adapter/step_000001 is not written: there is no export of experts' adapters" in capsys.readouterr().out
    assert not (tmp_path / "adapter").exists()


def test_a_weight_without_a_difference_keeps_its_bits():
    """The first push must give vLLM what it has read from disk; of both zeros -0.0 is easily lost."""
    weight = torch.tensor([[0.0, -0.0, 1e-40], [-0.0, 3.0, -0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(RANK, 3).to(dtype)
        b = torch.zeros(2, RANK, dtype=dtype)
        bits = lora.merge(weight.to(dtype), a, b, 1.5).view(torch.int16)
        assert torch.equal(bits, weight.to(dtype).view(torch.int16))


def test_a_sum_is_rounded_once():
    """In bf16, where 258 follows 256, 256 + 0.75 + 0.75 is 256 if each sum is rounded, and 258 if only the last is."""
    weight = torch.tensor([[256.0]])
    a = torch.tensor([[1.0], [1.0]])
    b = torch.tensor([[0.75, 0.75]])
    assert lora.merge(weight.bfloat16(), a.bfloat16(), b.bfloat16(), 1.0).item() == 258.0
    assert (weight.bfloat16() + 0.75).item() == 256.0


def test_a_resume_with_other_adapters_is_refused(tiny, tmp_path):
    was = LoraConfig(rank=8, alpha=16.0).model_dump()
    path = Path("step_000004")
    lora.check_resumed(was, LoraConfig(rank=8, alpha=16.0, targets=["fc2", "fc1", "proj", "qkv"]), path)  # any order
    with pytest.raises(UserError, match=r"^lora=.*, but step_000004 was saved with lora=.*'rank': 8, 'alpha'"):
        lora.check_resumed(was, LoraConfig(rank=8, alpha=32.0), path)
