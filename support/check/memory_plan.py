"""What each phase of a step will take of a GPU, and of the host, told before anything is built.

What a rank holds is counted to the byte (support/check/memory_count.py); transient memory follows from the formulas of
support/check/memory_formulas.py; RESERVE stands for what has no formula. All sizes are bytes until they are printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
import yaml

import megatron_bridge as bridge
from config import Config, UserError
from support.base import remedies
from support.base.memory import GIB
from support.base.read_config import override
from support.check import checks
from support.check.memory_count import PHASES, Held, costs, count, host_bytes, replica_ranks
from support.check.memory_formulas import (
    LOGIT_SCORE,
    LOGIT_TRAIN,
    Sampling,
    activation_bytes,
    head_bytes,
    layer_bytes,
    plan_sampling,
)
from support.check.run_plan import replica_count, rows_of_an_update

GB = 10**9
GPU_GB = 80.0  # where there is no GPU to ask
RESERVE = 0.1  # of a GPU, for CUDA, NCCL and cuBLAS, vLLM's CUDA graphs and fragments: assumed, not measured
TOLERANCE = 0.15  # by which a step may miss the plan, as in tools/gpu_check.py
TRAIN = remedies.MEMORY["train"]
MACHINE_GPUS = 8  # of one machine, for the host's memory
SHARE_OF_VLLM = ("rollout.gpu_memory_utilization", "rollout.vllm.max_num_seqs")  # the plan solves for the first


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
    _, rows = rows_of_an_update(cfg, replica_count(cfg, world_size))
    table = {stage: stage_phases(hf, cfg, world_size, stage, held[stage], rows, vllm, gpu) for stage in stages}
    largest = {phase: max(stages, key=lambda stage: total(table[stage][phase])) for phase in table[0]}
    phases = {phase: table[stage][phase] for phase, stage in largest.items()}
    teacher = max(each.gpu.get("teacher", 0) for each in held.values()) // bridge.DTYPES[cfg.model.dtype].itemsize
    host = host_bytes(cfg, weights, world_size, on_gpu=True, teacher=teacher * replica_ranks(cfg))
    if cfg.rollout.sleep_level == 1:
        host += vllm.tables
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
    # As Megatron fills its buffers, weights are there twice.
    filling = {"weights": 2 * held.gpu["weights"] - held.frozen, "gradients": held.gpu["gradients"]}
    phases = {}
    phases["build"] = max(state["build"], filling, key=total)
    phases["rollout"] = state["rollout"] | {"vLLM": share}
    phases["logprob"] = state["logprob"] | scoring
    phases["train"] = max(state["train"] | backward, state["update"] | {"update": held.update}, key=total)
    phases["sync"] = state["sync"] | {"vLLM": vllm.weights + vllm.tables + vllm.loading, "bucket": held.push}
    phases["save"] = state["save"] | {"vLLM": share, "copies": max(4 * held.largest, held.export)}
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
            settings = (setting.partition("=") for setting in turn.split())
            yield {key: yaml.safe_load(value) for key, _, value in settings}
            continue
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        least = longest if "tokens" in name else 1
        yield {key: 2 * value if way == "up" else max(value // 2, least)}


def legal_levers(cfg: Config, world_size: int) -> Iterator[tuple[dict, Config]]:
    """(keys, configuration with them) of `levers`, where they change something and pass the checks."""
    for keys in levers(cfg):
        try:
            other = override(cfg, keys)
            checks.check_config(other, world_size)
            checks.check_model(other, other.model.path, other.rollout.tp)
        except (UserError, ValueError):
            continue
        if other != cfg:
            yield keys, other


def find_remedies(cfg: Config, world_size: int, found: Plan) -> list[str]:
    """What makes a plan fit, or smaller where it is largest, and by how much; what helps most first."""
    worst = max(found.phases, key=found.total)
    least = 0.0  # the share of vLLM that fits without a lever; one that needs a smaller share is no help
    lines = []
    for keys, other in [({}, cfg), *legal_levers(cfg, world_size)]:
        best = found if other is cfg else plan(other, world_size, found.gpu)
        if not best.fits and least < best.utilization < 1:
            share = {SHARE_OF_VLLM[0]: best.utilization}
            smaller = plan(override(other, share), world_size, found.gpu, best.held)
            if smaller.fits:
                best = smaller
                keys = keys | share
        if best.fits and other is cfg:
            least = found.utilization
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


def compare(found: Plan, metrics: dict[str, float | None]) -> str | None:
    """What to tell the user where training took another share of a GPU in a step with these metrics than planned.

    Measured is what is in use while vLLM sleeps, by all processes, and what training allocates on top of that.
    """
    free = metrics["mem/free_asleep_gb"]
    if free is None:
        return None
    above = metrics["mem/train_peak_gb"] - metrics["mem/logprob_gb"]
    measured = found.gpu - (free - above) * GIB
    planned = found.total("train")
    if abs(measured / planned - 1) <= TOLERANCE:
        return None
    text = f"training took {measured / GB:.1f} GB of a GPU of {found.gpu / GB:.1f}, the plan says {planned / GB:.1f}"
    if measured < planned:
        return f"{text}: unless later answers are longer, there is room, such as for train.max_tokens_per_micro_batch"
    return f"{text}: add the difference to plans of this model. If memory ends, {remedies.try_one_of(TRAIN.turn)}"


# ---------------------------------------------------------------- the command


def gpu_bytes(gb: float | None) -> int:
    """`gb`, or else the size of this machine's GPU, or else GPU_GB, in bytes. Raises UserError."""
    if gb is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if gb is not None and not 0 < gb < math.inf:
        raise UserError(f"--gpu-memory-gb={gb}: must be above 0")
    if gb is None:
        gb = GPU_GB
    return int(gb * GB)


