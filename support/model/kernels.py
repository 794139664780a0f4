"""Triton kernels for NVIDIA GPUs: each reads its input once, in place of several passes of torch over strided halves.

All compute in fp32 and round once. TRITON_INTERPRET=1 runs them on a CPU. `f` is the width of a feed-forward
block. The block sizes and warps are the fastest of those tried on an H200.
"""

import functools
import os
import shutil
from types import ModuleType, SimpleNamespace

import torch

from support.base.ranks import is_first_rank, say

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it; nothing calls the kernels then
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=None)


def runs_on(x: torch.Tensor) -> bool:
    """Whether these kernels compute on the tensor's device; else torch's own do."""
    return x.is_cuda and compiles()


@functools.cache
def compiles() -> bool:
    """Whether Triton can compile on this machine, for which it needs a C compiler; says so once where it cannot."""
    if isinstance(triton, ModuleType) and (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return True
    if is_first_rank():
        say("note: training on the GPU is slower without Triton and a C compiler (gcc, clang or CC), which it calls")
    return False


@triton.jit
def read(pointers, inside):
    """The values in fp32, 0 where not `inside`."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


# ---------------------------------------------------------------- SwiGLU


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; [..., 2 f] → [..., f]."""
    f = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    swiglu_kernel[(out.numel() // f, triton.cdiv(f, 1024))](gate_up.contiguous(), out, f, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def swiglu_kernel(gate_up, out, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < f
    start = gate_up + row * 2 * f + at
    gate = read(start, inside)
    up = read(start + f, inside)
    tl.store(out + row * f + at, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu_grad(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of [gate, up]; [..., 2 f] and [..., f] → [..., 2 f]."""
    f = grad.shape[-1]
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    grid = (grad.numel() // f, triton.cdiv(f, 1024))
    swiglu_grad_kernel[grid](gate_up.contiguous(), grad.contiguous(), out, f, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def swiglu_grad_kernel(gate_up, grad, out, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < f
    start = gate_up + row * 2 * f + at
    gate = read(start, inside)
    up = read(start + f, inside)
    g = read(grad + row * f + at, inside)
    sigmoid = tl.sigmoid(gate)
    to = out + row * 2 * f + at
    tl.store(to, g * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(to + f, g * gate * sigmoid, mask=inside)


# ---------------------------------------------------------------- rotary embedding


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """`Rotation` of support/model/layers.py, with `sign` -1.0 its inverse; x [T, 1, heads, d] → [T, 1, heads, d]."""
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
