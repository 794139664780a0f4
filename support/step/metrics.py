"""What is measured of a step and of an evaluation: the metrics of docs/metrics.md."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import megatron_bridge as bridge
from config import Config, EvalConfig
from support.base import ranks
from support.step import schedule, throughput
from support.step.records import Batch, Collected, Sample

# ---------------------------------------------------------------- what the updates report


def gap_report(difference_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over the response tokens, and the largest gap, for logp_gap/*, mismatch/ess and GapCheck; part of
    grpo_loss's report.

    `difference_T`: the trainer's log-probs minus vLLM's [T]; mask [T]. The gap is |difference|, w = exp(difference),
    and the k3 of vLLM against the trainer w - difference - 1, at most 10.
    """
    gap_T = (difference_T * mask_T).abs()
    log_w_T = (difference_T * mask_T).clamp(-20, 20)
    w_T = log_w_T.exp() * mask_T
    k3_T = (log_w_T.expm1() - log_w_T).clamp(max=10)
    report = {"gap": gap_T.sum(), "gap_max": gap_T.max(), "gap_k3": k3_T @ mask_T, "w": w_T.sum(), "w2": w_T @ w_T}
    for bound in (0.01, 0.1, 1):
        report[f"gap_above_{bound:g}"] = (gap_T > bound).sum()
    return report


