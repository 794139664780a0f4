"""The failures of the museum that TRL 1.16's code can have as well, each as a mutant of that code by one line.

Not here: what needs packed rows, tensor or context parallelism, experts, vLLM or an environment; TRL samples with
transformers in these runs. tools/museum_trl.py trains with them.
"""

import dataclasses

from tests.museum import Exhibit
from tests.museum.exhibits import EXHIBITS

TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
SCORE = f"{TRAINER}._generate_and_score_completions"
LOSS = f"{TRAINER}._compute_loss"
REWARDS = "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)"
# {setting: options of GRPOConfig}
SETTINGS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "two updates": {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "gspo": {"num_iterations": 2, "importance_sampling_level": "sequence"},
    "kl": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "temperature": {"temperature": 0.7},
    "no truncated": {"mask_truncated_completions": True},
    "warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
}
# {name of an exhibit: (setting, function of TRL or of what it stands on, piece of its source, what the bug has there)}
MUTANTS = {
    "not_reduced": (
        "plain", "accelerate.accelerator:Accelerator.prepare_model",
        "model = torch.nn.parallel.DistributedDataParallel(model, **kwargs)", "return model",
    ),
    "divided_by_accumulation": (
        "accumulation", LOSS, "loss = (per_token_loss * mask).sum() / normalizer",
        "loss = (per_token_loss * mask).sum() / normalizer / self.current_gradient_accumulation_steps",
    ),
    "local_token_counts": (
        "plain", LOSS, 'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes', "mask.sum()",
    ),
    "not_zeroed": ("two updates", "transformers.trainer:Trainer._run_epoch", "model.zero_grad()", "pass"),
    "sequence_ratio_summed": (
        "gspo", LOSS, "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)", "(log_ratio * mask).sum(-1)",
    ),
    "kl_reaches_no_loss": ("kl", LOSS, "per_token_loss = per_token_loss + self.beta * per_token_kl", "pass"),
    "entropy_sign": ("entropy", LOSS, "loss - apply_coef * entropy_loss", "loss + apply_coef * entropy_loss"),
    "end_token_masked": (
        "plain", SCORE, "torch.ones_like(ids, dtype=torch.long) for ids in completion_ids",
        "(ids != self._tokenizer.eos_token_id).long() for ids in completion_ids",
    ),
    "mask_off_by_one": (
        "plain", LOSS, "mask = completion_mask if", "mask = torch.roll(completion_mask, 1, 1) if",
    ),
    "truncated_trained": ("no truncated", SCORE, "if self.mask_truncated_completions:", "if False:"),
    "temperature_missing": (
        "temperature", "trl.trainer.utils:add_fused_lm_head", "original_forward = model.forward",
        "original_forward, temperature = model.forward, 1.0",
    ),
    "groups_exchanged": (
        "plain", SCORE, "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)",
        "mean_grouped_rewards = torch.nanmean(rewards.roll(1).view(-1, num_generations), dim=1)",
    ),
    "advantages_of_another": (
        "plain", SCORE, "advantages = advantages[process_slice]", "advantages = advantages.roll(1)[process_slice]",
    ),
    "std_of_the_batch": (
        "plain", SCORE, "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)",
        "std_rewards = nanstd(rewards).expand(len(rewards) // num_generations)",
    ),
    "stale_rewards": (
        "plain", SCORE, f"rewards_per_func = {REWARDS}",
        f"rewards_per_func, self.before = (lambda now: (getattr(self, 'before', now), now))({REWARDS})",
    ),
    "rewards_of_another": ("plain", SCORE, f"rewards_per_func = {REWARDS}", f"rewards_per_func = {REWARDS}.roll(1, 0)"),
    "data_replayed": (
        "plain", "trl.trainer.utils:RepeatSampler.__iter__", "for chunk in indexes:", "for chunk in indexes[:1] * 9:",
    ),
    "weights_of_all": (
        "two updates", LOSS, "self.current_gradient_accumulation_steps / self.args.steps_per_generation", "1",
    ),
    "reference_follows": ("kl", SCORE, "self.ref_model,", "self.model,"),
    "lr_ignored": ("warm-up", "transformers.trainer:Trainer._run_epoch", "self.lr_scheduler.step()", "pass"),
}  # fmt: skip


def mutant(name: str) -> Exhibit:
    """The exhibit with TRL's function in place of ours."""
    setting, function, before, after = MUTANTS[name]
    return dataclasses.replace(EXHIBITS[name], setting=setting, function=function, before=before, after=after)
