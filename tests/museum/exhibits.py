"""The exhibits, and the options of their runs. test_museum.py runs them."""

from tests.museum import Exhibit

# Options that all runs have: two replicas, two micro-batches each, one update a step.
COMMON = (
    "train.steps=3", "train.warmup_steps=0", "train.lr=0.001", "train.save_every=0", "rollout.prompts_per_step=4",
    "rollout.group_size=4", "train.max_tokens_per_micro_batch=32", "train.logprob_max_tokens_per_micro_batch=48",
)  # fmt: skip
BF16 = ("model.dtype=bf16", "train.lr=1e-6")  # where log-probs cannot show one push
# {setting: options besides COMMON}; {folder} is that of the tiny models and their data.
SETTINGS = {
    "plain": (),
    "bf16": BF16,
    "temperature": ("rollout.temperature=0.7",),
    "two updates": ("train.updates_per_step=2", "algo.loss_norm=seq_mean_token_mean"),
    "gspo": ("train.updates_per_step=2", "algo.loss=gspo"),
    "kl": ("algo.kl_coef=0.1",),
    "tis": ("algo.correction=tis", "algo.correction_high=0.5", "algo.correction_low=0.25"),
    "no truncated": ("algo.mask_truncated=true",),
    "warm-up": ("train.warmup_steps=10",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2", "rollout.tp=1"),
    "experts": ("model.path={folder}/experts", "parallel.ep=2"),
    "balanced experts": ("model.path={folder}/experts", "megatron.moe_aux_loss_coeff=0.01"),
    "lora": ("lora.rank=4", *BF16),
    "turns": (
        "data.train='123'", "data.custom=tools/tiny_turns.py:rows", "rollout.turns=tools/tiny_turns.py:higher_or_lower",
        "rollout.max_turns=2", "rollout.max_new_tokens=5", "reward.custom=tools/tiny_turns.py:won",
    ),
    "long prompts": ("data.train={folder}/long.jsonl", "data.max_prompt_tokens=300", "train.lr=0.003",
                     "train.max_tokens_per_micro_batch=1024", "train.logprob_max_tokens_per_micro_batch=1024"),
    "chat": ("model.path={folder}/chat", "data.chat_template=true", "data.max_prompt_tokens=16"),
    "failing reward": ("reward.custom={folder}/failing.py:reward",),
    "resumed": ("train.warmup_steps=10",),
}  # fmt: skip

GRADIENTS = [
    Exhibit(
        "mean_of_the_answers_gradients", "gradients", "a shared prompt gets the mean of its answers' gradients",
        "support.model.attention:TakeRows.backward", "sums.to(grad.dtype)",
        "(sums.flatten(1) / counts.clamp(min=1)[:, None]).view_as(sums).to(grad.dtype)",
        "run", "the update is not what its formulas say",
    ),
    Exhibit(
        "not_reduced", "gradients", "the replicas' gradients are not summed",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)", "pass",
        "run", "", "trl#7245",
    ),
    Exhibit(
        "reduced_twice", "gradients", "the replicas' gradients are summed twice",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)",
        "[model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce) for _ in range(2)]",
        "run", "", "verl#4710",
    ),
    Exhibit(
        "shared_weights_not_reduced", "gradients", "gradients of the norms are not summed over tensor-parallel ranks",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "_allreduce_non_tensor_model_parallel_grads(model, config, tp_group)", "pass",
        "run", "", "", "tp",
    ),
    Exhibit(
        "counted_on_every_context_rank", "gradients", "every context-parallel rank counts the tokens of the whole row",
        "train_grpo:forward_step", "denominator * bridge.first_of_context()", "denominator",
        "run", "", "verl#6609, Megatron-LM#673, Megatron-LM#906", "cp",
    ),
    Exhibit(
        "divided_by_accumulation", "gradients", "the loss is also divided by the number of micro-batches",
        "train_grpo:forward_step", "return loss_sum, denominator", "return loss_sum / 2, denominator",
        "run", "", "maxtext#4025",
    ),
    Exhibit(
        "local_token_counts", "gradients", "each micro-batch is divided by its own number of tokens",
        "train_grpo:forward_step", "return loss_sum, denominator *",
        "return loss_sum / denominator.clamp(min=1), denominator.clamp(max=1) *",
        "run", "", "maxtext#4025, verl#5867",
    ),
    Exhibit(
        "not_zeroed", "gradients", "gradients of the previous update are not zeroed",
        "megatron_bridge:zero_gradients", "chunk.zero_grad_buffer()", "pass",
        "test", "tests/museum/test_museum.py::test_updates_begin_without_a_gradient", "", "two updates",
    ),
    Exhibit(
        "sequence_ratio_summed", "gradients", "the ratio of a sequence is the sum of its log-ratios, not their mean",
        "train_grpo:policy_loss", "mean_T = sequence_mean(log_ratio_T.detach(), mask_T, sequence_T)",
        "mean_T = sequence_sum(log_ratio_T.detach() * mask_T, sequence_T)",
        "start", "grpo_loss computes something else", "trl#5814", "gspo",
    ),
    Exhibit(
        "importance_weights_ignored", "gradients", "the loss ignores the importance weights",
        "train_grpo:grpo_loss", "policy_T = policy_T * correction_T", "policy_T = policy_T * 1",
        "start", "grpo_loss computes something else", "Liger-Kernel#1082", "tis",
    ),
    Exhibit(
        "kl_reaches_no_loss", "gradients", "the KL is reported and not in the loss",
        "train_grpo:grpo_loss", 'if algo.kl_in == "loss":', "if False:",
        "start", "grpo_loss computes something else", "molt#130", "kl",
    ),
    Exhibit(
        "entropy_sign", "gradients", "the entropy bonus has the wrong sign",
        "train_grpo:grpo_loss", "loss_T - algo.entropy_coef * entropy_T", "loss_T + algo.entropy_coef * entropy_T",
        "start", "grpo_loss computes something else",
    ),
    Exhibit(
        "aux_loss_window", "gradients", "the balancing loss of experts counts the tokens of prompts and padding",
        "megatron_bridge:hidden_states", '{"padding_mask": untrained}', '{"padding_mask": torch.zeros_like(untrained)}',
        "test", "tests/oracle/test_layouts.py::test_balancing_loss_does_not_depend_on_the_layout",
        "molt#130", "balanced experts",
    ),
    Exhibit(
        "dropout_in_reference", "gradients", "dropout is on in the reference model's pass",
        "train_grpo:with_logprobs", "ref_logp=score(run.model, own_routes, cfg, run.reference)",
        "ref_logp=torch.nn.functional.dropout(score(run.model, own_routes, cfg, run.reference), 0.1)",
        "run", "", "", "kl",
    ),
    Exhibit(
        "dropout_in_training", "gradients", "dropout is on in the training pass",
        "megatron_bridge:transformer_config", "hidden_dropout=0.0", "hidden_dropout=0.1",
        "run", "the update is not what its formulas say",
    ),
]  # fmt: skip

