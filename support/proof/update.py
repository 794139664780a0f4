"""A live check of the first update of a start: its gradient is that of the loss, and its optimizer step is AdamW's.

The gradient is compared on a sixteenth of the answers, before the update computes its own by the same function; once
more in a step that the seed draws. AdamW's step is compared again each 50 updates. docs/dev/checks.md has the bounds.

The loss holds stop-gradients, so its value is not what the gradient integrates. The check makes it linear: with
c = ∂loss/∂logp and e = ∂loss/∂entropy of each of the N trained tokens at the present weights w, the gradient of
S(w) = sum(c logp(w) + e entropy(w)) / N is that of the loss. Forward passes give S at weights w+ and w-, moved a little
up and down and rounded to the model's dtype. S(w+) - S(w-) must equal the sum of gradient · (w+ - w-) over all weights,
each counted once.

The bound comes from the passes: u = S(w+) + S(w-) - 2 S(w) at a token holds the rounding of three passes, of variance 6
where that of S(w+) - S(w-) is 2. So the bound is SIGMAS · sqrt(sum u² / 3) / N, plus the share NONLINEAR of the change
for its third order.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_bridge as bridge
from config import AlgoConfig, Config, TrainingError
from support.base import ranks
from support.base.require import require
from support.model.checkpoint import read_state
from support.model.offload import take_back_state
from support.proof import adam, formulas
from support.proof.adam import Shard, gather_weights, sum_over_ranks
from support.step.metrics import expert_load
from support.step.packing import to_micro_batches
from support.step.records import Batch, MicroBatch

SHIFT = {"fp32": 1e-3, "fp16": 0.025, "bf16": 0.2}  # wanted change of a token's log-prob, root mean square
TRIAL = {"fp32": 1e-4, "fp16": 1.6e-3, "bf16": 0.0125}  # size of the first move, which may show another to fit SHIFT
NEAR = 0.8, 1.5  # times SHIFT: a change between these is near enough
FAR = 10.0  # times SHIFT: log-probs that change by more are far from linear
ATTEMPTS = 4  # to find a size that changes log-probs by SHIFT
LARGEST = 0.05  # size of a move; sizes are in units of the weights' own: a larger one is far from linear
SIGMAS = 6.0
NONLINEAR = {"fp32": 0.02, "fp16": 0.05, "bf16": 0.05}
ROUNDED_OFF = {torch.bfloat16: 16, torch.float16: 13}  # bits of fp32 that the type lacks
REROUTED = 0.3  # at most, with experts: a move also changes which of them are chosen, which no gradient counts
JUMPS = 10.0  # times noise / signal: how much of REROUTED is allowed, since a token that changes experts jumps
RANDOM = "in random direction 1", "in random direction 2"
SMALLEST = 0.01  # size of a weight of zeros, such as B of an adapter
SHARE = 16  # one of so many answers is what the gradient is compared on
ANSWERS = 4  # of a replica, at least
EVERY = 50  # updates, of which one has its step compared again
ROUNDING = {"fp32": 4e-6, "fp16": 5e-3, "bf16": 0.035}  # log-probs of the same tokens in other rows differ by so much
LARGE = 0.5  # size of the move of weights without a gradient
LATEST = 100  # step in which the gradient is compared again, at most
ALIKE = 0.05  # by which the ratios of gradient and loss may differ where the gradient is off by a factor


class Change(NamedTuple):
    """What a move and its opposite changed."""

    found: float  # S(w+) - S(w-)
    predicted: float  # sum of gradient · (w+ - w-)
    bound: float  # of |found - predicted|
    signal: float  # root of the sum of squares of the change of S at each token
    noise: float  # the same of u: rounding and curvature
    moved: float  # root mean square change of a sampled token's log-prob by one of the two moves

    @property
    def over(self) -> float:
        """How many bounds found and predicted differ by; all three may be 0."""
        return abs(self.found - self.predicted) / max(self.bound, 1e-300)


# ---------------------------------------------------------------- the loss, linear in log-probs and entropies


def values(mb: MicroBatch, logp_T: Tensor, entropy_T: Tensor) -> tuple:
    """In place of the loss: log-prob and entropy of each token, [2, T]."""
    count = torch.zeros((), dtype=torch.int, device=logp_T.device)
    return logp_T.new_zeros(()), count, torch.stack([logp_T, entropy_T]).detach()


def values_and_slopes(
    mb: MicroBatch, logp_T: Tensor, entropy_T: Tensor, loss_func: Callable, algo: AlgoConfig, rounding: float
) -> tuple:
    """In place of the loss: these values, its derivatives by them, and how these change where values are larger by
    `rounding`; [3, 2, T]. They are those of the loss's formula, or of the loss itself where it is a fork's own.

    The derivatives are NaN where the loss depends on neither, or on anything else that has a gradient.
    """
    zero, count, numbers = values(mb, logp_T, entropy_T)

    def slopes(at: Tensor) -> Tensor:
        inputs = at.clone().requires_grad_()
        if formulas.has_formula(algo):
            loss = formulas.row_loss(mb, *inputs, algo)[0]
        else:
            loss, _, _ = loss_func(mb, *inputs, algo=algo)
        return torch.autograd.grad(loss, inputs)[0] if loss.requires_grad else torch.full_like(at, math.nan)

    with torch.enable_grad():
        of_others, _, _ = loss_func(mb, *numbers, algo=algo)
        here, there = slopes(numbers), slopes(numbers + rounding)
    if of_others.requires_grad:
        here = torch.full_like(here, math.nan)
    return zero, count, torch.stack([numbers, here, there - here])


@dataclass
class Probe:
    """The loss of an update as a function of the weights: what the passes of a check share."""

    model: list
    shards: list[Shard]
    forward: Callable[..., list]  # (loss_func=...) → on the last stage, what that gives as report of each micro-batch
    rows: list[Tensor]  # values_and_slopes of each micro-batch at w
    tokens: int  # N
    slope2: float  # sum of c² + e²
    nonlinear: float  # share of a change that the gradient need not predict
    smooth: bool  # no move changes which experts are chosen

    def move(self, direction: Callable[[Shard], Tensor], size: float) -> tuple[list[Tensor], Tensor]:
        """The values of each micro-batch at w + size · direction, and this rank's part of gradient · (moved - w)."""
        predicted = torch.zeros((), dtype=torch.float64, device=bridge.device())
        for shard in self.shards:
            moved = round_at_random_(torch.add(shard.before, direction(shard), alpha=size), shard)
            shard.values.copy_(moved)
            if shard.counted:
                predicted += moved.sub_(shard.before).mul_(shard.gradient).sum(dtype=torch.float64)
        gather_weights(self.model)
        return self.forward(loss_func=values), predicted

    def compare(self, higher: list[Tensor], lower: list[Tensor], predicted: Tensor) -> Change:
        """The change between the values of two moves, where the gradient predicts `predicted` (this rank's part)."""
        sums = predicted.new_zeros(5)
        if bridge.reports_loss():
            for row, up, down in zip(self.rows, higher, lower, strict=True):
                base, slopes, unsure = row.double()
                change = up.double() - down.double()
                d_T = (slopes * change).sum(0)
                u_T = (slopes * (up.double() + down.double() - 2 * base)).sum(0)
                resolved2 = (slopes * base * 2**-23).square().sum() / 2  # u² of values in fp32
                u2 = u_T @ u_T + 3 * (unsure * change).square().sum()  # the gradient is that of other rows
                sums += torch.stack([d_T.sum(), d_T @ d_T, u2, resolved2, change[0].square().sum()])
        d, d2, u2, resolved2, moved2, predicted = sum_over_ranks(torch.cat([sums, predicted[None]])).tolist()
        signal, noise = math.sqrt(d2), math.sqrt(max(u2, resolved2))
        found = d / self.tokens
        share = self.nonlinear
        if not self.smooth:
            share = max(share, min(REROUTED, JUMPS * noise / max(signal, 1e-30)))
        bound = SIGMAS * noise / math.sqrt(3) / self.tokens + share * max(abs(found), abs(predicted))
        return Change(found, predicted, bound, signal, noise, moved=math.sqrt(moved2 / self.tokens) / 2)

    def compare_with_present(self, moved: list[Tensor], predicted: Tensor) -> Change:
        """The change by one move alone."""
        return self.compare(moved, [row[0] for row in self.rows], predicted)

    def change_along(self, direction: Callable[[Shard], Tensor], size: float, shift: float) -> tuple[Change, float]:
        """The change by a move along `direction` and its opposite, which move log-probs by about `shift`, and its size.

        `size` is tried first. One that moves log-probs too little or too far is made to fit.
        """
        attempts = ATTEMPTS if self.smooth else 2
        for attempt in range(1, attempts + 1):
            higher, predicted_up = self.move(direction, size)
            share = 2 * self.compare_with_present(higher, predicted_up).moved / shift
            fitting = min(size / max(share, 1e-30), LARGEST)
            if NEAR[0] <= share <= NEAR[1] or fitting == size or attempt == attempts:
                break
            size = fitting
        lower, predicted_down = self.move(direction, -size)
        return self.compare(higher, lower, predicted_up - predicted_down), size

    def resolves(self, change: Change) -> bool:
        """Whether log-probs move by more than rounding and curvature; where they jump, there is nothing to compare."""
        return change.noise < change.signal / 2 or not self.smooth


