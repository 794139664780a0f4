"""Formulas of transient memory: activations and log-probs of the trainer, vLLM's forward pass and cache.

tests/test_memory_plan.py compares those of the trainer with passes on a CPU; those of vLLM are not compared.
"""

import math
import os
from dataclasses import dataclass

import megatron_bridge as bridge
from config import Config
from support.check import checks

LOGIT_TRAIN, LOGIT_SCORE = 24, 16  # bytes for each logit of a chunk, with a backward pass and without
BLOCK = 16  # tokens of a block of vLLM's KV cache
LARGE_GPU = 70 * 2**30  # bytes of a GPU from which vLLM 0.32 takes larger batches

# ---------------------------------------------------------------- transient memory of the trainer


def layer_elements(hf, cfg: Config) -> dict[str, float]:
    """Elements that a layer keeps for its backward pass for each token of a rank's rows, by block.

    With h, q, k and f the widths on one rank of hidden states, queries, keys and feed-forward:

      norms       4 h               input and output of two
      attention   3 q + 3 k         output of the projection, queries and keys after RoPE, output of attention
                  + q               where queries have a norm
                  + 2 q + 2 k       padded copies, in fp32; in bf16 FlashAttention takes packed rows on a GPU
                  + 2 q + 2 cp k    the all-to-all of context parallelism
      mlp         3 f               gate and up, their product
      moe         R (h + 4 f)       of R rows a token, spread evenly: input, gate and up, product, weighted product
    """
    p = cfg.parallel
    width = bridge.head_dim(hf) / p.tp
    q = hf.num_attention_heads * width
    k = hf.num_key_value_heads * width
    norms = 4 * hf.hidden_size
    if p.sp:
        norms /= p.tp
    attention = 3 * q + 3 * k
    if "self_attention.q_layernorm.weight" in bridge.FAMILIES[hf.architectures[0]]:
        attention += q
    if cfg.model.dtype == "fp32" or not cfg.model.flash_attention:
        attention += 2 * q + 2 * k
    if p.cp > 1:
        attention += 2 * q + 2 * p.cp * k
    elements = {"norms": norms, "attention": attention}
    if not bridge.is_moe(hf):
        return elements | {"mlp": 3 * hf.intermediate_size / p.tp}
    rows = hf.num_experts_per_tok * p.etp / p.tp
    shared = getattr(hf, "shared_expert_intermediate_size", None) or 0
    elements["moe"] = rows * (hf.hidden_size + 4 * bridge.expert_width(hf) / p.etp)
    return elements | {"shared_experts": 3 * shared / p.tp}


def kept_elements(elements: dict[str, float], layers: int, extra: dict) -> tuple[float, float]:
    """(elements a token that the layers of a stage keep, elements that are recomputed at a time).

    `elements`: `layer_elements`; `extra`: the megatron section, which may ask for recomputation.
    """
    layer = sum(elements.values())
    layer_input = elements["norms"] / 4
    recompute = extra.get("recompute_granularity")
    if recompute == "full":
        group = min(extra.get("recompute_num_layers") or 1, layers)
        if extra.get("recompute_method") == "block":
            return group * layer_input + (layers - group) * layer, layer
        return math.ceil(layers / group) * layer_input, group * layer
    if recompute == "selective":
        blocks = extra.get("recompute_modules") or []
        if not blocks and extra.get("moe_layer_recompute"):
            blocks = ["moe"]
        freed = sum(elements.get(block, 0.0) for block in blocks)  # core_attn frees nothing: its inputs are as large
        return layers * layer - layers * freed, freed
    return layers * layer, 0.0


def activation_bytes(hf, cfg: Config, stage: int, micro_batches: int) -> tuple[int, int]:
    """(activations that the layers of a pipeline stage keep for the backward pass, peak within a layer besides).

    Each micro-batch in flight keeps `layer_elements` of a layer or, recomputed in full, its input. Stage i of p has
    p - i in flight; with v chunks a stage 2 (p - i - 1) + (v - 1) p + 1 times 1 / v of one (arXiv 2104.04473), and not
    more than there are. In the backward pass: what is recomputed at a time, and the gradients within a block.
    """
    p = cfg.parallel
    layers = hf.num_hidden_layers // (p.pp * p.vpp)
    in_flight = p.pp - stage
    if p.vpp > 1:
        in_flight = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    in_flight = min(in_flight, micro_batches * p.vpp)
    elements = layer_elements(hf, cfg)
    kept, within = kept_elements(elements, layers, cfg.megatron)
    within += max(elements.get("mlp", 0.0), elements.get("moe", 0.0))
    tokens = cfg.train.max_tokens_per_micro_batch // p.cp
    row = tokens * bridge.DTYPES[cfg.model.dtype].itemsize
    return int(in_flight * kept * row), int(within * row)