TOKENS = [
    Exhibit(
        "end_token_masked", "tokens", "the end token is masked, since it equals the padding",
        "support.step.records:Sample.sampled", "return np.repeat(by_model, self.turns)",
        "return np.repeat(by_model, self.turns) & (self.response_ids != 0)",
        "run", "", "pytorch/rl#3580",
    ),
    Exhibit(
        "log_probs_off_by_one", "tokens", "vLLM's log-probs are one position away from their tokens",
        "train_grpo:flatten", "s.rollout_logp]", "np.roll(s.rollout_logp, 1)]",
        "run", "",
    ),
    Exhibit(
        "mask_off_by_one", "tokens", "the mask is one position away from the targets",
        "train_grpo:flatten", "s.sampled]", "np.r_[s.sampled[1:], False]]",
        "run", "",
    ),
    Exhibit(
        "tokenised_again", "tokens", "answers are decoded and tokenised again before training",
        "train_grpo:sample_and_grade", "samples.append(Sample.of(group, prompt, c, text, seeds[number]))",
        'samples.append(Sample.of(group, prompt, replace(c, ids=(run.inputs.tokenizer(text)["input_ids"] '
        "+ [0] * len(c.ids))[: len(c.ids)]), text, seeds[number]))",
        "run", "", "verl#3960, verl#6719, prime-rl#1334",
    ),
    Exhibit(
        "template_twice", "tokens", "the chat template is applied to a prompt that has it already",
        "support.data.tokens:prompt_text", '[{"role": "user", "content": value}]',
        '[{"role": "user", "content": tokenizer.apply_chat_template([{"role": "user", "content": value}], '
        "tokenize=False, add_generation_prompt=True)}]",
        "run", "", "", "chat",
    ),
    Exhibit(
        "prompt_trained", "tokens", "the prompt's tokens are in the mask of the loss",
        "train_grpo:flatten", "np.zeros(predicted, bool)", "np.ones(predicted, bool)",
        "run", "",
    ),
    Exhibit(
        "prompt_counted", "tokens", "the prompt's tokens count in the denominator of the loss",
        "train_grpo:flatten", 'trained=rows["mask"] & torch.from_numpy(kept_F)', "trained=torch.from_numpy(kept_F)",
        "run", "",
    ),
    Exhibit(
        "environment_trained", "tokens", "the tokens of an environment are trained",
        "support.step.records:Sample.sampled", "np.arange(len(self.turns)) % 2 == 0", "np.arange(len(self.turns)) >= 0",
        "run", "", "", "turns",
    ),
    Exhibit(
        "truncated_trained", "tokens", "truncated answers are trained though algo.mask_truncated leaves them out",
        "train_grpo:flatten", "s.finished or not mask_truncated", "True",
        "run", "", "", "no truncated",
    ),
    Exhibit(
        "top_k_mass", "tokens", "vLLM samples from the top k, the trainer's log-probs are of all tokens",
        "rollout:Engine.generate", "top_k=sampling.top_k", "top_k=5",
        "run", "trainer and vLLM disagree", "trl#6789",
    ),
    Exhibit(
        "temperature_missing", "tokens", "the trainer's log-probs lack the temperature",
        "megatron_bridge:token_logprobs", "logits.float() / temperature", "logits.float()",
        "run", "trainer and vLLM disagree", "trl#4159", "temperature",
    ),
    Exhibit(
        "raw_log_probs", "tokens", "vLLM returns log-probs from before the temperature",
        "rollout:Engine.__init__", 'logprobs_mode="processed_logprobs"', 'logprobs_mode="raw_logprobs"',
        "run", "trainer and vLLM disagree", "verl#6240", "temperature",
    ),
    Exhibit(
        "positions_run_on", "tokens", "position ids run on across the samples of a packed row",
        "support.step.records:MicroBatch.position_ids", "starts_T = self.cu_seqlens[self.sequence_T]",
        "starts_T = self.cu_seqlens[self.sequence_T] * 0",
        "run", "the update is not what its formulas say",
    ),
    Exhibit(
        "positions_count_padding", "tokens", "position ids of an answer count the padding of its prompt",
        "support.step.records:MicroBatch.position_ids",
        "- starts_T)[None]", "- starts_T + 8 * self.mask[0].int())[None]",
        "run", "position_ids of the update",
    ),
    Exhibit(
        "packed_samples_attend", "tokens", "packed samples attend to each other",
        "support.model.attention:Packing.of",
        "Segments.of(mb.sizes, mb.queries, window, on)",
        "Segments.of(mb.sizes.sum()[None], mb.queries.sum()[None], window, on)",
        "run", "the update is not what its formulas say",
    ),
    Exhibit(
        "answers_attend_to_each_other", "tokens", "the answers to a shared prompt attend to each other",
        "support.model.attention:Packing.of",
        "segments=Segments.of(mb.sizes, mb.queries, window, on),\n"
        "        copies=None if mb.place is None else Copies.of(mb.place, mb.width, on),",
        "segments=Segments.of(*[np.add.reduceat(mb.queries, np.flatnonzero(mb.queries == mb.sizes))] * 2, window, on),",
        "run", "the update is not what its formulas say",
    ),
    Exhibit(
        "first_token_from_another_place", "tokens", "a first token is predicted from the end of another answer",
        "megatron_bridge:own_rows", "mb.place[mb.rows]", 'mb.kept.searchsorted(mb.rows, "right") - 1',
        "run", "the update is not what its formulas say",
    ),
    Exhibit(
        "prompt_of_another_group", "tokens", "all answers of a row share the first group's prompt",
        "support.step.packing:share_positions", "source_T[starts_S[s - 1] :][: shared_S[s]]", "source_T[: shared_S[s]]",
        "run", "",
    ),
    Exhibit(
        "one_seed", "tokens", "the seed does not reach vLLM",
        "rollout:Engine.generate", "n=n, seed=seed", "n=n, seed=0",
        "test", "tests/museum/test_museum.py::test_every_prompt_has_its_own_seed_in_vllm", "trl#7040, vllm#11953",
    ),
]  # fmt: skip

