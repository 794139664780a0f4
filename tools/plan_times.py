"""How long a step may take on a GPU that nobody has run it on: arithmetic with the assumptions below, no measurement.

With N weights that a token uses, T tokens of a step, W bytes of the model, F and B a GPU's peak and bandwidth:

  sample    decoding steps, each reads a GPU's share of the weights and the cache of the answers at once (of B),
            computes 2 N for each of them (of F), and costs vLLM a fixed time; the longest answers go on alone
  log-probs 2 N T for each pass, train 6 N T (8 N T with full recompute), of F; stages idle by pipeline/bubble
  update    28 bytes a weight: on the GPU at B; of Adam on the host at the machine's memory, and 6 over the bus
  push      W at a fixed rate: gather, load into vLLM, digests
"""

import math
from dataclasses import dataclass

from benchmarks import works as bench_works
from config import Config
from support.check import memory_formulas, memory_plan, run_plan
from support.step.packing import bubble

# ---------------------------------------------------------------- what is assumed


@dataclass(frozen=True)
class Card:
    """A GPU as its maker describes it: memory in 10⁹ bytes, dense bf16 in FLOP/s, bandwidth in bytes/s."""

    name: str
    gb: float
    flops: float
    bandwidth: float


CARDS = (
    Card("H100", 80, 989e12, 3.35e12),
    Card("H200", 141, 989e12, 4.8e12),
    Card("A100 80 GB", 80, 312e12, 2.04e12),
    Card("24 GB (RTX 4090)", 24, 165e12, 1.01e12),
)
READ_SHARE = 0.5  # of the bandwidth that decoding reaches
DECODE_MFU = 0.3
DECODE_STEP_S = 0.005  # of vLLM's scheduler and sampler, for a decoding step
TAIL = 3  # the longest answer ÷ the mean, where the limit allows it
SCORE_MFU = 0.4
TRAIN_MFU = {"dense": 0.35, "experts": 0.15}  # others publish 0.25 to 0.4, and 0.17 to 0.24 for Qwen3-30B-A3B
HOST_BYTES_S = 100e9  # of a machine's memory, in Adam on the host
BUS_BYTES_S = 20e9  # of each GPU, to and from the host
PUSH_BYTES_S = 10e9  # others publish 8 to 15 GB/s for 30B to 355B
REST_S = 1.0  # of a step: grading that is not hidden, packing, sleep and wake


@dataclass(frozen=True)
class Lengths:
    """Mean tokens that a plan assumes."""

    prompt: int
    answer: int


# ---------------------------------------------------------------- the plan


def active_weights(shape: dict) -> int:
    """Weights that one token uses: all but the experts that it is not sent to."""
    idle = shape.get("num_experts", 0) - shape.get("num_experts_per_tok", 0)
    expert = 3 * shape["hidden_size"] * shape.get("moe_intermediate_size", 0)
    return bench_works.count(shape) - idle * expert * shape["num_hidden_layers"]


def sampling_seconds(
    cfg: Config, shape: dict, gpus: int, card: Card, plan: memory_plan.Plan, lengths: Lengths, answers: int
) -> float:
    """Seconds until all engines together have given so many answers."""
    tp = cfg.rollout.tp
    weights = 2 * bench_works.count(shape) / tp
    kv_heads = max(shape["num_key_value_heads"] / tp, 1)
    token = 4 * shape["num_hidden_layers"] * kv_heads * shape["head_dim"]
    mine = math.ceil(answers * tp / gpus)
    room = max(plan.sampling.tokens // (lengths.prompt + lengths.answer), 1)
    at_once = min(mine, room, memory_formulas.most_sequences(cfg, plan.gpu))
    reading = READ_SHARE * card.bandwidth
    computing = DECODE_MFU * card.flops * tp
    cache = at_once * (lengths.prompt + lengths.answer / 2) * token
    full_step = (weights + cache) / reading + 2 * active_weights(shape) * at_once / computing + DECODE_STEP_S
    longest = min(TAIL * lengths.answer, cfg.rollout.max_new_tokens)
    tail = (longest - lengths.answer) * (weights / reading + DECODE_STEP_S)
    return mine / at_once * lengths.answer * full_step + tail


def pass_seconds(shape: dict, tokens: float, gpus: int, card: Card, mfu: float, flops_a_weight: int = 2) -> float:
    """Seconds of a pass over so many tokens, on all GPUs."""
    return flops_a_weight * active_weights(shape) * tokens / (gpus * mfu * card.flops)


def update_seconds(cfg: Config, shape: dict, gpus: int, card: Card) -> float:
    """Seconds of Adam's step."""
    trained = bench_works.count(shape)
    if cfg.lora.rank:
        trained = 0  # adapters: nothing to speak of
    local = min(memory_plan.MACHINE_GPUS, gpus)
    if cfg.megatron.get("optimizer_cpu_offload"):
        machines = gpus / local
        return 28 * trained / machines / HOST_BYTES_S + 6 * trained / gpus / BUS_BYTES_S
    seconds = 28 * trained / gpus / card.bandwidth
    if cfg.train.offload == "optimizer":
        seconds += 24 * trained / gpus / BUS_BYTES_S
    return seconds


def plan_seconds(
    cfg: Config, shape: dict, teacher: dict | None, gpus: int, card: Card, plan: memory_plan.Plan, lengths: Lengths
) -> dict[str, float]:
    """{phase: seconds} of a step."""
    r, t = cfg.rollout, cfg.train
    answers = r.prompts_per_step * r.group_size
    tokens = answers * (lengths.prompt + lengths.answer)
    rounds = 1.5 if cfg.algo.max_rounds > 1 else 1.0  # half of the groups have equal rewards
    seconds = {"sample": sampling_seconds(cfg, shape, gpus, card, plan, lengths, int(answers * rounds))}
    updates = t.updates_per_step * t.epochs_per_step
    passes = int(updates > 1 or teacher is not None) + int(cfg.algo.kl_coef > 0)
    seconds["log-probs"] = passes * pass_seconds(shape, tokens, gpus, card, SCORE_MFU)
    if teacher is not None:
        seconds["log-probs"] += pass_seconds(teacher, tokens, gpus, card, SCORE_MFU)
    flops = 6
    if cfg.megatron.get("recompute_granularity") == "full":
        flops = 8
    if cfg.lora.rank:
        flops -= 2  # no gradient of a weight
    mfu = TRAIN_MFU["experts" if "num_experts" in shape else "dense"]
    train = pass_seconds(shape, tokens * t.epochs_per_step, gpus, card, mfu, flops)
    rows = tokens / updates / run_plan.replica_count(cfg, gpus) / t.max_tokens_per_micro_batch
    train /= 1 - bubble(math.ceil(rows), cfg.parallel)
    seconds["train"] = train + updates * update_seconds(cfg, shape, gpus, card)
    seconds["push"] = 2 * bench_works.count(shape) / PUSH_BYTES_S
    seconds["rest"] = REST_S
    return seconds


def evaluation_seconds(
    cfg: Config, shape: dict, gpus: int, card: Card, plan: memory_plan.Plan, lengths: Lengths, prompts: int
) -> float:
    """Seconds of one evaluation of so many prompts."""
    return sampling_seconds(cfg, shape, gpus, card, plan, lengths, prompts * cfg.eval.samples)