def add_up(reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The reports of grpo_loss, one a micro-batch, reduced over the micro-batches of all ranks; same on every rank.

    Ranks that report nothing, such as those of earlier pipeline stages, learn the names from the ranks that do.
    """
    own = {}
    if bridge.reports_loss():
        names = list(reports[0])
        rows = torch.stack([torch.stack([report[name] for name in names]) for report in reports])  # one copy to the CPU
        own = {name: reduce_report(name, values) for name, values in zip(names, rows.T.tolist(), strict=True)}
    reporting = [report for report in ranks.gather(own) if report]
    return {name: reduce_report(name, [report[name] for report in reporting]) for name in reporting[0]}


def reduce_report(name: str, values: list[float]) -> float:
    """The maximum of the values if the name ends in "_max", else their sum; NaN if one is NaN."""
    if name.endswith("_max"):
        return float(np.max(values))
    return sum(values)


@dataclasses.dataclass
class StepRecord:
    """What a training step measured; the same on every rank but for `seconds` and the values of measure_rows."""

    step: int
    collected: Collected
    reports: list[dict[str, float]]  # of each update
    seconds: dict[str, float]  # of each phase, and "step"


def compared_updates(cfg: Config) -> int:
    """In how many updates of a step, from the first, the log-probs of trainer and vLLM are compared.

    A comparison needs the trainer's log-probs under the weights that vLLM sampled with. With algo.old_logp=trainer all
    updates have them as old log-probs, and those of one epoch see each token once. Else only the first update has them.
    """
    return cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1


# ---------------------------------------------------------------- the metrics of a step

PHASES = ("wait", "rollout", "reward", "gather", "sleep", "logprob", "train", "sync", "save", "other", "step")


def summarize(record: StepRecord, batch: Batch, model: list, cfg: Config) -> dict[str, float | int | None]:
    """The metrics of a step, named as in docs/metrics.md; None where one does not apply. `cfg`: as the step used it."""
    first = record.reports[0]
    numbers = {"step": record.step}
    numbers |= reward_metrics(record)
    numbers |= loss_metrics(record.reports, batch)
    numbers |= mismatch_metrics(record.reports[: compared_updates(cfg)])
    if cfg.algo.replay_routes:
        numbers |= route_metrics(record.collected.samples, first)
    else:
        numbers |= dict.fromkeys(ROUTE_METRICS)
    numbers["entropy_frac"] = numbers["entropy"] / math.log(model[0].hf_config.vocab_size)
    numbers["advantage/nonzero_frac"] = credited_share(batch)
    numbers["grad_norm"] = first["grad_norm"]
    numbers["moe/load"] = None
    if model[0].config.num_moe_experts:
        numbers |= load_metrics(expert_load(model))
    numbers["lr"] = cfg.train.lr
    if any(course for _, course in cfg.schedule):
        numbers |= schedule.schedule_metrics(cfg)
    numbers |= token_metrics(record.collected.samples, has_turns=cfg.rollout.turns is not None)
    numbers |= time_metrics(record)
    numbers |= row_metrics(record.reports)
    numbers |= throughput.speed_metrics(record.collected.samples, batch, model[0].hf_config, cfg, record.seconds)
    applied = [math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in record.reports]
    numbers["update/applied"] = applied.count(True)
    numbers["update/skipped"] = applied.count(False)
    return numbers


def reward_metrics(record: StepRecord) -> dict[str, float]:
    """Rewards of all samples and of each source, and how many groups were sampled and trained on."""
    reward_N = np.array([s.reward for s in record.collected.samples])
    rewards = rewards_by_group(record.collected.samples)
    functions = {"mean": mean_reward, "max": best_reward, **FAILURES}
    return {
        "reward/mean": reward_N.mean(),
        "reward/std": reward_N.std(),
        **by_source(record.collected.samples, "reward", functions),
        "groups/zero_std_frac": np.mean([max(group) == min(group) for group in rewards.values()]),
        "groups/sampled": len(rewards),
        "groups/trained": len({s.group for s in record.collected.trained}),
        "groups/rounds": record.collected.rounds,
    }


def loss_metrics(reports: list[dict[str, float]], batch: Batch) -> dict[str, float | None]:
    """Loss, KL and entropy of the first update, and the clipped share of all; KLs are None without their model."""
    first = reports[:1]
    kl = dict.fromkeys(("kl/ref", "kl/k1", "kl/k2", "kl/teacher"))
    if batch.ref_logp is not None:
        kl["kl/ref"] = report_mean("k3", first)
        kl["kl/k1"] = report_mean("k1", first)
        kl["kl/k2"] = report_mean("k2", first)
    if batch.teacher_logp is not None:
        kl["kl/teacher"] = teacher_kl(batch)
    return {
        "loss/total": report_mean("loss", first, over="trained"),
        "loss/policy": report_mean("policy", first, over="trained"),
        **kl,
        "entropy": report_mean("entropy", first),
        "ratio/clip_frac": report_mean("clipped", reports),
    }


def mismatch_metrics(compared: list[dict[str, float]]) -> dict[str, float]:
    """How far trainer and vLLM disagree, over the updates in `compared` (compared_updates)."""
    w = sum(r["w"] for r in compared)
    w2 = sum(r["w2"] for r in compared)
    tokens = sum(r["tokens"] for r in compared)
    return {
        "logp_gap/mean": report_mean("gap", compared),
        "logp_gap/max": max(r["gap_max"] for r in compared),
        "logp_gap/above_0.01": report_mean("gap_above_0.01", compared),
        "logp_gap/above_0.1": report_mean("gap_above_0.1", compared),
        "logp_gap/above_1": report_mean("gap_above_1", compared),
        "mismatch/k3": report_mean("gap_k3", compared),
        "mismatch/ess": w**2 / (w2 or 1) / max(tokens, 1),  # effective sample size over the number of tokens
        "mismatch/cut_frac": report_mean("outside", compared),
    }


def token_metrics(samples: list[Sample], has_turns: bool) -> dict[str, float | None]:
    """Lengths of prompts and responses in tokens; those of an environment are None without rollout.turns."""
    length_N = model_lengths(samples)
    environment = turns = None
    if has_turns:
        environment = np.mean([sum(s.turns[1::2]) for s in samples])
        turns = np.mean([len(s.turns[::2]) for s in samples])
    return {
        "tokens/prompt_mean": np.mean([len(s.prompt_ids) for s in samples]),
        "tokens/response_mean": length_N.mean(),
        "tokens/response_max": length_N.max(),
        "tokens/environment_mean": environment,
        "tokens/truncated_frac": truncated_share(samples),
        "turns/mean": turns,
    }


def time_metrics(record: StepRecord) -> dict[str, float]:
    """Seconds of the phases, throughput, use of the micro-batches, and the shares of the step in which ranks idle."""
    seconds = record.seconds
    bubble = np.mean([r["bubble"] for r in record.reports])
    idle = idle_seconds(record.collected.rank_seconds, bubble * seconds.get("train", 0.0))
    numbers = {f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES}
    numbers["time/other_frac"] = numbers["time/other"] / seconds["step"]
    numbers["speed/response_tokens_per_s"] = model_lengths(record.collected.samples).sum() / seconds["step"]
    numbers["speed/samples_per_s"] = len(record.collected.samples) / seconds["step"]
    numbers["pack/fill"] = np.mean([r["fill"] for r in record.reports])
    numbers["pack/attention_waste"] = np.mean([r["attention_waste"] for r in record.reports])
    numbers["pipeline/bubble"] = bubble
    numbers["idle_frac"] = sum(idle.values()) / seconds["step"]
    for cause, lost in idle.items():
        numbers[f"idle/{cause}"] = lost / seconds["step"]
    return numbers


def row_metrics(reports: list[dict[str, float]]) -> dict[str, float]:
    """How many micro-batches a replica has, and the share of tokens in the rows of all ranks; every rank calls this."""
    own = [sum(report[name] for report in reports) for name in ("real", "positions")]
    real, positions = np.sum(ranks.gather(own), 0)
    return {
        "pack/micro_batches": sum(report["micro_batches"] for report in reports),
        "pack/real_frac": real / max(positions, 1),
    }


def report_mean(name: str, reports: list[dict[str, float]], over: str = "tokens") -> float:
    """The sum of the entry `name` over the reports of updates, divided by that of the entry `over`, a count."""
    count = sum(r[over] for r in reports)
    return sum(r[name] for r in reports) / max(count, 1)


def credited_share(batch: Batch) -> float:
    """The share of the trained tokens whose advantage is not 0; 0 where no token is trained."""
    credited_F = (batch.advantages != 0) & batch.trained
    return (credited_F.sum() / batch.trained.sum().clamp(min=1)).item()


def teacher_kl(batch: Batch) -> float:
    """The k1 estimate of KL(policy ‖ teacher) before the updates, mean over the trained tokens."""
    difference_F = (batch.old_logp - batch.teacher_logp) * batch.trained
    mean = difference_F.double().sum() / batch.trained.sum().clamp(min=1)
    return mean.item()


ROUTE_METRICS = ("routes/differ_frac", "routes/missing_frac")


def route_metrics(samples: list[Sample], first: dict) -> dict[str, float]:
    """The ROUTE_METRICS of a step. `first`: the report of its first update, which uses the weights of vLLM."""
    positions = sum(s.positions for s in samples)
    differ = first["routes_differ"] / max(first["routes"], 1)
    missing = 1 - sum(len(s.routes) for s in samples) / positions
    return dict(zip(ROUTE_METRICS, (differ, missing), strict=True))


def expert_load(model: list) -> list[float]:
    """Load of each layer's busiest expert, in tokens, divided by the mean over its experts; the same on every rank.

    Counts the response tokens of the training passes since the last call, then starts at 0.
    """
    hf = model[0].hf_config
    load = torch.zeros(hf.num_hidden_layers, bridge.num_experts(hf), device=bridge.device())  # [layers, E]
    for chunk in map(bridge.unwrap_model, model):
        for layer in chunk.decoder.layers:
            load[layer.layer_number - 1] += layer.mlp.router.load
            layer.mlp.router.load = torch.zeros_like(layer.mlp.router.load)
    dist.all_reduce(load)  # tp and cp split the tokens, dp the samples, pp the layers
    busiest = load.amax(1) / load.mean(1)
    return busiest.tolist()


def load_metrics(loads: list[float]) -> dict[str, float]:
    """The metrics of `expert_load`."""
    return {"moe/load": max(loads)} | {f"moe/load/layer_{layer:02d}": load for layer, load in enumerate(loads)}


def idle_seconds(rank_seconds: list[dict[str, float]], bubble: float) -> dict[str, float]:
    """{cause: seconds, mean over ranks} in which ranks wait for others; `rank_seconds`: those of each rank by phase.

    Until the slowest rank has sampled and graded, the others wait: for its generation while it samples, then for its
    grading. "save" is the wait at the start of the step, for ranks that still save, evaluate or log.
    """
    rollout_R = np.array([seconds.get("rollout", 0.0) for seconds in rank_seconds])
    work_R = rollout_R + np.array([seconds.get("reward", 0.0) for seconds in rank_seconds])
    slowest = work_R.argmax()
    sampled_R = np.maximum(rollout_R[slowest], work_R)  # until when a rank waits for generation, if it waits
    return {
        "generation": np.mean(sampled_R - work_R),
        "grading": np.mean(work_R[slowest] - sampled_R),
        "bubble": bubble,
        "save": np.mean([seconds.get("wait", 0.0) for seconds in rank_seconds]),
    }


# ---------------------------------------------------------------- samples, and evaluations


def rewards_by_group(samples: list[Sample]) -> dict[int, list[float]]:
    """The rewards of each group's answers."""
    rewards = {s.group: [] for s in samples}
    for s in samples:
        rewards[s.group].append(s.reward)
    return rewards


def model_lengths(samples: list[Sample]) -> np.ndarray:
    """Tokens of each response that the model sampled, [N]; those of an environment do not count."""
    return np.array([sum(s.turns[::2]) for s in samples])


def mean_reward(samples: list[Sample]) -> float:
    return np.mean([s.reward for s in samples])


def best_reward(samples: list[Sample]) -> float:
    return max(s.reward for s in samples)


def truncated_share(samples: list[Sample]) -> float:
    return np.mean([not s.finished for s in samples])


def graded_share(samples: list[Sample], status: str) -> float:
    """The share of samples with this status of grading."""
    return np.mean([s.graded == status for s in samples])


FAILURES = {
    "timeout_frac": partial(graded_share, status="timeout"),
    "error_frac": partial(graded_share, status="error"),
}


def by_source(
    samples: list[Sample], prefix: str, functions: dict[str, Callable[[list[Sample]], float]]
) -> dict[str, float]:
    """{"prefix/source/name": value} of each {name: function of the samples of one source}."""
    found = {}
    for source in sorted({s.source for s in samples}):
        own = [s for s in samples if s.source == source]
        for name, function in functions.items():
            found[f"{prefix}/{source}/{name}"] = function(own)
    return found


def evaluation(samples: list[Sample], options: EvalConfig) -> dict[str, float]:
    """Metrics of an evaluation, by source.

    They are avg@n, the mean reward over n answers; pass@k for n and for each power of two below it; length, truncation
    and failures of grading. Where a reward has several parts, part/NAME is the share of answers that have some of it.
    """
    n = options.samples
    powers = {2**i for i in range(n.bit_length())}
    functions = {f"avg@{n}": mean_reward}
    for k in sorted(powers | {n}):
        functions[f"pass@{k}"] = partial(mean_pass_at, k=k, options=options)
    functions["response_mean"] = mean_length
    functions["truncated_frac"] = truncated_share
    found = by_source(samples, "eval", functions | FAILURES)
    for source in {s.source for s in samples}:
        own = [s for s in samples if s.source == source]
        names = {name for s in own for name in s.reward_parts}
        if len(names) > 1:
            shares = {f"part/{name}": partial(part_share, part=name) for name in sorted(names)}
            found |= by_source(own, "eval", shares)
    return found


def part_share(samples: list[Sample], part: str) -> float:
    """The share of samples in which this part of the reward is above 0."""
    return np.mean([s.reward_parts.get(part, 0.0) > 0 for s in samples])


def mean_length(samples: list[Sample]) -> float:
    return np.mean(model_lengths(samples))


def mean_pass_at(samples: list[Sample], k: int, options: EvalConfig) -> float:
    """pass@k, mean over the prompts of the samples; an answer passes at eval.pass_reward."""
    rewards = rewards_by_group(samples).values()
    passed = [sum(reward >= options.pass_reward for reward in group) for group in rewards]
    return np.mean([pass_at_k(options.samples, count, k) for count in passed])


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Probability that at least one of k answers drawn from n passes, of which `passed` do.

    It is 1 - C(n - passed, k) / C(n, k), an unbiased estimate for k fresh answers. Source: Chen et al.,
    arXiv 2107.03374, eq. 1.
    """
    return 1 - math.comb(n - passed, k) / math.comb(n, k)