GROUPS = [
    Exhibit(
        "groups_exchanged", "groups", "answers are shuffled, and groups are taken from their old places",
        "train_grpo:group_advantages", 'order = np.argsort(groups_N, kind="stable")',
        "order = np.random.default_rng(0).permutation(len(groups_N))",
        "run", "",
    ),
    Exhibit(
        "advantages_of_another", "groups", "each answer has the advantage of the one before it",
        "train_grpo:add_advantages", "torch.from_numpy(advantages_N).float()",
        "torch.from_numpy(np.roll(advantages_N, 1)).float()",
        "run", "",
    ),
    Exhibit(
        "std_of_the_batch", "groups", "advantages are divided by the standard deviation of the batch",
        "train_grpo:group_advantages", "(r - r.mean()) / (r.std(ddof=1) + 1e-6)",
        "(r - r.mean()) / (rewards_N.std(ddof=1) + 1e-6)",
        "run", "",
    ),
    Exhibit(
        "stale_rewards", "groups", "answers get the rewards of the step before",
        "support.step.grading:GradingPool.collect", "return [future.result() for future in futures]",
        "kept = self.__dict__.get('kept', futures); self.kept = futures; "
        "return [future.result() for future in kept[: len(futures)]]",
        "run", "",
    ),
    Exhibit(
        "rewards_of_another", "groups", "graders return their results in another order",
        "support.step.grading:GradingPool.collect", "return [future.result() for future in futures]",
        "return [future.result() for future in reversed(futures)]",
        "run", "",
    ),
    Exhibit(
        "failed_graders", "groups", "a reward that fails counts as 0 and is trained on",
        "support.step.grading:GradingPool._ask", "future.set_result(Outcome(**fields))",
        'future.set_result(Outcome(parts=fields.get("parts", {"custom": 0.0})))',
        "test", "tests/step/test_step.py::test_a_reward_that_raises_stops_the_run_with_its_row",
        "verl#3407", "failing reward",
    ),
    Exhibit(
        "data_replayed", "groups", "every step takes the same prompts",
        "train_grpo:collect", "run.prompts_taken = taken", "run.prompts_taken = 0",
        "run", "its prompts are not those that follow", "open-instruct#1523",
    ),
    Exhibit(
        "weights_of_all", "groups", "an update is divided by the answers of the whole step",
        "train_grpo:loss_weights", "answers = (tokens_N > 0).sum().clamp(min=1)",
        "answers = (trained_N > 0).sum().clamp(min=1)",
        "run", "", "", "two updates",
    ),
]  # fmt: skip

