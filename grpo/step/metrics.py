"""What is measured of a step and of an evaluation: the metrics of docs/metrics.md."""

import math
import re

import numpy as np
import torch
import torch.distributed as dist

import megatron_bridge as bridge
from config import EvalConfig
from grpo.parts.base import ranks
from grpo.parts.base.memory import PHASES
from grpo.parts.model.gated_delta import linear_sizes
from grpo.step import schedule
from grpo.step.records import Batch, Collected, Sample

ROUNDING = 1e-9  # of a reward: parts of .7, .2 and .1 add up to 0.9999999999999999

# ---------------------------------------------------------------- what the updates report


def gap_report(difference_T, old_T, mask_T):
    """Sums over the response tokens, and the largest gap, for logp_gap/*, mismatch/ess and guard.

    `difference_T`: the trainer's log-probs minus vLLM's [T]; `old_T`: the old log-probs minus vLLM's; mask [T]. The gap
    is |difference|, w = exp(difference), and the k3 of vLLM against the trainer w - difference - 1, at most 10.
    """
    gap_T = (difference_T * mask_T).abs()
    log_w_T = (difference_T * mask_T).clamp(-20, 20)
    w_T = log_w_T.exp() * mask_T
    k3_T = (log_w_T.expm1() - log_w_T).clamp(max=10)
    report = {"gap": gap_T.sum(), "gap_max": gap_T.max(), "gap_k3": k3_T @ mask_T, "w": w_T.sum(), "w2": w_T @ w_T}
    report["old_gap_max"] = (old_T * mask_T).abs().max()
    for bound in (0.01, 0.1, 1):
        report[f"gap_above_{bound:g}"] = (gap_T > bound).sum()
    return report


def add_up(reports: list[dict[str, torch.Tensor]]):
    """The reports of grpo_loss, one a micro-batch, reduced over all ranks; ranks without any, as early stages, too."""
    own = []
    if bridge.reports_loss():
        names = list(reports[0])
        rows = torch.stack([torch.stack([report[name] for name in names]) for report in reports]).tolist()  # one copy
        own = [reduce_reports([dict(zip(names, row, strict=True)) for row in rows])]
    everywhere = ranks.gather(own)
    return reduce_reports([report for of_rank in everywhere for report in of_rank])


def reduce_reports(reports: list[dict[str, float]]):
    """Of each entry the maximum if its name ends in "_max", else the sum. NaN stays NaN."""
    reduced = {}
    for name in reports[0]:
        values = [report[name] for report in reports]
        reduced[name] = float(np.max(values)) if name.endswith("_max") else sum(values)
    return reduced


def compared_updates(cfg):
    """In how many updates of a step, from the first, the log-probs of trainer and vLLM are compared.

    A comparison needs the trainer's log-probs under the weights that vLLM sampled with. With algo.old_logp=trainer all
    updates have them as old log-probs, and the updates of one epoch see each token once. Else only the first update
    has them.
    """
    return cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1


# ---------------------------------------------------------------- the metrics of a step

# Metric → the entry of the updates' reports that it is the mean of. Over the response tokens of the first update:
REFERENCE = {"kl/ref": "k3", "kl/k1": "k1", "kl/k2": "k2", "kl/full": "ref_kl"}
TEACHER = {"kl/teacher": "teacher_kl", "entropy/teacher": "teacher_entropy"}  # with algo.teacher_kl=sampled: k1
# Over the response tokens of all updates in which trainer and vLLM are compared:
COMPARED = {
    "logp_gap/mean": "gap", "logp_gap/above_0.01": "gap_above_0.01", "logp_gap/above_0.1": "gap_above_0.1",
    "logp_gap/above_1": "gap_above_1", "mismatch/k3": "gap_k3", "mismatch/cut_frac": "outside",
}  # fmt: skip
# Over the updates:
UPDATES = {"pack/fill": "fill", "pack/attention_waste": "attention_waste", "pipeline/bubble": "bubble"}


def summarize(collected: Collected, reports: list[dict], seconds: dict, batch: Batch, model: list, cfg):
    """The metrics of a step, named as in docs/metrics.md; None where one does not apply.

    `cfg` is the configuration as the step used it. There is a report for each update, and `seconds` for each phase and
    for "step".
    """
    hf = model[0].hf_config
    numbers = {"lr": cfg.train.lr}
    numbers |= sample_metrics(collected, has_turns=cfg.rollout.turns is not None)
    numbers |= update_metrics(reports, batch, cfg)
    numbers["entropy_frac"] = numbers["entropy"] / math.log(hf.vocab_size)
    numbers |= time_metrics(collected, reports, seconds)
    numbers |= speed_metrics(collected.samples, reports, hf, cfg, seconds)

    # Of capabilities that may be off
    names = ("moe/load", "routes/differ_frac", "routes/missing_frac", "routes/prompt_differ_frac", "nucleus/size")
    numbers |= dict.fromkeys(names)
    if model[0].config.num_moe_experts:
        load = expert_load(model)
        numbers["moe/load"] = max(load)
        numbers |= {f"moe/load/layer_{layer:02d}": value for layer, value in enumerate(load)}
    if cfg.algo.replay_routes:
        numbers |= route_metrics(collected.samples, reports[0])
    if "nuclei" in batch.replay:
        numbers["nucleus/size"] = batch.replay["nuclei"].mean_size()
    for name, course in cfg.schedule:
        if course is not None:
            numbers[f"schedule/{name}"] = schedule.value_of(cfg, name)
    return numbers


