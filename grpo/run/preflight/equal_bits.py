"""Whether trainer and vLLM can compute a policy to the same bits here (model.match_engine, docs/equal-bits.md)."""

import numpy as np
import torch

import megatron_bridge as bridge
from config import Config, UserError
from grpo.parts.base import versions
from grpo.parts.base.by_row import ROWS, product
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.ranks import tell
from grpo.parts.base.read_config import override
from grpo.parts.base.require import brief
from grpo.parts.model import matched
from grpo.parts.model.attention import Segments, attend_padded

# Options that let vLLM compute, or Megatron-core train, another function than the model's.
VLLM_OPTIONS = ("quantization", "kv_cache_dtype", "enable_expert_parallel", "dtype", "logprobs_mode")
MEGATRON_OPTIONS = ("hidden_dropout", "attention_dropout", "bias_activation_fusion")
BOUNDS = ("max_logp_gap", "max_mismatch_kl")


def resolve(cfg) -> Config:
    """The configuration with model.match_engine true or false.

    null becomes true on a CPU if that costs little: for models without experts, with one thread a rank. With equal bits
    vLLM's log-probs are the old ones, so no pass computes them again (algo.old_logp).

    Raises UserError if model.match_engine is true and bits cannot be equal.
    """
    wanted = cfg.model.match_engine
    if wanted is False:
        return cfg

    hf = read_config(cfg.model.path)
    reason = why_not(cfg, hf)
    if wanted and reason:
        raise UserError(f"model.match_engine=true: {reason}, or leave it out")
    if wanted is None:
        reason = reason or why_costly(hf)
    if reason:
        if not torch.cuda.device_count():
            tell(f"note: log-probs are equal to vLLM's within rounding, not by the bit: {reason}")
        return override(cfg, {"model.match_engine": False})

    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # with more, the order of a sum depends on the batch
        tell("note: model.match_engine=true sets one thread a rank")
    return override(cfg, {"model.match_engine": True, "algo.old_logp": "rollout"})


def why_not(cfg, hf) -> str | None:
    """Why bits cannot be equal, with the key that mends it. None if they can."""
    r, p = cfg.rollout, cfg.parallel

    # The operations of one version of vLLM are matched, one by one.
    found = versions.installed("vllm") or "1"  # the start reports a missing vLLM
    if torch.cuda.device_count():
        return "it is for CPUs so far; use false"
    if versions.numbers(found)[:2] != (0, 32):
        return f"it calls operations of vLLM 0.32, and this is {found}; use false"
    if not matched.supports(hf):
        return f"a {hf.architectures[0]} has layers whose operations in vLLM are not matched; use false"

    # Both sides must compute the same function, with sums in the same order.
    if cfg.data.train and r.tp != p.tp:  # an evaluation has no trainer
        return f"rollout.tp={r.tp} and parallel.tp={p.tp} add up other parts of each product; set them alike"
    if cfg.algo.replay_routes and cfg.train.updates_per_step * cfg.train.epochs_per_step > 1:
        return "algo.replay_routes keeps a step's routes, and vLLM's router chooses anew in later updates; use false"
    if cfg.algo.correction != "none":
        return f"algo.correction={cfg.algo.correction} weighs a difference that is 0 then; use none"

    options = {f"rollout.vllm.{name}": r.vllm.get(name) for name in VLLM_OPTIONS}
    options |= {f"megatron.{name}": cfg.megatron.get(name) for name in MEGATRON_OPTIONS}
    for key, value in options.items():
        if value:
            return f"{key}={value} makes the two compute different functions; leave it out"
    if cfg.megatron.get("moe_token_dispatcher_type") == "allgather":
        return "megatron.moe_token_dispatcher_type=allgather adds up experts in another order; leave it out"

    # A bound is of no use if nothing may differ.
    for key in BOUNDS:
        bound = getattr(r, key)
        if bound is not None:
            return f"rollout.{key}={bound} allows a difference; leave it out"
    return why_not_here(cfg, hf)


