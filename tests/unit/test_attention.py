"""Attention over packed rows (grpo/parts/model/attention.py): the padded path, the unpadded one.

torch's kernel without padding needs a GPU. Here a function with its signature stands in for it, of torch 2.11 or
2.13. It refuses what torch's kernel refuses, and computes by the formula.
"""

import inspect

import make_tiny
import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import varlen as flash

from grpo.parts.model.attention import Copies, Segments, attend_padded, attend_varlen, make_buckets, sliding_window
from tests.gpu_rehearsal.flash import attended
from tests.oracle.reference import relative


def by_formula(query, key, value, cu_q, cu_k, left=None):
    """Softmax over the keys that each query sees; the last query of a segment is at its last key."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    seen = attended(cu_q, cu_k, left, right=0, causal=True)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


REAL = inspect.signature(flash.varlen_attn).parameters
OPTIONS = {  # of varlen_attn, by version of torch
    "2.11": ("return_aux", "scale", "window_size"),
    "2.13": ("return_aux", "scale", "window_size", "enable_gqa", "num_splits"),
}


def stand_in(version, dtype):
    """varlen_attn of that torch, except for the device and the type."""
    assert REAL.keys() >= {*OPTIONS["2.13"]}

    def kernel(query, key, value, cu_q, cu_k, max_q, max_k, **options):
        for x, cu, longest in ((query, cu_q, max_q), (key, cu_k, max_k), (value, cu_k, max_k)):
            assert x.dtype == dtype and x.dim() == 3 and x.stride(-1) == 1  # torch refuses all else here
            assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
            assert cu.dtype == torch.int32 and cu.is_contiguous() and len(cu) > 1
            assert type(longest) is int and longest == cu.diff().max() and len(x) == cu[-1]  # else wrong in silence
        assert options.keys() <= {*OPTIONS[version]}
        left, right = options["window_size"]
        assert right == 0
        if version == "2.13":
            assert options["enable_gqa"] and options["num_splits"] == 1
        return by_formula(query, key, value, cu_q, cu_k, left)

    tensors = [*REAL.values()][:7]
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in OPTIONS[version]]
    kernel.__signature__ = inspect.Signature([*tensors, *options])
    return kernel


def tensors(tokens_q, tokens_k, dtype=torch.float32):
    """query of 4 heads, key and value of 2; value as a view, as Megatron makes it."""
    torch.manual_seed(0)
    query, key = torch.randn(tokens_q, 4, 8), torch.randn(tokens_k, 2, 8)
    return [x.to(dtype).requires_grad_() for x in (query, key, torch.randn(tokens_k, 2, 3, 8)[:, :, 1])]


def segments(lengths_q, lengths_k=None, window=None):
    return Segments.of(np.array(lengths_k or lengths_q), np.array(lengths_q), window, torch.device("cpu"))


def outcome(function, inputs):
    """The result and the gradients of the inputs."""
    out = function(*inputs)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype))]


def worst(found, wanted):
    return max(relative(f, w.double()) for f, w in zip(found, wanted, strict=True))


CASES = [
    segments([5, 1, 9]), segments([6, 6]), segments([5, 1, 9], window=3), segments([9, 2], window=2),
    segments([7, 3], window=7), segments([2, 1, 4], [5, 1, 9]), segments([2, 1, 4], [5, 8, 9], window=4),
    segments([10, 1], [10, 12], window=4), segments([40, 3, 90, 4, 60], [40, 43, 90, 94, 60]),
    segments([30, 3, 60, 29], [50, 43, 60, 29], window=20),
]  # fmt: skip


@pytest.mark.parametrize("version", OPTIONS)
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("where", CASES)
def test_the_unpadded_path_gives_the_gradients_of_the_padded(monkeypatch, version, where, dtype, close):
    """In fp32, which the kernel itself refuses, to see more than rounding; in bf16, as it asks."""
    monkeypatch.setattr(flash, "varlen_attn", stand_in(version, dtype))
    inputs = tensors(int(where.cu_q[-1]), int(where.cu_k[-1]), dtype)
    unpadded, padded = (outcome(lambda *x, f=f: f(*x, where), inputs) for f in (attend_varlen, attend_padded))
    assert worst(unpadded, padded) < close


def test_segments_of_similar_length_are_padded_together():
    assert make_buckets(np.array([50, 100, 3, 91, 79])) == [(2, 100), (1, 79), (1, 50), (1, 3)]
    assert make_buckets(np.array([9, 1, 16])) == [(3, 16)]  # a call costs more than so few positions


def test_the_gradients_of_copies_are_added_up_in_fp32():
    """257 copies of 1 in bf16: added up in bf16, the sum would stop at 256."""
    ones = torch.ones(1, 8, dtype=torch.bfloat16, requires_grad=True)
    taken = Copies.of(np.zeros(257, dtype=np.int64), 1, ones.device).take(ones)
    (found,) = torch.autograd.grad(taken.float().sum(), ones)
    assert found.tolist() == [[torch.tensor(257.0).bfloat16().item()] * 8]


@pytest.mark.parametrize(
    "arch, settings, window",
    [
        ("mistral", {"sliding_window": 8}, 8),
        ("qwen2", {"sliding_window": 8}, None),  # without use_sliding_window
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, None),  # all layers below max_window_layers
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, "for all layers alike"),
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True}, "for all layers alike"),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, 8),
        ("llama", {"sliding_window": 8}, "for all layers alike"),  # which transformers does not read, and vLLM does
    ],
)
def test_the_window_of_a_model(arch, settings, window):
    hf = transformers.AutoConfig.for_model(arch, num_hidden_layers=2, **make_tiny.ARCHITECTURES[arch] | settings)
    if isinstance(window, str):
        with pytest.raises(ValueError, match=window):
            sliding_window(hf)
    else:
        assert sliding_window(hf) == window
