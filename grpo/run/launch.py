"""The start of the command: its arguments, checks before anything is built, how ranks meet, what a failure means."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import megatron_bridge as bridge
from config import Config, RankError, TrainingError, UserError
from grpo.parts.base import ranks, versions
from grpo.parts.base.files import check_output_dir, lock_output_dir
from grpo.parts.base.read_config import load_config
from grpo.parts.engine import vllm_process
from grpo.parts.model.attention import use_flash_attention_3
from grpo.run.clock import Clock
from grpo.run.inputs import Inputs, check_models, find_resume, prepare
from grpo.run.preflight import configuration, explain, machines, memory_plan
from grpo.run.profiler import Profiler

# ---------------------------------------------------------------- before the ranks meet


def parse_args(argv: list[str], doc: str) -> argparse.Namespace:
    """The options and the overrides. argparse exits by itself: with 2 on an unknown option, with 0 after --version."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, help="YAML file, see configs/")

    add_mode = partial(parser.add_mutually_exclusive_group().add_argument, action="store_true")
    add_mode("--dry-run", help="check configuration, model and data, print the plan; needs no GPU")
    add_mode("--evaluate", help="data.eval once on model.path, or the checkpoint resume=FOLDER: accuracy, answers")
    add_mode("--export", help="the newest checkpoint, or resume=FOLDER, as a Hugging Face folder in output_dir/hf")

    world_size = os.environ.get("WORLD_SIZE", "1")
    add("--world-size", type=int, default=world_size, help="number of ranks that a dry run plans for")
    add("--gpu-memory-gb", type=float, help="GPU that a dry run plans for, in GB; else this machine's, or 80")
    found = versions.versions() if "--version" in argv else {}
    shown = "\n".join(f"{name:20}  {version or '-'}" for name, version in found.items())
    add("--version", action="version", version=shown, help="print the commit and all versions")
    add("overrides", nargs="*", metavar="section.key=value")

    args = parser.parse_intermixed_args(argv)
    if args.world_size < 1:
        parser.error(f"--world-size {args.world_size}: there is at least one rank")
    if not args.dry_run and args.world_size != int(world_size):
        parser.error(f"--world-size {args.world_size} needs --dry-run; torchrun has started {world_size} rank(s)")
    rank = os.environ.get("RANK", "0")
    if rank not in map(str, range(int(world_size))):  # of a launcher other than torchrun: rank 0 alone speaks later
        parser.error(f"RANK={rank} with WORLD_SIZE={world_size}: must be 0 to {int(world_size) - 1}")
    return args


def check(args) -> Config:
    """Read and check the configuration. Model and data are not read yet. Raises UserError."""
    cfg = load_config(args.config, args.overrides)
    prepare_process(cfg)
    configuration.check_config(cfg, args.world_size)

    try:
        check_output_dir(Path(cfg.output_dir), cfg.resume, configuration.named_files(cfg) | {"--config": [args.config]})
    except PermissionError as error:
        message = f"output_dir={cfg.output_dir}: {error.strerror}: {error.filename}; choose one that you may write in"
        raise UserError(message) from error
    return cfg


def prepare_process(cfg):
    """Tie this process to torchrun, and set what CUDA, torch and vLLM read as they start. The user's variables stay."""
    ranks.die_with_torchrun()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal may lack UTF-8

    if cfg.parallel.tp * cfg.parallel.cp > 1:
        # Megatron-core starts communication before the kernels that hide it: one queue keeps that order on the GPU.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    vllm_process.set_environment(cfg.rollout.exact, cfg.model.dtype)  # before vLLM is imported, or a GPU allocates
    if torch.cuda.is_available():
        torch.backends.cuda.enable_flash_sdp(cfg.model.flash_attention)


def dry_run(cfg, args):
    """Check model and data, and print the plan. Raises UserError, also if the plan exceeds a GPU's memory."""
    check_models(cfg)
    problems = []
    if ranks.is_first_rank():
        short = memory_plan.report(cfg, args.world_size, args.gpu_memory_gb)
        if short:
            problems.append(f"{short}\n  --gpu-memory-gb plans for another GPU")

    try:
        prepare(cfg, args.world_size, weights=False)
    except UserError as error:  # data that are not here must not hide that the run does not fit
        problems.append(str(error))
    if problems:
        raise UserError("\nerror: ".join(problems))


# ---------------------------------------------------------------- all ranks together


@contextlib.contextmanager
def joined(cfg) -> Iterator[Clock]:
    """Meet the other ranks and give a clock. A machine's failure becomes a RankError that says what it means."""
    if cfg.rollout.exact:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill vLLM's KV cache with NaN
    ranks.join_ranks(configuration.group_timeout_s(cfg))

    profiler = None
    if cfg.profile.start and (cfg.profile.ranks is None or dist.get_rank() in cfg.profile.ranks):
        profiler = Profiler(Path(cfg.output_dir, "traces"), cfg.profile, dist.get_rank())
    clock = Clock(cfg.train.stall_timeout_s, profiler)
    try:
        yield clock
        if profiler:
            profiler.close()
    except (RankError, RuntimeError, ValueError, AssertionError, MemoryError, OSError, SafetensorError) as error:
        explain_failure(error, clock.phase, Path(cfg.output_dir))
        raise
    finally:
        clock.stop()


def explain_failure(error, phase, out: Path):
    """Raise a RankError that says what an error means, if it comes from a machine. Else return."""
    is_first = ranks.note_failure()
    if isinstance(error, RankError):
        return
    lost = explain.lost_rank(error)
    meaning = explain.out_of_memory(phase, error) or lost or explain.disk_error(error, out)
    if meaning is None:
        return
    if meaning == lost and not is_first:
        sys.exit(1)  # else each rank would say that one is gone
    raise RankError(f"rank {dist.get_rank()}, in the phase {phase}: {meaning}") from error


@contextlib.contextmanager
def output_dir(cfg, inputs) -> Iterator[Inputs]:
    """Check machines and ranks, lock the output folder, build and try Megatron's process groups.

    Gives the inputs with the checkpoint to resume from.
    """
    machines.check_ranks(cfg.model_dump(), "data.train", inputs.prompts.fingerprint)
    machines.check_clocks()
    ranks.on_first_rank(partial(machines.check_first_host, cfg))
    if os.environ["LOCAL_RANK"] == "0":
        machines.check_host_memory(cfg)

    lock = ranks.on_first_rank(lambda: lock_output_dir(Path(cfg.output_dir)))  # None on the other ranks
    with lock or contextlib.nullcontext():
        timeout_s = configuration.group_timeout_s(cfg)
        bridge.init_model_parallel(cfg.parallel, cfg.seed, timeout_s)
        machines.check_groups(bridge.process_groups(), min(timeout_s, machines.GROUP_CHECK_S))
        inputs = find_resume(cfg, inputs)
        use_flash_attention_3(bridge.DTYPES[cfg.model.dtype])
        yield inputs


# ---------------------------------------------------------------- after a failure


def exit_code(error: UserError | TrainingError) -> int:
    """Print the error, on the rank that has to, and return the exit code: 2 for a UserError, else 1."""
    speaks = ranks.is_first_rank() or isinstance(error, RankError)
    if not dist.is_initialized():  # a machine may lack what the first one has, and only its own ranks know
        speaks = speaks or os.environ.get("LOCAL_RANK") == "0"

    if speaks:
        ranks.say(f"error: {error}")
    else:
        time.sleep(3)  # torchrun ends every rank as soon as one has exited; let the first one speak
    return 2 if isinstance(error, UserError) else 1
