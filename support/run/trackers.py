"""Answers on the screen, and the trackers: TensorBoard and Weights & Biases, each enabled by one key of `log`.

A process of ours follows metrics.jsonl and rollouts/ as the run writes them, and feeds the trackers. So they have the
same numbers, and a tracker that is slow, dead or out of disk only causes a warning. Started as a program, this file is
that process; it also sends the files of a run that has ended:

    python -m support.run.trackers outputs/run tensorboard wandb
"""

import argparse
import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import yaml

from config import Config
from support.base import processes

TABLE_EVERY = 20  # steps between tables of answers, where log.samples_every does not say
SCREEN_ROWS = 3  # answers on the screen
SCREEN_CHARS = 60  # characters of a text on the screen
TABLE_ROWS = 8  # answers in a table
POLL_S = 1.0  # between two reads of the files
FINISH_S = 60.0  # to send the rest once the run has ended
LATE_S = 30.0  # a file of samples is written at most this long after the metrics of its step

# ---------------------------------------------------------------- answers on the screen


def choose_samples(samples: list[dict], count: int) -> list[dict]:
    """Up to `count` samples at evenly spaced ranks of the reward, the lowest and the highest among them."""
    ordered = sorted(samples, key=lambda sample: sample["reward"])
    indices = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[i] for i in indices]


def shorten(text: str) -> str:
    """The text on one line, without the middle of a long one; control characters are escaped."""
    half = SCREEN_CHARS // 2
    return repr(text if len(text) <= SCREEN_CHARS else f"{text[:half]} … {text[-half:]}")


def format_answers(samples: list[dict], decode: Callable) -> str:
    """A few answers for the screen, a line each, with rewards and advantage; decode(token ids) gives a prompt."""
    lines = []
    for sample in choose_samples(samples, SCREEN_ROWS):
        line = f"  reward {sample['reward']:.3f}"
        if len(sample["reward_parts"]) > 1:
            parts = ", ".join(f"{name} {value:.3g}" for name, value in sample["reward_parts"].items())
            line += f" ({parts})"
        line += f"  advantage {sample['advantage']:+.2f}"
        line += f"  {shorten(decode(sample['prompt_ids']))} → {shorten(sample['text'])}"
        notes = []
        if sample["graded"] != "ok":
            notes.append(sample["graded"])
        if not sample["finished"]:
            notes.append("cut off")
        if notes:
            line += f"  ({', '.join(notes)})"
        lines.append(line)
    return "\n".join(lines)


# ---------------------------------------------------------------- in the trainer


class Trackers:
    """The process that feeds the trackers of `log`, if there are any, with what output_dir gets after step `done`."""

    def __init__(self, cfg: Config, done: int):
        self.process = None
        enabled = [name for name in ("tensorboard", "wandb") if getattr(cfg.log, name)]
        if not enabled:
            return
        from support.base.hf_folder import local_folder  # here, since the process imports this file and needs no torch

        options = [f"--done={done}", f"--model={local_folder(cfg.model.path)}", "--follow"]
        options.append(f"--table-every={cfg.log.samples_every or TABLE_EVERY}")
        pipes = {"stdin": subprocess.PIPE, "stdout": 2}  # standard input ends with the run, however the run ends
        arguments = [cfg.output_dir, *enabled, *options]
        self.process = processes.start_module("support.run.trackers", *arguments, ignore_sigterm=True, **pipes)
        atexit.register(self.close)  # however the run ends; the watchdog, which waiting could alarm, has stopped then

    def warning(self) -> str | None:
        """The warning that the process has ended; given once, else None."""
        if self.process is None or self.process.poll() is None:
            return None
        code, self.process = self.process.returncode, None
        return f"the process that feeds the trackers of log.* has ended (exit code {code}); the run goes on without it"

    def close(self) -> None:
        """Let the process send the rest, for FINISH_S at most."""
        atexit.unregister(self.close)
        if self.process is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            print(f"warning: log.*: the trackers did not take all within {FINISH_S:.0f} s; {LATER}", flush=True)
            processes.kill_family(self.process.pid)
            self.process.wait()
        self.process = None


# ---------------------------------------------------------------- the process


