"""The environment variables of torchrun, derived from those that srun and mpirun set."""

import re
import zlib
from collections.abc import Mapping

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
# The names of the first four at mpirun: Open MPI; MPICH and Intel MPI. They come before srun's: in a Slurm job mpirun
# may start its daemons by srun, and its ranks then inherit their SLURM_PROCID.
MPI = [
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORT = "29500"  # torchrun's
PORTS = range(10000, 30000)  # above those of services, below those that Linux gives to clients


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of RANK_NAMES and MASTER_NAMES that `env` lacks and that follow from it; {} where it has no rank.

    Variables that are set stay. docs/machines.md says which the user has to set.
    """
    launched = by_launcher(env)
    if any(name in launched and env.get(name, launched[name]) != launched[name] for name in ("RANK", "WORLD_SIZE")):
        launched = {}  # torchrun under srun: other ranks than those of srun
    known = launched | {name: env[name] for name in (*RANK_NAMES, *MASTER_NAMES) if name in env}
    if not known.keys() >= {"RANK", "WORLD_SIZE"}:
        return {}
    variables = {"MASTER_PORT": port(env)}
    size = known["WORLD_SIZE"]
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if known.get("MASTER_ADDR") in LOOPBACK or size in ("1", known.get("LOCAL_WORLD_SIZE")):  # one machine
        variables |= {"LOCAL_RANK": known["RANK"], "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK[1]}
    elif "LOCAL_RANK" not in known:  # one container a rank, as Kubernetes operators start them
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    elif launched and hosts:
        # The first host, as `scontrol show hostnames` has it: "gpu01" of "gpu[01-04,7],cpu3".
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)[0]
        variables["MASTER_ADDR"] = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    return {name: value for name, value in (variables | known).items() if name not in env}


def by_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The variables RANK_NAMES as mpirun or srun sets them, {} if neither started this process."""
    for names in MPI:
        if all(name in env for name in names):
            return {ours: env[name] for ours, name in zip(RANK_NAMES, names, strict=True)}
    if "SLURM_STEP_NUM_TASKS" not in env:  # a batch script has a SLURM_PROCID too, but is no step's rank
        return {}
    tasks = []  # of each node: Slurm's "2(x3),1" is [2, 2, 2, 1]
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        tasks += [count] * int(times or 1)
    values = (env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"], tasks[int(env["SLURM_NODEID"])])
    return dict(zip(RANK_NAMES, values, strict=True))


def port(env: Mapping[str, str]) -> str:
    """A port that all ranks of a job compute, and another job most likely does not."""
    step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 0)}" if "SLURM_JOB_ID" in env else ""
    job = env.get("PMIX_NAMESPACE") or step
    return str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]) if job else DEFAULT_PORT
