"""The options of the museum's runs."""

# Options that all runs have: two replicas, two micro-batches each, one update a step.
COMMON = (
    "train.steps=3", "train.warmup_steps=0", "train.lr=0.001", "train.save_every=0", "rollout.prompts_per_step=4",
    "rollout.group_size=4", "train.max_tokens_per_micro_batch=32", "train.logprob_max_tokens_per_micro_batch=48",
)  # fmt: skip
BF16 = ("model.dtype=bf16", "train.lr=1e-6")  # where log-probs cannot show one push
FAST = ("model.dtype=bf16", "train.lr=0.001")  # where an update is more than a rounding
TURNS = (
    "data.train='123'", "data.custom=examples/tiny_turns.py:rows",
    "rollout.turns=examples/tiny_turns.py:higher_or_lower",
    "rollout.max_turns=2", "rollout.max_new_tokens=5", "reward.custom=examples/tiny_turns.py:won",
)  # fmt: skip
TAUGHT = ("algo.teacher=self", "data.hint_key=answer", "data.max_prompt_tokens=16")
WEIGHTED = ("reward.by_source={reverse: {custom: 0.5, length: 0.25}}", "reward.options={length: {limit: 3}}")
EXPERTS = ("model.path={folder}/experts", "parallel.ep=2")
# {setting: options besides COMMON}. {folder} is the folder of the tiny models and their data.
SETTINGS = {
    "plain": (),
    "bf16": BF16,
    "bf16, unmatched": ("model.match_engine=false", *BF16),
    "temperature": ("rollout.temperature=0.7",),
    "two updates": ("train.updates_per_step=2", "algo.loss_norm=seq_mean_token_mean"),
    "gspo": ("train.updates_per_step=2", "algo.loss=gspo"),
    "kl": ("algo.kl_coef=0.1",),
    "tis": ("algo.correction=tis", "algo.correction_high=0.5", "algo.correction_low=0.25"),
    "no truncated": ("algo.mask_truncated=true",),
    "warm-up": ("train.warmup_steps=10",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2", "rollout.tp=1"),
    "experts": EXPERTS,
    "balanced experts": ("model.path={folder}/experts", "megatron.moe_aux_loss_coeff=0.01"),
    "lora": ("lora.rank=4", *BF16),
    "turns": TURNS,
    "long prompts": ("data.train={folder}/long.jsonl", "data.max_prompt_tokens=300", "train.lr=0.003",
                     "train.max_tokens_per_micro_batch=1024", "train.logprob_max_tokens_per_micro_batch=1024"),
    "chat": ("model.path={folder}/chat", "data.chat_template=true", "data.max_prompt_tokens=16"),
    "failing reward": ("reward.custom={folder}/failing.py:reward",),
    "resumed": ("train.warmup_steps=10",),
    "two epochs": ("data.train={folder}/few.jsonl", "rollout.prompts_per_step=8"),
    "weighted": WEIGHTED,
    "evaluated": ("data.eval={folder}/few.jsonl", "train.eval_every=2", "eval.temperature=0.5"),
    # in half precision, as people train
    "bf16, fast": FAST,
    "bf16, exported": ("train.export_every=1", *FAST),
    "bf16, q and k norms": ("model.path={folder}/norms", *FAST),
    "bf16, decay": ("train.weight_decay=1.0", *FAST),
    "bf16, two updates": ("train.updates_per_step=2", *FAST),
    "bf16, clipped ratios": ("train.updates_per_step=2", "train.epochs_per_step=2", "algo.clip_low=0.02",
                             "algo.clip_high=0.05", *FAST),
    "bf16, kl": ("algo.kl_coef=0.1", *FAST),
    "bf16, kl in reward": ("algo.kl_coef=0.5", "algo.kl_in=reward", *FAST),
    "bf16, schedules": ("schedule.entropy_coef={to: 0.5}", "schedule.lr={to: 0.0001}", *FAST),
    "bf16, lora": ("lora.rank=4", *FAST),
    "bf16, lora, tp": ("lora.rank=4", "parallel.tp=2", *FAST),
    "bf16, tp": ("parallel.tp=2", *FAST),
    "bf16, pp": ("model.path={folder}/untied", "parallel.pp=2", "train.clip_grad=0.05", *FAST),
    "bf16, experts": (*EXPERTS, *FAST),
    "bf16, balanced experts": (*EXPERTS, "megatron.moe_aux_loss_coeff=0.1", *FAST),
    "bf16, routes": (*EXPERTS, "algo.replay_routes=true", *BF16),
    "bf16, large groups": ("rollout.group_size=32", "rollout.prompts_per_step=8",
                           "train.max_tokens_per_micro_batch=1024", *FAST),
    "bf16, qwen3.5": ("model.path={folder}/qwen3.5", *FAST),
    "bf16, qwen3.5, lora": ("model.path={folder}/qwen3.5", "lora.rank=4", *FAST),
    "bf16, turns": (*TURNS, "rollout.max_turns=3", "rollout.max_new_tokens=8",
                    "rollout.stop_token_ids=[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]", *FAST),  # a digit ends a turn
    "bf16, top_p": ("rollout.top_p=0.8", *FAST),
    "bf16, dynamic": ("algo.max_rounds=2", *FAST),
    "bf16, hinted": (*TAUGHT, *FAST),
    "teacher, reverse": (*TAUGHT, "algo.teacher_kl=reverse", "algo.kl_coef=0.1", "algo.kl=full"),
    "teacher, forward": (*TAUGHT, "algo.teacher_kl=forward", "rollout.temperature=0.7"),
    "teacher, jsd": (*TAUGHT, "algo.teacher_kl=jsd", "algo.teacher_beta=0.2", "rollout.top_p=0.9"),
    "teacher, top k, tp": (*TAUGHT, "algo.teacher_kl=reverse", "algo.teacher_top_k=4", "parallel.tp=2"),
    "bf16, teacher, forward": (*TAUGHT, "algo.teacher_kl=forward", "train.updates_per_step=2", *FAST),
    "bf16, resumed": ("train.warmup_steps=10", *FAST),
    "fp16": ("model.dtype=fp16",),
    "fp16, overflow": ("model.dtype=fp16", "megatron.initial_loss_scale=1073741824"),
    # with what a run may have besides
    "pp": ("parallel.pp=2",),
    "top_p": ("rollout.top_p=0.8",),
    "top_p, kl": ("rollout.top_p=0.8", "algo.kl_coef=0.1"),
    "top_k": ("rollout.top_k=5",),
    "gdpo": ("algo.advantage=gdpo", *WEIGHTED),
    "parquet": ("data.train={folder}/train.parquet",),
    "mixed": ("data.train={{folder}/few.jsonl: 3, {folder}/train.jsonl: 1}",),
    "prompts of many lengths": ("data.train={folder}/lengths.jsonl", "data.max_prompt_tokens=4"),
    "evaluated often": ("data.eval={folder}/few.jsonl", "train.eval_every=1", "eval.samples=4",
                        "eval.pass_reward=0.3"),
}  # fmt: skip