def linearise(
    model: list, shards: list[Shard], batch: Batch, samples: list[int], cfg: Config, passes: "Passes"
) -> Probe:
    """The loss of some samples of the batch around the present weights."""
    micro_batches = to_micro_batches(batch, samples, cfg.train.logprob_max_tokens_per_micro_batch, cfg)
    forward = partial(passes.run_schedule, model, micro_batches, cfg.rollout.temperature, backward=False)
    of_loss = {"loss_func": passes.loss, "algo": cfg.algo, "rounding": ROUNDING[cfg.model.dtype]}
    rows = forward(loss_func=partial(values_and_slopes, **of_loss))
    slope2 = torch.zeros((), dtype=torch.float64, device=bridge.device())
    if bridge.reports_loss():
        slope2 = sum((slopes.double().square().sum() for _, slopes, _ in rows), slope2)
    tokens = int(np.sum(batch.sums(batch.weights > 0)[samples]))
    smooth = not model[0].config.num_moe_experts or batch.routes is not None
    return Probe(
        model, shards, forward, rows, tokens, sum_over_ranks(slope2).item(), NONLINEAR[cfg.model.dtype], smooth
    )


def round_at_random_(moved: Tensor, shard: Shard) -> Tensor:
    """Round fp32 values to the model's bf16 or fp16, up or down at random: moves below its resolution count too."""
    bits = ROUNDED_OFF.get(shard.before.dtype)
    if bits is None:
        return moved
    random = shard.random(salt=1).int().add_(2**15) >> (16 - bits)
    moved.view(torch.int32).add_(random).bitwise_and_(-(2**bits))
    return moved.copy_(moved.to(shard.before.dtype))  # fp16 has fewer bits below 2^-14


