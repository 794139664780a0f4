"""Run vLLM with the trainer on a model of one kind: pushes, sleep, log-probs, seeds. See checks.py."""

import sys
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

import megatron_bridge as bridge
import train_grpo
from config import Config, TrainingError
from rollout import Engine
from support.base import ranks
from support.check import checks
from support.engine.push_check import moved_tensors
from support.model.attention import use_flash_attention_3
from support.proof.push_source import read_shards
from tools.gpu_checks import worker

GPU = torch.cuda.device_count() > 0
CYCLES = 20 if GPU else 2  # per sleep level; memory growth is measured from the third on
REQUESTS, ANSWER = (256, 128) if GPU else (8, 16)


@dataclass
class Pair:
    """vLLM and the trainer on this rank, with measurements."""

    cfg: Config
    engine: Engine
    model: list
    beside: float  # GiB in use on the GPU without vLLM
    proven: list[float] = field(default_factory=list)  # share of vLLM's weights proven equal, for each push
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (mean, largest)


def held_gib() -> float:
    """Return the GiB of this GPU that all processes hold; 0 without a GPU."""
    if not GPU:
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def measure_seconds(action) -> float:
    """Return the seconds that an action takes, until the GPU has finished it."""
    held_gib()
    began = time.perf_counter()
    action()
    held_gib()
    return time.perf_counter() - began


def make_prompts(pair: Pair, number: int) -> list[list[int]]:
    """Return prompts of random token ids, different on each engine."""
    rng = np.random.default_rng(dist.get_rank() // pair.cfg.rollout.tp)
    return rng.integers(2, worker.VOCABULARY, (number, worker.PROMPT)).tolist()


def push(pair: Pair) -> None:
    """Change all weights and push them. Raises TrainingError if vLLM does not hold them afterwards."""
    for parameter in (p for chunk in pair.model for p in chunk.parameters()):
        parameter.data.mul_(0.98 if len(pair.proven) % 2 else 1.02)
    pair.engine.load_weights(bridge.hf_weights(pair.model), partial(read_shards, pair.model))
    pair.proven.append(pair.engine.push_check.metrics["sync/checked"])


def sample_answers(pair: Pair) -> list[train_grpo.Sample]:
    """Return a few answers of this rank's engine."""
    asked = make_prompts(pair, 8)
    made = []
    answers = dict(pair.engine.generate(asked, list(range(8)), 2, pair.cfg.rollout, ANSWER))
    for number, completions in answers.items():
        for c in completions:
            made.append(train_grpo.Sample(number, asked[number], c.ids, c.logps, c.finished, "", ""))
    return made


def add_gap(pair: Pair, samples: list[train_grpo.Sample]) -> None:
    """Add to `pair.gaps` the log-prob gap between vLLM and the trainer, which have the same weights."""
    batch = train_grpo.flatten([sample for part in ranks.gather(samples) for sample in part])
    gap = (train_grpo.score(pair.model, batch, pair.cfg) - batch.rollout_logp)[batch.mask].abs()
    pair.gaps.append((gap.mean().item(), gap.max().item()))


def run_cycle(pair: Pair) -> dict:
    """Wake, push, sample, sleep. Returns GiB held "awake" and "asleep", "seconds" of wake and sleep, "samples"."""
    taken = measure_seconds(partial(pair.engine.wake, "weights"))
    push(pair)
    taken += measure_seconds(partial(pair.engine.wake, "kv_cache"))
    samples, awake = sample_answers(pair), held_gib()
    taken += measure_seconds(pair.engine.sleep)
    return {"awake": awake, "asleep": held_gib(), "seconds": taken, "samples": samples}


def measure_sleep(pair: Pair, level: int, cycles: int, record: worker.Record | None) -> None:
    """Run cycles at this sleep level and, with `record`, record the GPU memory that they leave."""
    pair.engine.sleep_level = level
    found = [run_cycle(pair) for _ in range(cycles)]
    add_gap(pair, found[-1]["samples"])
    if not (record and GPU):
        return
    awake, held, taken = ([one[what] for one in found] for what in ("awake", "asleep", "seconds"))
    name = f"sleep level {level}:"
    grown = f"held asleep: {held[2]:.2f} → {held[-1]:.2f} GiB"
    record(f"{name} growth over 20 steps", max(ranks.gather(held[-1] - held[2])), grown)
    record(f"{name} left of vLLM", max(ranks.gather(held[-1] - pair.beside)), "on top of the trainer")
    record(f"{name} sleep and wake", max(ranks.gather(median(taken))), f"the longest {max(taken):.2f} s")
    if level == 2:
        share = pair.cfg.rollout.gpu_memory_utilization * torch.cuda.mem_get_info()[1] / 2**30
        used = max(ranks.gather(max(awake) - pair.beside))
        record("vLLM awake", used / share, f"{used:.1f} GiB of {share:.1f}")


def tensor_places(model: torch.nn.Module) -> dict[str, int]:
    """Return {name: address} of the tensors on the GPU that vLLM's modules and their kernels hold; without one, all."""
    found, seen = {}, set()

    def visit(owner, name: str, depth: int) -> None:
        if torch.is_tensor(owner):
            if owner.is_cuda or not GPU:
                found[name] = owner.data_ptr()
        elif isinstance(owner, (list, tuple)):
            for number, value in enumerate(owner):
                visit(value, f"{name}.{number}", depth)
        elif isinstance(owner, dict):
            for key, value in owner.items():
                visit(value, f"{name}.{key}", depth)
        elif depth and id(owner) not in seen and type(owner).__module__.startswith("vllm."):
            seen.add(id(owner))
            for key, value in getattr(owner, "__dict__", {}).items():
                visit(value, f"{name}.{key}", depth - 1)

    for path, module in model.named_modules():
        seen.add(id(module))
        for key, value in vars(module).items():
            if key != "_modules":
                visit(value, f"{path}.{key}", 3)
    return found


def greedy_answers(pair: Pair) -> list[tuple[list[int], list[float]]]:
    """Return the ids and log-probs of a few greedy answers of this rank's engine."""
    greedy = SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1)
    answers = dict(pair.engine.generate(make_prompts(pair, 8), list(range(8)), 1, greedy, ANSWER))
    return [(answers[number][0].ids, answers[number][0].logps) for number in sorted(answers)]


