"""What only the machines of a run can tell: launcher, GPUs, disk, host memory, and whether ranks reach each other.

Each check comes before weights are loaded and raises UserError; a failure between ranks is a RankError.
"""

import itertools
import os
import shutil
import socket
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers

import megatron_bridge as bridge
from config import Config, RankError, UserError
from support.base import hf_folder, launchers, memory, ranks, versions
from support.base.remedies import HOST_MEMORY
from support.base.versions import gib
from support.check import checks, costs, gpu_rows, preflight
from support.engine import vllm_process
from support.model import attention, cpu_backend
from support.step import teacher

ON_GPUS_ONLY = ("enable_expert_parallel", "enable_sleep_mode", "enable_chunked_prefill")  # of rollout.vllm


def check_start(cfg: Config) -> None:
    """Check what a dry run need not have: a launcher, and a GPU for each of its processes. Raises UserError."""
    check_launcher()
    if torch.cuda.is_available():
        check_gpus()
    else:
        check_unused_gpus()
        check_without_gpu(cfg)


def check_launcher() -> None:
    """Check that a launcher has given this process its rank and the address of rank 0. Raises UserError."""
    if "RANK" not in os.environ:
        message = "start with torchrun --nproc_per_node=N train_grpo.py ..., or add --dry-run to check only"
        if "SLURM_JOB_ID" in os.environ:
            message += "; in this Slurm job: srun python train_grpo.py ..."
        raise UserError(message)
    missing = [name for name in ("WORLD_SIZE", "LOCAL_RANK", *launchers.MASTER_NAMES) if name not in os.environ]
    if missing:
        raise UserError(
            f"rank {os.environ['RANK']} was started without {', '.join(missing)}: torchrun and srun set them all; with "
            "mpirun on several machines add -x MASTER_ADDR=HOST, the host of rank 0"
        )


def check_gpus() -> None:
    """Check that each process of this machine has a GPU, and Triton what it compiles with. Raises UserError."""
    least = int(os.environ["LOCAL_RANK"]) + 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", least))
    gpus = torch.cuda.device_count()
    if local > gpus:
        machine = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        message = f"--nproc_per_node={local}, but this machine has {machine}: one process a GPU"
        if "SLURM_PROCID" in os.environ:
            message += "; if srun binds one GPU to each, add --gpu-bind=none to it"
        if "MIG" in torch.cuda.get_device_name(0):
            message += f"; with MIG {gpu_rows.REMEDY['mig']}"
        raise UserError(message)
    missing = [name for name, path in versions.build_tools().items() if path is None]
    if missing:
        what = f"no {', no '.join(missing)}, which vLLM's kernels need (Triton)"
        raise UserError(f"{what}: {gpu_rows.REMEDY['build tools']}")


def check_unused_gpus() -> None:
    """Check that no GPU of this machine is left unused by mistake, where torch sees none. Raises UserError.

    The message says why: an old driver, torch for CPUs, MIG without a slice. vLLM for CPUs is no mistake.
    """
    if versions.driver() is None and shutil.which("nvidia-smi") is None:
        return
    facts = gpu_rows.facts()
    rows = [*gpu_rows.cuda(facts), *gpu_rows.gpus(facts)]
    stops = [f"{row.item}: {row.found}; {row.remedy}" for row in rows if row.verdict == gpu_rows.STOP]
    if stops and facts["packages"]["vllm"]:
        raise UserError("no GPU can be used. " + ". ".join(stops))


def check_without_gpu(cfg: Config) -> None:
    """Check that nothing is asked for that only GPUs have. Raises UserError."""
    if cfg.rollout.vllm.get("quantization"):
        raise UserError("rollout.vllm.quantization=fp8: works on GPUs only, leave it out")
    if cfg.profile.memory:
        raise UserError(
            "profile.memory=true: torch takes snapshots of GPU memory only, and there is no GPU here; set it to "
            "false (mem/* in metrics.jsonl are of the host's memory then)"
        )
    for name in ON_GPUS_ONLY:
        if cfg.rollout.vllm.get(name):
            raise UserError(f"rollout.vllm.{name}=true: works on GPUs only, set it to false")


def check_machines(cfg: Config, data: str) -> dict[str, str]:
    """Check what check_ranks does, the disk on rank 0, memory and bf16 units of each machine; returns what it does."""
    owners = check_ranks(cfg, "data.train", data)
    ranks.on_first_rank(lambda: check_first_host(cfg))
    if os.environ["LOCAL_RANK"] == "0":
        for warning in (check_host_memory(cfg), check_bf16_units(cfg)):
            if warning is not None:
                ranks.say(f"warning: {warning}")
    return owners


