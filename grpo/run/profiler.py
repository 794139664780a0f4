"""torch.profiler over a window of steps of a rank; the phases of the clock are ranges in its trace."""

from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from config import ProfileConfig
from grpo.parts.base import ranks


class Profiler:
    """A rank that `profile` names makes one. If its file cannot be written, it warns, and the run goes on."""

    def __init__(self, folder: Path, profile: ProfileConfig, rank: int):
        self.folder = folder
        self.profile = profile
        self.rank = rank  # kept: the process group may be gone when the file is written
        self.torch: torch.profiler.profile | None = None  # while it records

    def start_step(self, step):
        """Record the step that begins, if it is in the window. The first one after the window writes the file."""
        if step > self.profile.stop:
            self.close()
        elif self.torch:
            self.torch.step()
        elif step >= self.profile.start:
            self.torch = torch.profiler.profile(schedule=lambda step: ProfilerAction.RECORD)  # so a step is a range
            self.torch.step_num = step
            self.torch.start()

    def close(self):
        """Write the file, if anything was recorded."""
        if not self.torch:
            return
        self.torch.stop()
        path = self.folder / f"steps_{self.profile.start}_{self.torch.step_num}_rank{self.rank}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.torch.export_chrome_trace(str(path))
            if self.rank == min(self.profile.ranks or [0]):
                print(f"profile: {path}, for https://ui.perfetto.dev", flush=True)
        except (OSError, RuntimeError) as error:
            ranks.say(f"warning: profile: {error}")
        self.torch = None
