"""What a run records of its updates in rollouts/updates_*.jsonl: what was trained, by which values, and the outcome."""

from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from pydantic import BaseModel

from config import Config
from grpo.parts.model.optimizer_state import optimizer_steps
from grpo.step.metrics import report_mean
from grpo.step.records import Batch, Sample

# Entry of an update's report that is recorded → what its sum is divided by.
MEANS = {
    "loss": "denominator", "policy": "denominator", "entropy": "tokens", "clipped": "tokens", "outside": "tokens",
    "k3": "tokens",
}  # fmt: skip


@dataclass
class Updates:
    """The updates of a step. `samples` are those of the batch, `sampled` those of rollouts/, in its order.

    The lines are on rank 0 alone, the fields of a line in docs/dev/checks.md.
    """

    cfg: Config  # as in config.yaml
    step_cfg: Config  # as the step uses it
    sampled: list[Sample]
    samples: list[Sample]
    optimizer: object
    lines: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.steps = optimizer_steps(self.optimizer)

    def add(self, report: dict[str, float], weighted: Batch, chosen: list[int]):
        """Add the update on the `chosen` samples, which has ended; every rank calls this."""
        steps = optimizer_steps(self.optimizer)
        applied = steps > self.steps
        self.steps = steps
        if dist.get_rank():
            return

        line = {"update": len(self.lines) + 1, "applied": applied, "grad_norm": report["grad_norm"]}
        line |= {name: report_mean(name, [report], over) for name, over in MEANS.items() if name in report}
        line |= {"tokens": report["tokens"], "trained": report["denominator"], "loss_scale": report["loss_scale"]}
        planned = keys_of(self.cfg)
        values = {key: value for key, value in keys_of(self.step_cfg).items() if value != planned[key]}
        self.lines.append(line | {"values": values} | self.trained(weighted, chosen))

    def trained(self, weighted: Batch, chosen: list[int]):
        """The weights of the answers, their advantages where a token has another than its answer, and the rows of
        answers that this step did not sample.
        """
        places = {id(sample): place for place, sample in enumerate(self.sampled)}
        weights = [None] * len(places)
        advantages = [None] * len(places)
        others = []
        for n in chosen:
            sample = self.samples[n]
            place = places.pop(id(sample), None)
            if place is None:  # of another step, or once more
                place = len(weights)
                weights.append(None)
                advantages.append(None)
                others.append(sample.as_row())

            # Where turns of model and environment alternate, the environment's have an advantage that nobody uses.
            models = np.repeat(np.arange(len(sample.turns)) % 2 == 0, sample.turns)
            end = weighted.starts_N[n] + weighted.lengths_N[n]
            response = slice(end - len(models), end)
            weights[place] = short(weighted.weights[response].numpy(), models)
            advantage = short(weighted.advantages[response].numpy() * models, models)
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
