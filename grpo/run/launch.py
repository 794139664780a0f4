"""The command, without the algorithm: arguments, checks before the start, how ranks meet, what a failure means."""

import argparse
import contextlib
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import megatron_bridge as bridge
from config import Config, RankError, TrainingError, UserError
from grpo.parts.base import ranks, versions
from grpo.parts.base.files import lock_output_dir
from grpo.parts.base.read_config import load_config, override
from grpo.parts.engine import vllm_process
from grpo.parts.model.attention import use_flash_attention_3
from grpo.run import evaluation
from grpo.run.clock import Clock
from grpo.run.inputs import Inputs, check_models, find_resume, prepare, print_prompts, read, with_steps
from grpo.run.preflight import configuration, explain, machines, memory_plan
from grpo.run.profiler import Profiler


def command(
    argv: list[str], doc: str, rehearse: Callable[[Config], None], train: Callable[[Config, Inputs, Clock], None],
    evaluate: evaluation.Evaluate, engine: type,
) -> int:  # fmt: skip
    """Run the command line `argv`, whose help is `doc`; returns the exit code, as docs/resume.md has it.

    `rehearse(cfg)` runs at every start and raises UserError; `train(cfg, inputs, clock)` runs on every rank unless this
    is a dry run, an export or, with --evaluate, an evaluation by `evaluate` and an `engine`, the class that samples.
    """
    ranks.die_with_torchrun()
    for stream in (sys.stdout, sys.stderr):  # of a system without UTF-8
        stream.reconfigure(errors="replace")
    args = parse_args(argv, doc)
    try:
        if args.export:
            start_export(args)
        elif args.evaluate:
            start_evaluation(args, evaluate, engine)
        else:
            start_training(args, rehearse, train)
    except (UserError, TrainingError) as error:
        if ranks.is_first_rank() or isinstance(error, RankError):
            ranks.say(f"error: {error}")
        else:
            time.sleep(3)  # torchrun ends every rank as soon as one has exited; let the first one speak
        return 2 if isinstance(error, UserError) else 1
    return 0


def start_training(args: argparse.Namespace, rehearse: Callable, train: Callable) -> None:
    """Check and read what a run needs, and train, with output_dir locked; or a dry run. UserError, TrainingError."""
    cfg = load_config(args.config, args.overrides)
    prepare_process(cfg)
    configuration.check_config(cfg, args.world_size)
    rehearse(with_steps(cfg, cfg.rollout.prompts_per_step))  # the data are not read yet: any number will do
    if args.dry_run:
        check_models(cfg)
        short = None
        if ranks.is_first_rank():
            short = memory_plan.report(cfg, args.world_size, args.gpu_memory_gb)
        prepare(cfg, args.world_size, weights=False)
        if short:
            raise UserError(f"{short}\n  --gpu-memory-gb plans for another GPU")
        return
    machines.check_start(cfg)  # before anything is read
    cfg, inputs = prepare(cfg, args.world_size, weights=True)
    with joined(cfg) as clock:
        machines.check_ranks(cfg.model_dump(), "data.train", inputs.prompts.fingerprint)
        ranks.on_first_rank(partial(machines.check_first_host, cfg))
        if os.environ["LOCAL_RANK"] == "0":
            machines.check_host_memory(cfg)
        lock = ranks.on_first_rank(lambda: lock_output_dir(Path(cfg.output_dir)))  # None on the other ranks
        with lock or contextlib.nullcontext():
            timeout_s = configuration.group_timeout_s(cfg)
            bridge.init_model_parallel(cfg.parallel, cfg.seed, timeout_s)
            machines.check_groups(bridge.process_groups(), min(timeout_s, machines.GROUP_CHECK_S))
            inputs = find_resume(cfg, inputs)
            if inputs.done < cfg.train.steps:
                use_flash_attention_3(bridge.DTYPES[cfg.model.dtype])
                train(cfg, inputs, clock)


def start_evaluation(args: argparse.Namespace, evaluate: evaluation.Evaluate, engine: type) -> None:
    """Check and read what an evaluation needs, and evaluate. Raises UserError, TrainingError."""
    cfg = evaluation.read_config(args.config, args.overrides, args.world_size)
    prepare_process(cfg)
    machines.check_start(cfg)
    exported = None
    if cfg.resume not in ("none", "auto"):  # a checkpoint is evaluated
        exported = evaluation.read_export_config(args.config, args.overrides, args.world_size)
    cfg, inputs = read(cfg, ["eval"], weights=True)
    if ranks.is_first_rank():
        print_prompts(cfg, inputs)
    with joined(cfg) as clock:
        machines.check_ranks(cfg.model_dump(), "data.eval", inputs.eval_prompts.fingerprint)
        ranks.on_first_rank(partial(machines.check_writable, Path(cfg.output_dir)))
        if exported:
            folder = evaluation.export_checkpoint(exported, inputs.model_path)
            cfg, inputs = override(cfg, {"model.path": folder}), replace(inputs, model_path=folder)
            gc.collect()  # the model, before vLLM measures free memory
            torch.cuda.empty_cache()
        evaluation.run(cfg, inputs, clock, evaluate, engine)


