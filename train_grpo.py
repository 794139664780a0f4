"""GRPO on Megatron-core and vLLM, in one file.

    torchrun --nproc_per_node=2 train_grpo.py --config configs/tiny.yaml                    # a laptop, no GPU
    torchrun --nproc_per_node=1 train_grpo.py --config configs/qwen0.5b_1gpu.yaml           # one GPU
    torchrun --nproc_per_node=8 train_grpo.py --config configs/qwen7b.yaml algo.kl_coef=0   # eight, with an override
    python train_grpo.py --config configs/qwen7b.yaml --dry-run --world-size 8              # check only, on any machine

The objective. For each prompt, vLLM samples a group of G answers; answer i gets the reward r_i and

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)            group_advantages   std with ddof 1; 0 where all r are equal
    rho_t = exp(logp_t - old_logp_t)                     policy_loss        old = before the first update of the step
    L_t   = -min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)
    KL_t  = exp(d) - d - 1,  d = ref_logp_t - logp_t     token_kl           k3, d clamped to +-20, the result to +-10
    loss  = sum_t (L_t + kl_coef KL_t - entropy_coef H_t) / number of response tokens of the update      grpo_loss

One step: sample -> grade -> advantages -> pack -> (old, ref log-probs) -> update(s) -> push -> log -> save.

To fork: a new advantage is a branch in `group_advantages`, a new loss one in `policy_loss`, a new KL one in `token_kl`,
each with a name that `CHOICES` lists; a reward is a function in reward_functions.py or in a file of your own
(`reward.custom`).

Names: a suffix tells a tensor's shape. _N per sample, _S per packed sequence, _T per packed token, _B per bin, _F per
predicting position of the whole step.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import omegaconf
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import UserError, check_choices, check_numbers, get, load_config, nearest, to_yaml
from rollout import Engine, engine_options
from support import grading as rewards
from support import preflight
from support import watchdog as guard
from support.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    check_resumed,
    find_checkpoint,
    read_sharded,
    read_state,
)
from support.data import Prompt, fingerprint, load_prompts, load_tokenizer, prompt_batch
from support.files import dump_rollouts, lock_output_dir, log_metrics, open_output_dir, step_line
from support.optimizer_state import load_state, optimizer_steps, sharded_state

# ---------------------------------------------------------------- 1. configuration


@dataclass
class ModelConfig:
    path: str = omegaconf.MISSING  # Hugging Face folder or hub name
    dtype: str = "bf16"  # bf16 | fp32; optimizer state and gradients are fp32 either way


@dataclass
class DataConfig:
    train: Any = omegaconf.MISSING  # file, glob, folder or hub name:split, or a list of them; see docs/data.md
    eval: Any = None  # like train, for train.eval_every
    split: str = "train"  # of a hub data set or folder that names none itself
    prompt_key: str = "prompt"  # text, or a list of chat messages; this and the next two may lead into dicts: a.b
    answer_key: str = "answer"
    source_key: str = "source"  # column that chooses the reward; rows without it have the source "default"
    chat_template: bool = True  # write the prompt with the tokenizer's template; a text is a user message
    system_prompt: str | None = None  # put before every prompt that brings no system message of its own
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template, such as enable_thinking
    max_prompt_tokens: int = 1024  # longer prompts are dropped, counted and reported


@dataclass
class RolloutConfig:
    prompts_per_step: int = 64
    group_size: int = 8  # answers to each prompt
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    tp: int = 1  # tensor parallel size of each vLLM engine; world size / tp engines run side by side
    gpu_memory_utilization: float = 0.6
    max_logp_gap: float | None = (
        None  # trainer against vLLM; null: 1e-3 (largest, fp32) or 0.05 (mean, bf16); inf: never stop
    )
    sync_bucket_mb: int = 512  # weights cross from trainer to vLLM in buckets of about this size
    vllm: dict[str, Any] = field(default_factory=dict)  # passed to vllm.LLM


@dataclass
class EvalConfig:
    samples: int = 1  # answers to each prompt of data.eval
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 0  # 0: rollout.max_new_tokens
    pass_reward: float = 1.0  # an answer with at least this reward passes, for pass@k


@dataclass
class RewardConfig:
    default: Any = "exact"  # a name of docs/rewards.md, or {name: weight}
    by_source: dict[str, Any] = field(default_factory=dict)  # source of a row -> reward
    custom: str | None = None  # path/to/file.py:function, used by the name "custom"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # name of a reward -> its options, docs/rewards.md
    timeout_s: float = 10.0  # a sample graded longer than this gets reward 0 and counts in reward/timeout_frac
    workers: int = 1  # grading processes a rank
    memory_gb: float = 4.0  # address space of a grading process, except the one of a reward model; 0: no limit
    max_error_frac: float = 0.0  # a larger share of samples whose reward raised stops the run


@dataclass
class AlgoConfig:
    advantage: str = "grpo"  # grpo | dr_grpo | rloo | grpo_loo | reinforce_pp
    loss: str = "ppo_clip"  # ppo_clip | gspo | cispo | reinforce
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bound of the loss of a negative advantage, in advantages; above 1
    loss_norm: str = "token_mean"  # token_mean | seq_mean_token_mean | seq_mean_token_sum | seq_mean_token_sum_norm
    loss_norm_length: int = 0  # the constant of seq_mean_token_sum_norm; 0: rollout.max_new_tokens
    kl_coef: float = 0.0  # 0: no reference model is kept
    kl: str = "k3"  # k1 | k2 | k3 | k3+ (the value of k3 with the gradient of k2)
    kl_in: str = "loss"  # loss | reward
    entropy_coef: float = 0.0
    old_logp: str = "trainer"  # trainer | rollout: whose log-probs the ratio starts from
    correction: str = "none"  # none | tis | icepop | seq_mask, of the mismatch between vLLM and trainer
    correction_level: str = "token"  # token | sequence, for tis
    correction_low: float | None = None  # bounds; null: CORRECTION_BOUNDS
    correction_high: float | None = None
    max_rounds: int = 1  # above 1, groups of equal rewards are replaced by new prompts, in so many rounds at most
    overlong_buffer: int = 0  # tokens before rollout.max_new_tokens over which a penalty grows from 0 to overlong_coef
    overlong_coef: float = 1.0
    mask_truncated: bool = False  # leave answers that were cut off out of the loss


@dataclass
class TrainConfig:
    steps: int = 100
    lr: float = 1e-6
    warmup_steps: int = 0  # learning rate rises linearly over these steps, then stays
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    clip_grad: float = 1.0
    updates_per_step: int = 1  # optimizer steps on each batch of samples
    epochs_per_step: int = 1  # passes over each batch of samples
    max_tokens_per_micro_batch: int = 16384  # strict cap of a packed row (cp ranks share it), in training
    logprob_max_tokens_per_micro_batch: int = 32768  # strict cap, forward only (old and reference log-probs)
    save_every: int = 20  # steps between checkpoints, the last at the end; 0: only where a signal stops the run
    keep_last: int = 2  # newest checkpoints that are kept; 0: all
    keep_every: int = 0  # checkpoints of these steps' multiples are kept as well; 0: none
    export_every: int = 0  # steps between exports to output_dir/hf; 0: at the end only
    stall_timeout_s: float = 1800.0  # where no rank finishes a phase for so long, the run says where it hangs and ends
    max_skipped: int = 3  # updates in a row with a loss or gradient that is no number, before the run stops
    eval_every: int = 0  # steps between evaluations on data.eval, the first before the first step; 0: none


@dataclass
class ParallelConfig:
    tp: int = 1
    sp: bool = True  # sequence parallelism, wherever tp > 1
    pp: int = 1
    vpp: int = 1  # model chunks a pipeline stage
    cp: int = 1  # context parallelism: each packed row is split over cp ranks
    ep: int = 1  # expert parallelism: each layer's experts are spread over ep ranks
    etp: int = 1  # tensor parallelism inside an expert


@dataclass
class Config:
    output_dir: str = "outputs/run"
    seed: int = 0
    resume: str = "none"  # none | auto (the newest sound checkpoint in output_dir, else from the start) | a checkpoint
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)  # any field of Megatron-core's config classes


# Every key with a closed set of values, and the set.
CHOICES = {
    "model.dtype": ("bf16", "fp32"),
    "algo.advantage": ("grpo", "dr_grpo", "rloo", "grpo_loo", "reinforce_pp"),
    "algo.loss": ("ppo_clip", "gspo", "cispo", "reinforce"),
    "algo.loss_norm": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "algo.kl": ("k1", "k2", "k3", "k3+"),
    "algo.kl_in": ("loss", "reward"),
    "algo.old_logp": ("trainer", "rollout"),
    "algo.correction": ("none", "tis", "icepop", "seq_mask"),
    "algo.correction_level": ("token", "sequence"),
}
AT_LEAST = {
    0: """train.lr train.warmup_steps train.weight_decay train.clip_grad train.save_every train.eval_every
          train.stall_timeout_s train.keep_last train.keep_every train.export_every
          eval.temperature eval.max_new_tokens reward.max_error_frac reward.memory_gb algo.clip_low algo.clip_high
          algo.kl_coef algo.loss_norm_length algo.overlong_buffer algo.overlong_coef reward.timeout_s seed
          train.adam_beta1 train.adam_beta2 algo.correction_low algo.correction_high""",
    1: """rollout.prompts_per_step rollout.max_new_tokens rollout.tp rollout.sync_bucket_mb data.max_prompt_tokens
          train.steps train.max_skipped train.updates_per_step train.epochs_per_step parallel.tp parallel.pp
          parallel.vpp parallel.cp parallel.ep parallel.etp reward.workers algo.max_rounds eval.samples""",
    2: "rollout.group_size",
}
AT_MOST = {
    1: "rollout.top_p rollout.gpu_memory_utilization eval.top_p reward.max_error_frac",
    10**6: "reward.timeout_s train.stall_timeout_s",
}
ABOVE = {
    0: "rollout.temperature rollout.top_p rollout.gpu_memory_utilization rollout.max_logp_gap eval.top_p",
    1: "algo.dual_clip",
}
BELOW = {1: "train.adam_beta1 train.adam_beta2"}
NUMBER_LIMIT = 2**31 - 1  # of every number, so that none overflows later; inf means something for these keys:
MAY_BE_INF = ("rollout.max_logp_gap", "algo.clip_high", "algo.correction_high", "algo.dual_clip")
# Megatron-core fields that may not be set under `megatron`, and why.
MEGATRON_OWNED = {
    "tensor_model_parallel_size": "use parallel.tp",
    "sequence_parallel": "use parallel.sp",
    "pipeline_model_parallel_size": "use parallel.pp",
    "virtual_pipeline_model_parallel_size": "use parallel.vpp",
    "context_parallel_size": "use parallel.cp",
    "expert_model_parallel_size": "use parallel.ep",
    "expert_tensor_parallel_size": "use parallel.etp",
    **{name: f"use train.{name}" for name in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")},
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "use model.dtype"),
    "calculate_per_token_loss": "the loss is exact only with true",
    **dict.fromkeys(("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm"), "it follows from parallel.*"),
    **dict.fromkeys(bridge.FROM_MODEL, "it comes from config.json of model.path"),
    "moe_router_load_balancing_type": "only aux_loss, whose weight is megatron.moe_aux_loss_coeff",
    "moe_grouped_gemm": "needs Transformer Engine; here the experts run one after the other",
}


def check_config(cfg: Config, world_size: int) -> None:
    """Everything that can be known wrong before a process group, a model or an engine exists. Raises UserError."""

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(message)

    check_choices(cfg, CHOICES)
    check_numbers(cfg, NUMBER_LIMIT, MAY_BE_INF, at_least=AT_LEAST, at_most=AT_MOST, above=ABOVE, below=BELOW)
    for key in ("rollout.top_k", "eval.top_k"):
        require(get(cfg, key) == -1 or get(cfg, key) > 0, f"{key}={get(cfg, key)}: must be above 0, or -1 for all")
    for key in cfg.megatron:
        require(key not in MEGATRON_OWNED, f"megatron.{key}: {MEGATRON_OWNED.get(key)}")
        near = nearest(key, bridge.megatron_fields())
        require(key == near, f"unknown key 'megatron.{key}'; the nearest field of Megatron-core is 'megatron.{near}'")

    for key in cfg.rollout.vllm:  # looked up only where it is used: importing vLLM takes seconds
        near = nearest(key, engine_options())
        require(key == near, f"unknown key 'rollout.vllm.{key}'; the nearest option of vLLM is 'rollout.vllm.{near}'")

    r, t, p, a = cfg.rollout, cfg.train, cfg.parallel, cfg.algo
    require(
        t.eval_every == 0 or cfg.data.eval is not None,
        f"train.eval_every={t.eval_every}, but data.eval is not set; name the data or use train.eval_every=0",
    )
    require(
        cfg.eval.temperature > 0 or cfg.eval.samples == 1,
        f"eval.temperature=0 gives the same answer {cfg.eval.samples} times; use eval.samples=1",
    )
    require(
        a.correction == "none" or a.old_logp == "trainer",
        f"algo.correction={a.correction} weighs the trainer's old log-probs against vLLM's, but algo.old_logp=rollout "
        "takes vLLM's as old; use algo.old_logp=trainer or algo.correction=none",
    )
    require(
        a.correction_level == "token" or a.correction == "tis",
        f"algo.correction_level={a.correction_level} is for algo.correction=tis; {a.correction} has one level only",
    )
    require(
        cfg.resume in ("none", "auto") or os.path.isdir(cfg.resume),
        f"resume={cfg.resume}: no such folder; legal is none, auto, or the folder of a checkpoint",
    )
    low, high = correction_bounds(a)
    require(
        low <= high,
        f"algo.correction_low={a.correction_low}, algo.correction_high={a.correction_high}: for algo.correction="
        f"{a.correction} the bounds are then [{low}, {high}], which hold nothing; give others",
    )
    require(
        a.overlong_buffer <= r.max_new_tokens,
        f"algo.overlong_buffer={a.overlong_buffer} is beyond rollout.max_new_tokens={r.max_new_tokens}",
    )
    require(
        (r.top_p == 1 and r.top_k == -1) or bool(r.max_logp_gap),
        f"rollout.top_p={r.top_p}, rollout.top_k={r.top_k}: vLLM's log-probs are then those of the cut distribution, "
        "the trainer's of the full one. Use 1 and -1, or set rollout.max_logp_gap=inf to train all the same",
    )
    for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp")):  # of the model, and of its experts
        ranks = math.prod(getattr(p, key) for key in keys)
        require(
            world_size % ranks == 0,
            " × ".join(f"parallel.{key}={getattr(p, key)}" for key in keys)
            + f" = {ranks} does not divide the world size {world_size}; start a multiple of {ranks} processes or make "
            "the layout smaller",
        )
    require(world_size % r.tp == 0, f"rollout.tp={r.tp} does not divide the world size {world_size}")
    require(
        r.prompts_per_step % t.updates_per_step == 0,
        f"train.updates_per_step={t.updates_per_step} must divide rollout.prompts_per_step={r.prompts_per_step}: "
        "an update takes whole groups",
    )
    longest, multiple = cfg.data.max_prompt_tokens + r.max_new_tokens, bridge.token_multiple(p)
    for key in ("max_tokens_per_micro_batch", "logprob_max_tokens_per_micro_batch"):
        require(
            getattr(t, key) // multiple * multiple >= longest,
            f"train.{key}={getattr(t, key)} cannot hold one sample of data.max_prompt_tokens + "
            f"rollout.max_new_tokens = {longest} tokens; make it at least {math.ceil(longest / multiple) * multiple}",
        )
    chosen = {"reward.default": cfg.reward.default}
    chosen.update({f"reward.by_source.{source}": name for source, name in cfg.reward.by_source.items()})
    for key, name in chosen.items():
        try:
            rewards.load_reward(name, cfg.reward.custom, cfg.reward.options)
        except ValueError as error:
            raise UserError(f"{key}={name}: {error}") from None


def describe(cfg: Config, world_size: int) -> str:
    """The layout and the arithmetic of a step, in words."""
    r, t, p, a = cfg.rollout, cfg.train, cfg.parallel, cfg.algo

    def count(n: int, what: str) -> str:
        return f"{n} {what}{'s' * (n != 1)}"

    dp = world_size // (p.tp * p.pp * p.cp)
    samples, updates = r.prompts_per_step * r.group_size, t.updates_per_step * t.epochs_per_step
    epochs = f" × {count(t.epochs_per_step, 'epoch')}" if t.epochs_per_step > 1 else ""
    vpp, cp = f" (vpp {p.vpp})" if p.vpp > 1 else "", f" × cp {p.cp}" if p.cp > 1 else ""
    edp = world_size // (p.etp * p.ep * p.pp)
    experts = f"; experts: ep {p.ep} × etp {p.etp} × pp {p.pp} × dp {edp}" if p.ep * p.etp > 1 else ""
    kl = f" + {a.kl_coef:g} {a.kl} in the {a.kl_in}" if a.kl_coef else ""
    rounds = f", up to {a.max_rounds} rounds" if a.max_rounds > 1 else ""
    correction = f"; {a.correction}" if a.correction != "none" else ""
    entropy = f" - {a.entropy_coef:g} entropy" if a.entropy_coef else ""
    return (
        f"layout:  {count(world_size, 'rank')} = tp {p.tp} × pp {p.pp}{vpp}{cp} × dp {dp}{experts}; "
        f"rollout: {count(world_size // r.tp, 'vLLM engine')} of tp {r.tp}\n"
        f"a step:  {count(r.prompts_per_step, 'prompt')} × {r.group_size} = {samples} samples{rounds}{epochs} → "
        f"{count(updates, 'update')} of {samples // t.updates_per_step} samples → "
        f"micro-batches of ≤ {t.max_tokens_per_micro_batch} tokens over {count(dp, 'replica')}\n"
        f"a run:   {count(t.steps, 'step')} = {t.steps * samples} samples, {count(t.steps * updates, 'update')}; "
        f"lr {t.lr:g} after {count(t.warmup_steps, 'warm-up step')}\n"
        f"loss:    {a.loss} ({a.clip_low:g}, {a.clip_high:g}){kl}{entropy}; {a.advantage} advantages; "
        f"{a.loss_norm} over an update{correction}"
    )


# ---------------------------------------------------------------- 2. algorithm: pure functions, no Megatron


def group_advantages(
    rewards_N: np.ndarray, groups_N: np.ndarray, kind: str, tokens_N: np.ndarray | None = None
) -> np.ndarray:
    """Advantage of each answer against its own group; [N] each → [N] float64. tokens_N, the answers' trained tokens,
    is for reinforce_pp alone.

    With mean m and std s (ddof 1) of the group of G answers, and m', s' those of the other G - 1:

      grpo          (r - m) / (s + 1e-6)           DeepSeekMath, arXiv 2402.03300, 4.1.2; ddof and eps as in verl
      dr_grpo       r - m                          Dr. GRPO, arXiv 2503.20783, 3.2
      rloo          r - m'                         Ahmadian et al., arXiv 2402.14740, 3.2
      grpo_loo      (r - m') / (s' + 1e-6)         NeMo-RL; not divided where the others are equal
      reinforce_pp  a = r - m, then (a - mean(a)) / sqrt(var(a) + 1e-8) over all trained tokens of the batch (ddof 1)
                                                   REINFORCE++-baseline, arXiv 2501.03262; as in verl
    Exactly 0 for a group of one or of equal rewards (in reinforce_pp: before the whitening).
    """
    rewards_N, groups_N = np.asarray(rewards_N, dtype=np.float64), np.asarray(groups_N)
    advantages_N = np.zeros_like(rewards_N)
    for group in np.unique(groups_N):
        members = groups_N == group
        r = rewards_N[members]
        if r.min() == r.max():  # nothing to learn from, and a mean off by rounding must not look like something
            continue
        if kind == "grpo":
            advantages_N[members] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        elif kind in ("dr_grpo", "reinforce_pp"):
            advantages_N[members] = r - r.mean()
        elif kind == "rloo":
            advantages_N[members] = (r - r.mean()) * len(r) / (len(r) - 1)
        elif kind == "grpo_loo":
            others = np.stack([np.delete(r, i) for i in range(len(r))])  # [G, G - 1]
            equal = others.min(1) == others.max(1)
            std = np.ones(len(r)) if others.shape[1] == 1 else others.std(1, ddof=1) + 1e-6
            advantages_N[members] = (r - others.mean(1)) / np.where(equal, 1.0, std)
        else:
            raise ValueError(f"algo.advantage={kind}")
    if kind == "reinforce_pp" and np.sum(tokens_N) > 1:
        mean = np.average(advantages_N, weights=tokens_N)
        variance = np.sum(tokens_N * (advantages_N - mean) ** 2) / (np.sum(tokens_N) - 1)
        advantages_N = (advantages_N - mean) / np.sqrt(variance + 1e-8)
    return advantages_N


def overlong_penalty(lengths_N: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """Reward of an answer's length in tokens: 0 up to limit - buffer, then linear to -1 at the limit; [N] → [N].

    Source: DAPO, arXiv 2503.14476, eq. 13 (soft overlong punishment).
    """
    return -np.clip((np.asarray(lengths_N, dtype=np.float64) - (limit - buffer)) / buffer, 0, 1)


def token_kl(logp_T: torch.Tensor, ref_logp_T: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token, from the sampled token alone; [T], [T] → [T].

    With d = ref - logp:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1 with d clamped to ±20 and the result to ±10;
    k3+ has the value of k3 and the gradient of k2, which is that of the true KL.
    Source: Schulman, "Approximating KL divergence" (2020); clamps and k3+ as in verl.
    """
    d_T = ref_logp_T - logp_T
    if kind == "k1":
        return -d_T
    if kind == "k2":
        return d_T**2 / 2
    if kind == "k3":
        d_T = d_T.clamp(-20, 20)
        return (d_T.exp() - d_T - 1).clamp(-10, 10)
    if kind == "k3+":
        k2_T = token_kl(logp_T, ref_logp_T, "k2")
        return token_kl(logp_T.detach(), ref_logp_T, "k3") + k2_T - k2_T.detach()
    raise ValueError(f"algo.kl={kind}")


