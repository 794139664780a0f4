"""Checks within a step: trainer and vLLM agree, losses and gradients are finite, rewards can be computed."""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, RewardConfig, TrainingError, UserError
from reward import is_part
from support.data.prompts import Prompt
from support.step import turns
from support.step.invariants import check_reference
from support.step.records import Batch, MicroBatch, Sample


def compared_updates(cfg: Config) -> int:
    """In how many updates of a step, from the first, the log-probs of trainer and vLLM are compared.

    A comparison needs the trainer's log-probs under the weights that vLLM sampled with. With algo.old_logp=trainer all
    updates have them as old log-probs, and those of one epoch see each token once. Else only the first update has them.
    """
    return cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1


@dataclass
class Gaps:
    """What check_gap keeps from one update to the next, since this start of the run."""

    first: float | None = None  # mean |trainer - vLLM| log-prob of the first update
    recent: deque[tuple[float, float]] = field(default_factory=partial(deque, maxlen=20))  # (sum of k3, tokens) each
    told: bool = False  # whether the user was told that the mismatch KL is beyond its bound

    def add_mismatch(self, report: dict[str, float]) -> float:
        """Add an update's k3; returns the mean over the tokens of the last 20 updates. Missing ones of 4 count as 0.

        A single token can dominate an update: in bf16 the demo had 4.7e-4 in one of 300, at most 6.1e-5 in 20.
        """
        self.recent.append((report["gap_k3"], report["tokens"]))
        k3 = sum(k3 for k3, _ in self.recent)
        tokens = sum(tokens for _, tokens in self.recent)
        missing = max(1.0, 4 / len(self.recent))
        return k3 / max(tokens * missing, 1)


def check_gap(
    report: dict[str, float],
    step: int,
    batch: Batch,
    samples: list[Sample],
    cfg: Config,
    model: list,
    gaps: Gaps,
    rescore: Callable[[], torch.Tensor],
) -> None:
    """Raise TrainingError where the log-probs of trainer and engine on the sampled tokens differ beyond a bound.

    This finds what the digests of push_check cannot: other kernels, temperature or positions. For the table of the
    message, `rescore` computes the trainer's log-probs [F] under the weights before the update.
    """
    if step == 1 and gaps.first is None and batch.ref_logp is not None and not cfg.algo.replay_routes:
        check_reference(report, cfg)
    mean = report["gap"] / max(report["tokens"], 1)
    gaps.first = mean if gaps.first is None else gaps.first
    if cfg.model.dtype == "bf16":
        kind = "mean"
        gap = mean
        bound = min(0.05, max(0.01, 4 * gaps.first))
    else:
        kind = "largest"
        gap = report["gap_max"]
        bound = 1e-3
    bound = cfg.rollout.max_logp_gap or bound
    if not gap <= bound:
        raise TrainingError(
            f"step {step}: trainer and vLLM disagree on sampled tokens: {kind} |Δ log-prob| = {gap:.2e}, bound "
            f"{bound:.0e} (rollout.max_logp_gap)\n{explain_gap(rescore(), batch, samples, step, bound)}"
        )
    kl = gaps.add_mismatch(report)
    has_experts = model[0].config.num_moe_experts is not None
    bound = cfg.rollout.max_mismatch_kl or mismatch_bound(cfg.model.dtype, has_experts)
    if not kl <= bound:
        gap = math.sqrt(2 * bound)  # where the k3 of one token is about the bound
        report_mismatch(kl, bound, step, cfg, gaps, lambda: explain_gap(rescore(), batch, samples, step, gap))