def sample_metrics(collected, has_turns):
    """Rewards, also by source; groups; tokens of a sample, and of its environment with rollout.turns."""
    samples = collected.samples
    groups = {s.group for s in samples}
    reward_N = np.array([s.reward for s in samples])
    length_N = model_lengths(samples)

    numbers = {
        "reward/mean": reward_N.mean(),
        "reward/std": reward_N.std(),
        "groups/zero_std_frac": len(groups_of_equal_rewards(samples)) / len(groups),
        "groups/sampled": len(groups),
        "groups/trained": len({s.group for s in collected.kept}),
        "groups/rounds": collected.rounds,
        "tokens/prompt_mean": np.mean([len(s.prompt_ids) for s in samples]),
        "tokens/response_mean": length_N.mean(),
        "tokens/response_max": length_N.max(),
        "tokens/truncated_frac": np.mean([not s.finished for s in samples]),
        "tokens/environment_mean": None,
        "turns/mean": None,
    }

    if has_turns:
        numbers["tokens/environment_mean"] = np.mean([sum(s.turns[1::2]) for s in samples])
        numbers["turns/mean"] = np.mean([len(s.turns[::2]) for s in samples])

    for source, own in by_source(samples).items():
        numbers[f"reward/{source}/mean"] = np.mean([s.reward for s in own])
        numbers[f"reward/{source}/max"] = max(s.reward for s in own)
        numbers |= failures(own, f"reward/{source}")
    return numbers


def update_metrics(reports: list[dict[str, float]], batch, cfg):
    """Of the reports of a step's updates; KLs are None without their model. Every rank calls this."""
    first = reports[:1]
    compared = reports[: compared_updates(cfg)]
    trained = batch.loss_mask.sum().clamp(min=1)

    numbers = {"entropy": report_mean("entropy", first)}
    for metric, entry in (REFERENCE | TEACHER).items():
        numbers[metric] = report_mean(entry, first) if entry in reports[0] else None
    if batch.teacher_logp is not None:  # k1 of KL(policy ‖ teacher) before the updates
        difference_F = (batch.old_logp - batch.teacher_logp) * batch.loss_mask
        numbers["kl/teacher"] = (difference_F.double().sum() / trained).item()

    numbers |= {metric: report_mean(entry, compared) for metric, entry in COMPARED.items()}
    numbers["logp_gap/max"] = max(r["gap_max"] for r in compared)
    w = sum(r["w"] for r in compared)
    effective = w**2 / (sum(r["w2"] for r in compared) or 1)  # sample size
    numbers["mismatch/ess"] = effective / max(sum(r["tokens"] for r in compared), 1)

    numbers["loss/total"] = report_mean("loss", first, over="denominator")
    numbers["loss/policy"] = report_mean("policy", first, over="denominator")
    numbers["ratio/clip_frac"] = report_mean("clipped", reports)
    credited_F = (batch.advantages != 0) & batch.loss_mask
    numbers["advantage/nonzero_frac"] = (credited_F.sum() / trained).item()
    numbers["grad_norm"] = reports[0]["grad_norm"]

    numbers |= {metric: np.mean([r[entry] for r in reports]) for metric, entry in UPDATES.items()}
    numbers["pack/micro_batches"] = sum(r["micro_batches"] for r in reports)
    own = [sum(r[name] for r in reports) for name in ("real", "positions", "shared")]
    replicas = bridge.mpu.get_data_parallel_world_size()
    real, positions, shared = np.mean(ranks.gather(own), 0) * replicas  # in the rows of all replicas
    numbers["pack/real_frac"] = real / max(positions, 1)
    numbers["pack/prompt_tokens_saved"] = shared

    applied = sum(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in reports)
    numbers["update/applied"] = applied
    numbers["update/skipped"] = len(reports) - applied
    numbers["loss_scale"] = reports[-1]["loss_scale"]
    numbers["update/overflow"] = None
    if numbers["loss_scale"] is not None:
        numbers["update/overflow"] = sum(not math.isfinite(r["grad_norm"]) for r in reports if math.isfinite(r["loss"]))
    return numbers