def sequence_sum(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The sum over each packed sequence, at each of its tokens; [T], number of each token's sequence [T] → [T]."""
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]


def sequence_mean(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """The mean over each sequence's tokens with mask 1 (0 without any), at each of its tokens; [T] each → [T]."""
    return sequence_sum(values_T * mask_T, sequence_T) / sequence_sum(mask_T, sequence_T).clamp(min=1)


def policy_loss(
    logp_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    sequence_T: torch.Tensor,
    algo: AlgoConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy loss at each token, and 1.0 where a bound holds the ratio; [T] each → ([T], [T]).

    With ratio = exp(logp - old_logp), the exponent clamped to ±20, and clip to [1 - clip_low, 1 + clip_high]:

      ppo_clip   -min(ratio A, clip(ratio) A)      PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476
      gspo       the same with the sequence's ratio s = exp(mean_t(logp - old_logp)), the mean at most 10, and each
                 token's gradient s ∇logp          GSPO, arXiv 2507.18071, eq. 5 and 13 (GSPO-token); the cap as in verl
      cispo      -sg(clip(ratio)) A logp           MiniMax-M1, arXiv 2506.13585, eq. 4
      reinforce  -A logp                           Williams (1992)
    dual_clip = c bounds ppo_clip and gspo at -c A where A < 0: arXiv 1912.09729, eq. 5.
    """
    if algo.loss == "reinforce":
        return -advantages_T * logp_T, torch.zeros_like(logp_T)
    log_ratio_T = logp_T - old_logp_T
    if algo.loss == "gspo":
        mean_T = sequence_mean(log_ratio_T.detach(), mask_T, sequence_T)
        log_ratio_T = mean_T.clamp(max=10) + logp_T - logp_T.detach()
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    bounded_T = ratio_T.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    if algo.loss == "cispo":
        return -bounded_T.detach() * advantages_T * logp_T, (bounded_T != ratio_T).float()
    if algo.loss not in ("ppo_clip", "gspo"):
        raise ValueError(f"algo.loss={algo.loss}")
    loss_T = torch.maximum(-ratio_T * advantages_T, -bounded_T * advantages_T)
    clipped_T = -bounded_T * advantages_T > -ratio_T * advantages_T
    if algo.dual_clip is not None:
        ceiling_T = torch.where(advantages_T < 0, -algo.dual_clip * advantages_T, torch.inf)
        loss_T, clipped_T = torch.minimum(loss_T, ceiling_T), clipped_T | (loss_T > ceiling_T)
    return loss_T, clipped_T.float()


# algo.correction → (lowest, highest) weight that is left alone, unless the configuration says otherwise.
CORRECTION_BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002)}


def correction_bounds(algo: AlgoConfig) -> tuple[float, float]:
    """(lowest, highest) weight that algo.correction leaves alone."""
    low, high = CORRECTION_BOUNDS[algo.correction]
    return (
        low if algo.correction_low is None else algo.correction_low,
        high if algo.correction_high is None else algo.correction_high,
    )


def mismatch_weight(
    trainer_logp_T: torch.Tensor,
    rollout_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    sequence_T: torch.Tensor,
    algo: AlgoConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token's policy loss, since vLLM sampled what the trainer scores; [T] each → ([T], [T]).

    With w = exp(trainer - rollout), exponents clamped to ±20, and bounds [low, high]:

      none      1
      tis       clip(w), of the token or (correction_level=sequence) of the product over the answer
                                               Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
                                               RL Training" (2025)
      icepop    w inside the bounds, else 0    Ring-1T, arXiv 2510.18855
      seq_mask  w in answers whose geometric mean of w is inside the bounds, else 0      as in NeMo-RL
    The second is 1.0 where the bounds cut (for none: where those of tis would).
    """
    low, high = correction_bounds(algo)
    log_w_T = trainer_logp_T - rollout_logp_T
    judged_T = log_w_T  # what is held against the bounds
    if algo.correction == "seq_mask":
        judged_T = sequence_mean(log_w_T, mask_T, sequence_T)
    elif algo.correction_level == "sequence":
        judged_T = log_w_T = sequence_sum(log_w_T * mask_T, sequence_T)
    w_T, judged_T = log_w_T.clamp(-20, 20).exp(), judged_T.clamp(-20, 20).exp()
    outside_T = ((judged_T < low) | (judged_T > high)).float()
    if algo.correction == "none":
        return torch.ones_like(w_T), outside_T
    if algo.correction == "tis":
        return w_T.clamp(low, high), outside_T
    return w_T * (1 - outside_T), outside_T


def loss_weights(
    trained_F: torch.Tensor, sample_F: torch.Tensor, samples: list[int], kind: str, length: int
) -> torch.Tensor:
    """Weight of each token in an update on the numbered `samples`; mask of the trained tokens [F], sample of each [F]
    → [F], such that the sum of weight · loss over the number of trained tokens T is the normalised loss.

    Over the N answers with trained tokens, y_i of them in answer i:

      token_mean               1               sum_i sum_t loss / T               DAPO, arXiv 2503.14476, eq. 8
      seq_mean_token_mean      T / (N y_i)     mean_i (1 / y_i) sum_t loss        GRPO, arXiv 2402.03300, eq. 3
      seq_mean_token_sum       T / N           mean_i sum_t loss
      seq_mean_token_sum_norm  T / (N length)  mean_i (1 / length) sum_t loss     Dr. GRPO, arXiv 2503.20783, appendix
    So the denominator is the same integer for all, and neither micro-batches nor layout enter.
    """
    chosen_N = torch.zeros(int(sample_F.max()) + 1, dtype=torch.float64)
    chosen_N[samples] = 1
    tokens_N = torch.bincount(sample_F, weights=trained_F.double()) * chosen_N
    total, answers = tokens_N.sum(), (tokens_N > 0).sum().clamp(min=1)
    if kind == "token_mean":
        weight_N = torch.ones_like(tokens_N)
    elif kind == "seq_mean_token_mean":
        weight_N = total / (answers * tokens_N.clamp(min=1))
    elif kind == "seq_mean_token_sum":
        weight_N = total / answers * torch.ones_like(tokens_N)
    elif kind == "seq_mean_token_sum_norm":
        weight_N = total / (answers * length) * torch.ones_like(tokens_N)
    else:
        raise ValueError(f"algo.loss_norm={kind}")
    return ((weight_N * chosen_N)[sample_F] * trained_F).float()


# What a micro-batch reports: sums over its response tokens, but for the last, a maximum.
REPORTED = (
    "loss", "policy", "trained", "tokens", "kl", "kl_k1", "kl_k2", "entropy", "clipped", "gap", "mismatch_k3", "w",
    "w2", "outside", "gap_max",
)  # fmt: skip


def grpo_loss(mb: "MicroBatch", logp_T: torch.Tensor, entropy_T: torch.Tensor, algo: AlgoConfig):
    """(loss sum, integer denominator, report) of one micro-batch, as Megatron's schedule wants them.

    Megatron adds the loss gradients of all micro-batches and replicas and divides once by the sum of the denominators,
    so the loss is sum / count over the whole update whatever the split. No factor of micro-batches, dp or cp belongs
    here.
    """
    mask_T, weight_T, advantages_T, rollout_logp_T = (
        x[0] for x in (mb.mask, mb.weights, mb.advantages, mb.rollout_logp)
    )
    # With one update a step the policy has not moved since it sampled: the ratio is 1 and its gradient that of logp.
    old_logp_T = logp_T.detach() if mb.old_logp is None else mb.old_logp[0]
    trainer_logp_T = logp_T.detach() if algo.old_logp == "rollout" else old_logp_T
    pg_T, clipped_T = policy_loss(logp_T, old_logp_T, advantages_T, mask_T, mb.sequence_T, algo)
    correction_T, outside_T = mismatch_weight(trainer_logp_T, rollout_logp_T, mask_T, mb.sequence_T, algo)
    loss_T = pg_T = pg_T * correction_T
    if algo.entropy_coef:
        loss_T = loss_T - algo.entropy_coef * entropy_T
    kl = dict.fromkeys(("k1", "k2", "k3"), torch.zeros_like(mask_T))
    if mb.ref_logp is not None:
        kl = {kind: token_kl(logp_T.detach(), mb.ref_logp[0], kind) for kind in kl}
        if algo.kl_in == "loss":
            loss_T = loss_T + algo.kl_coef * token_kl(logp_T, mb.ref_logp[0], algo.kl)
    loss, denominator = (loss_T * weight_T).sum(), (weight_T > 0).sum().int()
    delta_T = (trainer_logp_T - rollout_logp_T) * mask_T
    w_T = delta_T.clamp(-20, 20).exp() * mask_T
    report = {
        "loss": loss, "policy": (pg_T * weight_T).sum(), "trained": denominator, "tokens": mask_T.sum(),
        "kl": kl["k3"] @ mask_T, "kl_k1": kl["k1"] @ mask_T, "kl_k2": kl["k2"] @ mask_T, "entropy": entropy_T @ mask_T,
        "clipped": clipped_T @ mask_T, "gap": delta_T.abs().sum(), "outside": outside_T @ mask_T, "w": w_T.sum(),
        "w2": w_T @ w_T, "mismatch_k3": token_kl(rollout_logp_T, trainer_logp_T, "k3") @ mask_T,
        "gap_max": delta_T.abs().max(),
    }  # fmt: skip
    return loss, denominator, {name: report[name].detach().double() for name in REPORTED}


# ---------------------------------------------------------------- 3. data


@dataclass
class Sample:
    """One answer, as plain Python. `group` numbers the prompt within the step."""

    group: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logp: list[float]
    finished: bool
    text: str
    source: str
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed into one row; every field [1, T] is aligned on the position that predicts."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor  # 1.0 where the target is a response token
    weights: torch.Tensor | None  # of each token in the loss (loss_weights); None: log-probs only
    advantages: torch.Tensor | None
    rollout_logp: torch.Tensor
    old_logp: torch.Tensor | None  # None: one update a step
    ref_logp: torch.Tensor | None  # None: no reference model
    seq_id: torch.Tensor  # sample's number in the step; -1 for padding
    index_T: torch.Tensor  # [tokens that are not padding], position of each in the step's flat rows
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_seqlen: int

    @property
    def sequence_T(self) -> torch.Tensor:
        """Number of each token's sequence in this row, [T]."""
        lengths_S = self.cu_seqlens.diff()
        numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
        return numbers_S.repeat_interleave(lengths_S, output_size=self.tokens.shape[1])


def sampling_seed(seed: int, step: int, group: int) -> int:
    """Seed of a group's answers in vLLM.

    It depends on nothing else, so neither do the answers (engines, order, layout).
    """
    return int(np.random.SeedSequence([seed, step, group]).generate_state(1)[0])


def flat_rows(samples: list[Sample]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """All samples of a step end to end; one value a predicting position (all tokens but the last of each sample).

    Returns rows {field: [F]} and lengths_N, the positions of each sample; F = lengths_N.sum().
    """
    prompt_N = np.array([len(s.prompt_ids) for s in samples])
    response_N = np.array([len(s.response_ids) for s in samples])
    lengths_N = prompt_N + response_N - 1
    ends_N = np.cumsum(lengths_N + 1)
    ids = np.concatenate([ids for s in samples for ids in (s.prompt_ids, s.response_ids)]).astype(np.int64)
    first, last = np.ones(len(ids), bool), np.ones(len(ids), bool)
    first[ends_N - lengths_N - 1] = False  # a first token is no target,
    last[ends_N - 1] = False  # a last one predicts nothing
    position_F = np.arange(lengths_N.sum()) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    mask_F = position_F >= np.repeat(prompt_N - 1, lengths_N)
    logp_F = np.zeros(len(mask_F), np.float32)
    logp_F[mask_F] = np.concatenate([s.rollout_logp for s in samples])
    rows = {
        "tokens": ids[last], "targets": ids[first], "position_ids": position_F, "mask": mask_F.astype(np.float32),
        "rollout_logp": logp_F, "seq_id": np.repeat(np.arange(len(samples)), lengths_N),
    }  # fmt: skip
    return {name: torch.from_numpy(values) for name, values in rows.items()}, lengths_N


def plan_bins(lengths_N: np.ndarray, max_tokens: int, multiple: int) -> list[list[int]]:
    """Spread samples over bins of at most `max_tokens`: longest first, each into the emptiest bin.

    Returns a multiple of `multiple` (the replicas) bins of sample numbers; replica r takes bins[r::replicas], so all
    have the same number and nearly the same load. Bins may be empty. A pure function: all ranks compute the same plan.
    Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    count = multiple * max(1, math.ceil(lengths_N.sum() / (max_tokens * multiple)))
    while True:
        bins, load_B = [[] for _ in range(count)], np.zeros(count, np.int64)
        for n in np.argsort(-lengths_N, kind="stable"):
            emptiest = load_B.argmin()
            bins[emptiest].append(int(n))
            load_B[emptiest] += lengths_N[n]
        if load_B.max() <= max_tokens:
            return bins
        count += multiple


def pack(rows: dict[str, torch.Tensor], lengths_N: np.ndarray, samples: list[int], width: int, device) -> MicroBatch:
    """Pack the numbered samples into one row, padded to `width` tokens with a masked sequence of its own.

    `rows` may hold "advantages", "weights", "old_logp", "ref_logp" beside the fields of `flat_rows`. An empty list of
    samples gives a row of padding only.
    """
    starts_N = np.cumsum(lengths_N) - lengths_N
    lengths_S = lengths_N[samples] if samples else np.zeros(0, np.int64)
    total = int(lengths_S.sum())
    shift_S = starts_N[samples] - (np.cumsum(lengths_S) - lengths_S) if samples else lengths_S
    index_T = torch.from_numpy(np.arange(total) + np.repeat(shift_S, lengths_S))
    padding = width - total
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths_S), [width] if padding else []]).astype(np.int32)

    def row(name: str, fill: int = 0) -> torch.Tensor | None:
        if name not in rows:
            return None
        return torch.nn.functional.pad(rows[name][index_T], (0, padding), value=fill)[None].to(device)  # [1, T]

    positions = torch.cat([rows["position_ids"][index_T], torch.arange(padding)])[None].to(device)  # [1, T]
    fields = ("tokens", "targets", "mask", "weights", "advantages", "rollout_logp", "old_logp", "ref_logp")
    return MicroBatch(
        position_ids=positions, seq_id=row("seq_id", -1), index_T=index_T,
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        max_seqlen=int(np.diff(cu_seqlens).max()), **{name: row(name) for name in fields},
    )  # fmt: skip


# ---------------------------------------------------------------- 4. training on Megatron


def to_micro_batches(
    rows: dict, lengths_N: np.ndarray, samples: list[int], max_tokens: int, cfg: Config
) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` tokens."""
    rank, replicas = bridge.data_parallel()
    multiple = bridge.token_multiple(cfg.parallel)
    count_multiple = replicas * bridge.micro_batch_multiple(cfg.parallel)
    bins = plan_bins(lengths_N[samples], max_tokens // multiple * multiple, count_multiple)
    widths = [max(1, math.ceil(lengths_N[samples][members].sum() / multiple)) * multiple for members in bins]
    if cfg.parallel.vpp > 1:  # the interleaved schedule wants rows of one length
        widths = [max(widths)] * len(bins)
    return [
        pack(rows, lengths_N, [samples[i] for i in members], width, bridge.device())
        for members, width in list(zip(bins, widths, strict=True))[rank::replicas]
    ]


def per_sample(values_F: torch.Tensor, rows: dict[str, torch.Tensor]) -> np.ndarray:
    """The sum over each sample's positions; [F] → [N] float64."""
    return torch.bincount(rows["seq_id"], weights=values_F.double()).numpy()


def score(model: list, rows: dict, lengths_N: np.ndarray, cfg: Config) -> torch.Tensor:
    """Log-prob of every target under the model's present weights, on every rank; [F], 0 where the mask is 0."""
    samples = list(range(len(lengths_N)))
    micro_batches = to_micro_batches(rows, lengths_N, samples, cfg.train.logprob_max_tokens_per_micro_batch, cfg)

    def keep(mb: MicroBatch, logp_T: torch.Tensor, entropy_T: torch.Tensor):
        return logp_T.sum(), mb.mask.sum().int(), logp_T[: len(mb.index_T)]

    parts = bridge.forward_backward(model, micro_batches, keep, cfg.rollout.temperature, forward_only=True)
    logp_F = torch.zeros(int(lengths_N.sum()), device=bridge.device())
    if bridge.reports_loss():
        for mb, logp_T in zip(micro_batches, parts, strict=True):
            logp_F[mb.index_T] = logp_T
    dist.all_reduce(logp_F)  # each token was scored on one rank, the others hold 0
    return logp_F.cpu()


def reduce_reports(reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Add the micro-batches' reports over the world (maximum for "gap_max"); the same on every rank."""
    counted = reports if bridge.reports_loss() else []
    zeros = torch.zeros(len(REPORTED), dtype=torch.float64, device=bridge.device())
    stacked = torch.stack([zeros, *(torch.stack([r[name] for name in REPORTED]) for r in counted)])
    sums, largest = stacked[:, :-1].sum(0), stacked[:, -1].max()
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(REPORTED, [*sums.tolist(), largest.item()], strict=True))


def update(
    model, optimizer, rows, lengths_N, samples: list[int], lr: float, check, cfg: Config, bad: Path | None = None
) -> dict[str, float]:
    """One optimizer step on the numbered samples; returns the report with "grad_norm", "fill" and "skipped".

    `check(report)` may stop it before the step. Where loss or gradient is no number nothing is changed ("skipped" is
    1), and the offending micro-batches go to files whose names begin with `bad`.
    """
    length = cfg.algo.loss_norm_length or cfg.rollout.max_new_tokens
    weights_F = loss_weights(rows["trained"], rows["seq_id"], samples, cfg.algo.loss_norm, length)
    rows = {**rows, "weights": weights_F}
    micro_batches = to_micro_batches(rows, lengths_N, samples, cfg.train.max_tokens_per_micro_batch, cfg)
    optimizer.zero_grad()
    reports = bridge.forward_backward(model, micro_batches, partial(grpo_loss, algo=cfg.algo), cfg.rollout.temperature)
    report = reduce_reports(reports)
    grad_norm = math.nan
    if math.isfinite(report["loss"]):
        check(report)
        bridge.set_learning_rate(optimizer, lr)
        grad_norm = bridge.optimizer_step(optimizer)
    skipped = not math.isfinite(grad_norm)
    if skipped and bad is not None and bridge.reports_loss():
        dump_micro_batches(bad, micro_batches, reports)
    fill = sum(len(mb.index_T) for mb in micro_batches) / (len(micro_batches) * cfg.train.max_tokens_per_micro_batch)
    return {**report, "grad_norm": grad_norm, "fill": fill, "skipped": int(skipped)}


def dump_micro_batches(bad: Path, micro_batches: list[MicroBatch], reports: list[dict]) -> None:
    """Write those micro-batches whose loss is no number, or all of them if only the gradient is none."""
    offending = [i for i, report in enumerate(reports) if not report["loss"].isfinite()] or range(len(micro_batches))
    fields = {
        f"{i}.{name}": value
        for i in offending
        for name, value in vars(micro_batches[i]).items()
        if torch.is_tensor(value)
    }
    bad.parent.mkdir(parents=True, exist_ok=True)
    save_file(fields, f"{bad}_rank_{dist.get_rank():05d}.safetensors")


# ---------------------------------------------------------------- 5. phases of a step


def sample_groups(
    trainer: "Trainer", batch: dict[int, Prompt], step: int, n: int, sampling: dict[str, Any]
) -> list[Sample]:
    """`n` answers to each of this engine's share of the prompts {group: prompt}; on the engine's first rank only.

    Each group goes to the graders as soon as it is complete, while the engine works on the others.
    """
    cfg, tp = trainer.cfg, trainer.cfg.rollout.tp
    share = list(batch.items())[dist.get_rank() // tp :: dist.get_world_size() // tp]
    seeds = [sampling_seed(cfg.seed, step, group) for group, _ in share]
    samples = []
    for number, answers in trainer.engine.generate([prompt.ids for _, prompt in share], seeds, n, **sampling):
        group, prompt = share[number]
        if dist.get_rank() % tp:
            continue
        texts = trainer.tokenizer.batch_decode([answer.ids for answer in answers], skip_special_tokens=True)
        for answer, text in zip(answers, texts, strict=True):
            samples.append(Sample(group, prompt.ids, answer.ids, answer.logps, answer.finished, text, prompt.source))
            trainer.graders.submit(prompt.source, text, prompt.answer, prompt.row)
    return samples


@dataclass
class Graded:
    """What grading came to: outcomes by (source, "timeout" or "error"), and the first error of each kind, to show."""

    counts: Counter = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)  # kind → message with the row

    def __add__(self, other: "Graded") -> "Graded":
        return Graded(self.counts + other.counts, {**other.errors, **self.errors})


def grade(graders: rewards.Grader, samples: list[Sample], batch: dict[int, Prompt]) -> tuple[list[Sample], Graded]:
    """Wait for the grades of the samples, in the order they were submitted; a failed or late one gives reward 0."""
    outcome, graded = Graded(), []
    for sample, result in zip(samples, graders.collect(), strict=True):
        graded.append(dataclasses.replace(sample, reward=sum(result.parts.values()), reward_parts=result.parts))
        if result.status != "ok":
            outcome.counts[sample.source, result.status] += 1
        if result.status == "error":
            row = json.dumps(batch[sample.group].row, default=str)
            outcome.errors.setdefault(
                result.error.partition(":")[0],
                f"the reward of source {sample.source!r} failed: {result.error}\n  row: {row}\n"
                f"  response: {sample.text!r}",
            )
    return graded, outcome


def gather(samples: list[Sample], outcome: Graded, busy: dict) -> tuple[list[Sample], Graded, list[dict]]:
    """All ranks' samples in the order of their groups, all outcomes, and how long each rank was busy; on every rank."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (samples, outcome, busy))
    merged = sorted((s for part, *_ in everywhere for s in part), key=lambda s: s.group)
    return merged, sum((o for _, o, _ in everywhere), Graded()), [b for *_, b in everywhere]


def check_errors(trainer: "Trainer", outcome: Graded, samples: int) -> None:
    """Show the first error of each kind, once a run; too many of them stop the run on every rank. Raises UserError."""
    bound = trainer.cfg.reward.max_error_frac
    failed = sum(count for (_, status), count in outcome.counts.items() if status == "error")
    new = {kind: message for kind, message in outcome.errors.items() if kind not in trainer.errors_shown}
    if failed > bound * samples:
        raise UserError(
            f"{next(iter(outcome.errors.values()))}\n  {failed} of {samples} samples failed, more than "
            f"reward.max_error_frac={bound:g} allows; mend the function or the row, or choose another reward for the "
            "source (reward.by_source)"
        )
    trainer.errors_shown.update(new)
    for message in new.values() if dist.get_rank() == 0 else ():
        print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)


def sampling_options(options: RolloutConfig | EvalConfig, max_new_tokens: int) -> dict[str, Any]:
    """A section's sampling settings as vLLM names them."""
    return dict(temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, max_tokens=max_new_tokens)


def evaluate(trainer: "Trainer", step: int) -> dict[str, float]:
    """Metrics of the present weights on data.eval, by source; the samples go to the rollouts folder.

    avg@n is the mean reward over n answers; pass@k, for each power of two up to n and n itself, the mean of pass_at_k.
    """
    cfg, start, n = trainer.cfg, time.perf_counter(), trainer.cfg.eval.samples
    trainer.watchdog.enter("eval")
    batch = dict(enumerate(trainer.eval_prompts))
    sampling = sampling_options(cfg.eval, cfg.eval.max_new_tokens or cfg.rollout.max_new_tokens)
    samples = sample_groups(trainer, batch, 0, n, sampling)  # step 0: the same seeds at every evaluation
    samples, outcome, _ = gather(*grade(trainer.graders, samples, batch), {})
    check_errors(trainer, outcome, len(samples))
    metrics = {}
    for source in sorted({s.source for s in samples}):
        mine = [s for s in samples if s.source == source]
        reward_G = np.array([s.reward for s in mine]).reshape(-1, n)  # [prompts, n]
        metrics[f"eval/{source}/avg@{n}"] = reward_G.mean()
        passed = (reward_G >= cfg.eval.pass_reward).sum(1)
        for k in sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n}):
            metrics[f"eval/{source}/pass@{k}"] = np.mean([pass_at_k(n, c, k) for c in passed.tolist()])
        metrics[f"eval/{source}/response_mean"] = np.mean([len(s.response_ids) for s in mine])
        metrics[f"eval/{source}/truncated_frac"] = np.mean([not s.finished for s in mine])
        for status in ("timeout", "error"):
            metrics[f"eval/{source}/{status}_frac"] = outcome.counts[source, status] / len(mine)
    if dist.get_rank() == 0:
        dump_rollouts(Path(cfg.output_dir, "rollouts", f"eval_{step:06d}.jsonl"), samples)
        shown = (f"{key.removeprefix('eval/')} {value:.3f}" for key, value in metrics.items() if "@" in key)
        print(f"eval after step {step}: {'  '.join(shown)}", flush=True)
    trainer.watchdog.enter("step")
    return {**metrics, "time/eval": time.perf_counter() - start}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that one of k answers drawn from n, of which `passed` pass, passes: 1 - C(n - passed, k) / C(n, k).

    Without bias for what k fresh answers would give. Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def collect(trainer: "Trainer", step: int, seconds: dict) -> tuple[list[Sample], set[int], Graded, list[dict], int]:
    """Sample and grade the groups of a step; the same on every rank.

    Returns all samples in the order of their groups, the groups to train on, what went wrong in grading, how long each
    rank was busy, and the number of rounds. With algo.max_rounds above 1, groups whose rewards are all equal are not
    trained on, and new prompts take their place (dynamic sampling: DAPO, arXiv 2503.14476, eq. 11).
    """
    cfg, samples, outcome, groups = trainer.cfg, [], Graded(), set()
    r, max_rounds, rounds = cfg.rollout, cfg.algo.max_rounds, 0
    sampling = sampling_options(r, r.max_new_tokens)
    while len(groups) < r.prompts_per_step and rounds < max_rounds:
        rounds += 1
        missing, first = r.prompts_per_step - len(groups), len(samples) // r.group_size
        prompts = prompt_batch(trainer.prompts, trainer.prompts_taken, missing, cfg.seed)
        trainer.prompts_taken += missing
        batch = dict(enumerate(prompts, first))
        with timed(trainer.watchdog, seconds, "rollout"):
            answers = sample_groups(trainer, batch, step, r.group_size, sampling)
        with timed(trainer.watchdog, seconds, "reward"):
            answers, failed = grade(trainer.graders, answers, batch)
        state = {**seconds, "memory_gb": peak_memory_gb(), "stop": trainer.signals.requested}
        answers, failed, busy = gather(answers, failed, state)
        if any(b["stop"] for b in busy):
            raise StopRequested
        samples, outcome = samples + answers, outcome + failed
        check_errors(trainer, failed, len(answers))
        rewards_G = np.array([s.reward for s in answers]).reshape(-1, r.group_size)  # [groups, G]
        mixed = rewards_G.min(1) < rewards_G.max(1)
        groups |= {first + i for i in range(missing) if mixed[i] or max_rounds == 1}
    if len(groups) < r.prompts_per_step and dist.get_rank() == 0:
        print(f"step {step}: after {rounds} rounds {len(groups)} of {r.prompts_per_step} groups have mixed rewards")
    return samples, groups or set(batch), outcome, busy, rounds


def shape_rewards(samples: list[Sample], algo: AlgoConfig, max_new_tokens: int) -> list[Sample]:
    """Add the overlong penalty, where there is one, to the rewards."""
    if not algo.overlong_buffer:
        return samples
    penalty_N = overlong_penalty([len(s.response_ids) for s in samples], max_new_tokens, algo.overlong_buffer)
    penalty_N = (penalty_N * algo.overlong_coef).tolist()
    return [
        dataclasses.replace(s, reward=s.reward + p, reward_parts={**s.reward_parts, "overlong": p})
        for s, p in zip(samples, penalty_N, strict=True)
    ]


def update_order(groups: list[int], updates: int, epochs: int, seed: int, step: int) -> list[set[int]]:
    """The groups of each update of a step: every epoch deals all of them, shuffled anew, into `updates` parts.

    Whole groups; the same on every rank and layout. Parts without a group are left out.
    """
    parts = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, step, epoch]).permutation(sorted(groups))
        parts += [set(part.tolist()) for part in np.array_split(order, updates) if len(part)]
    return parts


