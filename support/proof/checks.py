"""The one door of the proof: what a step shows before it goes on. Each other file of this wing holds checks of a kind.

A check ends the run on what rounding cannot be, and warns of what it may be. What each finds: docs/dev/checks.md.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megatron_bridge as bridge
from config import Config, RankError, TrainingError
from support.base import ranks
from support.base.hf_folder import safetensor_files
from support.base.require import require
from support.data.prompts import Prompt
from support.engine.push_check import differing, digest, shorten, to_host
from support.model.checkpoint import read_state
from support.proof import graded, rows
from support.proof.gap import GapCheck
from support.proof.order import Order
from support.proof.overflow import check_finite
from support.proof.push_source import read_shards
from support.proof.update import FirstUpdate, Passes
from support.step import metrics
from support.step.records import Batch, MicroBatch, Sample


@dataclass
class Checks(graded.RewardChecks):
    """The checks of a run, the same calls in the same order on every rank. Every method may raise, on every rank."""

    cfg: Config
    model: list
    optimizer: object
    passes: Passes
    skipped: int = 0  # updates in a row that were skipped because loss or gradient was NaN or infinite
    untrained: int = 0  # answers of the last step that no update has had so far

    def __post_init__(self):
        checkpoint = self.inputs.checkpoint
        self.first_update = FirstUpdate(self.model, self.optimizer, checkpoint)
        self.gap = GapCheck(self.model, self.passes.score)
        self.initial = some_entries(bridge.trainable_weights(self.model))  # before a checkpoint is restored
        self.order = Order(self.inputs.prompts, self.cfg, read_state(checkpoint) if checkpoint else {})
        own = bridge.named_weights(self.model, factors=True) or bridge.named_weights(self.model)
        still = [name for name, weight in own.items() if not weight.requires_grad]
        if 0 < len(still) < len(own) and bridge.mpu.get_data_parallel_rank() == 0:  # a stage may have no adapter
            print(f"warning: {len(still)} weights are not trained, though others are: {', '.join(still[:4])}")

    def sampled(self, step: int, answers: list[Sample], prompts: dict[int, Prompt], cfg: Config) -> None:
        """Check a round of sampling: prompts, seeds, ends of answers, grades. `prompts`: {group: prompt}."""
        self.rewards(answers, prompts, cfg)
        rows.check_requests(step, answers, prompts, cfg.rollout, cfg, self.inputs.ends.own)
        self.order.drawn += prompts.values()
        if cfg.rollout.turns is None:
            warning = rows.check_ends(answers, cfg.rollout.max_new_tokens, self.inputs.ends)
            if warning and "ends" not in self.errors_shown and dist.get_rank() == 0:
                print(f"warning: step {step}: {warning}", flush=True)
                self.errors_shown.add("ends")
        rows.check_texts(answers, self.inputs.tokenizer)

    def start_updates(
        self, step: int, samples: list[Sample], batch: Batch, cfg: Config, reference: list[torch.Tensor] | None
    ) -> "UpdateChecks":
        """Check answers, rewards, advantages and the reference. Returns the checks of this step's updates."""
        require(self.untrained == 0, f"{self.untrained} answers of the step before were in no update", TrainingError)
        self.order.take(step, cfg)
        rows.check_samples(samples, cfg)
        rows.check_credit(samples, batch, cfg)
        weights = bridge.named_weights(self.model) if cfg.lora.rank else {}
        scales = {weight.adapter.scale for weight in weights.values() if hasattr(weight, "adapter")}
        require(
            scales <= {cfg.lora.alpha / max(cfg.lora.rank, 1)},
            f"adapters have the scales {scales}, not lora.alpha={cfg.lora.alpha} / lora.rank={cfg.lora.rank}",
            TrainingError,
        )
        moved = 0.0
        if reference is not None:
            same = torch.equal(some_entries(reference), self.initial)
            require(same, "the reference is not the initial model: it was moved, or copied after a resume", RankError)
            moved = (some_entries(bridge.trainable_weights(self.model)) != self.initial).float().mean().item()
        return UpdateChecks(self, step, samples, batch, cfg, moved=moved > 0.5)

    def exported(self, step: int) -> None:
        """TrainingError unless the export of `step`, read back, has the weights of the trainer's shards, bit for bit.

        Rank 0 reads what it wrote, since other machines may not see it. A shard in an odd layout has no digest.
        """
        folder = Path(self.cfg.output_dir, f"hf/step_{step:06d}")
        digests = {}
        if dist.get_rank() == 0:
            for path in {*safetensor_files(str(folder)).values()}:
                digests |= {name: digest(tensor, ordered=True) for name, tensor in load_file(path).items()}
        written = ranks.gather(to_host(digests))[0]
        wrong = set().union(*ranks.gather(differing(read_shards(self.model).digests, written)))
        require(
            not wrong,
            f"the export {folder} does not hold the trainer's weights: {shorten(wrong)} were lost, old, exchanged or "
            "converted as they were written. What a fork exports otherwise goes into exported, support/proof/checks.py",
            TrainingError,
        )


