"""What the command does besides training: --evaluate takes data.eval once, --export writes a checkpoint's model."""

import contextlib
import gc
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import megatron_bridge as bridge
from config import Config
from grpo.parts.base import ranks
from grpo.parts.base.read_config import load_config, override, validate
from grpo.parts.base.require import require
from grpo.parts.base.rollout_files import write_rows
from grpo.parts.model import checkpoint, optimizer_state
from grpo.run.clock import Clock, handle_stop_signals
from grpo.run.inputs import Inputs, check_base, print_prompts, read
from grpo.run.launch import joined, prepare_process
from grpo.run.preflight import configuration, machines, options
from grpo.step import metrics
from grpo.step.grading import GradingPool
from grpo.step.records import Sample
from rollout import Engine

FILE = "evaluation.jsonl"  # in the output folder, with lines as in rollouts/
UNUSED_SECTIONS = ("parallel", "lora", "algo", "megatron", "schedule", "profile")  # sections that only training reads
OFF_FOR_EXPORT = ("data.train=[]", "rollout.tp=1", "algo.kl_coef=0", "algo.teacher=null", "profile.start=0")

# ---------------------------------------------------------------- --evaluate


@dataclass
class Sampler:
    """What samples and grades answers: all that an evaluation needs of a run."""

    cfg: Config
    clock: Clock
    inputs: Inputs
    engine: Engine
    grading: GradingPool


@contextlib.contextmanager
def started(args, engine: type) -> Iterator[Sampler]:
    """Check and read what an evaluation needs, join the ranks, and start an `engine` on the model or the checkpoint.

    Raises UserError, TrainingError.
    """
    cfg = read_config(args)
    prepare_process(cfg)
    machines.check_start(cfg)
    saved = None
    if cfg.resume != "none":
        saved = chosen_checkpoint(cfg)
    exported = read_export_config(args) if saved else None
    cfg, inputs = read(cfg, ["eval"], weights=True)
    if ranks.is_first_rank():
        print(f"weights: {saved or cfg.model.path}")
        print_prompts(cfg, inputs)

    with joined(cfg) as clock:
        machines.check_ranks(cfg.model_dump(), "data.eval", inputs.eval_prompts.fingerprint)
        ranks.on_first_rank(partial(machines.check_writable, Path(cfg.output_dir)))
        if exported:  # vLLM reads a checkpoint as a Hugging Face folder
            folder = export_checkpoint(exported, inputs.model_path)
            cfg = override(cfg, {"model.path": folder})
            inputs = replace(inputs, model_path=folder)
            gc.collect()  # the trainer's model, before vLLM measures free memory
            torch.cuda.empty_cache()

        handle_stop_signals(signal.SIG_DFL)  # there is nothing to save, so a signal ends the process
        clock.watchdog.enter("build")
        awake = engine(inputs.model_path, cfg.model, cfg.rollout, cfg.longest_sample, asleep=False)
        grading = GradingPool(cfg.reward)
        yield Sampler(cfg, clock, inputs, awake, grading)
        grading.close()


def read_config(args) -> Config:
    """The configuration of an evaluation, checked, without what only training reads. Raises UserError."""
    cfg = load_config(args.config, [*args.overrides, "data.train=[]"])
    require(cfg.data.eval is not None, "--evaluate: data.eval is not set; name the data to evaluate on: data.eval=FILE")
    cfg = validate(cfg.model_dump(exclude=set(UNUSED_SECTIONS)), args.config)
    options.check_vllm(cfg.rollout.vllm)
    configuration.check_evaluation(cfg)
    configuration.check_world_size(cfg, args.world_size)
    configuration.check_rewards(cfg)
    return cfg


def report(cfg, found: dict[str, float], samples: list[Sample]):
    """Write the answers of an evaluation to the output folder and print its metrics `found`, on rank 0."""
    if dist.get_rank() > 0:
        return
    path = Path(cfg.output_dir, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [sample.as_row() for sample in samples])
    print(f"evaluation of {cfg.model.path}, {found['time/eval']:.1f} s")
    print("\n".join(describe(samples, found, cfg.eval.pass_reward)))
    print(f"answers: {path}", flush=True)


def describe(samples: list[Sample], found: dict[str, float], pass_reward: float) -> list[str]:
    """A line for each source, with its metrics in `found`, and a line for all samples: accuracy and standard error."""
    lines = []
    for source, own in [*metrics.by_source(samples).items(), ("all", samples)]:
        share, error = accuracy(own, pass_reward)
        prompts = len({s.group for s in own})
        line = f"  {source}: accuracy {share:.4f} ± {error:.4f} (standard error over {prompts} prompts)"
        for key, value in found.items():
            name = key.removeprefix(f"eval/{source}/")
            if name != key and "@" in name:
                line += f"  {name} {value:.3f}"
        lines.append(line)
    return lines


def accuracy(samples: list[Sample], pass_reward: float) -> tuple[float, float]:
    """The share of answers that pass, and the standard error of the mean of the prompts' shares, NaN for one prompt."""
    groups = metrics.rewards_by_group(samples).values()
    shares = np.array([np.mean(np.array(rewards) >= pass_reward - metrics.ROUNDING) for rewards in groups])
    error = np.nan
    if len(shares) > 1:
        error = shares.std(ddof=1) / np.sqrt(len(shares))
    return shares.mean(), error


# ---------------------------------------------------------------- --export


def export(args):
    """Write a checkpoint's model as a Hugging Face folder. Raises UserError, TrainingError."""
    cfg = read_export_config(args)
    prepare_process(cfg)
    machines.check_start(cfg)
    _, inputs = read(cfg, [], weights=True)
    with joined(cfg):
        export_checkpoint(cfg, inputs.model_path)


def chosen_checkpoint(cfg) -> Path | None:
    """The checkpoint `resume`; for none and auto the newest in the output folder, or None if there is none."""
    if cfg.resume not in ("none", "auto"):
        return Path(cfg.resume)
    return next(iter(checkpoint.list_checkpoints(Path(cfg.output_dir, "checkpoints"))), None)


def read_export_config(args) -> Config:
    """The configuration of an export; its layout need not be the checkpoint's. Raises UserError."""
    cfg = load_config(args.config, [*args.overrides, *OFF_FOR_EXPORT])
    configuration.check_world_size(cfg, args.world_size)
    return cfg


def export_checkpoint(cfg, base: str) -> str:
    """Write the model of the checkpoint `resume`, by default the newest, to output_dir/hf/step_N. Returns that folder.

    `base` is the folder of the initial model. Every rank calls this. Raises UserError, CheckpointError.
    """
    found = chosen_checkpoint(cfg)
    require(found, f"output_dir={cfg.output_dir}: no checkpoint in it to export; name one, resume=FOLDER")
    problem = checkpoint.find_damage(found)
    require(problem is None, f"{found} is no checkpoint, or not whole: {problem}; name another one, resume=FOLDER")
    check_base(found, cfg, base)

    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    dtype = bridge.DTYPES[cfg.model.dtype]
    model = bridge.build_model(base, cfg.parallel, dtype, cfg.megatron, adapters=cfg.lora)
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    step = optimizer_state.restore(found, model, optimizer, others=None)["step"]
    bridge.export(model, base, cfg, step)

    target = f"{cfg.output_dir}/hf/step_{step:06d}"
    ranks.tell(f"export:  {found} → {target}")
    return target