def check_ranks(cfg: Config, key: str, data: str) -> dict[str, str]:
    """Check configuration, data and code between ranks.

    `data` is the fingerprint of the prompts of `key`, which files of another machine, or rows that a function makes,
    may change. Returns what name_machines does. Raises UserError.
    """
    compared = {**cfg.model_dump(), f"prompts of {key}": data, "commit": versions.versions()["commit"]}
    try:
        preflight.check_same_config(compared)
    except ValueError as error:
        raise UserError(str(error)) from None
    return name_machines()


def name_machines() -> dict[str, str]:
    """Print which ranks are on which machine where there are several, and a warning where GPUs differ.

    Returns {network address: machine} of several machines, since errors of gloo and NCCL name addresses. An address
    that is not of one machine alone, such as 127.0.0.1, is left out.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cards = itertools.chain(*psutil.net_if_addrs().values())
    own = {card.address for card in cards if card.family in (socket.AF_INET, socket.AF_INET6)}
    machines, gpus, addresses = zip(*ranks.gather((socket.gethostname(), gpu, own)), strict=True)
    if dist.get_rank() == 0 and len(set(gpus)) > 1:
        ranks.say(f"warning: the GPUs differ, {ranks.describe(gpus, machines)}: {gpu_rows.REMEDY['unequal']}")
    if len(set(machines)) == 1:
        return {}
    if dist.get_rank() == 0:
        print(f"machines: {ranks.describe(machines)}", flush=True)
    owners = {}
    for machine, known in zip(machines, addresses, strict=True):
        for address in known:
            owners.setdefault(address, set()).add(machine)
    return {address: names.pop() for address, names in owners.items() if len(names) == 1}


def check_first_host(cfg: Config) -> None:
    """Check versions (a warning), shared memory if ranks use it, the output folder and its disk; print the kernels.

    Raises ValueError.
    """
    for warning in versions.check_versions():
        print(f"warning: {warning}", flush=True)
    if torch.cuda.is_available() or cfg.rollout.tp > 1:
        preflight.check_shared_memory(versions.SHARED_MEMORY_BYTES)
    preflight.check_writable(Path(cfg.output_dir))
    weights = hf_folder.count_weights(cfg.model.path)
    preflight.check_disk(Path(cfg.output_dir), costs.disk_bytes(cfg, weights))
    print(kernels(cfg), flush=True)


def kernels(cfg: Config) -> str:
    """Which kernels of attention, experts and sampling run here, in a line."""
    dtype = bridge.DTYPES[cfg.model.dtype]
    if not attention.uses_varlen(bridge.device(), dtype):
        parts = ["attention pads sequences (scaled_dot_product_attention)"]
    elif attention.has_flash_attention_3(dtype):
        parts = ["attention by FlashAttention 3 (varlen_attn)"]
    else:
        parts = ["attention by FlashAttention 2 (varlen_attn)"]
    if bridge.is_moe(transformers.AutoConfig.from_pretrained(cfg.model.path)):
        grouped = cfg.megatron.get("moe_grouped_gemm", True)
        parts.append("experts by grouped_mm" if grouped else "experts one after the other")
    if torch.cuda.is_available():
        parts.append(f"sampling by {vllm_process.describe_kernels(cfg.rollout.vllm)}")
    else:
        parts.append("sampling by vLLM for CPUs")
    return f"kernels: {'; '.join(parts)}"


def check_host_memory(cfg: Config) -> str | None:
    """A warning where this machine has too little memory for its ranks; else None."""
    weights = hf_folder.count_weights(cfg.model.path)
    other = teacher.another(cfg)
    of_teacher = hf_folder.count_weights(other) if other else 0
    each = costs.host_bytes(cfg, weights, dist.get_world_size(), torch.cuda.is_available(), of_teacher)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = each * local
    free = memory.host_free_bytes()
    if needed <= free:
        return None
    return (
        f"{local} rank(s) on this machine will hold about {gib(needed)} of host memory, {gib(free)} are free: the "
        f"system may kill them without a word (torchrun's exitcode -9). {'; '.join(HOST_MEMORY)}"
    )


def check_bf16_units(cfg: Config) -> str | None:
    """A warning where a run in bf16 is on a CPU that computes no bf16; else None."""
    if torch.cuda.is_available() or cfg.model.dtype != "bf16" or cpu_backend.has_bf16_units():
        return None
    return f"{versions.NO_BF16_UNITS}; {versions.NO_BF16_REMEDY}"


def build_process_groups(cfg: Config) -> None:
    """Build Megatron's process groups and run one all-reduce in each. Raises RankError."""
    timeout_s = checks.group_timeout_s(cfg)
    bridge.init_model_parallel(cfg.parallel, cfg.seed, timeout_s)
    try:
        preflight.check_groups(bridge.process_groups(), min(timeout_s, preflight.GROUP_CHECK_S))
    except ValueError as error:
        raise RankError(str(error)) from None
