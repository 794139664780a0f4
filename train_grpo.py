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

One step: sample -> grade -> advantages -> pack -> (old and reference log-probs) -> update(s) -> push weights -> log -> save.

To fork: a new advantage is a branch in `group_advantages`, a new loss one in `policy_loss`, a new KL one in `token_kl`, each with a
name that `CHOICES` lists; a reward is a function in reward.py or in a file of your own (`reward.custom`).

Names: a suffix tells a tensor's shape. _N per sample, _T per packed token, _F per predicting position of the whole step.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import os
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import omegaconf
import torch
import torch.distributed as dist

import megatron_bridge as bridge
import reward as rewards
from rollout import Engine

# ---------------------------------------------------------------- 1. configuration


class UserError(Exception):
    """Something the user can mend: what is wrong, which key, what would be legal. Ends the program with exit code 2."""


@dataclass
class ModelConfig:
    path: str = omegaconf.MISSING  # Hugging Face folder or hub name
    dtype: str = "bf16"  # bf16 | fp32; optimizer state and gradients are fp32 either way


@dataclass
class DataConfig:
    train: Any = omegaconf.MISSING  # file (jsonl, json, parquet, arrow), glob, list of files, or hub name
    eval: Any = None  # not in this version
    split: str = "train"  # of a hub data set
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    source_key: str = "source"  # column that chooses the reward; rows without it have the source "default"
    chat_template: bool = True  # wrap the prompt as a user message with the tokenizer's template
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
    max_logp_gap: float | None = None  # trainer against vLLM; null: 1e-3 (largest, fp32) or 0.05 (mean, bf16); inf: never stop
    sync_bucket_mb: int = 512  # weights cross from trainer to vLLM in buckets of about this size
    vllm: dict[str, Any] = field(default_factory=dict)  # passed to vllm.LLM


@dataclass
class RewardConfig:
    default: str = "exact"  # exact | gsm8k | custom
    by_source: dict[str, str] = field(default_factory=dict)  # source of a row -> reward
    custom: str | None = None  # path/to/file.py:function, used by the name "custom"
    timeout_s: float = 10.0  # a sample graded longer than this gets reward 0 and counts in reward/timeout_frac
    workers: int = 1  # grading processes a rank


@dataclass
class AlgoConfig:
    advantage: str = "grpo"
    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # 0: no reference model is kept
    kl: str = "k3"  # k1 | k2 | k3
    loss_norm: str = "token_mean"
    entropy_coef: float = 0.0
    correction: str = "none"  # of the mismatch between vLLM and trainer


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
    max_tokens_per_micro_batch: int = 16384  # strict cap, forward and backward
    logprob_max_tokens_per_micro_batch: int = 32768  # strict cap of the forward-only passes (old and reference log-probs)
    save_every: int = 0  # steps between exports to output_dir/hf; 0: at the end only
    eval_every: int = 0  # not in this version


@dataclass
class ParallelConfig:
    tp: int = 1
    sp: bool = True  # sequence parallelism, wherever tp > 1
    pp: int = 1
    vpp: int = 1  # model chunks a pipeline stage
    cp: int = 1
    ep: int = 1
    etp: int = 1


@dataclass
class Config:
    output_dir: str = "outputs/run"
    seed: int = 0
    resume: str = "none"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)  # TransformerConfig, OptimizerConfig, DistributedDataParallelConfig


# Every key with a closed set of values, and the set.
CHOICES = {
    "model.dtype": ("bf16", "fp32"),
    "algo.advantage": ("grpo",),
    "algo.loss": ("ppo_clip",),
    "algo.kl": ("k1", "k2", "k3"),
    "algo.loss_norm": ("token_mean",),
    "algo.correction": ("none",),
    "resume": ("none",),
    "data.eval": (None,),
    "train.eval_every": (0,),
    "parallel.cp": (1,),
    "parallel.ep": (1,),
    "parallel.etp": (1,),
}
AT_LEAST = {
    "rollout.prompts_per_step": 1, "rollout.group_size": 2, "rollout.max_new_tokens": 1, "rollout.tp": 1,
    "rollout.sync_bucket_mb": 1, "data.max_prompt_tokens": 1, "train.steps": 1, "train.lr": 0, "train.warmup_steps": 0,
    "train.weight_decay": 0, "train.clip_grad": 0, "train.updates_per_step": 1, "train.epochs_per_step": 1, "train.save_every": 0,
    "algo.clip_low": 0, "algo.clip_high": 0, "algo.kl_coef": 0, "parallel.tp": 1, "parallel.pp": 1, "parallel.vpp": 1,
    "reward.workers": 1, "reward.timeout_s": 0, "seed": 0,
}  # fmt: skip


def load_config(path: str, overrides: list[str]) -> Config:
    """The defaults, overlaid with the YAML file `path`, overlaid with `section.key=value` overrides. Raises UserError."""
    schema = omegaconf.OmegaConf.structured(Config)
    try:
        layers = [omegaconf.OmegaConf.load(path), *(omegaconf.OmegaConf.from_dotlist([o]) for o in overrides)]
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except Exception as error:  # PyYAML's and OmegaConf's own errors share no base class
        raise UserError(f"cannot read the configuration: {error}") from None
    for override in overrides:
        if "=" not in override:
            raise UserError(f"override {override!r} is not of the form section.key=value")
    for layer in layers:
        try:
            schema = omegaconf.OmegaConf.merge(schema, layer)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise UserError(explain_config_error(error, schema)) from None
    missing = sorted(omegaconf.OmegaConf.missing_keys(schema))
    if missing:
        raise UserError(f"{', '.join(missing)}: not set; give it in {path} or as {missing[0]}=...")
    return omegaconf.OmegaConf.to_object(schema)


