"""What a run says of its steps: lines on the screen, files, trackers."""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from config import Config, TrainingError
from grpo.parts.base import files, ranks
from grpo.parts.base.rollout_files import RolloutWriter
from grpo.run import trackers
from grpo.run.advice import Advice
from grpo.run.clock import Clock
from grpo.step.records import Sample

RECENT = 20  # steps from which the time left is estimated


class Log:
    """What a run says of its steps, on rank 0: metrics.jsonl, rollouts/, a line a step, some answers, trackers."""

    def __init__(self, cfg: Config, inputs: Any, rollouts: RolloutWriter, clock: Clock):
        self.cfg = cfg
        self.out = Path(cfg.output_dir)
        self.speaks = dist.get_rank() == 0
        self.rollouts = rollouts
        self.clock = clock
        self.tokenizer = inputs.tokenizer
        self.history: list[dict] = []  # the metrics of each step of this start
        self.told: set[str] = set()  # rules of the advice that were shown
        self.advice = Advice(cfg)
        self.dead: str | None = None  # why the run has to end, on rank 0
        if self.speaks:
            self.trackers = trackers.Trackers(cfg, inputs.done, inputs.tokenizer.decode)
            past = files.read_metrics(self.out)  # of the steps before a resume
            for metrics in past:
                self.advice.add(metrics)
            missing = inputs.done - len(past)  # all, where the checkpoint is of another folder
            sampled = missing * cfg.rollout.prompts_per_step + sum(metrics["groups/sampled"] for metrics in past)
            self.progress = Progress(cfg.train.steps, len(inputs.prompts), sampled)

    def evaluated(self, step: int, found: dict[str, float], samples: list[Sample]) -> dict[str, float]:
        """Keep and show an evaluation after `step`; returns its metrics."""
        if self.speaks:
            self.rollouts.write(
                self.out / "rollouts" / f"eval_{step:06d}.jsonl", [sample.as_row() for sample in samples]
            )
            shown = (f"{key.removeprefix('eval/')} {value:.3f}" for key, value in found.items() if "@" in key)
            print(f"eval after step {step}: {'  '.join(shown)}", flush=True)
        return {"step": step} | found

    def write(self, metrics: dict, samples: list[Sample] | None = None) -> None:
        """The metrics of a step that has ended, and its samples; without samples, those of an evaluation before it."""
        if not self.speaks:
            return
        step = metrics["step"]
        if samples is not None:
            metrics = metrics | self.progress.add(metrics)
            self.rollouts.write(
                self.out / "rollouts" / f"step_{step:06d}.jsonl", [sample.as_row() for sample in samples]
            )
        files.log_metrics(self.out, metrics)
        self.trackers.add(metrics, samples)
        if samples is None:
            return
        self.history.append(metrics)
        self.advise(metrics)
        print(step_line(metrics, self.cfg.train.steps), flush=True)
        samples_every = self.cfg.log.samples_every
        if samples_every and step % samples_every == 0:
            some = trackers.format_answers(samples, self.tokenizer.decode)
            print(f"answers of step {step}, from the lowest reward to the highest:\n{some}", flush=True)

    def advise(self, metrics: dict) -> None:
        """Show what is newly wrong with the run; ask it to stop after train.patience steps that learnt nothing."""
        step = metrics["step"]
        found = self.advice.add(metrics)
        for rule, text in found.items():
            if rule not in self.told:
                print(f"warning: step {step}: {text}", flush=True)
                self.told.add(rule)
        if self.advice.has_to_end():
            self.dead = f"step {step}: the run has learnt nothing for {self.advice.idle_steps} steps in a row"
            self.dead += "".join(f"\n  {text}" for text in found.values())
            self.clock.stop_requested = True

    def stopped(self, step: int) -> None:
        if self.speaks:
            saved = f"step {step}, saved in {self.out / 'checkpoints'}; go on with resume=auto"
            print(f"stopped after {saved if step else 'no step: there is nothing to save'}", flush=True)
        self.speaks = False

    def close(self) -> None:
        """The run is done, its files are on the disk. Raises TrainingError, on every rank, if it ends as a dead run."""
        self.rollouts.finish()
        if self.speaks:
            self.summarize()
        dead, *_ = ranks.gather(self.dead)
        if dead is not None:
            raise TrainingError(f"{dead}\n  mend it and go on with resume=auto; train.patience=0 goes on regardless")

    def summarize(self) -> None:
        first = self.history[0]
        last = [metrics["reward/mean"] for metrics in self.history[-10:]]
        print(f"\nreward: {first['reward/mean']:.3f} at step {first['step']}, ", end="")
        print(f"{np.mean(last):.3f} over the last {len(last)} steps")
        if self.cfg.rollout.exact:
            gap = max(metrics["logp_gap/max"] for metrics in self.history)
            print(f"exact: repeatable, not bitwise equal: a log-prob gap of at most {gap:.1e} between trainer and vLLM")
        export = f"{self.out}/hf/step_{self.cfg.train.steps:06d}/"
        print(f"outputs: {self.out}/metrics.jsonl, {self.out}/rollouts/, {export} (for transformers and vLLM)")


def answers_bar(groups: Iterable, count: int) -> Iterable:
    """The groups of answers as an engine finishes them, under a bar of answers and tokens/s on a terminal."""
    tokens = 0
    disable = None if dist.get_rank() == 0 else True  # None: where standard error is no terminal
    with tqdm(total=count, unit="answer", desc="rollout", leave=False, disable=disable, delay=2) as bar:
        for number, answers in groups:
            tokens += sum(len(answer.ids) for answer in answers)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update(len(answers))
            yield number, answers


def step_line(m: dict, steps: int) -> str:
    done = round(20 * m["step"] / steps)
    kl = "" if m["kl/ref"] is None else f"  kl {m['kl/ref']:.4f}"
    return (
        f"[{'█' * done}{'·' * (20 - done)}] {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  grad {m['grad_norm']:.3f}{kl}  entropy {m['entropy']:.2f}  length {m['tokens/response_mean']:.1f}"
        f"  gap {m['logp_gap/max']:.0e}  {m['time/step']:.2f} s"
    )


class Progress:
    """Call `add` as each step is logged. `prompts`: of data.train; `sampled`: prompts that the steps before took."""

    def __init__(self, steps: int, prompts: int, sampled: int):
        self.steps = steps
        self.prompts = prompts
        self.sampled = sampled
        self.walls = deque(maxlen=RECENT)  # seconds from one logged step to the next
        self.last = time.monotonic()

    def add(self, metrics: dict) -> dict[str, float | None]:
        now = time.monotonic()
        evaluation = metrics.get("time/eval", 0.0)
        self.walls.append(now - self.last)
        self.sampled += metrics["groups/sampled"]
        numbers = {
            "epoch": self.sampled / self.prompts,
            "time/between": max(self.walls[-1] - metrics["time/step"] - evaluation, 0.0),
            "time/left": (self.steps - metrics["step"]) * fmean(self.walls),
        }
        self.last = now
        return numbers
