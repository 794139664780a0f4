"""The head of the model: log-prob of the target and entropy at each position, without logits of a whole row."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from grpo.parts.base.by_row import product
from grpo.parts.base.ranks import to_device
from grpo.parts.model import kernels, matched, nucleus
from grpo.parts.model.attention import Copies
from grpo.parts.model.layers import add_product  # before Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.utils import unwrap_model

LOGITS_CHUNK = 2048  # response tokens whose logits over the full vocabulary exist at a time


def token_logprobs(
    model, hidden, mb, temperature: float, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the target and entropy (any value if not asked for) at each position, 0 where the mask is 0.

    hidden [C / cp (/ tp under sequence parallelism), 1, h] of the micro-batch → logp_T, entropy_T [T] fp32, on every
    context-parallel rank. Logits exist for the M masked-in positions only.
    """
    model = unwrap_model(model)
    head = model.output_layer
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else head.weight
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)  # [C / cp, 1, h]; the backward pass reduce-scatters
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)  # the backward pass all-reduces
    rows_M, copies, own_M = own_rows(mb)
    hidden_M = copies.take(hidden[:, 0])  # [M, h]
    targets_M = mb.targets[0].index_select(0, rows_M).long()
    dtype = torch.float32 if model.fp32_head else weight.dtype
    if not hidden.is_cuda:  # a CPU has no product of bf16 that gives fp32
        hidden_M, weight = hidden_M.to(dtype), weight.to(dtype)
    fused = model.config.gradient_accumulation_fusion
    first = mpu.get_tensor_model_parallel_rank() * len(weight)  # id of this rank's first row
    cuts = nucleus.places(mb, own_M, first, len(weight), LOGITS_CHUNK) if "nuclei" in mb.replay else None
    logp_M, entropy_M = head(hidden_M, weight, targets_M, temperature, with_entropy, dtype, fused, cuts, model.matches)
    return to_row(logp_M, rows_M, mb), to_row(entropy_M, rows_M, mb)


