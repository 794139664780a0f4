"""What each phase of a step will take of a GPU, and of the host, told before anything is built.

What a rank holds is counted to the byte (support/memory_count.py). Transient memory follows from the formulas at their
functions. RESERVE stands for what has no formula here. All sizes are bytes until they are printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import yaml

import megatron_bridge as bridge
from config import Config, UserError
from support import checks, remedies
from support.memory_count import PHASES, Held, costs, count, host_bytes, replica_ranks
from support.read_config import changed
from support.run_plan import rows_of_an_update

GB = 10**9
GPU_GB = 80.0  # where there is no GPU to ask
RESERVE = 0.1  # of a GPU, for CUDA, NCCL and cuBLAS, vLLM's CUDA graphs and fragments: assumed, not measured
LOGIT_TRAIN, LOGIT_SCORE = 24, 16  # bytes for each logit of a chunk, with a backward pass and without
BLOCK = 16  # tokens of a block of vLLM's KV cache
MACHINE_GPUS = 8  # of one machine, for the host's memory
SHARE_OF_VLLM = ("rollout.gpu_memory_utilization", "rollout.vllm.max_num_seqs")  # the plan solves for the first
LARGE_GPU = 70 * 2**30  # bytes of a GPU from which vLLM 0.32 takes larger batches


# ---------------------------------------------------------------- transient memory of the trainer


def layer_elements(hf, cfg: Config) -> dict[str, float]:
    """Elements that a layer keeps for its backward pass for each token of a rank's rows, by block.

    With h, q, k and f the widths on one rank of hidden states, queries, keys and feed-forward:

      norms       4 h               input and output of two
      attention   3 q + 3 k         output of the projection, queries and keys after RoPE, output of attention
                  + q               where queries have a norm
                  + 2 q + 2 k       padded copies, in fp32; in bf16 attention takes packed rows on a GPU
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
    if cfg.model.dtype == "fp32":
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
    work = forward_bytes(hf, cfg, gpu)
    tables = hf.vocab_size * hf.hidden_size
    ends = tables if hf.tie_word_embeddings else 2 * tables
    layer = max((weights - ends) / hf.num_hidden_layers, tables) * size
    cache = int(r.gpu_memory_utilization * gpu - shard - work)
    kv_size = 1 if "fp8" in str(r.vllm.get("kv_cache_dtype")) else size
    kv_heads = max(hf.num_key_value_heads // r.tp, 1)
    token = 2 * hf.num_hidden_layers * kv_heads * bridge.head_dim(hf) * kv_size
    blocks = max(cache, 0) // (BLOCK * token)
    longest = math.ceil(checks.longest_sample(cfg) / BLOCK)
    return Sampling(
        weights=int(shard),
        work=int(work),
        cache=cache,
        loading=int(layer * (1 + 1 / r.tp)),
        tokens=blocks * BLOCK,
        sequences=blocks // longest,
    )


def forward_bytes(hf, cfg: Config, gpu: int) -> float:
    """Transient memory of a forward pass of vLLM on a GPU of `gpu` bytes."""
    r, options = cfg.rollout, cfg.rollout.vllm
    batch = options.get("max_num_batched_tokens") or (16384 if gpu >= LARGE_GPU else 8192)
    sequences = options.get("max_num_seqs") or (1024 if gpu >= LARGE_GPU else 256)
    heads = hf.num_attention_heads / r.tp + 2 * max(hf.num_key_value_heads / r.tp, 1)
    if bridge.is_moe(hf):
        feed_forward = hf.num_experts_per_tok * (hf.hidden_size + 3 * bridge.expert_width(hf) / r.tp)
    else:
        feed_forward = 3 * hf.intermediate_size / r.tp
    token = 3 * hf.hidden_size + heads * bridge.head_dim(hf) + feed_forward
    logits = 3 * 4 * sequences * hf.vocab_size
    return batch * token * bridge.DTYPES[cfg.model.dtype].itemsize + logits


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
    p = cfg.parallel
    inner = min(1, p.pp - 1)
    stages = sorted({0, inner, p.pp - 1})  # all inner stages are alike
    if held is None:
        held = {stage: count(cfg, world_size, stage * world_size // p.pp) for stage in stages}
    weights = sum(each.stage_weights for each in held.values())
    weights += (p.pp - len(stages)) * held[inner].stage_weights
    vllm = plan_sampling(hf, cfg, weights, gpu)
    _, rows = rows_of_an_update(cfg, world_size // (p.tp * p.pp * p.cp))
    table = {stage: stage_phases(hf, cfg, world_size, stage, held[stage], rows, vllm, gpu) for stage in stages}
    largest = {phase: max(stages, key=lambda stage: total(table[stage][phase])) for phase in table[0]}
    phases = {phase: table[stage][phase] for phase, stage in largest.items()}
    teacher = max(each.gpu.get("teacher", 0) for each in held.values()) // bridge.DTYPES[cfg.model.dtype].itemsize
    host = host_bytes(cfg, weights, world_size, on_gpu=True, teacher=teacher * replica_ranks(cfg))
    return Plan(gpu, held, phases, largest, vllm, host)


def held_in(phase: str, held: Held, cfg: Config, world_size: int) -> dict[str, int]:
    """{kind: bytes} of weights and state on the GPU in a phase of `memory_count.PHASES`.

    Of the kinds that wait on the host one at a time is there; the largest counts.
    """
    table = costs(cfg, world_size)
    there = [kind for kind, size in held.gpu.items() if size and phase in table[kind].phases]
    waiting = [kind for kind in there if table[kind].waits]
    largest = max(waiting, key=held.gpu.get, default=None)
    return {kind: held.gpu[kind] for kind in there if kind == largest or kind not in waiting}


def stage_phases(
    hf, cfg: Config, world_size: int, stage: int, held: Held, rows: int, vllm: Sampling, gpu: int
) -> dict[str, dict[str, int]]:
    """{phase: {what: bytes}} of a pipeline stage with `rows` micro-batches in an update: what is held and what is not.

    Of a phase with several moments, such as layers and head, or backward pass and optimizer step, the largest counts.
    """
    t, share = cfg.train, int(cfg.rollout.gpu_memory_utilization * gpu)
    state = {phase: held_in(phase, held, cfg, world_size) for phase in PHASES}
    train_head, score_head = 0, 0
    if stage == cfg.parallel.pp - 1:
        train_head = head_bytes(hf, cfg, t.max_tokens_per_micro_batch, LOGIT_TRAIN)
        score_head = head_bytes(hf, cfg, t.logprob_max_tokens_per_micro_batch, LOGIT_SCORE)
    merged = {"merged": held.merged} if held.merged else {}
    kept, within = activation_bytes(hf, cfg, stage, rows)
    backward = max({"activations": kept, "log-probs": train_head}, {"activations": kept + within} | merged, key=total)
    scoring = max({"activations": layer_bytes(hf, cfg)} | merged, {"log-probs": score_head}, key=total)
    filling = {  # as Megatron fills its buffers, weights are there twice
        "weights": 2 * held.gpu["weights"] - held.frozen,
        "gradients": held.gpu["gradients"],
    }
    phases = {
        "build": max(state["build"], filling, key=total),
        "rollout": state["rollout"] | {"vLLM": share},
        "logprob": state["logprob"] | scoring,
        "train": max(state["train"] | backward, state["update"] | {"update": held.update}, key=total),
        "sync": state["sync"] | {"vLLM": vllm.weights + vllm.loading, "bucket": held.push},
        "save": state["save"] | {"vLLM": share, "copies": max(4 * held.largest, held.export)},
    }
    return {phase: {**parts, "reserve": int(RESERVE * gpu)} for phase, parts in phases.items()}


# ---------------------------------------------------------------- what makes it fit


def levers(cfg: Config) -> Iterator[dict]:
    """The keys that each remedy for memory sets, as `remedies` writes them; none of them changes a result."""
    longest = checks.longest_sample(cfg)
    for turn in dict.fromkeys(turn for remedy in remedies.MEMORY.values() for turn in remedy.turn):
        key, _, way = turn.partition(" ")
        if key in SHARE_OF_VLLM:
            continue
        if way not in ("up", "down"):
            yield dict(read_setting(setting) for setting in turn.split())
            continue
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        least = longest if "tokens" in name else 1
        yield {key: 2 * value if way == "up" else max(value // 2, least)}


def read_setting(setting: str) -> tuple[str, Any]:
    """(key, value) of "key=value"."""
    key, _, value = setting.partition("=")
    return key, yaml.safe_load(value)


def legal_levers(cfg: Config, world_size: int) -> Iterator[tuple[dict, Config]]:
    """(keys, configuration with them) of `levers`, where they change something and pass the checks."""
    longest = checks.longest_sample(cfg)
    for keys in levers(cfg):
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


def smaller_share(cfg: Config, world_size: int, found: Plan, above: float) -> Plan | None:
    """The plan with the largest rollout.gpu_memory_utilization, if it fits with one above `above`; else None."""
    if found.fits or not above < found.utilization < 1:
        return None
    other = changed(cfg, {"rollout.gpu_memory_utilization": found.utilization})
    smaller = plan(other, world_size, found.gpu, found.held)
    return smaller if smaller.fits else None


def find_remedies(cfg: Config, world_size: int, found: Plan) -> list[str]:
    """What makes a plan fit, or smaller where it is largest, and by how much; what helps most first."""
    worst = max(found.phases, key=found.total)
    ways = []
    without = smaller_share(cfg, world_size, found, 0.0)
    if without is not None:
        ways.append(({"rollout.gpu_memory_utilization": found.utilization}, without))
    least = found.utilization if without is not None else 0.0  # a lever has to allow vLLM more than that
    for keys, other in legal_levers(cfg, world_size):
        best = plan(other, world_size, found.gpu)
        smaller = smaller_share(other, world_size, best, least)
        if smaller is None:
            ways.append((keys, best))
        else:
            ways.append(({**keys, "rollout.gpu_memory_utilization": best.utilization}, smaller))
    lines = []
    for keys, best in ways:
        less = found.total(worst) - best.total(worst)
        gains = []
        if less > GB / 10:
            gains.append(f"{less / GB:.1f} GB less")
        if best.fits:
            gains.append("fits")
        if best.fits or (gains and found.total(worst) > found.gpu):
            names = " ".join(f"{key}={str(value).lower()}" for key, value in keys.items())
            lines.append((best.fits, less, f"{names}: {', '.join(gains)}"))
    return [text for *_, text in sorted(lines, reverse=True)]


# ---------------------------------------------------------------- the command


def gpu_bytes(gb: float | None) -> int:
    """`gb`, or else the size of this machine's GPU, or else GPU_GB, in bytes. Raises UserError."""
    if gb is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if gb is not None and not 0 < gb < math.inf:
        raise UserError(f"--gpu-memory-gb={gb}: must be above 0")
    return int((gb or GPU_GB) * GB)


def sum_line(parts: dict[str, int]) -> str:
    """The parts and their sum in GB, as "a 1.0 + b 2.0 = 3.0"; what rounds to nothing is left out."""
    terms = [f"{what} {value / GB:.1f}" for what, value in parts.items() if value >= GB / 20]
    return f"{' + '.join(terms)} = {total(parts) / GB:.1f}"


def describe(cfg: Config, world_size: int, gpu: int) -> str:
    """The plan in words, with warnings and remedies where it does not fit."""
    found = plan(cfg, world_size, gpu)
    vllm, p, r = found.sampling, cfg.parallel, cfg.rollout
    longest = checks.longest_sample(cfg)
    samples = r.prompts_per_step * r.group_size * r.tp // world_size
    local = min(MACHINE_GPUS, world_size)
    lines = [f"memory:  of a GPU of {gpu / GB:.1f} GB (10⁹ bytes), by phase"]
    for phase, parts in found.phases.items():
        where = f" on stage {found.stage[phase] + 1} of {p.pp}" if p.pp > 1 else ""
        lines.append(f"{phase:>8s} {sum_line(parts)}{where}")
    lines += [
        f"    vLLM weights {vllm.weights / GB:.1f} + work {vllm.work / GB:.1f} + cache {vllm.cache / GB:.1f}: "
        f"{vllm.tokens} tokens an engine, {vllm.sequences} samples of {longest} at once of the {samples} in a step",
        f"    host {found.host / GB:.1f} a rank, {found.host * local / GB:.1f} with {local} on a machine",
    ]
    over = {phase: found.total(phase) - gpu for phase in found.phases if found.total(phase) > gpu}
    if over:
        what = ", ".join(f"{phase} by {value / GB:.1f} GB" for phase, value in over.items())
        lines.append(f"warning: the plan does not fit a GPU of {gpu / GB:.1f} GB: {what}")
    if vllm.sequences == 0:
        lines.append(f"warning: vLLM's share of the GPU has no room for one sample of {longest} tokens")
    if not found.fits:
        lines += [f"    {text}" for text in find_remedies(cfg, world_size, found)]
    return "\n".join(lines)
