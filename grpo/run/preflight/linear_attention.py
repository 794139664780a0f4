"""What Qwen3.5's linear attention needs of a folder, a layout and a machine. Each check raises UserError."""

import platform

import torch

import megatron_bridge as bridge
from grpo.parts.base import versions
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.require import require
from grpo.parts.model.gated_delta import uses_fla


def check_layers(hf, model, dtype):
    """The kinds of layers of `model`, the key with its value, and the kernels that a GPU needs for this `dtype`."""
    others = {*hf.layer_types} - {"linear_attention", "full_attention"}
    require(
        not others,
        f"{model}: layer_types in its config.json has {', '.join(sorted(others))}; beside linear_attention only "
        "full_attention is supported, in any order",
    )

    require(
        versions.installed("fla-core") or not uses_fla(bridge.device(), bridge.DTYPES[dtype]),
        f"{model}: linear attention on a GPU with model.dtype={dtype} needs a package: "
        f"pip install fla-core=={versions.FLA_CORE}, or use model.dtype=fp32",
    )


def check_split(hf, parallel) -> dict[str, int]:
    """Check that parallel.cp divides what parallel.tp leaves of the heads; returns the numbers that tp must divide."""
    heads = hf.linear_num_key_heads
    legal = [n for n in range(1, heads + 1) if heads % (n * parallel.tp) == 0]
    require(
        parallel.cp in legal or not legal,
        f"parallel.cp={parallel.cp} does not divide the model's {heads} key heads of linear attention, which "
        f"parallel.tp={parallel.tp} splits first; it must be one of {legal}",
    )
    # Attention has gates, and Megatron-core 0.16 cannot split a group of heads that has them.
    return {"key heads of linear attention": heads, "key-value heads": hf.num_key_value_heads}


def check_cpu(cfg):
    """What vLLM's kernels for CPUs need, if there is no GPU."""
    hf = read_config(cfg.model.path)
    if torch.cuda.device_count() or not bridge.has_linear_attention(hf):
        return

    needs = f"model.path={cfg.model.path}: vLLM's linear attention on a CPU needs"
    require(cfg.model.dtype == "bf16", f"{needs} bf16; use model.dtype=bf16, or a GPU")

    widths = (hf.linear_key_head_dim, hf.linear_value_head_dim)
    require(widths == (128, 128), f"{needs} key and value heads of 128 numbers, not {widths}; use a GPU")

    has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    require(
        has_units or platform.machine() == "aarch64",
        f"{needs} AVX-512 BF16 or AMX, which this CPU lacks; use another machine, or a GPU",
    )
