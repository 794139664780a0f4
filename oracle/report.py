"""What was compared, item by item: the largest difference and its bound, or the values that part."""

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from oracle.run import Recorded

ITEMS = (  # in the order in which a step makes them; docs/dev/checks.md says what each compares
    "order", "seeds", "sampling", "answers", "rewards", "groups", "log-probs", "reference", "teacher", "advantages",
    "token-weights", "loss", "entropy", "gradient", "updates", "lr", "weights", "adapters", "exports", "checkpoints",
    "metrics",
)  # fmt: skip
UNKNOWN = {  # field of Megatron-core that changes a formula → a quantity that has none here, and why
    "moe_aux_loss_coeff": ("grad_norm", "the balancing loss depends on which answers share a micro-batch"),
}
SHOWN = 3  # problems of an item, each of another quantity
EXACT = {  # what goes through no model, in every dtype
    "reward": (1e-6, 1e-6), "overlong": (1e-9, 0.0), "groups/": (1e-9, 0.0),
    "value of ": (0.0, 1e-9), "number of ": (0.0, 0.0), "state: ": (0.0, 0.0), "equal bits: ": (0.0, 0.0),
    "token: weight": (1e-6, 1e-6), "token: answer's advantage": (1e-6, 1e-6),
    "metric: ": (1e-9, 1e-9), "metric: advantage/": (1e-7, 1e-7),  # the run divides these in fp32
    "merged: ": (0.02, 0.0), "loaded: ": (1e-3, 0.0),
}  # fmt: skip
TIMES = 3  # how many times farther than rounding moves it a quantity of a run may be
# Beginning of a quantity → (absolute, relative) difference that is no fault in fp32, fp16 and bf16, whatever rounding
# does; the longest beginning holds. In fp32 they are 10 times the largest differences in the runs of test_pairs.py. In
# fp16 and bf16 rounding is measured by the trainer's shadow, and a difference may be TIMES as large.
ROUNDED = {
    "": ((2e-5, 2e-4), (2e-3, 0.01), (5e-3, 0.03)),
    "advantage": ((5e-4, 1e-3), (0.05, 0.1), (0.2, 0.4)),  # with algo.kl_in=reward; else through no model
    "token: advantage": ((5e-4, 1e-3), (0.1, 0.1), (0.45, 0.4)),  # with a teacher
    "token: rollout_logp": ((5e-4, 0.0), (0.04, 0.0), (0.15, 0.0)),
    "logp_gap/": ((5e-4, 0.0), (0.04, 0.0), (0.15, 0.0)),  # of our weights to vLLM, not of the run's
    "logp_gap/mean": ((5e-4, 0.0), (0.01, 0.0), (0.03, 0.0)),
    "grad_norm": ((1e-6, 3e-4), (1e-3, 0.03), (2e-3, 0.1)),
    "nucleus: ": ((0.02, 1e-3), (0.05, 0.02), (0.1, 0.03)),  # ids from which tokens are drawn: few lie at the border
    "ratio/clip_frac": ((2e-5, 2e-4), (0.1, 0.0), (0.1, 0.0)),
    "slope: ": ((0.05, 0.0), (0.1, 0.0), (0.1, 0.0)),  # over all elements, where rounding averages out
    "export: ": ((4e-3, 0.0), (0.1, 0.0), (0.2, 0.0)),
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
    problems: dict[str, str] = field(default_factory=dict)  # a quantity → its first value that parts, in words
    notes: dict[str, int] = field(default_factory=dict)  # why something is not judged → since when

    @property
    def parts(self):
        """The first problem."""
        return next(iter(self.problems.values()), "")


class Report:
    """Collects comparisons. A value parts where the difference is beyond absolute + relative · |ours|."""

    def __init__(self, run: Recorded):
        self.bounds = BOUNDS[run.cfg.model.dtype]
        self.moved = {}  # quantity → how far rounding moves it, as far as was seen
        self.step = 0
        self.items = {name: Item() for name in ITEMS}
        self.firsts = {}  # an item that parts → step and problem, the first item first
        self.remarks = list(run.remarks)  # on the run as a whole
        self.absent = absent(run)
        self.unknown = dict(UNKNOWN[name] for name, value in run.cfg.megatron.items() if name in UNKNOWN and value)

    def check(self, item, name, theirs, own):
        """Compare a number, or numbers, of the run with ours; None in a run is no number. Whether they agree."""
        if name in self.unknown:
            self.note(item, self.unknown[name])
            return True
        found = self.compare(name, theirs, own)
        if found.share > self.items[item].largest.share:
            self.items[item].largest = found
        self.say(item, found.parts and f"{name}: {found.parts}", torch.as_tensor(own).numel())
        return not found.parts

    def say(self, item, problem="", count=1):
        """Count values of an item that agree or, with a `problem`, one that parts, perhaps not the first."""
        found = self.items[item]
        found.count += count
        if problem:
            quantity = re.sub(r"'[^']*'|[^a-zA-Z:/_]", "", problem)  # in which groups, numbers and texts are alike
            found.problems.setdefault(quantity, f"from step {self.step} on: {problem}")
            self.firsts.setdefault(item, f"step {self.step}, {item}: {problem}")

    def measure(self, name, moved):
        """Rounding moves a quantity this far: three times as much is no fault, from now on."""
        self.moved[name] = max(self.moved.get(name, 0.0), float(moved))

    def note(self, item, why):
        """Something of the item is not judged."""
        self.items[item].notes.setdefault(why.removeprefix("not judged: "), self.step)

    def compare(self, name, theirs, own):
        """The difference of a number, or numbers, of the run from ours."""
        if name in self.unknown:
            return Difference()
        theirs = torch.as_tensor(math.nan if theirs is None else theirs, dtype=torch.float64).flatten()
        own = torch.as_tensor(own, dtype=torch.float64).flatten()
        if len(theirs) != len(own):
            return Difference(math.inf, "", f"the run has {len(theirs)} values, not {len(own)}")

        beginning = max((known for known in self.bounds if name.startswith(known)), key=len)
        absolute, relative = self.bounds[beginning]
        bounds = (absolute + relative * own.abs()).clamp(min=TIMES * self.moved.get(name, 0.0))
        apart = (theirs - own).abs().nan_to_num(nan=math.inf).where(theirs.isfinite() | own.isfinite(), 0.0)
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

    @property
    def first(self):
        """The first problem of all."""
        return next(iter(self.firsts.values()), "")

    def parted(self):
        """The items that part."""
        return [name for name, item in self.items.items() if item.parts]

    def unjudged(self):
        """{item: why something of it is not judged}, of those that do not part."""
        nothing = "nothing of it is recorded"
        found = {}
        for name, item in self.items.items():
            whys = [*item.notes] or [nothing] * (not item.count)
            is_there = item.count or name not in self.absent
            if whys and is_there and not item.parts:
                found[name] = whys
        return found

    def table(self, mine=()):
        """A line for each item that the run has, more where something is not judged; `mine` are items that may part."""
        lines = [*self.remarks]
        unjudged = self.unjudged()

        for label, item in self.items.items():
            whose = "yours" if label in mine else "PARTS"
            texts = [f"{whose} {problem}" for problem in [*item.problems.values()][:SHOWN]]
            if item.count and not item.parts:
                texts.append(f"agrees {item.largest.largest} ({item.count} values)")
            for why in item.notes if item.parts else unjudged.get(label, ()):
                since = item.notes.get(why, 0)
                texts.append(f"not judged: {why}" + f" (from step {since} on)" * (since > 1))
            for text in texts:
                lines.append(f"{label:14}{text}")
                label = ""  # further lines of the item have none

        absent = [name for name in self.absent if not self.items[name].count]
        return "\n".join([*lines, f"not in this run: {', '.join(absent)}"] if absent else lines)

    def verdict(self, mine=()):
        """(exit code, the last line). 1: an item that is not of `mine` parts; 3: something is not judged; else 0."""
        parted = self.parted()
        unjudged = {name: whys for name, whys in self.unjudged().items() if name not in mine}
        agree = [name for name, item in self.items.items() if item.count and name not in {*parted, *unjudged}]
        by_why = {}  # items that one thing keeps from being judged
        for name, whys in unjudged.items():
            by_why.setdefault("; ".join(whys), []).append(name)

        other = [name for name in parted if name not in mine]
        yours = [name for name in parted if name in mine]
        words = []
        if other:
            first = next(problem for name, problem in self.firsts.items() if name in other)
            words.append(f"PARTS: {', '.join(other)}, the first in {first}")
        if yours:
            words.append(f"yours: {', '.join(yours)}")
        words.append(f"agrees: {len(agree)}")
        if by_why:
            whys = [f"{', '.join(names)} ({why})" for why, names in by_why.items()]
            words.append(f"not judged: {'; '.join(whys)}")
        code = 1 if other else 3 if unjudged else 0
        return code, "; ".join(words)


def absent(run: Recorded):
    """The items that a run does not have, by its configuration and its folders."""
    cfg = run.cfg

    def has(folder):
        return any(run.has(folder, step) for step in run.steps)

    there = {
        "reference": cfg.algo.kl_coef, "teacher": cfg.algo.teacher, "weights": has("hf"),
        "exports": has("hf"), "metrics": run.metrics,
        "adapters": cfg.lora.rank and has("adapter"), "checkpoints": has("checkpoints"),
    }  # fmt: skip
    return [name for name, value in there.items() if not value]
