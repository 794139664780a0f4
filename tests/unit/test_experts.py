"""Grouped experts (grpo/parts/model/experts.py); test_options.py has an update of sequential ones beside it."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import megatron_bridge as bridge
from grpo.parts.model import lora
from grpo.parts.model.experts import GroupedLinear
from tests.conftest import build_model, tiny_config
from tests.oracle.layouts import make_plan


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_E", [[3, 0, 5, 1], [0, 0, 0, 0]])
def test_a_grouped_product_is_that_of_each_expert(dtype, tokens_E):
    """Bit for bit on the CPU. An expert without a token has a gradient of exactly 0, on a GPU too."""
    torch.manual_seed(0)
    on = {"dtype": dtype, "device": bridge.device()}
    x_D, grad_D = torch.randn(sum(tokens_E), 16, **on).requires_grad_(), torch.randn(sum(tokens_E), 24, **on)
    weights = [torch.randn(24, 16, **on).requires_grad_() for _ in tokens_E]
    out_D = GroupedLinear.apply(x_D, torch.tensor(tokens_E).cumsum(0).int().to(bridge.device()), *weights)
    expected_D = torch.cat([x @ weight.t() for x, weight in zip(x_D.split(tokens_E), weights, strict=True)])
    on_gpu = 1e-4 if dtype is torch.float32 else 0.05
    close = {"rtol": 0, "atol": on_gpu if torch.cuda.is_available() else 0}
    torch.testing.assert_close(out_D, expected_D, **close)
    found, expected = (torch.autograd.grad(out, [x_D, *weights], grad_D) for out in (out_D, expected_D))
    torch.testing.assert_close(found, expected, **close)
    assert not any(grad.any() for grad, tokens in zip(found[1:], tokens_E, strict=True) if tokens == 0)


def test_adapters_of_experts_that_are_one_tensor_in_the_folder(tmp_path):
    """As of published Qwen3.5-MoE: each expert's factors have the shape of its own weight."""
    name = "model.layers.0.mlp.experts"
    save_file({f"{name}.gate_up_proj": torch.ones(4, 16, 8), f"{name}.down_proj": torch.ones(4, 8, 8)}, tmp_path / "e")
    opened = {}
    with safe_open(tmp_path / "e", "pt") as file:
        for part in ("gate", "up", "down"):
            opened[f"{name}.3.{part}_proj.weight"] = file
            factor = lora.read_part(f"{name}.3.{part}_proj.lora_A.weight", opened, (2, 8))
            assert factor.shape == (2, 8) and factor.any()
            factor = lora.read_part(f"{name}.3.{part}_proj.lora_B.weight", opened, (8, 2))
            assert factor.shape == (8, 2) and not factor.any()


def test_what_waits_for_weights_is_called_before_they_are_read(world, tmp_path):
    """Megatron's overlap_param_gather gathers what the replicas updated as late as a module with the weights is called,
    by a hook of the module; missed, a second update of a step computes with experts from before the first."""
    cfg = tiny_config(*make_plan(tmp_path, "qwen3_moe")["overrides"], "megatron.overlap_param_gather=true")
    (chunk,) = build_model(cfg)
    experts, waited = bridge.unwrap_model(chunk).decoder.layers[0].mlp.experts, []
    for number, expert in enumerate(experts.local_experts):
        for name, module in expert.named_children():
            module.register_forward_pre_hook(lambda *_, what=(number, name): waited.append(what))
    x_D = torch.randn(6, experts.config.hidden_size)
    experts(x_D, torch.tensor([6] + [0] * (len(experts.local_experts) - 1)), torch.ones(6))
    assert sorted(waited) == [(e, fc) for e in range(len(experts.local_experts)) for fc in ("linear_fc1", "linear_fc2")]
