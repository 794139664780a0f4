"""What a step leaves behind: the metrics of docs/metrics.md, lines and bars on the screen, files, trackers."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import megatron_bridge as bridge
from config import Config, EvalConfig
from support import files, gates, hints, memory, routes, schedule, trackers
from support.records import Batch, Sample
from support.rollout_files import RolloutWriter

# What grpo_loss reports of a micro-batch: sums over its response tokens, but for the last, a maximum.
REPORTED = [
    "loss",
    "policy",
    "trained",
    "tokens",
    "kl_k3",
    "kl_k1",
    "kl_k2",
    "entropy",
    "clipped",
    "gap",
    "gap_above_0.01",
    "gap_above_0.1",
    "gap_above_1",
    "mismatch_k3",
    "w",
    "w2",
    "outside",
    "gap_max",
]


def gap_report(difference_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a micro-batch reports of trainer - vLLM log-prob, `difference_T`: sums over response tokens of the gap, its
    absolute value, and of w = exp(difference), the largest gap, and the number of tokens beyond three sizes.
    """
    gap_T = (difference_T * mask_T).abs()
    w_T = (difference_T * mask_T).clamp(-20, 20).exp() * mask_T
    above = {f"gap_above_{size:g}": (gap_T > size).sum() for size in (0.01, 0.1, 1)}
    return {"gap": gap_T.sum(), "gap_max": gap_T.max(), "w": w_T.sum(), "w2": w_T @ w_T, **above}


def add_up(reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """The micro-batches' reports added over the world (maximum for "gap_max"); the same on every rank."""
    counted = reports if bridge.reports_loss() else []
    zeros = torch.zeros(len(REPORTED), dtype=torch.float64, device=bridge.device())
    stacked = torch.stack([zeros, *(torch.stack([r[name].detach().double() for name in REPORTED]) for r in counted)])
    sums, largest = stacked[:, :-1].sum(0), stacked[:, -1].max()
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(REPORTED, [*sums.tolist(), largest.item()], strict=True))


@dataclasses.dataclass
class StepRecord:
    """A step of training, as it went; the same on every rank, but for `seconds`."""

    step: int
    samples: list[Sample]  # all of the step, those of replaced groups too
    groups: set[int]  # that were trained on
    rounds: int  # of sampling
    notes: list[dict[str, float]]  # of each rank: seconds of sampling and grading
    reports: list[dict[str, float]]  # of each update
    expert_load: list[float]  # per layer; [] without experts
    seconds: dict[str, float]  # of each phase, and "step"


