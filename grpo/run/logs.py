"""What a run says of its steps: lines on the screen, files, trackers."""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from tqdm import tqdm

from config import TrainingError
from grpo.parts.base import files, ranks
from grpo.parts.base.rollout_files import RolloutWriter
from grpo.parts.model.checkpoint import read_state
from grpo.run import trackers
from grpo.run.advice import Advice
from grpo.step.records import Sample


class Log:
    """What a run says of its steps, on rank 0: metrics.jsonl, rollouts/, a line a step, some answers, trackers."""

    def __init__(self, cfg, inputs, rollouts: RolloutWriter, clock):
        self.cfg = cfg
        self.out = Path(cfg.output_dir)
        self.speaks = dist.get_rank() == 0
        self.rollouts = rollouts
        self.clock = clock
        self.decode = inputs.tokenizer.decode
        self.history: list[dict] = []  # the metrics of each step of this start
        self.advice = Advice(cfg)
        self.shown: set[str] = set()  # rules of the advice that were shown
        self.dead: str | None = None  # why the run has to end, on rank 0
        if not self.speaks:
            return

        self.trackers = trackers.Trackers(cfg, inputs.done, self.decode)
        for metrics in files.read_metrics(self.out):  # of the steps before a resume
            self.advice.add(metrics)
        sampled = read_state(inputs.checkpoint)["prompts_taken"] if inputs.checkpoint else 0
        self.progress = Progress(cfg.train.steps, len(inputs.prompts), sampled)

    def evaluated(self, step, found: dict[str, float], samples: list[Sample]) -> dict[str, float]:
        """Keep and show an evaluation after `step`. Returns its metrics, with the step."""
        if self.speaks:
            self.keep({f"eval_{step:06d}": [sample.as_row() for sample in samples]})
            shown = [f"{key.removeprefix('eval/')} {value:.3f}" for key, value in found.items() if "@" in key]
            print(f"eval after step {step}: {'  '.join(shown)}", flush=True)
        return {"step": step} | found

    def keep(self, files: dict[str, list[dict]]):
        """Begin to write {name: rows} to rollouts/."""
        self.rollouts.write({self.out / f"rollouts/{name}.jsonl": rows for name, rows in files.items()})

    def write(self, metrics, samples: list[Sample] | None = None, updates: list[dict] = ()):
        """Log a step that has ended, its metrics, samples and updates; without samples an evaluation before step 1."""
        if not self.speaks:
            return
        if samples is None:
            files.log_metrics(self.out, metrics)
            self.trackers.add(metrics, None)
            return

        step = metrics["step"]
        metrics = metrics | self.progress.add(metrics)
        self.history.append(metrics)
        rows = [sample.as_row() for sample in samples]
        self.keep({f"updates_{step:06d}": updates, f"step_{step:06d}": rows})  # samples are never without updates
        files.log_metrics(self.out, metrics)
        self.trackers.add(metrics, samples)

        self.advise(metrics)
        print(step_line(metrics, self.cfg.train.steps), flush=True)
        samples_every = self.cfg.log.samples_every
        if samples_every and step % samples_every == 0:
            some = trackers.format_answers(samples, self.decode)
            print(f"answers of step {step}, from the lowest reward to the highest:\n{some}", flush=True)

    def advise(self, metrics):
        """Show what is newly wrong with the run. Ask it to stop after train.patience steps that learnt nothing."""
        step = metrics["step"]
        found = self.advice.add(metrics)
        for rule, text in found.items():
            if rule not in self.shown:
                print(f"warning: step {step}: {text}", flush=True)
                self.shown.add(rule)
        if self.advice.has_to_end():
            first = f"step {step}: the run has learnt nothing for {self.advice.idle_steps} steps in a row"
            self.dead = "\n  ".join([first, *found.values()])
            self.clock.stop_requested = True

    def stopped(self, step):
        """Say that the run was stopped after `step`, and say no more."""
        if self.speaks and step:
            print(f"stopped after step {step}, saved in {self.out / 'checkpoints'}; go on with resume=auto", flush=True)
        elif self.speaks:
            print("stopped after no step: there is nothing to save", flush=True)
        self.speaks = False

    def close(self):
        """Finish when the run is done and its files are on the disk.

        Raises TrainingError, on every rank, if the run ends since it learnt nothing.
        """
        self.rollouts.finish()
        if self.speaks:
            self.summarize()
        dead = ranks.gather(self.dead)[0]
        if dead is not None:
            raise TrainingError(f"{dead}\n  mend it and go on with resume=auto; train.patience=0 goes on regardless")

    def summarize(self):
        first = self.history[0]
        last = [metrics["reward/mean"] for metrics in self.history[-10:]]
        reward = f"{first['reward/mean']:.3f} at step {first['step']}"
        print(f"\nreward: {reward}, {fmean(last):.3f} over the last {len(last)} steps")
        export = f"{self.out}/hf/step_{self.cfg.train.steps:06d}/"
        print(f"outputs: {self.out}/metrics.jsonl, {self.out}/rollouts/, {export} (for transformers and vLLM)")


def step_line(m, steps: int) -> str:
    """The line of a step on the screen."""
    done = round(20 * m["step"] / steps)
    bar = "█" * done + "·" * (20 - done)
    kl = ""
    if m["kl/ref"] is not None:
        kl = f"  kl {m['kl/ref']:.4f}"
    return (
        f"[{bar}] {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  grad {m['grad_norm']:.3f}{kl}  entropy {m['entropy']:.2f}  length {m['tokens/response_mean']:.1f}"
        f"  gap {m['logp_gap/max']:.0e}  {m['time/step']:.2f} s"
    )


RECENT = 20  # steps from which the time left is estimated


class Progress:
    """Epochs and the time left. `prompts` is the size of data.train, `sampled` how many the steps before took."""

    def __init__(self, steps: int, prompts: int, sampled: int):
        self.steps = steps
        self.prompts = prompts
        self.sampled = sampled
        self.walls = deque(maxlen=RECENT)  # seconds from one logged step to the next
        self.last = time.monotonic()

    def add(self, metrics) -> dict[str, float]:
        """The metrics of progress, as a step is logged."""
        now = time.monotonic()
        self.walls.append(now - self.last)
        self.last = now
        self.sampled += metrics["groups/sampled"]
        known = metrics["time/step"] + metrics.get("time/eval", 0.0)
        return {
            "epoch": self.sampled / self.prompts,
            "time/between": max(self.walls[-1] - known, 0.0),
            "time/left": (self.steps - metrics["step"]) * fmean(self.walls),
        }


def answers_bar(groups: Iterable, count) -> Iterable:
    """The groups of answers as an engine finishes them, under a bar of answers on a terminal."""
    disable = None if dist.get_rank() == 0 else True  # None means: unless standard error is a terminal
    with tqdm(total=count, unit="answer", desc="rollout", leave=False, disable=disable, delay=2) as bar:
        for number, answers in groups:
            bar.update(len(answers))
            yield number, answers
