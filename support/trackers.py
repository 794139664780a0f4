"""What a run shows of its answers, and its trackers: TensorBoard and Weights & Biases, each by one key of `log`.

Trackers are fed by a process that follows metrics.jsonl and rollouts/ as the run writes them. So they hold the same
numbers, and one that is slow, dead or out of disk costs the run nothing but a warning. Started as a program it is that
process; it also sends the files of a run that has ended:

    python -m support.trackers outputs/run tensorboard wandb
"""

import argparse
import atexit
import functools
import importlib.metadata
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

from config import Config, LogConfig
from support import processes

# Tracker → what pip installs; the versions that are tested.
PACKAGES = {"tensorboard": "tensorboard==2.21.0", "wandb": "wandb==0.31.0"}
TABLE_EVERY = 20  # steps between tables of answers, where log.samples_every does not say
ON_SCREEN, CHARACTERS, TABLE_ROWS = 3, 60, 8  # answers on the screen, characters of each there, answers in a table
POLL_S = 1.0  # between two looks at the files
FINISH_S = 60.0  # for what is left to send once the run has ended
LATE_S = 30.0  # a file of samples comes so long after the step's metrics, at most

# ---------------------------------------------------------------- answers to look at


def picked(samples: list[dict], count: int) -> list[dict]:
    """Up to `count` samples, from the lowest reward to the highest, evenly spread; the same ones every time."""
    ordered = sorted(samples, key=lambda sample: sample["reward"])
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[i] for i in places]


def shortened(text: str) -> str:
    """The text on one line, the middle of a long one left out; nothing in it can move a terminal's cursor."""
    half = CHARACTERS // 2
    return repr(text if len(text) <= CHARACTERS else f"{text[:half]} … {text[-half:]}")


def shown(samples: list[dict], decode: Callable) -> str:
    """A few answers for the screen, a line each, with rewards and advantage; decode(token ids) gives a prompt."""
    lines = []
    for s in picked(samples, ON_SCREEN):
        several = s["reward_parts"].items() if len(s["reward_parts"]) > 1 else []
        parts = f" ({', '.join(f'{name} {value:.3g}' for name, value in several)})" if several else ""
        notes = [s["graded"]] * (s["graded"] != "ok") + ["cut off"] * (not s["finished"])
        end = f"  ({', '.join(notes)})" if notes else ""
        lines.append(
            f"  reward {s['reward']:.3f}{parts}  advantage {s['advantage']:+.2f}  "
            f"{shortened(decode(s['prompt_ids']))} → {shortened(s['text'])}{end}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- in the trainer


def chosen(log: LogConfig) -> list[str]:
    """The trackers that are asked for."""
    return [name for name in ("tensorboard", "wandb") if getattr(log, name)]


def absent(name: str) -> bool:
    """Whether a tracker's package is not installed; a folder of that name, such as W&B makes, is none."""
    return not any(importlib.metadata.distributions(name=name))


class Trackers:
    """The process that feeds the trackers of `log`, if there are any, with what output_dir gets after step `done`."""

    def __init__(self, cfg: Config, done: int):
        self.process = None
        if not chosen(cfg.log):
            return
        from support.hf_folder import local_folder  # here, since the process reads this file too and needs no torch

        options = [f"--done={done}", f"--model={local_folder(cfg.model.path)}", "--follow"]
        options += [f"--table-every={cfg.log.samples_every or TABLE_EVERY}"]
        arguments = [cfg.output_dir, *chosen(cfg.log), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": 2}  # standard input ends with the run, however the run ends
        self.process = processes.start_module("support.trackers", *arguments, **pipes)
        atexit.register(self.close)  # however the run ends, and when no watchdog is left that waiting could alarm

    def warning(self) -> str | None:
        """What to tell the user if the process is gone; once."""
        if self.process is None or self.process.poll() is None:
            return None
        code, self.process = self.process.returncode, None
        return f"the process that feeds the trackers of log.* has ended (exit code {code}); the run goes on without it"

    def close(self) -> None:
        """Let the process send what is left, for FINISH_S at most."""
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
    """(write, close) of an event file in out/tensorboard. Scalars are float32: its server shows no others."""
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
    for file in earlier:  # TensorBoard itself would show what a resumed run has undone
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
        if table:  # as code: nothing in an answer is Markdown
            cells = [[textwrap.indent(str(cell), "    ", lambda line: True) for cell in row] for row in table]
            summary.MergeFrom(text_pb("answers", np.array([COLUMNS, *cells], dtype=object)))
        add(step=step, summary=summary)

    return write, writer.close


def open_wandb(out: Path, config: dict, done: int) -> tuple[Callable, Callable]:
    """(write, close) of a run of W&B with its files in out/wandb; one that its server does not let begin is offline."""
    import wandb

    settings = wandb.Settings(console="off", silent=True, init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)))
    project = os.environ.get("WANDB_PROJECT", "train_grpo")
    begin = functools.partial(wandb.init, dir=out, project=project, name=out.name, config=config, settings=settings)
    try:
        run = begin()
    except Exception as error:  # of any class: no key, no network, a server that is down
        say(
            f"warning: log.wandb: {brief(error)}; this run is written offline, and sent by "
            f"`wandb sync {out}/wandb/offline-run-*`"
        )
        run = begin(mode="offline")
    say(f"log.wandb: {Path(run.dir).parent if run.offline else run.url}")

    def write(step: int, numbers: dict[str, float], histograms: dict[str, list], table: list[list]) -> None:
        found = numbers | {name: wandb.Histogram(values) for name, values in histograms.items()}
        if table:
            found["answers"] = wandb.Table(COLUMNS, table)
        run.log(found, step=step)

    return write, run.finish


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}
COLUMNS = ["reward", "parts", "advantage", "prompt", "answer"]
LATER = "`python -m support.trackers output_dir NAME ...` sends all from the files of the run"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def steps(out: Path, done: int, follow: bool) -> Iterator[dict]:
    """The lines of metrics.jsonl after step `done`; with `follow` also those that come until standard input ends."""
    with (out / "metrics.jsonl").open() as file:
        rest, ended = "", not follow
        while True:
            *lines, rest = (rest + file.read()).split("\n")
            for metrics in map(json.loads, lines):
                if metrics["step"] > done or not done:
                    yield metrics
            if ended:
                return
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])  # what was written before the end is read yet
            if ended:
                signal.alarm(int(FINISH_S + 10))  # nobody may be left to end a tracker that hangs


