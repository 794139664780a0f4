"""What each phase of a step will take of a GPU, and of the host, told before anything is built.

What a rank holds is counted to the byte (support/memory_count.py); what comes and goes follows from the formulas at
their functions; what no formula here knows is RESERVE. All sizes are bytes until they are printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers

import megatron_bridge as bridge
from config import Config, UserError
from support import checks, memory
from support.memory_count import FURTHER, Held, count
from support.read_config import changed

GB = 10**9
GPU_GB = 80.0  # where there is no GPU to ask
RESERVE = 0.1  # of a GPU, for CUDA, NCCL and cuBLAS, vLLM's CUDA graphs and fragments: assumed, not measured
LOGIT_TRAIN, LOGIT_SCORE = 24, 16  # bytes for each logit of a chunk, with a backward pass and without
BLOCK = 16  # tokens of a block of vLLM's KV cache
MACHINE = 8  # GPUs of one, for the host's memory


# ---------------------------------------------------------------- what comes and goes


def layer_numbers(hf, cfg: Config) -> dict[str, float]:
    """Numbers that a layer keeps for its backward pass for each token of a rank's rows, by block.

    With h, q, k and f the widths on one rank of hidden states, queries, keys and feed-forward:

      norms       4 h               input and output of two
      attention   3 q + 3 k         what the product gave, queries and keys turned, the output
                  + q               where queries are normed
                  + 2 q + 2 k       padded copies, in fp32; in bf16 attention takes packed rows on a GPU
                  + 2 q + 2 cp k    under context parallelism, where ranks swap them
      mlp         3 f               gate and up, their product
      moe         R (h + 4 f)       of R rows a token, spread evenly: input, gate and up, product, weighed product
    """
    p = cfg.parallel
    hidden, width = hf.hidden_size, bridge.head_dim(hf) / p.tp
    q, k = hf.num_attention_heads * width, hf.num_key_value_heads * width
    normed = "self_attention.q_layernorm.weight" in bridge.FAMILIES[hf.architectures[0]]
    padded, spread = cfg.model.dtype == "fp32", p.cp > 1
    numbers = {
        "norms": 4 * hidden / (p.tp if p.sp else 1),
        "attention": (3 + normed + 2 * padded + 2 * spread) * q + (3 + 2 * padded + 2 * p.cp * spread) * k,
    }
    if not bridge.is_moe(hf):
        return numbers | {"mlp": 3 * hf.intermediate_size / p.tp}
    rows = hf.num_experts_per_tok * p.etp / p.tp
    shared = (getattr(hf, "shared_expert_intermediate_size", None) or 0) / p.tp
    numbers["moe"] = rows * (hidden + 4 * bridge.expert_width(hf) / p.etp)
    return numbers | {"shared_experts": 3 * shared}


def activation_bytes(hf, cfg: Config, stage: int, micro_batches: int) -> tuple[int, int]:
    """(what the layers of a pipeline stage keep for the backward pass, what that takes besides within a layer).

    Of each row that is under way a layer keeps `layer_numbers`, or, recomputed in full, its input. Stage i of p has
    p - i rows under way; with v chunks a stage 2 (p - i - 1) + (v - 1) p + 1 times 1 / v of one (arXiv 2104.04473), and
    not more than there are. In the backward pass: what is recomputed at a time, and the gradients within a block.
    """
    p, extra = cfg.parallel, cfg.megatron
    layers = hf.num_hidden_layers // (p.pp * p.vpp)
    under_way = p.pp - stage if p.vpp == 1 else 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    numbers = layer_numbers(hf, cfg)
    entry, one = numbers["norms"] / 4, sum(numbers.values())
    kept, again = layers * one, 0.0
    if extra.get("recompute_granularity") == "full":
        group = min(extra.get("recompute_num_layers") or 1, layers)
        if extra.get("recompute_method") == "block":
            kept, again = group * entry + (layers - group) * one, one
        else:
            kept, again = math.ceil(layers / group) * entry, group * one
    elif extra.get("recompute_granularity") == "selective":
        blocks = extra.get("recompute_modules") or (["moe"] if extra.get("moe_layer_recompute") else [])
        freed = sum(numbers.get(block, 0.0) for block in blocks)  # nothing by core_attn, whose inputs are as large
        kept, again = kept - layers * freed, freed
    again += max(numbers.get("mlp", 0.0), numbers.get("moe", 0.0))
    each = cfg.train.max_tokens_per_micro_batch // p.cp * bridge.DTYPES[cfg.model.dtype].itemsize
    return int(min(under_way, micro_batches * p.vpp) * kept * each), int(again * each)


def head_bytes(hf, cfg: Config, tokens: int, each: int) -> int:
    """Peak of the log-probs of a row of `tokens`: hidden states gathered and chosen, and `each` bytes for each of the
    logits of one chunk; with model.fp32_head also its weight in fp32, and that one's gradient."""
    tokens, vocabulary = tokens // cfg.parallel.cp, hf.vocab_size // cfg.parallel.tp
    hidden = 4 * hf.hidden_size * bridge.DTYPES[cfg.model.dtype].itemsize
    head = cfg.model.fp32_head * vocabulary * hf.hidden_size * (8 if each == LOGIT_TRAIN else 4)
    return tokens * hidden + min(tokens, bridge.LOGITS_CHUNK) * vocabulary * each + head


