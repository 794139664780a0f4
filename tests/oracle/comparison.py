"""What was compared: quantities, differences, bounds; and the first value that parts."""

import math
from dataclasses import dataclass
from typing import Any

import torch

EXACT = {  # what goes through no model, in every dtype
    "sample: reward": (1e-9, 0.0),
    "reward/": (1e-9, 1e-9),
    "groups/": (1e-9, 0.0),
    "tokens/": (1e-9, 1e-9),
    "lr": (0.0, 1e-9),
    "schedule/": (0.0, 1e-9),
    "update/skipped": (0.0, 0.0),
}
# dtype → {beginning of a quantity: (absolute, relative) difference that rounding may make}; the longest beginning
# holds. They are 2.5 (bf16) to 10 times (fp32) the largest differences in the runs of test_pairs.py, or more.
BOUNDS = {
    "fp32": EXACT
    | {
        "": (2e-5, 2e-4),
        "sample: advantage": (5e-4, 1e-3),
        "token: advantages": (5e-4, 1e-3),
        "token: rollout_logp": (5e-4, 0.0),
        "token: trainer_logp": (5e-4, 0.0),
        "token: ratio": (5e-4, 5e-4),
        "logp_gap/": (5e-4, 0.0),  # our weights, not those of the run, against vLLM
        "grad_norm": (1e-6, 3e-4),
        "export: weights": (4e-3, 0.0),
    },
    "bf16": EXACT
    | {
        "": (2e-2, 0.1),
        "sample: advantage": (0.2, 0.4),  # with algo.kl_in=reward; otherwise they go through no model
        "token: advantages": (0.2, 0.4),
        "token: rollout_logp": (0.35, 0.0),
        "token: trainer_logp": (0.35, 0.0),
        "token: ratio": (0.1, 0.35),
        "logp_gap/": (0.35, 0.0),
        "grad_norm": (1e-2, 0.1),
        "mismatch/cut_frac": (0.1, 0.0),
        "ratio/clip_frac": (0.1, 0.0),
        "routes/differ_frac": (0.2, 0.0),  # routers near a tie; the run's own agree with vLLM's, which are bf16 too
        "export: weights": (0.5, 0.0),
    },
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

    def __init__(self, dtype: str):
        self.bounds = BOUNDS[dtype]
        self.step = 0
        self.quantities: dict[str, Quantity] = {}
        self.first: str | None = None  # the first value that parts, in words

    def check(self, name: str, theirs: Any, own: Any) -> None:
        """Compare a number, or numbers, of the run with ours."""
        if theirs is None:
            self.part(name, f"the run has null, the second trainer {own:.6g}")
            return
        theirs, own = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (theirs, own))
        if len(theirs) != len(own):
            self.part(name, f"the run has {len(theirs)} values, the second trainer {len(own)}")
            return
        absolute, relative = self.bounds[max((k for k in self.bounds if name.startswith(k)), key=len)]
        quantity = self.quantities.setdefault(name, Quantity())
        for run_value, value in zip(theirs.tolist(), own.tolist(), strict=True):
            bound = absolute + relative * abs(value)
            difference = abs(run_value - value)
            if math.isnan(difference):
                difference = math.inf
            share = difference / bound if bound else math.inf * difference if difference else 0.0
            quantity.count += 1
            if share >= quantity.share:
                quantity.largest, quantity.share, quantity.bound = difference, share, bound
            if share > 1:
                text = f"the run has {run_value:.6g}, the second trainer {value:.6g}"
                self.part(name, f"{text}: {difference:.2g} apart, bound {bound:.2g}")

    def part(self, name: str, text: str) -> None:
        """Keep this as the first value that parts, unless there is one."""
        quantity = self.quantities.setdefault(name, Quantity())
        quantity.share = max(quantity.share, math.inf if quantity.count == 0 else quantity.share)
        if self.first is None:
            self.first = f"step {self.step}, {name}: {text}"

    def table(self) -> str:
        """A line for each quantity."""
        lines = [f"{'quantity':26}{'values':>8}{'largest difference':>20}{'bound':>10}  ok"]
        for name, q in self.quantities.items():
            ok = "yes" if q.share <= 1 else "NO"
            lines.append(f"{name:26}{q.count:8}{q.largest:20.2e}{q.bound:10.1e}  {ok}")
        return "\n".join(lines)
