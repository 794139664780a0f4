"""Checks within a step: trainer and vLLM agree, losses and gradients are finite, rewards can be computed."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, TrainingError, UserError
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


def check_gap(
    report: dict[str, float],
    step: int,
    batch: Batch,
    samples: list[Sample],
    cfg: Config,
    gaps: list[float],
    rescore: Callable[[], torch.Tensor],
) -> None:
    """Raise TrainingError where the log-probs of trainer and engine on the sampled tokens differ beyond a bound.

    This finds what the digests of push_check cannot: other kernels, temperature or positions. Appends the mean gap of
    this update to `gaps`. For the table of the message, `rescore` computes the trainer's log-probs [F] under the
    weights before the update.
    """
    gaps.append(report["gap"] / max(report["tokens"], 1))
    if step == 1 and len(gaps) == 1 and batch.ref_logp is not None and not cfg.algo.replay_routes:
        check_reference(report, cfg)
    if cfg.model.dtype == "bf16":
        kind = "mean"
        gap = gaps[-1]
        bound = 0.05 if len(gaps) == 1 else min(0.05, max(0.01, 4 * gaps[0]))
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


def check_graded(samples: list[Sample], prompts: dict[int, Prompt], bound: float, shown: set[str]) -> None:
    """Raise UserError, on every rank, if the reward failed for more than the share `bound` of the samples.

    Otherwise warn, once a run for each kind of error. `prompts`: {group: prompt}; `shown`: the kinds shown so far.
    """
    failed = [s for s in samples if s.graded == "error"]
    if failed:
        report_failed(failed, len(samples), prompts, bound, shown)


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
