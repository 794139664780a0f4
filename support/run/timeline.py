"""The timeline of a window of steps: the phases of every rank, as a trace for Perfetto or chrome://tracing.

On request also the trace of torch's profiler and a snapshot of GPU memory. Knows torch.distributed, no trainer.

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
from support.base import ranks

CLOCK_SYNC_BARRIERS = 9  # barriers whose times give the clock offsets of ranks
MAX_MEMORY_EVENTS = 1_000_000  # allocations in a snapshot, at most


@dataclass
class Span:
    """A span of time on one rank, in seconds of its clock.

    Phases are disjoint, and those of a step fill the span "step"; "eval" contains phases too. `number` counts the spans
    of a phase within its step: for "train" it is the update.
    """

    name: str
    step: int
    number: int
    start: float
    end: float


class Timeline:
    """The spans of one rank in a window of steps; every rank makes one, where profile.start is above 0.

    A file that cannot be written is a warning and does not end the run.
    """

    def __init__(self, folder: Path, profile: ProfileConfig, last_step: int):
        self.folder = folder
        self.profile = profile
        self.window = range(profile.start, min(profile.stop, last_step) + 1)
        self.step: int | None = None  # the step that is recorded
        self.spans: list[Span] = []
        self.numbers = Counter()
        self.torch_profiler = None

    def start_step(self, step: int) -> None:
        """A step begins; if it is in the window, its phases are recorded."""
        if step in self.window:
            if self.step is None:
                self._open()
            self.step, self.numbers = step, Counter()

    def add(self, name: str, start: float, end: float) -> None:
        """Record a phase of this rank, between two readings of time.perf_counter()."""
        if self.step is not None:
            self.numbers[name] += 1
            self.spans.append(Span(name, self.step, self.numbers[name], start, end))

    def end_step(self, start: float, end: float) -> None:
        """Record a step that has ended on all ranks, and as "other" the time between its phases.

        After the last step of the window, write the files.
        """
        if self.step is None:
            return
        last_end = start
        for span in [span for span in self.spans if span.step == self.step]:
            self.add("other", last_end, span.start)
            last_end = span.end
        self.add("other", last_end, end)
        self.add("step", start, end)
        if self.step == self.window[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded spans, if any. All ranks call this at the same place."""
        if self.step is None:
            return
        rank = dist.get_rank()
        name = f"{self.spans[0].step}_{self.step}" if self.spans else "0_0"
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

    def _is_profiled(self) -> bool:
        """Whether torch's profiler and memory snapshots are asked for on this rank."""
        return self.profile.ranks is None or dist.get_rank() in self.profile.ranks

    def _open(self) -> None:
        """Start torch's profiler and the recording of allocations, where they are asked for."""
        if self.profile.torch and self._is_profiled():
            cuda = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.torch_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda])
            self.torch_profiler.start()
        if self.profile.memory and self._is_profiled():
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    def _stop_torch(self, name: str, rank: int) -> None:
        """Stop what _open has started, and write its files."""
        if not self._is_profiled() or not (self.torch_profiler or self.profile.memory):
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
    """For each rank, how far its time.perf_counter() is ahead of rank 0's, in seconds; the same on every rank.

    Ranks leave a collective at about the same time, so the difference of their clocks right after it is the offset.
    This is the median over CLOCK_SYNC_BARRIERS of them.
    """
    readings = []
    for _ in range(CLOCK_SYNC_BARRIERS):
        ranks.on_any_rank(False)
        readings.append(time.perf_counter())
    everywhere = ranks.gather(readings)
    return [
        statistics.median(own - first for own, first in zip(times, everywhere[0], strict=True)) for times in everywhere
    ]


# ---------------------------------------------------------------- pure functions


def split_waits(tracks: list[list[Span]]) -> list[list[Span]]:
    """The spans of each rank, on one clock, each "gather" split where the last rank arrives: "wait" before that.

    No rank leaves a gather before all have arrived, so the time before is waiting, and the time after it the gather.
    """
    last_arrival = {}
    for spans in tracks:
        for span in spans:
            if span.name == "gather":
                key = span.step, span.number
                last_arrival[key] = max(span.start, last_arrival.get(key, span.start))
    result = []
    for spans in tracks:
        split = []
        for span in spans:
            if span.name != "gather":
                split.append(span)
                continue
            arrival = min(last_arrival[span.step, span.number], span.end)
            if arrival > span.start:
                split.append(Span("wait", span.step, span.number, span.start, arrival))
            split.append(Span("gather", span.step, span.number, arrival, span.end))
        result.append(split)
    return result


def chrome_trace(tracks: list[list[Span]], offsets: list[float], chosen: list[int] | None) -> dict:
    """The spans of each rank as a trace of complete events, in the JSON format that Chrome and Perfetto read; µs.

    `chosen`: the ranks that are drawn, None for all. A rank is a thread; a span inside another is drawn below it.
    Source: "Trace Event Format", Google (2016).
    """
    tracks = [
        [Span(s.name, s.step, s.number, s.start - offset, s.end - offset) for s in spans]
        for spans, offset in zip(tracks, offsets, strict=True)
    ]
    zero = min((span.start for spans in tracks for span in spans), default=0.0)
    events = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "train_grpo"}}]
    for rank, spans in enumerate(split_waits(tracks)):
        if chosen is not None and rank not in chosen:
            continue
        thread = {"pid": 1, "tid": rank + 1}  # to Perfetto, 0 is the idle thread
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}})
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            start, end = (round((moment - zero) * 1e9) for moment in (span.start, span.end))  # ns: whole numbers
            name = f"step {span.step}" if span.name == "step" else span.name
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            args = {"step": span.step, "number": span.number}
            events.append({"ph": "X", "cat": "phase", "name": name, **times, **thread, "args": args})
    return {"displayTimeUnit": "ms", "traceEvents": events}
