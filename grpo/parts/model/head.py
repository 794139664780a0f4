"""The head of the model: log-prob of the target and entropy at each position, without logits of a whole row."""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from grpo.parts.base.by_row import product
from grpo.parts.base.ranks import to_device
from grpo.parts.model import kernels, matched, nucleus
from grpo.parts.model.attention import Copies
from grpo.parts.model.divergence import Known, diverge, divergence_grad
from grpo.parts.model.layers import add_product, row_blocks  # before Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from megatron.core.utils import unwrap_model

LOGITS_CHUNK = 2048  # response tokens whose logits over the full vocabulary exist at a time
COMPARED = 2**26  # logits of a chunk at most, where there are other models' beside the policy's


def token_logprobs(model, hidden, mb, temperature, with_entropy=True):
    """Log-prob of the target and entropy at each position, 0 where the mask is 0.

    hidden [C / cp (/ tp under sequence parallelism), 1, h] of the micro-batch → logp_T, entropy_T [T] fp32, on every
    context-parallel rank. Without `with_entropy` the entropies mean nothing. Logits exist for the M positions of the
    mask only. With mb.others each of these gives a tuple more: the policy's divergence from that model, its log-prob of
    the target, and its entropy, [T] each.
    """
    weight = head_weight(model)
    hidden_M, rows_M, own_M = hidden_rows(model, hidden, mb)
    targets_M = mb.targets[0].index_select(0, rows_M).long()

    model = unwrap_model(model)
    dtype = torch.float32 if model.fp32_head else weight.dtype
    if not hidden.is_cuda:  # a CPU has no product of bf16 that gives fp32
        hidden_M, weight = hidden_M.to(dtype), weight.to(dtype)
    others = [replace(o, hidden_M=o.hidden_M.to(hidden_M), weight=o.weight.to(weight)) for o in mb.others.values()]

    fused = model.config.gradient_accumulation_fusion
    first = mpu.get_tensor_model_parallel_rank() * len(weight)  # id of this rank's first row
    size = chunk_size(len(weight), others)
    cuts = nucleus.places(mb, own_M, first, len(weight), size) if "nuclei" in mb.replay else None
    found = model.output_layer(
        hidden_M, weight, targets_M, temperature, with_entropy, dtype, fused, cuts, model.matches, others
    )
    logp_T, entropy_T, *of_others = [to_row(values_M, rows_M, mb) for values_M in found]
    return logp_T, entropy_T, *(of_others[n : n + 3] for n in range(0, len(of_others), 3))


def head_weight(model):
    """The head's weight on the last stage, [V / tp, h]."""
    model = unwrap_model(model)
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def head_weight_for(model, rows):
    """The same, detached, of the first rows of the vocabulary alone, `rows` of them on each tensor-parallel rank."""
    weight = head_weight(model).detach()
    if len(weight) == rows:
        return weight
    group = mpu.get_tensor_model_parallel_group()
    return _gather_along_first_dim(weight, group)[group.rank() * rows :][:rows].clone()


def hidden_rows(model, hidden, mb):
    """The hidden states of the M positions with mask 1 that this context-parallel rank has, [M, h]; and what own_rows
    says of them: their places in the row, and which of mb.rows they are.
    """
    if unwrap_model(model).config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)  # [C / cp, 1, h]; the backward pass reduce-scatters
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)  # the backward pass all-reduces
    rows_M, copies, own_M = own_rows(mb)
    return copies.take(hidden[:, 0]), rows_M, own_M


def all_hidden_rows(model, hidden, mb, on=None):
    """The hidden states of all positions with mask 1, in their order, on every context-parallel rank; → [mb.rows, h] on
    the device `on`, or where they are.
    """
    hidden_M, _, own_M = hidden_rows(model, hidden, mb)
    places = to_device(torch.from_numpy(np.flatnonzero(own_M)), hidden.device)
    whole = hidden_M.new_zeros(len(own_M), hidden_M.shape[1]).index_copy(0, places, hidden_M)
    whole = reduce_from_tensor_model_parallel_region(whole, group=mpu.get_context_parallel_group())
    return whole if on is None else whole.to(on)