def check_gap(report: dict[str, float], trainer: "Trainer", rows, lengths_N, samples: list[Sample], step: int) -> None:
    """Stop before the weights change if trainer and engine disagree: a gate at step 1, later a check of the push."""
    cfg = trainer.cfg
    kind, bound, gap = "largest", 1e-3, report["gap_max"]
    if cfg.model.dtype == "bf16":
        kind, bound, gap = "mean", 0.05, report["gap"] / max(report["tokens"], 1)
    bound = cfg.rollout.max_logp_gap or bound
    if not gap <= bound:
        logp_F = score(trainer.model, rows, lengths_N, cfg)
        raise TrainingError(
            f"step {step}: trainer and vLLM disagree on sampled tokens: {kind} |Δ log-prob| = {gap:.2e}, bound "
            f"{bound:.0e} (rollout.max_logp_gap)\n{explain_gap(logp_F, rows, samples, step, bound)}"
        )


def explain_gap(logp_F: torch.Tensor, rows: dict, samples: list[Sample], step: int, bound: float) -> str:
    """A table of the largest differences, how they spread, and the likely cause."""
    response_F = rows["mask"] > 0
    gap_F = (logp_F - rows["rollout_logp"]).abs() * response_F
    prompt_F = torch.tensor([len(s.prompt_ids) for s in samples])[rows["seq_id"]]
    place_F = rows["position_ids"] + 1 - prompt_F  # of the target within its response
    beyond_F = gap_F > bound
    share = (beyond_F.sum() / response_F.sum()).item()
    early, late = (gap_F[response_F & part].nanmean().item() for part in (place_F < 3, place_F >= 3))
    if step > 1:
        cause = "the engine did not take up the last weight push (stale or partly loaded weights): it agreed at first"
    elif late > 10 * early:
        cause = "the gap grows along the response: rotary embedding or context length differ"
    elif share < 0.05:
        cause = "few tokens differ: numerical noise; compare with model.dtype=fp32, or raise the bound"
    else:
        cause = "most tokens differ: other weights (mapping) or another distribution (temperature, top_p, rollout.vllm)"
    table = ["  sample  group  position   token   trainer      vLLM       |Δ|"]
    for i in gap_F.topk(min(10, len(gap_F))).indices.tolist():
        n = int(rows["seq_id"][i])
        table.append(
            f"  {n:6d} {samples[n].group:6d} {place_F[i]:9d} {rows['targets'][i]:7d} {logp_F[i]:9.4f} "
            f"{rows['rollout_logp'][i]:9.4f} {gap_F[i]:9.2e}"
        )
    return "\n".join([
        *table,
        f"  {share:.1%} of {int(response_F.sum())} tokens, in {len(rows['seq_id'][beyond_F].unique())} of "
        f"{len(samples)} samples, are beyond the bound; mean |Δ| {early:.1e} in the first 3 tokens, {late:.1e} later",
        f"  likely cause: {cause}",
    ])  # fmt: skip


