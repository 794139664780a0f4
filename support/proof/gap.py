"""The gap: trainer and vLLM must give the sampled tokens the same log-probs, up to the rounding of the model at hand.

How far rounding moves a log-prob depends on the model (bf16: by 0.005 nats in a random one of two layers, 0.04 in a
trained one of thirty), so it is measured: docs/dev/checks.md.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_bridge as bridge
from config import Config, TrainingError
from support.base.require import require
from support.step.records import Batch, Sample

# Times the model's own rounding. In fp32 more: kernels differ by approximations too, such as that of exp.
WARN = {"bf16": 3.0, "fp16": 3.0, "fp32": 10.0}
STOP = {"bf16": 10.0, "fp16": 10.0, "fp32": 50.0}
SMALLEST = {"fp32": 1e-6, "fp16": 1e-5, "bf16": 1e-4}  # mean |Δ| that rounding is taken to be at least
SLOPE = 0.02  # of the difference over the log-prob: a temperature that is off by about 2 %
SIGMAS = 6.0  # standard errors that the slope is beyond SLOPE
MEASURED = 8  # answers that rounding is measured on; at least one for each replica
OUTLIERS = 2  # tokens whose k3 alone is no defect
AGREED_BEFORE = (
    "they agreed at step 1: the engine did not take up the last weight push (stale or partly loaded weights); with "
    "sync/checked = 1 it did, and the two compute differently (kernels, precision)"
)
INEXACT = ("quantization", "kv_cache_dtype")  # options of vLLM that make it sample from another distribution


class Gap(NamedTuple):
    """The size of differences between log-probs of the same tokens, in nats."""

    mean: float  # of |Δ|
    k3: float  # of exp(Δ) - Δ - 1

    def over(self, rounding: "Gap") -> float:
        """How many times larger than `rounding` it is, by the mean or by the root of k3; NaN if one is NaN."""
        return float(np.maximum(self.mean / rounding.mean, np.sqrt(np.maximum(self.k3, 0) / rounding.k3)))


def gap_of(difference_M: Tensor, outliers: int = 0) -> Gap:
    """The size of differences [M] in nats; the `outliers` largest have no part in k3, whose terms are at most 10."""
    difference_M = difference_M.double()
    k3_M = difference_M.clamp(-20, 20)
    k3_M = (k3_M.expm1() - k3_M).clamp(max=10)
    kept = k3_M.sort().values[: max(len(k3_M) - outliers, 0)]
    return Gap(difference_M.abs().mean().item(), kept.sum().item() / max(len(k3_M), 1))


@dataclass
class GapCheck:
    """The check of each update whose weights are those that vLLM sampled with, and what it keeps since this start."""

    model: list
    score: Callable[[list, Batch, Config], Tensor]  # the trainer's log-probs [F] under the present weights
    rounding: Gap | None = None  # of the model's log-probs, as last measured
    recent: deque[tuple[float, float]] = field(default_factory=partial(deque, maxlen=20))  # (sum of k3, tokens) each
    told: bool = False  # whether the user was warned

    def check(
        self, report: dict[str, float], step: int, samples: list[Sample], batch: Batch, cfg: Config, begins=False
    ) -> None:
        """TrainingError where log-probs differ by more than rounding, or a warning. `begins`: weights are vLLM's."""
        tokens = report["tokens"]
        if not tokens:
            return
        gap = Gap(report["gap"] / tokens, report["gap_k3"] / tokens)
        self.recent.append((report["gap_k3"], tokens))
        for what, value, key in self.bounded(gap, report["gap_max"], cfg):
            bound = getattr(cfg.rollout, key)
            if bound is not None and not value <= bound:
                table = explain_gap(self.score(self.model, batch, cfg), batch, samples, step, gap.mean)
                raise TrainingError(
                    f"step {step}: trainer and vLLM disagree on sampled tokens: {what} = {value:.2e}, bound "
                    f"{bound:.1e} (rollout.{key})\n{table}"
                )
        limit = (STOP if self.told else WARN)[cfg.model.dtype]
        is_first = self.rounding is None
        if not is_first and (gap.over(self.rounding) <= limit or (self.told and meant_by(cfg))):
            return
        some, logp_F, self.rounding = measure_rounding(self.model, batch, cfg, self.score)
        if begins and batch.old_logp is not None and cfg.algo.old_logp == "trainer":
            # The median: in a mixture a token near a tie may go to another expert, which is no rounding.
            times = ((logp_F - some.old_logp)[some.mask].abs().median() / self.rounding.mean).item()
            require(
                times <= STOP[cfg.model.dtype],
                f"step {step}: the old log-probs are not the policy's: before the step's first update half of them "
                f"differ by {times:.1f} times its rounding or more. Were they scored with other weights, temperature "
                "or rows?",
                TrainingError,
            )
        if is_first and step == 1 and batch.ref_logp is not None and not cfg.algo.replay_routes:
            difference, bound = report["k2"] / tokens, STOP[cfg.model.dtype] ** 2 * self.rounding.k3
            require(
                difference <= bound,
                "before the first update policy and reference are the same model, but their log-probs differ: mean "
                f"(ref - logp)² / 2 = {difference:.1e}, bound {bound:.0e}; is dropout on in one of the passes?",
                TrainingError,
            )
        slope = slope_of(logp_F[some.mask], some.rollout_logp[some.mask]) if is_first else 0.0
        if gap.over(self.rounding) <= limit and not slope:
            return
        if batch.old_logp is not None and cfg.algo.old_logp == "trainer":
            logp_F = batch.old_logp  # an earlier update of this step has moved the weights
        else:
            logp_F = self.score(self.model, batch, cfg)
        self.judge(slope, step, logp_F, samples, batch, cfg)

    def bounded(self, gap: Gap, largest: float, cfg: Config) -> list[tuple[str, float, str]]:
        """(what, its value, key of section rollout) of what the configuration may bound.

        A single token can dominate k3 of an update: in bf16 the demo had 4.7e-4 in one of 300, at most 6.1e-5 in 20.
        So it is the mean of the tokens of the last 20 updates; missing ones of 4 count as 0.
        """
        kind, size = ("largest", largest) if cfg.model.dtype == "fp32" else ("mean", gap.mean)
        k3, tokens = np.sum(self.recent, axis=0)
        kl = k3 / (tokens * max(1.0, 4 / len(self.recent)))
        return [(f"{kind} |Δ log-prob|", size, "max_logp_gap"), ("mismatch KL (mean k3)", kl, "max_mismatch_kl")]

    def judge(self, slope: float, step: int, logp_F: Tensor, samples: list[Sample], batch: Batch, cfg: Config) -> None:
        """Raise TrainingError for a defect, warn of what may be rounding or is meant; logp_F: the trainer's."""
        gap = gap_of((logp_F - batch.rollout_logp)[batch.mask], OUTLIERS)
        times = gap.over(self.rounding)
        follows = f"; it follows the log-prob, with a slope of {slope:.3f}" if slope else ""
        message = (
            f"step {step}: trainer and vLLM disagree on sampled tokens: mean |Δ log-prob| = {gap.mean:.2e}, mismatch "
            f"KL {gap.k3:.1e}, {times:.1f} times what rounding moves them in this model ({self.rounding.mean:.1e}, "
            f"{self.rounding.k3:.1e}){follows}"
        )
        warn, stop = WARN[cfg.model.dtype], STOP[cfg.model.dtype]
        if times <= warn and not slope:
            return
        table = explain_gap(logp_F, batch, samples, step, stop * self.rounding.mean, slope)
        meant = meant_by(cfg)
        if not meant and (slope or not times <= stop):
            raise TrainingError(f"{message}\n{table}\n  rollout.max_logp_gap sets a bound of your own in its place")
        if not self.told and dist.get_rank() == 0:
            why = f"since {meant[0]} is set" if meant else f"and ends at {stop:g} times"
            print(f"warning: {message}; the run goes on, {why}\n{table}", flush=True)
        self.told = True


