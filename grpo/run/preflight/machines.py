"""What only the machines of a run can tell: torchrun, GPUs, disk, host memory, and whether ranks reach each other.

Each check runs before weights are loaded and raises UserError. A failure between ranks is a RankError.
"""

import os
import shutil
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from config import RankError, UserError
from grpo.parts.base import files, hf_folder, processes, ranks, versions
from grpo.parts.base.read_config import dotted_items
from grpo.parts.base.require import require
from grpo.parts.base.versions import gib
from grpo.run.preflight import costs
from grpo.run.preflight.explain import HOST_MEMORY
from grpo.step import teacher

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLOCKS_APART_S = 1.0  # of two machines: beyond it their logs are hard to compare
GROUP_CHECK_S = 120.0  # for the first all-reduce of a process group
ON_GPUS_ONLY = ("quantization", "enable_expert_parallel", "enable_sleep_mode", "enable_chunked_prefill")


def check_start(cfg):
    """What a dry run does without: torchrun, and a GPU for each of its processes."""
    missing = [name for name in OF_TORCHRUN if name not in os.environ]
    require(
        not missing,
        "start with torchrun --nproc_per_node=N train_grpo.py ..., or add --dry-run to check only; "
        f"{', '.join(missing)} are not set; docs/train_grpo.sbatch is for Slurm",
    )

    if torch.cuda.is_available():
        check_gpus(cfg)
    else:
        check_without_gpu(cfg)