def explain_config_error(error: omegaconf.errors.OmegaConfBaseException, schema) -> str:
    """One line: the key, what is wrong with it, and for an unknown key the nearest legal one."""
    key = error.full_key or str(error.key)
    if isinstance(error, omegaconf.errors.ConfigKeyError):
        legal = config_keys(schema)
        near = difflib.get_close_matches(key, legal, n=1, cutoff=0.0)[0]
        return f"unknown key {key!r}; the nearest legal key is {near!r}"
    return f"{key}: {str(error).splitlines()[0]}"


def config_keys(schema, prefix: str = "") -> list[str]:
    """Dotted names of every key, sections included."""
    found = []
    for key in schema:
        found.append(prefix + str(key))
        node = omegaconf.OmegaConf.get_type(schema, key)
        if dataclasses.is_dataclass(node):
            found += config_keys(schema[key], f"{prefix}{key}.")
    return found


def get(cfg: Config, key: str) -> Any:
    """Value at a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def check_config(cfg: Config, world_size: int) -> None:
    """Everything that can be known wrong before a process group, a model or an engine exists. Raises UserError."""
    for key, legal in CHOICES.items():
        if get(cfg, key) not in legal:
            raise UserError(f"{key}={get(cfg, key)!r}: legal here is {' | '.join(map(str, legal))}")
    for key, least in AT_LEAST.items():
        if not get(cfg, key) >= least:
            raise UserError(f"{key}={get(cfg, key)}: must be at least {least}")
    rollout, train, parallel, data = cfg.rollout, cfg.train, cfg.parallel, cfg.data
    if not rollout.temperature > 0:
        raise UserError(f"rollout.temperature={rollout.temperature}: must be above 0; a greedy group has no variance to learn from")
    if (rollout.top_p != 1 or rollout.top_k != -1) and not rollout.max_logp_gap:
        raise UserError(
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: vLLM's log-probs are then those of the cut "
            "distribution, the trainer's of the full one. Use 1 and -1, or set rollout.max_logp_gap=inf to train all the same"
        )
    replica = parallel.tp * parallel.pp
    if world_size % replica:
        raise UserError(
            f"parallel.tp={parallel.tp} × parallel.pp={parallel.pp} = {replica} does not divide the world size {world_size}; "
            f"start a multiple of {replica} processes or make the layout smaller"
        )
    if world_size % rollout.tp:
        raise UserError(f"rollout.tp={rollout.tp} does not divide the world size {world_size}")
    if parallel.vpp > 1 and parallel.pp == 1:
        raise UserError(f"parallel.vpp={parallel.vpp} needs parallel.pp > 1")
    if rollout.prompts_per_step % train.updates_per_step:
        raise UserError(
            f"train.updates_per_step={train.updates_per_step} must divide rollout.prompts_per_step={rollout.prompts_per_step}: "
            "an update takes whole groups"
        )
    longest = data.max_prompt_tokens + rollout.max_new_tokens
    for key in ("max_tokens_per_micro_batch", "logprob_max_tokens_per_micro_batch"):
        if getattr(train, key) // parallel.tp * parallel.tp < longest:
            raise UserError(
                f"train.{key}={getattr(train, key)} cannot hold one sample of data.max_prompt_tokens + rollout.max_new_tokens "
                f"= {data.max_prompt_tokens} + {rollout.max_new_tokens} = {longest} tokens; at least {longest + parallel.tp} is safe"
            )
    for key, name in {"reward.default": cfg.reward.default, **{f"reward.by_source.{s}": n for s, n in cfg.reward.by_source.items()}}.items():
        try:
            rewards.load_reward(name, cfg.reward.custom)
        except ValueError as error:
            raise UserError(f"{key}={name}: {error}") from None


FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


def check_model(cfg: Config):
    """Read the model's Hugging Face config (no weights) and see that the layout divides it. Returns it. Raises UserError."""
    import transformers

    try:
        hf = transformers.AutoConfig.from_pretrained(cfg.model.path)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={cfg.model.path}: {str(error).splitlines()[0]}") from None
    family = (hf.architectures or ["?"])[0]
    if family not in FAMILIES:
        raise UserError(f"model.path={cfg.model.path} is a {family}; supported are {', '.join(FAMILIES)}")
    for attribute in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(hf, attribute, False):
            raise UserError(f"model.path={cfg.model.path}: {attribute}=true in its config.json is not supported")
    if hf.hidden_act != "silu":
        raise UserError(f"model.path={cfg.model.path}: hidden_act={hf.hidden_act!r} is not supported, only 'silu'")
    tp, pp, vpp = cfg.parallel.tp, cfg.parallel.pp, cfg.parallel.vpp
    parts = {
        "attention heads": hf.num_attention_heads, "key-value heads": hf.num_key_value_heads,
        "feed-forward size": hf.intermediate_size, "vocabulary size": hf.vocab_size,
    }  # fmt: skip
    for what, size in parts.items():
        for key, by in (("parallel.tp", tp), ("rollout.tp", cfg.rollout.tp)):
            legal = [n for n in range(1, size + 1) if all(s % n == 0 for s in parts.values())]
            if size % by and not (key == "rollout.tp" and what in ("key-value heads", "vocabulary size")):  # vLLM pads these
                raise UserError(f"{key}={by} does not divide the model's {what} {size}; legal are {legal}")
    if hf.num_hidden_layers % (pp * vpp):
        legal = [n for n in range(1, hf.num_hidden_layers + 1) if hf.num_hidden_layers % (n * vpp) == 0]
        raise UserError(
            f"parallel.pp={pp} × parallel.vpp={vpp} does not divide the model's {hf.num_hidden_layers} layers; "
            f"legal for parallel.pp are {legal}"
        )
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if longest > hf.max_position_embeddings:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} is beyond the model's {hf.max_position_embeddings} positions"
        )
    return hf


