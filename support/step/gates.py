"""Checks within a step: losses and gradients are finite, rewards can be computed. gap.py compares trainer and vLLM."""

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, RewardConfig, TrainingError, UserError
from reward import is_part
from support.data.prompts import Prompt
from support.step import turns
from support.step.records import MicroBatch, Sample


def check_finite(
    report: dict[str, float], in_a_row: int, step: int, number: int, micro_batches: list[MicroBatch], cfg: Config
) -> int:
    """The number of updates in a row, with this one, that were skipped because loss or gradient is NaN or infinite.

    Warns of a skipped update and writes its micro-batches. A gradient of exactly 0 is skipped too, but sets the number
    to 0. Raises TrainingError at train.max_skipped.
    """
    if report["grad_norm"] == 0 and dist.get_rank() == 0:
        print("warning: no gradient (equal rewards in every group, no KL or entropy): update skipped", flush=True)
    if math.isfinite(report["grad_norm"]):
        return 0
    path = Path(cfg.output_dir, "skipped", f"step_{step:06d}_update_{number}")
    report_skipped(report, in_a_row + 1, path, micro_batches, cfg.train.max_skipped)
    return in_a_row + 1


def report_skipped(
    report: dict[str, float], in_a_row: int, path: Path, micro_batches: list[MicroBatch], limit: int
) -> None:
    """Write the micro-batches of a skipped update to `path`_rank_*, and warn. Raises TrainingError at the limit."""
    if bridge.reports_loss():
        write_micro_batches(path, micro_batches)
    what = f"the loss of an update is {report['loss']}"
    if math.isfinite(report["loss"]):
        what = "a gradient is NaN or infinite"
    message = f"{what}; it was skipped, its micro-batches are in {path}_rank_*.safetensors"
    if in_a_row >= limit:
        raise TrainingError(f"{message}; {in_a_row} in a row, train.max_skipped={limit}")
    if dist.get_rank() == 0:
        print(f"warning: {message}; {in_a_row} in a row, the run stops at train.max_skipped={limit}", flush=True)


def write_micro_batches(path: Path, micro_batches: list[MicroBatch]) -> None:
    """Write this rank's micro-batches to `path`_rank_R.safetensors, each tensor as "number of the micro-batch.name"."""
    tensors = {}
    for i, mb in enumerate(micro_batches):
        for name, value in vars(mb).items():
            if torch.is_tensor(value):
                tensors[f"{i}.{name}"] = value
        tensors[f"{i}.seq_id"] = mb.seq_id
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, f"{path}_rank_{dist.get_rank():05d}.safetensors")


def check_graded(samples: list[Sample], prompts: dict[int, Prompt], reward: RewardConfig, shown: set[str]) -> None:
    """Raise UserError, on every rank, if the reward failed for a larger share of the samples than it may.

    Otherwise warn, once a run for each kind of error. `prompts`: {group: prompt}; `shown`: the kinds shown so far.
    """
    failed = [s for s in samples if s.graded == "error"]
    if failed:
        report_failed(failed, len(samples), prompts, reward.max_error_frac, shown)
    if any(isinstance(spec, dict) for spec in (reward.default, *reward.by_source.values())):
        check_applied([s for s in samples if s.graded == "ok"], reward, shown)


def check_applied(samples: list[Sample], reward: RewardConfig, found: set[str]) -> None:
    """Raise UserError for a name in a weighted sum that is None for every sample, the first time its source is graded.

    `found` gets the sources: later steps may lack rows that a reward is for.
    """
    for source in sorted({s.source for s in samples}):
        spec = reward.by_source.get(source, reward.default)
        if isinstance(spec, str) or f"rewards of {source!r}" in found:  # a single one that is None is an error already
            continue
        graded = [s for s in samples if s.source == source]
        parts = {part for s in graded for part in s.reward_parts}
        for name in spec:
            if not any(is_part(part, name) for part in parts):
                raise UserError(
                    f"the reward {name!r} of source {source!r} is None for all {len(graded)} answers; legal is a finite"
                    " number for those to which it applies. Leave it out of the reward, or give rows that it is not for"
                    " a source of their own (reward.by_source)"
                )
        found.add(f"rewards of {source!r}")


def report_failed(failed: list[Sample], count: int, prompts: dict[int, Prompt], bound: float, shown: set[str]) -> None:
    """Print the warning, or raise the UserError, of check_graded for the `failed` ones of `count` samples."""
    messages = {}
    for s in failed:
        what = "" if s.error.startswith(turns.FAILED) else f"the reward of source {s.source!r} failed: "
        row = json.dumps(prompts[s.group].row, default=str)
        kind = s.error.partition(":")[0]
        messages.setdefault(kind, f"{what}{s.error}\n  row: {row}\n  response: {s.text!r}")
    if len(failed) > bound * count:
        raise UserError(
            f"{next(iter(messages.values()))}\n  {len(failed)} of {count} samples failed, more than "
            f"reward.max_error_frac={bound:g} allows; mend the function or the row, or choose another reward for the "
            "source (reward.by_source)"
        )
    for kind, message in messages.items():
        if kind not in shown and dist.get_rank() == 0:
            print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)
    shown.update(messages)
