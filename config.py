"""Every key of a run, once: its type, bounds, default and meaning; and the errors that a user sees.

This file imports no other file of the project. grpo/parts/base/read_config.py reads YAML files and overrides. The rules
between keys are in grpo/run/preflight/configuration.py. The legal values of a name such as `algo.loss` are the branches
of its function, which `rehearse` in train_grpo.py runs before anything is built.
"""

import datetime
import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field, PlainSerializer


class UserError(Exception):
    """An error the user can fix: what is wrong, which key, what would be legal. Ends the program with exit code 2."""


class TrainingError(Exception):
    """The run cannot go on with right results. The message is all a user needs; exit code 1."""


class RankError(TrainingError):
    """A failure that perhaps only this rank sees, so this rank prints it."""


LARGEST = 2**31 - 1  # bound of every number, so that none overflows later
# Strict types: text and true or false are not numbers. Only "inf" is one, where an infinite bound is legal.
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
AllOrCount = Literal[-1] | Count
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Number, Field(ge=0, le=10**6)]
Temperature = Annotated[Number, Field(ge=0, le=2)]  # vLLM's bounds
Share = Annotated[Number, Field(ge=0, le=1)]
ShareAboveZero = Annotated[Number, Field(gt=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
INF = (Field(strict=True, allow_inf_nan=True), BeforeValidator(lambda value: math.inf if value == "inf" else value))
NotNegativeOrInf = Annotated[float, Field(ge=0), *INF]
PositiveOrInf = Annotated[float, Field(gt=0), *INF]
AboveOneOrInf = Annotated[float, Field(gt=1), *INF]
Date = Annotated[datetime.date, PlainSerializer(str)]
RewardSpec = str | dict[str, Number]  # a name of docs/rewards.md, or {name: weight}
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class Section(pydantic.BaseModel):
    """Read-only; refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


class ModelConfig(Section):
    path: str  # Hugging Face folder or hub name
    # of weights and activations; optimizer state and gradients are fp32
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    flash_attention: bool = True  # for bf16 and fp16 on a GPU; false: torch's other kernels, sequences padded, slower
    fp32_head: bool = False  # logits of a bf16 or fp16 model in fp32, in the trainer and in vLLM
    # Compute the forward pass in vLLM's arithmetic, so that log-probs have equal bits. null: on a CPU where this costs
    # little. docs/equal-bits.md
    match_engine: bool | None = None


class DataConfig(Section):
    # file, glob, folder or hub name:split, a list of them, or {name: weight} of data sets to mix; see docs/data.md
    train: str | list[str] | dict[str, Positive]
    eval: str | list[str] | None = None  # like train, without weights; used by train.eval_every and --evaluate
    custom: str | None = None  # path/to/file.py:function that yields the rows of each name in train and eval
    split: str = "train"  # of a hub data set or folder whose name gives no split
    prompt_key: str = "prompt"  # column with text or chat messages; this and the next three may be nested: a.b
    answer_key: str = "answer"  # column with the reference answer for the reward
    source_key: str = "source"  # column that chooses the reward; rows without it have the source "default"
    hint_key: str | None = None  # column with a hint that only algo.teacher sees, before the prompt
    chat_template: bool = True  # write the prompt with the tokenizer's template; a text is a user message
    system_prompt: str | None = None  # put before every prompt that brings no system message of its own
    template_kwargs: dict[str, Any] = {}  # for the chat template, such as enable_thinking
    date: Date | None = None  # that a chat template gets which asks for today's; null: the day of the first start
    max_prompt_tokens: Count = 1024  # longer prompts are dropped, counted and reported


class RolloutConfig(Section):
    prompts_per_step: Count = 64  # groups of a step
    group_size: Annotated[Count, Field(ge=2)] = 8  # answers per prompt
    max_new_tokens: Count = 1024  # longer answers are truncated
    stop: Texts = []  # texts, or one, that end an answer as the end tokens do, and belong to it: docs/data.md
    stop_token_ids: list[Whole] = []  # tokens that end an answer, and belong to it
    turns: str | None = None  # path/to/file.py:function that replies to an answer: docs/turns.md
    max_turns: Count = 4  # answers of a conversation; with rollout.turns
    # of sampling, at least vLLM's lowest; the trainer divides its logits by it too
    temperature: Annotated[Temperature, Field(ge=0.01)] = 1.0
    top_p: ShareAboveZero = 1.0  # nucleus sampling: the likeliest tokens with this total probability
    top_k: AllOrCount = -1  # sample from the k likeliest tokens; -1: all
    tp: Count = 1  # tensor parallel size of each vLLM engine; there are world size / tp engines
    gpu_memory_utilization: ShareAboveZero = 0.6  # share of a GPU's memory for vLLM while it samples
    # Bound of |trainer - vLLM| log-prob: of the largest in fp32, else of an update's mean. null: 10 times (fp32: 50
    # times) what rounding does in this model. docs/dev/checks.md
    max_logp_gap: PositiveOrInf | None = None
    max_mismatch_kl: PositiveOrInf | None = None  # the same of the mean k3 of vLLM against the trainer in 20 updates
    sync_bucket_mb: Count = 512  # size of a bucket in which weights go from trainer to vLLM
    sleep_level: Literal[1, 2] = 2  # of vLLM on GPUs: while asleep, 2 drops its weights, 1 keeps them on the host
    exact: bool = False  # deterministic sampling and training on GPUs, slower: docs/resume.md
    vllm: dict[str, Any] = {}  # options of vllm.LLM that no other key sets

    @property
    def is_cut(self) -> bool:
        """Whether a token is drawn from some of the vocabulary alone, its nucleus."""
        return (self.top_p, self.top_k) != (1, -1)


class EvalConfig(Section):
    samples: Count = 1  # answers per prompt of data.eval
    temperature: Temperature = 1.0  # of sampling; 0: greedy
    top_p: ShareAboveZero = 1.0  # as in rollout
    top_k: AllOrCount = -1  # as in rollout
    max_new_tokens: Whole = 0  # 0: rollout.max_new_tokens
    stop: Texts | None = None  # null: rollout.stop
    stop_token_ids: list[Whole] | None = None  # null: rollout.stop_token_ids
    pass_reward: Number = 1.0  # an answer with at least this reward passes, for pass@k


class RewardConfig(Section):
    default: RewardSpec = "exact"  # reward of rows whose source is not in by_source
    by_source: dict[str, RewardSpec] = {}  # source of a row -> reward
    custom: str | None = None  # path/to/file.py:function, the reward named "custom"
    functions: dict[str, str] = {}  # further names -> file.py:function or class, or a reward of docs/rewards.md
    options: dict[str, dict[str, Any]] = {}  # name of a reward -> its options, docs/rewards.md
    timeout_s: Positive = 10.0  # of a sample; beyond it reward 0 (reward/<source>/timeout_frac), or a remote's error
    workers: Count = 1  # grading processes per rank
    memory_gb: NotNegative = 4.0  # address space of a grading process; 0: no limit
    max_error_frac: Share = 0.0  # the run stops if the reward raises for a larger share of a step's samples


class AlgoConfig(Section):
    # advantages
    advantage: str = "grpo"  # a branch of group_advantages
    max_rounds: Count = 1  # above 1, groups of equal rewards are replaced by new prompts in at most this many rounds
    overlong_buffer: Whole = 0  # length in tokens before rollout.max_new_tokens over which a penalty grows; 0: none
    overlong_coef: NotNegative = 1.0  # the penalty at rollout.max_new_tokens

    # the policy loss
    loss: str = "ppo_clip"  # a branch of policy_loss
    clip_low: NotNegative = 0.2  # the ratio is clipped to 1 - clip_low from below; ipo, dppo_tv: a fall of probability
    clip_high: NotNegativeOrInf = 0.2  # and to 1 + clip_high from above; ipo, dppo_tv: a rise of probability
    dual_clip: AboveOneOrInf | None = None  # the loss of a token is at most dual_clip · |A| where A < 0
    old_logp: Literal["trainer", "rollout"] = "trainer"  # who computes the old log-probs of the ratio
    loss_norm: str = "token_mean"  # a branch of loss_weights
    loss_norm_length: Whole = 0  # the constant of seq_mean_token_sum_norm; 0: rollout.max_new_tokens
    mask_truncated: bool = False  # leave truncated answers out of the loss
    entropy_coef: Number = 0.0  # of the entropy bonus in the loss

    # the reference model
    kl_coef: NotNegative = 0.0  # 0: no reference model is kept
    kl: str = "k3"  # a branch of token_kl, or full: over the whole vocabulary
    kl_in: Literal["loss", "reward"] = "loss"  # where kl_coef · KL enters
    moving_reference: bool = False  # a fork changes the reference: it is not watched, and checkpoints have it
    reference_on: Literal["gpu", "host"] = "gpu"  # where reference and teacher wait between their passes

    # a teacher
    teacher: str | None = None  # folder or hub name of a model to distil on-policy, or self: with data.hint_key
    # How far the policy is from it. sampled: log(policy / teacher) of the sampled token, in its advantage; else a
    # divergence over the whole vocabulary, in the loss. docs/distillation.md
    teacher_kl: Literal["sampled", "reverse", "forward", "jsd"] = "sampled"
    teacher_coef: NotNegative = 1.0  # of that divergence
    teacher_beta: Annotated[Number, Field(gt=0, lt=1)] = 0.5  # jsd: the teacher's share in the mixture
    teacher_top_k: Whole = 0  # the teacher's likeliest tokens that are told apart, the rest as one; 0: all

    # where vLLM and the trainer differ
    correction: str = "none"  # importance correction of vLLM against the trainer, a name of CORRECTION_BOUNDS
    correction_level: Literal["token", "sequence"] = "token"  # for tis and icepop
    correction_low: NotNegative | None = None  # bounds; null takes them from CORRECTION_BOUNDS
    correction_high: NotNegativeOrInf | None = None  # as correction_low
    replay_routes: bool = False  # MoE: train with the experts that vLLM chose for each token; docs/models.md

    @property
    def compared(self) -> list[str]:
        """The models that the loss compares the policy with over the whole vocabulary: "reference", "teacher"."""
        found = ["reference"] if self.kl == "full" and self.kl_coef > 0 else []
        return found + (["teacher"] if self.teacher_kl != "sampled" else [])


class TrainConfig(Section):
    # length of the run
    epochs: Positive | None = None  # passes over data.train, in place of train.steps; docs/data.md
    # steps of the whole run; null with train.epochs until the data are read
    steps: Count | None = Field(default_factory=lambda given: None if given.get("epochs") else 100)

    # the optimizer
    lr: NotNegative = 1e-6  # learning rate
    warmup_steps: Whole = 0  # learning rate rises linearly over these steps, then stays
    weight_decay: NotNegative = 0.0  # of AdamW
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.999  # of the mean of their squares
    clip_grad: NotNegative = 1.0  # gradients of a larger norm are scaled down to it; 0: never

    # the updates of a step
    updates_per_step: Count = 1  # optimizer steps on each batch of samples
    epochs_per_step: Count = 1  # passes over each batch of samples
    max_tokens_per_micro_batch: Count = 16384  # cap of the positions of a training row; cp ranks split it
    logprob_max_tokens_per_micro_batch: Count = 32768  # the same, forward only (old and reference log-probs)
    share_prompts: bool = True  # compute a prompt once for its answers in a row: docs/shared-prompts.md
    # offloaded while vLLM samples; optimizer: its state and the gradients; null: grads on a GPU, none on a CPU
    offload: Literal["none", "grads", "optimizer"] | None = None
    offload_activations: bool = False  # to the host, between forward and backward pass; saves nothing on a CPU
    gpu_reserve: Share = 0.1  # share of a GPU that the memory plan leaves for what it does not count, such as NCCL

    # checkpoints, exports, evaluations
    save_every: Whole = 20  # steps between checkpoints, the last at the end; 0: only where a signal stops the run
    keep_last: Whole = 2  # newest checkpoints that are kept; 0: all
    keep_every: Whole = 0  # checkpoints at multiples of this step are kept as well; 0: none
    export_every: Whole = 0  # steps between exports to output_dir/hf; 0: at the end only
    eval_every: Whole = 0  # steps between evaluations on data.eval, the first before the first step; 0: none

    # when to give up
    stall_timeout_s: Seconds = 1800.0  # the run ends if no rank finishes a phase within this time; 0: never
    max_skipped: Count = 3  # updates in a row whose loss or gradient is NaN or inf, before the run stops
    patience: Whole = 50  # steps in a row that learn nothing, before the run ends: docs/troubleshooting.md; 0: never


class Course(Section):
    shape: Literal["constant", "linear", "cosine"] = "linear"  # constant: a jump to the end value at the last step
    to: Number = 0.0  # end value; the start value, at step 1, is the key's own
    steps: Whole = 0  # steps until the end value, which then stays; 0: train.steps


class ScheduleConfig(Section):  # null: no schedule
    lr: Course | None = None  # of train.lr, beside its warm-up
    kl_coef: Course | None = None  # of algo.kl_coef, which has to start above 0
    entropy_coef: Course | None = None  # of algo.entropy_coef
    temperature: Course | None = None  # of rollout.temperature


class ParallelConfig(Section):
    tp: Count = 1  # tensor parallelism
    sp: bool = True  # sequence parallelism, wherever tp > 1
    pp: Count = 1  # pipeline stages
    vpp: Count = 1  # model chunks per pipeline stage
    cp: Count = 1  # context parallelism: each packed row is split over cp ranks
    ep: Count = 1  # expert parallelism: each layer's experts are spread over ep ranks
    etp: Count = 1  # tensor parallelism inside an expert


class LoraConfig(Section):
    rank: Whole = 0  # of the adapters that are trained in place of the weights; 0: none, all weights are trained
    alpha: Positive = 16.0  # adapters are scaled by alpha / rank
    # weights of each layer with an adapter: attention's two, and the two of the feed-forward block or of its experts
    targets: Annotated[list[Literal["qkv", "proj", "fc1", "fc2"]], Field(min_length=1)] = ["qkv", "proj", "fc1", "fc2"]


class LogConfig(Section):
    tensorboard: bool = False  # scalars, histograms and answers for TensorBoard, in output_dir/tensorboard
    wandb: bool = False  # the same for Weights & Biases, set up by its variables: WANDB_MODE, WANDB_PROJECT, ...
    samples_every: Whole = 0  # steps between prints of a few answers; 0: never, and every 20 steps in the trackers


class ProfileConfig(Section):
    start: Whole = 0  # first step that torch.profiler records, in output_dir/traces; 0: none
    stop: Whole = 0  # its last step
    ranks: Annotated[list[Whole], Field(min_length=1)] | None = None  # ranks that it records; null: all


class Config(Section):
    output_dir: str = "outputs/run"  # everything that a run writes
    seed: Whole = 0  # of the order of prompts, sampling and dropout
    resume: str = "none"  # none | auto (the newest valid checkpoint in output_dir, else from the start) | a checkpoint
    model: ModelConfig = Field(default_factory=dict, validate_default=True)
    data: DataConfig = Field(default_factory=dict, validate_default=True)
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = Field(default_factory=dict, validate_default=True)
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    megatron: dict[str, Any] = {}  # fields of Megatron-core's config classes that no other key sets

    @pydantic.field_validator("eval")
    @classmethod
    def stop_as_rollout(cls, value: EvalConfig, before: pydantic.ValidationInfo) -> EvalConfig:
        """Where the section eval does not say what ends an answer, it is what rollout says."""
        unsaid = {"stop", "stop_token_ids"} - value.model_dump(exclude_none=True).keys()
        return value.model_copy(update=before.data.get("rollout", value).model_dump(include=unsaid))

    @property
    def shares_prompts(self) -> bool:
        """Whether answers share their prompt's positions. The balancing loss of experts would count these once."""
        return self.train.share_prompts and not self.megatron.get("moe_aux_loss_coeff")

    @property
    def for_megatron(self) -> dict[str, Any]:
        """Fields of Megatron-core's config classes. The fusion marks weights, which hooks of saved tensors hide."""
        unfused = {"gradient_accumulation_fusion": False} if self.train.offload_activations else {}
        return self.megatron | unfused

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest possible prompt and answer."""
        return self.data.max_prompt_tokens + max(self.rollout.max_new_tokens, self.eval.max_new_tokens)

    @property
    def norm_length(self) -> int:
        """The constant of loss_norm=seq_mean_token_sum_norm."""
        return self.algo.loss_norm_length or self.rollout.max_new_tokens
