"""Plan the memory of a run, phase by phase, before anything is built. The config.json of the model is enough.

`--dry-run` of train_grpo.py runs it. What a rank keeps is counted to the byte: Megatron's own model, buffers and
distributed optimizer are built on torch's meta device, where tensors take no memory, in a fake process group. Transient
memory follows from formulas, and train.gpu_reserve stands for what has none. Sizes are bytes until they are printed.
docs/dev/memory-plan.md is about it.
"""

import contextlib
import math
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers
from torch.overrides import TorchFunctionMode

import megatron_bridge as bridge
from config import LoraConfig, ParallelConfig, UserError
from grpo.parts.base.hf_folder import read_config
from grpo.parts.model.gated_delta import CHUNK, linear_sizes
from grpo.parts.model.head import chunk_size
from grpo.run.preflight.costs import PHASES, costs, host_bytes, host_stepped
from grpo.run.preflight.explain import MEMORY, NO_CACHE, VLLM_MEMORY

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

GB = 10**9
GPU_BYTES = 80 * GB  # if there is no GPU to ask
META = torch.device("meta")
LOGIT = 12  # bytes for each logit of a chunk at the peak without Triton; its gradient is written over it
BLOCK = 16  # tokens of a block of vLLM's KV cache, or a multiple


@dataclass(frozen=True)
class Held:
    """What one rank keeps on its GPU, in bytes, and what follows from its weights."""

    gpu: dict[str, int]  # kind of `costs` → bytes while it is on the GPU; with the padding of Megatron's buffers
    frozen: int  # weights beside the adapters, which are in no buffer
    update: int  # what Adam allocates while it steps: one fp32 element for each weight that it steps on the GPU
    push: int  # peak of one bucket on its way to vLLM
    export: int  # peak of one bucket on its way to an export


@dataclass(frozen=True)
class Sampling:
    """vLLM's part of a GPU, in bytes, and the tokens that fit its cache."""

    weights: int  # and the tables of its sampler, which sleep and wake with them
    work: int  # of a forward pass: the largest batch in one layer, logits of all its sequences three times in fp32
    cache: int
    loading: int  # while a push loads weights: a whole layer as it was pushed, and its shard of it once more
    tokens: int  # in the cache of an engine
    sequences: int  # of the longest possible, at once


@dataclass(frozen=True)
class Plan:
    """What a run will take of a GPU of `gpu` bytes."""

    gpu: int
    phases: dict[str, dict[str, int]]  # phase → {what: bytes}, of the stage that takes most then
    stage: dict[str, int]  # phase → that stage
    sampling: Sampling
    host: int  # bytes of a rank


# ---------------------------------------------------------------- the plan


def report(cfg, world_size, gpu_gb: float | None) -> str | None:
    """Print the plan for a GPU of `gpu_gb` · 10⁹ bytes; returns its `shortage`. Raises UserError."""
    found = plan(cfg, world_size, gpu_bytes(gpu_gb))
    print(describe(cfg, world_size, found), flush=True)
    return shortage(cfg, found)


def gpu_bytes(gb: float | None) -> int:
    """`gb` in bytes. None means this machine's GPU, or GPU_BYTES without one. Raises UserError."""
    if gb is None:
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPU_BYTES
    if not 0 < gb < math.inf:
        raise UserError(f"--gpu-memory-gb={gb}: must be above 0")
    return int(gb * GB)