def random_signs(shard: Shard, number: int) -> Tensor:
    """Direction `number`: random signs times the weight's size, so that all weights move by the same share."""
    return ((shard.random(salt=2 + number) & 1) * 2 - 1) * max(shard.size, SMALLEST)


def signs_where(is_moved: Callable[[Shard], bool], shard: Shard) -> Tensor:
    """Random signs of a shard that is moved; 0 for the others."""
    return random_signs(shard, number=0) if is_moved(shard) else torch.zeros_like(shard.before.float())


def lacks_gradient(shard: Shard, experts: int) -> bool:
    """Whether the gradient is exactly 0; with one of the `experts` a token, routers are left out.

    The one probability may be 1, without a gradient, but a large move of the router chooses another expert.
    """
    return not (experts == 1 and shard.name.endswith("router.weight")) and not shard.gradient.any()


def kind_of(shard: Shard) -> str:
    """The name of the weight without the numbers of its layer and expert."""
    return re.sub(r"(^|\.)\d+(?=\.)", "", shard.name.removeprefix("decoder.layers.")).strip(".")


# ---------------------------------------------------------------- the check


@dataclass(frozen=True)
class Passes:
    """The passes of the script, which checks repeat."""

    score: Callable[[list, Batch, Config], Tensor]  # log-probs [F]
    run_schedule: Callable[..., list]
    forward_backward: Callable[..., dict]
    loss: Callable  # of one micro-batch


