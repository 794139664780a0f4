"""The command, without the algorithm: arguments, checks before the start, how ranks meet, what a failure means.

Knows no step of training: the script hands in what it rehearses and how it trains.
"""

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import megatron_bridge as bridge
from config import Config, RankError, TrainingError, UserError
from support import (
    checkpoint,
    checks,
    debug,
    from_other_trainers,
    hf_folder,
    launchers,
    lora,
    memory,
    memory_count,
    memory_plan,
    preflight,
    ranks,
    teacher,
    turns,
    versions,
    vllm_process,
    weight_sets,
)
from support.attention import use_flash_attention_3
from support.clock import Clock
from support.data import Mixture, Prompt, fingerprint, load_prompts, load_tokenizer
from support.files import lock_output_dir, open_output_dir
from support.read_config import changed, to_yaml
from support.timeline import Timeline


@dataclass(frozen=True)
class Inputs:
    """What a run starts from, on every rank."""

    tokenizer: Any
    prompts: Sequence[Prompt]  # each is put together when it is asked for
    eval_prompts: Sequence[Prompt]
    checkpoint: Path | None = None  # to go on from
    done: int = 0  # steps that are behind it


def command(
    argv: list[str],
    doc: str,
    rehearse: Callable[[Config], None],
    train: Callable[[Config, Inputs, Clock], None],
) -> int:
    """Run the command line `argv`, whose help is `doc`; returns the exit code.

    0: done; 2: a mistake the user can mend, found before training; 1: a failure during training. `rehearse(cfg)` runs
    at every start and raises UserError; `train(cfg, inputs, clock)` runs on every rank unless this is a dry run.
    """
    os.environ.update(launchers.environment(os.environ))
    ranks.die_with_torchrun()
    args = parse_args(argv, doc)
    try:
        cfg = from_other_trainers.load(args.config, args.overrides)
        vllm_process.set_environment(cfg.rollout.exact)  # before vLLM is imported, or a GPU allocates
        if args.debug:
            debug.turn_on(cfg)
        checks.check_config(cfg, args.world_size)
        rehearse(with_steps(cfg, cfg.rollout.prompts_per_step))  # the data are not read yet: any number will do
        gpu = memory_plan.gpu_bytes(args.gpu_memory_gb) if args.dry_run else None
        cfg, inputs = prepare(cfg, args.world_size, weights=not args.dry_run, gpu=gpu)
        if args.draw:
            from tools import drawing  # here, so that no other start loads it

            drawing.write_pictures(cfg, args.world_size, Path(args.draw))
        if not args.dry_run:
            check_start(cfg)
            if cfg.rollout.exact:
                torch.use_deterministic_algorithms(True)
                torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill vLLM's KV cache with NaN
            ranks.join_ranks(checks.group_timeout_s(cfg))
            run(cfg, inputs, train)
    except (UserError, TrainingError) as error:
        if ranks.is_first_rank() or isinstance(error, RankError):
            ranks.say(f"error: {error}")
        else:
            time.sleep(3)  # torchrun ends every rank as soon as one has exited; let the first one speak
        return 2 if isinstance(error, UserError) else 1
    return 0


