"""Models of the hub that configs/ name, by their config.json alone: plans and dry runs need no more of them."""

import json
import re

from benchmarks import works


def qwen3_5(hidden, layers, heads, kv_heads, value_heads, tied, **feed_forward):
    """Of a model that sees images: the config of its language model, which alone is trained, is within."""
    kind = "qwen3_5_moe" if "num_experts" in feed_forward else "qwen3_5"
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}

    text = {
        "model_type": f"{kind}_text", "hidden_size": hidden, "num_hidden_layers": layers, "head_dim": 256,
        "layer_types": ([*["linear_attention"] * 3, "full_attention"] * layers)[:layers], "vocab_size": 248320,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "attn_output_gate": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
        "rope_parameters": rope | {"mrope_interleaved": True}, **feed_forward,
    }  # fmt: skip

    family = "Qwen3_5MoeForConditionalGeneration" if kind.endswith("moe") else "Qwen3_5ForConditionalGeneration"
    return {
        "architectures": [family], "model_type": kind, "tie_word_embeddings": tied, "text_config": text,
        "vision_config": {},
    }  # fmt: skip


SHAPES = {  # name on the hub → its config.json
    **{f"Qwen/Qwen2.5-{n}B-Instruct": works.MODELS[f"qwen2.5-{n}b"] for n in ("0.5", "1.5", "7", "14", "32", "72")},
    **{f"Qwen/Qwen3-{n}": works.MODELS[f"qwen3-{n.lower()}"] for n in ("30B-A3B", "235B-A22B")},
    "Qwen/Qwen3.5-0.8B": qwen3_5(1024, 24, 8, 2, 16, tied=True, intermediate_size=3584),
    "Qwen/Qwen3.5-4B": qwen3_5(2560, 32, 16, 4, 32, tied=True, intermediate_size=9216),
    "Qwen/Qwen3.5-27B": qwen3_5(5120, 64, 24, 4, 48, tied=False, intermediate_size=17408),
    "Qwen/Qwen3.5-35B-A3B": qwen3_5(
        2048, 40, 16, 2, 32, tied=False, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}  # fmt: skip


def model_folder(name, parent):
    """A folder with the config.json of a model of the hub, and nothing else."""
    folder = parent / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def world_size(path):
    """Ranks that the command in a configuration's first lines starts."""
    nodes, local = (re.search(rf"--{name}[=](\d+)", path.read_text()) for name in ("nnodes", "nproc_per_node"))
    return (int(nodes[1]) if nodes else 1) * int(local[1])