def plan(cfg, world_size, gpu) -> Plan:
    """The plan of a run on `world_size` ranks with a GPU of `gpu` bytes each."""
    hf = read_config(cfg.model.path)
    r, pp = cfg.rollout, cfg.parallel.pp
    weights = count_by_config(cfg.model.path)
    vllm = plan_sampling(hf, cfg, weights, gpu, r.prompts_per_step * r.group_size * r.tp // world_size)

    table = []  # of each stage, {phase: {what: bytes}}
    for stage in range(pp):
        held = count(cfg, world_size, rank=stage * world_size // pp)
        table.append(stage_phases(hf, cfg, world_size, stage, held, vllm, gpu))

    # In each phase, the stage that takes most counts.
    largest = {phase: max(range(pp), key=lambda stage: total(table[stage][phase])) for phase in table[0]}
    phases = {phase: table[stage][phase] for phase, stage in largest.items()}

    teacher = count_by_config(cfg.algo.teacher) if "teacher" in costs(cfg, world_size) else 0
    host = host_bytes(cfg, weights, world_size, on_gpu=True, teacher=teacher)
    if cfg.algo.reference_on == "host":
        host += sum(states for states, _ in compared_bytes(cfg, world_size))
    return Plan(gpu, phases, largest, vllm, host)


def stage_phases(hf, cfg, world_size, stage, held: Held, vllm: Sampling, gpu) -> dict[str, dict[str, int]]:
    """{phase: {what: bytes}} of a pipeline stage: what it keeps, and what comes and goes.

    If a phase has several moments, such as layers and head, or backward pass and optimizer step, the largest counts.
    """
    t = cfg.train
    state = {phase: held_in(phase, held, cfg, world_size) for phase in PHASES}

    # The head is on the last stage.
    train_head, score_head = 0, 0
    compared = []
    if stage == cfg.parallel.pp - 1:
        compared = compared_bytes(cfg, world_size)
        train_head = head_bytes(hf, cfg, t.max_tokens_per_micro_batch, len(compared))
        score_head = head_bytes(hf, cfg, t.logprob_max_tokens_per_micro_batch)
    on_host = cfg.algo.reference_on == "host"
    other_models = {"other models": sum(head if on_host else states for states, head in compared)}

    # Training keeps the activations of all layers, scoring keeps one layer at a time.
    kept, within = activation_bytes(hf, cfg, stage)
    backward = max({"activations": kept, "log-probs": train_head}, {"activations": kept + within}, key=total)
    layer = max(stage_elements(hf, cfg, stage), default=0)
    row = t.logprob_max_tokens_per_micro_batch // cfg.parallel.cp
    scoring = {"activations": int(layer * row * item_size(cfg))}

    # While Megatron fills its buffers, weights are there twice.
    filling = {"weights": 2 * held.gpu["weights"] - held.frozen, "gradients": held.gpu["gradients"]}
    share = int(cfg.rollout.gpu_memory_utilization * gpu)
    phases = {
        "build": max(state["build"], filling, key=total),
        "rollout": state["rollout"] | {"vLLM": share},
        "logprob": state["logprob"] | max(scoring, {"log-probs": score_head}, key=total),
        "train": max(state["train"] | backward | other_models, state["update"] | {"update": held.update}, key=total),
        "sync": state["sync"] | {"vLLM": vllm.weights + vllm.loading, "bucket": held.push},
        "save": state["save"] | {"vLLM": share, "copies": held.export},
    }
    return {phase: parts | {"reserve": int(t.gpu_reserve * gpu)} for phase, parts in phases.items()}


def held_in(phase, held: Held, cfg, world_size) -> dict[str, int]:
    """{kind: bytes} of weights and state on the GPU in a phase. Of kinds that wait on the host, only the largest."""
    table = costs(cfg, world_size)
    there = {kind: size for kind, size in held.gpu.items() if size and phase in table[kind].phases}
    waiting = [kind for kind in there if table[kind].waits]
    largest = max(waiting, key=held.gpu.get, default=None)
    return {kind: size for kind, size in there.items() if kind == largest or kind not in waiting}


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def describe(cfg, world_size, found: Plan) -> str:
    """The plan in words: a line for each phase, then vLLM's share and the host."""
    vllm, r = found.sampling, cfg.rollout
    lines = [f"memory:  of a GPU of {found.gpu / GB:.1f} GB (10⁹ bytes), by phase"]
    for phase, parts in found.phases.items():
        terms = [f"{what} {value / GB:.1f}" for what, value in parts.items() if value >= GB / 20]
        line = f"{phase:>8s} {' + '.join(terms)} = {total(parts) / GB:.1f}"
        if cfg.parallel.pp > 1:
            line += f" on stage {found.stage[phase] + 1} of {cfg.parallel.pp}"
        lines.append(line)

    samples = r.prompts_per_step * r.group_size * r.tp // world_size
    lines.append(
        f"    vLLM weights {vllm.weights / GB:.1f} + work {vllm.work / GB:.1f} + cache {vllm.cache / GB:.1f}: "
        f"{vllm.tokens} tokens an engine, {vllm.sequences} samples of {cfg.longest_sample} at once "
        f"of the {samples} in a step"
    )
    lines.append(f"    host {found.host / GB:.1f} a rank")
    return "\n".join(lines)


def shortage(cfg, found: Plan) -> str | None:
    """What of a plan does not fit, and what to turn. None if all fits."""
    lines = []
    for phase, parts in found.phases.items():
        over = total(parts) - found.gpu
        if over > 0:
            lines.append(
                f"{phase} does not fit a GPU of {found.gpu / GB:.1f} GB, by {max(over / GB, 0.1):.1f} GB\n"
                f"  turn one of {MEMORY[phase]}"
            )

    if found.sampling.sequences == 0:
        lines.append(
            f"vLLM's share of the GPU has no room for one sample of {cfg.longest_sample} tokens\n"
            f"  turn one of {VLLM_MEMORY[NO_CACHE]}"
        )
    return "\n".join(lines) or None


# ---------------------------------------------------------------- what a rank keeps, to the byte


def count(cfg, world_size, rank) -> Held:
    """What `rank` of `world_size` will keep. Must be called without a process group, and needs none."""
    table = costs(cfg, world_size)
    with fake_process_groups(cfg.parallel, world_size, rank, cfg.seed):
        model = build_on_meta(cfg.model.path, cfg, cfg.lora)
        hf = model[0].hf_config
        own = bridge.named_weights(model)
        trained = bridge.named_weights(model, factors=True) or own
        frozen = 0 if trained is own else sum(weight.nbytes for weight in own.values())

        # The weights that this rank's share of the optimizer steps.
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        stepped = 0
        for buffer in buffers:
            for buckets in DistributedOptimizer._build_gbuf_range_map(buffer).values():
                for bucket in buckets:
                    stepped += sum(ranges["param"].size for ranges in bucket["param_map"].values())

        gpu = {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers) + frozen,
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": int(stepped * table["optimizer"].gpu),
        }
        if "reference" in table:
            gpu["reference"] = sum(weight.nbytes for weight in bridge.copy_weights(model))
        if "teacher" in table:
            teacher = build_on_meta(cfg.algo.teacher, cfg, None)
            gpu["teacher"] = sum(weight.nbytes for chunk in teacher for weight in chunk.parameters())

        return Held(
            gpu=gpu,
            frozen=frozen,
            update=int(4 * stepped * (1 - host_stepped(cfg))),
            push=push_bytes(own, hf, cfg.rollout.sync_bucket_mb << 20, item_size(cfg)),
            export=push_bytes(own, hf, bridge.BUCKET_BYTES, item_size(cfg)),
        )


@contextlib.contextmanager
def fake_process_groups(parallel: ParallelConfig, world_size, rank, seed):
    """Make this process `rank` of a fake process group of `world_size`, with Megatron's groups; nothing is sent."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL wraps every group in one that connects
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings(action="ignore"):  # the run itself will give them
            bridge.init_model_parallel(parallel, seed)
            yield
    finally:
        bridge.mpu.destroy_model_parallel()
        dist.destroy_process_group()
        dist.set_debug_level(level)


class OnMeta(TorchFunctionMode):
    """Wherever code names a device, it is the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        return function(*(META if isinstance(value, torch.device) else value for value in args), **kwargs)


def build_on_meta(path, cfg, adapters: LoraConfig | None) -> list:
    """The chunks of the model of `path` that this rank of a fake process group holds, without memory or weights."""
    extra = cfg.megatron | {"perform_initialization": False}
    dtype = bridge.DTYPES[cfg.model.dtype]
    with META, OnMeta():
        return bridge.build_model(path, cfg.parallel, dtype, extra, weights=False, adapters=adapters)


def push_bytes(own: dict[str, torch.nn.Parameter], hf, limit: int, size: int) -> int:
    """Peak of `bridge.hf_weights`: a bucket of `limit` bytes, and this rank's part of it or a joined tensor."""
    peak = 0
    for _, names in bridge.buckets([{name: weight.shape for name, weight in own.items()}], hf, limit // size):
        part = [own[name].numel() for name in names]
        ranks, split = bridge.shard_group(names[0])
        gathered = sum(part) * ranks.size()
        adapted = any(hasattr(own[name], "adapter") for name in names)
        parts = 2 if adapted else 1  # with the adapters added, and without
        peak = max(peak, gathered + sum(part) * parts, gathered + 2 * max(part) * split)
    return peak * size


def count_by_config(path) -> int:
    """Elements of a model's weights, by its config.json. A tied head is counted with the embedding."""
    with META:
        model = transformers.AutoModelForCausalLM.from_config(read_config(path))
    return sum(weight.numel() for weight in model.parameters())


def item_size(cfg) -> int:
    return bridge.DTYPES[cfg.model.dtype].itemsize


# ---------------------------------------------------------------- transient memory of the trainer


def activation_bytes(hf, cfg, stage) -> tuple[int, int]:
    """(activations that a pipeline stage keeps for the backward pass, what is recomputed and its gradients within it).

    Each micro-batch in flight keeps its own: p - i of them on stage i of p. With v chunks a stage, each 1 / v of a
    micro-batch, there are 2 (p - i - 1) + (v - 1) p + 1 (arXiv 2104.04473). An update with fewer keeps less.

    Selective recomputation and recompute_method=block are not counted: with these the plan is too large.

    Shared prompts, of which each answer has a copy, are within: packing counts a copy as a part of a position, or with
    linear attention as a whole one.
    """
    p = cfg.parallel
    in_flight = p.pp - stage
    if p.vpp > 1:
        in_flight = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1

    layers = stage_elements(hf, cfg, stage)
    kept = sum(layers)
    within = max(layers, default=0.0)  # gradients inside a layer: at most as large as what it keeps
    if cfg.megatron.get("recompute_method") == "uniform":  # of each group of layers, only the input is kept
        size = cfg.megatron.get("recompute_num_layers") or 1
        groups = [sum(layers[i : i + size]) for i in range(0, len(layers), size)]
        kept = len(groups) * residual(hf, p)
        within += max(groups, default=0.0)
    if cfg.train.offload_activations:  # the layer at work alone has them on the GPU; the host's are not counted
        in_flight, within = 0, within + max(layers, default=0.0)

    row = cfg.train.max_tokens_per_micro_batch // p.cp * item_size(cfg)
    return int(in_flight * kept * row), int(within * row)


def stage_elements(hf, cfg, stage) -> list[float]:
    """`layer_elements` of the layers of a pipeline stage, of the chunk that keeps most."""
    config = bridge.transformer_config(hf, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    chunks = bridge.stage_layers(config)[stage]
    return max(([layer_elements(hf, cfg, layer) for layer in chunk] for chunk in chunks), key=sum)


def layer_elements(hf, cfg, layer) -> float:
    """Elements that a layer keeps for its backward pass, for each token of a rank's rows."""
    p = cfg.parallel
    elements = 4 * residual(hf, p)  # input and output of two norms
    elements += linear_elements(hf, cfg) if bridge.has_linear_attention(hf, layer) else attention_elements(hf, cfg)
    if not bridge.is_moe(hf):
        return elements + 3 * hf.intermediate_size / p.tp  # gate and up, their product

    rows = hf.num_experts_per_tok * p.etp / p.tp  # of a token, spread evenly
    shared = getattr(hf, "shared_expert_intermediate_size", None) or 0
    elements += rows * (hf.hidden_size + 4 * bridge.expert_width(hf) / p.etp)  # with the weighted product
    return elements + 3 * shared / p.tp


def residual(hf, p: ParallelConfig) -> float:
    """Numbers of the residual stream that a rank holds of a token."""
    return hf.hidden_size / (p.tp if p.sp else 1)


def attention_elements(hf, cfg) -> float:
    """Elements that attention keeps for each token."""
    p = cfg.parallel
    width = bridge.head_dim(hf) / p.tp
    q = hf.num_attention_heads * width
    k = max(hf.num_key_value_heads, p.tp) * width
    gathered = p.tp if p.tp > hf.num_key_value_heads else 1  # outputs of the projection that Megatron puts together

    # Outputs of the projection, queries and keys after RoPE, output of attention.
    attention = gathered * (q + 2 * hf.num_key_value_heads * width) + 2 * q + k
    if "self_attention.q_layernorm.weight" in bridge.FAMILIES[hf.architectures[0]]:
        attention += q
    if linear_sizes(hf)[0]:  # then it has a gate, whose sigmoid is fp32; and the product with it
        attention += (2 + 4 / item_size(cfg)) * q
    if cfg.model.dtype == "fp32" or not cfg.model.flash_attention:
        attention += 2 * q + 2 * k  # padded copies; in bf16 FlashAttention takes packed rows on a GPU
    if p.cp > 1:
        attention += 2 * q + 2 * p.cp * k  # its all-to-all
    return attention


def linear_elements(hf, cfg) -> float:
    """Elements that linear attention (GatedDeltaNet) keeps, by fla's code; not measured on a GPU.

    In fp32 torch's rule runs instead, which keeps about three times as much.
    """
    _, heads, keys, values = (size / cfg.parallel.tp for size in linear_sizes(hf))
    wide = 4 / item_size(cfg)
    gated = (3 + 2 * wide) * values  # input and output of the norm, gate and its silu in fp32, their product
    inputs = 2 * (2 * keys + values)  # of the convolution and of the rule
    return gated + inputs + heads * CHUNK  # and the inverses of the rule's systems


def head_bytes(hf, cfg, tokens: int, others: int = 0) -> int:
    """Peak of the log-probs of a row: hidden states gathered and selected, LOGIT bytes for each logit of a chunk, of
    the policy and of the `others` that it is compared with.
    """
    tokens = tokens // cfg.parallel.cp
    hidden = 4 * hf.hidden_size * item_size(cfg)
    rows = hf.vocab_size // cfg.parallel.tp
    return tokens * hidden + min(tokens, chunk_size(rows, others)) * rows * LOGIT * (1 + others)


def compared_bytes(cfg, world_size) -> list[tuple[int, int]]:
    """(hidden states at the answers of an update's rows, weight of the head) of each model in algo.compared, on the
    last stage. With algo.reference_on=host the states wait on the host, and the head is on the GPU beside them.
    """
    a, p, r = cfg.algo, cfg.parallel, cfg.rollout
    replicas = world_size // (p.tp * p.pp * p.cp)
    answers = math.ceil(r.prompts_per_step * r.group_size / cfg.train.updates_per_step / replicas)
    found = []
    for name in a.compared:
        hf = read_config(a.teacher if name == "teacher" and a.teacher != "self" else cfg.model.path)
        states = answers * r.max_new_tokens // p.cp * hf.hidden_size
        found.append((states * item_size(cfg), hf.vocab_size // p.tp * hf.hidden_size * item_size(cfg)))
    return found


# ---------------------------------------------------------------- vLLM's part


def plan_sampling(hf, cfg, weights: int, gpu, samples: int) -> Sampling:
    """What vLLM does with its share of a GPU of `gpu` bytes: `weights` weights, `samples` of an engine in a step."""
    r = cfg.rollout
    size = item_size(cfg)
    linear, _, keys, values = linear_sizes(hf)
    kv_heads = max(hf.num_key_value_heads // r.tp, 1)

    # vLLM 0.32 takes larger batches on a large GPU.
    batch, at_once = 8192, max(256, min(samples, 512))
    if gpu >= 70 * 2**30:
        batch, at_once = 16384, 1024
    batch = r.vllm.get("max_num_batched_tokens") or batch
    at_once = r.vllm.get("max_num_seqs") or at_once

    # Its weights, and the table of its sampler: a count of each token.
    asleep = weights * size / r.tp + 4 * at_once * hf.vocab_size
    embedding = hf.vocab_size * hf.hidden_size
    ends = (1 if hf.tie_word_embeddings else 2) * embedding
    layer = max((weights - ends) / hf.num_hidden_layers, embedding) * size

    # A forward pass: the largest batch in one layer, and the logits.
    feed_forward = 3 * bridge.expert_width(hf) / r.tp
    if bridge.is_moe(hf):
        feed_forward = hf.num_experts_per_tok * (hf.hidden_size + feed_forward)
    queries = (2 if linear else 1) * hf.num_attention_heads / r.tp  # with their gates
    attention = (queries + 2 * kv_heads) * bridge.head_dim(hf)
    delta = (6 * keys + 9 * values) / r.tp  # in fla's kernels, with the states between chunks
    token = 3 * hf.hidden_size + max(attention, delta) + feed_forward
    work = batch * token * size + 3 * 4 * at_once * hf.vocab_size

    # The cache takes the rest: keys and values of each token, and without prefix caching a state for each sequence.
    cache = int(r.gpu_memory_utilization * gpu - asleep - work)
    kv_size = 1 if "fp8" in str(r.vllm.get("kv_cache_dtype")) else size
    token, state = 2 * kv_heads * bridge.head_dim(hf) * kv_size, 0
    if linear:  # inputs of the convolution, and the heads' states in fp32
        inputs = (hf.linear_conv_kernel_dim - 1) * (2 * keys + values) * size
        state = (inputs + values * hf.linear_key_head_dim * 4) / r.tp

    # Keys and values of a block take no less than a state. A block is one of all layers with attention, or as many
    # states.
    block = BLOCK * max(math.ceil(state / (BLOCK * token)), 1)
    layers = hf.num_hidden_layers - linear
    blocks = max(cache, 0) // (block * token * layers)
    longest = cfg.longest_sample
    sequences = blocks / (math.ceil(longest / block) + linear / layers)
    return Sampling(
        weights=int(asleep),
        work=int(work),
        cache=cache,
        loading=int(layer * (1 + 1 / r.tp)),
        tokens=int(sequences * longest),
        sequences=int(sequences),
    )