def push_weights(model: list, engine, cfg: Config) -> None:
    """Trainer to vLLM; the KV cache takes its memory back only after the push."""
    engine.wake("weights")
    engine.load_weights(bridge.hf_weights(model, cfg.rollout.sync_bucket_mb << 20))
    engine.wake("kv_cache")


# ---------------------------------------------------------------- 6. logging


@contextlib.contextmanager
def timed(watchdog: guard.Watchdog, seconds: dict[str, float], phase: str):
    """Add the seconds of the block to seconds[phase], and let the watchdog know of it."""
    watchdog.enter(phase)
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()  # does nothing on the CPU
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
    watchdog.enter("step")


def peak_memory_gb() -> float:
    """Largest amount this rank has held: GPU memory of the trainer, or the process's resident memory on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def summarize(
    step, samples, groups, rounds, outcome, reports, expert_load, lr, seconds, busy, cfg: Config
) -> dict[str, float | int | None]:
    """The metrics of a step; names as in docs/metrics.md, always all of them."""
    reward_N = np.array([s.reward for s in samples])
    rewards_G = reward_N.reshape(-1, cfg.rollout.group_size)  # [groups, G]; samples are in the order of their groups
    length_N = np.array([len(s.response_ids) for s in samples])
    sources = sorted({s.source for s in samples})
    first, measured = reports[0], reports[: measured_updates(cfg)]

    def mean(name: str, reports: list[dict], over: str = "tokens") -> float:
        return sum(r[name] for r in reports) / max(sum(r[over] for r in reports), 1)

    kl = {"kl/ref": "kl", "kl/k1": "kl_k1", "kl/k2": "kl_k2"}
    wall = seconds["step"]
    # A rank idles between the end of its own rollout and grading and that of the slowest rank.
    work = np.array([b.get("rollout", 0.0) + b.get("reward", 0.0) for b in busy])
    return {
        "step": step,
        "reward/mean": reward_N.mean(),
        "reward/std": reward_N.std(),
        **{f"reward/{name}/mean": np.mean([s.reward for s in samples if s.source == name]) for name in sources},
        **{
            f"reward/{name}/{status}_frac": outcome.counts[name, status] / sum(s.source == name for s in samples)
            for name in sources
            for status in ("timeout", "error")
        },
        "groups/zero_std_frac": np.mean(rewards_G.max(1) == rewards_G.min(1)),
        "groups/sampled": len(rewards_G),
        "groups/trained": len(groups),
        "groups/rounds": rounds,
        "loss/total": mean("loss", [first], "trained"),
        "loss/policy": mean("policy", [first], "trained"),
        **{key: mean(name, [first]) if cfg.algo.kl_coef else None for key, name in kl.items()},
        "entropy": mean("entropy", [first]),
        "ratio/clip_frac": mean("clipped", reports),
        "logp_gap/mean": mean("gap", measured),
        "logp_gap/max": max(r["gap_max"] for r in measured),
        "mismatch/k3": mean("mismatch_k3", measured),
        "mismatch/ess": sum(r["w"] for r in measured) ** 2
        / (sum(r["w2"] for r in measured) or 1)
        / max(sum(r["tokens"] for r in measured), 1),
        "mismatch/cut_frac": mean("outside", measured),
        "grad_norm": first["grad_norm"],
        "moe/load": max(expert_load, default=None),
        **{f"moe/load/layer_{layer:02d}": load for layer, load in enumerate(expert_load)},
        "lr": lr,
        "tokens/prompt_mean": np.mean([len(s.prompt_ids) for s in samples]),
        "tokens/response_mean": length_N.mean(),
        "tokens/response_max": length_N.max(),
        "tokens/truncated_frac": np.mean([not s.finished for s in samples]),
        **{
            f"time/{phase}": seconds.get(phase, 0.0)
            for phase in ("rollout", "reward", "logprob", "train", "sync", "save", "step")
        },
        "speed/response_tokens_per_s": length_N.sum() / wall,
        "speed/samples_per_s": len(samples) / wall,
        "pack/fill": np.mean([r["fill"] for r in reports]),
        "idle_frac": (work.max() - work.mean()) / wall,
        "mem/peak_gb": max(b["memory_gb"] for b in busy),
        "update/skipped": sum(r["skipped"] for r in reports),
    }


def measured_updates(cfg: Config) -> int:
    """How many updates, from the first, compare vLLM with the trainer as it was when vLLM sampled.

    Those of one epoch see each token once; without a pass for the trainer's old log-probs only the first is in time.
    """
    return cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1


# ---------------------------------------------------------------- 7. the loop


class StopRequested(Exception):
    """A signal came while the step was sampling: the step is given up, on every rank."""


class TrainingError(Exception):
    """The run cannot go on with right results. The message is all a user needs; exit code 1."""


class RankError(TrainingError):
    """A failure that this rank alone may know of, so this rank says it."""


@dataclass
class Trainer:
    """What lives through a run, on every rank."""

    cfg: Config
    model_path: str  # local folder of the initial model
    tokenizer: Any
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    prompts_taken: int  # of `prompts`, an endless stream, so far
    errors_shown: set[str]  # kinds of reward errors the user has seen
    engine: Engine
    model: list
    optimizer: Any
    reference: list[torch.Tensor] | None  # the initial weights; None: no KL
    graders: rewards.Grader
    writer: CheckpointWriter
    watchdog: guard.Watchdog
    signals: guard.StopSignals
    skipped: int = 0  # updates in a row that were skipped, up to now


def build_trainer(
    cfg: Config,
    tokenizer,
    prompts: list[Prompt],
    eval_prompts: list[Prompt],
    checkpoint: Path | None,
    watchdog: guard.Watchdog,
    signals: guard.StopSignals,
) -> Trainer:
    """Engine, model, optimizer and graders, as `checkpoint` has them if there is one; the engine holds the weights."""
    r, t = cfg.rollout, cfg.train
    watchdog.enter("build")
    path = bridge.local_folder(cfg.model.path)
    # vLLM measures free memory when it starts, so it comes first and sleeps while the model is built.
    engine = Engine(path, cfg.model.dtype, r.tp, longest_sample(cfg), r.gpu_memory_utilization, r.vllm)
    engine.sleep()
    model = bridge.build_model(path, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    betas = (t.adam_beta1, t.adam_beta2)
    optimizer = bridge.build_optimizer(model, t.lr, t.weight_decay, betas, t.clip_grad, cfg.megatron)
    reference = bridge.copy_weights(model) if cfg.algo.kl_coef > 0 else None
    graders = rewards.Grader(**dataclasses.asdict(cfg.reward))
    writer = CheckpointWriter(Path(cfg.output_dir, "checkpoints"), t.keep_last, t.keep_every)
    trainer = Trainer(
        cfg, path, tokenizer, prompts, eval_prompts, 0, set(), engine, model, optimizer, reference, graders, writer,
        watchdog, signals,
    )  # fmt: skip
    if checkpoint is not None:
        state = read_state(checkpoint)
        loaded = read_sharded(checkpoint, sharded_state(model, optimizer, loading=True))
        load_state(model, optimizer, loaded, state["updates"])
        trainer.prompts_taken, trainer.skipped = state["prompts_taken"], state["skipped"]
        writer.step = state["step"]
    push_weights(model, engine, cfg)
    return trainer


def run_state(trainer: Trainer, step: int) -> dict[str, Any]:
    """What a run needs besides weights and moments to go on after `step`, as JSON.

    There is no random state: all that is drawn follows from seed, step and group (sampling_seed, seed_step, ...).
    """
    return {
        "step": step,
        "updates": optimizer_steps(trainer.optimizer),
        "prompts_taken": trainer.prompts_taken,
        "skipped": trainer.skipped,
        "data": fingerprint(trainer.prompts),
        "ranks": dist.get_world_size(),
        "config": dataclasses.asdict(trainer.cfg),
    }


def start_checkpoint(trainer: Trainer, step: int) -> None:
    """Begin to write the checkpoint of `step`; CheckpointWriter.finish gives it its name."""
    state = sharded_state(trainer.model, trainer.optimizer, loading=False)
    trainer.writer.start(step, run_state(trainer, step), state)


def train_step(trainer: Trainer, step: int) -> tuple[dict, list[Sample]]:
    """One step of GRPO: sample, grade, log-probs, advantages, updates, push. Returns its metrics and samples."""
    cfg, model, engine, watchdog, seconds = trainer.cfg, trainer.model, trainer.engine, trainer.watchdog, {}
    r, t, algo = cfg.rollout, cfg.train, cfg.algo
    start = time.perf_counter()

    bridge.seed_step(cfg.seed, step)
    samples, groups, outcome, busy, rounds = collect(trainer, step, seconds)
    samples = shape_rewards(samples, algo, r.max_new_tokens)
    engine.sleep()

    trained = [s for s in samples if s.group in groups]
    groups_N = np.array([s.group for s in trained])
    rows, lengths_N = flat_rows(trained)
    finished_N = torch.tensor([s.finished or not algo.mask_truncated for s in trained])
    rows["trained"] = rows["mask"] * finished_N[rows["seq_id"]]
    parts = update_order(sorted(groups), t.updates_per_step, t.epochs_per_step, cfg.seed, step)

    with timed(watchdog, seconds, "logprob"):
        kl_reward = algo.kl_coef > 0 and algo.kl_in == "reward"
        if algo.old_logp == "rollout":
            rows["old_logp"] = rows["rollout_logp"]
        elif len(parts) > 1 or kl_reward:
            rows["old_logp"] = score(model, rows, lengths_N, cfg)
        if trainer.reference is not None:
            with bridge.swapped_weights(model, trainer.reference):
                rows["ref_logp"] = score(model, rows, lengths_N, cfg)

    rewards_N, tokens_N = np.array([s.reward for s in trained]), per_sample(rows["trained"], rows)
    if kl_reward:  # on the sum of an answer's token rewards, as in verl
        kl_F = token_kl(rows["old_logp"], rows["ref_logp"], algo.kl)
        rewards_N = rewards_N - algo.kl_coef * per_sample(kl_F * rows["mask"], rows)
    advantages_N = group_advantages(rewards_N, groups_N, algo.advantage, tokens_N)
    rows["advantages"] = torch.from_numpy(advantages_N).float()[rows["seq_id"]]  # [F]

    with timed(watchdog, seconds, "train"):
        lr = t.lr * min(1.0, step / max(t.warmup_steps, 1))
        check = partial(check_gap, trainer=trainer, rows=rows, lengths_N=lengths_N, samples=trained, step=step)
        reports = []
        for part in parts:
            chosen = np.flatnonzero(np.isin(groups_N, list(part))).tolist()
            gate = check if len(reports) < measured_updates(cfg) else lambda report: None
            bad = Path(cfg.output_dir, "skipped", f"step_{step:06d}_update_{len(reports)}")
            reports.append(update(model, trainer.optimizer, rows, lengths_N, chosen, lr, gate, cfg, bad))
            trainer.skipped = check_skipped(trainer.skipped, reports[-1], bad, t.max_skipped)

    expert_load = bridge.expert_load(model)
    with timed(watchdog, seconds, "sync"):
        push_weights(model, engine, cfg)
    with timed(watchdog, seconds, "save"):  # the export first: where its checkpoint exists, so does it
        trainer.writer.finish()
        if step == t.steps or (t.export_every and step % t.export_every == 0):
            bridge.export_hf(model, trainer.model_path, Path(cfg.output_dir, "hf", f"step_{step:06d}"))
        if t.save_every and (step == t.steps or step % t.save_every == 0):
            start_checkpoint(trainer, step)

    seconds["step"] = time.perf_counter() - start
    metrics = summarize(step, samples, groups, rounds, outcome, reports, expert_load, lr, seconds, busy, cfg)
    advantages = iter(advantages_N.tolist())  # groups that were replaced have none
    return metrics, [dataclasses.replace(s, advantage=next(advantages) if s.group in groups else 0.0) for s in samples]


def train(
    cfg: Config,
    tokenizer,
    prompts: list[Prompt],
    eval_prompts: list[Prompt],
    watchdog: guard.Watchdog,
    signals: guard.StopSignals,
) -> None:
    """The whole run, on every rank of torchrun's world."""
    out, writes, t = Path(cfg.output_dir), dist.get_rank() == 0, cfg.train
    _lock = check_machines(cfg)  # held as long as the run
    checkpoint = find_checkpoint(cfg.resume, out / "checkpoints")
    done = check_resumed(checkpoint, dataclasses.asdict(cfg), fingerprint(prompts)) if checkpoint else 0
    if done == t.steps:
        if writes:
            print(f"nothing to do: {checkpoint} is after the last step, train.steps={t.steps}", flush=True)
        return
    on_first_rank(lambda: open_output_dir(out, to_yaml(cfg), cfg.resume, done))
    trainer = build_trainer(cfg, tokenizer, prompts, eval_prompts, checkpoint, watchdog, signals)
    history = []
    if t.eval_every and not checkpoint:
        metrics = {"step": 0, **evaluate(trainer, 0)}
        if writes:
            log_metrics(out, metrics)
    for step in range(done + 1, t.steps + 1):
        taken = trainer.prompts_taken
        try:
            if on_any_rank(signals.requested is not None):
                raise StopRequested
            metrics, samples = train_step(trainer, step)
        except StopRequested:
            trainer.prompts_taken = taken
            save_and_stop(trainer, step - 1)
            return
        history.append(metrics["reward/mean"])
        if t.eval_every and (step % t.eval_every == 0 or step == t.steps):
            metrics |= evaluate(trainer, step)
        if writes:
            dump_rollouts(out / "rollouts" / f"step_{step:06d}.jsonl", samples)
            log_metrics(out, metrics)
            print(step_line(metrics, t.steps), flush=True)
    trainer.writer.finish()
    trainer.graders.close()
    if writes:
        last = history[-10:]
        print(f"\nreward: {history[0]:.3f} at step {done + 1}, {np.mean(last):.3f} over the last {len(last)} steps")
        print(
            f"outputs: {out}/metrics.jsonl, {out}/rollouts/, {out}/hf/step_{t.steps:06d}/ (for transformers and vLLM)"
        )


