"""Which key to turn where memory is short, in the order to try them in; support/run/advice.py has those of metrics."""

from typing import NamedTuple


class Remedy(NamedTuple):
    """What sets the memory, and what to turn."""

    sign: str
    turn: list[str]


LESS, MORE = "rollout.gpu_memory_utilization down", "rollout.gpu_memory_utilization up"
SAMPLING = Remedy(
    "rollout.gpu_memory_utilization",
    [LESS, "rollout.vllm.max_num_seqs down", "rollout.tp up", "train.offload=optimizer"],
)
MEMORY = {  # phase → its remedy
    "build": Remedy("parallel.*", ["parallel.tp up", "parallel.pp up", "parallel.ep up", LESS]),
    "rollout": SAMPLING,
    "eval": SAMPLING,
    "logprob": Remedy(
        "train.logprob_max_tokens_per_micro_batch",
        ["train.logprob_max_tokens_per_micro_batch down", "algo.reference_on=host", "parallel.tp up"],
    ),
    "train": Remedy(
        "train.max_tokens_per_micro_batch",
        [
            "train.max_tokens_per_micro_batch down",
            "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1",
            "parallel.tp up",
            "parallel.cp up",
            "megatron.optimizer_cpu_offload=true megatron.use_precision_aware_optimizer=true",
        ],
    ),
    "sync": Remedy("rollout.sync_bucket_mb", ["rollout.sync_bucket_mb down", LESS, "parallel.tp up"]),
    "save": Remedy("parallel.*", ["parallel.tp up", "parallel.pp up", LESS]),
}

HOST_MEMORY = [
    "rollout.tp up: a copy of the weights an engine",
    "reward.workers down",
    "fewer ranks on a machine, or more memory for the job (Slurm: --mem, Docker: --memory)",
]

OTHERS = "end what else uses this GPU (nvidia-smi shows it)"
NO_CACHE = "No available memory for the cache blocks"
VLLM_MEMORY = {  # what vLLM says where memory is short → what to turn; it has a budget of its own, whatever the phase
    NO_CACHE: [MORE, "rollout.tp up", "rollout.vllm.max_num_batched_tokens down"],
    "larger than the available KV cache": [
        MORE, "rollout.tp up", "data.max_prompt_tokens or rollout.max_new_tokens down",
    ],
    "on startup is less than": [LESS, "rollout.tp up", OTHERS],
    "Error in memory profiling": [OTHERS, "start again", LESS],
    "when warming up": ["rollout.vllm.max_num_seqs down", LESS, "rollout.tp up"],
    "out of memory at": [LESS, "parallel.tp up", "parallel.pp up"],  # its allocator, at wake
    "on kv cache allocation is less than": [  # on a CPU
        "VLLM_CPU_KVCACHE_SPACE down", "rollout.tp up", "fewer ranks on a machine",
    ],
}  # fmt: skip


def try_one_of(turn: list[str]) -> str:
    """The remedies as the end of a sentence: "try a, b or c"."""
    if len(turn) == 1:
        return f"try {turn[0]}"
    return f"try {', '.join(turn[:-1])} or {turn[-1]}"
