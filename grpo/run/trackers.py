"""Answers on the screen, and the trackers: TensorBoard and Weights & Biases, each enabled by one key of `log`.

Both libraries write from a thread or process of their own, so a step does not wait for a disk or a network.
"""

import atexit
import json
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grpo.parts.base.ranks import say
from grpo.parts.base.require import brief
from grpo.step.records import Sample

TABLE_EVERY = 20  # steps between tables of answers if log.samples_every is not set
TABLE_ROWS = 8  # answers in a table
COLUMNS = ["reward", "parts", "advantage", "prompt", "answer"]
FLUSH_S = 10  # until TensorBoard sees a step
FINISH_S = 60.0  # for W&B to send the rest once the run has ended
SCREEN_ROWS = 3  # answers on the screen
SCREEN_CHARS = 60  # characters of a text on the screen

# ---------------------------------------------------------------- the trackers


class Trackers:
    """The trackers that `log` enables, on rank 0, after step `done`. One that fails is dropped with a warning."""

    def __init__(self, cfg, done: int, decode: Callable):
        self.table_every = cfg.log.samples_every or TABLE_EVERY
        self.decode = decode
        self.opened = {}  # name → (write, close)
        for name, open_tracker in OPEN.items():
            if getattr(cfg.log, name):
                calls = self._try(name, open_tracker, cfg, done)
                if calls is not None:
                    self.opened[name] = calls
        atexit.register(self.close)  # however the run ends

    def add(self, metrics, samples: list[Sample] | None):
        """Give each tracker the metrics of a step and its samples. The evaluation before the first step has none."""
        if not self.opened:
            return
        step = metrics["step"]
        numbers = {}
        for name, value in metrics.items():
            if name != "step" and value is not None and math.isfinite(value):
                numbers[name] = float(value)

        histograms, table = {}, []
        if samples:
            histograms["reward/histogram"] = np.array([s.reward for s in samples])
            histograms["tokens/response_histogram"] = np.array([sum(s.turns[::2]) for s in samples])
        if samples and step % self.table_every == 0:
            for s in choose_samples(samples, TABLE_ROWS):
                table.append([s.reward, json.dumps(s.reward_parts), s.advantage, self.decode(s.prompt_ids), s.text])

        for name, (write, _) in list(self.opened.items()):
            self._try(name, write, step, numbers, histograms, table)

    def close(self):
        """Let each tracker write or send what is left."""
        for name, (_, close) in list(self.opened.items()):
            self._try(name, close)

    def _try(self, name, call: Callable, *arguments):
        """Call a function of a tracker's library. After a failure the tracker is not used any more."""
        try:
            return call(*arguments)
        except Exception as error:  # a library's own, of any class
            self.opened.pop(name, None)
            say(
                f"warning: log.{name}: {brief(error)}; the run goes on without it. "
                "metrics.jsonl and rollouts/ have everything"
            )


def open_tensorboard(cfg, done: int) -> tuple[Callable, Callable]:
    """(write, close) of an event file in output_dir/tensorboard, which takes back the steps after `done`."""
    from torch.utils.tensorboard import SummaryWriter

    purge = done + 1 if done else 0
    writer = SummaryWriter(f"{cfg.output_dir}/tensorboard", purge_step=purge, flush_secs=FLUSH_S)

    def write(step, numbers: dict[str, float], histograms: dict[str, np.ndarray], table: list[list]):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            writer.add_histogram(name, values, step)
        if table:
            answers = []
            for row in table:
                cells = zip(COLUMNS, row, strict=True)
                answers.append("\n".join(f"{name}: {cell}" for name, cell in cells))
            # Indented text is code in Markdown: an answer must not be rendered.
            writer.add_text("answers", textwrap.indent("\n\n".join(answers), "    ", lambda line: True), step)

    return write, writer.close


def open_wandb(cfg, done: int) -> tuple[Callable, Callable]:
    """(write, close) of a W&B run with its files in output_dir/wandb. It is offline if the server does not answer."""
    import wandb

    out = Path(cfg.output_dir)
    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)),
        finish_timeout=FINISH_S,
        finish_timeout_raises=True,
    )
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
    where = Path(run.dir).parent if run.offline else run.url
    say(f"log.wandb: {where}")

    def write(step, numbers: dict[str, float], histograms: dict[str, np.ndarray], table: list[list]):
        values = dict(numbers)
        for name, array in histograms.items():
            values[name] = wandb.Histogram(array)
        if table:
            values["answers"] = wandb.Table(COLUMNS, table)
        run.log(values, step=step)

    return write, run.finish


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}


# ---------------------------------------------------------------- answers


def choose_samples(samples: list[Sample], count: int) -> list[Sample]:
    """Up to `count` samples at evenly spaced ranks of the reward, the lowest and the highest among them."""
    ordered = sorted(samples, key=lambda sample: sample.reward)
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round()
    return [ordered[int(place)] for place in places]


def format_answers(samples: list[Sample], decode: Callable) -> str:
    """A few answers for the screen, a line each, with rewards and advantage; decode(token ids) gives a prompt."""
    lines = []
    for sample in choose_samples(samples, SCREEN_ROWS):
        line = f"  reward {sample.reward:.3f}"
        if len(sample.reward_parts) > 1:
            parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
            line += f" ({parts})"
        line += f"  advantage {sample.advantage:+.2f}  {shorten(decode(sample.prompt_ids))} → {shorten(sample.text)}"
        if sample.graded != "ok":
            line += f"  ({sample.graded})"
        if not sample.finished:
            line += "  (cut off)"
        lines.append(line)
    return "\n".join(lines)


def shorten(text: str) -> str:
    """The text on one line, without the middle of a long one; control characters are escaped."""
    if len(text) > SCREEN_CHARS:
        half = SCREEN_CHARS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return repr(text)