def describe(cfg: Config, world_size: int) -> str:
    """The layout and the arithmetic of a step, in words."""
    r, t, p = cfg.rollout, cfg.train, cfg.parallel
    samples = r.prompts_per_step * r.group_size
    updates = t.updates_per_step * t.epochs_per_step
    dp = world_size // (p.tp * p.pp)
    layout = f"{world_size} rank{'s' * (world_size > 1)} = tp {p.tp} × pp {p.pp}{f' (vpp {p.vpp})' * (p.vpp > 1)} × dp {dp}"
    kl = f" + {cfg.algo.kl_coef} {cfg.algo.kl}" if cfg.algo.kl_coef else ""
    return "\n".join([
        f"layout:  {layout}; rollout: {world_size // r.tp} vLLM engine{'s' * (world_size > r.tp)} of tp {r.tp}",
        f"a step:  {r.prompts_per_step} prompts × {r.group_size} = {samples} samples"
        f"{f' × {t.epochs_per_step} epochs' * (t.epochs_per_step > 1)} → {updates} update{'s' * (updates > 1)} of "
        f"{samples // t.updates_per_step} samples → micro-batches of ≤ {t.max_tokens_per_micro_batch} tokens over {dp} replica{'s' * (dp > 1)}",
        f"a run:   {t.steps} steps = {t.steps * samples} samples, {t.steps * updates} updates; lr {t.lr:g} after {t.warmup_steps} warm-up steps",
        f"loss:    {cfg.algo.loss} ({cfg.algo.clip_low:g}, {cfg.algo.clip_high:g}), {cfg.algo.advantage} advantages (ddof 1, eps 1e-6)"
        f"{kl}, {cfg.algo.loss_norm} over the update's response tokens",
    ])  # fmt: skip


# ---------------------------------------------------------------- 2. algorithm: pure functions, no Megatron


def group_advantages(rewards_N: np.ndarray, groups_N: np.ndarray, kind: str) -> np.ndarray:
    """Advantage of each answer against its own group.

    rewards_N [N] float, groups_N [N] int → [N] float64.
    grpo: (r - mean) / (std + 1e-6), std with ddof 1; exactly 0 for a group of one or of equal rewards. Source: DeepSeekMath,
    arXiv 2402.03300, eq. for outcome supervision; ddof and eps as in verl's compute_grpo_outcome_advantage.
    """
    rewards_N = np.asarray(rewards_N, dtype=np.float64)
    _, index_N, size_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    mean_G = np.bincount(index_N, rewards_N) / size_G
    centred_N = rewards_N - mean_G[index_N]
    std_G = np.sqrt(np.bincount(index_N, centred_N**2) / np.maximum(size_G - 1, 1))
    # A group of equal rewards: its mean may be off by rounding, so equality is tested on the rewards themselves.
    low_G, high_G = np.full(len(size_G), np.inf), np.full(len(size_G), -np.inf)
    np.minimum.at(low_G, index_N, rewards_N)
    np.maximum.at(high_G, index_N, rewards_N)
    varied_N = (low_G < high_G)[index_N]
    if kind == "grpo":
        return np.where(varied_N, centred_N / (std_G[index_N] + 1e-6), 0.0)
    raise ValueError(f"algo.advantage={kind}")