def check_gpus(cfg):
    """Each process here has a GPU that can do what the run needs, and Triton has what it compiles with."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    require(
        local <= gpus,
        f"--nproc_per_node={local}, but this process sees {gpus} GPU(s), and each needs one. If srun binds GPUs to "
        f"tasks, add --gpu-bind=none to it; with MIG use {versions.MIG_REMEDY}",
    )

    require(
        not cfg.rollout.exact or torch.cuda.get_device_capability() >= (9, 0),
        "rollout.exact=true needs GPUs of compute capability 9.0: below, vLLM replaces matrix products without a "
        f"gradient in all of this process; this is {torch.cuda.get_device_name(0)}: use rollout.exact=false",
    )

    missing = [name for name, path in versions.build_tools().items() if path is None]
    require(not missing, f"no {', no '.join(missing)}, which vLLM's kernels need. {versions.BUILD_TOOLS_REMEDY}")


def check_without_gpu(cfg):
    """No GPU is left unused by mistake (vLLM for CPUs means it is not), no library is missing, no key needs a GPU."""
    require(
        versions.driver() is None or versions.version_of("vllm") is None,
        "torch sees no GPU, though NVIDIA's driver and vLLM for GPUs are here: python -m tools.doctor says why",
    )

    missing = versions.missing_libraries()
    require(missing is None, missing)

    for name in ON_GPUS_ONLY:
        value = cfg.rollout.vllm.get(name)
        require(not value, f"rollout.vllm.{name}={value}: works on GPUs only, and there is no GPU here; leave it out")


def check_ranks(config: dict, key, data: dict[str, str]):
    """Configuration, data and code are the same on all ranks. The error, on every rank, says what differs and where.

    `config` is {section: {key: value}}. `data` is the fingerprint of the prompts of `key`: another machine may have
    other files, another tokenizer, or a function that changes them. Prints which ranks are on which machine.
    """
    further = {f"{name} of {key}": data[name] for name in ("rows", "token ids")}
    further["commit"] = versions.versions()["commit"]
    own = {name: str(value) for name, value in dotted_items(config | further)}
    machines, tables = zip(*ranks.gather((socket.gethostname(), own)), strict=True)

    lines = []
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "not set") for table in tables]
        if len(set(values)) > 1:
            lines.append(f"  {name}: {ranks.describe(values, machines)}")
    require(
        not lines,
        "the ranks have different configurations; start every machine with the same files and overrides:\n"
        + "\n".join(lines),
    )

    if dist.get_rank() == 0 and len(set(machines)) > 1:
        print(f"machines: {ranks.describe(machines)}", flush=True)


def check_clocks():
    """A warning if the clocks of machines differ. All ranks call this together, just after another collective."""
    clocks = {}
    for machine, now in ranks.gather((socket.gethostname(), time.time())):
        clocks[machine] = min(now, clocks.get(machine, now))  # a busy rank can only be late

    behind, ahead = min(clocks, key=clocks.get), max(clocks, key=clocks.get)
    apart = clocks[ahead] - clocks[behind]
    if apart > CLOCKS_APART_S and dist.get_rank() == 0:
        print(f"warning: the clock of {ahead} is {apart:.1f} s ahead of {behind}'s: synchronise them (NTP)", flush=True)


def check_first_host(cfg):
    """Versions (a warning), the output folder, and the room on its disk."""
    for warning in versions.check_versions():
        print(f"warning: {warning}", flush=True)

    folder = Path(cfg.output_dir)
    check_writable(folder)
    free = shutil.disk_usage(files.nearest_existing(folder)).free
    needed = costs.disk_bytes(cfg, hf_folder.count_weights(cfg.model.path))
    require(
        free >= needed,
        f"output_dir={folder}: its disk has {gib(free)} free, a checkpoint and an export take {gib(needed)}; make "
        "room, or choose another output_dir",
    )


def check_writable(folder: Path):
    """Files can be written in `folder`, or in the nearest folder above it that exists."""
    error = files.try_to_write(folder)
    if error:
        raise UserError(
            f"output_dir={folder}: cannot write in {files.nearest_existing(folder)} ({error.strerror}); choose an "
            "output_dir that this user may write to, on a disk with room"
        )


def check_host_memory(cfg):
    """A warning if this machine has too little memory for its ranks."""
    weights = hf_folder.count_weights(cfg.model.path)
    other = teacher.another(cfg)
    of_teacher = hf_folder.count_weights(other) if other else 0
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    needed = local * costs.host_bytes(cfg, weights, dist.get_world_size(), on_gpu, of_teacher)
    free = processes.host_free_bytes()
    if needed > free:
        ranks.say(
            f"warning: {local} rank(s) on this machine will hold about {gib(needed)} of host memory, {gib(free)} are "
            f"free: the system may kill them without a word (torchrun's exitcode -9). {HOST_MEMORY}"
        )


def check_groups(groups: dict[str, dist.ProcessGroup | None], timeout_s: float):
    """One all-reduce in each process group, on all ranks in the same order. A group is None if this rank is not in it.

    Raises RankError if an all-reduce fails, gives a wrong sum or takes more than `timeout_s`. With GPUs it prints the
    error and ends the process instead: a thread may hang in NCCL, and an ordinary exit could wait for it.
    """
    for name, group in groups.items():
        problem = group and try_all_reduce(group, timeout_s)
        if problem:
            members = ", ".join(map(str, dist.get_process_group_ranks(group)))
            error = RankError(
                f"the all-reduce of group {name} (ranks {members}) {problem}; likely a rank that died or never "
                "started, a network interface that the nodes do not share (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or "
                "a firewall between the nodes; NCCL_DEBUG=INFO says more"
            )
            if torch.cuda.is_available():
                ranks.say(f"error: {error}")
                os._exit(1)
            raise error


def try_all_reduce(group: dist.ProcessGroup, timeout_s: float) -> str | None:
    """What is wrong with an all-reduce in a group. None if it gives the sum."""
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    value = torch.ones(1, device="cuda" if on_gpu else "cpu")
    found = f"nothing within {timeout_s:g} s"

    def reduce():
        nonlocal found
        try:
            dist.all_reduce(value, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
            found = value.item()
        except Exception as error:
            found = str(error).splitlines()[0]

    thread = threading.Thread(target=reduce, daemon=True)  # NCCL connects inside the call, before its timeout counts
    thread.start()
    thread.join(timeout_s + 1)
    return None if found == group.size() else f"gave {found}, not {group.size()}"
