"""What a run watches while it trains: machine, weights and time. It knows nothing of the algorithm, which a fork edits.

It ends the run on what rounding cannot cause, and warns once of what may be meant: docs/dev/checks.md. `make check`
verifies, outside of the run, that the code computes what its formulas say.
"""

import contextlib
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
from config import Config, RankError, TrainingError, UserError
from grpo.parts.base import ranks
from grpo.parts.base.require import require
from grpo.parts.data.prompts import Prompt
from grpo.parts.model import fp16
from grpo.run import first_difference
from grpo.step import metrics, turns
from grpo.step.grading import GradingPool
from grpo.step.records import Batch, MicroBatch, Sample
from rollout import Engine


@dataclass
class Guard:
    """What the guard keeps since this start. All ranks make the same calls. If one raises, every rank does.

    `weighted` is the batch with the weights of an update, `number` the number of the update within its step, from 0.
    """

    cfg: Config
    model: list
    optimizer: object
    reference: list[Tensor] | None
    engine: Engine
    score: Callable[[list, Batch, Config], Tensor]  # the trainer's log-probs [F] under the present weights
    forward: Callable[[list, list[MicroBatch], float], list]  # passes over micro-batches, without a gradient
    rounding: "Gap | None" = None  # of the model's log-probs, as last measured
    recent: deque = field(default_factory=partial(deque, maxlen=20))  # (sum of k3, tokens) of the last updates
    warned: bool = False  # whether the user was warned of a gap
    skipped: int = 0  # updates in a row that were skipped because loss or gradient was NaN or infinite

    def __post_init__(self):
        self.initial = some_entries(bridge.trainable_weights(self.model))  # before a checkpoint is restored

    def may_step(self, report, weighted, cfg, step, number) -> bool:
        """Whether the optimizer may step: not if the loss is NaN or infinite.

        Raises RankError if the reference has moved. Raises TrainingError if the log-probs of trainer and vLLM differ
        by more than rounding explains or, with model.match_engine, at all. They are compared in the updates whose
        log-probs are of vLLM's weights.
        """
        invalid = int((~weighted.rollout_logp.isfinite()).sum())
        if invalid:
            raise TrainingError(f"step {step}: trainer and vLLM disagree: {invalid} log-probs of vLLM are no numbers")
        if not math.isfinite(report["loss"]):
            return False

        if self.reference is not None and number == 0 and not cfg.algo.moving_reference:
            same = torch.equal(some_entries(self.reference), self.initial)
            require(same, REFERENCE_MOVED, RankError)
        if cfg.model.match_engine:
            check_equal(self, report, weighted, cfg, step, number)
        elif number < metrics.compared_updates(cfg) and report["tokens"]:
            check_gap(self, report, weighted, cfg, step)
        return True

    def stepped(self, report, micro_batches: list[MicroBatch]):
        """Warn of an update without a gradient. If loss or gradient is NaN or infinite, count the update and say so.

        An overflow of the gradient in fp16 does not count if a lower loss scale can end it.
        """
        if report["grad_norm"] == 0 and dist.get_rank() == 0:
            what = "equal rewards in every group, all tokens clipped or masked, or a loss that reaches no weight"
            print(f"warning: no gradient ({what}): update skipped", flush=True)
        if math.isfinite(report["grad_norm"]):
            self.skipped = 0
        else:
            explain_skipped(self, report, micro_batches)


REFERENCE_MOVED = (
    "the reference is not the initial model: it was moved, or copied after a resume; a fork that means it sets "
    "algo.moving_reference=true"
)


