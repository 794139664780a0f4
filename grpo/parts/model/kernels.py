"""Triton kernels for NVIDIA GPUs. Each reads its input once, where torch would take several passes over strided halves.

All compute in fp32 and round once. TRITON_INTERPRET=1 runs them on a CPU. `vocab` is the part of the vocabulary that a
rank has, `f` the width of a feed-forward block. The block sizes and warps are the fastest of several tried on an H200.
"""

import math
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it; nothing calls the kernels then
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=None)


def runs_on(x):
    """Whether these kernels compute on the tensor's device. If not, torch's own do."""
    return x.is_cuda


@triton.jit
def read(pointers, inside):
    """The values in fp32, 0 where not `inside`."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


# ---------------------------------------------------------------- log-prob and entropy over a vocabulary


def logits_stats(logits_M, local_M, temperature):
    """`logits_stats` of grpo/parts/model/head.py, with all four values in any case."""
    vocab = logits_M.shape[-1]
    out = torch.empty(4, len(logits_M), dtype=torch.float32, device=logits_M.device)
    block = min(4096, triton.next_power_of_2(vocab))
    logits_stats_kernel[(len(logits_M),)](logits_M, local_M, out, 1 / temperature, vocab, BLOCK=block, num_warps=4)
    return out


@triton.jit
def logits_stats_kernel(logits, local, out, inverse_t, vocab: tl.constexpr, BLOCK: tl.constexpr):
    """One row in one pass. The sums are relative to the maximum so far."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    start = logits + row * vocab
    top = -float("inf")
    total = 0.0
    weighted = 0.0

    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < vocab
        logit = tl.load(start + at, mask=inside, other=-float("inf")).to(tl.float32) * inverse_t
        new = tl.maximum(top, tl.max(logit, 0))
        shifted = logit - new
        exp = tl.exp(shifted)

        # What was summed so far was relative to the old maximum.
        scale = tl.exp(top - new)
        moved = tl.where(top > -float("inf"), top - new, 0.0)
        weighted = scale * (weighted + total * moved) + tl.sum(tl.where(inside, exp * shifted, 0.0), 0)
        total = scale * total + tl.sum(exp, 0)
        top = new

    target = tl.load(local + row)
    here = (target >= 0) & (target < vocab)
    of_target = read(start + target, here) * inverse_t

    tl.store(out + row, top)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, tl.where(here, of_target - top, 0.0))


def logits_grad(logits_M, local_M, max_M, log_z_M, entropy_M, grad_logp_M, grad_entropy_M, *, temperature, dtype):
    """`logits_grad` of grpo/parts/model/head.py."""
    vocab = logits_M.shape[-1]
    out_M = logits_M if logits_M.dtype is dtype else torch.empty_like(logits_M, dtype=dtype)
    if grad_entropy_M is None:
        grad_entropy_M = torch.zeros_like(grad_logp_M)
    rows = (local_M, max_M + log_z_M, entropy_M, grad_logp_M.contiguous(), grad_entropy_M.contiguous())
    block = min(2048, triton.next_power_of_2(vocab))
    grid = (len(logits_M), triton.cdiv(vocab, block))
    logits_grad_kernel[grid](logits_M, out_M, *rows, 1 / temperature, vocab, BLOCK=block, num_warps=4)
    return out_M


@triton.jit
def logits_grad_kernel(
    logits, out, local, log_z, entropy, grad_logp, grad_entropy, inverse_t, vocab: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of a row. `log_z` is of the whole vocabulary, with no maximum subtracted. `out` may be `logits`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    logp = read(logits + row * vocab + at, inside) * inverse_t - tl.load(log_z + row)
    g = tl.load(grad_logp + row)
    h = tl.load(grad_entropy + row)
    of_target = tl.where(at == tl.load(local + row), g, 0.0)
    grad = of_target - tl.exp(logp) * (g + h * (logp + tl.load(entropy + row)))
    tl.store(out + row * vocab + at, grad * inverse_t, mask=inside)


# ---------------------------------------------------------------- SwiGLU


def swiglu(gate_up):
    """silu(gate) · up; [..., 2 f] → [..., f]."""
    f = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    launch_swiglu(gate_up, out, out, f, False)
    return out


def swiglu_grad(gate_up, grad):
    """The gradient of [gate, up]; [..., 2 f] and [..., f] → [..., 2 f]."""
    f = grad.shape[-1]
    out = gate_up.new_empty(gate_up.shape)
    launch_swiglu(gate_up, grad.contiguous(), out, f, True)
    return out


def launch_swiglu(gate_up, grad, out, f, is_backward):
    """Run the kernel below on all rows."""
    grid = (gate_up.numel() // (2 * f), triton.cdiv(f, 1024))
    swiglu_kernel[grid](gate_up.contiguous(), grad, out, f, is_backward, BLOCK=1024, num_warps=4)


@triton.jit
def swiglu_kernel(gate_up, grad, out, f, is_backward: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row: silu(gate) · up or, from the gradient of this, the gradients of both. `grad` is read then."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < f
    start = gate_up + row * 2 * f + at
    gate = read(start, inside)
    up = read(start + f, inside)
    sigmoid = tl.sigmoid(gate)

    if is_backward:
        g = read(grad + row * f + at, inside)
        to = out + row * 2 * f + at
        tl.store(to, g * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
        tl.store(to + f, g * gate * sigmoid, mask=inside)
    else:
        tl.store(out + row * f + at, gate * sigmoid * up, mask=inside)


# ---------------------------------------------------------------- rotary embedding


def rotate(x, cos, sin, sign):
    """`Rotation` of grpo/parts/model/layers.py, or its inverse with `sign` -1.0; x [T, 1, heads, d] → the same."""
    tokens, _, heads, d = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(d // 2)}
    rotate_kernel[(tokens,)](x, cos, sin, out, x.stride(0), x.stride(2), sign, heads, d // 2, **shape, num_warps=4)
    return out


@triton.jit
def rotate_kernel(
    x, cos, sin, out, stride_token, stride_head, sign,
    heads: tl.constexpr, half: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: halves (a, b) of each head become (a cos - b sin, b cos + a sin)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None]
    inside = (head < heads) & (at < half)
    start = x + token * stride_token + head * stride_head + at
    a = read(start, inside)
    b = read(start + half, inside)
    c = read(cos + token * 2 * half + at, at < half)
    s = read(sin + token * 2 * half + half + at, at < half) * sign
    to = out + (token * heads + head) * 2 * half + at
    tl.store(to, a * c - b * s, mask=inside)
    tl.store(to + half, b * c + a * s, mask=inside)


# ---------------------------------------------------------------- copies of a row


def sum_copies(grad, order, counts, ends):
    """The gradient of `TakeRows` of grpo/parts/model/attention.py, in one pass; [T, ...] → [C, ...]."""
    out = grad.new_empty(len(counts), *grad.shape[1:])
    width = math.prod(grad.shape[1:])
    grid = (len(counts), triton.cdiv(width, 1024))
    sum_copies_kernel[grid](grad.contiguous(), order, counts, ends, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def sum_copies_kernel(grad, order, counts, ends, out, width, BLOCK: tl.constexpr):
    """A block of one computed row: the sum of its copies' gradients, in their order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    end = tl.load(ends + row)
    total = tl.zeros([BLOCK], tl.float32)
    for copy in range(end - tl.load(counts + row), end):
        total += read(grad + tl.load(order + copy) * width + at, inside)
    tl.store(out + row * width + at, total, mask=inside)