@dataclass
class FirstUpdate:
    """Checks the first update of a start that has a gradient; `checkpoint`: what this start resumed from."""

    model: list
    optimizer: object
    checkpoint: Path | None
    compared: int = 0  # the last step in which the gradient was
    done: bool = False  # the optimizer's step

    def __post_init__(self):
        self.updates = read_state(self.checkpoint)["updates"] if self.checkpoint else 0  # so far
        self.sampled: list[adam.Sampled] | None = None  # before the step that is checked
        self.norm = math.nan  # of its gradient

    def compare_gradient(self, batch: Batch, cfg: Config, step: int, passes: Passes) -> None:
        """Compare the gradient of some answers of `batch`, whose weights are above 0 at trained tokens, with the loss.

        Weights and state keep their bits. Raises TrainingError on every rank, or warns.
        """
        if not cfg.train.check_update or (self.compared and not self.compared < step == second_step(cfg)):
            return
        reason = why_not_compared(self.model, cfg)
        if reason:
            self.compared = cfg.train.steps
            note(f"was not checked: {reason}")
            return
        some = some_answers(batch)
        if not some:  # such as where all answers are truncated and masked
            return
        passes.forward_backward(self.model, self.optimizer, small_micro_batches(batch, some, cfg), cfg)
        shards = adam.own_shards(self.model, self.optimizer, weight_names(self.model))
        norm = adam.norm_of(shard.gradient for shard in shards if shard.counted)
        if math.isfinite(norm) and norm > 0:  # else the next update may have a gradient
            self.compared = step
            probe = linearise(self.model, shards, batch, some, cfg, passes)
            found, causes = check_gradient(probe, norm, cfg.model.dtype)
            for shard in shards:  # the model has its own weights again
                shard.values.copy_(shard.before)
            gather_weights(self.model)
            is_counted = cfg.model.dtype == "fp32" and bridge.device().type == "cpu"
            report_together(step, found, causes, is_error=is_counted)
        if self.model[0].config.num_moe_experts:
            expert_load(self.model)  # the metric counts the update's own passes
        bridge.seed_step(cfg.seed, step)

    def before_step(self, cfg: Config, step: int) -> None:
        """Note the optimizer's state. Raises TrainingError, on every rank, if it is not that of the updates so far."""
        if not cfg.train.check_update or (self.done and self.updates % EVERY):
            return
        shards = adam.own_shards(self.model, self.optimizer, weight_names(self.model), copied=False)
        self.norm = adam.norm_of(shard.gradient for shard in shards if shard.counted)
        if not (math.isfinite(self.norm) and self.norm > 0):  # no gradient: the next update may have one
            return
        self.done = True
        if cfg.train.offload == "optimizer":
            take_back_state(self.optimizer)
        report_together(step, adam.check_state(shards, self.updates), "a resume that left out a part of the state")
        self.sampled = [adam.sample_state(shard) for shard in shards]

    def after_step(self, cfg: Config, step: int, norm: float) -> None:
        """Compare the step that before_step noted with AdamW. `norm`: of the gradient. TrainingError, on all ranks."""
        if self.sampled is not None:
            if self.model[0].ddp_config.overlap_param_gather:  # otherwise the optimizer has gathered them
                gather_weights(self.model)
            report_together(step, adam.check_step(self.sampled, self.updates, self.norm, cfg.train))
            self.sampled = None
        if math.isfinite(norm) and norm > 0:
            self.updates += 1