def chunk_size(rows, others):
    """Positions of a chunk of logits with `rows` columns; where models are compared, fewer of a large vocabulary."""
    return max(min(LOGITS_CHUNK, COMPARED // rows), 1) if others else LOGITS_CHUNK


def own_rows(mb):
    """The M positions with mask 1 whose hidden states this context-parallel rank has, three values.

    Their places in the row, a tensor; which hidden state each has, Copies; which of mb.rows they are, an array of bool.
    """
    place = mb.rows if mb.place is None else mb.place[mb.rows]
    cp = mpu.get_context_parallel_world_size()
    own = place % cp == mpu.get_context_parallel_rank()
    on = mb.tokens.device
    return to_device(torch.from_numpy(mb.rows[own]), on), Copies.of(place[own] // cp, mb.width // cp, on), own


def to_row(values_M, rows_M, mb):
    """The values in the row, 0 at other positions, on every context-parallel rank; [M] → [T]."""
    values_T = values_M.new_zeros(mb.tokens.shape[1]).index_copy(0, rows_M, values_M)
    # The gradient passes unchanged, because all context-parallel ranks compute the same loss from the sum.
    return reduce_from_tensor_model_parallel_region(values_T, group=mpu.get_context_parallel_group())


# ---------------------------------------------------------------- the head, chunk by chunk


class HeadLogp(torch.autograd.Function):
    """The head, then the log-prob of each target and the entropy at each position, over a vocabulary that
    tensor-parallel ranks split.

    hidden_M [M, h], weight [V / tp, h], targets_M [M] ids in the full vocabulary → logp_M, entropy_M [M] fp32, both
    differentiable (without `with_entropy` the entropies mean nothing). With l = logit / temperature:

      d logp / d l_v = [v = target] - p_v          d entropy / d l_v = -p_v (log p_v + entropy)

    Logits in `dtype` exist for LOGITS_CHUNK positions at a time. The backward pass recomputes them, except the last
    chunk's, and rounds their gradient to the weight's type. All ranks compute one loss, so the forward pass all-reduces
    and the backward pass does not. With `fused` the weight's gradient is added to main_grad here, as Megatron's linear
    layers do with gradient_accumulation_fusion. `cuts` has, for each chunk, the places of the logits that have a
    probability (nucleus.places); None means all have one. With `matches` the forward pass is vLLM's (matched.py).

    `others` are models that the policy is compared with (divergence.py). Each adds three values, [M] fp32: the policy's
    divergence from it, which is differentiable, its log-prob of the target and its entropy.
    """

    @staticmethod
    def forward(
        ctx, hidden_M, weight, targets_M, temperature, with_entropy, dtype, fused, cuts=None, matches=False, others=()
    ):
        ctx.set_materialize_grads(False)  # None for an entropy that is only reported: no pass is spent on its gradient
        group = mpu.get_tensor_model_parallel_group()
        local_M = targets_M - group.rank() * len(weight)
        ctx.temperature, ctx.dtype, ctx.fused, ctx.matches, ctx.others = temperature, dtype, fused, matches, others
        size = chunk_size(len(weight), others)
        ctx.chunks = [slice(n, n + size) for n in range(0, max(len(hidden_M), 1), size)]
        ctx.cuts = cuts or [None] * len(ctx.chunks)
        ctx.known = []  # of each chunk: Known of each of the others

        stats, of_others = [], []
        for chunk, cut in zip(ctx.chunks, ctx.cuts, strict=True):
            ctx.logits = None  # frees those of the chunk before
            ctx.logits = head_logits(hidden_M[chunk], weight, dtype, cut, matches)
            if matches:
                stats.append(matched.logp_stats(ctx.logits, targets_M[chunk], temperature, with_entropy))
            else:
                stats.append(logits_stats(ctx.logits, local_M[chunk], temperature, with_entropy))

            known = []
            if others:
                whole = stats[-1] if matches else join_stats(stats[-1], local_M[chunk], len(weight), group)
                values, known = compare(others, ctx.logits, whole, chunk, local_M[chunk], temperature, cut, group)
                of_others.append(values)
            ctx.known.append(known)
        stats = torch.cat(stats, dim=1)

        if not matches:
            stats = join_stats(stats, local_M, len(weight), group)
        logp_M, entropy_M, max_M, log_z_M = stats
        ctx.save_for_backward(weight, hidden_M, local_M, max_M, log_z_M, entropy_M)
        if not others:
            return logp_M, entropy_M
        of_others = torch.cat(of_others, dim=1).unbind()
        ctx.mark_non_differentiable(*(values_M for n, values_M in enumerate(of_others) if n % 3))
        return logp_M, entropy_M, *of_others

    @staticmethod
    def backward(ctx, grad_logp_M, grad_entropy_M, *grads_M):
        weight, hidden_M, *known = ctx.saved_tensors
        known.append(grad_logp_M)
        if grad_entropy_M is not None:
            known.append(grad_entropy_M)
        grad_hidden_M, grad_weight = torch.empty_like(hidden_M), None

        # From the last chunk, whose logits are still there.
        for number in reversed(range(len(ctx.chunks))):
            chunk, cut = ctx.chunks[number], ctx.cuts[number]
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = head_logits(hidden_M[chunk], weight, ctx.dtype, cut, ctx.matches)

            # The policy's own gradient is written over the logits, so it comes last.
            of_others = []
            for other, of_other, grad_M in zip(ctx.others, ctx.known[number], grads_M[::3], strict=True):
                if grad_M is not None:
                    other_logits = head_logits(other.hidden_M[chunk], other.weight, ctx.dtype, cut, other.matches)
                    grad = divergence_grad(other, logits, other_logits, of_other, grad_M[chunk], ctx.temperature)
                    of_others.append(grad)

            rows = [values_M[chunk] for values_M in known]
            grad = logits_grad(logits, *rows, temperature=ctx.temperature, dtype=weight.dtype)
            for other_grad in of_others:
                grad.add_(other_grad)

            grad_hidden_M[chunk] = grad @ weight
            if ctx.needs_input_grad[1] and ctx.fused:
                add_product(hidden_M[chunk], grad, weight.main_grad)
            elif ctx.needs_input_grad[1]:
                added = grad.t() @ hidden_M[chunk]
                grad_weight = added if grad_weight is None else grad_weight.add_(added)
            del logits, grad  # before the next chunk's

        if ctx.needs_input_grad[1] and ctx.fused:  # as Megatron's linear layers, for DDP's hook
            weight.grad_added_to_main_grad = True
            is_tied = getattr(weight, "zero_out_wgrad", False)  # the embedding's gradient is added then
            grad_weight = None if is_tied else torch.empty_like(weight)
        return grad_hidden_M, grad_weight, *[None] * 8


def compare(others, logits, stats, chunk, local_M, temperature, cut, group):
    """The three values of each of the other models at the positions of a chunk, [3 others, M], and what is known of it.

    `stats` [4, M] are those of the policy's `logits`, over the whole vocabulary.
    """
    values, known = [], []
    for other in others:
        other_logits = head_logits(other.hidden_M[chunk], other.weight, logits.dtype, cut, other.matches)
        own = logits_stats(other_logits, local_M, temperature, True)
        logq_M, entropy_M, *scale = join_stats(own, local_M, other_logits.shape[1], group)
        divergence_M, found = diverge(other, logits, other_logits, Known(*stats[2:], *scale), temperature, group)
        values += [divergence_M, logq_M, entropy_M]
        known.append(found)
        del other_logits  # before the next one's
    return torch.stack(values), known


def head_logits(hidden_M, weight, dtype, cut, matches):
    """[M, h], [V / tp, h] → [M, V / tp] in `dtype`, cut to the places in `cut`.

    On a GPU the fp32 logits of bf16 or fp16 are summed in fp32 and not rounded.
    """
    if matches:
        logits_M = product(hidden_M, weight)
    elif dtype is weight.dtype:
        logits_M = hidden_M @ weight.t()
    else:
        logits_M = torch.mm(hidden_M, weight.t(), out_dtype=dtype)
    if cut is not None:
        nucleus.cut_logits(logits_M, cut)
    return logits_M


def join_stats(stats, local_M, rows, group):
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


# ---------------------------------------------------------------- passes over logits


def logits_stats(logits_M, local_M, temperature, with_entropy):
    """Four values of each row of logits [M, V / tp], [4, M] fp32. With l = logit / temperature and e = exp(l - max l):
    max l, sum e, sum e (l - max l), which is not computed if not `with_entropy`, and the target's l - max l.

    local_M [M] is the target's column. If it is outside 0 ... V / tp - 1, another rank has it, and the last value is 0.
    """
    if kernels.runs_on(logits_M):
        return kernels.logits_stats(logits_M, local_M, temperature)
    max_M = logits_M.amax(-1).to(torch.promote_types(logits_M.dtype, torch.float32)) / temperature
    exp_sum_M, weighted_sum_M, target_M = max_M.new_full((3, len(max_M)), math.nan)
    for rows in row_blocks(logits_M):
        shifted, column, here = shift(logits_M[rows], local_M[rows], temperature, max_M[rows])
        target_M[rows] = shifted.gather(-1, column)[:, 0] * here
        exp = shifted.exp()
        exp_sum_M[rows] = exp.sum(-1)
        if with_entropy:
            weighted_sum_M[rows] = exp.mul_(shifted).sum(-1)
    return torch.stack([max_M, exp_sum_M, weighted_sum_M, target_M])


def logits_grad(logits_M, local_M, max_M, log_z_M, entropy_M, grad_logp_M, grad_entropy_M=None, *, temperature, dtype):
    """The gradient of the logits [M, V / tp], in `dtype`, from the gradients of log-prob and entropy [M].

    The formulas are in HeadLogp. The gradient is written over the logits if they have this type. max_M and log_z_M [M]
    are of the whole vocabulary: the maximum of l, and the log of the sum of exp(l - max l).
    """
    if kernels.runs_on(logits_M):
        known_M = (local_M, max_M, log_z_M, entropy_M, grad_logp_M, grad_entropy_M)
        return kernels.logits_grad(logits_M, *known_M, temperature=temperature, dtype=dtype)
    grad_M = logits_M if logits_M.dtype is dtype else torch.empty_like(logits_M, dtype=dtype)
    for rows in row_blocks(logits_M):
        shifted, column, here = shift(logits_M[rows], local_M[rows], temperature, max_M[rows])
        logp = shifted.sub_(log_z_M[rows, None])  # of each token of the vocabulary
        grad_logp = grad_logp_M[rows, None]
        factor = -grad_logp
        if grad_entropy_M is not None:
            factor = (logp + entropy_M[rows, None]).mul_(-grad_entropy_M[rows, None]).add_(factor)

        grad = logp.exp_().mul_(factor)  # p_v times its factor; the target's 1 is added to it
        grad_M[rows] = grad.scatter_add_(-1, column, grad_logp * here[:, None]).div_(temperature)
    return grad_M


def shift(logits_M, local_M, temperature, max_M):
    """Of some rows: logits / temperature - max, [M, V / tp], in the type of the maximum, which is fp32 or wider; the
    target's column, [M, 1], any column if this rank has not got it; and whether it has, [M].
    """
    vocab = logits_M.shape[-1]
    shifted = (logits_M.to(max_M.dtype) / temperature).sub_(max_M[:, None])
    return shifted, local_M.clamp(0, vocab - 1)[:, None], (local_M >= 0) & (local_M < vocab)
