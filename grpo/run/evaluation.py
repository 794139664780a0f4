"""The command's --evaluate and --export: data.eval once on a model, and the model of a checkpoint; neither trains.

The script hands in how it evaluates.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

import megatron_bridge as bridge
from config import Config
from grpo.parts.base.read_config import load_config, validate
from grpo.parts.base.require import require
from grpo.parts.base.rollout_files import write_rows
from grpo.parts.model import checkpoint, optimizer_state
from grpo.run.clock import Clock
from grpo.run.inputs import Inputs, check_base
from grpo.run.preflight import configuration, options
from grpo.step import metrics
from grpo.step.grading import GradingPool
from grpo.step.records import Sample

FILE = "evaluation.jsonl"  # in the output folder, a line as in rollouts/
UNUSED = ("parallel", "lora", "algo", "megatron", "schedule", "profile")  # sections that only training reads
NOT_EXPORTED = ("data.train=[]", "rollout.tp=1", "algo.kl_coef=0", "algo.teacher=null", "profile.start=0")


Evaluate = Callable[[Any], tuple[dict[str, float], list[Sample]]]  # the script's `evaluate`, of a Run


def read_config(path: str, overrides: list[str], world_size: int) -> Config:
    """The configuration of an evaluation, checked, without what only training reads. Raises UserError."""
    cfg = load_config(path, [*overrides, "data.train=[]"])
    require(cfg.data.eval is not None, "--evaluate: data.eval is not set; name the data to evaluate on: data.eval=FILE")
    cfg = validate(cfg.model_dump(exclude=set(UNUSED)), path)
    options.check_vllm(cfg.rollout.vllm)
    configuration.check_evaluation(cfg)
    configuration.check_world_size(cfg, world_size)
    configuration.check_rewards(cfg)
    return cfg


def run(cfg: Config, inputs: Inputs, clock: Clock, evaluate: Evaluate, engine: type) -> None:
    """Start an `engine` on the model, evaluate, print the results and write the answers; every rank calls this."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which the clock keeps for a run that saves first
        signal.signal(number, signal.SIG_DFL)
    clock.watchdog.enter("build")
    awake = engine(inputs.model_path, cfg.model, cfg.rollout, configuration.longest_sample(cfg), asleep=False)
    grading = GradingPool(cfg.reward)
    found, samples = evaluate(SimpleNamespace(cfg=cfg, clock=clock, inputs=inputs, engine=awake, grading=grading))
    grading.close()
    if dist.get_rank() > 0:
        return
    path = Path(cfg.output_dir, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [sample.as_row() for sample in samples])
    print(f"evaluation of {cfg.model.path}, {found['time/eval']:.1f} s")
    print("\n".join(describe(samples, found, cfg.eval.pass_reward)))
    print(f"answers: {path}", flush=True)


def describe(samples: list[Sample], found: dict[str, float], pass_reward: float) -> list[str]:
    """A line for each source, with its metrics that `found` has, and one for all: the accuracy and its error."""
    lines = []
    for source, own in [*metrics.by_source(samples).items(), ("all", samples)]:
        share, error = accuracy(own, pass_reward)
        prompts = len({s.group for s in own})
        line = f"  {source}: accuracy {share:.4f} ± {error:.4f} (standard error over {prompts} prompts)"
        start = f"eval/{source}/"
        names = [key.removeprefix(start) for key in found if key.startswith(start) and "@" in key]
        lines.append("  ".join([line, *(f"{name} {found[start + name]:.3f}" for name in names)]))
    return lines


def accuracy(samples: list[Sample], pass_reward: float) -> tuple[float, float]:
    """The share of answers that pass, and the standard error of the mean of the prompts' shares, NaN for one prompt."""
    groups = metrics.rewards_by_group(samples).values()
    shares = np.array([np.mean(np.array(rewards) >= pass_reward) for rewards in groups])
    error = shares.std(ddof=1) / np.sqrt(len(shares)) if len(shares) > 1 else np.nan
    return shares.mean(), error


# ---------------------------------------------------------------- a checkpoint as a Hugging Face folder


def read_export_config(path: str, overrides: list[str], world_size: int) -> Config:
    """The configuration of an export; its layout need not be the checkpoint's. Raises UserError."""
    cfg = load_config(path, [*overrides, *NOT_EXPORTED])
    configuration.check_world_size(cfg, world_size)
    return cfg


def export_checkpoint(cfg: Config, base: str) -> str:
    """Write the model of the checkpoint `resume`, or else the newest, to output_dir/hf/step_N, adapters as a run does.

    `base`: folder of the initial model. Called on every rank; returns the folder. Raises UserError, CheckpointError.
    """
    folder = Path(cfg.output_dir, "checkpoints")
    found = Path(cfg.resume)
    if cfg.resume in ("none", "auto"):
        found = next(iter(checkpoint.list_checkpoints(folder)), folder)
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
    if dist.get_rank() == 0:
        print(f"export:  {found} → {target}", flush=True)
    return target