def token_kl(logp_T: torch.Tensor, ref_logp_T: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token, from the sampled token alone; [T], [T] → [T].

    With d = ref - logp:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1 with d clamped to ±20 and the result to ±10.
    Source: Schulman, "Approximating KL divergence" (2020); the clamps as in verl's low_var_kl.
    """
    d_T = ref_logp_T - logp_T
    if kind == "k1":
        return -d_T
    if kind == "k2":
        return d_T**2 / 2
    if kind == "k3":
        d_T = d_T.clamp(-20, 20)
        return (d_T.exp() - d_T - 1).clamp(-10, 10)
    raise ValueError(f"algo.kl={kind}")


def policy_loss(
    logp_T: torch.Tensor, old_logp_T: torch.Tensor, advantages_T: torch.Tensor, algo: AlgoConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy loss at each token, and 1.0 where the clip binds; [T] each → ([T], [T]).

    ppo_clip: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(logp - old_logp).
    Source: PPO, arXiv 1707.06347, eq. 7; two bounds as in DAPO, arXiv 2503.14476.
    """
    ratio_T = (logp_T - old_logp_T).exp()
    if algo.loss == "ppo_clip":
        free_T = ratio_T * advantages_T
        bound_T = ratio_T.clamp(1 - algo.clip_low, 1 + algo.clip_high) * advantages_T
        return -torch.minimum(free_T, bound_T), (bound_T < free_T).float()
    raise ValueError(f"algo.loss={algo.loss}")


def grpo_loss(mb: "MicroBatch", logp_T: torch.Tensor, entropy_T: torch.Tensor, algo: AlgoConfig):
    """(loss sum, integer denominator, report) of one micro-batch, as Megatron's schedule wants them.

    Megatron adds the loss gradients of all micro-batches and replicas and divides once by the sum of the denominators, so the
    loss is sum / count over the whole update whatever the split. No factor of micro-batches, dp or cp belongs here.
    The report holds sums over response tokens, but for "gap_max".
    """
    mask_T, advantages_T, rollout_logp_T = mb.mask[0], mb.advantages[0], mb.rollout_logp[0]
    # With one update a step the policy has not moved since it sampled: the ratio is 1 and its gradient that of logp.
    old_logp_T = logp_T.detach() if mb.old_logp is None else mb.old_logp[0]
    pg_T, clipped_T = policy_loss(logp_T, old_logp_T, advantages_T, algo)
    loss_T, kl_T = pg_T, torch.zeros_like(logp_T)
    if mb.ref_logp is not None:
        kl_T = token_kl(logp_T, mb.ref_logp[0], "k3")
        penalty_T = kl_T if algo.kl == "k3" else token_kl(logp_T, mb.ref_logp[0], algo.kl)
        loss_T = loss_T + algo.kl_coef * penalty_T
    if algo.entropy_coef:
        loss_T = loss_T - algo.entropy_coef * entropy_T
    loss, denominator = (loss_T * mask_T).sum(), mask_T.sum().int()
    gap_T = (old_logp_T - rollout_logp_T).abs() * mask_T
    sums = {
        "loss": loss, "policy": (pg_T * mask_T).sum(), "kl": (kl_T * mask_T).sum(), "entropy": (entropy_T * mask_T).sum(),
        "clipped": (clipped_T * mask_T).sum(), "gap": gap_T.sum(), "tokens": denominator, "gap_max": gap_T.max(),
    }  # fmt: skip
    return loss, denominator, {name: value.detach().double() for name, value in sums.items()}


# ---------------------------------------------------------------- 3. data


@dataclass
class Prompt:
    """One row of the data: its token ids, its source, and the row itself for the reward."""

    ids: list[int]
    answer: str
    source: str
    row: dict


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
    advantages: torch.Tensor
    rollout_logp: torch.Tensor
    old_logp: torch.Tensor | None  # None: one update a step
    ref_logp: torch.Tensor | None  # None: no reference model
    seq_id: torch.Tensor  # sample's number in the step; -1 for padding
    index_T: torch.Tensor  # [tokens that are not padding], position of each in the step's flat rows
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_seqlen: int


def load_prompts(cfg: DataConfig, tokenizer) -> tuple[list[Prompt], int]:
    """Read and tokenise the training data; returns the prompts and how many were dropped as too long. Raises UserError."""
    table = load_table(cfg.train, cfg.split)
    for key in ("prompt_key", "answer_key"):
        if getattr(cfg, key) not in table.column_names:
            raise UserError(
                f"data.{key}={getattr(cfg, key)!r}: no such column in {cfg.train}; its columns are {', '.join(table.column_names)}"
            )
    if not len(table):
        raise UserError(f"data.train={cfg.train} has no rows")
    texts = table[cfg.prompt_key]
    if cfg.chat_template:
        messages = [text if isinstance(text, list) else [{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    else:
        encoded = tokenizer(list(texts))
    prompts = [
        Prompt(ids, str(row[cfg.answer_key]), str(row.get(cfg.source_key, "default")), row)
        for ids, row in zip(encoded["input_ids"], table, strict=True)
        if 0 < len(ids) <= cfg.max_prompt_tokens
    ]
    if not prompts:
        raise UserError(
            f"data.max_prompt_tokens={cfg.max_prompt_tokens}: all {len(table)} prompts of {cfg.train} are longer (or empty); "
            f"the shortest has {min(map(len, encoded['input_ids']))} tokens"
        )
    return prompts, len(table) - len(prompts)


def load_table(train: Any, split: str):
    """A `datasets.Dataset` from local files or, for a name that is no path, from the hub. Raises UserError."""
    import datasets
    import glob

    datasets.disable_progress_bars()
    names = [str(name) for name in (train if isinstance(train, (list, tuple)) else [train])]
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
    if all(Path(name).suffix in kinds for name in names):
        files = [file for name in names for file in (sorted(glob.glob(name)) or [name])]
        absent = [file for file in files if not Path(file).is_file()]
        if absent:
            raise UserError(f"data.train: no such file {absent[0]}")
        if not any(Path(file).stat().st_size for file in files):
            raise UserError(f"data.train={train} is empty")
        suffixes = {Path(file).suffix for file in files}
        if len({kinds[suffix] for suffix in suffixes}) > 1:
            raise UserError(f"data.train mixes file types {', '.join(sorted(suffixes))}; give files of one type")
        source, options = kinds[suffixes.pop()], {"data_files": files, "split": "train"}
    elif len(names) == 1 and not Path(names[0]).exists():
        source, options = names[0], {"split": split}
    else:
        raise UserError(f"data.train={train}: legal are files ending in {', '.join(kinds)}, or one hub name")
    try:
        return datasets.load_dataset(source, **options)
    except Exception as error:  # datasets raises many kinds: bad JSON, bad schema, unreachable hub
        cause = error.__cause__ or error
        raise UserError(f"data.train={train}: {type(cause).__name__}: {str(cause).strip().splitlines()[0]}") from None


def prompt_batch(prompts: list[Prompt], step: int, size: int, seed: int) -> list[Prompt]:
    """The `size` prompts of `step` (from 1), from an endless stream that is shuffled anew each epoch.

    A pure function of its arguments: the last partial batch of an epoch is filled from the next, and a resumed run needs no state.
    """
    batch, orders = [], {}
    for i in range((step - 1) * size, step * size):
        epoch, place = divmod(i, len(prompts))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        batch.append(prompts[orders[epoch][place]])
    return batch


def sampling_seed(seed: int, step: int, group: int) -> int:
    """Seed of a group's answers in vLLM. It depends on nothing else, so neither do the answers (engines, order, layout)."""
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
        "advantages": np.repeat(np.array([s.advantage for s in samples], np.float32), lengths_N),
    }  # fmt: skip
    return {name: torch.from_numpy(values) for name, values in rows.items()}, lengths_N


def plan_bins(lengths_N: np.ndarray, max_tokens: int, replicas: int) -> list[list[int]]:
    """Spread samples over bins of at most `max_tokens`: longest first, each into the emptiest bin.

    Returns a multiple of `replicas` bins of sample numbers; replica r takes bins[r::replicas], so all have the same number and
    nearly the same load. A pure function: every rank computes the same plan. Raises ValueError for a sample beyond `max_tokens`.
    """
    if lengths_N.max(initial=0) > max_tokens:
        raise ValueError(f"a sample of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}")
    count = replicas * max(1, math.ceil(lengths_N.sum() / (max_tokens * replicas)))
    while True:
        bins, load_B = [[] for _ in range(count)], np.zeros(count, np.int64)
        for n in np.argsort(-lengths_N, kind="stable"):
            emptiest = load_B.argmin()
            bins[emptiest].append(int(n))
            load_B[emptiest] += lengths_N[n]
        if load_B.max() <= max_tokens:
            return bins
        count += replicas


def pack(rows: dict[str, torch.Tensor], lengths_N: np.ndarray, samples: list[int], multiple: int, device) -> MicroBatch:
    """Pack the numbered samples into one row, padded to a `multiple` (tensor parallel size) with a masked sequence of its own.

    `rows` may hold "old_logp" and "ref_logp" beside the fields of `flat_rows`. An empty list gives a row of padding only.
    """
    starts_N = np.cumsum(lengths_N) - lengths_N
    lengths_S = lengths_N[samples] if samples else np.zeros(0, np.int64)
    total = int(lengths_S.sum())
    shift_S = starts_N[samples] - (np.cumsum(lengths_S) - lengths_S) if samples else lengths_S
    index_T = torch.from_numpy(np.arange(total) + np.repeat(shift_S, lengths_S))
    padding = -total % multiple if total else multiple
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths_S), [total + padding] if padding else []]).astype(np.int32)

    def row(name: str, fill: int = 0) -> torch.Tensor | None:
        if name not in rows:
            return None
        return torch.nn.functional.pad(rows[name][index_T], (0, padding), value=fill)[None].to(device)  # [1, T]

    positions = torch.cat([rows["position_ids"][index_T], torch.arange(padding)])[None].to(device)  # [1, T]
    fields = ("tokens", "targets", "mask", "advantages", "rollout_logp", "old_logp", "ref_logp")
    return MicroBatch(
        position_ids=positions, seq_id=row("seq_id", -1), index_T=index_T, cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        max_seqlen=int(np.diff(cu_seqlens).max()), **{name: row(name) for name in fields},
    )  # fmt: skip