def report_mean(name, reports: list[dict[str, float]], over="tokens"):
    """The sum of the entry `name` over the reports of updates, divided by the sum of the entry `over`, a count."""
    count = sum(r[over] for r in reports)
    return sum(r[name] for r in reports) / max(count, 1)


def route_metrics(samples, report):
    """Metrics of replayed routes. `report` is of the step's first update, which uses the weights of vLLM."""
    first = {}  # routes of the prompt in the first answer of each group
    unlike = 0
    for s in samples:
        own = s.trace.replay["routes"][: len(s.prompt_ids)]
        if not np.array_equal(own, first.setdefault(s.group, own)):
            unlike += 1
    routed = sum(len(s.trace.replay["routes"]) for s in samples)
    return {
        "routes/differ_frac": report_mean("routes_differ", [report], over="routes"),
        "routes/missing_frac": 1 - routed / sum(s.positions for s in samples),
        "routes/prompt_differ_frac": unlike / len(samples),
    }


def time_metrics(collected, reports, seconds):
    """Seconds of the phases, samples and tokens a second, and the shares of the step in which ranks idle.

    Until the slowest rank has sampled and graded, the others wait: for its generation while it samples, then for its
    grading. "save" is the wait at the start of the step, for ranks that still save, evaluate or log.
    """

    def of_ranks(phase):
        return np.array([own.get(phase, 0.0) for own in collected.rank_seconds])

    rollout_R = of_ranks("rollout")
    work_R = rollout_R + of_ranks("reward")
    slowest = work_R.argmax()
    sampled_R = np.maximum(rollout_R[slowest], work_R)  # until when a rank waits for generation, if it waits
    idle = {
        "generation": np.mean(sampled_R - work_R),
        "grading": np.mean(work_R[slowest] - sampled_R),
        "bubble": np.mean([r["bubble"] for r in reports]) * seconds.get("train", 0.0),
        "save": of_ranks("wait").mean(),
    }

    numbers = {f"time/{phase}": seconds.get(phase, 0.0) for phase in (*PHASES, "other", "step")}
    numbers["time/other_frac"] = numbers["time/other"] / seconds["step"]
    numbers["speed/response_tokens_per_s"] = model_lengths(collected.samples).sum() / seconds["step"]
    numbers["speed/samples_per_s"] = len(collected.samples) / seconds["step"]
    numbers["idle_frac"] = sum(idle.values()) / seconds["step"]
    without_gpu = sum(numbers[f"time/{phase}"] for phase in ("reward", "other", "save"))
    numbers["busy_frac"] = max(1 - numbers["idle_frac"] - without_gpu / seconds["step"], 0.0)
    return numbers | {f"idle/{cause}": lost / seconds["step"] for cause, lost in idle.items()}


def expert_load(model):
    """Tokens of each layer's busiest expert ÷ mean, in training passes since the last call; the same on every rank."""
    hf = model[0].hf_config
    load = torch.zeros(hf.num_hidden_layers, bridge.num_experts(hf), device=bridge.device())  # [layers, E]
    for chunk in map(bridge.unwrap_model, model):
        for layer in chunk.decoder.layers:
            load[layer.layer_number - 1] += layer.mlp.router.load
            layer.mlp.router.load = torch.zeros_like(layer.mlp.router.load)
    dist.all_reduce(load)  # tp and cp split the tokens, dp the samples, pp the layers
    return (load.amax(1) / load.mean(1)).tolist()


# ---------------------------------------------------------------- operations and bytes against seconds

# Words of a GPU's name → its dense rate in bf16 and fp16, 10¹² a second (NVIDIA's data sheets); the first that fits.
HALF_RATES = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H100": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 150, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def gpu_rate() -> float | None:
    """Operations a second of this rank's GPU in bf16 or fp16; None for an unknown GPU, or a slice of one."""
    name = torch.cuda.get_device_name()
    if " MIG " in name:
        return None
    return next((rate * 1e12 for words, rate in HALF_RATES.items() if re.search(rf"\b{words}\b", name)), None)


def matrix_weights(hf):
    """Weights of the matrices that a token meets, the output layer included."""
    h = hf.hidden_size
    linear, heads, keys, values = linear_sizes(hf)
    queries = (3 if linear else 2) * hf.num_attention_heads  # in and out, and their gates
    attention = h * bridge.head_dim(hf) * (queries + 2 * hf.num_key_value_heads)
    delta = h * (2 * keys + 3 * values + 2 * heads)  # q and k; v, z and the output; b and a
    if not getattr(hf, "num_experts_per_tok", None):
        block = 3 * h * hf.intermediate_size
    else:
        shared = getattr(hf, "shared_expert_intermediate_size", 0)
        experts = 3 * hf.num_experts_per_tok * bridge.expert_width(hf)
        block = h * (bridge.num_experts(hf) + experts + 3 * shared + (shared > 0))  # and its gate
    layers = hf.num_hidden_layers
    return (layers - linear) * attention + linear * delta + layers * block + hf.vocab_size * h


