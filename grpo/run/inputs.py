"""What a run starts from: its model and data, checked and read, and the checkpoint that it goes on from."""

import contextlib
import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from config import Config, UserError
from grpo.parts.base import hf_folder, ranks
from grpo.parts.base.files import open_output_dir
from grpo.parts.base.read_config import override
from grpo.parts.base.require import require
from grpo.parts.data.ends import Ends, endless, read_ends
from grpo.parts.data.prompts import Mixture, Prompt, check_opening, check_reading, load_prompts, load_tokenizer
from grpo.parts.data.tokens import check_ids
from grpo.parts.model import checkpoint, lora
from grpo.run.preflight import configuration, equal_bits, run_plan
from grpo.run.preflight.reward_trial import try_rewards
from grpo.step import teacher, turns


@dataclass(frozen=True)
class Inputs:
    """What a run starts from, on every rank."""

    tokenizer: Any
    prompts: Sequence[Prompt]  # each is made when it is read
    eval_prompts: Sequence[Prompt]
    vocab_size: int  # rows of the initial model's embedding
    checkpoint: Path | None = None  # to go on from
    done: int = 0  # steps of that checkpoint
    model_path: str = ""  # local folder of the initial model
    ends: Ends | None = None  # what ends an answer
    base: str | None = None  # digest of the initial model's weights, if a resume needs the same


def prepare(cfg, world_size: int, weights: bool) -> tuple[Config, Inputs]:
    """Check, read and print what a run starts from. Returns the configuration, with `train.steps`, and the inputs."""
    parts = ["train"]
    if cfg.data.eval is not None:
        parts.append("eval")
    cfg, inputs = read(cfg, parts, weights)
    cfg = with_steps(cfg, len(inputs.prompts))

    if ranks.is_first_rank():
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and cfg.resume != "auto":
            print(f"warning: --max-restarts={restarts}: each restart begins from resume={cfg.resume} again; use auto")
        print(run_plan.describe(cfg, world_size))
        for warning in run_plan.warnings(cfg, world_size):
            print(f"warning: {warning}")
        print_prompts(cfg, inputs)
    return override(cfg, {"train.epochs": None}), inputs


def read(cfg, parts: list[str], weights: bool) -> tuple[Config, Inputs]:
    """Check the models, with `weights` also their files, and read the data of `parts` (train, eval).

    Returns the configuration too, with `data.date` if the chat template reads a date. Raises UserError.
    """
    check_models(cfg)
    if weights and parts:
        cfg = equal_bits.resolve(cfg)
    try:
        return read_files(cfg, parts, weights)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None


def read_files(cfg, parts: list[str], weights: bool) -> tuple[Config, Inputs]:
    """What `read` does after its checks of config.json. Raises UserError, OSError, ValueError."""
    folder = cfg.model.path
    tokenizer = load_tokenizer(folder)
    if cfg.data.date is None and "strftime_now" in str(tokenizer.chat_template):
        cfg = override(cfg, {"data.date": first_day(cfg)})
    vocab_size = hf_folder.read_config(folder).vocab_size

    prompts = {"train": [], "eval": []}
    ends = None
    for part in parts:
        own = load_prompts(cfg.data, tokenizer, vocab_size, part)
        own_ends = read_ends(folder, tokenizer, cfg.rollout if part == "train" else cfg.eval)
        named = f"stop_token_ids, or eos_token_id of tokenizer, config.json or generation_config.json in {folder}"
        check_ids(named, own_ends.tokens, tokenizer, vocab_size)
        if part == parts[0]:
            check_reading(folder, tokenizer, own, cfg.data)
        check_opening(own[0], cfg.data, tokenizer)
        turns.check(cfg, tokenizer, vocab_size, own[0].row)
        prompts[part] = own
        ends = ends or own_ends

    other = teacher.another(cfg)
    if other and weights:
        configuration.check_weights(hf_folder.local_folder(other), key="algo.teacher")
    if other:
        teacher.check_tokens(cfg, tokenizer)
    if weights:
        folder = hf_folder.local_folder(folder)
        configuration.check_weights(folder)
    return cfg, Inputs(tokenizer, prompts["train"], prompts["eval"], vocab_size, model_path=folder, ends=ends)