def parse_args(argv: list[str], doc: str) -> argparse.Namespace:
    """The options and the overrides. argparse itself exits, with 2 on an unknown option, with 0 after --version."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration, model and data, print the plan; needs no GPU"
    )
    parser.add_argument(
        "--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="ranks that a dry run plans for"
    )
    parser.add_argument(
        "--draw", metavar="FILE.svg", help="with --dry-run: who holds what, and who waits, as a picture"
    )
    parser.add_argument(
        "--gpu-memory-gb",
        type=float,
        help="size of a GPU that a dry run plans for, in 10⁹ bytes; else this machine's, or 80",
    )
    parser.add_argument("--debug", action="store_true", help="let torch and NCCL say more, find what makes a NaN")
    shown = versions.format_versions(versions.versions()) if "--version" in argv else ""
    parser.add_argument("--version", action="version", version=shown, help="print the commit and all versions")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.draw and not args.dry_run:
        parser.error("--draw goes with --dry-run")
    return args


def with_steps(cfg: Config, prompts: int) -> Config:
    """The configuration with `train.steps`, where `train.epochs` is given: of so many passes over so many prompts."""
    if cfg.train.epochs is None:
        return cfg
    passes = Fraction(str(cfg.train.epochs))  # 1.1 epochs of 100 prompts are 110, not 110.00000000000001
    return changed(cfg, {"train.steps": math.ceil(passes * prompts / cfg.rollout.prompts_per_step)})


def prepare(cfg: Config, world_size: int, weights: bool, gpu: int | None = None) -> tuple[Config, Inputs]:
    """Check the model, its files of `weights` if asked, and the data; say what the run will be. Raises UserError.

    With `gpu`, in bytes, first say what will be in the memory of a GPU of that size: config.json is enough for it.
    Returns the configuration to train with, where `train.steps` alone says how long, and the inputs.
    """
    parts = ("train", "eval") if cfg.data.eval is not None else ("train",)
    prompts: dict[str, Sequence[Prompt]] = {"eval": []}
    dropped: dict[str, int] = {}
    try:
        checks.check_model(
            cfg.model.path, cfg.parallel, cfg.rollout.tp, checks.longest_sample(cfg), cfg.model.dtype, cfg.megatron
        )
        teacher.check_shape(cfg)
        checks.check_routes(cfg)
        if gpu and ranks.is_first_rank():
            print(memory_plan.describe(cfg, world_size, gpu), flush=True)
        tokenizer = load_tokenizer(cfg.model.path)
        for part in parts:
            prompts[part], dropped[part] = load_prompts(cfg.data, tokenizer, part)
            turns.check(cfg, tokenizer, prompts[part][0].row)
        teacher.check_tokens(cfg, tokenizer, weights)
        if weights:
            checks.check_weights(hf_folder.local_folder(cfg.model.path))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    cfg = with_steps(cfg, len(prompts["train"]))
    if ranks.is_first_rank():
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and cfg.resume != "auto":
            print(f"warning: --max-restarts={restarts}: each restart begins from resume={cfg.resume} again; use auto")
        print(checks.describe(cfg, world_size))
        for warning in checks.advice(cfg, world_size):
            print(f"warning: {warning}")
        for part in parts:
            name = "data:" if part == "train" else "eval:"
            longer = f"{dropped[part]} dropped, longer than {cfg.data.max_prompt_tokens} tokens"
            print(f"{name:8s} {len(prompts[part])} prompts" + (f"; {longer}" if dropped[part] else ""), flush=True)
            if isinstance(prompts[part], Mixture):
                print(prompts[part].describe(cfg.train.steps * cfg.rollout.prompts_per_step), flush=True)
    return changed(cfg, {"train.epochs": None}), Inputs(tokenizer, prompts["train"], prompts["eval"])


def check_start(cfg: Config) -> None:
    """Check what a dry run need not have: a launcher, and a GPU for each of its processes. Raises UserError."""
    if "RANK" not in os.environ:
        by_srun = "; in this Slurm job: srun python train_grpo.py ..." * ("SLURM_JOB_ID" in os.environ)
        raise UserError(
            f"start with torchrun --nproc_per_node=N train_grpo.py ..., or add --dry-run to check only{by_srun}"
        )
    missing = [name for name in ("WORLD_SIZE", "LOCAL_RANK", *launchers.MASTER_NAMES) if name not in os.environ]
    if missing:
        raise UserError(
            f"rank {os.environ['RANK']} was started without {', '.join(missing)}: torchrun and srun say them all; with "
            "mpirun on several machines add -x MASTER_ADDR=HOST, the host of rank 0"
        )
    if not torch.cuda.is_available():
        if cfg.rollout.vllm.get("quantization"):
            raise UserError("rollout.vllm.quantization=fp8: works on GPUs only, leave it out")
        if cfg.profile.memory:
            raise UserError(
                "profile.memory=true: torch takes snapshots of GPU memory only, and there is no GPU here; set it to "
                "false (mem/* in metrics.jsonl are of the host's memory then)"
            )
        for name in ("enable_expert_parallel", "enable_sleep_mode", "enable_chunked_prefill"):
            if cfg.rollout.vllm.get(name):
                raise UserError(f"rollout.vllm.{name}=true: works on GPUs only, set it to false")
        return
    least = int(os.environ["LOCAL_RANK"]) + 1
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", least)), torch.cuda.device_count()
    if local > gpus:
        bound = "; if srun binds one GPU to each, add --gpu-bind=none to it" * ("SLURM_PROCID" in os.environ)
        raise UserError(
            f"--nproc_per_node={local}, but this machine has {gpus} GPU{'s' * (gpus > 1)}: one process a GPU{bound}"
        )


def check_machines(cfg: Config, data: str) -> IO | None:
    """Check what only the machines can tell, before weights are loaded; builds the process groups. Raises UserError.

    `data` is the fingerprint of the prompts, which files of another machine, or rows that a function makes, may change.
    Returns the lock of the output folder on rank 0, to be held as long as the run; None elsewhere.
    """
    out = Path(cfg.output_dir)
    timeout_s = checks.group_timeout_s(cfg)

    def check_first_host() -> IO:
        weights = hf_folder.count_weights(hf_folder.local_folder(cfg.model.path))
        shares_memory = torch.cuda.is_available() or cfg.rollout.tp > 1
        preflight.check_host(out, memory_count.disk_bytes(cfg, weights), shares_memory)
        return lock_output_dir(out)

    try:
        preflight.check_same_config({**cfg.model_dump(), "prompts of data.train": data})
    except ValueError as error:
        raise UserError(str(error)) from None
    lock = ranks.on_first_rank(check_first_host)
    if os.environ["LOCAL_RANK"] == "0":
        warning = check_host_memory(cfg)
        if warning:
            ranks.say(f"warning: {warning}")
    bridge.init_model_parallel(cfg.parallel, cfg.seed, timeout_s)
    try:
        preflight.check_groups(bridge.process_groups(), min(timeout_s, preflight.GROUP_CHECK_S))
    except ValueError as error:
        raise RankError(str(error)) from None
    return lock


def check_host_memory(cfg: Config) -> str | None:
    """What to warn of where this machine has too little memory for its ranks; None else."""
    weights = hf_folder.count_weights(hf_folder.local_folder(cfg.model.path))
    other = teacher.another(cfg)
    teacher_weights = hf_folder.count_weights(hf_folder.local_folder(other)) if other else 0
    on_gpu = torch.cuda.is_available()
    needed = memory_count.host_bytes(cfg, weights, dist.get_world_size(), on_gpu, teacher_weights)
    return memory.host_warning(needed, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def resumed(cfg: Config, inputs: Inputs) -> Inputs:
    """The inputs with the checkpoint that `resume` asks for, the output folder made ready. Raises UserError.

    CheckpointError where all are damaged. A run that has done all its steps is left as it is.
    """
    out, done = Path(cfg.output_dir), 0
    found = checkpoint.find_checkpoint(cfg.resume, out / "checkpoints")
    if found:
        done = checkpoint.check_resumed(found, cfg.model_dump(), fingerprint(inputs.prompts))
        was = checkpoint.read_state(found)["config"]
        weight_sets.check_resumed(was, cfg, found)
        lora.check_resumed(was.get("lora", {}), cfg.lora, found)  # a checkpoint of before there were any has no section
    if done == cfg.train.steps:
        if dist.get_rank() == 0:
            print(f"nothing to do: {found} is after the last step, train.steps={done}", flush=True)
    else:
        ranks.on_first_rank(lambda: open_output_dir(out, to_yaml(cfg), cfg.resume, done))
    return replace(inputs, checkpoint=found, done=done)


def run(cfg: Config, inputs: Inputs, train: Callable[[Config, Inputs, Clock], None]) -> None:
    """Check the machines, then `train`, watched; says what their failures mean. Raises UserError, TrainingError."""
    clock = Clock(cfg.train.stall_timeout_s, Timeline(Path(cfg.output_dir, "traces"), cfg.profile, cfg.train.steps))
    try:
        lock = check_machines(cfg, fingerprint(inputs.prompts))  # of the output folder, on rank 0
        with lock or contextlib.nullcontext():
            inputs = resumed(cfg, inputs)
            if inputs.done < cfg.train.steps:
                use_flash_attention_3(bridge.DTYPES[cfg.model.dtype])
                train(cfg, inputs, clock)
    except (RuntimeError, ValueError, AssertionError, MemoryError, OSError, SafetensorError) as error:
        message = preflight.explain_out_of_memory(clock.phase, error)
        if message is not None:
            raise RankError(message) from error
        if isinstance(error, (ValueError, AssertionError)):  # a mistake in the code
            raise
        if isinstance(error, RuntimeError) and "onnection" in str(error):  # gloo and NCCL have no class of their own
            raise RankError(
                f"rank {dist.get_rank()}, in the phase {clock.phase}: another rank is gone "
                f"({str(error).splitlines()[0]}). torchrun's report says which one; go on with resume=auto"
            ) from error
        message = preflight.explain_disk_error(clock.phase, error, Path(cfg.output_dir))
        if message is None:
            raise
        raise RankError(message) from error
    finally:
        clock.stop()
