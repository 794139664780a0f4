"""For each operation of a layer: do a row's bits depend on what else is in the batch, and are the trainer's vLLM's?

    OMP_NUM_THREADS=1 python benchmarks/equal_bits.py                       # a CPU, in bf16
    VLLM_BATCH_INVARIANT=1 python benchmarks/equal_bits.py --dtype bf16     # a GPU: what model.match_engine could call

The shapes are of a layer of Qwen2.5-1.5B. On a CPU these are the operations of grpo/parts/model/matched.py. On a
GPU they are vLLM's in eager mode beside the trainer's of today, and FlashAttention 2 over pages, with a gradient by
torch. An operation that raises is a line too.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from grpo.parts.base.by_row import product
from grpo.parts.base.ranks import device
from grpo.parts.model import kernels, layers, matched
from grpo.parts.model.attention import Segments, attend_varlen

HIDDEN, WIDTH, HEADS, KV_HEADS, D, VOCABULARY = 1536, 8960, 12, 2, 128, 16384
TOKENS = (1, 3, 17, 128, 1000)  # of a batch; its first rows are compared
EPS, PAGE = 1e-6, 16


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    return values.to(device(), dtype)


def compare(name: str, theirs: Callable, ours: Callable, *rows: torch.Tensor):
    """Print the shares of values that depend on the number of rows (TOKENS) on either side, or differ between them."""
    found = {}
    try:
        for side, run in (("vLLM", theirs), ("ours", ours)):
            found[side] = [run(*(x[:n] for x in rows)) for n in TOKENS]
    except Exception as error:  # of a kernel that this machine or this version lacks
        print(f"{name:34} {type(error).__name__}: {' '.join(str(error).split())[:100]}", flush=True)
        return

    shares = []
    for outs in found.values():
        shares.append(max(differing(outs[-1][: len(out)], out) for out in outs))
    between = differing(found["vLLM"][-1], found["ours"][-1])
    print(f"{name:34} {shares[0]:12.2%} {shares[1]:12.2%} {between:14.2%}", flush=True)


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of values with other bits."""
    return (a != b).float().mean().item()


# ---------------------------------------------------------------- what both sides call


LINEAR = (  # inputs, outputs, whether there is a bias
    ("query, key, value", HIDDEN, 2048, True),
    ("gate, up", HIDDEN, 2 * WIDTH, False),
    ("down", WIDTH, HIDDEN, False),
    ("head", HIDDEN, VOCABULARY, False),
)