def meant_by(cfg: Config) -> list[str]:
    """The keys by which the configuration intends a gap, so that the model's rounding is no bound of it."""
    keys = [f"rollout.vllm.{name}" for name in INEXACT if name in cfg.rollout.vllm]
    own = [name for name in ("max_logp_gap", "max_mismatch_kl") if getattr(cfg.rollout, name) is not None]
    return keys + [f"rollout.{name}" for name in own]


def measure_rounding(
    model: list, batch: Batch, cfg: Config, score: Callable[[list, Batch, Config], Tensor]
) -> tuple[Batch, Tensor, Gap]:
    """(some answers of the batch, their log-probs [F], how far rounding moves these); two forward passes over them."""
    count = min(len(batch.lengths_N), max(MEASURED, bridge.mpu.get_data_parallel_world_size()))
    some = batch.take(np.linspace(0, len(batch.lengths_N) - 1, count).astype(int).tolist())
    logp_F = score(model, some, cfg)
    with bridge.nudged_embeddings(model):
        nudged_F = score(model, some, cfg)
    found = gap_of((nudged_F - logp_F)[some.mask])
    smallest = SMALLEST[cfg.model.dtype]
    return some, logp_F, Gap(max(found.mean, smallest), max(found.k3, smallest**2 / 2))


