"""Attention and experts as training computes them, against plain products; one rank, no model. See checks.py."""

import itertools
import sys
import time
from collections.abc import Callable

import torch

from support.attention import Segments, attend_padded, attend_varlen, use_flash_attention_3
from support.experts import GroupedLinear
from support.layers import device
from tools.gpu_checks import worker

# (query heads, key heads, width of a head, lengths of queries, of keys where they differ, window)
LENGTHS = (700, 1, 33, 128, 911, 2, 64)
CASES = {
    "as many keys": (8, 8, 64, LENGTHS, None, None),
    "grouped": (14, 2, 64, LENGTHS, None, None),
    "wide heads": (28, 4, 128, LENGTHS, None, None),
    "narrow heads": (8, 2, 32, LENGTHS, None, None),
    "window": (14, 2, 64, LENGTHS, None, 64),
    "window beyond": (8, 2, 128, LENGTHS, None, 4096),
    "chunks": (14, 2, 64, (350, 1, 16, 64, 455, 1, 32), LENGTHS, None),
    "chunks, window": (14, 2, 64, (350, 1, 16, 64, 455, 1, 32), LENGTHS, 100),
}
TOKENS = {  # of each of 8 experts; as shares of all
    "uneven": (3, 0, 5, 1, 0, 2, 4, 1),
    "all to one": (0, 0, 16, 0, 0, 0, 0, 0),
    "first and last without": (0, 4, 4, 2, 2, 2, 2, 0),
    "none": (0,) * 8,
}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Length of the difference over that of what is wanted."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def outcome(function: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of all inputs, for one made-up gradient of the result."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def milliseconds(action: Callable, repeats: int = 10) -> float:
    """Of one of several, after a first one."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    action()
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return 1000 * (time.perf_counter() - began) / repeats


def ends(lengths: tuple[int, ...]) -> torch.Tensor:
    """[S + 1] int32, where segments begin and end."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device())


def attention(tell: worker.Tell) -> None:
    """FlashAttention in bf16, as it trains, against padded attention in fp32 on the same values."""
    use_flash_attention_3(torch.bfloat16)
    torch.manual_seed(0)
    worst = {"result": (0.0, ""), "gradient": (0.0, "")}
    for name, (heads, kv_heads, width, lengths_q, lengths_k, window) in CASES.items():
        cu_q = cu_k = ends(lengths_q)
        if lengths_k:
            cu_k = ends(lengths_k)
        where = Segments(cu_q, cu_k, max(lengths_q), max(lengths_k or lengths_q), window)
        shapes = [(sum(lengths_q), heads, width), *[(sum(lengths_k or lengths_q), kv_heads, width)] * 2]
        inputs = [torch.randn(shape, device=device()).bfloat16() for shape in shapes]
        found = outcome(lambda *x, where=where: attend_varlen(*x, where), inputs)
        wanted = outcome(lambda *x, where=where: attend_padded(*x, where), [x.float() for x in inputs])
        errors = [relative(*pair) for pair in zip(found, wanted, strict=True)]
        worst["result"] = max(worst["result"], (errors[0], name))
        worst["gradient"] = max(worst["gradient"], (max(errors[1:]), name))
        if name == "wide heads":
            taken = [
                milliseconds(lambda f=f, x=inputs, w=where: outcome(lambda *x: f(*x, w), x))
                for f in (attend_varlen, attend_padded)
            ]
    times = f"{len(LENGTHS)} sequences of {sum(LENGTHS)} tokens take {taken[0]:.2f} ms, padded {taken[1]:.2f}"
    for what, (error, name) in worst.items():
        tell(f"attention without padding: {what}", error, f"worst: {name}" + f"; {times}" * (what == "gradient"))


def one_by_one(x_D: torch.Tensor, tokens_E: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    """One product an expert, as Megatron's sequential experts make them."""
    return torch.cat([x @ weight.t() for x, weight in zip(x_D.split(tokens_E), weights, strict=True)])


def experts(tell: worker.Tell) -> None:
    """Grouped products against one an expert: result, gradients of tokens and of weights, which lie in one storage."""
    large = torch.cuda.is_available()
    unit, inner, outer = (256, 2048, 1536) if large else (4, 32, 24)
    idle = (0.0, "")
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        torch.manual_seed(0)
        worst, taken = (0.0, ""), []
        for name, shares in TOKENS.items():
            tokens_E = [unit * share for share in shares]
            x_D = torch.randn(sum(tokens_E), inner, device=device()).to(dtype)
            weights = list(torch.randn(len(shares), outer, inner, device=device()).to(dtype))
            ends_E = ends(tuple(tokens_E))[1:]
            ways = (
                lambda x_D, *w, ends_E=ends_E: GroupedLinear.apply(x_D, ends_E, *w),
                lambda x_D, *w, tokens_E=tokens_E: one_by_one(x_D, tokens_E, w),
            )
            found, wanted = (outcome(way, [x_D, *weights]) for way in ways)
            without = [grad for grad, tokens in zip(found[2:], tokens_E, strict=True) if not tokens]
            idle = max(idle, (max((g.abs().max().item() for g in without), default=0.0), f"{name}, {label}"))
            if sum(tokens_E):
                pairs = [pair for pair in zip(found, wanted, strict=True) if pair[1].any()]
                worst = max(worst, (max(relative(*pair) for pair in pairs), name))
            if name == "uneven":
                taken = [milliseconds(lambda way=way, x=(x_D, *weights): outcome(way, list(x))) for way in ways]
        times = f"{taken[0]:.2f} ms, one by one {taken[1]:.2f}"
        tell(f"grouped experts, {label}", worst[0], f"worst: {worst[1]}; {times}")
    tell("experts without a token: gradient", idle[0], f"worst: {idle[1]}" if idle[0] else "")


if __name__ == "__main__":
    sys.exit(worker.main({"attention": attention, "experts": experts}))