def open_tensorboard(out: Path, config: dict, done: int) -> tuple[Callable, Callable]:
    """(write, close) of an event file in out/tensorboard. Scalars are float32, the only type its server shows.

    Events of earlier files up to step `done` are copied, later ones are deleted. A SummaryWriter with a purge_step
    would only mark them: the data server still shows those of a tag that the resumed run does not write (2.21).
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder = out / "tensorboard"
    folder.mkdir(exist_ok=True)
    earlier = sorted(folder.glob("events.out.tfevents.*"))
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    writer = RecordWriter((folder / name).open("wb"))

    def add(**fields) -> None:
        writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        writer.flush()

    add(file_version="brain.Event:2")
    for file in earlier:
        for record in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(record)
            if done and event.HasField("summary") and event.step <= done:
                writer.write(record)
    writer.flush()
    for file in earlier:
        file.unlink()

    def write(step: int, numbers: dict[str, float], histograms: dict[str, list], table: list[list]) -> None:
        summary = Summary()
        for name, value in numbers.items():
            summary.value.add(tag=name, simple_value=value)
        for name, values in histograms.items():
            summary.MergeFrom(histogram_pb(name, values))
        if table:  # indented, which is code in Markdown: an answer must not be rendered
            cells = [[textwrap.indent(str(cell), "    ", lambda line: True) for cell in row] for row in table]
            summary.MergeFrom(text_pb("answers", np.array([COLUMNS, *cells], dtype=object)))
        add(step=step, summary=summary)

    return write, writer.close


def open_wandb(out: Path, config: dict, done: int) -> tuple[Callable, Callable]:
    """(write, close) of a run of W&B with its files in out/wandb; offline where its server cannot be reached."""
    import wandb

    settings = wandb.Settings(console="off", silent=True, init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)))
    project = os.environ.get("WANDB_PROJECT", "train_grpo")
    init = functools.partial(wandb.init, dir=out, project=project, name=out.name, config=config, settings=settings)
    try:
        run = init()
    except Exception as error:  # of any class: no key, no network, a server that is down
        say(
            f"warning: log.wandb: {brief(error)}; this run is written offline, and sent by "
            f"`wandb sync {out}/wandb/offline-run-*`"
        )
        run = init(mode="offline")
    say(f"log.wandb: {Path(run.dir).parent if run.offline else run.url}")

    def write(step: int, numbers: dict[str, float], histograms: dict[str, list], table: list[list]) -> None:
        values = numbers | {name: wandb.Histogram(values) for name, values in histograms.items()}
        if table:
            values["answers"] = wandb.Table(COLUMNS, table)
        run.log(values, step=step)

    return write, run.finish


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}
COLUMNS = ["reward", "parts", "advantage", "prompt", "answer"]
LATER = "`python -m support.run.trackers output_dir NAME ...` sends all from the files of the run"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def read_metrics(out: Path, done: int, follow: bool) -> Iterator[dict]:
    """The lines of metrics.jsonl after step `done`; with `follow` also those written until standard input ends."""
    with (out / "metrics.jsonl").open() as file:
        incomplete_line = ""
        ended = not follow
        while True:
            *lines, incomplete_line = (incomplete_line + file.read()).split("\n")
            for metrics in map(json.loads, lines):
                if metrics["step"] > done or not done:
                    yield metrics
            if ended:
                return
            readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
            ended = bool(readable)  # standard input is never written to: readable means closed
            if ended:
                signal.alarm(int(FINISH_S + 10))  # ends a tracker that hangs, where the trainer is gone


def read_samples(path: Path, follow: bool) -> list[dict]:
    """The samples of a step, without log-probs and with the number of sampled tokens as `response_ids`.

    [] where there is no file, with `follow` after LATE_S.
    """
    deadline = time.monotonic() + (LATE_S if follow else 0.0)
    while not path.exists():
        if time.monotonic() >= deadline:
            return []
        time.sleep(0.05)
    samples = []
    with path.open() as file:
        for row in map(json.loads, file):
            sampled = sum(row.get("turns", [len(row["response_ids"])])[::2])  # an earlier version wrote no turns
            samples.append(row | {"response_ids": sampled, "rollout_logp": None})
    return samples


def make_table(samples: list[dict], model: str) -> list[list]:
    """A table of a few answers, in COLUMNS; prompts as token ids where the model has no tokenizer.json."""
    from tokenizers import Tokenizer

    path = Path(model, "tokenizer.json")
    decode = str
    if path.exists():
        decode = functools.partial(Tokenizer.from_file(str(path)).decode, skip_special_tokens=False)
    return [
        [s["reward"], json.dumps(s["reward_parts"]), s["advantage"], decode(s["prompt_ids"]), s["text"]]
        for s in choose_samples(samples, TABLE_ROWS)
    ]


def feed(args: argparse.Namespace) -> None:
    """Open the trackers and write every step to them; one that fails is not used again."""
    opened = {}

    def attempt(name: str, action: Callable, *arguments):
        try:
            return action(*arguments)
        except Exception as error:  # a library's own, of any class
            opened.pop(name, None)
            say(f"warning: log.{name}: {brief(error)}; the run goes on without it. {LATER}")

    config = yaml.safe_load((args.out / "config.yaml").read_text())
    for name in args.trackers:
        opened[name] = attempt(name, OPEN[name], args.out, config, args.done)
    opened = {name: pair for name, pair in opened.items() if pair}
    for metrics in read_metrics(args.out, args.done, args.follow):
        step = metrics.pop("step")
        numbers = {name: value for name, value in metrics.items() if value is not None}
        histograms = {}
        table = []
        samples = read_samples(args.out / f"rollouts/step_{step:06d}.jsonl", args.follow) if step else []
        if samples:  # none at step 0, which is an evaluation
            histograms["reward/histogram"] = [sample["reward"] for sample in samples]
            histograms["tokens/response_histogram"] = [sample["response_ids"] for sample in samples]
            if step % args.table_every == 0:
                table = make_table(samples, args.model)
        for name, (write, _) in [*opened.items()]:
            attempt(name, write, step, numbers, histograms, table)
    for name, (_, close) in [*opened.items()]:
        attempt(name, close)


def main() -> None:
    os.nice(19)  # the ranks have priority
    parser = argparse.ArgumentParser(prog="support.run.trackers", description="send the files of a run to trackers")
    parser.add_argument("out", type=Path, help="output_dir of the run")
    parser.add_argument("trackers", nargs="+", choices=[*OPEN])
    parser.add_argument("--done", type=int, default=0, help="leave out the steps up to this one")
    parser.add_argument("--table-every", type=int, default=TABLE_EVERY, help="steps between tables of answers")
    parser.add_argument("--model", default="", help="folder with the tokenizer.json that reads prompts")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends")
    feed(parser.parse_args())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # drops what a library that has failed prints as it ends


if __name__ == "__main__":
    main()