def own_rows(mb) -> tuple:
    """The M positions with mask 1 whose hidden states this context-parallel rank holds, a tensor; which of these each
    has, Copies; and which of mb.rows they are, an array of bool.
    """
    place = mb.rows if mb.place is None else mb.place[mb.rows]
    cp = mpu.get_context_parallel_world_size()
    own = place % cp == mpu.get_context_parallel_rank()
    on = mb.tokens.device
    return to_device(torch.from_numpy(mb.rows[own]), on), Copies.of(place[own] // cp, mb.width // cp, on), own


def to_row(values_M, rows_M, mb) -> torch.Tensor:
    """The values in the row, 0 at other positions, on every context-parallel rank; [M] → [T]."""
    # The gradient passes unchanged: all context-parallel ranks compute the same loss from the sum.
    return reduce_from_tensor_model_parallel_region(
        values_M.new_zeros(mb.tokens.shape[1]).index_copy(0, rows_M, values_M), group=mpu.get_context_parallel_group()
    )


# ---------------------------------------------------------------- the head, chunk by chunk


class HeadLogp(torch.autograd.Function):
    """The head, then the log-prob of each target and the entropy at each position, over a vocabulary that
    tensor-parallel ranks split.

    hidden_M [M, h], weight [V / tp, h], targets_M [M] ids in the full vocabulary → logp_M, entropy_M [M] fp32, both
    differentiable (the entropy has any value if not `with_entropy`). With l = logit / temperature:

      d logp / d l_v = [v = target] - p_v          d entropy / d l_v = -p_v (log p_v + entropy)

    Logits in `dtype` exist for LOGITS_CHUNK positions at a time. The backward pass recomputes them, but for the last
    chunk's, and rounds their gradient to the weight's type. All ranks compute one loss, so the forward pass all-reduces
    and the backward pass does not. `fused`: the weight's gradient is added to main_grad here, as Megatron's linear
    layers do with gradient_accumulation_fusion. `cuts`: for each chunk, the places of the logits that have a
    probability (nucleus.places); without it all have one.
    """

    @staticmethod
    def forward(ctx, hidden_M, weight, targets_M, temperature, with_entropy, dtype, fused, cuts=None, matches=False):
        ctx.set_materialize_grads(False)  # None for an entropy that is only reported: no pass is spent on its gradient
        group = mpu.get_tensor_model_parallel_group()
        local_M = targets_M - group.rank() * len(weight)
        ctx.logits, stats = None, []
        hiddens = hidden_M.split(LOGITS_CHUNK)
        targets = (targets_M if matches else local_M).split(LOGITS_CHUNK)
        ctx.cuts = cuts or [None] * len(hiddens)
        for hidden, target, cut in zip(hiddens, targets, ctx.cuts, strict=True):
            del ctx.logits  # of the chunk before
            ctx.logits = head_logits(hidden, weight, dtype, matches)
            if cut is not None:
                nucleus.cut_logits(ctx.logits, cut)
            stats_of = matched.logp_stats if matches else logits_stats
            stats.append(stats_of(ctx.logits, target, temperature, with_entropy))
        stats = torch.cat(stats, dim=1)
        logp_M, entropy_M, max_M, log_z_M = stats if matches else join_stats(stats, local_M, len(weight), group)
        ctx.options = {"temperature": temperature, "dtype": weight.dtype}
        ctx.dtype, ctx.fused, ctx.matches = dtype, fused, matches
        ctx.save_for_backward(weight, hidden_M, local_M, max_M, log_z_M, entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx, grad_logp_M, grad_entropy_M):
        weight, hidden_M, local_M, *saved = ctx.saved_tensors
        grad_weight, grad_hidden_M = None, torch.empty_like(hidden_M)
        grads = [torch.zeros_like(saved[0]) if grad_logp_M is None else grad_logp_M]
        grads += [] if grad_entropy_M is None else [grad_entropy_M]
        parts = (x.split(LOGITS_CHUNK) for x in (hidden_M, grad_hidden_M, local_M, *saved, *grads))
        chunks = [*zip(ctx.cuts, *parts, strict=True)]
        for cut, hidden, grad_hidden, *rows in reversed(chunks):  # the last chunk's logits are still there
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = head_logits(hidden, weight, ctx.dtype, ctx.matches)
                if cut is not None:
                    nucleus.cut_logits(logits, cut)
            grad = logits_grad(logits, *rows, **ctx.options)
            grad_hidden.copy_(grad @ weight)
            if ctx.needs_input_grad[1] and ctx.fused:
                add_product(hidden, grad, weight.main_grad)
            elif ctx.needs_input_grad[1]:
                product = grad.t() @ hidden
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del logits, grad  # before the next chunk's
        if ctx.needs_input_grad[1] and ctx.fused:  # as Megatron's linear layers, for DDP's hook
            weight.grad_added_to_main_grad = True
            is_tied = getattr(weight, "zero_out_wgrad", False)  # the embedding's gradient is added then
            grad_weight = None if is_tied else torch.empty_like(weight)
        return grad_hidden_M, grad_weight, *[None] * 7


def join_stats(stats, local_M, rows: int, group) -> tuple[torch.Tensor, ...]:
    """`logits_stats` [4, M] of each rank's rows of the vocabulary → log-prob, entropy, max l and log Z, [M] each."""
    own_max_M, exp_sum_M, weighted_sum_M, target_M = stats
    max_M = own_max_M.clone()
    dist.all_reduce(max_M, dist.ReduceOp.MAX, group=group)
    shift_M = own_max_M - max_M
    here_M = (local_M >= 0) & (local_M < rows)

    sums = torch.stack([exp_sum_M, weighted_sum_M + exp_sum_M * shift_M]) * shift_M.exp()
    sums = torch.cat([sums, (target_M + shift_M * here_M)[None]])  # [3, M]
    dist.all_reduce(sums, group=group)
    exp_sum_M, weighted_sum_M, target_M = sums
    log_z_M = exp_sum_M.log()
    return target_M - log_z_M, log_z_M - weighted_sum_M / exp_sum_M, max_M, log_z_M


def head_logits(hidden_M, weight, dtype: torch.dtype, matches: bool) -> torch.Tensor:
    """[M, h], [V / tp, h] → [M, V / tp] in `dtype`; fp32 of bf16 or fp16 is summed in fp32, and not rounded (CUDA)."""
    if matches:
        return product(hidden_M, weight)
    if dtype is weight.dtype:
        return hidden_M @ weight.t()
    return torch.mm(hidden_M, weight.t(), out_dtype=dtype)


# ---------------------------------------------------------------- passes over logits

BLOCK = 1 << 20  # logits that exist in fp32 at a time on a CPU


def logits_stats(logits_M, local_M, temperature: float, with_entropy: bool) -> torch.Tensor:
    """Of each row of logits [M, V / tp], with l = logit / temperature and e = exp(l - max l), four values, [4, M] fp32:
    max l, sum e, sum e (l - max l), which is not computed if not `with_entropy`, and the target's l - max l.

    local_M [M]: the target's column; where it is none of 0 ... V / tp - 1, another rank holds it, and the last is 0.
    """
    if kernels.runs_on(logits_M):
        return kernels.logits_stats(logits_M, local_M, temperature)
    max_M = logits_M.amax(-1).to(torch.promote_types(logits_M.dtype, torch.float32)) / temperature
    stats = []  # of some rows each
    for shifted, column, here, top in shifted_rows(logits_M, local_M, temperature, max_M, max_M):
        target, exp = shifted.gather(-1, column)[:, 0] * here, shifted.exp()
        exp_sum = exp.sum(-1)
        weighted = exp.mul_(shifted).sum(-1) if with_entropy else torch.full_like(target, math.nan)
        stats.append(torch.stack([top, exp_sum, weighted, target]))
    return torch.cat(stats, dim=1)


def logits_grad(logits_M, local_M, max_M, log_z_M, entropy_M, *grads_M, temperature: float, dtype) -> torch.Tensor:
    """The gradient by the logits [M, V / tp], in `dtype`, from those by log-prob and, or not, entropy [M]; the formulas
    are in HeadLogp. It is written over the logits where they are of this type.

    max_M and log_z_M [M]: of l over the whole vocabulary, and log of the sum of exp(l - max l).
    """
    if kernels.runs_on(logits_M):
        options = {"temperature": temperature, "dtype": dtype}
        return kernels.logits_grad(logits_M, local_M, max_M, log_z_M, entropy_M, *grads_M, **options)
    grad_M = logits_M if logits_M.dtype is dtype else torch.empty_like(logits_M, dtype=dtype)
    others_M = (log_z_M, entropy_M, grad_M, *grads_M)
    for shifted, column, here, log_z, entropy, grad, grad_logp, *grad_entropy in shifted_rows(
        logits_M, local_M, temperature, max_M, *others_M
    ):
        logp = shifted.sub_(log_z[:, None])  # of each token of the vocabulary
        factor = -grad_logp[:, None]
        if grad_entropy:
            factor = (logp + entropy[:, None]).mul_(-grad_entropy[0][:, None]).add_(factor)
        of_l = logp.exp_().mul_(factor)  # p_v times its factor; the target's 1 is added to it
        grad.copy_(of_l.scatter_add_(-1, column, (grad_logp * here)[:, None]).div_(temperature))
    return grad_M


def shifted_rows(logits_M, local_M, temperature: float, max_M, *others_M) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of some rows at a time: logits / temperature - max, [rows, V / tp], in the type of the maximum, fp32 or wider;
    the target's column, [rows, 1], any where this rank has not got it, and whether it has; these rows of the others.

    On a CPU they are so few that they stay in its cache: large temporaries cost page faults. On a GPU they are all.
    """
    vocab = logits_M.shape[-1]
    rows = len(logits_M) if logits_M.is_cuda else BLOCK // vocab
    parts = (values.split(max(rows, 1)) for values in (logits_M, local_M, max_M, *others_M))
    for logits, local, shift, *others in zip(*parts, strict=True):
        shifted = (logits.to(shift.dtype) / temperature).sub_(shift[:, None])
        yield shifted, local.clamp(0, vocab - 1)[:, None], (local >= 0) & (local < vocab), *others