WEIGHTS = [
    Exhibit(
        "push_lost", "weights", "vLLM never hears of a push",
        "rollout:Engine.load_weights",
        'self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})', "list(stream)",
        "run", "", "trl#5312", "bf16",
    ),
    Exhibit(
        "half_a_push", "weights", "vLLM loads only some of the tensors of a push",
        "rollout:Engine.load_weights", '{"weights_iterator": stream}',
        '{"weights_iterator": (pair for pair in stream if "layers.1" not in pair[0])}',
        "run", "", "", "bf16",
    ),
    Exhibit(
        "tensor_dropped", "weights", "the mapping to Hugging Face leaves a tensor out",
        "megatron_bridge:read_bucket", "yield from zip(names,",
        'yield from () if "self_attn.o_proj" in names[0] else zip(names,',
        "run", "", "prime-rl#2714", "bf16",
    ),
    Exhibit(
        "stale_buffer", "weights", "a push gathers what the first one gathered",
        "megatron_bridge:gather_bucket", "flat[0].copy_(local)",
        "flat[0].copy_(gather_bucket.__dict__.setdefault(tuple(shapes), local.clone()))",
        "run", "", "verl#7904", "bf16",
    ),
    Exhibit(
        "adapters_not_pushed", "weights", "LoRA's adapters never reach vLLM",
        "megatron_bridge:gather_bucket", 'if hasattr(weight, "adapter")', "if False",
        "run", "", "verl#5211", "lora",
    ),
    Exhibit(
        "stale_prefix_cache", "weights", "the prefix cache outlives a push",
        "rollout:Engine.load_weights", "if not self.llm.reset_prefix_cache():", "if False:",
        "run", "trainer and vLLM disagree", "", "long prompts",
    ),
    Exhibit(
        "packed_head", "weights", "a weight that vLLM keeps in its kernel's layout is not packed again",
        "rollout:Engine.load_weights", "self.llm.apply_model(cpu_engine.repack_lm_head)", "pass",
        "run", "", "SkyRL#1680", "bf16",
    ),
    Exhibit(
        "experts_in_another_order", "weights", "expert weights are read in another order",
        "megatron_bridge:expert_of", "ep_rank * experts_per_rank + int(local[0])",
        "ep_rank * experts_per_rank + experts_per_rank - 1 - int(local[0])",
        "run", "", "verl#2319", "experts",
    ),
    Exhibit(
        "rows_exchanged", "weights", "key and value are exchanged in the mapping of names",
        "megatron_bridge:split_parts", "whole.split([heads * width, width, width], dim=1)",
        "(lambda q, k, v: (q, v, k))(*whole.split([heads * width, width, width], dim=1))",
        "start", "", "", "bf16",
    ),
    Exhibit(
        "replicas_not_gathered", "weights", "replicas do not get each other's part of the updated weights",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        "not self.ddp_config.overlap_param_gather", "False",
        "run", "", "",
    ),
    Exhibit(
        "reference_follows", "weights", "the reference model is the policy itself",
        "megatron_bridge:copy_weights", "return [weight.clone() for weight in weights]", "return weights",
        "run", "", "", "kl",
    ),
    Exhibit(
        "moments_lost", "weights", "a resume loses Adam's moments",
        "support.model.optimizer_state:load_state", "for moment in MOMENTS:", 'for moment in ("param",):',
        "run", "", "molt#130", "resumed",
    ),
    Exhibit(
        "adam_steps_lost", "weights", "a resume begins to count Adam's steps again",
        "support.model.optimizer_state:load_state", "set_adam_steps(part, steps)", "set_adam_steps(part, 0)",
        "run", "", "molt#130", "resumed",
    ),
    Exhibit(
        "lr_ignored", "weights", "the optimizer keeps the learning rate that it was built with",
        "megatron_bridge:optimizer_step", 'group["lr"] = lr', 'group.setdefault("lr", lr)',
        "run", "", "molt#130", "warm-up",
    ),
    Exhibit(
        "lr_ignored_at_resume", "weights", "a resumed run ignores the learning rate of its step",
        "megatron_bridge:optimizer_step", 'group["lr"] = lr', 'group.setdefault("lr", lr)',
        "run", "", "molt#130", "resumed",
    ),
]  # fmt: skip

EXHIBITS = {exhibit.name: exhibit for exhibit in GRADIENTS + TOKENS + GROUPS + WEIGHTS}