def slope_of(logp_M: Tensor, rollout_logp_M: Tensor) -> float:
    """Slope of the difference over the mean of two log-probs, [M] each; 0 where it may be by chance.

    Of two log-probs with rounding of equal size it is 0; under a temperature that is off by a share x it is about x.
    """
    middle_M = (logp_M.double() + rollout_logp_M.double()) / 2
    difference_M = logp_M.double() - rollout_logp_M.double()
    middle_M = middle_M - middle_M.mean()
    square = (middle_M @ middle_M).item() or math.nan
    slope = (middle_M @ difference_M).item() / square
    rest_M = difference_M - difference_M.mean() - slope * middle_M
    error = math.sqrt((rest_M @ rest_M).item() / max(len(rest_M), 1) / square)
    return slope if abs(slope) > SLOPE + SIGMAS * error else 0.0


def explain_gap(
    logp_F: Tensor, batch: Batch, samples: list[Sample], step: int, bound: float, slope: float = 0.0
) -> str:
    """A table of the largest differences, their distribution, and the likely cause."""
    gap_F = (logp_F - batch.rollout_logp).abs() * batch.mask
    prompt_F = torch.tensor([len(s.prompt_ids) for s in samples])[batch.seq_id]
    position_F = batch.position_ids + 1 - prompt_F  # of the target within its response
    beyond_F = gap_F > bound
    share = (beyond_F.sum() / batch.mask.sum()).item()
    first3 = gap_F[batch.mask & (position_F < 3)].nanmean().item()
    later = gap_F[batch.mask & (position_F >= 3)].nanmean().item()
    lines = ["  sample  group  position   token   trainer      vLLM       |Δ|"]
    for i in gap_F.topk(min(10, len(gap_F))).indices.tolist():
        n = int(batch.seq_id[i])
        lines.append(
            f"  {n:6d} {samples[n].group:6d} {position_F[i]:9d} {batch.targets[i]:7d} {logp_F[i]:9.4f} "
            f"{batch.rollout_logp[i]:9.4f} {gap_F[i]:9.2e}"
        )
    lines.append(
        f"  {share:.1%} of {int(batch.mask.sum())} tokens, in {len(batch.seq_id[beyond_F].unique())} of {len(samples)} "
        f"samples, are beyond the bound; mean |Δ| {first3:.1e} in the first 3 tokens, {later:.1e} later"
    )
    causes = [
        (step > 1, AGREED_BEFORE),
        (slope, "the gap follows the log-prob: another temperature, top_p or top_k in one of the two"),
        (later > 10 * first3, "the gap grows along the response: rotary embedding or context length differ"),
        (share < 0.05, "few tokens differ: numerical noise; compare with model.dtype=fp32, or raise the bound"),
        (
            True,
            "most tokens differ, with equal weights (each push is verified): RoPE, attention, norms or the precision "
            "of logits are computed otherwise in one of the two, or rollout.vllm samples from another distribution",
        ),
    ]
    cause = next(cause for holds, cause in causes if holds)
    return "\n".join([*lines, f"  likely cause: {cause}"])
