"""Memory of a step's phases, and what is free: torch's on GPUs, on the CPU the process's resident memory."""

import re
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from grpo.parts.base.processes import host_free_bytes

GIB = 2**30
PHASES = ("wait", "rollout", "reward", "gather", "sleep", "logprob", "train", "sync", "save")  # of a step, in order
MEASURED = [phase for phase in PHASES if phase not in ("wait", "gather", "sleep")]  # the rest hold little
AFTER_SLEEP = "logprob"  # the first phase after vLLM has gone to sleep


class Meter:
    """The peak of memory in each phase of a step, in GiB, on this rank."""

    def __init__(self):
        self.engine = 0.0  # GiB of a GPU that vLLM keeps allocated, even while it sleeps
        self.largest = 0.0  # since the process began
        self.resets = True  # whether a peak is that of its phase alone
        self.start_step()

    def start_step(self):
        """Forget the phases of the step before."""
        self.peaks = dict.fromkeys(PHASES, 0.0)
        self.free_asleep = 0.0

    def leave_out_engine(self):
        """Leave out what is allocated on the GPU now, when vLLM has just started: its weights and KV cache."""
        if torch.cuda.is_available():
            self.engine = torch.cuda.memory_allocated() / GIB

    def enter(self, phase):
        """Start the peak of a phase."""
        self.largest = max(self.largest, peak_gb() - self.engine)  # between the phases
        if phase == AFTER_SLEEP and torch.cuda.is_available():
            self.free_asleep = torch.cuda.mem_get_info()[0] / GIB
        self.resets = reset_peak()

    def leave(self, phase):
        """Note the peak of a phase at its end. If a phase comes twice in a step, the larger peak counts."""
        peak = peak_gb() - self.engine
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), peak)
        self.largest = max(self.largest, peak)

    def numbers(self) -> dict[str, float | None]:
        """The metrics mem/* of the step: the maximum over ranks, of free memory the minimum. All ranks call this."""
        mine = {f"mem/{phase}_peak_gb": self.peaks[phase] for phase in MEASURED}
        mine["mem/peak_gb"] = self.largest
        mine["mem/free_asleep_gb"] = -self.free_asleep  # negative, so that the maximum is the minimum
        mine["mem/host_gb"] = psutil.Process().memory_info().rss / GIB
        mine["mem/host_free_gb"] = -host_free_bytes() / GIB

        values = torch.tensor(list(mine.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        found = dict(zip(mine, values.abs().tolist(), strict=True))

        if not torch.cuda.is_available():
            found["mem/free_asleep_gb"] = None
        if not self.resets:
            found |= dict.fromkeys(f"mem/{phase}_peak_gb" for phase in MEASURED)
        return found


def peak_gb() -> float:
    """The most that the process has held since `reset_peak`, or since it began, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    status = Path("/proc/self/status").read_text()
    # The first of the two is the peak. A system without it has only what is held now.
    peak = re.search(r"Vm(?:HWM|RSS):\s*(\d+) kB", status)
    return int(peak[1]) / 2**20


def reset_peak() -> bool:
    """Set the peak to what is held now. False if the system does not allow it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # some containers
        return False
    return True
