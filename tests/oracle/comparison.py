"""What was compared: quantities, differences, bounds; and the first value that parts."""

import math
from dataclasses import dataclass

import torch

EXACT = {  # what goes through no model, in every dtype
    "answer: ": (0.0, 0.0),
    "sample: reward": (1e-9, 0.0),
    "reward/": (1e-9, 1e-9),
    "groups/": (1e-9, 0.0),
    "tokens/": (1e-9, 1e-9),
    "lr": (0.0, 1e-9),
    "schedule/": (0.0, 1e-9),
    "update/skipped": (0.0, 0.0),
}
# Beginning of a quantity → (absolute, relative) difference that rounding may make in fp32, fp16 and bf16; the longest
# beginning holds. They are 2.5 (bf16) to 10 times (fp32) the largest differences in the runs of test_pairs.py, or more.
ROUNDED = {
    "": ((2e-5, 2e-4), (4e-3, 0.03), (2e-2, 0.1)),
    "sample: advantage": ((5e-4, 1e-3), (0.05, 0.1), (0.2, 0.4)),  # with algo.kl_in=reward; else through no model
    "token: rollout_logp": ((5e-4, 0.0), (0.1, 0.0), (0.45, 0.0)),
    "logp_gap/": ((5e-4, 0.0), (0.1, 0.0), (0.45, 0.0)),  # our weights, not those of the run, against vLLM
    "grad_norm": ((1e-6, 3e-4), (2e-3, 0.1), (1e-2, 0.5)),
    "mismatch/cut_frac": ((2e-5, 2e-4), (0.1, 0.0), (0.1, 0.0)),
    "ratio/clip_frac": ((2e-5, 2e-4), (0.1, 0.0), (0.1, 0.0)),
    "export: weights": ((4e-3, 0.0), (0.2, 0.0), (0.5, 0.0)),
}
BOUNDS = {
    dtype: EXACT | {name: bounds[number] for name, bounds in ROUNDED.items()}
    for number, dtype in enumerate(("fp32", "fp16", "bf16"))
}


@dataclass
class Quantity:
    """The comparisons of one quantity so far."""

    count: int = 0
    largest: float = 0.0  # difference
    share: float = 0.0  # the largest difference divided by its bound
    bound: float = 0.0  # there


class Comparison:
    """Collects comparisons. A value parts where the difference is beyond absolute + relative · |ours|."""

    def __init__(self, dtype: str, bounds: dict | None = None):
        self.bounds = BOUNDS[dtype] | (bounds or {})
        self.step = 0
        self.quantities: dict[str, Quantity] = {}
        self.first: str | None = None  # the first value that parts, in words

    def check(self, name: str, theirs, own) -> None:
        """Compare a number, or numbers, of the run with ours; None in a run is no number."""
        quantity = self.quantities.setdefault(name, Quantity())
        theirs = math.nan if theirs is None else theirs
        theirs, own = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (theirs, own))
        if len(theirs) != len(own):
            quantity.share = math.inf
            self.first = self.first or f"step {self.step}, {name}: the run has {len(theirs)} values, not {len(own)}"
            return
        absolute, relative = self.bounds[max((k for k in self.bounds if name.startswith(k)), key=len)]
        bounds = absolute + relative * own.abs()
        differences = (theirs - own).abs().nan_to_num(nan=math.inf)
        shares = torch.where(differences == 0, 0.0, differences / bounds)
        worst = int(shares.argmax())
        quantity.count += len(own)
        if shares[worst] >= quantity.share:
            quantity.largest, quantity.share = differences[worst].item(), shares[worst].item()
            quantity.bound = bounds[worst].item()
        if shares[worst] > 1 and self.first is None:
            n = int((shares > 1).nonzero()[0])
            text = f"the run has {theirs[n]:.6g}, the second trainer {own[n]:.6g}"
            apart = f"{differences[n]:.2g} apart, bound {bounds[n]:.2g}"
            self.first = f"step {self.step}, {name}: {text}: {apart}"

    def table(self) -> str:
        """A line for each quantity."""
        lines = [f"{'quantity':26}{'values':>8}{'largest difference':>20}{'bound':>10}  ok"]
        for name, q in self.quantities.items():
            lines.append(f"{name:26}{q.count:8}{q.largest:20.2e}{q.bound:10.1e}  {'yes' if q.share <= 1 else 'NO'}")
        return "\n".join(lines)
