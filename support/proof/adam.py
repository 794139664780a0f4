"""Compare what Megatron's optimizer did in one update with AdamW, computed in float64 from the same gradient."""

import functools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from config import TrainConfig
from support.base.ranks import device
from support.model.optimizer_state import MOMENTS, optimizer_weights, own_slice

BLOCK = 1 << 20  # elements: on a CPU larger temporaries cost page faults
ENTRIES = 1000  # sampled from each shard
RELATIVE = 1e-3  # bound of moments and of the weight's step; the norm that clips is a sum in fp32
CLIPPED_BF16 = 2.0**-6  # more, where the gradient is in bf16: norm and product round it by up to 2^-8 each; its square
EPS32 = 2.0**-22  # of the weight itself, relative: fp32 rounds it twice by 2^-24
TINY = 1e-37  # of a moment, absolute: below, fp32 loses digits


@dataclass(frozen=True)
class Shard:
    """Part of a trained weight that this rank updates, of at most BLOCK elements, so that temporaries are small."""

    name: str
    part: object  # Megatron's optimizer
    weight: torch.nn.Parameter
    place: slice  # in the flat weight, inside one block of it
    start: int  # in the flat state that this rank has of the weight
    counted: bool  # False where another tensor- or pipeline-parallel rank counts the same elements
    before: Tensor  # the values, flat, in the model's dtype
    size: float  # root mean square of the weight

    @property
    def values(self) -> Tensor:
        """The present values, flat: a view of the model's weight."""
        return self.weight.data.view(-1)[self.place]

    @property
    def gradient(self) -> Tensor:
        """The gradient that the optimizer uses: reduced, divided, also by the loss scale, not clipped; flat fp32."""
        gradient = self.weight.main_grad.view(-1)[self.place].float()
        return gradient / self.part.get_loss_scale() if self.part.config.fp16 else gradient

    @property
    def state(self) -> dict[str, Tensor]:
        """Main weights and moments, flat, and Adam's count of steps."""
        _, own = own_slice(self.part, self.weight)
        end = self.start + len(self.before)
        return {moment: own[moment].detach()[self.start : end] for moment in MOMENTS} | {"step": own["step"]}

    def random(self, salt: int) -> Tensor:
        """Random int16, flat: a part of random_blocks. Ranks that hold a copy of the elements get the same."""
        first = self.place.start // BLOCK * BLOCK
        offset = (zlib.crc32(f"{self.name} {first} {salt}".encode()) + self.place.start - first) % BLOCK
        return random_blocks(device())[offset : offset + len(self.before)]