def save_and_stop(trainer: Trainer, step: int) -> None:
    """End a run that a signal stopped, after `step`, with a checkpoint of it; on every rank."""
    trainer.watchdog.enter("save")
    trainer.writer.finish()
    if step and trainer.writer.step != step:
        start_checkpoint(trainer, step)
        trainer.writer.finish()
    trainer.graders.close()
    if dist.get_rank() == 0:
        saved = f"step {step}, saved in {trainer.writer.folder}; go on with resume=auto"
        print(f"stopped after {saved if step else 'no step: there is nothing to save'}", flush=True)


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same on every rank."""
    flags = torch.tensor(float(flag), device=bridge.device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def on_first_rank(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, None elsewhere. A mistake it finds raises UserError on every rank."""
    result, message = None, [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except (UserError, ValueError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message)
    if message[0] is not None:
        raise UserError(message[0])
    return result


def check_machines(cfg: Config) -> IO | None:
    """Check what only the machines can tell, before weights are loaded; builds the process groups. Raises UserError.

    Returns the lock of the output folder on rank 0, to be kept.
    """
    out, timeout_s = Path(cfg.output_dir), group_timeout_s(cfg)

    def check_first_host() -> IO:
        saved = 12 + bridge.DTYPES[cfg.model.dtype].itemsize  # bytes a weight, of a checkpoint and an export
        weights = bridge.count_weights(bridge.local_folder(cfg.model.path))
        preflight.check_host(out, weights * saved, shares_memory=torch.cuda.is_available() or cfg.rollout.tp > 1)
        return lock_output_dir(out)

    try:
        preflight.check_same_config(to_yaml(cfg))
    except ValueError as error:
        raise UserError(str(error)) from None
    lock = on_first_rank(check_first_host)
    bridge.init_model_parallel(cfg.parallel, cfg.seed, timeout_s)
    try:
        preflight.check_groups(bridge.process_groups(), min(timeout_s, preflight.GROUP_CHECK_S))
    except ValueError as error:
        raise RankError(str(error)) from None
    return lock


def group_timeout_s(cfg: Config) -> float:
    """Longest time of a collective: more than the watchdog's, which says more."""
    return cfg.train.stall_timeout_s + 60 if cfg.train.stall_timeout_s else 86400.0


def check_skipped(before: int, report: dict, bad: Path, limit: int) -> int:
    """How many updates in a row have been skipped now, with this report; raises TrainingError at the limit."""
    if not report["skipped"]:
        return 0
    what = (
        f"the loss of an update is {report['loss']}" if not math.isfinite(report["loss"]) else "a gradient is no number"
    )
    message = f"{what}; it was skipped, its micro-batches are in {bad}_rank_*.safetensors"
    if before + 1 >= limit:
        raise TrainingError(f"{message}; {before + 1} in a row, train.max_skipped={limit}")
    if dist.get_rank() == 0:
        print(f"warning: {message}; {before + 1} in a row, the run stops at train.max_skipped={limit}", flush=True)
    return before + 1


def longest_sample(cfg: Config) -> int:
    """Tokens of the longest prompt and answer there can be."""
    new_tokens = max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    return cfg.data.max_prompt_tokens + new_tokens


def prepare(args: argparse.Namespace) -> tuple[Config, Any, list[Prompt], list[Prompt]]:
    """Check all that can be checked without a process group; returns configuration, tokenizer, prompts, eval prompts.

    Raises UserError.
    """
    cfg = load_config(Config, args.config, args.overrides)
    check_config(cfg, args.world_size)
    r, dropped = cfg.rollout, {}
    prompts: dict[str, list[Prompt]] = {"train": [], "eval": []}
    try:
        bridge.check_model(cfg.model.path, cfg.parallel, r.tp, longest_sample(cfg), cfg.model.dtype, cfg.megatron)
        tokenizer = load_tokenizer(cfg.model.path)
        for key in ("train", "eval") if cfg.data.eval is not None else ("train",):
            prompts[key], dropped[key] = load_prompts(cfg.data, tokenizer, key)
        if not args.dry_run:
            bridge.check_weights(bridge.local_folder(cfg.model.path))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if is_first_rank():
        if restarts != "0" and cfg.resume != "auto":
            print(f"warning: --max-restarts={restarts}: each restart begins from resume={cfg.resume} again; use auto")
        print(describe(cfg, args.world_size))
        for key, count in dropped.items():
            note = f"; {count} dropped, longer than {cfg.data.max_prompt_tokens} tokens" if count else ""
            print(f"{'data:' if key == 'train' else 'eval:':8s} {len(prompts[key])} prompts{note}", flush=True)
    if not args.dry_run:
        if "RANK" not in os.environ:
            raise UserError("start with torchrun --nproc_per_node=N train_grpo.py ..., or add --dry-run to check only")
        if not torch.cuda.is_available() and r.vllm.get("enable_expert_parallel"):
            raise UserError("rollout.vllm.enable_expert_parallel=true: vLLM has it on GPUs only, set it to false")
        local, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if torch.cuda.is_available() and local > gpus:
            raise UserError(
                f"--nproc_per_node={local}, but this machine has {gpus} GPU{'s' * (gpus > 1)}: one process a GPU"
            )
    return cfg, tokenizer, prompts["train"], prompts["eval"]


def is_first_rank() -> bool:
    """Whether this process speaks for the run, known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def parse_args(argv: list[str]) -> argparse.Namespace:
    """--config, --dry-run, --world-size, and the overrides. argparse itself exits with 2 on an unknown option."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration, model and data, print the plan; needs no GPU"
    )
    parser.add_argument(
        "--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="ranks that a dry run plans for"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def join_ranks(cfg: Config) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT. Raises RankError."""
    try:
        bridge.init_distributed(group_timeout_s(cfg))
    except dist.DistError as error:
        raise RankError(
            f"rank {os.environ['RANK']} cannot meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({str(error).splitlines()[0]}). If the address "
            "is in use, another job has this MASTER_PORT: choose another; else rank 0 is gone or out of reach"
        ) from error


def run(cfg: Config, inputs: list) -> None:
    """`train`, watched, with what failures of the machines mean. Raises TrainingError."""
    watchdog, signals = guard.Watchdog(cfg.train.stall_timeout_s), guard.StopSignals()
    try:
        train(cfg, *inputs, watchdog, signals)
    except torch.OutOfMemoryError as error:
        raise RankError(preflight.explain_out_of_memory(watchdog.phase, error)) from error
    except (RuntimeError, OSError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "onnection" in str(error):  # gloo and NCCL have no class of their own
            raise RankError(
                f"rank {dist.get_rank()}, in the phase {watchdog.phase}: another rank is gone "
                f"({str(error).splitlines()[0]}). torchrun's report says which one; go on with resume=auto"
            ) from error
        message = preflight.explain_disk_error(watchdog.phase, error, Path(cfg.output_dir))
        if message is None:
            raise
        raise RankError(message) from error
    finally:
        signals.ended = True
        watchdog.stop()


def main(argv: list[str]) -> int:
    """The exit code: 0 done, 2 a mistake the user can mend, 1 a failure during training."""
    guard.die_with_torchrun()
    args = parse_args(argv)
    try:
        cfg, *inputs = prepare(args)
        if not args.dry_run:
            join_ranks(cfg)
            run(cfg, inputs)
    except (UserError, TrainingError, CheckpointError) as error:
        if is_first_rank() or isinstance(error, RankError):
            guard.say(f"error: {error}")
        else:
            time.sleep(3)  # torchrun ends every rank as soon as one has exited; let the first one speak
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
