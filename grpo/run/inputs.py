"""What a run starts from: its model and data, checked and read, and the checkpoint that it goes on from."""

import contextlib
import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from config import Config, UserError
from grpo.parts.base import hf_folder, ranks
from grpo.parts.base.files import open_output_dir
from grpo.parts.base.read_config import override
from grpo.parts.base.require import require
from grpo.parts.data.ends import Ends, endless, read_ends
from grpo.parts.data.prompts import Mixture, Prompt, check_opening, load_prompts, load_tokenizer
from grpo.parts.data.tokens import check_ids
from grpo.parts.model import checkpoint, lora
from grpo.run.preflight import configuration, equal_bits, linear_attention, run_plan
from grpo.step import teacher, turns


@dataclass(frozen=True)
class Inputs:
    """What a run starts from, on every rank."""

    tokenizer: Any
    prompts: Sequence[Prompt]  # each is made when it is asked for
    eval_prompts: Sequence[Prompt]
    vocab_size: int  # rows of the initial model's embedding
    checkpoint: Path | None = None  # to go on from
    done: int = 0  # steps of that checkpoint
    model_path: str = ""  # local folder of the initial model
    ends: Ends | None = None  # what ends an answer
    base: str | None = None  # digest of the initial model's weights, where a resume needs the same


def prepare(cfg: Config, world_size: int, weights: bool) -> tuple[Config, Inputs]:
    """Check, read and print what a run starts from; returns the configuration, with `train.steps`, and the inputs."""
    cfg, inputs = read(cfg, ["train"] if cfg.data.eval is None else ["train", "eval"], weights)
    cfg = with_steps(cfg, len(inputs.prompts))
    if ranks.is_first_rank():
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and cfg.resume != "auto":
            print(f"warning: --max-restarts={restarts}: each restart begins from resume={cfg.resume} again; use auto")
        warnings = (f"warning: {warning}" for warning in run_plan.warnings(cfg, world_size))
        print(run_plan.describe(cfg, world_size), *warnings, sep="\n")
        print_prompts(cfg, inputs)
    return override(cfg, {"train.epochs": None}), inputs


def read(cfg: Config, parts: list[str], weights: bool) -> tuple[Config, Inputs]:
    """Check the models, their files of `weights` if asked, and read the data of `parts` (train, eval). UserError.

    Returns the configuration too, with `data.date` if the chat template asks for one.
    """
    check_models(cfg)
    if weights and parts:
        linear_attention.check_cpu(cfg)
        cfg = equal_bits.resolve(cfg)
    folder = cfg.model.path
    prompts, ends = {}, {}
    try:
        tokenizer = load_tokenizer(folder)
        if cfg.data.date is None and "strftime_now" in str(tokenizer.chat_template):
            cfg = override(cfg, {"data.date": first_day(cfg)})
        vocab_size = hf_folder.read_config(folder).vocab_size
        for part in parts:
            prompts[part] = load_prompts(cfg.data, tokenizer, vocab_size, part)
            ends[part] = read_ends(folder, tokenizer, cfg.rollout if part == "train" else cfg.eval)
            check_ids(
                f"eos_token_id of tokenizer, config.json or generation_config.json in {folder}",
                ends[part].tokens,
                tokenizer,
                vocab_size,
            )
            check_opening(prompts[part][0], cfg.data, tokenizer)
            turns.check(cfg, tokenizer, vocab_size, prompts[part][0].row)
        other = teacher.another(cfg)
        if other and weights:
            configuration.check_weights(hf_folder.local_folder(other), key="algo.teacher")
        if other:
            teacher.check_tokens(cfg, tokenizer)
        if weights:
            folder = hf_folder.local_folder(folder)
            configuration.check_weights(folder)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    read = prompts.get("train", []), prompts.get("eval", [])
    return cfg, Inputs(tokenizer, *read, vocab_size, model_path=folder, ends=next(iter(ends.values()), None))