def start_export(args: argparse.Namespace) -> None:
    """Check and read what the export of a checkpoint needs, and write it. Raises UserError, TrainingError."""
    cfg = evaluation.read_export_config(args.config, args.overrides, args.world_size)
    prepare_process(cfg)
    machines.check_start(cfg)
    _, inputs = read(cfg, [], weights=True)
    with joined(cfg):
        evaluation.export_checkpoint(cfg, inputs.model_path)


def prepare_process(cfg: Config) -> None:
    """Set what CUDA, torch and vLLM read as they start; a variable that the user has set stays."""
    if cfg.parallel.tp * cfg.parallel.cp > 1:
        # Megatron-core starts communication before the kernels that hide it: one queue keeps that order on the GPU.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    vllm_process.set_environment(cfg.rollout.exact, cfg.model.dtype)  # before vLLM is imported, or a GPU allocates
    if torch.cuda.is_available():
        torch.backends.cuda.enable_flash_sdp(cfg.model.flash_attention)


def parse_args(argv: list[str], doc: str) -> argparse.Namespace:
    """The options and the overrides. argparse itself exits, with 2 on an unknown option, with 0 after --version."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ranks_here = int(os.environ.get("WORLD_SIZE", 1))
    found = versions.versions() if "--version" in argv else {}
    shown = "\n".join(f"{name:20}  {version or '-'}" for name, version in found.items())
    add = parser.add_argument
    add("--config", required=True, help="YAML file, see configs/")
    add_mode = partial(parser.add_mutually_exclusive_group().add_argument, action="store_true")
    add_mode("--dry-run", help="check configuration, model and data, print the plan; needs no GPU")
    add_mode("--evaluate", help="data.eval once on model.path, or the checkpoint resume=FOLDER: accuracy, answers")
    add_mode("--export", help="the newest checkpoint, or resume=FOLDER, as a Hugging Face folder in output_dir/hf")
    add("--world-size", type=int, default=ranks_here, help="ranks that a dry run plans for")
    add("--gpu-memory-gb", type=float, help="GPU that a dry run plans for, in 10⁹ bytes; else this machine's, or 80")
    add("--version", action="version", version=shown, help="print the commit and all versions")
    add("overrides", nargs="*", metavar="section.key=value")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if not all(re.match("--.+=", option) for option in unknown):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; keys are written as in train.lr=3e-6")
    args.overrides += [option.removeprefix("--") for option in unknown]  # --train.lr=3e-6, as other trainers write it
    if args.world_size < 1:
        parser.error(f"--world-size {args.world_size}: there is at least one rank")
    return args


@contextlib.contextmanager
def joined(cfg: Config) -> Iterator[Clock]:
    """Meet the other ranks and give a clock. A machine's failure becomes a UserError or TrainingError that says it."""
    if cfg.rollout.exact:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill vLLM's KV cache with NaN
    ranks.join_ranks(configuration.group_timeout_s(cfg))
    profiler = None
    if cfg.profile.start and (cfg.profile.ranks is None or dist.get_rank() in cfg.profile.ranks):
        profiler = Profiler(Path(cfg.output_dir, "traces"), cfg.profile)
    clock = Clock(cfg.train.stall_timeout_s, profiler)
    try:
        yield clock
        if profiler:
            profiler.close()
    except (RankError, RuntimeError, ValueError, AssertionError, MemoryError, OSError, SafetensorError) as error:
        first = ranks.note_failure()
        if isinstance(error, RankError):
            raise
        lost = explain.lost_rank(error)
        meaning = explain.out_of_memory(clock.phase, error) or lost or explain.disk_error(error, Path(cfg.output_dir))
        if meaning is None:
            raise
        if meaning == lost and not first:
            sys.exit(1)  # else each rank would tell that one is gone
        raise RankError(f"rank {dist.get_rank()}, in the phase {clock.phase}: {meaning}") from error
    finally:
        clock.stop()