def linear_layers(dtype, on_gpu):
    for what, width, rows, biased in LINEAR:
        x, weight = normal(max(TOKENS), width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
        bias = normal(rows, dtype=dtype, seed=2) if biased else None
        ours = partial(product, weight=weight, bias=bias)
        if on_gpu:
            ours = lambda x, w=weight, b=bias: x @ w.t() if b is None else x @ w.t() + b  # noqa: E731
        compare(f"linear: {what}", vllm_linear(weight, bias, on_gpu), ours, x)


def vllm_linear(weight: torch.Tensor, bias: torch.Tensor | None, on_gpu: bool) -> Callable:
    if on_gpu:
        return lambda x: F.linear(x, weight, bias)
    from vllm import _custom_ops as ops

    try:
        handler = ops.create_onednn_mm(weight.t(), 32)
    except RuntimeError:  # no kernel for the type: vLLM takes torch's
        return lambda x: F.linear(x, weight, bias)
    return lambda x: ops.onednn_mm(handler, x, bias)


def norms(dtype, on_gpu):
    from vllm import _custom_ops as ops
    from vllm.ir.ops.layernorm import fused_add_rms_norm

    x, residual = (normal(max(TOKENS), HIDDEN, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(HIDDEN, dtype=dtype, seed=2)

    def theirs(x, residual):
        if not on_gpu:
            return fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)[0]
        normed, total = x.clone(), residual.clone()
        ops.fused_add_rms_norm(normed, total, weight, EPS)
        return normed

    def ours(x, residual):
        return matched.Normalization.apply(matched.ResidualSum.apply(x, residual), weight, EPS)

    compare("RMS norm with residual", theirs, ours, x, residual)
    if on_gpu:
        today = lambda x, residual: F.rms_norm(x + residual, weight.shape, weight, EPS)  # noqa: E731
        compare("RMS norm with residual, as today", theirs, today, x, residual)


def activations(dtype, on_gpu):
    def theirs(x):
        if not on_gpu:
            return F.silu(x[..., :WIDTH]) * x[..., WIDTH:]
        out = x.new_empty(len(x), WIDTH)
        torch.ops._C.silu_and_mul(out, x)
        return out

    compare("SwiGLU", theirs, layers.SwiGLU.apply, normal(max(TOKENS), 2 * WIDTH, dtype=dtype))


def rotations(dtype, on_gpu):
    from vllm import _custom_ops as ops

    tokens = max(TOKENS)
    angles = torch.outer(torch.arange(tokens).float(), 10000.0 ** -(torch.arange(0, D, 2).float() / D))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(device(), dtype)
    half_cos, half_sin = table[:, None, None].chunk(2, -1)
    cos, sin = torch.cat((half_cos, half_cos), -1), torch.cat((-half_sin, half_sin), -1)

    def theirs(x):
        out = x.clone()
        ops.rotary_embedding(torch.arange(len(x), device=x.device), out.view(len(x), -1), None, D, table, True)
        return out

    def ours(x):
        rotate = partial(kernels.rotate, sign=1.0) if on_gpu else matched.Rotation.apply
        return rotate(x, cos[: len(x)], sin[: len(x)])

    compare("rotary embedding", theirs, ours, normal(tokens, 1, HEADS, D, dtype=dtype))


def log_softmax(dtype, on_gpu):
    logits = normal(max(TOKENS), VOCABULARY, dtype=dtype) * 100
    theirs = partial(torch.log_softmax, dim=-1, dtype=torch.float32)
    compare("log_softmax", theirs, lambda x: (x.float() / 1.0).log_softmax(-1), logits)


# ---------------------------------------------------------------- attention


def attention(dtype, on_gpu):
    """A sequence as vLLM prefills it, and its last token as vLLM decodes it, for several lengths."""
    for tokens in (100, 1000, 3000):
        query = normal(tokens, HEADS, D, dtype=dtype)
        key, value = (normal(tokens, KV_HEADS, D, dtype=dtype, seed=seed) for seed in (1, 2))
        attend = paged_flash if on_gpu else on_cpu
        try:
            whole = attend(query, key, value)
            last = attend(query[-1:], key, value)
            print(f"attention, {tokens} tokens: prefill and decode {differing(whole[-1:], last):.2%}", flush=True)

            # The trainer's of today, which is not yet vLLM's.
            if on_gpu:
                today = attend_varlen(query, key, value, segments_of(tokens, tokens))
                print(f"    today's varlen_attn and vLLM's over pages {differing(today, whole):.2%}", flush=True)
                gradient(query, key, value)
        except Exception as error:
            text = " ".join(str(error).split())[:120]
            print(f"attention, {tokens} tokens: {type(error).__name__}: {text}", flush=True)


def segments_of(keys: int, queries: int) -> Segments:
    lengths = torch.tensor([keys]).numpy()
    return Segments.of(lengths, lengths * 0 + queries, None, device())


def on_cpu(query, key, value) -> torch.Tensor:
    return matched.Attention.apply(query, key, value, segments_of(len(key), len(query)))


def paged_flash(query, key, value, with_lse: bool = False):
    """FlashAttention 2 of vLLM over pages, one split: its output, and the log of the sums [heads, queries]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pages = -(-len(key) // PAGE)
    caches = [F.pad(x, (0, 0, 0, 0, 0, pages * PAGE - len(x))).unflatten(0, (pages, PAGE)) for x in (key, value)]
    ends = torch.tensor([0, len(query)], dtype=torch.int32, device=query.device)
    out, lse = flash_attn_varlen_func(
        query, *caches, max_seqlen_q=len(query), cu_seqlens_q=ends, max_seqlen_k=len(key),
        seqused_k=torch.tensor([len(key)], dtype=torch.int32, device=query.device), causal=True,
        block_table=torch.arange(pages, dtype=torch.int32, device=query.device)[None], softmax_scale=D**-0.5,
        return_softmax_lse=True, num_splits=1, fa_version=2,
    )[:2]  # fmt: skip
    return (out, lse) if with_lse else out


def gradient(query, key, value):
    """The gradient from output and log of the sums by torch's FlashAttention, against one in fp32."""
    out, lse = paged_flash(query, key, value, with_lse=True)
    grad = normal(*out.shape, dtype=out.dtype, seed=3)
    ends = torch.tensor([0, len(query)], dtype=torch.int32, device=query.device)
    wide = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value)]
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, query, *wide, out, lse, ends, ends, len(query), len(key), 0.0, True, state, state[:0], scale=D**-0.5
    )
    inputs = [x.float().requires_grad_() for x in (query, *wide)]
    exact = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in inputs), is_causal=True)
    wanted = torch.autograd.grad(exact[0].transpose(0, 1), inputs, grad.float())
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(grads, wanted, strict=True)]
    print(f"    its gradient by torch, against fp32: {', '.join(f'{error:.1e}' for error in errors)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[parser.parse_args().dtype]
    on_gpu = torch.cuda.is_available()
    invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0")
    if on_gpu and invariant == "1":
        from vllm.model_executor.determinism.batch_invariant import enable_batch_invariant_mode

        enable_batch_invariant_mode()
    machine = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} thread of a CPU"
    print(f"{machine}, {dtype}, VLLM_BATCH_INVARIANT={invariant}; values with other bits\n")
    print(f"{'operation':34} {'vLLM, alone':>12} {'ours, alone':>12} {'vLLM and ours':>14}")
    with torch.no_grad():
        for table in (linear_layers, norms, rotations, activations, log_softmax, attention):
            table(dtype, on_gpu)


if __name__ == "__main__":
    main()