def summarize(record: StepRecord, batch: Batch, cfg: Config) -> dict[str, float | int | None]:
    """The metrics of a step; names as in docs/metrics.md, always all of them. `cfg`: as the step used it."""
    samples, seconds = record.samples, record.seconds
    first = record.reports[0]
    compared = record.reports[: gates.compared_updates(cfg)]
    reward_N = np.array([s.reward for s in samples])
    length_N = np.array([sum(s.turns[::2]) for s in samples])  # by the model
    rewards = rewards_by_group(samples)
    bubble = np.mean([r["bubble"] for r in record.reports])
    idle = idle_seconds(record.notes, bubble * seconds.get("train", 0.0))

    def mean(name: str, reports: list[dict], over: str = "tokens") -> float:
        return sum(r[name] for r in reports) / max(sum(r[over] for r in reports), 1)

    def effective_share(reports: list[dict]) -> float:
        w, w2, tokens = (sum(r[name] for r in reports) for name in ("w", "w2", "tokens"))
        return w**2 / (w2 or 1) / max(tokens, 1)

    return {
        "step": record.step,
        "reward/mean": reward_N.mean(),
        "reward/std": reward_N.std(),
        **by_source(samples, "reward", {"mean": lambda mine: np.mean([s.reward for s in mine]), **FAILURES}),
        "groups/zero_std_frac": np.mean([max(group) == min(group) for group in rewards.values()]),
        "groups/sampled": len(rewards),
        "groups/trained": len(record.groups),
        "groups/rounds": record.rounds,
        "loss/total": mean("loss", [first], "trained"),
        "loss/policy": mean("policy", [first], "trained"),
        "kl/ref": mean("kl_k3", [first]) if batch.ref_logp is not None else None,
        "kl/k1": mean("kl_k1", [first]) if batch.ref_logp is not None else None,
        "kl/k2": mean("kl_k2", [first]) if batch.ref_logp is not None else None,
        "kl/teacher": teacher_kl(batch) if batch.teacher_logp is not None else None,
        "entropy": mean("entropy", [first]),
        "ratio/clip_frac": mean("clipped", record.reports),
        "logp_gap/mean": mean("gap", compared),
        "logp_gap/max": max(r["gap_max"] for r in compared),
        **{f"logp_gap/above_{size}": mean(f"gap_above_{size}", compared) for size in ("0.01", "0.1", "1")},
        "mismatch/k3": mean("mismatch_k3", compared),
        "mismatch/ess": effective_share(compared),
        "mismatch/cut_frac": mean("outside", compared),
        **(routes.shares(samples, first) if cfg.algo.replay_routes else dict.fromkeys(routes.SHARES)),
        "grad_norm": first["grad_norm"],
        "moe/load": max(record.expert_load, default=None),
        **{f"moe/load/layer_{layer:02d}": load for layer, load in enumerate(record.expert_load)},
        "lr": cfg.train.lr,
        **(schedule.metrics(cfg) if any(course for _, course in cfg.schedule) else {}),
        "tokens/prompt_mean": np.mean([len(s.prompt_ids) for s in samples]),
        "tokens/response_mean": length_N.mean(),
        "tokens/response_max": length_N.max(),
        "tokens/environment_mean": np.mean([sum(s.turns[1::2]) for s in samples]) if cfg.rollout.turns else None,
        "tokens/truncated_frac": np.mean([not s.finished for s in samples]),
        "turns/mean": np.mean([len(s.turns[::2]) for s in samples]) if cfg.rollout.turns else None,
        **{f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES},
        "speed/response_tokens_per_s": length_N.sum() / seconds["step"],
        "speed/samples_per_s": len(samples) / seconds["step"],
        "pack/fill": np.mean([r["fill"] for r in record.reports]),
        "pack/attention_waste": np.mean([r["attention_waste"] for r in record.reports]),
        "pipeline/bubble": bubble,
        "idle_frac": sum(idle.values()) / seconds["step"],
        **{f"idle/{cause}": idle[cause] / seconds["step"] for cause in idle},
        "update/skipped": sum(not (math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0) for r in record.reports),
    }


def teacher_kl(batch: Batch) -> float:
    """The k1 estimate of KL(policy ‖ teacher) before the updates, mean over the trained tokens."""
    difference_F = (batch.old_logp - batch.teacher_logp) * batch.trained
    return (difference_F.double().sum() / batch.trained.sum().clamp(min=1)).item()


def expert_load(model: list) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean of all experts, since the last call; [] without experts.

    Counted over the response tokens of the training passes. The same on every rank.
    """
    hf = model[0].hf_config
    if not bridge.is_moe(hf):
        return []
    load = torch.zeros(hf.num_hidden_layers, bridge.num_experts(hf), device=bridge.device())  # [layers, E]
    for chunk in map(bridge.unwrap_model, model):
        for layer in chunk.decoder.layers:
            load[layer.layer_number - 1] += layer.mlp.router.load
            layer.mlp.router.load = torch.zeros_like(layer.mlp.router.load)
    dist.all_reduce(load)  # tp and cp split the tokens, dp the samples, pp the layers
    return (load.amax(1) / load.mean(1)).tolist()


def idle_seconds(notes: list[dict[str, float]], bubble: float) -> dict[str, float]:
    """{cause: seconds}, mean over the ranks, in which ranks wait for others, of each rank's seconds by phase when its
    own answers were graded.

    Until the slowest rank has sampled and graded, the others wait: for its generation as long as it samples, then for
    its grading. `save`: at the start of the step, for ranks that still save, evaluate or log.
    """
    rollout_R, work_R = np.array(
        [[n.get("rollout", 0.0), n.get("rollout", 0.0) + n.get("reward", 0.0)] for n in notes]
    ).T
    slowest = work_R.argmax()
    sampled_R = np.maximum(rollout_R[slowest], work_R)  # until when a rank waits for generation, if it waits
    return {
        "generation": np.mean(sampled_R - work_R),
        "grading": np.mean(work_R[slowest] - sampled_R),
        "bubble": bubble,
        "save": np.mean([note.get("wait", 0.0) for note in notes]),
    }


def trainer_logp(batch: Batch, cfg: Config, score: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The trainer's log-probs before the updates, [F], for `note_tokens`; a pass of `score`, unless the step has made
    it anyway.
    """
    return batch.old_logp if cfg.algo.old_logp == "trainer" and batch.old_logp is not None else score()


