"""The timeline of a window of steps: which rank did what when, as a trace for Perfetto or chrome://tracing; on request
beside it what torch's profiler saw, and a snapshot of GPU memory. Knows torch.distributed, no trainer.

output_dir/traces/steps_3_5.json            phases, a track a rank
output_dir/traces/torch_3_5_rank0.json.gz   torch.profiler's trace of a rank
output_dir/traces/memory_3_5_rank0.pickle   for https://pytorch.org/memory_viz
"""

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from config import ProfileConfig
from support import ranks

MEETINGS = 9  # by which the clocks of ranks are told apart
MEMORY_EVENTS = 1_000_000  # of allocations, at most, in a snapshot


@dataclass
class Span:
    """A stretch of time on one rank, in seconds of its clock. Phases are disjoint, and those of a step fill the span
    "step"; "eval" holds phases too. `number` counts a phase within its step: of "train" it is the update."""

    name: str
    step: int
    number: int
    start: float
    end: float


class Timeline:
    """What one rank did in the steps of a window, which is empty by default; every rank makes one.

    Files that cannot be written cost a warning, not the run.
    """

    def __init__(self, folder: Path = Path(), profile: ProfileConfig | None = None, last_step: int = 0):
        self.folder, self.profile = folder, profile or ProfileConfig()
        profile = self.profile
        self.window = range(profile.start, min(profile.stop, last_step) + 1) if profile.start else range(0)
        self.step: int | None = None  # which is recorded
        self.spans: list[Span] = []
        self.numbers = Counter()
        self.torch_profiler = None

    def start_step(self, step: int) -> None:
        """A step begins; in the window, what it does is recorded until the window closes."""
        if step in self.window:
            if self.step is None:
                self._open()
            self.step, self.numbers = step, Counter()

    def add(self, name: str, start: float, end: float) -> None:
        """This rank did so between two readings of time.perf_counter()."""
        if self.step is not None:
            self.numbers[name] += 1
            self.spans.append(Span(name, self.step, self.numbers[name], start, end))

    def end_step(self) -> None:
        """A step has ended, on all ranks; after the last of the window, close it."""
        if self.step is not None and self.step == self.window[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if anything. All ranks call this at the same place."""
        if self.step is None:
            return
        rank, name = dist.get_rank(), f"{self.spans[0].step}_{self.step}" if self.spans else "0_0"
        try:
            self._stop_torch(name, rank)
        except (OSError, RuntimeError) as error:
            ranks.say(f"warning: profile: rank {rank} wrote no file for torch.profiler or memory: {error}")
        tracks, offsets = ranks.gather(self.spans), clock_offsets()
        self.step, self.spans = None, []
        if rank:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"steps_{name}.json"
            path.write_text(json.dumps(chrome_trace(tracks, offsets, self.profile.ranks)))
            print(f"timeline: {path}, for https://ui.perfetto.dev", flush=True)
        except OSError as error:
            ranks.say(f"warning: profile: no timeline was written: {error}")

    def _chosen(self) -> bool:
        return self.profile.ranks is None or dist.get_rank() in self.profile.ranks

    def _open(self) -> None:
        if self.profile.torch and self._chosen():
            cuda = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.torch_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda])
            self.torch_profiler.start()
        if self.profile.memory and self._chosen():
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def _stop_torch(self, name: str, rank: int) -> None:
        """End what _open began, and write its files."""
        if not self._chosen() or not (self.torch_profiler or self.profile.memory):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.torch_profiler is not None:
            profiler, self.torch_profiler = self.torch_profiler, None
            profiler.stop()
            profiler.export_chrome_trace(str(self.folder / f"torch_{name}_rank{rank}.json.gz"))
        if self.profile.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{name}_rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def clock_offsets() -> list[float]:
    """Of each rank, how far its time.perf_counter() is ahead of rank 0's, in seconds, the same on every rank.

    Machines count from moments of their own. Ranks leave a collective at about the same moment: the median over a few.
    """
    readings = []
    for _ in range(MEETINGS):
        ranks.on_any_rank(False)
        readings.append(time.perf_counter())
    everywhere = ranks.gather(readings)
    return [
        statistics.median(mine - first for mine, first in zip(read, everywhere[0], strict=True)) for read in everywhere
    ]


# ---------------------------------------------------------------- pure functions


def with_waits(tracks: list[list[Span]]) -> list[list[Span]]:
    """The spans of each rank, on one clock, each "gather" parted where the last rank has come: "wait" before that.

    Nobody leaves a gather before all have come, so what is before is waiting, and what is after the gather itself.
    """
    last = {}
    for span in (span for spans in tracks for span in spans if span.name == "gather"):
        last[span.step, span.number] = max(span.start, last.get((span.step, span.number), span.start))
    parted = []
    for spans in tracks:
        parted.append([])
        for span in spans:
            if span.name != "gather":
                parted[-1].append(span)
                continue
            came = min(last[span.step, span.number], span.end)
            parted[-1] += [Span("wait", span.step, span.number, span.start, came)] * (came > span.start)
            parted[-1] += [Span("gather", span.step, span.number, came, span.end)]
    return parted


def chrome_trace(tracks: list[list[Span]], offsets: list[float], chosen: list[int] | None) -> dict:
    """The spans of each rank as a trace of complete events, in the JSON format that Chrome and Perfetto read; µs.

    Source: "Trace Event Format", Google (2016). A rank is a thread; a span in another one is drawn below it.
    """
    tracks = [
        [Span(s.name, s.step, s.number, s.start - offset, s.end - offset) for s in spans]
        for spans, offset in zip(tracks, offsets, strict=True)
    ]
    zero = min((span.start for spans in tracks for span in spans), default=0.0)
    events = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "train_grpo"}}]
    for rank, spans in enumerate(with_waits(tracks)):
        if chosen is not None and rank not in chosen:
            continue
        place = {"pid": 1, "tid": rank + 1}  # 0 is the idle thread, to Perfetto
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": rank}})
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            start, end = (round((moment - zero) * 1e9) for moment in (span.start, span.end))  # ns: whole numbers
            name = f"step {span.step}" if span.name == "step" else span.name
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            args = {"step": span.step, "number": span.number}
            events.append({"ph": "X", "cat": "phase", "name": name, **times, **place, "args": args})
    return {"displayTimeUnit": "ms", "traceEvents": events}
