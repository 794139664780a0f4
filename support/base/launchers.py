"""The environment variables of torchrun, derived from those that srun and mpirun set."""

import math
import re
import zlib
from collections.abc import Mapping

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
# The names of the first four at other launchers; the first launcher that sets all of them is used. mpirun comes before
# srun: in a Slurm job it may start its daemons by srun, and its ranks then inherit their SLURM_PROCID.
MPI = [
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray's PALS
]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORT = "29500"  # torchrun's
PORTS = range(10000, 30000)  # above those of services, below those that Linux gives to clients


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of RANK_NAMES and MASTER_NAMES that `env` lacks and that follow from it; {} where it has no rank.

    Variables that are set stay. Unknown remain MASTER_ADDR for ranks on several machines outside Slurm, and
    LOCAL_WORLD_SIZE for such ranks that were started by hand.
    """
    launched = by_mpirun(env) or by_srun(env)
    if any(name in launched and env.get(name, launched[name]) != launched[name] for name in ("RANK", "WORLD_SIZE")):
        launched = {}  # torchrun under srun: other ranks than those of srun
    known = launched | {name: env[name] for name in (*RANK_NAMES, *MASTER_NAMES) if name in env}
    if not known.keys() >= {"RANK", "WORLD_SIZE"}:
        return {}
    variables = {"MASTER_PORT": port(env)}
    size = known["WORLD_SIZE"]
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if known.get("MASTER_ADDR") in LOOPBACK or size in ("1", known.get("LOCAL_WORLD_SIZE")):  # one machine
        variables |= {"LOCAL_RANK": known["RANK"], "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK[1]}
    elif "LOCAL_RANK" not in known:  # one container a rank, as Kubernetes operators start them
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    elif launched and hosts:
        variables["MASTER_ADDR"] = first_host(hosts)
    return {name: value for name, value in (variables | known).items() if name not in env}


def by_mpirun(env: Mapping[str, str]) -> dict[str, str]:
    """The variables RANK_NAMES as mpirun sets them, {} if it did not start this process."""
    for names in MPI:
        if all(name in env for name in names):
            return dict(zip(RANK_NAMES, (env[name] for name in names), strict=True))
    return {}


def by_srun(env: Mapping[str, str]) -> dict[str, str]:
    """The variables RANK_NAMES as srun sets them, {} if it did not start this process."""
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS")
    # A batch script itself has SLURM_PROCID=0 too: what it starts without srun is no rank.
    in_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    if in_script or not size or "SLURM_PROCID" not in env:
        return {}
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    spread = str(math.ceil(int(size) / int(env.get("SLURM_NNODES", 1))))  # evenly, where srun says no more
    local_sizes = tasks_of_nodes(next((env[name] for name in names if env.get(name)), spread))
    local_size = local_sizes[min(int(env.get("SLURM_NODEID", 0)), len(local_sizes) - 1)]
    values = (env["SLURM_PROCID"], size, env.get("SLURM_LOCALID", "0"), str(local_size))
    return dict(zip(RANK_NAMES, values, strict=True))


def tasks_of_nodes(text: str) -> list[int]:
    """Slurm's "2(x3),1", tasks of each node, as [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts, as `scontrol show hostnames` has it: "gpu01" of "gpu[01-04,7],cpu3"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def port(env: Mapping[str, str]) -> str:
    """A port that all ranks of a job compute, and another job most likely does not."""
    step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 0)}" if "SLURM_JOB_ID" in env else ""
    job = env.get("PMIX_NAMESPACE") or step
    return str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]) if job else DEFAULT_PORT
