"""What a run records of its updates in rollouts/updates_*.jsonl: what was trained, by which values, and the outcome."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from pydantic import BaseModel

from config import Config
from grpo.parts.base import ranks
from grpo.parts.model.optimizer_state import own_steps
from grpo.step.metrics import report_mean
from grpo.step.records import Batch, Sample

# Entry of an update's report that is recorded → what its sum is divided by.
MEANS = {
    "loss": "denominator", "policy": "denominator", "entropy": "tokens", "clipped": "tokens", "outside": "tokens",
    "k3": "tokens", "ref_kl": "tokens", "teacher_kl": "tokens", "teacher_entropy": "tokens",
}  # fmt: skip


@dataclass
class Updates:
    """The updates of a step. `samples` are those of the batch, `sampled` those of rollouts/, in its order.

    docs/dev/checks.md has the fields of a line.
    """

    cfg: Config  # as in config.yaml
    step_cfg: Config  # as the step uses it
    sampled: list[Sample]
    samples: list[Sample]
    optimizer: object
    lines: list[dict] = field(default_factory=list)  # on rank 0 alone, without "applied"

    def __post_init__(self):
        self.steps = [own_steps(self.optimizer)]  # of Adam on this rank: before the updates, then after each
        planned = keys_of(self.cfg)
        self.values = {key: value for key, value in keys_of(self.step_cfg).items() if value != planned[key]}

    def add(self, report: dict[str, float], weighted: Batch, chosen: list[int]):
        """Add the update on the `chosen` samples, which has ended; every rank calls this."""
        self.steps.append(own_steps(self.optimizer))
        if dist.get_rank():
            return

        line = {"update": len(self.lines) + 1, "grad_norm": report["grad_norm"]}
        line |= {name: report_mean(name, [report], over) for name, over in MEANS.items() if name in report}
        line |= {"tokens": report["tokens"], "trained": report["denominator"], "loss_scale": report["loss_scale"]}
        self.lines.append(line | {"values": self.values} | self.trained(weighted, chosen))

    def finish(self) -> list[dict]:
        """The lines, on rank 0; every rank calls this after the last update."""
        steps = np.max(ranks.gather(self.steps), axis=0).tolist()  # a stage that trains no weight counts no step
        applied = [after > before for before, after in itertools.pairwise(steps)]
        return [line | {"applied": each} for line, each in zip(self.lines, applied, strict=False)]

    def trained(self, weighted: Batch, chosen: list[int]):
        """The weights of the answers, their advantages where a token has another than its answer, and the rows of
        answers that this step did not sample.
        """
        places = {id(sample): place for place, sample in enumerate(self.sampled)}
        weights = [None] * len(places)
        advantages = [None] * len(places)
        others = []
        weights_F, advantages_F = weighted.weights.numpy(), weighted.advantages.numpy()
        for n in chosen:
            sample = self.samples[n]
            place = places.pop(id(sample), None)
            if place is None:  # of another step, or once more
                place = len(weights)
                weights.append(None)
                advantages.append(None)
                others.append(sample.as_row())

            # Where turns of model and environment alternate, the environment's have an advantage that nobody uses.
            models = sample.sampled
            end = weighted.starts_N[n] + weighted.lengths_N[n]
            response = slice(end - len(models), end)
            weights[place] = short(weights_F[response], models)
            advantage = short(advantages_F[response] * models, models)
            if not np.array_equal(advantage, np.float32(sample.advantage)):
                advantages[place] = advantage

        line = {"weights": weights}
        if any(value is not None for value in advantages):
            line["advantages"] = advantages
        return line | ({"others": others} if others else {})


def short(values, models):
    """The values of a response's tokens or, where all of the model's have one and the environment's 0, this number."""
    return float(values[0]) if np.array_equal(values, values[0] * models) else values


def keys_of(part: BaseModel, section=""):
    """{dotted key: value} of a configuration."""
    found = {}
    for name, value in part:
        found |= keys_of(value, f"{section}{name}.") if isinstance(value, BaseModel) else {f"{section}{name}": value}
    return found