def check_models(cfg):
    """Check, from config.json, that model and teacher can be built on this layout. Raises UserError."""
    try:
        configuration.check_model(cfg, cfg.model.path, cfg.rollout.tp)
        other = teacher.another(cfg)
        if other:
            configuration.check_model(cfg, other, rollout_tp=1, key="algo.teacher")
            teacher.check_vocabulary(cfg)
        teacher.check_top_k(cfg)
        configuration.check_routes(cfg)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None


def first_day(cfg) -> str:
    """The day on which the run began: the date in the checkpoint that it goes on from, else today."""
    found = []
    if cfg.resume == "auto":
        found = checkpoint.list_checkpoints(Path(cfg.output_dir, "checkpoints"))
    elif cfg.resume != "none":
        found = [Path(cfg.resume)]
    for folder in found:
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged: `find_checkpoint` will say so
            return checkpoint.read_state(folder)["config"]["data"]["date"]
    return str(datetime.date.today())


def with_steps(cfg, prompts: int) -> Config:
    """The configuration with `train.steps`, computed from `train.epochs` if it is set: passes over all prompts."""
    if cfg.train.epochs is None:
        return cfg
    steps = cfg.train.epochs * prompts / cfg.rollout.prompts_per_step
    return override(cfg, {"train.steps": math.ceil(round(steps, 6))})  # 1.1 · 100 is 110.00000000000001


def print_prompts(cfg, inputs):
    """Print the number of prompts to train and to evaluate, the share of each set of a mixture, and warnings."""
    for name, prompts in (("data:", inputs.prompts), ("eval:", inputs.eval_prompts)):
        if not prompts:  # not read
            continue
        line = f"{name:8s} {len(prompts)} prompts"
        if prompts.dropped:
            line += f"; {prompts.dropped} dropped, longer than {cfg.data.max_prompt_tokens} tokens"
        print(line, flush=True)
        if isinstance(prompts, Mixture):
            print(prompts.describe(cfg.train.steps * cfg.rollout.prompts_per_step), flush=True)
        for line in try_rewards(cfg, prompts):
            print(line, flush=True)

    if cfg.data.date is not None:
        print(f"date:    {cfg.data.date}, where the chat template writes today's (data.date)", flush=True)
    for warning in endless(inputs.ends, cfg.data):
        print(f"warning: {warning}", flush=True)


# ---------------------------------------------------------------- the checkpoint that a run goes on from


def find_resume(cfg, inputs) -> Inputs:
    """The inputs with the checkpoint of `resume`. Prepares output_dir, unless that checkpoint is of the last step.

    Raises UserError, CheckpointError.
    """
    out = Path(cfg.output_dir)
    done = 0
    found = checkpoint.find_checkpoint(cfg.resume, out / "checkpoints")
    if found:
        done = checkpoint.check_resumed(found, cfg.model_dump(), inputs.prompts.fingerprint)
    base = check_base(found, cfg, inputs.model_path)

    if done < cfg.train.steps:
        text = yaml.safe_dump(cfg.model_dump(), sort_keys=False, allow_unicode=True)
        ranks.on_first_rank(lambda: open_output_dir(out, text, cfg.resume, done))
    else:
        ranks.tell(f"nothing to do: {found} is after the last step, train.steps={done}")
    return replace(inputs, checkpoint=found, done=done, base=base)


def check_base(found: Path | None, cfg, folder: str) -> str | None:
    """The digest of the initial model in `folder`. None if the run has neither adapters nor a reference.

    Raises UserError if the checkpoint `found` has other adapters, or was trained on another initial model.
    """
    base = None
    if cfg.lora.rank or cfg.algo.kl_coef:
        base = hf_folder.digest_weights(folder)
    if found is None:
        return base

    state = checkpoint.read_state(found)
    was = state["config"]
    lora.check_resumed(was["lora"], cfg.lora, found)
    require(
        base is None or state.get("base") in (None, base),
        f"model.path={cfg.model.path}: not the weights that {found} was trained on, which its adapters (lora.rank) or "
        f"its reference (algo.kl_coef) need; use model.path={was['model']['path']} as it was, or start a new run from "
        "this model (resume=none)",
    )
    return base