def note_tokens(samples: list[Sample], batch: Batch, before_F: torch.Tensor, after_F: torch.Tensor) -> None:
    """Note in the samples of the batch, of each response token, `trainer_logp`, the trainer's log-prob before the
    updates, and `ratio`, the probability after them over that before. The log-probs are given, [F].
    """
    ratio_F = (after_F - before_F).exp()
    for s, first, positions in zip(samples, batch.starts_N, batch.lengths_N, strict=True):
        response = slice(first + len(s.prompt_ids) - 1, first + positions)
        s.tokens |= {"trainer_logp": before_F[response].numpy(), "ratio": ratio_F[response].numpy()}


def rewards_by_group(samples: list[Sample]) -> dict[int, list[float]]:
    """The rewards of each group's answers."""
    rewards = {s.group: [] for s in samples}
    for s in samples:
        rewards[s.group].append(s.reward)
    return rewards


PHASES = ("wait", "rollout", "reward", "gather", "sleep", "logprob", "train", "sync", "save", "other", "step")
FAILURES = {
    "timeout_frac": lambda mine: np.mean([s.graded == "timeout" for s in mine]),
    "error_frac": lambda mine: np.mean([s.graded == "error" for s in mine]),
}


def by_source(samples: list[Sample], prefix: str, wanted: dict[str, Any]) -> dict[str, float]:
    """{"prefix/source/name": value} of each function in `wanted`, {name: function of a source's samples}."""
    found = {}
    for source in sorted({s.source for s in samples}):
        mine = [s for s in samples if s.source == source]
        found |= {f"{prefix}/{source}/{name}": function(mine) for name, function in wanted.items()}
    return found


def evaluation(samples: list[Sample], options: EvalConfig) -> dict[str, float]:
    """Metrics of an evaluation, by source: avg@n, the mean reward over n answers; pass@k for each power of two up to n,
    and n itself; length, truncation, failures of grading."""
    n = options.samples

    def pass_at(k: int):
        def mean_over_prompts(mine: list) -> float:
            passed = dict.fromkeys((s.group for s in mine), 0)
            for s in mine:
                passed[s.group] += s.reward >= options.pass_reward
            return np.mean([pass_at_k(n, count, k) for count in passed.values()])

        return mean_over_prompts

    powers = sorted({2**i for i in range(n.bit_length())} | {n})
    wanted = {
        f"avg@{n}": lambda mine: np.mean([s.reward for s in mine]),
        **{f"pass@{k}": pass_at(k) for k in powers},
        "response_mean": lambda mine: np.mean([sum(s.turns[::2]) for s in mine]),
        "truncated_frac": lambda mine: np.mean([not s.finished for s in mine]),
        **FAILURES,
    }
    return by_source(samples, "eval", wanted)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that one of k answers drawn from n, of which `passed` pass, passes: 1 - C(n - passed, k) / C(n, k).

    Without bias for what k fresh answers would give. Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


# ---------------------------------------------------------------- on the screen and into files