def report_mismatch(kl: float, bound: float, step: int, cfg: Config, gaps: Gaps, explain: Callable[[], str]) -> None:
    """Raise TrainingError for a mismatch KL beyond its bound, or warn once where the configuration intends it."""
    message = (
        f"step {step}: trainer and vLLM disagree on sampled tokens: mismatch KL (mean k3) = {kl:.2e}, "
        f"bound {bound:.1e} (rollout.max_mismatch_kl)"
    )
    intended = [f"rollout.vllm.{name}" for name in INEXACT if name in cfg.rollout.vllm]
    if cfg.rollout.max_logp_gap is not None:
        intended.append("rollout.max_logp_gap")
    if cfg.rollout.max_mismatch_kl is not None or not intended:
        raise TrainingError(f"{message}\n{explain()}")
    if not gaps.told and dist.get_rank() == 0:
        print(f"warning: {message}; it goes on, as {intended[0]} is set and the KL's bound is not", flush=True)
    gaps.told = True


INEXACT = ("quantization", "kv_cache_dtype")  # options of vLLM that make it sample from another distribution


def mismatch_bound(dtype: str, has_experts: bool) -> float:
    """Bound of the mean mismatch KL in nats a token, as in NeMo-RL and prime-rl; more with experts, whose routes differ
    in bf16.
    """
    if dtype == "fp32":
        return 1e-6
    return 1.5e-2 if has_experts else 5e-4


def explain_gap(logp_F: torch.Tensor, batch: Batch, samples: list[Sample], step: int, bound: float) -> str:
    """A table of the largest differences, their distribution, and the likely cause."""
    response_F = batch.mask
    gap_F = (logp_F - batch.rollout_logp).abs() * response_F
    prompt_F = torch.tensor([len(s.prompt_ids) for s in samples])[batch.seq_id]
    position_F = batch.position_ids + 1 - prompt_F  # of the target within its response
    beyond_F = gap_F > bound
    share = (beyond_F.sum() / response_F.sum()).item()
    first3 = gap_F[response_F & (position_F < 3)].nanmean().item()
    later = gap_F[response_F & (position_F >= 3)].nanmean().item()
    if step > 1:
        cause = (
            "they agreed at step 1: the engine did not take up the last weight push (stale or partly loaded weights); "
            "with sync/checked = 1 it did, and the two compute differently (kernels, precision)"
        )
    elif later > 10 * first3:
        cause = "the gap grows along the response: rotary embedding or context length differ"
    elif share < 0.05:
        cause = "few tokens differ: numerical noise; compare with model.dtype=fp32, or raise the bound"
    else:
        cause = "most tokens differ: other weights (mapping) or another distribution (temperature, top_p, rollout.vllm)"
    table = ["  sample  group  position   token   trainer      vLLM       |Δ|"]
    for i in gap_F.topk(min(10, len(gap_F))).indices.tolist():
        n = int(batch.seq_id[i])
        table.append(
            f"  {n:6d} {samples[n].group:6d} {position_F[i]:9d} {batch.targets[i]:7d} {logp_F[i]:9.4f} "
            f"{batch.rollout_logp[i]:9.4f} {gap_F[i]:9.2e}"
        )
    return "\n".join(
        [
            *table,
            f"  {share:.1%} of {int(response_F.sum())} tokens, in {len(batch.seq_id[beyond_F].unique())} of "
            f"{len(samples)} samples, are beyond the bound; mean |Δ| {first3:.1e} in the first 3 tokens, {later:.1e} "
            "later",
            f"  likely cause: {cause}",
        ]
    )


def check_finite(
    report: dict[str, float], in_a_row: int, step: int, number: int, micro_batches: list[MicroBatch], cfg: Config
) -> int:
    """The number of updates in a row, with this one, that were skipped because loss or gradient is NaN or infinite.

    Warns of a skipped update and writes its micro-batches. A gradient of exactly 0 is skipped too, but sets the number
    to 0. Raises TrainingError at train.max_skipped.
    """
    if report["grad_norm"] == 0 and dist.get_rank() == 0:
        print("warning: no gradient (equal rewards in every group, no KL or entropy): update skipped", flush=True)
    if math.isfinite(report["grad_norm"]):
        return 0
    path = Path(cfg.output_dir, "skipped", f"step_{step:06d}_update_{number}")
    report_skipped(report, in_a_row + 1, path, micro_batches, cfg.train.max_skipped)
    return in_a_row + 1


