"""What has to hold before a step goes on: trainer and vLLM agree, losses and gradients are finite, rewards work."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_bridge as bridge
from config import Config, TrainingError, UserError
from support import turns
from support.data import Prompt
from support.records import Batch, MicroBatch, Sample


def compared_updates(cfg: Config) -> int:
    """How many updates, from the first, compare vLLM with the trainer as it was when vLLM sampled.

    Those of one epoch see each token once; without a pass for the trainer's old log-probs only the first is in time.
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
    """Raises TrainingError if trainer and engine disagree: at step 1 about the model, later about what has changed.

    Sees what push_check cannot: kernels, temperature, positions. Called before the weights change. `gaps`: the means of
    the updates so far, to which this one is added. `rescore` gives the trainer's log-probs [F], for the table.
    """
    gaps.append(report["gap"] / max(report["tokens"], 1))
    if cfg.model.dtype == "bf16":
        kind, gap = "mean", gaps[-1]
        bound = 0.05 if len(gaps) == 1 else min(0.05, max(0.01, 4 * gaps[0]))
    else:
        kind, bound, gap = "largest", 1e-3, report["gap_max"]
    bound = cfg.rollout.max_logp_gap or bound
    if not gap <= bound:
        raise TrainingError(
            f"step {step}: trainer and vLLM disagree on sampled tokens: {kind} |Δ log-prob| = {gap:.2e}, bound "
            f"{bound:.0e} (rollout.max_logp_gap)\n{explain_gap(rescore(), batch, samples, step, bound)}"
        )


def explain_gap(logp_F: torch.Tensor, batch: Batch, samples: list[Sample], step: int, bound: float) -> str:
    """A table of the largest differences, how they spread, and the likely cause."""
    response_F = batch.mask
    gap_F = (logp_F - batch.rollout_logp).abs() * response_F
    prompt_F = torch.tensor([len(s.prompt_ids) for s in samples])[batch.seq_id]
    place_F = batch.position_ids + 1 - prompt_F  # of the target within its response
    beyond_F = gap_F > bound
    share = (beyond_F.sum() / response_F.sum()).item()
    first3 = gap_F[response_F & (place_F < 3)].nanmean().item()
    later = gap_F[response_F & (place_F >= 3)].nanmean().item()
    if step > 1:
        cause = (
            "the engine did not take up the last weight push (stale or partly loaded weights): it agreed at first; "
            "with sync/checked = 1 it did, and the two compute apart (kernels, precision)"
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
            f"  {n:6d} {samples[n].group:6d} {place_F[i]:9d} {batch.targets[i]:7d} {logp_F[i]:9.4f} "
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
    """How many updates in a row had a loss or gradient that is NaN or infinite, this one included; 0 if it has not.

    The micro-batches of such an update, which changed nothing, go to files in output_dir/skipped. Raises TrainingError
    where there are train.max_skipped in a row.
    """
    bad, limit = Path(cfg.output_dir, "skipped", f"step_{step:06d}_update_{number}"), cfg.train.max_skipped
    if report["grad_norm"] == 0 and dist.get_rank() == 0:
        print("warning: no gradient (equal rewards in every group, no KL or entropy): update skipped", flush=True)
    if math.isfinite(report["grad_norm"]):
        return 0
    if bridge.reports_loss():
        dump_micro_batches(bad, micro_batches)
    what = f"the loss of an update is {report['loss']}"
    if math.isfinite(report["loss"]):
        what = "a gradient is NaN or infinite"
    message = f"{what}; it was skipped, its micro-batches are in {bad}_rank_*.safetensors"
    if in_a_row + 1 >= limit:
        raise TrainingError(f"{message}; {in_a_row + 1} in a row, train.max_skipped={limit}")
    if dist.get_rank() == 0:
        print(f"warning: {message}; {in_a_row + 1} in a row, the run stops at train.max_skipped={limit}", flush=True)
    return in_a_row + 1


def dump_micro_batches(bad: Path, micro_batches: list[MicroBatch]) -> None:
    """Write this rank's micro-batches of an update, every tensor of one as "number.name"."""
    fields = {
        f"{i}.{name}": value
        for i, mb in enumerate(micro_batches)
        for name, value in (vars(mb) | {"seq_id": mb.seq_id}).items()
        if torch.is_tensor(value)
    }
    bad.parent.mkdir(parents=True, exist_ok=True)
    save_file(fields, f"{bad}_rank_{dist.get_rank():05d}.safetensors")


def check_graded(samples: list[Sample], prompts: dict[int, Prompt], bound: float, shown: set[str]) -> None:
    """Show the first error of each kind of the reward functions, once a run; `shown` holds the kinds seen so far.

    `prompts`: that of each group. Raises UserError, on every rank, where more than the share `bound` failed.
    """
    messages = {}
    failed = [s for s in samples if s.graded == "error"]
    for s in failed:
        what = "" if s.error.startswith(turns.FAILED) else f"the reward of source {s.source!r} failed: "
        row = json.dumps(prompts[s.group].row, default=str)
        messages.setdefault(
            s.error.partition(":")[0],
            f"{what}{s.error}\n  row: {row}\n  response: {s.text!r}",
        )
    if len(failed) > bound * len(samples):
        raise UserError(
            f"{next(iter(messages.values()))}\n  {len(failed)} of {len(samples)} samples failed, more than "
            f"reward.max_error_frac={bound:g} allows; mend the function or the row, or choose another reward for the "
            "source (reward.by_source)"
        )
    for kind, message in messages.items():
        if kind not in shown and dist.get_rank() == 0:
            print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)
    shown.update(messages)