def train_flops(hf, tokens, attended):
    """Floating-point operations of forward and backward; recomputation does not count.

    6 for each of the `tokens` and each weight of a matrix that it meets; for each layer and each dimension of its heads
    6 for each of `attended`, twice the number of pairs of causal attention: s² of a sequence of s tokens. In layers of
    linear attention 6 · 4 for each of the `tokens` and each number of a state, which is decayed, read, written and read
    out, and 6 for each weight of the convolution, as in Megatron-LM: neither what chunks add, nor copies of a prompt.
    """
    linear, _, keys, values = linear_sizes(hf)
    width = (hf.num_hidden_layers - linear) * hf.num_attention_heads * bridge.head_dim(hf)
    met = matrix_weights(hf)
    if linear:
        met += linear * 4 * values * hf.linear_key_head_dim
        met += linear * (2 * keys + values) * hf.linear_conv_kernel_dim
    return 6.0 * met * tokens + 6.0 * width * attended


def speed_metrics(samples, reports, hf, cfg, seconds):
    """Rates of a step a rank, and its FLOPs utilisation, None without a known GPU; computed tokens of this replica."""
    size = dist.get_world_size() // bridge.mpu.get_data_parallel_world_size()  # ranks of a replica
    tokens, attended = (sum(report[name] for report in reports) / size for name in ("real", "attended"))
    numbers = {
        "speed/tokens_per_s_per_rank": sum(s.positions + 1 for s in samples) / dist.get_world_size() / seconds["step"],
        "speed/computed_tokens_per_s_per_rank": tokens / seconds["train"],
        "speed/mfu_train": None,
        "speed/mfu_step": None,
    }
    rate = gpu_rate() if torch.cuda.is_available() and cfg.model.dtype != "fp32" else None
    if rate is not None:
        flops = train_flops(hf, tokens, attended)
        numbers["speed/mfu_train"] = flops / seconds["train"] / rate
        numbers["speed/mfu_step"] = flops / seconds["step"] / rate
    return numbers


# ---------------------------------------------------------------- of samples, in training and in an evaluation


def rewards_by_group(samples: list[Sample]) -> dict[int, list[float]]:
    """The rewards of each group's answers."""
    rewards = {}
    for s in samples:
        rewards.setdefault(s.group, []).append(s.reward)
    return rewards


def groups_of_equal_rewards(samples: list[Sample]) -> set[int]:
    """The groups whose answers all have the same reward. Their group advantage is 0, except by gdpo."""
    return {group for group, rewards in rewards_by_group(samples).items() if min(rewards) == max(rewards)}


def by_source(samples: list[Sample]) -> dict[str, list[Sample]]:
    """The samples of each data source."""
    return {source: [s for s in samples if s.source == source] for source in sorted({s.source for s in samples})}


def model_lengths(samples):
    """Tokens of each response that the model sampled, without the tokens of an environment, [N]."""
    return np.array([sum(s.turns[::2]) for s in samples])


def failures(samples, prefix):
    """The shares of samples whose grading took too long or failed."""
    return {f"{prefix}/{kind}_frac": np.mean([s.graded == kind for s in samples]) for kind in ("timeout", "error")}


def evaluation(samples, options: EvalConfig):
    """Metrics of an evaluation, by source.

    They are avg@n, the mean reward over n answers; pass@k for n and for each power of two below it; length, truncation
    and failures of grading. Where a reward has several parts, part/NAME is the share of answers that have some of it.
    """
    n = options.samples
    numbers = {}
    for source, own in by_source(samples).items():
        start = f"eval/{source}"
        groups = rewards_by_group(own).values()
        passed = [sum(reward >= options.pass_reward - ROUNDING for reward in group) for group in groups]

        numbers[f"{start}/avg@{n}"] = np.mean([s.reward for s in own])
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            numbers[f"{start}/pass@{k}"] = np.mean([pass_at_k(n, count, k) for count in passed])
        numbers[f"{start}/response_mean"] = model_lengths(own).mean()
        numbers[f"{start}/truncated_frac"] = np.mean([not s.finished for s in own])
        numbers |= failures(own, start)

        parts = sorted({name for s in own for name in s.reward_parts})
        if len(parts) > 1:
            for name in parts:
                numbers[f"{start}/part/{name}"] = np.mean([s.reward_parts.get(name, 0.0) > 0 for s in own])
    return numbers


def pass_at_k(n, passed, k):
    """Probability that at least one of k answers drawn from n passes, of which `passed` do.

    It is 1 - C(n - passed, k) / C(n, k), an unbiased estimate for k fresh answers: Chen et al., arXiv 2107.03374.
    """
    return 1 - math.comb(n - passed, k) / math.comb(n, k)
