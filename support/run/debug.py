"""--debug: the variables that make torch and NCCL log more, set before they start, and the seeds of a run."""

import os

import torch
import torch.distributed as dist

from config import Config
from support.base import ranks
from support.data.prompts import sampling_seed

# A variable that the user has set stays. CUDA_LAUNCH_BLOCKING is not among them: it can hang where several process
# groups of NCCL are in use.
VARIABLES = {
    "NCCL_DEBUG": "INFO",  # how ranks connect, and why they do not
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # ranks whose collectives differ raise an error instead of hanging
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the last collectives of a rank, written to a file on a timeout
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}


def turn_on(cfg: Config) -> None:
    """Set the variables and enable anomaly detection. Rank 0 prints the variables and the seeds.

    Call it before process groups are built, which read the variables.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()  # again: torch has read it when it was imported
    torch.autograd.set_detect_anomaly(True)
    if not ranks.is_first_rank():
        return
    for name in VARIABLES:
        print(f"debug:   {name}={os.environ[name]}")
    print("debug:   anomaly detection is on: a NaN in the backward pass ends the run and shows its forward operation")
    seeds = ", ".join(str(sampling_seed(cfg.seed, 1, group)) for group in range(3))
    print(f"debug:   seed={cfg.seed}; step 1 samples its first three groups with the seeds {seeds}", flush=True)
