"""Operations and bytes of a step against its seconds: tokens/s, model FLOPs utilisation, rate of the weight push."""

import torch
import torch.distributed as dist

import megatron_bridge as bridge
from config import Config
from support.step.records import Sample

# Part of a GPU's name → its dense rate in bf16 and in fp16, 10¹² operations a second by NVIDIA's data sheets; the first
# that fits.
HALF_RATES = {
    "GB200": 2500, "B200": 2250, "H100 PCIe": 756, "H100 NVL": 835, "GH200": 989, "H200": 989, "H100": 989, "H800": 989,
    "H20": 148, "A100": 312, "A800": 312, "A40": 150, "L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def gpu_rate(dtype: str) -> float | None:
    """Operations a second of this rank's GPU in bf16 or fp16; None on a CPU, in fp32 and for an unknown GPU."""
    if dtype == "fp32" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((rate * 1e12 for part, rate in HALF_RATES.items() if part in name), None)


def matrix_weights(hf, active: bool) -> int:
    """Weights of the matrices that a token meets, the output layer included; not `active`: of all experts."""
    h = hf.hidden_size
    attention = 2 * h * bridge.head_dim(hf) * (hf.num_attention_heads + hf.num_key_value_heads)
    block = 3 * h * hf.intermediate_size
    if getattr(hf, "num_experts_per_tok", None):
        experts = bridge.num_experts(hf)
        count = hf.num_experts_per_tok if active else experts
        shared = getattr(hf, "shared_expert_intermediate_size", 0)
        block = h * (experts + 3 * count * bridge.expert_width(hf) + 3 * shared)
    return hf.num_hidden_layers * (attention + block) + hf.vocab_size * h


def train_flops(hf, tokens: int, attended: int) -> float:
    """Floating-point operations of forward and backward; recomputation does not count.

    6 for each of the `tokens` and each weight of a matrix that it meets; for each layer and each dimension of its heads
    6 for each of `attended`, twice the number of pairs of causal attention: s² of a sequence of s tokens.
    """
    width = hf.num_hidden_layers * hf.num_attention_heads * bridge.head_dim(hf)
    return 6.0 * matrix_weights(hf, active=True) * tokens + 6.0 * width * attended


def speed_metrics(
    samples: list[Sample], reports: list[dict[str, float]], hf, cfg: Config, seconds: dict[str, float]
) -> dict[str, float | None]:
    """Rates of a step a rank, and its FLOPs utilisation, None without a known GPU; computed tokens of this replica."""
    pushed = matrix_weights(hf, active=False)
    if not hf.tie_word_embeddings:
        pushed += hf.vocab_size * hf.hidden_size
    ranks = dist.get_world_size() // bridge.mpu.get_data_parallel_world_size()  # of a replica
    tokens, attended = (sum(report[name] for report in reports) / ranks for name in ("real", "attended"))
    numbers = {
        "speed/tokens_per_s_per_rank": sum(s.positions + 1 for s in samples) / dist.get_world_size() / seconds["step"],
        "speed/computed_tokens_per_s_per_rank": tokens / seconds["train"],
        "speed/sync_gb_per_s": pushed * bridge.DTYPES[cfg.model.dtype].itemsize / 1e9 / seconds["sync"],
        "speed/mfu_train": None,
        "speed/mfu_step": None,
    }
    rate = gpu_rate(cfg.model.dtype)
    if rate is not None:
        flops = train_flops(hf, tokens, attended)
        numbers["speed/mfu_train"] = flops / seconds["train"] / rate
        numbers["speed/mfu_step"] = flops / seconds["step"] / rate
    return numbers