def samples_of(path: Path, follow: bool) -> list[dict]:
    """The samples of a step without log-probs, `response_ids` the number of the model's; [] if they do not come."""
    deadline = time.monotonic() + LATE_S * follow
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


def rows_of(samples: list[dict], model: str) -> list[list]:
    """A table of a few answers, in COLUMNS; prompts as token ids where the model has no tokenizer.json."""
    from tokenizers import Tokenizer

    path = Path(model, "tokenizer.json")
    decode = (
        functools.partial(Tokenizer.from_file(str(path)).decode, skip_special_tokens=False) if path.exists() else str
    )
    return [
        [s["reward"], json.dumps(s["reward_parts"]), s["advantage"], decode(s["prompt_ids"]), s["text"]]
        for s in picked(samples, TABLE_ROWS)
    ]


def feed(args: argparse.Namespace) -> None:
    """Open the trackers and give them every step; one that fails is left alone from then on."""
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
    for metrics in steps(args.out, args.done, args.follow):
        step = metrics.pop("step")
        numbers = {name: value for name, value in metrics.items() if value is not None}
        samples, table = [], []
        if step:  # before the first there is an evaluation only
            samples = samples_of(args.out / f"rollouts/step_{step:06d}.jsonl", args.follow)
        if samples and step % args.table_every == 0:
            table = rows_of(samples, args.model)
        histograms = {"reward/histogram": "reward", "tokens/response_histogram": "response_ids"} if samples else {}
        histograms = {name: [sample[field] for sample in samples] for name, field in histograms.items()}
        for name, (write, _) in [*opened.items()]:
            attempt(name, write, step, numbers, histograms, table)
    for name, (_, close) in [*opened.items()]:
        attempt(name, close)


def main() -> None:
    processes.ignore_sigterm()
    os.nice(19)  # the ranks come first
    parser = argparse.ArgumentParser(prog="support.trackers", description="send the files of a run to trackers")
    parser.add_argument("out", type=Path, help="output_dir of the run")
    parser.add_argument("trackers", nargs="+", choices=[*OPEN])
    parser.add_argument("--done", type=int, default=0, help="leave out the steps up to this one")
    parser.add_argument("--table-every", type=int, default=TABLE_EVERY, help="steps between tables of answers")
    parser.add_argument("--model", default="", help="folder with the tokenizer.json that reads prompts")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends")
    feed(parser.parse_args())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library that has failed says as it ends is no news


if __name__ == "__main__":
    main()
