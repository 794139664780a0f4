"""The timeline of a window of steps: the phases of every rank, as a trace for Perfetto or chrome://tracing.

On request also the trace of torch's profiler and a snapshot of GPU memory. Knows torch.distributed, no trainer.

output_dir/traces/steps_3_5.json            phases, a track a rank
output_dir/traces/torch_3_5_rank0.json.gz   torch.profiler's trace of a rank
output_dir/traces/memory_3_5_rank0.pickle   for https://pytorch.org/memory_viz
"""

import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from config import ProfileConfig
from support.base import ranks

MAX_MEMORY_EVENTS = 1_000_000  # allocations in a snapshot, at most


class Timeline:
    """The phases of one rank in a window of steps; every rank makes one, where profile.start is above 0.

    A file that cannot be written is a warning and does not end the run. Source: "Trace Event Format", Google (2016).
    """

    def __init__(self, folder: Path, profile: ProfileConfig, last_step: int):
        self.folder = folder
        self.profile = profile
        self.rank = dist.get_rank()
        self.track = {"pid": 1, "tid": self.rank + 1}  # to Perfetto, thread 0 is the idle one
        self.drawn = profile.ranks is None or self.rank in profile.ranks
        self.window = range(profile.start, min(profile.stop, last_step) + 1)
        self.step: int | None = None  # the step that is recorded
        self.events: list[dict] = []  # of the window
        self.zero = 0.0  # this rank's clock as the window begins
        self.torch_profiler = None

    def start_step(self, step: int) -> None:
        """A step begins; if it is in the window, its phases are recorded."""
        if step not in self.window:
            return
        if self.step is None:
            ranks.on_any_rank(False)  # aligns the clocks: ranks leave a collective at about the same time
            self.zero = time.perf_counter()
            if self.drawn and self.profile.torch:
                self.torch_profiler = torch.profiler.profile()
                self.torch_profiler.start()
            if self.drawn and self.profile.memory:
                torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self.step = step

    def add(self, name: str, start: float, end: float) -> None:
        """Record a phase of this rank between two readings of time.perf_counter(). "step" and "eval" contain others."""
        if self.step is None:
            return
        first, last = (round((moment - self.zero) * 1e9) for moment in (start, end))  # ns: whole numbers
        self.events.append({
            "ph": "X", **self.track, "name": f"step {self.step}" if name == "step" else name,
            "ts": first / 1000, "dur": (last - first) / 1000,  # µs
            "args": {"step": self.step},
        })  # fmt: skip

    def end_step(self, start: float, end: float) -> None:
        """Record a step; the last one of the window writes the files."""
        self.add("step", start, end)
        if self.step == self.window[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded spans, if any. All ranks call this at the same place."""
        if self.step is None:
            return
        name = f"{self.window[0]}_{self.step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.torch_profiler is not None:
                self.torch_profiler.stop()
                self.torch_profiler.export_chrome_trace(str(self.folder / f"torch_{name}_rank{self.rank}.json.gz"))
            if self.drawn and self.profile.memory:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{name}_rank{self.rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            ranks.say(f"warning: profile: no file for torch.profiler or memory was written: {error}")
        self.events.sort(key=lambda event: (event["ts"], -event["dur"]))
        title = {"ph": "M", "name": "thread_name", **self.track, "args": {"name": f"rank {self.rank}"}}
        tracks = ranks.gather([title, *self.events] if self.drawn else [])
        self.step = None
        if self.rank:
            return
        path = self.folder / f"steps_{name}.json"
        try:
            path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(itertools.chain(*tracks))}))
            print(f"timeline: {path}, for https://ui.perfetto.dev", flush=True)
        except OSError as error:
            ranks.say(f"warning: profile: no timeline was written: {error}")