def why_costly(hf) -> str | None:
    """Why equal bits would cost more than a tenth of a step, so that they are on by model.match_engine=true alone."""
    if bridge.is_moe(hf):
        return "experts are computed twice for it; model.match_engine=true does so"
    if torch.get_num_threads() > 1:
        return f"a rank has {torch.get_num_threads()} threads, and it needs one; OMP_NUM_THREADS=1 sets that"
    return None


# ---------------------------------------------------------------- this machine


def why_not_here(cfg, hf) -> str | None:
    """What of this CPU, or of vLLM's build, stands against it. None if a few of their operations agree."""
    if not torch.cpu._is_avx512_supported():
        return "it needs AVX-512, which this CPU lacks; use false"
    if cfg.model.dtype == "bf16" and not torch.cpu._is_avx512_bf16_supported():
        return "model.dtype=bf16 needs AVX-512 BF16 for it, which this CPU lacks; use fp32, or false"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        differs = first_that_differs(hf, cfg.rollout.tp, bridge.DTYPES[cfg.model.dtype])
    except (AttributeError, ImportError, RuntimeError) as error:
        return f"an operation of vLLM is not as it was ({brief(error)}); use false"
    finally:
        torch.set_num_threads(threads)

    return differs and f"on this CPU {differs} depends on what else is in a batch; use false"


def first_that_differs(hf, tp, dtype: torch.dtype) -> str | None:
    """The first operation whose bits depend on the number of rows, or differ between trainer and vLLM, or None."""
    from vllm import _custom_ops as ops

    random = torch.Generator().manual_seed(0)

    def normal(*shape: int):
        return torch.randn(*shape, generator=random).to(dtype)

    # Products: a few rows alone, and the same rows among 300.
    heads, kv_heads = hf.num_attention_heads // tp, max(hf.num_key_value_heads // tp, 1)
    d = bridge.head_dim(hf)
    ffn = getattr(hf, "intermediate_size", None) or bridge.expert_width(hf)
    for width in sorted({hf.hidden_size, heads * d, ffn // tp}):
        x, weight = normal(300, width), normal(512, width)
        theirs = weight_times(ops, weight, x)
        for rows in (1, ROWS, 7, 33, 100, 300):
            own = product(x[:rows], weight)
            few = weight_times(ops, weight, x[: max(rows, ROWS)])[:rows]
            if not (own.equal(theirs[:rows]) and few.equal(theirs[:rows])):
                return f"a product over {width} numbers"

    # Attention: a prompt at once, its last part with the rest cached, and its last tokens one by one, as vLLM decodes.
    tokens = 1300
    query, key, value = normal(tokens, heads, d), normal(tokens, kv_heads, d), normal(tokens, kv_heads, d)

    def attend(first: int, last: int):
        segments = Segments.of(np.array([last]), np.array([last - first]), None, query.device)
        return matched.Attention.apply(query[first:last], key[:last], value[:last], segments)

    whole = attend(0, tokens)
    decoded = torch.cat([attend(n, n + 1) for n in range(tokens - 8, tokens)])
    if not (attend(1024, tokens).equal(whole[1024:]) and decoded.equal(whole[-8:])):
        return "attention"

    # Equal bits could be equally wrong: the formula must give the same within rounding.
    lengths = np.array([tokens])
    exact = attend_padded(query, key, value, Segments.of(lengths, lengths, None, query.device))
    return None if torch.allclose(whole.float(), exact.float(), atol=0.05, rtol=0.05) else "attention"


def weight_times(ops, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x weightᵀ as vLLM's linear layers compute it."""
    try:
        handler = ops.create_onednn_mm(weight.t(), 32)
    except RuntimeError:  # no kernel for the type: vLLM takes torch's
        return torch.nn.functional.linear(x, weight)
    return ops.onednn_mm(handler, x, None)