@dataclass(frozen=True)
class Sampling:
    """vLLM's part of a GPU, in bytes, and what it is good for."""

    weights: int
    work: int  # of a forward pass
    cache: int
    loading: int  # while it takes up weights
    tokens: int  # in the cache of an engine
    sequences: int  # of the longest there can be, at once


def sampling(hf, cfg: Config, weights: int, gpu: int) -> Sampling:
    """What vLLM does with its share of a GPU of `gpu` bytes, for a model of so many weights.

    work: the largest batch in one layer, and logits of all its sequences three times in fp32. loading: a whole layer
    as it was pushed, and its part of it once more.
    """
    r, size, options = cfg.rollout, bridge.DTYPES[cfg.model.dtype].itemsize, cfg.rollout.vllm
    large = gpu >= 70 * 2**30  # where vLLM 0.32 takes larger batches
    batch = options.get("max_num_batched_tokens") or (16384 if large else 8192)
    seqs = options.get("max_num_seqs") or (1024 if large else 256)
    width, tables = bridge.head_dim(hf), hf.vocab_size * hf.hidden_size
    heads = hf.num_attention_heads / r.tp + 2 * max(hf.num_key_value_heads / r.tp, 1)
    wide = hf.num_experts_per_tok * (hf.hidden_size + 3 * bridge.expert_width(hf) / r.tp) if bridge.is_moe(hf) else 0
    wide = wide or 3 * hf.intermediate_size / r.tp
    work = batch * (3 * hf.hidden_size + heads * width + wide) * size + 3 * 4 * seqs * hf.vocab_size
    layer = max((weights - tables * (2 - hf.tie_word_embeddings)) / hf.num_hidden_layers, tables) * size
    cache = int(r.gpu_memory_utilization * gpu - weights * size / r.tp - work)
    number = 1 if "fp8" in str(options.get("kv_cache_dtype")) else size
    token = 2 * hf.num_hidden_layers * max(hf.num_key_value_heads // r.tp, 1) * width * number
    blocks = max(cache, 0) // (BLOCK * token)
    longest = math.ceil(checks.longest_sample(cfg) / BLOCK)
    return Sampling(
        int(weights * size / r.tp), int(work), cache, int(layer * (1 + 1 / r.tp)), blocks * BLOCK, blocks // longest
    )


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """What a run will take of a GPU of `gpu` bytes."""

    gpu: int
    held: dict[int, Held]  # of each pipeline stage
    phases: dict[str, dict[str, int]]  # phase → {what: bytes}, of the stage that takes most then
    stage: dict[str, int]  # phase → that stage
    sampling: Sampling
    host: int  # bytes of the host's memory, of a rank

    def total(self, phase: str) -> int:
        return total(self.phases[phase])

    @property
    def fits(self) -> bool:
        return max(map(self.total, self.phases)) <= self.gpu and self.sampling.sequences > 0

    @property
    def utilization(self) -> float:
        """The largest rollout.gpu_memory_utilization that fits, in steps of 0.01; below 0.01 none does."""
        beside = max(self.total(phase) - self.phases[phase]["vLLM"] for phase in ("rollout", "save"))
        return math.floor(100 * (1 - beside / self.gpu)) / 100


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def plan(cfg: Config, world_size: int, gpu: int, held: dict[int, Held] | None = None) -> Plan:
    """The plan of a run on so many ranks with a GPU of `gpu` bytes each; `held` of each stage, where it is known."""
    hf = transformers.AutoConfig.from_pretrained(cfg.model.path)
    p, size = cfg.parallel, bridge.DTYPES[cfg.model.dtype].itemsize
    stages = sorted({0, min(1, p.pp - 1), p.pp - 1})  # those between are alike
    held = held or {stage: count(cfg, world_size, stage * world_size // p.pp) for stage in stages}
    weights = sum(each.whole for each in held.values()) + (p.pp - len(stages)) * held[min(1, p.pp - 1)].whole
    vllm = sampling(hf, cfg, weights, gpu)
    _, rows = checks.rows_of_an_update(cfg, world_size // (p.tp * p.pp * p.cp))
    table = {stage: stage_phases(hf, cfg, stage, each, rows, vllm, gpu) for stage, each in held.items()}
    stage = {phase: max(stages, key=lambda stage: total(table[stage][phase])) for phase in table[0]}
    phases = {phase: table[most][phase] for phase, most in stage.items()}
    taught = max(each.teacher for each in held.values()) // size * p.tp * p.pp * p.ep
    host = memory.host_bytes(cfg, weights, world_size, size, on_gpu=True, teacher=taught)
    return Plan(gpu, held, phases, stage, vllm, host)


def stage_phases(hf, cfg: Config, stage: int, held: Held, rows: int, vllm: Sampling, gpu: int) -> dict[str, dict]:
    """{phase: {what: bytes}} of a pipeline stage with `rows` micro-batches in an update.

    From a push to the next update train.offload is away, the optimizer's state to the end of its first backward pass.
    What waits on the host (algo.reference_on) comes for its log-probs alone, past weights for a push as well.
    """
    a, t, last = cfg.algo, cfg.train, stage == cfg.parallel.pp - 1
    size, share = bridge.DTYPES[cfg.model.dtype].itemsize, int(cfg.rollout.gpu_memory_utilization * gpu)
    host = FURTHER * (a.reference_on == "host")
    visits = {"reference": held.reference, "past": held.past // max(cfg.rollout.lag, 1), "teacher": held.teacher}
    most = max(visits, key=visits.get)
    scored = {most: visits[most]} if host and visits[most] else {}
    pushed = {"past": visits["past"]} if host and held.past else {}
    away = {"none": (), "grads": ("gradients",), "optimizer": ("gradients", "optimizer")}[t.offload or "grads"]
    one = t.offload == "optimizer" and t.updates_per_step * t.epochs_per_step == 1
    always, rolling, training = held.all(*host), held.all(*host, *away), held.all(*host, *("optimizer",) * one)
    kept, again = activation_bytes(hf, cfg, stage, rows)
    head = last * head_bytes(hf, cfg, t.max_tokens_per_micro_batch, LOGIT_TRAIN)
    score = last * head_bytes(hf, cfg, t.logprob_max_tokens_per_micro_batch, LOGIT_SCORE)
    layer = int(total(layer_numbers(hf, cfg)) * size * t.logprob_max_tokens_per_micro_batch // cfg.parallel.cp)
    merged = {"merged": held.merged} if held.merged else {}
    layers = max({"activations": kept, "log-probs": head}, {"activations": kept + again} | merged, key=total)
    phases = {  # as Megatron fills its buffers, weights are there twice
        "build": max(always, {"weights": 2 * held.weights - held.frozen, "gradients": held.gradients}, key=total),
        "rollout": rolling | {"vLLM": share},
        "logprob": held.all(*host, *away)
        | scored
        | max({"activations": layer} | merged, {"log-probs": score}, key=total),
        "train": max(training | layers, always | {"update": held.update}, key=total),
        "sync": rolling | pushed | {"vLLM": vllm.weights + vllm.loading, "bucket": held.push},
        "save": rolling | {"vLLM": share, "copies": max(4 * held.largest, held.export)},
    }
    return {phase: {**parts, "reserve": int(RESERVE * gpu)} for phase, parts in phases.items()}


def levers(cfg: Config, world_size: int) -> Iterator[tuple[dict, Config]]:
    """(keys, configuration with them) of what may need less memory, where it is legal and changes no result."""
    p, r, t, longest = cfg.parallel, cfg.rollout, cfg.train, checks.longest_sample(cfg)
    tokens = ("max_tokens_per_micro_batch", "logprob_max_tokens_per_micro_batch")
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    choices = [
        *({f"parallel.{key}": 2 * getattr(p, key)} for key in ("tp", "pp", "cp", "ep")),
        *({f"train.{key}": max(getattr(t, key) // 2, longest)} for key in tokens),
        {"rollout.tp": 2 * r.tp},
        {"rollout.sync_bucket_mb": max(r.sync_bucket_mb // 2, 1)},
        {f"megatron.recompute_{key}": value for key, value in recompute.items()},
        {"train.offload": "optimizer"},
        {"algo.reference_on": "host"},
        {"megatron.optimizer_cpu_offload": True, "megatron.use_precision_aware_optimizer": True},
    ]
    for keys in choices:
        try:
            other = changed(cfg, keys)
            checks.check_config(other, world_size)
            checks.check_model(
                other.model.path, other.parallel, other.rollout.tp, longest, other.model.dtype, other.megatron
            )
        except (UserError, ValueError):
            continue
        if other != cfg:
            yield keys, other


def remedies(cfg: Config, world_size: int, found: Plan) -> list[str]:
    """What makes a plan fit, or smaller where it is largest, and by how much; what helps most first."""
    worst, ways, alone = max(found.phases, key=found.total), [], 0.0  # alone: the share that fits without other keys
    for keys, other in [({}, cfg), *levers(cfg, world_size)]:
        best = plan(other, world_size, found.gpu) if keys else found
        if not best.fits and alone < best.utilization < 1:
            share = {"rollout.gpu_memory_utilization": best.utilization}
            smaller = plan(changed(other, share), world_size, found.gpu, best.held)
            if smaller.fits:
                alone = alone if keys else best.utilization
                keys, best = keys | share, smaller
        less = found.total(worst) - best.total(worst)
        gain = [f"{less / GB:.1f} GB less"] * (less > GB / 10) + ["fits"] * best.fits
        if best.fits or (gain and found.total(worst) > found.gpu):
            names = " ".join(f"{key}={str(value).lower()}" for key, value in keys.items())
            ways.append((best.fits, less, f"{names}: {', '.join(gain)}"))
    return [text for *_, text in sorted(ways, reverse=True)]


def gpu_bytes(gb: float | None) -> int:
    """`gb`, or else the size of this machine's GPU, or else GPU_GB, in bytes. Raises UserError."""
    if gb is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if gb is not None and not 0 < gb < math.inf:
        raise UserError(f"--gpu-memory-gb={gb}: must be above 0")
    return int((gb or GPU_GB) * GB)


def describe(cfg: Config, world_size: int, gpu: int) -> str:
    """The plan in words, with warnings and remedies where it does not fit."""
    found = plan(cfg, world_size, gpu)
    vllm, p, r = found.sampling, cfg.parallel, cfg.rollout

    def added(parts: dict[str, int]) -> str:
        terms = [f"{what} {value / GB:.1f}" for what, value in parts.items() if value >= GB / 20]
        return f"{' + '.join(terms)} = {total(parts) / GB:.1f}"

    longest, asked = checks.longest_sample(cfg), r.prompts_per_step * r.group_size * r.tp // world_size
    local = min(MACHINE, world_size)
    lines = [f"memory:  of a GPU of {gpu / GB:.1f} GB (10⁹ bytes), by phase"]
    for phase, parts in found.phases.items():
        lines.append(f"{phase:>8s} {added(parts)}" + f" on stage {found.stage[phase] + 1} of {p.pp}" * (p.pp > 1))
    lines += [
        f"    vLLM weights {vllm.weights / GB:.1f} + work {vllm.work / GB:.1f} + cache {vllm.cache / GB:.1f}: "
        f"{vllm.tokens} tokens an engine, {vllm.sequences} samples of {longest} at once of the {asked} in a step",
        f"    host {found.host / GB:.1f} a rank, {found.host * local / GB:.1f} with {local} on a machine",
    ]
    over = {phase: found.total(phase) - gpu for phase in found.phases if found.total(phase) > gpu}
    if over:
        what = ", ".join(f"{phase} by {value / GB:.1f} GB" for phase, value in over.items())
        lines.append(f"warning: the plan does not fit a GPU of {gpu / GB:.1f} GB: {what}")
    if vllm.sequences == 0:
        lines.append(f"warning: vLLM's share of the GPU has no room for one sample of {longest} tokens")
    if not found.fits:
        lines += [f"    {text}" for text in remedies(cfg, world_size, found)]
    return "\n".join(lines)
