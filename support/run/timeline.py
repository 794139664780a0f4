"""The timeline of a window of steps: the phases of every rank, as a trace for Perfetto or chrome://tracing.

On request also the trace of torch's profiler and a snapshot of GPU memory. Knows torch.distributed, no trainer.

output_dir/traces/steps_3_5.json            phases, a track a rank
output_dir/traces/torch_3_5_rank0.json.gz   torch.profiler's trace of a rank
output_dir/traces/memory_3_5_rank0.pickle   for https://pytorch.org/memory_viz
"""

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from config import ProfileConfig
from support.base import ranks

MAX_MEMORY_EVENTS = 1_000_000  # allocations in a snapshot, at most


class Span(NamedTuple):
    """A span of time on one rank, in seconds of its clock; "step" and "eval" contain phases, which are disjoint."""

    name: str
    step: int
    number: int  # of the phase within its step: for "train" it is the update
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
        self.zero = 0.0  # this rank's clock as the window begins
        self.torch_profiler = None

    def start_step(self, step: int) -> None:
        """A step begins; if it is in the window, its phases are recorded."""
        if step in self.window:
            if self.step is None:
                self._open()
            self.step = step
            self.numbers.clear()

    def add(self, name: str, start: float, end: float) -> None:
        """Record a phase of this rank, between two readings of time.perf_counter()."""
        if self.step is not None:
            self.numbers[name] += 1
            self.spans.append(Span(name, self.step, self.numbers[name], start, end))

    def end_step(self, start: float, end: float) -> None:
        """Record a step, and as "other" the time between its phases; the last step of the window writes the files."""
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
        name = f"{self.window[0]}_{self.step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._close_torch(f"{name}_rank{dist.get_rank()}")
        except (OSError, RuntimeError) as error:
            ranks.say(f"warning: profile: no file for torch.profiler or memory was written: {error}")
        tracks = ranks.gather((self.zero, self.spans))
        self.step = None
        if dist.get_rank():
            return
        path = self.folder / f"steps_{name}.json"
        try:
            path.write_text(json.dumps(chrome_trace(tracks, self.profile.ranks)))
            print(f"timeline: {path}, for https://ui.perfetto.dev", flush=True)
        except OSError as error:
            ranks.say(f"warning: profile: no timeline was written: {error}")

    def _open(self) -> None:
        """Align the clocks: ranks leave a collective at about the same time. Start what else is asked for."""
        ranks.on_any_rank(False)
        self.zero = time.perf_counter()
        if self.profile.ranks is not None and dist.get_rank() not in self.profile.ranks:
            return
        if self.profile.torch:
            self.torch_profiler = torch.profiler.profile()
            self.torch_profiler.start()
        if self.profile.memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    def _close_torch(self, name: str) -> None:
        """Stop what _open has started, and write its files."""
        if self.profile.ranks is not None and dist.get_rank() not in self.profile.ranks:
            return
        if self.torch_profiler is not None:
            self.torch_profiler.stop()
            self.torch_profiler.export_chrome_trace(str(self.folder / f"torch_{name}.json.gz"))
        if self.profile.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def chrome_trace(tracks: list[tuple[float, list[Span]]], chosen: list[int] | None) -> dict:
    """(zero, spans) of each rank as a trace in the JSON format that Chrome and Perfetto read; µs. A rank is a thread.

    No rank leaves a gather before all have arrived, so before the last arrival it is drawn as "wait". `chosen`: the
    ranks that are drawn, None for all. Source: "Trace Event Format", Google (2016).
    """
    arrivals = defaultdict(float)  # (step, number) of a gather → when the last rank has arrived
    for zero, spans in tracks:
        for span in spans:
            if span.name == "gather":
                key = (span.step, span.number)
                arrivals[key] = max(arrivals[key], span.start - zero)
    events = []
    for rank, (zero, spans) in enumerate(tracks):
        if chosen is not None and rank not in chosen:
            continue
        thread = {"pid": 1, "tid": rank + 1}  # to Perfetto, 0 is the idle thread
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank}"}})
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            start, end = span.start - zero, span.end - zero
            pieces = [(f"step {span.step}" if span.name == "step" else span.name, start, end)]
            if span.name == "gather":
                arrival = min(max(arrivals[span.step, span.number], start), end)
                pieces = [("wait", start, arrival)] if arrival > start else []
                pieces.append(("gather", arrival, end))
            for name, *moments in pieces:
                first, last = (round(moment * 1e9) for moment in moments)  # ns: whole numbers
                times = {"ts": first / 1000, "dur": (last - first) / 1000}
                args = {"step": span.step, "number": span.number}
                events.append({"ph": "X", "name": name, **times, **thread, "args": args})
    return {"displayTimeUnit": "ms", "traceEvents": events}