def some_entries(weights: list[torch.Tensor]) -> torch.Tensor:
    """At most a hundred numbers of each weight, on the host."""
    return torch.cat([weight.detach().flatten()[:: weight.numel() // 100 + 1] for weight in weights]).cpu()


@dataclass
class UpdateChecks:
    """The checks of the updates of one step; each update calls gradient, before_step and after_step."""

    run: Checks
    step: int
    samples: list[Sample]
    batch: Batch
    cfg: Config
    moved: bool = False  # whether most of the weights are no longer the initial ones
    number: int = 0  # of the update within the step
    chosen: list[int] = field(default_factory=list)  # numbers of its samples
    trained: Counter = field(default_factory=Counter)  # how often each sample was

    def gradient(self, weighted: Batch) -> None:
        """In two updates of a run, the first and a later one: whether the gradient of some answers is their loss's."""
        self.run.first_update.compare_gradient(weighted, self.cfg, self.step, self.run.passes)

    def before_step(self, report: dict, weighted: Batch, chosen: list[int], micro_batches: list[MicroBatch]) -> bool:
        """Whether the optimizer may step: False where the loss is NaN or infinite. The gradient is computed."""
        run, cfg = self.run, self.cfg
        self.chosen = chosen
        self.trained.update(chosen)
        run.order.compare({f"update {self.number}": chosen})
        run.untrained = len(self.samples) - len(self.trained)
        if not math.isfinite(report["loss"]):
            return False
        vocabulary, entropy = run.model[0].hf_config.vocab_size, report["entropy"] / max(report["tokens"], 1)
        require(
            max(self.trained.values()) <= cfg.train.epochs_per_step,
            "an update trains answers again that this epoch has trained already",
            TrainingError,
        )
        require(
            weighted.old_logp is self.batch.old_logp,
            "the old log-probs of an update are not those from before the first update of its step",
            TrainingError,
        )
        require(
            not self.moved or report["k2"] > 0 or not report["tokens"],
            "the reference has the log-probs of the policy: was it scored with the policy's weights?",
            TrainingError,
        )
        require(
            entropy <= math.log(vocabulary) * 1.0001,
            f"the entropy of a token is {entropy:.6g}, above that of {vocabulary} equal ones",
            TrainingError,
        )
        rows.check_update(report, micro_batches, weighted, self.samples, chosen, cfg)
        if self.number < metrics.compared_updates(cfg):  # the weights are still those that vLLM sampled with
            run.gap.check(report, self.step, self.samples, self.batch, cfg, begins=self.number == 0)
        run.first_update.before_step(cfg, self.step)
        return True

    def after_step(self, report: dict, micro_batches: list[MicroBatch]) -> None:
        """Whether the update was AdamW's, at first and now and then; whether its gradient was a number."""
        run = self.run
        run.first_update.after_step(self.cfg, self.step, report["grad_norm"])
        if report["grad_norm"] == 0 and dist.get_rank() == 0:
            why = "equal rewards in every group, no KL or entropy"
            if self.batch.sums((self.batch.advantages != 0) & self.batch.trained)[self.chosen].any():
                why = "though rewards differ: all of its tokens are clipped or masked, or the loss reaches no weight"
            print(f"warning: no gradient ({why}): update skipped", flush=True)
        path = Path(self.cfg.output_dir, "skipped", f"step_{self.step:06d}_update_{self.number}")
        run.skipped = check_finite(report, run.skipped, path, micro_batches, run, self.cfg)
        self.number += 1