def sum_line(parts: dict[str, int]) -> str:
    """The parts and their sum in GB, as "a 1.0 + b 2.0 = 3.0"; what rounds to nothing is left out."""
    terms = [f"{what} {value / GB:.1f}" for what, value in parts.items() if value >= GB / 20]
    return f"{' + '.join(terms)} = {total(parts) / GB:.1f}"


def describe(cfg: Config, world_size: int, found: Plan) -> str:
    """The plan in words, with warnings and remedies where it does not fit."""
    gpu, vllm = found.gpu, found.sampling
    p, r = cfg.parallel, cfg.rollout
    longest = checks.longest_sample(cfg)
    samples = r.prompts_per_step * r.group_size * r.tp // world_size
    local = min(MACHINE_GPUS, world_size)
    lines = [f"memory:  of a GPU of {gpu / GB:.1f} GB (10⁹ bytes), by phase"]
    for phase, parts in found.phases.items():
        where = f" on stage {found.stage[phase] + 1} of {p.pp}" if p.pp > 1 else ""
        lines.append(f"{phase:>8s} {sum_line(parts)}{where}")
    sizes = {"weights": vllm.weights, "tables": vllm.tables, "work": vllm.work, "cache": vllm.cache}
    share = " + ".join(f"{what} {size / GB:.1f}" for what, size in sizes.items())
    at_once = f"{vllm.sequences} samples of {longest} at once of the {samples} in a step"
    lines.append(f"    vLLM {share}: {vllm.tokens} tokens an engine, {at_once}")
    lines.append(f"    host {found.host / GB:.1f} a rank, {found.host * local / GB:.1f} with {local} on a machine")
    lines += [f"warning: {text}" for text in shortages(cfg, found)]
    if not found.fits:
        lines += [f"    {text}" for text in find_remedies(cfg, world_size, found)]
    return "\n".join(lines)


def shortages(cfg: Config, found: Plan) -> list[str]:
    """What of a plan does not fit; [] where all does."""
    over = {phase: found.total(phase) - found.gpu for phase in found.phases if found.total(phase) > found.gpu}
    texts = []
    if over:
        shorts = {phase: f"{value / GB:.1f}" if value >= GB / 10 else "less than 0.1" for phase, value in over.items()}
        what = ", ".join(f"{phase} by {short} GB" for phase, short in shorts.items())
        texts.append(f"the plan does not fit a GPU of {found.gpu / GB:.1f} GB: {what}")
    if found.sampling.sequences == 0:
        texts.append(f"vLLM's share of the GPU has no room for one sample of {checks.longest_sample(cfg)} tokens")
    return texts
