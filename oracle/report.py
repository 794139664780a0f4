"""What was compared, item by item: the largest difference and its bound, or the first value that parts."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from oracle.run import Recorded

ITEMS = (  # in the order in which a step makes them; "weights" are AdamW's: exports, and what later steps compute
    "order", "seeds", "sampling", "answers", "rewards", "groups", "log-probs", "reference", "teacher", "advantages",
    "token-weights", "loss", "entropy", "gradient", "updates", "lr", "weights", "adapters", "checkpoints",
)  # fmt: skip
EXACT = {  # what goes through no model, in every dtype
    "reward": (1e-6, 1e-6), "reward/": (1e-9, 1e-9), "overlong": (1e-9, 0.0), "groups/": (1e-9, 0.0),
    "lr": (0.0, 1e-9), "schedule/": (0.0, 1e-9), "state: ": (0.0, 0.0), "equal bits: ": (0.0, 0.0),
}  # fmt: skip
# Beginning of a quantity → (absolute, relative) difference that rounding may make in fp32, fp16 and bf16; the longest
# beginning holds. They are 2.5 (bf16) to 10 times (fp32) the largest differences in the runs of test_pairs.py, or more.
ROUNDED = {
    "": ((2e-5, 2e-4), (4e-3, 0.03), (2e-2, 0.1)),
    "advantage": ((5e-4, 1e-3), (0.05, 0.1), (0.2, 0.4)),  # with algo.kl_in=reward; else through no model
    "token: rollout_logp": ((5e-4, 0.0), (0.1, 0.0), (0.45, 0.0)),
    "logp_gap/": ((5e-4, 0.0), (0.1, 0.0), (0.45, 0.0)),  # of our weights to vLLM, not of the run's
    "grad_norm": ((1e-6, 3e-4), (2e-3, 0.1), (1e-2, 0.5)),
    "ratio/clip_frac": ((2e-5, 2e-4), (0.1, 0.0), (0.1, 0.0)),
    "export: ": ((4e-3, 0.0), (0.2, 0.0), (0.5, 0.0)),
}
BOUNDS = {
    dtype: EXACT | {name: bounds[number] for name, bounds in ROUNDED.items()}
    for number, dtype in enumerate(("fp32", "fp16", "bf16"))
}


class Difference(NamedTuple):
    """How far a quantity of a run is from ours."""

    share: float = 0.0  # of the bound, at the value that is farthest
    largest: str = "exactly"  # that difference in words
    parts: str = ""  # the first value beyond its bound, in words


@dataclass
class Item:
    """The comparisons of one item so far."""

    count: int = 0  # of values
    largest: Difference = field(default_factory=Difference)
    parts: str = ""  # the first value that parts
    notes: dict[str, int] = field(default_factory=dict)  # what is not judged, or by no formula of ours → since when


class Report:
    """Collects comparisons. A value parts where the difference is beyond absolute + relative · |ours|."""

    def __init__(self, run: Recorded):
        self.bounds = BOUNDS[run.cfg.model.dtype]
        self.step = 0
        self.items = {name: Item() for name in ITEMS}
        self.first = ""  # the first value of all that parts
        self.remarks = list(run.remarks)  # on the run as a whole

    def check(self, item, name, theirs, own):
        """Compare a number, or numbers, of the run with ours; None in a run is no number. Whether they agree."""
        found = self.compare(name, theirs, own)
        if found.share > self.items[item].largest.share:
            self.items[item].largest = found
        self.say(item, found.parts and f"{name}: {found.parts}", torch.as_tensor(own).numel())
        return not found.parts

    def say(self, item, problem="", count=1):
        """Count values of an item that agree or, with a `problem`, one that parts, perhaps not the first."""
        found = self.items[item]
        found.count += count
        if problem and not found.parts:
            found.parts = f"from step {self.step} on: {problem}"
            self.first = self.first or f"step {self.step}, {item}: {problem}"

    def note(self, item, why):
        """Something of the item is not judged, or by no formula of ours."""
        self.items[item].notes.setdefault(why, self.step)

    def compare(self, name, theirs, own):
        """The difference of a number, or numbers, of the run from ours."""
        theirs = torch.as_tensor(math.nan if theirs is None else theirs, dtype=torch.float64).flatten()
        own = torch.as_tensor(own, dtype=torch.float64).flatten()
        if len(theirs) != len(own):
            return Difference(math.inf, "", f"the run has {len(theirs)} values, not {len(own)}")

        beginning = max((known for known in self.bounds if name.startswith(known)), key=len)
        absolute, relative = self.bounds[beginning]
        bounds = absolute + relative * own.abs()
        apart = (theirs - own).abs().nan_to_num(nan=math.inf)
        shares = torch.where(apart == 0, 0.0, apart / bounds)
        if not len(own) or shares.max() == 0:
            return Difference()

        worst = int(shares.argmax())
        share = shares.max().item()
        parts = ""
        if share > 1:
            n = int((shares > 1).nonzero()[0])
            parts = f"the run has {theirs[n]:.6g}, the oracle {own[n]:.6g}"
        return Difference(share, f"within {apart[worst]:.1e}, bound {bounds[worst]:.1e}: {name}", parts)

    # ---------------------------------------------------------------- what is shown

    def parted(self):
        """The items that part."""
        return [name for name, item in self.items.items() if item.parts]

    def table(self, mine=()):
        """A line for each item that the run has, more where something is not judged; `mine` are items that may part."""
        lines = [*self.remarks]
        for label, item in self.items.items():
            texts = []
            if item.parts:
                texts.append(f"{'yours' if label in mine else 'PARTS'} {item.parts}")
            elif item.count:
                texts.append(f"agrees {item.largest.largest} ({item.count} values)")
            for why, step in item.notes.items():
                texts.append(f"{why} (from step {step} on)" if step > 1 else why)
            for text in texts:
                lines.append(f"{label:14}{text}")
                label = ""  # further lines of the item have none
        return "\n".join(lines)
