"""Every knob of a run, once: its type, bounds, default and meaning; and the errors that a user sees.

Knows no other file: YAML files and overrides are read and checked in support/read_config.py, rules that tie several
keys together are in support/checks.py. What a name such as `algo.loss` may be is for the function with its branches to
say; it is asked by `rehearse` in train_grpo.py before anything is built.
"""

import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field


class UserError(Exception):
    """Something the user can mend: what is wrong, which key, what would be legal. Ends the program with exit code 2."""


class TrainingError(Exception):
    """The run cannot go on with right results. The message is all a user needs; exit code 1."""


class RankError(TrainingError):
    """A failure that this rank alone may know of, so this rank says it."""


LARGEST = 2**31 - 1  # of every number, so that none overflows later
# Numbers are never made of text or true/false, but for "inf" where that means something.
Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
AllOrCount = Literal[-1] | Count
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Number, Field(ge=0, le=10**6)]
Share = Annotated[Number, Field(ge=0, le=1)]
ShareAboveZero = Annotated[Number, Field(gt=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
INF = (Field(strict=True, allow_inf_nan=True), BeforeValidator(lambda value: math.inf if value == "inf" else value))
NotNegativeOrInf = Annotated[float, Field(ge=0), *INF]
PositiveOrInf = Annotated[float, Field(gt=0), *INF]
AboveOneOrInf = Annotated[float, Field(gt=1), *INF]
RewardSpec = str | dict[str, Number]  # a name of docs/rewards.md, or {name: weight}


class Section(pydantic.BaseModel):
    """Read-only, and without keys but those named."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


class ModelConfig(Section):
    path: str  # Hugging Face folder or hub name
    dtype: Literal["bf16", "fp32"] = "bf16"  # of weights and activations; optimizer state and gradients are fp32
    fp32_head: bool = False  # logits of a bf16 model in fp32, in the trainer and in vLLM


class DataConfig(Section):
    # file, glob, folder or hub name:split, or a list of them, or sets to mix as {name: weight}; see docs/data.md
    train: str | list[str] | dict[str, Positive]
    eval: str | list[str] | None = None  # like train, but for weights; for train.eval_every
    custom: str | None = None  # path/to/file.py:function that yields the rows of each name in train and eval
    split: str = "train"  # of a hub data set or folder that names none itself
    prompt_key: str = "prompt"  # text, or a list of chat messages; this and the next three may lead into dicts: a.b
    answer_key: str = "answer"  # what the reward compares with
    source_key: str = "source"  # column that chooses the reward; rows without it have the source "default"
    hint_key: str | None = None  # hint that stands before the prompt for algo.teacher alone
    chat_template: bool = True  # write the prompt with the tokenizer's template; a text is a user message
    system_prompt: str | None = None  # put before every prompt that brings no system message of its own
    template_kwargs: dict[str, Any] = {}  # for the chat template, such as enable_thinking
    max_prompt_tokens: Count = 1024  # longer prompts are dropped, counted and reported


class RolloutConfig(Section):
    prompts_per_step: Count = 64  # groups of a step
    group_size: Annotated[Count, Field(ge=2)] = 8  # answers to each prompt
    max_new_tokens: Count = 1024  # an answer is cut off there
    turns: str | None = None  # path/to/file.py:function that says what follows on an answer: docs/turns.md
    max_turns: Count = 4  # answers of a conversation; with rollout.turns
    temperature: Positive = 1.0  # of sampling; the trainer's logits are divided by it too
    top_p: ShareAboveZero = 1.0  # sample from the likeliest tokens with this much probability
    top_k: AllOrCount = -1  # sample from so many likeliest tokens; -1: all
    lag: Whole = 0  # vLLM samples with the weights of so many steps before the present ones; 0: with these
    tp: Count = 1  # tensor parallel size of each vLLM engine; world size / tp engines run side by side
    gpu_memory_utilization: ShareAboveZero = 0.6  # of a GPU, for vLLM while it samples
    max_logp_gap: PositiveOrInf | None = None  # |trainer - vLLM|; null: 1e-3 (largest, fp32), at most 0.05 (mean, bf16)
    sync_bucket_mb: Count = 512  # weights cross from trainer to vLLM in buckets of about this size
    sleep_level: Literal[1, 2] = 2  # of vLLM on GPUs: asleep, it drops its weights at 2, keeps them on the host at 1
    exact: bool = False  # the same answers and updates in each run on GPUs, at a price: docs/reliability.md
    vllm: dict[str, Any] = {}  # options of vllm.LLM that no other key stands for


class EvalConfig(Section):
    samples: Count = 1  # answers to each prompt of data.eval
    temperature: NotNegative = 1.0  # of sampling; 0: the likeliest token
    top_p: ShareAboveZero = 1.0  # as in rollout
    top_k: AllOrCount = -1  # as in rollout
    max_new_tokens: Whole = 0  # 0: rollout.max_new_tokens
    pass_reward: Number = 1.0  # an answer with this reward passes, for pass@k


class RewardConfig(Section):
    default: RewardSpec = "exact"  # what an answer is worth
    by_source: dict[str, RewardSpec] = {}  # source of a row -> reward
    custom: str | None = None  # path/to/file.py:function, used by the name "custom"
    functions: dict[str, str] = {}  # further names -> file.py:function or class, or a reward of docs/rewards.md
    options: dict[str, dict[str, Any]] = {}  # name of a reward -> its options, docs/rewards.md
    timeout_s: Seconds = 10.0  # a sample graded longer than this gets reward 0 and counts in reward/timeout_frac
    workers: Count = 1  # grading processes a rank
    memory_gb: NotNegative = 4.0  # address space of a grading process, except the one of a reward model; 0: no limit
    max_error_frac: Share = 0.0  # a larger share of samples whose reward raised stops the run


class AlgoConfig(Section):
    advantage: str = "grpo"  # a branch of group_advantages
    credit: str = "to_go"  # a branch of support/credit.py:compare; what a token answers for where tokens have rewards
    loss: str = "ppo_clip"  # a branch of policy_loss
    clip_low: NotNegative = 0.2  # the ratio is held above 1 - clip_low
    clip_high: NotNegativeOrInf = 0.2  # and below 1 + clip_high
    dual_clip: AboveOneOrInf | None = None  # times |advantage|: bound of its loss, A < 0
    loss_norm: str = "token_mean"  # a branch of loss_weights
    loss_norm_length: Whole = 0  # the constant of seq_mean_token_sum_norm; 0: rollout.max_new_tokens
    kl_coef: NotNegative = 0.0  # 0: no reference model is kept
    reference_on: Literal["gpu", "host"] = "gpu"  # where reference, teacher and past weights wait between their passes
    reference_every: Whole = 0  # the reference becomes the present weights every so many steps; 0: never
    kl: str = "k3"  # a branch of token_kl
    kl_in: Literal["loss", "reward"] = "loss"  # where kl_coef · KL enters
    teacher: str | None = None  # folder or hub name of a model to distil on-policy, or self: with data.hint_key
    teacher_coef: NotNegative = 1.0  # of log(teacher / policy) in each token's advantage
    entropy_coef: Number = 0.0  # of the entropy bonus in the loss
    old_logp: Literal["trainer", "rollout"] = "trainer"  # whose log-probs the ratio starts from
    correction: str = "none"  # of the mismatch between vLLM and trainer, a name of CORRECTION_BOUNDS
    correction_level: Literal["token", "sequence"] = "token"  # for tis and icepop
    correction_low: NotNegative | None = None  # bounds; null: those of CORRECTION_BOUNDS
    correction_high: NotNegativeOrInf | None = None  # as correction_low
    max_rounds: Count = 1  # above 1, groups of equal rewards are replaced by new prompts, in so many rounds at most
    overlong_buffer: Whole = 0  # tokens before rollout.max_new_tokens over which a penalty grows; 0: none
    overlong_coef: NotNegative = 1.0  # the penalty at rollout.max_new_tokens
    mask_truncated: bool = False  # leave answers that were cut off out of the loss
    replay_routes: bool = False  # experts: the policy's passes send each token where vLLM sent it; docs/models.md


class TrainConfig(Section):
    epochs: Positive | None = None  # passes over data.train, in place of train.steps; docs/data.md
    # of the whole run; null where train.epochs says it, until the data are read
    steps: Count | None = Field(default_factory=lambda given: None if given.get("epochs") else 100)
    lr: NotNegative = 1e-6  # learning rate
    warmup_steps: Whole = 0  # learning rate rises linearly over these steps, then stays
    weight_decay: NotNegative = 0.0  # of AdamW
    adam_beta1: Beta = 0.9  # of the mean of gradients
    adam_beta2: Beta = 0.999  # of the mean of their squares
    clip_grad: NotNegative = 1.0  # gradients of a larger norm are scaled down to it; 0: never
    updates_per_step: Count = 1  # optimizer steps on each batch of samples
    epochs_per_step: Count = 1  # passes over each batch of samples
    max_tokens_per_micro_batch: Count = 16384  # cap of a row in training, what attention pads too; cp ranks share it
    logprob_max_tokens_per_micro_batch: Count = 32768  # the same, forward only (old and reference log-probs)
    # what leaves the GPU while vLLM samples, "optimizer": its state and the gradients; null: grads on a GPU, else none
    offload: Literal["none", "grads", "optimizer"] | None = None
    save_every: Whole = 20  # steps between checkpoints, the last at the end; 0: only where a signal stops the run
    keep_last: Whole = 2  # newest checkpoints that are kept; 0: all
    keep_every: Whole = 0  # checkpoints of these steps' multiples are kept as well; 0: none
    export_every: Whole = 0  # steps between exports to output_dir/hf; 0: at the end only
    stall_timeout_s: Seconds = 1800.0  # where no rank ends a phase for so long, the run says so and ends; 0: never
    max_skipped: Count = 3  # updates in a row whose loss or gradient is NaN or inf, before the run stops
    eval_every: Whole = 0  # steps between evaluations on data.eval, the first before the first step; 0: none


class Course(Section):
    shape: Literal["constant", "linear", "cosine"] = "linear"  # of the way there; constant: all of it in the last step
    to: Number = 0.0  # from the key's own value at step 1
    steps: Whole = 0  # until it is there, and stays; 0: train.steps


class ScheduleConfig(Section):  # null: no course
    lr: Course | None = None  # of train.lr, beside its warm-up
    kl_coef: Course | None = None  # of algo.kl_coef, which has to start above 0
    entropy_coef: Course | None = None  # of algo.entropy_coef
    temperature: Course | None = None  # of rollout.temperature


class ParallelConfig(Section):
    tp: Count = 1  # tensor parallelism
    sp: bool = True  # sequence parallelism, wherever tp > 1
    pp: Count = 1  # pipeline stages
    vpp: Count = 1  # model chunks a pipeline stage
    cp: Count = 1  # context parallelism: each packed row is split over cp ranks
    ep: Count = 1  # expert parallelism: each layer's experts are spread over ep ranks
    etp: Count = 1  # tensor parallelism inside an expert


class LoraConfig(Section):
    rank: Whole = 0  # of the adapters that are trained in place of the weights; 0: none, all weights are trained
    alpha: Positive = 16.0  # an adapter counts alpha / rank times
    # weights of each layer that get one: attention's two and the two of the feed-forward block or of its experts
    targets: Annotated[list[Literal["qkv", "proj", "fc1", "fc2"]], Field(min_length=1)] = ["qkv", "proj", "fc1", "fc2"]


class LogConfig(Section):
    tensorboard: bool = False  # scalars, histograms and answers for TensorBoard, in output_dir/tensorboard
    wandb: bool = False  # the same for Weights & Biases, which its own variables guide: WANDB_MODE, WANDB_PROJECT, ...
    tokens: bool = False  # trainer_logp and ratio of each response token in rollouts/, by 1 or 2 passes a step
    samples_every: Whole = 0  # steps between a few answers on the screen; 0: none, and each 20th step's in the trackers


class ProfileConfig(Section):
    start: Whole = 0  # first step of the timeline in output_dir/traces; 0: none
    stop: Whole = 0  # its last step
    ranks: Annotated[list[Whole], Field(min_length=1)] | None = None  # whose tracks it has; null: all
    torch: bool = False  # torch.profiler over the same steps, a file for each of these ranks
    memory: bool = False  # a snapshot of their GPU memory at the end


class Config(Section):
    output_dir: str = "outputs/run"  # all that a run writes
    seed: Whole = 0  # of prompts, sampling and dropout
    resume: str = "none"  # none | auto (the newest sound checkpoint in output_dir, else from the start) | a checkpoint
    model: ModelConfig = Field(default_factory=dict, validate_default=True)
    data: DataConfig = Field(default_factory=dict, validate_default=True)
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    megatron: dict[str, Any] = {}  # fields of Megatron-core's config classes that no other key stands for