def some_entries(weights: list[Tensor]) -> Tensor:
    """At most a hundred numbers of each weight, on the host."""
    return torch.cat([weight.detach().flatten()[:: weight.numel() // 100 + 1] for weight in weights]).cpu()


# ---------------------------------------------------------------- rewards that fail


def check_rewards(samples: list[Sample], prompts: dict[int, Prompt], grading: GradingPool):
    """Raise UserError, on every rank, if the reward failed for too many samples. Else warn once a kind of error.

    `prompts` is {group: prompt}; `grading` keeps the kinds that were shown.
    """
    failed = [s for s in samples if s.graded == "error"]
    messages = {}  # kind of an error → the message of its first sample
    for s in failed:
        kind = s.error.partition(":")[0]
        if kind in messages:
            continue
        what = s.error
        if not what.startswith(turns.FAILED):
            what = f"the reward of source {s.source!r} failed: {what}"
        messages[kind] = f"{what}\n  row: {prompts[s.group].row}\n  response: {s.text!r}"

    if len(failed) > grading.max_error_frac * len(samples):
        first = next(iter(messages.values()))
        raise UserError(
            f"{first}\n  {len(failed)} of {len(samples)} samples failed, more than "
            f"reward.max_error_frac={grading.max_error_frac:g} allows; mend the function or the row, or choose "
            "another reward for the source (reward.by_source)"
        )
    for kind, message in messages.items():
        if kind not in grading.errors_shown and dist.get_rank() == 0:
            print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)
    grading.errors_shown.update(messages)


# ---------------------------------------------------------------- equal bits

MEANT = "a fork that trains answers of other weights sets rollout.max_logp_gap, to inf or a bound of its own"
ON_PURPOSE = f"in a fork that means it, use model.match_engine=false; {MEANT}"


def check_equal(guard, report, batch, cfg, step, number):
    """Raise TrainingError if a log-prob of the first update, or an old one of any update, has other bits than vLLM's.

    The error names the answer, the token, and the operation of the forward pass that differs first.
    """
    if report["old_gap_max"] != 0:  # also if it is NaN
        what = f"update {number + 1}: old log-probs are not those that vLLM sampled with"
        raise TrainingError(f"step {step}, {what}: they differ by up to {report['old_gap_max']:.1e}; {ON_PURPOSE}")
    is_policy = step == 1 and not cfg.algo.moving_reference  # whether the reference is still the policy
    if is_policy and number == 0 and batch.ref_logp is not None:
        apart = ((batch.ref_logp - batch.rollout_logp) * batch.mask).abs().max().item()
        what = "the reference is the policy before its first update, but its log-probs differ by"
        require(apart == 0, f"step 1: {what} {apart:.1e}; {ON_PURPOSE}", TrainingError)
    if number == 0 and report["gap_max"] != 0:
        raise TrainingError(explain_unequal(guard, report["gap_max"], batch, cfg, step))


def explain_unequal(guard, largest: float, batch, cfg, step) -> str:
    """Say where the trainer's log-probs first have other bits than vLLM's, which differ by up to `largest` nats."""
    logp_F = guard.score(guard.model, batch, cfg)
    differs_F = (logp_F != batch.rollout_logp) & batch.mask
    what = f"step {step}: trainer and vLLM disagree on sampled tokens, which with model.match_engine have equal bits"
    if not differs_F.any():
        return f"{what}: a scoring pass agrees, the training pass differs by {largest:.1e}"

    first = int(differs_F.nonzero()[0])
    n = int(batch.seq_id[first])
    token = int(batch.position_ids[first]) + 1 - int(batch.prompts_N[n])
    where = first_difference.explain(guard.engine, guard.model, batch.take([n]), cfg, guard.forward)
    answers = len(batch.seq_id[differs_F].unique())
    return (
        f"{what}: {where}\n  {int(differs_F.sum())} of {int(batch.mask.sum())} log-probs differ, in {answers} of "
        f"{len(batch.lengths_N)} answers; the first: answer {n}, to prompt {batch.same_prompt_N[n]}, token {token} "
        f"(id {int(batch.targets[first])}): trainer {logp_F[first]:.7f}, vLLM {batch.rollout_logp[first]:.7f}\n"
        f"  model.match_engine=false computes without vLLM's operations, within rounding; {MEANT}"
    )


# ---------------------------------------------------------------- the gap between trainer and vLLM

# How far rounding moves a log-prob depends on the model: in bf16 by 0.005 nats in a random one of two layers, by 0.04
# in a trained one of thirty. So it is measured, and these are multiples of it. In fp32 kernels also approximate exp.
WARN = {"bf16": 3.0, "fp16": 3.0, "fp32": 10.0}
STOP = {"bf16": 10.0, "fp16": 10.0, "fp32": 50.0}
SMALLEST = {"fp32": 1e-6, "fp16": 1e-5, "bf16": 1e-4}  # mean |Δ| that rounding is taken to be at least
SLOPE = 0.02  # of the difference over the log-prob: a temperature that is off by about 2 %
SIGMAS = 6.0  # standard errors that the slope is beyond SLOPE
MEASURED = 8  # answers that rounding is measured on; at least one for each replica
OUTLIERS = 2  # tokens whose k3 alone is no defect
APART = 20  # tokens of a scoring pass that differ from vLLM's where the update says that none does: a defect
BOUNDS = ("max_logp_gap", "max_mismatch_kl")  # of `rollout`, the user's own
INEXACT = ("quantization", "kv_cache_dtype")  # options of vLLM that make it sample from another distribution


class Gap(NamedTuple):
    """The size of differences between log-probs of the same tokens, in nats."""

    mean: float  # of |Δ|
    k3: float  # of exp(Δ) - Δ - 1

    def over(self, rounding: "Gap") -> float:
        """How many times larger than `rounding` it is, by the mean or by the root of k3; NaN if one is NaN."""
        root = np.sqrt(np.maximum(self.k3, 0) / rounding.k3)
        return float(np.maximum(self.mean / rounding.mean, root))


def gap_of(difference_M, outliers: int = 0) -> Gap:
    """The size of differences [M] in nats. The `outliers` largest have no part in k3, whose terms are at most 10."""
    difference_M = difference_M.double()
    k3_M = difference_M.clamp(-20, 20)
    k3_M = (k3_M.expm1() - k3_M).clamp(max=10)
    kept = k3_M.sort().values[: max(len(k3_M) - outliers, 0)]
    return Gap(difference_M.abs().mean().item(), kept.sum().item() / max(len(k3_M), 1))


def check_gap(guard, report, batch, cfg, step):
    """Compare the gap of an update with the user's bounds and with rounding.

    Raises TrainingError if it is too large, and warns once if it is larger than usual.
    """
    gap = Gap(report["gap"] / report["tokens"], report["gap_k3"] / report["tokens"])
    guard.recent.append((report["gap_k3"], report["tokens"]))
    meant = [f"rollout.{key}" for key in BOUNDS if getattr(cfg.rollout, key) is not None]
    if meant:
        check_bounds(guard, gap, report["gap_max"], batch, cfg, step)

    meant += [f"rollout.vllm.{name}" for name in INEXACT if name in cfg.rollout.vllm]  # keys by which a gap is meant
    if guard.warned and meant:
        return
    bound = (STOP if guard.warned else WARN)[cfg.model.dtype]
    if guard.rounding is None or not gap.over(guard.rounding) <= bound:  # so that NaN is beyond it
        judge_gap(guard, gap, meant, batch, cfg, step)


def check_bounds(guard, gap: Gap, largest: float, batch, cfg, step):
    """Raise TrainingError if the gap exceeds rollout.max_logp_gap or rollout.max_mismatch_kl.

    A single token can dominate k3 of an update: in bf16 the demo had 4.7e-4 in one of 300, at most 6.1e-5 in 20. So
    the mean is over the tokens of the last 20 updates. If there are fewer than 4, the missing ones count as 0.
    """
    size = largest if cfg.model.dtype == "fp32" else gap.mean
    k3, tokens = np.sum(guard.recent, axis=0)
    kl = k3 / (tokens * max(1.0, 4 / len(guard.recent)))

    for key, value in zip(BOUNDS, (size, kl), strict=True):
        bound = getattr(cfg.rollout, key)
        if bound is not None and not value <= bound:
            table = explain_gap(guard.score(guard.model, batch, cfg), batch, step)
            raise TrainingError(
                f"step {step}: trainer and vLLM disagree on sampled tokens by {value:.2e}, bound {bound:.1e} "
                f"(rollout.{key})\n{table}"
            )


def judge_gap(guard, gap: Gap, meant: list[str], batch, cfg, step):
    """Measure rounding anew and compare `gap` with it. The first time also look for a slope over the log-prob.

    `meant` has the keys by which a gap is meant. With one of them it only warns. Raises TrainingError.
    """
    warn, stop = WARN[cfg.model.dtype], STOP[cfg.model.dtype]
    is_first = guard.rounding is None
    some, logp_F, guard.rounding = measure_rounding(guard.model, batch, cfg, guard.score)
    slope = slope_of(logp_F[some.mask], some.rollout_logp[some.mask], guard.rounding.mean) if is_first else 0.0
    is_zero = is_first and gap.mean == 0
    if gap.over(guard.rounding) <= warn and not slope and not is_zero:
        return

    # Look closer: a scoring pass, which dropout does not move, and without the outliers.
    if batch.old_logp is not None and cfg.algo.old_logp == "trainer":
        logp_F = batch.old_logp  # an earlier update of this step has moved the weights
    else:
        logp_F = guard.score(guard.model, batch, cfg)
    difference_M = (logp_F - batch.rollout_logp)[batch.mask]
    apart = int(difference_M.count_nonzero())
    if is_zero and apart > APART and not meant:
        raise TrainingError(f"step {step}: {ITSELF.format(apart, len(difference_M))}; {MEANT}")
    scored = gap_of(difference_M, OUTLIERS)
    times = max(scored.over(guard.rounding), gap.mean / guard.rounding.mean)
    if times <= warn and not slope:
        return

    message = (
        f"step {step}: trainer and vLLM disagree on sampled tokens: mean |Δ log-prob| = {gap.mean:.2e}, mismatch KL "
        f"{scored.k3:.1e}, {times:.1f} times what rounding moves them in this model ({guard.rounding.mean:.1e}, "
        f"{guard.rounding.k3:.1e})"
    )
    if slope:
        message += f"; it follows the log-prob, with a slope of {slope:.3f}"
    table = explain_gap(logp_F, batch, step, slope)
    if not meant and (slope or not times <= stop):
        raise TrainingError(f"{message}\n{table}\n  {MEANT}")
    if not guard.warned and dist.get_rank() == 0:
        why = f"since {meant[0]} is set" if meant else f"and ends at {stop:g} times"
        print(f"warning: {message}; the run goes on, {why}\n{table}", flush=True)
    guard.warned = True


ITSELF = (
    "the gap between trainer and vLLM is exactly 0, but a scoring pass differs from vLLM in {} of {} tokens: grpo_loss "
    "compares vLLM's log-probs with themselves"
)


def measure_rounding(model, batch, cfg, score: Callable) -> tuple[Batch, Tensor, Gap]:
    """Returns some answers of the batch, their log-probs [F], and how far rounding moves these.

    Takes two forward passes over these answers.
    """
    count = min(len(batch.lengths_N), max(MEASURED, bridge.mpu.get_data_parallel_world_size()))
    some = batch.take(np.linspace(0, len(batch.lengths_N) - 1, count).astype(int).tolist())
    logp_F = score(model, some, cfg)
    with nudged_embeddings(model):
        nudged_F = score(model, some, cfg)
    found = gap_of((nudged_F - logp_F)[some.mask])
    smallest = SMALLEST[cfg.model.dtype]
    return some, logp_F, Gap(max(found.mean, smallest), max(found.k3, smallest**2 / 2))


@contextlib.contextmanager
def nudged_embeddings(model):
    """Move each element of the token embeddings by one unit in its last place, up or down, within the context.

    All later roundings then differ, as they would with other kernels.
    """

    def nudge(module, args, output):
        generator = torch.Generator().manual_seed(0)  # the same on every rank, at every position
        signs = ranks.to_device(torch.randint(2, output.shape[-1:], generator=generator) * 2 - 1, output.device)
        return (output.float() * (1 + signs * (torch.finfo(output.dtype).eps * 0.75))).to(output.dtype)

    chunks = [bridge.unwrap_model(chunk) for chunk in model]
    hooks = [chunk.embedding.register_forward_hook(nudge) for chunk in chunks if chunk.pre_process]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def slope_of(logp_M, rollout_logp_M, rounding: float) -> float:
    """The slope of the difference over the mean of two log-probs, [M] each, or 0 if it may be chance or rounding.

    Rounding of equal size gives 0. A temperature that is off by a share x gives about x. A slope counts only if it
    moves log-probs by more than `rounding`: the log-probs of a model that has learnt nothing hardly differ.
    """
    middle_M = (logp_M.double() + rollout_logp_M.double()) / 2
    middle_M = middle_M - middle_M.mean()
    difference_M = logp_M.double() - rollout_logp_M.double()
    square = (middle_M @ middle_M).item() or math.nan
    slope = (middle_M @ difference_M).item() / square

    rest_M = difference_M - difference_M.mean() - slope * middle_M
    error = math.sqrt((rest_M @ rest_M).item() / max(len(rest_M), 1) / square)
    moved = abs(slope) * math.sqrt(square / max(len(middle_M), 1))
    return slope if abs(slope) > SLOPE + SIGMAS * error and moved > rounding else 0.0


def explain_gap(logp_F, batch, step, slope=0.0) -> str:
    """A table of the largest differences, and the likely cause."""
    vllm_F = batch.rollout_logp
    gap_F = (logp_F - vllm_F).abs() * batch.mask
    prompt_F = torch.from_numpy(batch.prompts_N)[batch.seq_id]
    position_F = batch.position_ids + 1 - prompt_F  # of the target within its response
    lines = ["  sample  position   token   trainer      vLLM       |Δ|"]
    for i in gap_F.topk(min(10, len(gap_F))).indices.tolist():
        n = int(batch.seq_id[i])
        lines.append(
            f"  {n:6d} {position_F[i]:9d} {batch.targets[i]:7d} {logp_F[i]:9.4f} {vllm_F[i]:9.4f} {gap_F[i]:9.2e}"
        )

    cause = (
        "with equal weights (each push is verified) RoPE, attention, norms or the precision of logits are computed "
        "otherwise in one of the two, or rollout.vllm samples from another distribution"
    )
    if slope:
        cause = "the gap follows the log-prob: another temperature, top_p or top_k in one of the two"
    elif step > 1:
        cause = (
            "they agreed at step 1: the engine did not take up the last weight push, which a fork may have left out; "
            "the update trains answers of other weights; or, if sync/checked is 1, kernels or precision differ"
        )
    return "\n".join([*lines, f"  likely cause: {cause}"])


# ---------------------------------------------------------------- NaN and infinity


def explain_skipped(guard, report, micro_batches: list[MicroBatch]):
    """Count an update that was skipped for NaN or infinity, and warn.

    Raises TrainingError at train.max_skipped, or if a dynamic loss scale can fall no lower.
    """
    cfg = guard.cfg
    scale = fp16.loss_scale(guard.optimizer)  # of the next update
    waits = fp16.scaler_state(guard.optimizer).get("hysteresis_tracker", 0) > 0  # it falls at a later overflow
    is_loss = not math.isfinite(report["loss"])
    if not is_loss and scale is not None and (scale < report["loss_scale"] or waits):
        if dist.get_rank() == 0:
            scales = f"{report['loss_scale']:g} → {scale:g}"
            print(f"the gradient overflowed: update skipped, loss scale {scales}", flush=True)
        return

    guard.skipped += 1
    is_last = guard.skipped >= cfg.train.max_skipped
    count = f"{guard.skipped} in a row, the run stops at train.max_skipped={cfg.train.max_skipped}"
    if is_loss:
        passes = partial(guard.forward, guard.model, micro_batches, cfg.rollout.temperature)
        what = f"the loss is {report['loss']}, {layer_of_overflow(guard.model, passes)}"
    else:
        what = "a gradient is NaN or infinite"
        if fp16.scaler_state(guard.optimizer):
            is_last = True
            count = f"the loss scale is at megatron.min_loss_scale={scale:g} and can fall no lower"
    if cfg.model.dtype == "fp16":
        what += f"; fp16 holds numbers up to 65504 (loss scale {report['loss_scale']:g}): try model.dtype=bf16"

    message = f"{what}; the update was skipped; {count}"
    require(not is_last, message, TrainingError)
    if dist.get_rank() == 0:
        print(f"warning: {message}", flush=True)


def layer_of_overflow(model, forward: Callable[[], list]) -> str:
    """Where activations are NaN or infinite first in a forward pass over the micro-batches."""
    numbers = {}  # module → number of its layer from 1, 0 for the embeddings
    for chunk in map(bridge.unwrap_model, model):
        numbers |= {layer: layer.layer_number for layer in chunk.decoder.layers}
        if chunk.pre_process:
            numbers[chunk.embedding] = 0
    found = [math.inf]

    def note(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if module in numbers and not output.isfinite().all():
            found.append(numbers[module])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        forward()
    finally:
        hook.remove()

    first = min(ranks.gather(min(found)))
    if first == math.inf:
        return "though the outputs of all layers are finite: it began in the head or in the loss"
    return f"first in the output of layer {first}" if first else "first in the embeddings"
