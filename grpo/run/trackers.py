"""Answers on the screen, and the trackers: TensorBoard and Weights & Biases, each enabled by one key of `log`."""

import atexit
import json
import math
import os
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from config import Config
from grpo.parts.base.ranks import say
from grpo.step.records import Sample

TABLE_EVERY = 20  # steps between tables of answers, where log.samples_every does not say
SCREEN_ROWS = 3  # answers on the screen
SCREEN_CHARS = 60  # characters of a text on the screen
TABLE_ROWS = 8  # answers in a table
FLUSH_S = 10  # until TensorBoard sees a step
COLUMNS = ["reward", "parts", "advantage", "prompt", "answer"]
FINISH_S = 60.0  # to send the rest once the run has ended


def choose_samples(samples: list[Sample], count: int) -> list[Sample]:
    """Up to `count` samples at evenly spaced ranks of the reward, the lowest and the highest among them."""
    ordered = sorted(samples, key=lambda sample: sample.reward)
    return [ordered[i] for i in np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)]


def shorten(text: str) -> str:
    """The text on one line, without the middle of a long one; control characters are escaped."""
    half = SCREEN_CHARS // 2
    return repr(text if len(text) <= SCREEN_CHARS else f"{text[:half]} … {text[-half:]}")


def format_answers(samples: list[Sample], decode: Callable) -> str:
    """A few answers for the screen, a line each, with rewards and advantage; decode(token ids) gives a prompt."""
    lines = []
    for sample in choose_samples(samples, SCREEN_ROWS):
        line = f"  reward {sample.reward:.3f}"
        if len(sample.reward_parts) > 1:
            parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
            line += f" ({parts})"
        line += f"  advantage {sample.advantage:+.2f}  {shorten(decode(sample.prompt_ids))} → {shorten(sample.text)}"
        notes = [] if sample.graded == "ok" else [sample.graded]
        if not sample.finished:
            notes.append("cut off")
        if notes:
            line += f"  ({', '.join(notes)})"
        lines.append(line)
    return "\n".join(lines)


# ---------------------------------------------------------------- the two libraries, which write from their own threads


def open_tensorboard(cfg: Config, done: int) -> tuple[Callable, Callable]:
    """(write, close) of an event file in output_dir/tensorboard, which takes back the steps after `done`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{cfg.output_dir}/tensorboard", purge_step=done + 1 if done else 0, flush_secs=FLUSH_S)

    def write(step: int, numbers: dict[str, float], histograms: dict[str, np.ndarray], table: list[list]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            writer.add_histogram(name, values, step)
        if table:  # indented, which is code in Markdown: an answer must not be rendered
            rows = ["\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)) for row in table]
            writer.add_text("answers", textwrap.indent("\n\n".join(rows), "    ", lambda line: True), step)

    return write, writer.close


def open_wandb(cfg: Config, done: int) -> tuple[Callable, Callable]:
    """(write, close) of a run of W&B with its files in output_dir/wandb; offline where its server cannot be reached."""
    import wandb

    out = Path(cfg.output_dir)
    settings = wandb.Settings(console="off", silent=True, init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)))
    project = os.environ.get("WANDB_PROJECT", "train_grpo")
    options = {"dir": out, "project": project, "name": out.name, "config": cfg.model_dump(), "settings": settings}
    try:
        run = wandb.init(**options)
    except Exception as error:  # of any class: no key, no network, a server that is down
        say(
            f"warning: log.wandb: {brief(error)}; this run is written offline, and sent by "
            f"`wandb sync {out}/wandb/offline-run-*`"
        )
        run = wandb.init(**options, mode="offline")
    say(f"log.wandb: {Path(run.dir).parent if run.offline else run.url}")

    def write(step: int, numbers: dict[str, float], histograms: dict[str, np.ndarray], table: list[list]) -> None:
        values = numbers | {name: wandb.Histogram(values) for name, values in histograms.items()}
        if table:
            values["answers"] = wandb.Table(COLUMNS, table)
        run.log(values, step=step)

    return write, run.finish


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Trackers:
    """The trackers that `log` enables, on rank 0, after step `done`; one that fails costs a warning and is dropped."""

    def __init__(self, cfg: Config, done: int, decode: Callable):
        self.table_every = cfg.log.samples_every or TABLE_EVERY
        self.decode = decode
        self.used = [name for name in OPEN if getattr(cfg.log, name)]
        self.calls: dict[str, tuple[Callable, Callable]] = {}  # name → (write, close)
        for name in [*self.used]:
            self.calls[name] = self._try(name, OPEN[name], cfg, done)
        atexit.register(self.close)  # however the run ends; before the libraries' own, which would end their runs

    def add(self, metrics: dict, samples: list[Sample] | None) -> None:
        """Give each tracker the metrics of a step and its samples; no samples: the evaluation before the first step."""
        if not self.used:
            return
        step = metrics["step"]
        numbers = {name: float(value) for name, value in metrics.items() if name != "step" and value is not None}
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        histograms, table = {}, []
        if samples:
            histograms["reward/histogram"] = np.array([s.reward for s in samples])
            histograms["tokens/response_histogram"] = np.array([sum(s.turns[::2]) for s in samples])
        if samples and step % self.table_every == 0:
            for s in choose_samples(samples, TABLE_ROWS):
                table.append([s.reward, json.dumps(s.reward_parts), s.advantage, self.decode(s.prompt_ids), s.text])
        for name in [*self.used]:
            self._try(name, self.calls[name][0], step, numbers, histograms, table)

    def close(self) -> None:
        """Let each tracker send what is left, for FINISH_S at most."""
        for name in [*self.used]:
            thread = threading.Thread(target=self._try, args=(name, self.calls[name][1]), daemon=True)
            thread.start()
            thread.join(FINISH_S)
            if thread.is_alive():
                self._drop(name, f"it did not take all within {FINISH_S:.0f} s")

    def _try(self, name: str, call: Callable, *arguments) -> Any:
        """Call a function of a tracker's library; a failure ends the use of this tracker."""
        try:
            return call(*arguments)
        except Exception as error:  # a library's own, of any class
            self._drop(name, brief(error))

    def _drop(self, name: str, why: str) -> None:
        if name not in self.used:  # its library was ended below
            return
        self.used.remove(name)
        say(f"warning: log.{name}: {why}; the run goes on without it. metrics.jsonl and rollouts/ have all")
        if name == "wandb":  # at exit the library would wait for its process
            for child in psutil.Process().children():
                if child.name() == "wandb-core":
                    child.kill()
