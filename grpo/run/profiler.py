"""torch.profiler over a window of steps of a rank; the phases of the clock are ranges in its trace."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction

from config import ProfileConfig
from grpo.parts.base import ranks


class Profiler:
    """A rank makes one where `profile` has it. A file that cannot be written is a warning and does not end the run."""

    def __init__(self, folder: Path, profile: ProfileConfig):
        self.folder = folder
        self.profile = profile
        self.torch: torch.profiler.profile | None = None  # while it records

    def start_step(self, step: int) -> None:
        """A step begins, which is recorded if it is in the window; the first one after it writes the files."""
        if step > self.profile.stop:
            self.close()
        elif self.torch:
            self.torch.step()
        elif step >= self.profile.start:
            self.torch = torch.profiler.profile(schedule=lambda step: ProfilerAction.RECORD)  # so a step is a range
            self.torch.step_num = step
            self.torch.start()

    def close(self) -> None:
        if not self.torch:
            return
        self.torch.stop()
        path = self.folder / f"steps_{self.profile.start}_{self.torch.step_num}_rank{dist.get_rank()}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.torch.export_chrome_trace(str(path))
            if dist.get_rank() == min(self.profile.ranks or [0]):
                print(f"profile: {path}, for https://ui.perfetto.dev", flush=True)
        except (OSError, RuntimeError) as error:
            ranks.say(f"warning: profile: {error}")
        self.torch = None
