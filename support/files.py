"""The files of a run, and the line that a step leaves on the screen.

output_dir/config.yaml             the whole configuration
output_dir/metrics.jsonl           a JSON object a step; docs/metrics.md
output_dir/rollouts/step_N.jsonl   every sample of the step
output_dir/rollouts/eval_N.jsonl   every sample of the evaluation after step N
"""

import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any

from config import UserError, to_yaml
from support import watchdog as guard


def step_line(m: dict, steps: int) -> str:
    """One line of the log, with a bar of the progress."""
    done = round(20 * m["step"] / steps)
    kl = "" if m["kl/ref"] is None else f"  kl {m['kl/ref']:.4f}"
    return (
        f"[{'█' * done}{'·' * (20 - done)}] {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}"
        f"  grad {m['grad_norm']:.3f}{kl}  entropy {m['entropy']:.2f}  length {m['tokens/response_mean']:.1f}"
        f"  gap {m['logp_gap/max']:.0e}  {m['time/step']:.2f} s"
    )


def log_metrics(out: Path, metrics: dict) -> None:
    """Add a line to metrics.jsonl, on the disk before this returns; null for what is no number."""
    numbers = {key: value if value is None or math.isfinite(value) else None for key, value in metrics.items()}
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(numbers, default=float) + "\n")
        file.flush()
        os.fsync(file.fileno())


def dump_rollouts(path: Path, samples: list) -> None:
    """Every Sample of a step, a JSON object a line."""
    path.write_text("".join(json.dumps(vars(sample), ensure_ascii=False) + "\n" for sample in samples))


def open_output_dir(path: Path, cfg: Any, step: int, lock: IO) -> IO:
    """Make the output folder ready to go on after `step`, as `resume` says; returns its lock."""
    if cfg.resume != "none":
        continue_output_dir(path, cfg, step)
        return lock
    new_output_dir(path, cfg)
    lock.close()  # it went with the folder of the earlier run
    return guard.output_lock(path)


def new_output_dir(path: Path, cfg: Any) -> None:
    """An output folder for this run alone; that of an earlier run is moved aside, never mixed or overwritten."""
    try:
        if (path / "metrics.jsonl").exists():
            aside = next(p for i in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{i}")).exists())
            path.rename(aside)
            print(f"moved the earlier run in {path} to {aside}")
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(to_yaml(cfg))
        (path / "metrics.jsonl").write_text("")
    except OSError as error:
        raise UserError(f"output_dir={path}: {error}") from None


def continue_output_dir(path: Path, cfg: Any, step: int) -> None:
    """The output folder of a run that goes on after `step`, without what was written of later steps."""
    try:
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(to_yaml(cfg))
        log, kept = path / "metrics.jsonl", []
        for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
            if not line.endswith("\n"):
                print(f"{log} ends in half a line, which is dropped")
            elif step and json.loads(line)["step"] <= step:
                kept.append(line)
        log.with_suffix(".tmp").write_text("".join(kept))
        log.with_suffix(".tmp").rename(log)
        for file in (path / "rollouts").iterdir():
            ours = re.fullmatch(r"(step|eval)_(\d+)\.jsonl", file.name)
            if ours and (int(ours[2]) > step or step == 0):
                file.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"output_dir={path}: {error}") from None