def layer_bytes(hf, cfg: Config) -> int:
    """Peak of one layer in a pass for log-probs, which keeps nothing."""
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    tokens = cfg.train.logprob_max_tokens_per_micro_batch
    return int(sum(layer_elements(hf, cfg).values()) * size * tokens // cfg.parallel.cp)


def head_bytes(hf, cfg: Config, tokens: int, logit: int) -> int:
    """Peak of the log-probs of a row of `tokens`, with `logit` bytes for each logit of one chunk.

    Hidden states gathered and selected, the logits of a chunk; with model.fp32_head also the head's weight in fp32 and,
    in training, its gradient.
    """
    tokens = tokens // cfg.parallel.cp
    vocabulary = hf.vocab_size // cfg.parallel.tp
    hidden = 4 * hf.hidden_size * bridge.DTYPES[cfg.model.dtype].itemsize
    logits = min(tokens, bridge.LOGITS_CHUNK) * vocabulary * logit
    head = 0
    if cfg.model.fp32_head:
        head = vocabulary * hf.hidden_size * (8 if logit == LOGIT_TRAIN else 4)
    return tokens * hidden + logits + head


# ---------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class Sampling:
    """vLLM's part of a GPU, in bytes, and the tokens that its cache holds."""

    weights: int
    tables: int  # of its sampler, which sleep and wake with the weights
    work: int  # of a forward pass
    cache: int
    loading: int  # while a push loads weights
    tokens: int  # in the cache of an engine
    sequences: int  # of the longest there can be, at once


def plan_sampling(hf, cfg: Config, weights: int, gpu: int) -> Sampling:
    """What vLLM does with its share of a GPU of `gpu` bytes, for a model of `weights` weights.

    work: the largest batch in one layer, and logits of all its sequences three times in fp32. loading: a whole layer
    as it was pushed, and its shard of it once more.
    """
    r = cfg.rollout
    size = bridge.DTYPES[cfg.model.dtype].itemsize
    shard = weights * size / r.tp
    tables = sampler_bytes(hf, cfg, gpu)
    work = forward_bytes(hf, cfg, gpu)
    embedding = hf.vocab_size * hf.hidden_size
    ends = embedding if hf.tie_word_embeddings else 2 * embedding
    layer = max((weights - ends) / hf.num_hidden_layers, embedding) * size
    cache = int(r.gpu_memory_utilization * gpu - shard - tables - work)
    kv_size = 1 if "fp8" in str(r.vllm.get("kv_cache_dtype")) else size
    kv_heads = max(hf.num_key_value_heads // r.tp, 1)
    token = 2 * hf.num_hidden_layers * kv_heads * bridge.head_dim(hf) * kv_size
    blocks = max(cache, 0) // (BLOCK * token)
    longest = math.ceil(checks.longest_sample(cfg) / BLOCK)
    loading = int(layer * (1 + 1 / r.tp))
    return Sampling(int(shard), tables, int(work), cache, loading, tokens=blocks * BLOCK, sequences=blocks // longest)


def most_sequences(cfg: Config, gpu: int) -> int:
    """Sequences that vLLM computes at once, at most."""
    return cfg.rollout.vllm.get("max_num_seqs") or (1024 if gpu >= LARGE_GPU else 256)


def sampler_bytes(hf, cfg: Config, gpu: int) -> int:
    """Tables of penalties in vLLM's second model runner: a count of each token and a bit, for each sequence."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return 0
    return 4 * most_sequences(cfg, gpu) * (hf.vocab_size + math.ceil(hf.vocab_size / 32))


def forward_bytes(hf, cfg: Config, gpu: int) -> float:
    """Transient memory of a forward pass of vLLM on a GPU of `gpu` bytes."""
    r = cfg.rollout
    batch = r.vllm.get("max_num_batched_tokens") or (16384 if gpu >= LARGE_GPU else 8192)
    heads = hf.num_attention_heads / r.tp + 2 * max(hf.num_key_value_heads / r.tp, 1)
    if bridge.is_moe(hf):
        feed_forward = hf.num_experts_per_tok * (hf.hidden_size + 3 * bridge.expert_width(hf) / r.tp)
    else:
        feed_forward = 3 * hf.intermediate_size / r.tp
    token = 3 * hf.hidden_size + heads * bridge.head_dim(hf) + feed_forward
    logits = 3 * 4 * most_sequences(cfg, gpu) * hf.vocab_size
    return batch * token * bridge.DTYPES[cfg.model.dtype].itemsize + logits
