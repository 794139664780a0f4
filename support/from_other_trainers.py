"""Keys of verl, TRL and ROLL, and what they are here. docs/from-other-trainers.md shows these tables.

Run as a program it writes the tables into that page anew.
"""

import itertools
from pathlib import Path

from config import Config, UserError
from support.read_config import KEYS, SECTIONS, load_config, read_file, read_override

# Their key → (ours, or None where there is nothing to set; what to mind).
VERL = {
    "data.train_files": ("data.train", ""),
    "data.val_files": ("data.eval", "read where train.eval_every is above 0"),
    "data.custom_cls.path": ("data.custom", "path:function, which yields the rows as dicts; docs/data.md"),
    "data.reward_fn_key": ("data.source_key", "reward.by_source chooses the reward of each source"),
    "data.train_batch_size": ("rollout.prompts_per_step", "prompts, as there"),
    "data.max_prompt_length": ("data.max_prompt_tokens", "longer prompts are dropped and counted"),
    "data.max_response_length": ("rollout.max_new_tokens", ""),
    "data.filter_overlong_prompts": (None, "always so; they are counted"),
    "data.truncation": (None, "prompts are never cut, longer ones are dropped"),
    "data.shuffle": (None, "always, anew each epoch, by seed"),
    "data.seed": ("seed", ""),
    "data.apply_chat_template_kwargs": ("data.template_kwargs", ""),
    "actor_rollout_ref.model.path": ("model.path", ""),
    "actor_rollout_ref.model.use_remove_padding": (None, "always: answers are packed, nothing is padded"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        "megatron.recompute_granularity",
        "full, with megatron.recompute_method=uniform megatron.recompute_num_layers=1",
    ),
    "actor_rollout_ref.model.lora_rank": ("lora.rank", "docs/lora.md"),
    "actor_rollout_ref.model.lora_alpha": ("lora.alpha", ""),
    "actor_rollout_ref.model.target_modules": ("lora.targets", "qkv, proj, fc1, fc2; all of them is all-linear"),
    "actor_rollout_ref.actor.strategy": (None, "always Megatron-core"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "train.updates_per_step",
        "a count of updates: data.train_batch_size / ppo_mini_batch_size",
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ("train.max_tokens_per_micro_batch", "in tokens, not samples"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "train.max_tokens_per_micro_batch",
        "in tokens, not samples: times the length of prompt and answer; gradients do not depend on it",
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (
        "train.max_tokens_per_micro_batch",
        "of a row, which parallel.cp ranks share: times parallel.cp",
    ),
    "actor_rollout_ref.actor.use_dynamic_bsz": (None, "always"),
    "actor_rollout_ref.actor.ppo_epochs": ("train.epochs_per_step", ""),
    "actor_rollout_ref.actor.clip_ratio": ("algo.clip_low", "and algo.clip_high, both the same"),
    "actor_rollout_ref.actor.clip_ratio_low": ("algo.clip_low", ""),
    "actor_rollout_ref.actor.clip_ratio_high": ("algo.clip_high", ""),
    "actor_rollout_ref.actor.clip_ratio_c": ("algo.dual_clip", "3.0 there unless set, off here"),
    "actor_rollout_ref.actor.loss_agg_mode": ("algo.loss_norm", "with _ for -: token_mean, seq_mean_token_mean, …"),
    "actor_rollout_ref.actor.loss_scale_factor": ("algo.loss_norm_length", ""),
    "actor_rollout_ref.actor.entropy_coeff": ("algo.entropy_coef", ""),
    "actor_rollout_ref.actor.use_kl_loss": ("algo.kl_coef", "false is 0; true is kl_loss_coef, with algo.kl_in=loss"),
    "actor_rollout_ref.actor.kl_loss_coef": ("algo.kl_coef", "with algo.kl_in=loss"),
    "actor_rollout_ref.actor.kl_loss_type": ("algo.kl", "low_var_kl is k3, kl is k1, mse is k2"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("algo.loss", "vanilla is ppo_clip"),
    "actor_rollout_ref.actor.grad_clip": ("train.clip_grad", ""),
    "actor_rollout_ref.actor.router_replay.mode": ("algo.replay_routes", "R3 is true; R2 is not here"),
    "actor_rollout_ref.actor.optim.lr": ("train.lr", ""),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("train.warmup_steps", ""),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        "train.warmup_steps",
        "in steps: the ratio times train.steps",
    ),
    "actor_rollout_ref.actor.optim.lr_decay_style": (None, "constant after the warm-up"),
    "actor_rollout_ref.actor.optim.weight_decay": ("train.weight_decay", "0.01 there unless set, 0 here"),
    "actor_rollout_ref.actor.optim.betas": ("train.adam_beta1", "and train.adam_beta2"),
    "actor_rollout_ref.actor.optim.clip_grad": ("train.clip_grad", ""),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": ("parallel.tp", "of trainer and reference model"),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": ("parallel.pp", ""),
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": ("parallel.vpp", ""),
    "actor_rollout_ref.actor.megatron.context_parallel_size": ("parallel.cp", ""),
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": ("parallel.ep", ""),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": ("parallel.etp", ""),
    "actor_rollout_ref.actor.megatron.sequence_parallel": ("parallel.sp", ""),
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer": (None, "always"),
    "actor_rollout_ref.actor.megatron.override_transformer_config": ("megatron", "each field under its own name"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        "train.logprob_max_tokens_per_micro_batch",
        "in tokens, not samples; of old and reference log-probs alike",
    ),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": ("train.logprob_max_tokens_per_micro_batch", ""),
    "actor_rollout_ref.rollout.name": (None, "always vLLM"),
    "actor_rollout_ref.rollout.mode": (None, "vLLM runs in the trainer's own processes"),
    "actor_rollout_ref.rollout.n": ("rollout.group_size", ""),
    "actor_rollout_ref.rollout.response_length": ("rollout.max_new_tokens", ""),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("rollout.tp", ""),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("rollout.gpu_memory_utilization", ""),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature", ""),
    "actor_rollout_ref.rollout.enforce_eager": ("rollout.vllm.enforce_eager", ""),
    "actor_rollout_ref.rollout.max_num_batched_tokens": ("rollout.vllm.max_num_batched_tokens", ""),
    "actor_rollout_ref.rollout.max_num_seqs": ("rollout.vllm.max_num_seqs", ""),
    "actor_rollout_ref.rollout.free_cache_engine": (None, "always: vLLM sleeps while the trainer works"),
    "actor_rollout_ref.rollout.multi_turn.enable": ("rollout.turns", "path:function, which replies; docs/turns.md"),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": ("rollout.max_turns", ""),
    "actor_rollout_ref.rollout.val_kwargs.n": ("eval.samples", ""),
    "actor_rollout_ref.rollout.val_kwargs.temperature": ("eval.temperature", ""),
    "algorithm.adv_estimator": ("algo.advantage", ""),
    "algorithm.norm_adv_by_std_in_grpo": ("algo.advantage", "true is grpo, false is dr_grpo"),
    "algorithm.use_kl_in_reward": ("algo.kl_in", "reward or loss"),
    "algorithm.kl_ctrl.kl_coef": ("algo.kl_coef", "with algo.kl_in=reward"),
    "algorithm.gamma": (None, "there is no discount"),
    "algorithm.filter_groups.enable": ("algo.max_rounds", "false is 1"),
    "algorithm.filter_groups.max_num_gen_batches": ("algo.max_rounds", "the step goes on after the last round"),
    "algorithm.rollout_correction.rollout_is": ("algo.correction", "tis, with algo.correction_level"),
    "algorithm.rollout_correction.rollout_is_threshold": ("algo.correction_high", ""),
    "reward_model.model.path": ("reward.options", "reward.default=model reward.options.model.path=…"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": ("algo.overlong_buffer", ""),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": ("algo.overlong_coef", ""),
    "custom_reward_function.path": ("reward.custom", "path:name, with reward.default=custom; docs/rewards.md"),
    "custom_reward_function.name": ("reward.custom", "path:name"),
    "critic": (None, "there is no critic; docs/recipes.md adds one"),
    "trainer.total_epochs": ("train.epochs", "passes over data.train, instead of train.steps"),
    "trainer.total_training_steps": ("train.steps", ""),
    "trainer.save_freq": ("train.save_every", "-1 is 0"),
    "trainer.test_freq": ("train.eval_every", "-1 is 0"),
    "trainer.val_before_train": (None, "always, where train.eval_every is above 0"),
    "trainer.max_actor_ckpt_to_keep": ("train.keep_last", ""),
    "trainer.default_local_dir": ("output_dir", ""),
    "trainer.resume_mode": ("resume", "auto, or none for disable"),
    "trainer.resume_from_path": ("resume", "the folder of a checkpoint"),
    "trainer.n_gpus_per_node": (None, "torchrun --nproc_per_node"),
    "trainer.nnodes": (None, "torchrun --nnodes"),
    "trainer.logger": (None, "log.tensorboard, log.wandb; metrics.jsonl always"),
    "trainer.project_name": (None, "output_dir names a run"),
    "trainer.experiment_name": (None, "output_dir names a run"),
}
TRL = {
    "model_name_or_path": ("model.path", ""),
    "dataset_name": ("data.train", ""),
    "num_generations": ("rollout.group_size", ""),
    "num_generations_eval": ("eval.samples", ""),
    "max_prompt_length": ("data.max_prompt_tokens", "longer prompts are dropped, not cut"),
    "max_completion_length": ("rollout.max_new_tokens", ""),
    "per_device_train_batch_size": ("train.max_tokens_per_micro_batch", "in tokens, not samples"),
    "gradient_accumulation_steps": (None, "follows from rollout.prompts_per_step and train.updates_per_step"),
    "generation_batch_size": ("rollout.prompts_per_step", "in prompts: divided by num_generations"),
    "steps_per_generation": ("train.updates_per_step", ""),
    "num_iterations": ("train.epochs_per_step", ""),
    "num_train_epochs": ("train.epochs", "passes over data.train, instead of train.steps"),
    "max_steps": ("train.steps", "a step samples once, and has train.updates_per_step updates"),
    "learning_rate": ("train.lr", ""),
    "lr_scheduler_type": (None, "constant after train.warmup_steps"),
    "warmup_steps": ("train.warmup_steps", ""),
    "warmup_ratio": ("train.warmup_steps", "in steps: the ratio times train.steps"),
    "weight_decay": ("train.weight_decay", ""),
    "adam_beta1": ("train.adam_beta1", ""),
    "adam_beta2": ("train.adam_beta2", ""),
    "max_grad_norm": ("train.clip_grad", ""),
    "bf16": ("model.dtype", "bf16 or fp32"),
    "gradient_checkpointing": (
        "megatron.recompute_granularity",
        "full, with recompute_method and recompute_num_layers",
    ),
    "temperature": ("rollout.temperature", ""),
    "top_p": ("rollout.top_p", ""),
    "top_k": ("rollout.top_k", "all is -1 here, 0 there"),
    "beta": ("algo.kl_coef", "with algo.kl=k3"),
    "epsilon": ("algo.clip_low", "and algo.clip_high, both the same"),
    "epsilon_high": ("algo.clip_high", ""),
    "delta": ("algo.dual_clip", ""),
    "loss_type": ("algo.loss_norm", "dapo: token_mean, grpo: seq_mean_token_mean, dr_grpo: seq_mean_token_sum_norm"),
    "importance_sampling_level": ("algo.loss", "sequence is gspo"),
    "scale_rewards": ("algo.advantage", "group is grpo, none is dr_grpo"),
    "mask_truncated_completions": ("algo.mask_truncated", ""),
    "reward_funcs": ("reward.default", "a name of docs/rewards.md, or custom"),
    "reward_weights": ("reward.default", "{name: weight, name: weight}"),
    "vllm_importance_sampling_correction": ("algo.correction", "tis, icepop or seq_mask; on there, off here"),
    "vllm_importance_sampling_cap": ("algo.correction_high", ""),
    "use_vllm": (None, "always"),
    "vllm_mode": (None, "always colocate"),
    "vllm_gpu_memory_utilization": ("rollout.gpu_memory_utilization", ""),
    "vllm_tensor_parallel_size": ("rollout.tp", ""),
    "vllm_enable_sleep_mode": (None, "always"),
    "chat_template_kwargs": ("data.template_kwargs", ""),
    "save_steps": ("train.save_every", ""),
    "save_total_limit": ("train.keep_last", ""),
    "eval_steps": ("train.eval_every", ""),
    "resume_from_checkpoint": ("resume", "auto, or the folder of a checkpoint"),
    "report_to": (None, "log.tensorboard, log.wandb; metrics.jsonl always"),
}
ROLL = {
    "pretrain": ("model.path", ""),
    "rollout_batch_size": ("rollout.prompts_per_step", ""),
    "num_return_sequences_in_group": ("rollout.group_size", ""),
    "prompt_length": ("data.max_prompt_tokens", "longer prompts are dropped, not cut"),
    "response_length": ("rollout.max_new_tokens", ""),
    "ppo_epochs": ("train.epochs_per_step", ""),
    "adv_estimator": ("algo.advantage", ""),
    "pg_clip": ("algo.clip_low", "and algo.clip_high, both the same"),
    "pg_clip_low": ("algo.clip_low", ""),
    "pg_clip_high": ("algo.clip_high", ""),
    "dual_clip_loss": ("algo.dual_clip", "true is 1 + 2 pg_clip"),
    "use_kl_loss": ("algo.kl_coef", "false is 0; true is kl_loss_coef, with algo.kl_in=loss"),
    "kl_loss_coef": ("algo.kl_coef", "with algo.kl_in=loss"),
    "add_token_level_kl": ("algo.kl_in", "true is reward"),
    "init_kl_coef": ("algo.kl_coef", "with algo.kl_in=reward; it stays as it is"),
    "entropy_loss_coef": ("algo.entropy_coef", ""),
    "loss_agg_mode": ("algo.loss_norm", "with _ for -"),
    "whiten_advantages": ("algo.advantage", "reinforce_pp whitens over the batch"),
    "advantage_clip": (None, "advantages are not clipped"),
    "reward_clip": (None, "rewards are not clipped"),
    "max_len_mask": ("algo.mask_truncated", ""),
    "rewards": ("reward.by_source", "the reward of each source; tag_included is data.source_key"),
    "actor_train.training_args.learning_rate": ("train.lr", ""),
    "actor_train.training_args.per_device_train_batch_size": ("train.max_tokens_per_micro_batch", "in tokens"),
    "actor_train.training_args.gradient_accumulation_steps": (
        None,
        "follows from rollout.prompts_per_step and train.updates_per_step",
    ),
    "actor_train.training_args.warmup_steps": ("train.warmup_steps", ""),
    "actor_train.training_args.weight_decay": ("train.weight_decay", ""),
    "actor_train.data_args.file_name": ("data.train", ""),
    "actor_train.data_args.domain_interleave_probs": ("data.train", "{file: weight, file: weight}"),
    "actor_train.strategy_args.strategy_name": (None, "always Megatron-core"),
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": ("parallel.tp", ""),
    "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": ("parallel.pp", ""),
    "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": ("parallel.vpp", ""),
    "actor_train.strategy_args.strategy_config.expert_model_parallel_size": ("parallel.ep", ""),
    "actor_train.strategy_args.strategy_config.context_parallel_size": ("parallel.cp", ""),
    "actor_train.strategy_args.strategy_config.recompute_granularity": ("megatron.recompute_granularity", ""),
    "actor_train.infer_batch_size": ("train.logprob_max_tokens_per_micro_batch", "in tokens, not samples"),
    "reference.infer_batch_size": ("train.logprob_max_tokens_per_micro_batch", "in tokens, not samples"),
    "actor_infer.generating_args.temperature": ("rollout.temperature", ""),
    "actor_infer.generating_args.top_p": ("rollout.top_p", ""),
    "actor_infer.generating_args.max_new_tokens": ("rollout.max_new_tokens", ""),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": ("rollout.gpu_memory_utilization", ""),
    "validation.generating_args.temperature": ("eval.temperature", ""),
    "validation.generating_args.num_return_sequences": ("eval.samples", ""),
    "validation.data_args.file_name": ("data.eval", ""),
    "device_mapping": (None, "torchrun's ranks; trainer and vLLM share all GPUs"),
    "num_gpus_per_node": (None, "torchrun --nproc_per_node"),
    "logging_dir": ("output_dir", ""),
    "track_with": (None, "log.tensorboard, log.wandb; metrics.jsonl always"),
}
TRAINERS = {"verl": VERL, "TRL": TRL, "ROLL": ROLL}
PAGE = Path(__file__).resolve().parent.parent / "docs/from-other-trainers.md"


def load(path: str, overrides: list[str]) -> Config:
    """`load_config`, which answers keys of other trainers with ours, all of them at once. Raises UserError."""
    try:
        return load_config(path, overrides)
    except UserError as error:
        if "unknown key" not in str(error):
            raise
        layers = [read_file(Path(path)), *map(read_override, overrides)]
        answers = [translation(key) for layer in layers for key in keys_of(layer)]
        found = list(dict.fromkeys(filter(None, answers)))
        if not found:
            raise
        raise UserError("\n       ".join(found)) from None


def keys_of(tree: dict, above: str = "") -> list[str]:
    """Dotted keys of a tree's values."""
    keys = []
    for key, value in tree.items():
        keys += keys_of(value, f"{above}{key}.") if isinstance(value, dict) and value else [f"{above}{key}"]
    return keys


def translation(key: str) -> str | None:
    """What to say of a dotted key that is not ours; None where it is, or where no other trainer has one like it.

    Like it is a key of theirs itself, a section that it is in, or one with the same end: two names, or one with a "_"
    that is not ours in another section.
    """
    if any(f"{key}.".startswith(f"{known}.") for known in KEYS if known not in SECTIONS):
        return None
    alike = [(likeness(key, theirs), trainer, theirs) for trainer, table in TRAINERS.items() for theirs in table]
    best, trainer, theirs = max(alike, key=lambda match: match[0])
    if not best:
        return None
    ours, note = TRAINERS[trainer][theirs]
    whose = f", of {trainer}" if key == theirs else f", like {theirs} of {trainer}"
    here = f"here {ours}" if ours else "nothing to set here"
    return f"unknown key {key!r}{whose}; {here}" + (f": {note}" if note else "")


def likeness(key: str, theirs: str) -> int:
    if f"{key}.".startswith(f"{theirs}."):
        return 100
    names = zip(reversed(key.split(".")), reversed(theirs.split(".")), strict=False)
    common = [name for name, other in itertools.takewhile(lambda pair: pair[0] == pair[1], names)]
    ours = len(common) == 1 and common[0] in {known.rpartition(".")[2] for known in KEYS}
    return len(common) if len(common) > 1 or ("_" in "".join(common) and not ours) else 0


def tables() -> str:
    """The tables as Markdown."""
    parts = []
    for trainer, table in TRAINERS.items():
        rows = [f"| `{theirs}` | {f'`{ours}`' if ours else '–'} | {note} |" for theirs, (ours, note) in table.items()]
        parts.append("\n".join([f"## {trainer}", "", f"| {trainer} | here | |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def page() -> str:
    """docs/from-other-trainers.md with the tables as they are now: what stands above the first of them is kept."""
    return PAGE.read_text().partition("\n## ")[0] + "\n" + tables()


if __name__ == "__main__":
    PAGE.write_text(page())