class Log:
    """What a run says of its steps, on rank 0: metrics.jsonl, rollouts/, a bar on a terminal or a line a step, some
    answers, trackers. `inputs`: what the run goes on from."""

    def __init__(self, cfg: Config, inputs: Any, rollouts: RolloutWriter):
        self.out, self.steps, self.speaks = Path(cfg.output_dir), cfg.train.steps, dist.get_rank() == 0
        self.rollouts, self.samples_every, self.tokenizer = rollouts, cfg.log.samples_every, inputs.tokenizer
        self.trackers = trackers.Trackers(cfg, inputs.done) if self.speaks else None
        self.exact = cfg.rollout.exact
        self.history: list[dict] = []  # the metrics of each step of this start
        self.hinted: set[str] = set()  # rules whose hint was shown
        self.growth = memory.Growth()
        steps = dict(total=self.steps, initial=inputs.done, unit="step")
        self.bar = tqdm(**steps, disable=not on_terminal(), dynamic_ncols=True)

    def evaluated(self, step: int, found: dict[str, float], samples: list[Sample]) -> dict[str, float]:
        """Keep and show an evaluation after `step`; returns its metrics."""
        if self.speaks:
            self.rollouts.write(self.out / "rollouts" / f"eval_{step:06d}.jsonl", samples)
            shown = (f"{key.removeprefix('eval/')} {value:.3f}" for key, value in found.items() if "@" in key)
            self.bar.write(f"eval after step {step}: {'  '.join(shown)}")
        return {"step": step} | found

    def write(self, metrics: dict, samples: list[Sample] | None = None) -> None:
        """The metrics of a step that has ended, and its samples; without samples, those of an evaluation before it."""
        if not self.speaks:
            return
        step = metrics["step"]
        if samples is not None:
            self.rollouts.write(self.out / "rollouts" / f"step_{step:06d}.jsonl", samples)
        files.log_metrics(self.out, metrics)
        if samples is None:
            return
        self.history.append(metrics)
        for warning in filter(None, (self.growth.warning(metrics), self.trackers.warning())):
            self.bar.write(f"warning: step {step}: {warning}")
        self.bar.set_postfix_str(
            f"reward {metrics['reward/mean']:.3f}  gap {metrics['logp_gap/max']:.0e}  "
            f"length {metrics['tokens/response_mean']:.1f}  {metrics['speed/response_tokens_per_s']:.0f} tokens/s",
            refresh=False,
        )
        self.bar.update()
        if self.bar.disable:
            print(step_line(metrics, self.steps), flush=True)
        if self.samples_every and step % self.samples_every == 0:
            some = trackers.format_answers([vars(sample) for sample in samples], self.tokenizer.decode)
            self.bar.write(f"answers of step {step}, from the lowest reward to the highest:\n{some}")
        if len(self.history) % hints.WINDOW == 0:
            self.hint()

    def hint(self) -> None:
        """Show what the metrics ask for and did not ask before."""
        for rule, text in hints.hints(self.history).items():
            if rule not in self.hinted:
                self.bar.write(f"hint: {text}")
                self.hinted.add(rule)

    def stopped(self, step: int) -> None:
        """The run ends after `step`, since it was asked to."""
        self.bar.close()
        if self.speaks:
            saved = f"step {step}, saved in {self.out / 'checkpoints'}; go on with resume=auto"
            print(f"stopped after {saved if step else 'no step: there is nothing to save'}", flush=True)
        self.speaks = False

    def close(self) -> None:
        """The run is done, its files are on the disk."""
        self.rollouts.finish()
        self.rollouts.close()
        self.bar.close()
        if not self.speaks:
            return
        self.hint()
        first, rewards = self.history[0], [metrics["reward/mean"] for metrics in self.history]
        last = rewards[-10:]
        print(
            f"\nreward: {rewards[0]:.3f} at step {first['step']}, {np.mean(last):.3f} over the last {len(last)} steps"
        )
        if self.exact:
            gap = max(metrics["logp_gap/max"] for metrics in self.history)
            print(f"exact: repeatable, not bitwise equal: a log-prob gap of at most {gap:.1e} between trainer and vLLM")
        print(
            f"outputs: {self.out}/metrics.jsonl, {self.out}/rollouts/, {self.out}/hf/step_{self.steps:06d}/ (for "
            "transformers and vLLM)"
        )


def on_terminal() -> bool:
    """Whether this process speaks for the run to somebody who watches; else plain lines go to a log."""
    return dist.get_rank() == 0 and sys.stderr.isatty()


def answers_bar(groups: Iterable, count: int) -> Iterable:
    """The groups of answers as an engine finishes them, under a bar of answers and tokens/s on a terminal."""
    tokens = 0
    with tqdm(total=count, unit="answer", desc="rollout", leave=False, disable=not on_terminal(), delay=2) as bar:
        for number, answers in groups:
            tokens += sum(len(answer.ids) for answer in answers)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update(len(answers))
            yield number, answers


def step_line(m: dict, steps: int) -> str:
    """One line of the log, with a bar of the progress."""
    done = round(20 * m["step"] / steps)
    kl = "" if m["kl/ref"] is None else f"  kl {m['kl/ref']:.4f}"
    return (
        f"[{'█' * done}{'·' * (20 - done)}] {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  grad {m['grad_norm']:.3f}{kl}  entropy {m['entropy']:.2f}  length {m['tokens/response_mean']:.1f}"
        f"  gap {m['logp_gap/max']:.0e}  {m['time/step']:.2f} s"
    )
