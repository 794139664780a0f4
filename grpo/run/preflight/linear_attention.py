"""What Qwen3.5's linear attention needs of a folder and a layout. Each check raises UserError."""

import megatron_bridge as bridge
from grpo.parts.base import versions
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
