"""Compare attention and experts as used in training with plain matmuls; one rank, no model. See checks.py."""

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from support.model.attention import Segments, attend_padded, attend_varlen, use_flash_attention_3
from support.model.experts import GroupedLinear
from support.model.layers import device
from tools.gpu_checks import worker

# (query heads, key heads, head size, query lengths, key lengths if different, window)
LENGTHS = (700, 1, 33, 128, 911, 2, 64)
CASES = {
    "multi-head": (8, 8, 64, LENGTHS, None, None),
    "grouped": (14, 2, 64, LENGTHS, None, None),
    "wide heads": (28, 4, 128, LENGTHS, None, None),
    "narrow heads": (8, 2, 32, LENGTHS, None, None),
    "window": (14, 2, 64, LENGTHS, None, 64),
    "window beyond": (8, 2, 128, LENGTHS, None, 4096),
    "chunks": (14, 2, 64, (350, 1, 16, 64, 455, 1, 32), LENGTHS, None),
    "chunks, window": (14, 2, 64, (350, 1, 16, 64, 455, 1, 32), LENGTHS, 100),
}
TOKENS = {  # shares of the tokens for each of 8 experts
    "uneven": (3, 0, 5, 1, 0, 2, 4, 1),
    "all to one": (0, 0, 16, 0, 0, 0, 0, 0),
    "first and last without": (0, 4, 4, 2, 2, 2, 2, 0),
    "none": (0,) * 8,
}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference ÷ the norm of the reference."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def run_with_gradients(function: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and the gradients of all inputs, for a fixed random gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def measure_ms(action: Callable, repeats: int = 10) -> float:
    """Return the mean milliseconds of an action after one warm-up call."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    action()
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return 1000 * (time.perf_counter() - began) / repeats


def cumulative_lengths(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the cumulative lengths of segments, [S + 1] int32."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device())


def check_attention(record: worker.Record) -> None:
    """Compare FlashAttention in bf16, as used in training, with padded attention in fp32 on the same values."""
    use_flash_attention_3(torch.bfloat16)
    torch.manual_seed(0)
    worst = {"result": (0.0, ""), "gradient": (0.0, "")}
    for name, (heads, kv_heads, width, lengths_q, lengths_k, window) in CASES.items():
        lengths_k = lengths_k or lengths_q
        ends = (cumulative_lengths(lengths_q), cumulative_lengths(lengths_k))
        longest = (max(lengths_q), max(lengths_k))
        where = Segments(*ends, *longest, sum(lengths_q), sum(lengths_k), window)
        key_shape = (sum(lengths_k), kv_heads, width)
        shapes = [(sum(lengths_q), heads, width), key_shape, key_shape]
        inputs = [torch.randn(shape, device=device()).bfloat16() for shape in shapes]
        flash = partial(run_with_gradients, lambda q, k, v, where=where: attend_varlen(q, k, v, where))
        plain = partial(run_with_gradients, lambda q, k, v, where=where: attend_padded(q, k, v, where))
        wanted = plain([x.float() for x in inputs])
        errors = [relative_error(*pair) for pair in zip(flash(inputs), wanted, strict=True)]
        worst["result"] = max(worst["result"], (errors[0], name))
        worst["gradient"] = max(worst["gradient"], (max(errors[1:]), name))
        if name == "wide heads":
            taken = [measure_ms(partial(flash, inputs)), measure_ms(partial(plain, inputs))]
    times = f"{len(LENGTHS)} sequences of {sum(LENGTHS)} tokens take {taken[0]:.2f} ms, padded {taken[1]:.2f}"
    record("attention without padding: result", worst["result"][0], f"worst: {worst['result'][1]}")
    record("attention without padding: gradient", worst["gradient"][0], f"worst: {worst['gradient'][1]}; {times}")


def one_by_one(x_D: torch.Tensor, tokens_E: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    """Compute one matmul per expert, as Megatron's sequential experts do."""
    return torch.cat([x @ weight.t() for x, weight in zip(x_D.split(tokens_E), weights, strict=True)])


def check_experts(record: worker.Record) -> None:
    """Compare the grouped matmul with one per expert: output, gradients of tokens, gradients of weights."""
    large = torch.cuda.is_available()
    unit, inner, outer = (256, 2048, 1536) if large else (4, 32, 24)
    idle = (0.0, "")
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        torch.manual_seed(0)
        worst = (0.0, "")
        taken = []
        for name, shares in TOKENS.items():
            tokens_E = [unit * share for share in shares]
            x_D = torch.randn(sum(tokens_E), inner, device=device()).to(dtype)
            weights = list(torch.randn(len(shares), outer, inner, device=device()).to(dtype))
            ends_E = cumulative_lengths(tuple(tokens_E))[1:]
            inputs = [x_D, *weights]
            grouped = partial(run_with_gradients, lambda x_D, *w, ends_E=ends_E: GroupedLinear.apply(x_D, ends_E, *w))
            plain = partial(run_with_gradients, lambda x_D, *w, tokens_E=tokens_E: one_by_one(x_D, tokens_E, w))
            found = grouped(inputs)
            wanted = plain(inputs)
            without = [grad for grad, tokens in zip(found[2:], tokens_E, strict=True) if not tokens]
            largest = max((grad.abs().max().item() for grad in without), default=0.0)
            idle = max(idle, (largest, f"{name}, {label}"))
            if sum(tokens_E):
                pairs = [pair for pair in zip(found, wanted, strict=True) if pair[1].any()]
                worst = max(worst, (max(relative_error(*pair) for pair in pairs), name))
            if name == "uneven":
                taken = [measure_ms(partial(grouped, inputs)), measure_ms(partial(plain, inputs))]
        times = f"{taken[0]:.2f} ms, one by one {taken[1]:.2f}"
        record(f"grouped experts, {label}", worst[0], f"worst: {worst[1]}; {times}")
    record("experts without a token: gradient", idle[0], f"worst: {idle[1]}" if idle[0] else "")


if __name__ == "__main__":
    sys.exit(worker.main({"attention": check_attention, "experts": check_experts}))
