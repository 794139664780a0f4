"""Healthy runs of trained weights, two steps each: no check may stop one, or warn.

The models are SmolLM2 (build/smollm2/model, by `make llm`) and twelve of its thirty layers as a Llama, Qwen2, Qwen3 and
Mixtral model, which keep the outlier channels and the growing residual norms of trained weights.
`--all-starts` runs all, else every eighth.
"""

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from tests.conftest import REPO

SMOLLM2 = REPO / "build/smollm2/model"
LAYERS = [0, 1, 2, 3, 4, 5, 24, 25, 26, 27, 28, 29]
EXPERTS = 4
COMMON = [
    "train.steps=2", "train.warmup_steps=0", "train.eval_every=0", "rollout.prompts_per_step=4",
    "rollout.group_size=4", "rollout.max_new_tokens=16",
]  # fmt: skip
PP2, EP2 = "parallel.pp=2", "parallel.ep=2"
KL = ["algo.kl_coef=0.05", "train.updates_per_step=2"]
LORA = ["lora.rank=8", "train.lr=1e-4"]
TEMPERATURES = (0.7, 1.0, 1.3)

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")
SMOL, MIXTRAL = ("smollm2",), ("mixtral",)
DP2, BOTH = {"dp2 plain": []}, {"dp2 plain": [], "pp2 plain": [PP2]}
UPDATES, ADAPTERS = {"dp2 kl, two updates": KL}, {"dp2 lora": LORA}
ROUTES = {"ep2 routes": [EP2, "algo.replay_routes=true"]}
GRID = [  # models, dtypes, temperatures, {layout and way of training: overrides}
    (SMOL, ("bf16", "fp32", "fp16"), TEMPERATURES, BOTH),
    (SMOL, ("bf16",), TEMPERATURES, UPDATES | ADAPTERS),
    (SMOL, ("fp32",), (1.0,), UPDATES | ADAPTERS),
    (SMOL, ("fp16",), (1.0,), ADAPTERS),
    (FAMILIES, ("bf16",), TEMPERATURES, BOTH),
    (FAMILIES, ("bf16",), (1.0,), UPDATES),
    (FAMILIES, ("fp32",), (1.0,), DP2),
    (FAMILIES, ("fp16",), TEMPERATURES, DP2),
    (FAMILIES, ("fp16",), (1.0,), {"pp2 kl, two updates": [PP2, *KL]}),
    (MIXTRAL, ("bf16", "fp32"), (1.0,), {"ep2 plain": [EP2], **ROUTES}),
    (MIXTRAL, ("fp16",), (1.0,), ROUTES),
]
STARTS = {  # each on two ranks
    f"{model} {dtype} T{T} {way}": [f"model.dtype={dtype}", f"rollout.temperature={T}", *keys]
    for models, dtypes, temperatures, ways in GRID
    for model, dtype, T in itertools.product(models, dtypes, temperatures)
    for way, keys in ways.items()
}
EVERY = 8

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@torch.no_grad()
def write_family(family: str, folder: Path) -> None:
    """Write LAYERS of SmolLM2 as a model of the family, with what that has in addition."""
    smollm2 = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2)
    options = {name: getattr(smollm2.config, name) for name in SIZES}
    if family == "mixtral":
        options |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    options |= {"num_hidden_layers": len(LAYERS), "tie_word_embeddings": family != "mixtral"}
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=smollm2.dtype)
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        model.get_submodule(name).load_state_dict(smollm2.get_submodule(name).state_dict())
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for layer, number in zip(model.model.layers, LAYERS, strict=True):
        source = smollm2.model.layers[number]
        layer.load_state_dict(source.state_dict(), strict=False)
        attention = layer.self_attn
        if family == "qwen2":  # trained biases of keys have a few large channels
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.bias.copy_(noise(len(projection.bias)) * 0.1)
            attention.k_proj.bias[::37] *= 30
        if family == "qwen3":
            attention.q_norm.weight.copy_(2.0 + noise(64) * 0.5)
            attention.k_norm.weight.copy_(2.0 + noise(64) * 0.5)
        if family == "mixtral":
            weights = (source.mlp.gate_proj.weight, source.mlp.down_proj.weight, source.mlp.up_proj.weight)
            for e in range(EXPERTS):
                gate, down, up = (weight * (1 + 0.2 * noise(*weight.shape)) for weight in weights)
                layer.mlp.experts.gate_up_proj[e].copy_(torch.cat([gate, up]))
                layer.mlp.experts.down_proj[e].copy_(down)
            layer.mlp.gate.weight.copy_(0.05 * noise(EXPERTS, config.hidden_size))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with the models."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "smollm2").symlink_to(SMOLLM2)
    for family in FAMILIES:
        write_family(family, folder / family)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs build/smollm2/model, by `make llm`")
def test_a_run_of_trained_weights_trains_two_steps(models, train_forked, start):
    inputs = [f"model.path={models / start.split()[0]}", "data.train=build/smollm2/train.jsonl"]
    run = train_forked(2, *inputs, *COMMON, *STARTS[start], config="smollm2", seconds=900)
    assert run.code == 0 and "warning: step" not in run.text, run.text
    assert len(run.metrics) == 2
