"""The one door of the proof: what a step shows before it goes on. Each other file of this wing holds checks of a kind.

A check ends the run on what rounding cannot be, and warns of what it may be. What each finds: docs/dev/checks.md.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, TrainingError
from support.proof import graded, rows
from support.proof.gap import GapCheck
from support.proof.update import FirstUpdate, Passes
from support.step import metrics
from support.step.records import Batch, MicroBatch, Sample


@dataclass
class Checks(graded.RewardChecks):
    """The checks of a run, the same calls in the same order on every rank. Every method may raise, on every rank."""

    model: list
    optimizer: object
    checkpoint: Path | None  # what this start resumed from
    passes: Passes
    skipped: int = 0  # updates in a row that were skipped because loss or gradient was NaN or infinite

    def __post_init__(self):
        self.first_update = FirstUpdate(self.model, self.optimizer, self.checkpoint)
        self.gap = GapCheck(self.model, self.passes.score)

    def start_updates(self, step: int, samples: list[Sample], batch: Batch, cfg: Config) -> "UpdateChecks":
        """Whether the advantages are those of the rewards. Returns the checks of this step's updates."""
        rows.check_credit(samples, batch, cfg)
        return UpdateChecks(self, step, samples, batch, cfg)


@dataclass
class UpdateChecks:
    """The checks of the updates of one step; each update calls gradient, before_step and after_step."""

    run: Checks
    step: int
    samples: list[Sample]
    batch: Batch
    cfg: Config
    number: int = 0  # of the update within the step
    trained: Counter = field(default_factory=Counter)  # how often each sample was

    def gradient(self, weighted: Batch) -> None:
        """In the first update of a start: whether the gradient of some of its answers is that of their loss."""
        self.run.first_update.compare_gradient(weighted, self.cfg, self.step, self.run.passes)

    def before_step(self, report: dict, weighted: Batch, chosen: list[int], micro_batches: list[MicroBatch]) -> bool:
        """Whether the optimizer may step: False where the loss is NaN or infinite. The gradient is computed."""
        run, cfg = self.run, self.cfg
        if not math.isfinite(report["loss"]):
            return False
        self.trained.update(chosen)
        if max(self.trained.values()) > cfg.train.epochs_per_step:
            raise TrainingError("an update trains answers again that this epoch has trained already")
        if weighted.old_logp is not self.batch.old_logp:
            raise TrainingError("the old log-probs of an update are not those from before the first update of its step")
        vocabulary, entropy = run.model[0].hf_config.vocab_size, report["entropy"] / max(report["tokens"], 1)
        if entropy > math.log(vocabulary) * 1.0001:
            raise TrainingError(f"the entropy of a token is {entropy:.6g}, above that of {vocabulary} equal ones")
        rows.check_update(report, micro_batches, weighted, self.samples, chosen, cfg)
        if self.number < metrics.compared_updates(cfg):  # the weights are still those that vLLM sampled with
            run.gap.check(report, self.step, self.samples, self.batch, cfg)
        run.first_update.before_step(cfg, self.step)
        return True

    def after_step(self, report: dict, micro_batches: list[MicroBatch]) -> None:
        """Whether the update was AdamW's, the first time; whether its gradient was a number."""
        run = self.run
        run.first_update.after_step(self.cfg, self.step)
        run.skipped = check_finite(report, run.skipped, self.step, self.number, micro_batches, self.cfg)
        self.number += 1


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
    is_finite = math.isfinite(report["loss"])
    what = "a gradient is NaN or infinite" if is_finite else f"the loss of an update is {report['loss']}"
    message = f"{what}; it was skipped, its micro-batches are in {path}_rank_*.safetensors"
    if in_a_row >= limit:
        raise TrainingError(f"{message}; {in_a_row} in a row, train.max_skipped={limit}")
    if dist.get_rank() == 0:
        print(f"warning: {message}; {in_a_row} in a row, the run stops at train.max_skipped={limit}", flush=True)


def write_micro_batches(path: Path, micro_batches: list[MicroBatch]) -> None:
    """Write this rank's micro-batches to `path`_rank_R.safetensors, each tensor as "number of the micro-batch.name"."""
    tensors = {f"{i}.seq_id": mb.seq_id for i, mb in enumerate(micro_batches)}
    for i, mb in enumerate(micro_batches):
        tensors |= {f"{i}.{name}": value for name, value in vars(mb).items() if torch.is_tensor(value)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, f"{path}_rank_{dist.get_rank():05d}.safetensors")