def check_same_push(pair: Pair, kind: str, record: worker.Record) -> None:
    """Push the same weights twice at both sleep levels: no tensor of vLLM moves, and greedy answers stay the same."""
    moved, differ = set(), 0
    first = None
    for level in (2, 2, 1, 1):
        pair.engine.sleep_level = level
        pair.engine.wake("weights")
        (before,) = pair.engine.llm.apply_model(tensor_places)
        pair.engine.load_weights(bridge.hf_weights(pair.model), partial(read_shards, pair.model))
        (after,) = pair.engine.llm.apply_model(tensor_places)
        moved.update(moved_tensors(before, after))
        pair.engine.wake("kv_cache")
        answers = greedy_answers(pair)
        first = first or answers
        differ += sum(a != b for a, b in zip(first, answers, strict=True))
        pair.engine.sleep()
    everywhere = ranks.gather((sorted(moved), differ))
    names = sorted({name for found, _ in everywhere for name in found})
    record(f"push, {kind}: tensors moved", len(names), ", ".join(names[:4]))
    record(f"push, {kind}: greedy answers", sum(found for _, found in everywhere), "differ after the same push")


def check_lost_tensor(pair: Pair, record: worker.Record) -> None:
    """Check that a push that loses one tensor raises. vLLM's weights are wrong afterwards."""
    rpc = pair.engine.llm.collective_rpc
    lost = "model.layers.1.mlp.down_proj.weight"

    def lossy(method, *args, kwargs=None, **others):
        if method == "reload_weights":
            weights = kwargs["weights_iterator"]
            kwargs = {"weights_iterator": ((name, tensor) for name, tensor in weights if name != lost)}
        return rpc(method, *args, kwargs=kwargs, **others)

    pair.engine.llm.collective_rpc = lossy
    pair.engine.wake("weights")
    try:
        push(pair)
    except (TrainingError, RuntimeError, ValueError) as error:  # ours, or vLLM's own
        record("a tensor lost in a push", 1, str(error)[:200])
    else:
        record("a tensor lost in a push", 0, f"{lost} was left out, and no check failed")