def first_day(cfg: Config) -> str:
    """The day on which the run began: of the checkpoint that it goes on from, else today."""
    found = [Path(cfg.resume)] if cfg.resume not in ("none", "auto") else []
    if cfg.resume == "auto":
        found = checkpoint.list_checkpoints(Path(cfg.output_dir, "checkpoints"))
    for folder in found:
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged: `find_checkpoint` will say so
            return checkpoint.read_state(folder)["config"]["data"]["date"]
    return str(datetime.date.today())


def check_models(cfg: Config) -> None:
    """Check, from config.json, that model and teacher can be built on this layout. Raises UserError."""
    try:
        configuration.check_model(cfg, cfg.model.path, cfg.rollout.tp)
        other = teacher.another(cfg)
        if other:
            configuration.check_model(cfg, other, rollout_tp=1, key="algo.teacher")
            teacher.check_vocabulary(cfg)
        configuration.check_routes(cfg)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None


def with_steps(cfg: Config, prompts: int) -> Config:
    """The configuration with `train.steps`, where `train.epochs` is given: of so many passes over so many prompts."""
    if cfg.train.epochs is None:
        return cfg
    passes = Fraction(str(cfg.train.epochs))  # 1.1 epochs of 100 prompts are 110, not 110.00000000000001
    return override(cfg, {"train.steps": math.ceil(passes * prompts / cfg.rollout.prompts_per_step)})


def print_prompts(cfg: Config, inputs: Inputs) -> None:
    """Print how many prompts there are to train and to evaluate, of a mixture the share of each set, and warnings."""
    for name, prompts in (("data:", inputs.prompts), ("eval:", inputs.eval_prompts)):
        if not prompts:  # not read
            continue
        line = f"{name:8s} {len(prompts)} prompts"
        if prompts.dropped:
            line += f"; {prompts.dropped} dropped, longer than {cfg.data.max_prompt_tokens} tokens"
        print(line, flush=True)
        if isinstance(prompts, Mixture):
            print(prompts.describe(cfg.train.steps * cfg.rollout.prompts_per_step), flush=True)
    if cfg.data.date is not None:
        print(f"date:    {cfg.data.date}, where the chat template writes today's (data.date)", flush=True)
    for warning in endless(inputs.ends, cfg.data):
        print(f"warning: {warning}", flush=True)


def find_resume(cfg: Config, inputs: Inputs) -> Inputs:
    """The inputs with the checkpoint of `resume`; readies output_dir unless all is done. UserError, CheckpointError."""
    out = Path(cfg.output_dir)
    done = 0
    found = checkpoint.find_checkpoint(cfg.resume, out / "checkpoints")
    if found:
        done = checkpoint.check_resumed(found, cfg.model_dump(), inputs.prompts.fingerprint)
    base = check_base(found, cfg, inputs.model_path)
    if done == cfg.train.steps:
        if dist.get_rank() == 0:
            print(f"nothing to do: {found} is after the last step, train.steps={done}", flush=True)
    else:
        text = yaml.safe_dump(cfg.model_dump(), sort_keys=False, allow_unicode=True)
        ranks.on_first_rank(lambda: open_output_dir(out, text, cfg.resume, done))
    return replace(inputs, checkpoint=found, done=done, base=base)


def check_base(found: Path | None, cfg: Config, folder: str) -> str | None:
    """Digest of the initial model in `folder`; None unless adapters are added to it, or a reference keeps it.

    Raises UserError where the checkpoint `found` has other adapters, or was trained on another initial model.
    """
    base = hf_folder.digest_weights(folder) if cfg.lora.rank or cfg.algo.kl_coef else None
    if found:
        state = checkpoint.read_state(found)
        was = state["config"]
        lora.check_resumed(was["lora"], cfg.lora, found)
        require(
            base is None or state.get("base") in (None, base),
            f"model.path={cfg.model.path}: not the weights that {found} was trained on, which its adapters (lora.rank) "
            f"are added to, or the reference (algo.kl_coef) has; use model.path={was['model']['path']} as it was, or "
            "start a new run from this model (resume=none)",
        )
    return base