# ---------------------------------------------------------------- 4. training on Megatron


def to_micro_batches(rows: dict, lengths_N: np.ndarray, samples: list[int], max_tokens: int, cfg: Config) -> list[MicroBatch]:
    """This replica's micro-batches of the numbered samples, each of at most `max_tokens` tokens."""
    rank, replicas = bridge.data_parallel()
    multiple = cfg.parallel.tp
    bins = plan_bins(lengths_N[samples], max_tokens // multiple * multiple, replicas)
    return [
        pack(rows, lengths_N, [samples[i] for i in members], multiple, bridge.device()) for members in bins[rank::replicas]
    ]


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
    names = ("loss", "policy", "kl", "entropy", "clipped", "gap", "tokens")
    counted = reports if bridge.reports_loss() else []
    zeros = torch.zeros(len(names) + 1, dtype=torch.float64, device=bridge.device())
    stacked = torch.stack([zeros, *(torch.stack([r[n] for n in (*names, "gap_max")]) for r in counted)])
    sums, gap_max = stacked[:, :-1].sum(0), stacked[:, -1].max()
    dist.all_reduce(sums)
    dist.all_reduce(gap_max, dist.ReduceOp.MAX)
    return {**dict(zip(names, sums.tolist(), strict=True)), "gap_max": gap_max.item()}


def update(model, optimizer, rows, lengths_N, samples: list[int], lr: float, check, cfg: Config) -> dict[str, float]:
    """One optimizer step on the numbered samples; returns the report with "grad_norm". `check(report)` may stop it before the step."""
    micro_batches = to_micro_batches(rows, lengths_N, samples, cfg.train.max_tokens_per_micro_batch, cfg)
    optimizer.zero_grad()
    reports = bridge.forward_backward(model, micro_batches, partial(grpo_loss, algo=cfg.algo), cfg.rollout.temperature)
    report = reduce_reports(reports)
    check(report)
    bridge.set_learning_rate(optimizer, lr)
    _, grad_norm, _ = optimizer.step()
    if not math.isfinite(grad_norm):
        raise TrainingError(f"the gradient norm is {grad_norm}")
    fill = sum(len(mb.index_T) for mb in micro_batches) / (len(micro_batches) * cfg.train.max_tokens_per_micro_batch)
    return {**report, "grad_norm": float(grad_norm), "fill": fill}


# ---------------------------------------------------------------- 5. phases of a step


def sample_groups(engine: Engine, batch: list[Prompt], step: int, tokenizer, cfg: Config) -> list[Sample]:
    """The answers to this engine's share of the prompts; on the engine's first rank only, elsewhere nothing."""
    r = cfg.rollout
    engines = dist.get_world_size() // r.tp
    share = list(enumerate(batch))[dist.get_rank() // r.tp :: engines]
    completions = engine.generate(
        [prompt.ids for _, prompt in share], [sampling_seed(cfg.seed, step, group) for group, _ in share], r.group_size,
        temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, max_tokens=r.max_new_tokens,
    )  # fmt: skip
    if dist.get_rank() % r.tp:
        return []
    texts = iter(tokenizer.batch_decode([c.ids for group in completions for c in group], skip_special_tokens=True))
    return [
        Sample(group, prompt.ids, c.ids, c.logps, c.finished, next(texts), prompt.source)
        for (group, prompt), answers in zip(share, completions, strict=True)
        for c in answers
    ]


def grade(graders: rewards.Grader, samples: list[Sample], batch: list[Prompt]) -> tuple[list[Sample], Counter, str]:
    """The samples with their rewards, how many timed out by source, and what to tell the user if a reward failed ("" if none)."""
    grades = graders.grade([(s.source, s.text, batch[s.group].answer, batch[s.group].row) for s in samples])
    for sample, graded in zip(samples, grades, strict=True):
        if graded.status == "error":
            row = json.dumps(batch[sample.group].row, default=str)
            return samples, Counter(), (
                f"the reward of source {sample.source!r} failed: {graded.error}\n  row: {row}\n  response: {sample.text!r}\n"
                "  mend the function or the row; reward.by_source chooses another reward for a source"
            )  # fmt: skip
    graded = [
        dataclasses.replace(s, reward=sum(g.parts.values()), reward_parts=g.parts)
        for s, g in zip(samples, grades, strict=True)
    ]
    return graded, Counter(s.source for s, g in zip(samples, grades, strict=True) if g.status == "timeout"), ""


def gather(samples: list[Sample], timeouts: Counter, problem: str, busy: dict) -> tuple[list[Sample], Counter, list[dict]]:
    """All ranks' samples in the order of their groups, the timeouts, and how long each rank was busy; the same on every rank.

    Raises UserError on every rank if a reward failed on one.
    """
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (samples, timeouts, problem, busy))
    problems = [p for _, _, p, _ in everywhere if p]
    if problems:
        raise UserError(problems[0])
    merged = sorted((s for part, *_ in everywhere for s in part), key=lambda s: s.group)
    return merged, sum((t for _, t, _, _ in everywhere), Counter()), [b for *_, b in everywhere]


class TrainingError(Exception):
    """The run cannot go on with right results. The message is all a user needs; exit code 1."""


def check_gap(report: dict[str, float], model, rows, lengths_N, samples: list[Sample], step: int, cfg: Config) -> None:
    """Stop before the weights change if trainer and engine disagree: a gate at the first step, a check of the last push after it."""
    fp32 = cfg.model.dtype == "fp32"
    bound = cfg.rollout.max_logp_gap or (1e-3 if fp32 else 0.05)
    gap = report["gap_max"] if fp32 else report["gap"] / max(report["tokens"], 1)
    if not math.isfinite(report["loss"]):
        raise TrainingError(f"the loss of step {step} is {report['loss']}")
    if gap <= bound:
        return
    logp_F = score(model, rows, lengths_N, cfg)
    raise TrainingError(
        f"step {step}: trainer and vLLM disagree on sampled tokens: {'largest' if fp32 else 'mean'} |Δ log-prob| = {gap:.2e}, "
        f"bound {bound:.0e} (rollout.max_logp_gap)\n" + explain_gap(logp_F, rows, samples, step, bound)
    )


def explain_gap(logp_F: torch.Tensor, rows: dict, samples: list[Sample], step: int, bound: float) -> str:
    """A table of the largest differences, their shape, and the likely cause."""
    response_F = rows["mask"] > 0
    gap_F = ((logp_F - rows["rollout_logp"]).abs() * response_F).float()
    over = (gap_F[response_F] > bound).float().mean().item()
    seen = torch.zeros(len(samples)).index_reduce_(0, rows["seq_id"], gap_F, "amax", include_self=True)
    early_F = response_F & (torch.tensor([len(s.prompt_ids) for s in samples])[rows["seq_id"]] + 3 > rows["position_ids"])
    early, late = gap_F[early_F].mean().item(), gap_F[response_F & ~early_F].nan_to_num().mean().item()
    table = ["  sample  group  position   token   trainer    vLLM     |Δ|"]
    for i in gap_F.topk(min(10, len(gap_F))).indices.tolist():
        n = int(rows["seq_id"][i])
        place = int(rows["position_ids"][i]) + 1 - len(samples[n].prompt_ids)
        table.append(
            f"  {n:6d} {samples[n].group:6d} {place:9d} {int(rows['targets'][i]):7d} {logp_F[i]:9.4f} {rows['rollout_logp'][i]:8.4f} {gap_F[i]:8.2e}"
        )
    if step > 1:
        cause = "the engine did not take up the last weight push (stale or partly loaded weights); it agreed at step 1"
    elif late > 10 * early:
        cause = "the gap grows with the position: rotary embedding or context length differ (rope settings, max_model_len)"
    elif over < 0.05:
        cause = "few tokens differ: numerical noise of the precision; compare with model.dtype=fp32, or raise the bound"
    else:
        cause = "most tokens differ: other weights or another distribution (temperature, top_p, rollout.vllm overrides, weight mapping)"
    summary = (
        f"  {over:.1%} of {int(response_F.sum())} tokens in {int((seen > bound).sum())} of {len(samples)} samples are beyond the bound; "
        f"mean |Δ| {early:.1e} in the first three response tokens, {late:.1e} later"
    )
    return "\n".join([*table, summary, f"  likely cause: {cause}"])


def push_weights(model: list, engine, cfg: Config) -> None:
    """Trainer to vLLM; the KV cache takes its memory back only after the push."""
    engine.wake("weights")
    engine.load_weights(bridge.hf_weights(model, cfg.rollout.sync_bucket_mb << 20))
    engine.wake("kv_cache")


# ---------------------------------------------------------------- 6. logging


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str):
    """Add the seconds of the block to seconds[phase]."""
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()  # does nothing on the CPU
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def peak_memory_gb() -> float:
    """Largest amount this rank has held: GPU memory of the trainer, or the process's resident memory on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def summarize(step, samples, timeouts, reports, lr, seconds, busy, cfg: Config) -> dict[str, float | int | None]:
    """The metrics of a step; names as in docs/metrics.md, always all of them."""
    reward_N = np.array([s.reward for s in samples])
    groups = reward_N.reshape(-1, cfg.rollout.group_size)  # samples are in the order of their groups
    length_N = np.array([len(s.response_ids) for s in samples])
    sources = sorted({s.source for s in samples})
    first, tokens = reports[0], sum(r["tokens"] for r in reports)
    gap_tokens = reports[: cfg.train.updates_per_step]  # one epoch sees each token once
    wall = seconds["step"]
    # A rank idles between the end of its own rollout and grading and that of the slowest rank.
    work = np.array([b.get("rollout", 0.0) + b.get("reward", 0.0) for b in busy])
    return {
        "step": step,
        "reward/mean": reward_N.mean(),
        "reward/std": reward_N.std(),
        **{f"reward/{name}/mean": np.mean([s.reward for s in samples if s.source == name]) for name in sources},
        **{f"reward/{name}/timeout_frac": timeouts[name] / sum(s.source == name for s in samples) for name in sources},
        "groups/zero_std_frac": np.mean(groups.max(1) == groups.min(1)),
        "loss/total": first["loss"] / first["tokens"],
        "loss/policy": first["policy"] / first["tokens"],
        "kl/ref": first["kl"] / first["tokens"] if cfg.algo.kl_coef else None,
        "entropy": first["entropy"] / first["tokens"],
        "ratio/clip_frac": sum(r["clipped"] for r in reports) / tokens,
        "logp_gap/mean": sum(r["gap"] for r in gap_tokens) / sum(r["tokens"] for r in gap_tokens),
        "logp_gap/max": max(r["gap_max"] for r in gap_tokens),
        "grad_norm": first["grad_norm"],
        "lr": lr,
        "tokens/prompt_mean": np.mean([len(s.prompt_ids) for s in samples]),
        "tokens/response_mean": length_N.mean(),
        "tokens/response_max": length_N.max(),
        "tokens/truncated_frac": np.mean([not s.finished for s in samples]),
        **{f"time/{phase}": seconds.get(phase, 0.0) for phase in ("rollout", "reward", "logprob", "train", "sync", "save", "step")},
        "speed/response_tokens_per_s": length_N.sum() / wall,
        "speed/samples_per_s": len(samples) / wall,
        "pack/fill": np.mean([r["fill"] for r in reports]),
        "idle_frac": (work.max() - work.mean()) / wall,
        "mem/peak_gb": max(b["memory_gb"] for b in busy),
        "update/skipped": 0,
    }


def step_line(m: dict, steps: int) -> str:
    """One line of the log, with a bar of the progress."""
    done = round(20 * m["step"] / steps)
    kl = "" if m["kl/ref"] is None else f"  kl {m['kl/ref']:.4f}"
    return (
        f"[{'█' * done}{'·' * (20 - done)}] {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  grad {m['grad_norm']:.3f}{kl}  entropy {m['entropy']:.2f}  length {m['tokens/response_mean']:.1f}"
        f"  gap {m['logp_gap/max']:.0e}  {m['time/step']:.2f} s"
    )


def dump_rollouts(path: Path, samples: list[Sample]) -> None:
    """Every sample of the step, a JSON object a line."""
    path.write_text("".join(json.dumps(vars(sample), ensure_ascii=False) + "\n" for sample in samples))


def new_output_dir(path: Path, cfg: Config) -> None:
    """An output folder for this run alone; that of an earlier run is moved aside, never mixed or overwritten."""
    try:
        if (path / "metrics.jsonl").exists():
            aside = next(p for i in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{i}")).exists())
            path.rename(aside)
            print(f"moved the earlier run in {path} to {aside}")
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.structured(cfg)))
        (path / "metrics.jsonl").write_text("")
    except OSError as error:
        raise UserError(f"output_dir={path}: {error}") from None


# ---------------------------------------------------------------- 7. the loop


def train(cfg: Config, tokenizer, prompts: list[Prompt]) -> None:
    """The whole run, on every rank of torchrun's world."""
    r, t, out, rank = cfg.rollout, cfg.train, Path(cfg.output_dir), dist.get_rank()
    if rank == 0:
        new_output_dir(out, cfg)
    # vLLM measures free memory when it starts, so it comes first and sleeps while the model is built.
    max_model_len = cfg.data.max_prompt_tokens + r.max_new_tokens
    engine = Engine(cfg.model.path, cfg.model.dtype, r.tp, max_model_len, r.gpu_memory_utilization, r.vllm)
    engine.sleep()
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    model = bridge.build_model(cfg.model.path, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    optimizer = bridge.build_optimizer(model, t.lr, t.weight_decay, (t.adam_beta1, t.adam_beta2), t.clip_grad, cfg.megatron)
    reference = bridge.copy_weights(model) if cfg.algo.kl_coef > 0 else None
    graders = rewards.Grader(cfg.reward.default, cfg.reward.by_source, cfg.reward.custom, cfg.reward.timeout_s, cfg.reward.workers)
    push_weights(model, engine, cfg)

    history = []
    for step in range(1, t.steps + 1):
        seconds: dict[str, float] = {}
        with timed(seconds, "step"):
            batch = prompt_batch(prompts, step, r.prompts_per_step, cfg.seed)
            with timed(seconds, "rollout"):
                samples = sample_groups(engine, batch, step, tokenizer, cfg)
            with timed(seconds, "reward"):
                samples, timeouts, problem = grade(graders, samples, batch)
            samples, timeouts, busy = gather(samples, timeouts, problem, {**seconds, "memory_gb": peak_memory_gb()})

            advantages_N = group_advantages([s.reward for s in samples], [s.group for s in samples], cfg.algo.advantage)
            samples = [dataclasses.replace(s, advantage=float(a)) for s, a in zip(samples, advantages_N, strict=True)]
            rows, lengths_N = flat_rows(samples)
            engine.sleep()

            with timed(seconds, "logprob"):
                if t.updates_per_step * t.epochs_per_step > 1:
                    rows["old_logp"] = score(model, rows, lengths_N, cfg)
                if reference is not None:
                    with bridge.swapped_weights(model, reference):
                        rows["ref_logp"] = score(model, rows, lengths_N, cfg)

            with timed(seconds, "train"):
                lr = t.lr * min(1.0, step / max(t.warmup_steps, 1))
                check = partial(check_gap, model=model, rows=rows, lengths_N=lengths_N, samples=samples, step=step, cfg=cfg)
                chunk = len(samples) // t.updates_per_step  # whole groups, in the shuffled order of the prompts
                reports = [
                    update(model, optimizer, rows, lengths_N, list(range(i * chunk, (i + 1) * chunk)), lr, check, cfg)
                    for _ in range(t.epochs_per_step)
                    for i in range(t.updates_per_step)
                ]

            with timed(seconds, "sync"):
                push_weights(model, engine, cfg)
            if step == t.steps or (t.save_every and step % t.save_every == 0):
                with timed(seconds, "save"):
                    bridge.export_hf(model, cfg.model.path, out / "hf" / f"step_{step:06d}")

        metrics = summarize(step, samples, timeouts, reports, lr, seconds, busy, cfg)
        history.append(metrics["reward/mean"])
        if rank == 0:
            dump_rollouts(out / "rollouts" / f"step_{step:06d}.jsonl", samples)
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics, default=float) + "\n")
            print(step_line(metrics, t.steps), flush=True)

    graders.close()
    if rank == 0:
        last = history[-10:]
        print(f"\nreward: {history[0]:.3f} at the first step, {np.mean(last):.3f} over the last {len(last)} steps")
        print(f"outputs: {out}/metrics.jsonl, {out}/rollouts/, {out}/hf/step_{t.steps:06d}/ (loads in transformers and vLLM)")