def second_step(cfg: Config) -> int:
    """The step, drawn by the seed, in which the gradient is compared again; a run of one step has none."""
    return int(np.random.default_rng(cfg.seed).integers(2, max(min(cfg.train.steps, LATEST), 2) + 1))


def weight_names(model: list) -> dict[torch.nn.Parameter, str]:
    """The Megatron name of each weight of this rank; the last stage's copy of the embedding has the embedding's."""
    weights = bridge.named_weights(model) | bridge.named_weights(model, factors=True)
    names = {weight: name for name, weight in weights.items()}
    if model[0].hf_config.tie_word_embeddings and "output_layer.weight" in weights:
        names[weights["output_layer.weight"]] = "embedding.word_embeddings.weight"
    return names


def some_answers(batch: Batch) -> list[int]:
    """Numbers of the samples to compare the gradient on: one of SHARE with an advantage, at least ANSWERS a replica.

    Where no sample has an advantage, of those that have a trained token.
    """
    trained_F = batch.weights > 0
    numbers = np.flatnonzero(batch.sums(trained_F & (batch.advantages != 0)))
    if not len(numbers):
        numbers = np.flatnonzero(batch.sums(trained_F))
    least = ANSWERS * bridge.mpu.get_data_parallel_world_size()
    count = min(len(numbers), max(len(numbers) // SHARE, least))
    return numbers[np.linspace(0, len(numbers) - 1, count).astype(int)].tolist()


def small_micro_batches(batch: Batch, samples: list[int], cfg: Config) -> list[MicroBatch]:
    """This replica's micro-batches of the samples: two or more, where it has as many, since a gradient adds them up.

    A quarter of the samples is apart: in micro-batches of one size each one's own divisor would be right.
    """
    parts = [samples]
    if cfg.parallel.vpp == 1:  # else rows are of one length, and there are as many as stages
        few = max(len(samples) // 4, bridge.mpu.get_data_parallel_world_size())
        parts = [part for part in (samples[:few], samples[few:]) if part]
    budget = cfg.train.max_tokens_per_micro_batch
    return [mb for part in parts for mb in to_micro_batches(batch, part, budget, cfg)]


def why_not_compared(model: list, cfg: Config) -> str | None:
    """Why the gradient cannot be compared with the loss; None: it can. The same on every rank."""
    if model[0].config.num_moe_experts and model[0].config.moe_aux_loss_coeff:
        return "megatron.moe_aux_loss_coeff adds a gradient that is not of the loss"
    if cfg.lora.rank and cfg.model.dtype != "fp32":
        return f"adapters are merged and rounded to {cfg.model.dtype}, which hides small moves of them"
    return None


def note(text: str) -> None:
    """Print on rank 0 what is said of the gradient."""
    if dist.get_rank() == 0:
        print(f"note: the gradient of this update {text}", flush=True)


def check_gradient(probe: Probe, norm: float, dtype: str) -> tuple[list[str], str]:
    """What shows that the gradient is not that of the loss, and why; nothing if it is. `norm`: of the gradient."""
    if math.isnan(probe.slope2):
        note("was not checked: the loss is not a function of the trained tokens' log-probs and entropies alone")
        return [], ""
    shift, trial = SHIFT[dtype], TRIAL[dtype]
    scale = adam.norm_of(shard.before for shard in probe.shards if shard.counted) / norm  # to the weights' size
    least = shift * math.sqrt(probe.slope2 / probe.tokens) / norm**2 / scale  # log-probs move by more (Cauchy-Schwarz)
    along, _ = probe.change_along(lambda shard: shard.gradient * scale, min(trial, least / 2), shift)
    changes, size = {"along the gradient": along}, trial
    for number, where in enumerate(RANDOM, start=1):
        changes[where], size = probe.change_along(partial(random_signs, number=number), size, shift)
        if not probe.resolves(changes[where]):  # the other has the same shift and as much rounding
            break
    hidden = [where for where, change in changes.items() if not probe.resolves(change)]
    changes_more = along.bound < max(abs(along.found), abs(along.predicted))
    if not probe.resolves(along) and changes_more and along.moved <= FAR * shift:
        hidden.remove("along the gradient")  # the loss changes by more than its rounding, if no token does
    if hidden:
        note(f"was not checked {', '.join(hidden)}: moves change log-probs by less than rounding, or too far")
    judged = {where: change for where, change in changes.items() if where not in hidden}
    found, causes = [], ""
    if not math.hypot(*[change.over for change in judged.values()]) <= 1:
        found = [
            f"moved {where}, the loss changes by {change.found:.4e}; the gradient predicts {change.predicted:.4e}, "
            f"{change.predicted / (change.found or math.nan):.3g} times that (bound of the difference "
            f"{change.bound:.1e}, {probe.tokens} trained tokens)"
            for where, change in judged.items()
        ]
        # In bf16 and fp16 it may be rounding, which has no cause and is not worth more passes.
        causes = explain_gradient(probe, [*judged.values()], trial, shift) if dtype == "fp32" else ""
    is_still = partial(lacks_gradient, experts=probe.model[0].config.moe_router_topk)
    still = sorted({shard.name for shard in probe.shards if is_still(shard)})
    if ranks.on_any_rank(bool(still)):
        signal = probe.compare_with_present(*probe.move(partial(signs_where, is_still), LARGE)).signal
        if still and signal > max(change.noise for change in changes.values()):
            found.append(f"log-probs depend on weights whose gradient is 0, among them {', '.join(still[:3])}")
            causes = "these weights are left out of the backward pass, or their gradient is not kept"
    return found, causes


def explain_gradient(probe: Probe, judged: list[Change], trial: float, shift: float) -> str:
    """What the figures of a wrong gradient say of its cause: for which kinds of weights, and whether by one factor."""
    kinds = sorted({kind for part in ranks.gather([kind_of(shard) for shard in probe.shards]) for kind in part})
    wrong, right = [], []
    for kind in kinds:
        direction = partial(signs_where, lambda shard, kind=kind: kind_of(shard) == kind)
        change, _ = probe.change_along(direction, trial, shift)
        if probe.resolves(change):
            (wrong if change.over > 1 else right).append(kind)
    if wrong and right:
        return (
            f"it is wrong for {', '.join(wrong[:4])} and right for {', '.join(right[:4])}: the backward pass of these "
            "weights, or a sum over ranks that hold copies of them (stages: the embedding; parallel.tp: norms)"
        )
    ratios = [change.predicted / change.found for change in judged if change.over > 1 and change.found]
    if ratios and max(ratios) - min(ratios) <= ALIKE * abs(ratios[0]):
        return (
            f"the whole gradient is {ratios[0]:.3g} times what it should be: summed over replicas twice or not at all, "
            "or divided by another number than that of the trained tokens"
        )
    return (
        "all weights have a gradient of other tokens or of another loss: not summed over replicas, context or expert "
        "ranks; a loss that is not its formula; other rows, packing or dropout than in scoring"
    )


def report_together(step: int, found: list[str], causes: str = "", is_error: bool = True) -> None:
    """Raise TrainingError on every rank if any rank found something, or warn. Every rank calls this."""
    lines = list(dict.fromkeys(line for part in ranks.gather(found) for line in part))
    if not lines:
        return
    shown = "\n  ".join(lines[:8])
    likely = f"  likely cause: {causes}. " if causes else "  "
    message = f"step {step}: the update is not what its formulas say\n  {shown}\n{likely}"
    require(not is_error, f"{message}train.check_update=false turns the check off", TrainingError)
    if dist.get_rank() == 0:
        why = "rounding, or a device that the bound was not tried on, may do this as well: the run goes on"
        print(f"warning: {message}{why}; model.dtype=fp32 on a CPU decides", flush=True)
