"""Memory of a step's phases, and what is free: torch's on GPUs, on the CPU the process's resident memory."""

import re
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

GIB = 2**30
PHASES = ("rollout", "reward", "logprob", "train", "sync", "save")  # of every step
AFTER_SLEEP = "logprob"  # the first phase after vLLM has gone to sleep


class Meter:
    """Memory of the phases of a step, in GiB, on this rank: what is held after each, and the peak within it."""

    def __init__(self):
        self.engine = 0.0  # GiB of a GPU that vLLM keeps allocated, even while it sleeps
        self.largest = 0.0  # since the process began
        self.resets = True  # peaks are those of a phase
        self.start_step()

    def start_step(self) -> None:
        """Forget the phases of the step before."""
        self.held: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self.free_asleep = 0.0

    def leave_out_engine(self) -> None:
        """Leave out what is allocated on the GPU now, when vLLM has just started: its weights and KV cache."""
        if torch.cuda.is_available():
            self.engine = used_gb()[0]

    def enter(self, phase: str) -> None:
        """Start the peak of a phase."""
        self.largest = max(self.largest, used_gb()[1] - self.engine)
        if phase == AFTER_SLEEP and torch.cuda.is_available():
            self.free_asleep = torch.cuda.mem_get_info()[0] / GIB
        self.resets = reset_peak()

    def leave(self, phase: str) -> None:
        """Note the memory of a phase at its end; of one that comes twice in a step the last, and the larger peak."""
        self.held[phase], peak = (gb - self.engine for gb in used_gb())
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), peak)
        self.largest = max(self.largest, peak)

    def numbers(self) -> dict[str, float | None]:
        """The metrics mem/* of the step: the maximum over ranks, of free memory the minimum. All ranks call this."""
        mine = {
            **{f"mem/{phase}_gb": self.held.get(phase, 0.0) for phase in PHASES},
            **{f"mem/{phase}_peak_gb": self.peaks.get(phase, 0.0) for phase in PHASES},
            "mem/peak_gb": self.largest, "mem/free_asleep_gb": -self.free_asleep,
            "mem/host_gb": resident_gb()[0], "mem/host_free_gb": -host_free_bytes() / GIB,
        }  # fmt: skip
        values = torch.tensor([*mine.values()], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        found = dict(zip(mine, values.abs().tolist(), strict=True))
        if not torch.cuda.is_available():
            found["mem/free_asleep_gb"] = None
        if not self.resets:
            found |= dict.fromkeys(f"mem/{phase}_peak_gb" for phase in PHASES)
        return found


def used_gb() -> tuple[float, float]:
    """What the trainer holds now, and the most since `reset_peak`, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
    return resident_gb()


def reset_peak() -> bool:
    """Set the peak to what is held now; False where the system does not allow it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # some containers
        return False
    return True


def resident_gb() -> tuple[float, float]:
    """Resident memory of this process now, and the most since it began or `reset_peak`, in GiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = fields["VmRSS"]
    return tuple(int(field.split()[0]) / 2**20 for field in (now, fields.get("VmHWM", now)))


def host_free_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What processes may still take of the host's memory and their cgroups' (version 2); cached files count as free."""
    free = [psutil.virtual_memory().available]
    found = re.search("^0::/(.*)$", own.read_text(), re.MULTILINE) if own.exists() else None
    folders = [cgroups / found[1], *(cgroups / found[1]).parents] if found else []
    for folder in folders:
        limit = folder / "memory.max"
        if limit.exists() and limit.read_text().strip() != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free.append(int(limit.read_text()) - used)
    return max(min(free), 0)