def prepare(args: argparse.Namespace) -> tuple[Config, Any, list[Prompt]]:
    """Check all that can be checked without a process group; returns the configuration, tokenizer and prompts. Raises UserError."""
    import transformers

    cfg = load_config(args.config, args.overrides)
    check_config(cfg, args.world_size)
    check_model(cfg)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model.path)
    prompts, dropped = load_prompts(cfg.data, tokenizer)
    if is_first_rank():
        print(describe(cfg, args.world_size))
        note = f"; {dropped} dropped, longer than {cfg.data.max_prompt_tokens} tokens" if dropped else ""
        print(f"data:    {len(prompts)} prompts{note}", flush=True)
    if not args.dry_run:
        if "RANK" not in os.environ:
            raise UserError("start with torchrun --nproc_per_node=N train_grpo.py ..., or add --dry-run to check only")
        local, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if torch.cuda.is_available() and local > gpus:
            raise UserError(f"--nproc_per_node={local}, but this machine has {gpus} GPU{'s' * (gpus > 1)}: one process a GPU")
    return cfg, tokenizer, prompts


def is_first_rank() -> bool:
    """Whether this process speaks for the run, known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def parse_args(argv: list[str]) -> argparse.Namespace:
    """--config, --dry-run, --world-size, and the overrides. Raises UserError for an unknown option."""
    parser = argparse.ArgumentParser(prog="train_grpo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, model and data, print the plan; needs no GPU")
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="ranks that a dry run plans for")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    """The exit code: 0 done, 2 a mistake the user can mend, 1 a failure during training."""
    args = parse_args(argv)
    try:
        cfg, tokenizer, prompts = prepare(args)
        if not args.dry_run:
            bridge.init_distributed()
            train(cfg, tokenizer, prompts)
            dist.destroy_process_group()
    except (UserError, TrainingError) as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
