"""Qwen3.5 on real vLLM, from folders as they are published: with weights for images, and in fp32 what is fp32 there."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from oracle.repeat import repeat
from oracle.run import read_run
from tests.conftest import tiny_model
from tests.museum.runs import LINEAR

pytestmark = pytest.mark.slow


def publish(folder, arch):
    """A folder with weights for images and multi-token prediction, in bf16, experts as one tensor; its tensors."""
    tiny_model(folder, arch, **LINEAR)
    held = load_file(folder / "model.safetensors").items()
    weights = {name: w if name.endswith(("A_log", "linear_attn.norm.weight")) else w.bfloat16() for name, w in held}

    # Published experts are one tensor.
    for layer in range(2 if "moe" in arch else 0):
        block = f"model.layers.{layer}.mlp.experts"
        parts = [[weights.pop(f"{block}.{e}.{x}_proj.weight") for e in range(4)] for x in ("gate", "up", "down")]
        gate, up, weights[f"{block}.down_proj"] = map(torch.stack, parts)
        weights[f"{block}.gate_up_proj"] = torch.cat([gate, up], 1)
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}

    text = json.loads((folder / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = transformers.AutoConfig.for_model(
        arch.removesuffix("_text"), text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="bfloat16"
    )
    config.architectures = [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")]
    config.save_pretrained(folder)

    whole = transformers.AutoModelForImageTextToText.from_config(config).state_dict().items()
    weights |= {"mtp.fc.weight": torch.ones(8, 8)} | {name: w.bfloat16() for name, w in whole if "visual" in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize(
    "arch, keys",
    [
        ("qwen3_5_text", ["parallel.tp=2", "rollout.tp=2", "algo.kl_coef=0.01", "megatron.optimizer_cpu_offload=true"]),
        ("qwen3_5_text", ["model.dtype=fp32", "parallel.pp=2", "lora.rank=4", "train.lr=0.01"]),
        ("qwen3_5_moe_text", ["parallel.ep=2", "algo.replay_routes=true"]),
    ],
    ids=["tp", "fp32, pp with adapters", "experts"],
)
def test_a_run(train_forked, tiny, tmp_path, arch, keys):
    """Pushes are verified, an independent trainer agrees, a resume has the same bits; an export has what is not
    trained as it was, and transformers and vLLM read it.
    """
    before = publish(tmp_path / "model", arch)
    keys = [f"model.path={tmp_path / 'model'}", "model.dtype=bf16", "train.save_every=1", "train.steps=3", *keys]
    run = train_forked(2, *keys, "train.warmup_steps=0", code=0)
    gap = 1e-5 if "model.dtype=fp32" in keys else 0.03
    assert all(metrics["sync/checked"] == 1 and metrics["logp_gap/mean"] < gap for metrics in run.metrics)
    assert repeat(read_run(run.out, 3)).parted() == []

    trained, out = run.result(3), tmp_path / "again"
    shutil.copytree(run.out, out)
    shutil.rmtree(out / "checkpoints/step_000003")
    assert train_forked(2, *keys, "train.warmup_steps=0", "resume=auto", out=out, code=0).result(3) == trained

    others = {name: weight for name, weight in before.items() if name.startswith(("model.visual.", "mtp."))}
    assert f"note: {len(others)} tensors of model.path" in run.text
    after = run.weights(3)
    assert len(others) > 10 and all(torch.equal(weight, after[name]) for name, weight in others.items())

    export = run.out / "hf/step_000003"
    _, found = transformers.AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not any(found.values())
    asked = [f"model.path={export}", "model.dtype=bf16", f"data.eval={tiny / 'train.jsonl'}"]
    assert "accuracy" in train_forked(2, "--evaluate", *asked, code=0).text