def measure_seeded_sampling(pair: Pair, record: worker.Record) -> None:
    """Compare sampling with one seed per prompt and without seeds, in turns."""
    pair.engine.wake("weights")
    push(pair)
    pair.engine.wake("kv_cache")
    asked = make_prompts(pair, REQUESTS)
    rates = {True: [], False: []}
    for turn in range(8):
        with_seeds = turn % 2 == 0
        seeds = [1000 * turn + i if with_seeds else None for i in range(REQUESTS)]
        began = time.perf_counter()
        answers = list(pair.engine.generate(asked, seeds, 1, pair.cfg.rollout, ANSWER))
        tokens = sum(len(c.ids) for _, completions in answers for c in completions)
        rates[with_seeds].append(tokens / (time.perf_counter() - began))
    with_seeds, without = (median(rates[kind][1:]) for kind in (True, False))  # the first of each warms up
    share = min(ranks.gather(with_seeds / without))
    record(
        "seeded sampling", share, f"{with_seeds:.0f} tokens/s, without seeds {without:.0f}, {REQUESTS} requests at once"
    )
    pair.engine.sleep()


def overrides(kind: str) -> list[str]:
    """Return what the configuration of the check changes. CUDA graphs are captured wherever vLLM is sharded."""
    layout = worker.layout(kind)
    changed = [
        *layout, f"rollout.max_new_tokens={ANSWER}", "train.max_tokens_per_micro_batch=2048",
        f"rollout.prompts_per_step={REQUESTS}", "rollout.group_size=2",
    ]  # fmt: skip
    if kind == "dense" and "rollout.tp=2" not in layout:  # a faster start; gqa has graphs on one GPU
        changed.append("rollout.vllm.enforce_eager=true")
    return changed


def check_engine(kind: str, record: worker.Record) -> None:
    """Run all measurements for gqa, only pushes and log-probs for the other kinds."""
    ranks.join_ranks(600)
    path = worker.make_model(kind)
    cfg = worker.config(path, *overrides(kind))
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    ranks.on_any_rank(False)  # makes NCCL allocate its memory
    before = held_gib()
    vllm = Engine(str(path), cfg.model, cfg.rollout, checks.longest_sample(cfg))
    vllm.sampling_params = partial(vllm.sampling_params, ignore_eos=True)  # answers of one length
    asleep = held_gib()
    use_flash_attention_3(torch.bfloat16)
    model = bridge.build_model(str(path), cfg.parallel, torch.bfloat16, cfg.megatron)
    pair = Pair(cfg, vllm, model, before + held_gib() - asleep)
    vllm.wake("weights")
    vllm.load_weights(bridge.hf_weights(model))  # the weights on disk, the reference of the first push
    vllm.wake("kv_cache")
    vllm.sleep()
    thorough = kind == "gqa"
    for level in (2, 1):
        measure_sleep(pair, level, CYCLES if thorough else 3, record if thorough else None)
    check_same_push(pair, kind, record)
    record(f"push, {kind}", min(pair.proven), f"in each of {len(pair.proven)}; {' '.join(worker.layout(kind))}")
    mean, largest = (max(values) for values in zip(*pair.gaps, strict=True))
    record(f"log-prob gap, {kind}", mean, f"largest of a token {largest:.2g}")
    if thorough:
        measure_seeded_sampling(pair, record)
        check_lost_tensor(pair, record)


if __name__ == "__main__":
    sys.exit(worker.main({kind: partial(check_engine, kind) for kind in worker.MODELS}))