def report_skipped(
    report: dict[str, float], in_a_row: int, path: Path, micro_batches: list[MicroBatch], limit: int
) -> None:
    """Write the micro-batches of a skipped update to `path`_rank_*, and warn. Raises TrainingError at the limit."""
    if bridge.reports_loss():
        write_micro_batches(path, micro_batches)
    what = f"the loss of an update is {report['loss']}"
    if math.isfinite(report["loss"]):
        what = "a gradient is NaN or infinite"
    message = f"{what}; it was skipped, its micro-batches are in {path}_rank_*.safetensors"
    if in_a_row >= limit:
        raise TrainingError(f"{message}; {in_a_row} in a row, train.max_skipped={limit}")
    if dist.get_rank() == 0:
        print(f"warning: {message}; {in_a_row} in a row, the run stops at train.max_skipped={limit}", flush=True)


def write_micro_batches(path: Path, micro_batches: list[MicroBatch]) -> None:
    """Write this rank's micro-batches to `path`_rank_R.safetensors, each tensor as "number of the micro-batch.name"."""
    tensors = {}
    for i, mb in enumerate(micro_batches):
        for name, value in vars(mb).items():
            if torch.is_tensor(value):
                tensors[f"{i}.{name}"] = value
        tensors[f"{i}.seq_id"] = mb.seq_id
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, f"{path}_rank_{dist.get_rank():05d}.safetensors")


def check_graded(samples: list[Sample], prompts: dict[int, Prompt], reward: RewardConfig, shown: set[str]) -> None:
    """Raise UserError, on every rank, if the reward failed for a larger share of the samples than it may.

    Otherwise warn, once a run for each kind of error. `prompts`: {group: prompt}; `shown`: the kinds shown so far.
    """
    failed = [s for s in samples if s.graded == "error"]
    if failed:
        report_failed(failed, len(samples), prompts, reward.max_error_frac, shown)
    if any(isinstance(spec, dict) for spec in (reward.default, *reward.by_source.values())):
        check_applied([s for s in samples if s.graded == "ok"], reward, shown)


def check_applied(samples: list[Sample], reward: RewardConfig, found: set[str]) -> None:
    """Raise UserError for a name in a weighted sum that is None for every sample, the first time its source is graded.

    `found` gets the sources: later steps may lack rows that a reward is for.
    """
    for source in sorted({s.source for s in samples}):
        spec = reward.by_source.get(source, reward.default)
        if isinstance(spec, str) or f"rewards of {source!r}" in found:  # a single one that is None is an error already
            continue
        graded = [s for s in samples if s.source == source]
        parts = {part for s in graded for part in s.reward_parts}
        for name in spec:
            if not any(is_part(part, name) for part in parts):
                raise UserError(
                    f"the reward {name!r} of source {source!r} is None for all {len(graded)} answers; legal is a finite"
                    " number for those to which it applies. Leave it out of the reward, or give rows that it is not for"
                    " a source of their own (reward.by_source)"
                )
        found.add(f"rewards of {source!r}")


def report_failed(failed: list[Sample], count: int, prompts: dict[int, Prompt], bound: float, shown: set[str]) -> None:
    """Print the warning, or raise the UserError, of check_graded for the `failed` ones of `count` samples."""
    messages = {}
    for s in failed:
        what = "" if s.error.startswith(turns.FAILED) else f"the reward of source {s.source!r} failed: "
        row = json.dumps(prompts[s.group].row, default=str)
        kind = s.error.partition(":")[0]
        messages.setdefault(kind, f"{what}{s.error}\n  row: {row}\n  response: {s.text!r}")
    if len(failed) > bound * count:
        raise UserError(
            f"{next(iter(messages.values()))}\n  {len(failed)} of {count} samples failed, more than "
            f"reward.max_error_frac={bound:g} allows; mend the function or the row, or choose another reward for the "
            "source (reward.by_source)"
        )
    for kind, message in messages.items():
        if kind not in shown and dist.get_rank() == 0:
            print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)
    shown.update(messages)