@functools.cache
def random_blocks(on: torch.device) -> Tensor:
    """BLOCK random int16, twice in a row, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**15), 2**15, (BLOCK,), dtype=torch.int16, generator=generator).repeat(2).to(on)


def own_shards(model: list, optimizer, names: dict[torch.nn.Parameter, str], copied: bool = True) -> list[Shard]:
    """This rank's shards of all trained weights, values `copied` or a view. `names`: {weight: name}, as its copies."""
    shards = []
    for part, _, weight, tensor in optimizer_weights(model, optimizer):
        if weight in part.model_param_gbuf_map:
            own, _ = own_slice(part, weight)
            counted = tuple(tensor.replica_id[:2]) == (0, 0)  # as a checkpoint counts it
            size = torch.linalg.vector_norm(weight.detach(), dtype=torch.float32).item() / math.sqrt(weight.numel())
            for first in range(own.start // BLOCK * BLOCK, own.stop, BLOCK):
                place = slice(max(first, own.start), min(first + BLOCK, own.stop))
                values = weight.data.view(-1)[place]
                before = values.clone() if copied else values
                shards.append(Shard(names[weight], part, weight, place, place.start - own.start, counted, before, size))
    return shards


def gather_weights(model: list) -> None:
    """Gather the weights of all replicas from the shards."""
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of float64 values over all ranks, on the host."""
    total = values.clone()
    dist.all_reduce(total)
    return total.cpu()


def norm_of(parts: Iterable[Tensor]) -> float:
    """Norm of a tensor, from its parts on all ranks; summed in float64."""
    squares = torch.zeros((), dtype=torch.float64, device=device())
    for part in parts:
        squares += part.float().square().sum(dtype=torch.float64)
    return math.sqrt(sum_over_ranks(squares))


def adamw(state: dict[str, Tensor], gradient: Tensor, steps: int, eps: float, train: TrainConfig) -> dict[str, Tensor]:
    """The state, [n] float64 each, after a step on a clipped gradient and `steps` before: arXiv 1711.05101, alg. 2."""
    beta1, beta2 = train.adam_beta1, train.adam_beta2
    mean = beta1 * state["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
    unbiased_mean = mean / (1 - beta1 ** (steps + 1))
    unbiased_square = square / (1 - beta2 ** (steps + 1))
    decayed = state["param"] * (1 - train.lr * train.weight_decay)  # norms and biases too
    param = decayed - train.lr * unbiased_mean / (unbiased_square.sqrt() + eps)
    return {"param": param, "exp_avg": mean, "exp_avg_sq": square}


@dataclass(frozen=True)
class Sampled:
    """Entries of a shard before the update: numbers of the entries [n], optimizer state [n] float64, their gradient."""

    shard: Shard
    entries: Tensor
    state: dict[str, Tensor]
    gradient: Tensor


def check_state(shards: list[Shard], updates: int) -> list[str]:
    """What shows that the optimizer's state is not that after `updates` updates; every rank calls this."""
    found = []
    for shard in shards:
        steps = int(shard.state["step"])
        if steps != updates:
            found.append(f"Adam's step count of {shard.name} is {steps}, though {updates} updates were made")
    if updates and norm_of(shard.state["exp_avg_sq"].to(device()) for shard in shards) == 0:
        found.append(f"Adam's moments are all 0 after {updates} updates: the optimizer's state was lost")
    return found[:1]


def sample_state(shard: Shard) -> Sampled:
    """Sample the optimizer's state and the gradient of a shard before an update."""
    count = len(shard.before)
    entries = torch.linspace(0, count - 1, min(ENTRIES, count), dtype=torch.float64).long()
    return Sampled(shard, entries, read_state(shard, entries), read_entries(shard.gradient, entries))


def read_state(shard: Shard, entries: Tensor) -> dict[str, Tensor]:
    """{moment: its values at the entries, [n] float64 on the host}."""
    return {moment: read_entries(shard.state[moment], entries) for moment in MOMENTS}


def read_entries(values: Tensor, entries: Tensor) -> Tensor:
    """Values at the entries, [n] float64 on the host."""
    return values[entries.to(values.device)].cpu().double()


def check_step(sampled: list[Sampled], updates: int, norm: float, train: TrainConfig) -> list[str]:
    """What differs from AdamW after the update, [] if nothing. norm: before clipping; train: that of this step."""
    scale = min(train.clip_grad / (norm + 1e-6), 1.0) if train.clip_grad else 1.0  # as in torch's clip_grad_norm_
    differs, unequal = [], []
    for sample in sampled:
        differs += differences(sample, sample.gradient * scale, updates, train)
        shard = sample.shard
        if not torch.equal(shard.values, shard.state["param"].to(shard.values)):
            unequal.append(f"{shard.name} of the model is not its fp32 main weight, rounded")
    return differs[:1] + unequal[:1]


def differences(sample: Sampled, gradient: Tensor, updates: int, train: TrainConfig) -> list[str]:
    """A line for each part of the state that is not AdamW's, moments first, with its worst entry.

    gradient: clipped. Where it and the moment cancel, rounding is relative to the step that they make of one sign.
    """
    shard, before = sample.shard, sample.state
    after = read_state(shard, sample.entries)
    eps = shard.part.config.adam_eps
    wanted = adamw(before, gradient, updates, eps, train)
    of_one_sign = {"param": 0 * gradient, "exp_avg": before["exp_avg"].abs()}
    largest = adamw(before | of_one_sign, gradient.abs(), updates, eps, train)["param"].abs()
    relative = RELATIVE
    if shard.weight.main_grad.dtype == torch.bfloat16:  # use_precision_aware_optimizer does not copy it to fp32
        relative += CLIPPED_BF16
    bounds = {
        "exp_avg": relative * (before["exp_avg"].abs() + (1 - train.adam_beta1) * gradient.abs()) + TINY,
        "exp_avg_sq": relative * wanted["exp_avg_sq"] + TINY,
        "param": EPS32 * wanted["param"].abs() + relative * (largest + (wanted["param"] - before["param"]).abs()),
    }
    lines = []
    for moment, bound in bounds.items():
        excess = (after[moment] - wanted[moment]).abs() - bound
        worst = int(excess.nan_to_num(nan=math.inf).argmax())
        if not excess[worst] <= 0:
            lines.append(
                f"{moment} of {shard.name}[{int(sample.entries[worst]) + shard.place.start}] was "
                f"{before[moment][worst]:.6e} and became {after[moment][worst]:.6e}; AdamW gives "
                f"{wanted[moment][worst]:.6e} (clipped gradient {gradient[worst]:.3e}): "
                f"{cause_of(moment, before[moment], after[moment], wanted[moment], gradient, train)}"
            )
    return lines


def cause_of(moment: str, before: Tensor, after: Tensor, wanted: Tensor, gradient: Tensor, train: TrainConfig) -> str:
    """What explains all entries of a part of the state by one factor: [n] before and after the step and by AdamW."""
    parts = {
        "exp_avg": {"clipped gradient": (1 - train.adam_beta1) * gradient},
        "exp_avg_sq": {"squared gradient": (1 - train.adam_beta2) * gradient.square()},
        "param": {"learning rate": wanted - before, "weight decay": -train.lr * train.weight_decay * before},
    }
    found = []
    for name, part in parts[moment].items():
        ratios = ((after - wanted) / part)[part != 0]
        middle = ratios.median()
        spread = ((ratios - middle).abs().median() / middle.abs()).item()
        found.append((spread, f"the {name} in it is {round(1 + middle.item(), 2):g} times that of the formula"))
    spread, text = min(found)
    return text if spread < 0.1 else "no factor of one part explains it"
