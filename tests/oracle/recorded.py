"""What a run recorded, and whether it can be repeated."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml


class Refusal(Exception):
    """Why a run cannot be repeated."""


# Section → keys that the second trainer follows. Keys of other sections change nothing that it computes.
FOLLOWED = {
    "model": "path dtype",
    "rollout": "prompts_per_step group_size max_new_tokens temperature lag",
    "algo": "advantage credit loss clip_low clip_high dual_clip loss_norm loss_norm_length kl_coef kl kl_in teacher "
    "teacher_coef entropy_coef old_logp correction correction_level correction_low correction_high max_rounds "
    "overlong_buffer overlong_coef mask_truncated replay_routes reference_every",
    "train": "steps lr warmup_steps weight_decay adam_beta1 adam_beta2 clip_grad updates_per_step epochs_per_step",
    "schedule": "lr kl_coef entropy_coef temperature",
    "lora": "rank alpha targets",
}
# Section → keys that change where and how fast something is computed, or which answers there are, but not the numbers.
WITHOUT_EFFECT = {
    "model": "fp32_head flash_attention",
    "rollout": "turns max_turns top_p top_k tp gpu_memory_utilization max_logp_gap max_mismatch_kl sync_bucket_mb "
    "sleep_level exact vllm",
    "algo": "reference_on",
    "train": "epochs max_tokens_per_micro_batch logprob_max_tokens_per_micro_batch offload save_every keep_last "
    "keep_every export_every stall_timeout_s max_skipped patience check_update eval_every",
    "": "output_dir seed resume data eval reward parallel log profile megatron " + " ".join(FOLLOWED),
}
LEGAL = {  # values that the second trainer knows, of keys that name a branch
    "model.dtype": ("fp32", "bf16"),
    "algo.advantage": ("grpo", "dr_grpo", "rloo", "grpo_loo", "reinforce_pp", "none"),
    "algo.credit": ("to_go", "answer"),
    "algo.loss": ("ppo_clip", "gspo", "cispo", "reinforce"),
    "algo.loss_norm": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "algo.kl": ("k1", "k2", "k3", "k3+"),
    "algo.kl_in": ("loss", "reward"),
    "algo.old_logp": ("trainer", "rollout"),
    "algo.correction": ("none", "tis", "icepop", "seq_mask"),
    "rollout.top_p": (1,),  # else vLLM's log-probs are of a cut distribution
    "rollout.top_k": (-1,),
}
# Options of vLLM that change its memory and speed alone, and fields of Megatron-core of which the same is true.
VLLM_HARMLESS = (
    "max_num_seqs max_num_batched_tokens enforce_eager enable_prefix_caching enable_chunked_prefill swap_space "
    "block_size kv_cache_memory_bytes disable_custom_all_reduce"
)
MEGATRON_HARMLESS = (
    "recompute_granularity recompute_method recompute_num_layers recompute_modules overlap_grad_reduce "
    "overlap_param_gather moe_grouped_gemm bucket_size optimizer_cpu_offload optimizer_offload_fraction"
)


@dataclass
class Recorded:
    """The output folder of a run that can be repeated."""

    folder: Path
    config: dict
    metrics: list[dict]  # of each step, without lines of evaluations before the first

    def rollouts(self, step: int) -> list[dict]:
        """The answers of a step."""
        return read_rows(self.folder / f"rollouts/step_{step:06d}.jsonl")


def read_rows(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_run(folder: Path) -> Recorded:
    """What the run in this output folder recorded. Raises Refusal."""
    if not (folder / "config.yaml").exists():
        raise Refusal(f"{folder} has no config.yaml; give the output_dir of a run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    check_options(config)
    if not any(Path(config["model"]["path"]).glob("*.safetensors")):
        raise Refusal(f"{config['model']['path']}: no folder with safetensors; run with the folder of the model")
    metrics = [line for line in read_rows(folder / "metrics.jsonl") if line["step"] > 0]
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, len(steps) + 1)):
        raise Refusal(f"metrics.jsonl has steps {steps[:3]} ... {steps[-3:]}: every step from 1 is needed, once each")
    for line in metrics:
        if line["loss/total"] is None or line["grad_norm"] is None:
            raise Refusal(f"step {line['step']}: an update with a NaN or infinite loss or gradient cannot be repeated")
    return Recorded(folder, config, metrics)


def check_options(config: dict) -> None:
    """Refuse keys and values that the second trainer does not know, and what makes log-probs others than its own."""
    sections = {section: {*FOLLOWED[section].split(), *WITHOUT_EFFECT.get(section, "").split()} for section in FOLLOWED}
    unknown = config.keys() - set(WITHOUT_EFFECT[""].split())
    unknown |= {f"{section}.{key}" for section, known in sections.items() for key in config[section].keys() - known}
    if unknown:
        raise Refusal(f"{', '.join(sorted(unknown))}: the second trainer knows no such key; add it to tests/oracle/")
    rollout = config["rollout"]
    options = {f"rollout.vllm.{name}" for name in rollout["vllm"].keys() - set(VLLM_HARMLESS.split())}
    options |= {f"megatron.{name}" for name in config["megatron"].keys() - set(MEGATRON_HARMLESS.split())}
    if options:
        raise Refusal(f"{', '.join(sorted(options))}: an option that may change log-probs, which cannot be repeated")
    for key, legal in LEGAL.items():
        section, name = key.split(".")
        if config[section].get(name, legal[0]) not in legal:
            raise Refusal(f"{key}={config[section][name]}: the second trainer knows {', '.join(map(str, legal))}")
    if config["algo"]["replay_routes"] and not config["log"].get("tokens"):
        raise Refusal("algo.replay_routes=true: rollouts/ has the routes only with log.tokens=true of a recipe")
