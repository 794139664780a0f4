"""What a run recorded in its output folder."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from config import Config
from grpo.parts.base.read_config import SECTIONS


@dataclass
class Recorded:
    """The output folder of a run, finished or stopped."""

    folder: Path
    cfg: Config
    metrics: dict[int, dict]  # of each step that has a line
    steps: list[int]  # with a file of answers, from 1 on
    remarks: list[str]  # what is missing

    def rollouts(self, step, kind="step"):
        """The answers of a step, or with kind="eval" of the evaluation after it; none where there was no such."""
        path = self.folder / f"rollouts/{kind}_{step:06d}.jsonl"
        return read_rows(path) if path.exists() else []

    def has(self, folder, step):
        """The folder of a step in hf/, adapter/ or checkpoints/, if there is one."""
        path = self.folder / f"{folder}/step_{step:06d}"
        return path if path.is_dir() else None


def read_rows(path: Path) -> list[dict]:
    """The objects of a file with one a line, without half a line that a killed process left at its end."""
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.endswith("\n")]


def read_run(folder: Path, steps: int | None = None):
    """What the run in this output folder recorded, of the first `steps`. ValueError where nothing can be judged."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} has no config.yaml: give the output_dir of a run")
    cfg, remarks = read_config(yaml.safe_load((folder / "config.yaml").read_text()))

    # What follows a step without answers cannot be repeated.
    names = sorted(path.stem for path in folder.glob("rollouts/step_*.jsonl"))
    found = [int(name.removeprefix("step_")) for name in names][:steps]
    steps = [step for number, step in enumerate(found, start=1) if step == number]
    if not steps:
        raise ValueError(f"{folder}/rollouts has no answers of step 1 (step_000001.jsonl): nothing to repeat")
    if len(steps) < len(found):
        remarks.append(f"rollouts/ has no answers of step {steps[-1] + 1}: what follows is not judged")

    # The metrics of a step may be missing.
    log = folder / "metrics.jsonl"
    lines = read_rows(log) if log.exists() else []
    metrics = {line["step"]: line for line in lines if "reward/mean" in line}
    if lacking := [step for step in steps if step not in metrics]:
        remarks.append(f"metrics.jsonl has no line of step {lacking[0]}: what it would say of {lacking} is not judged")
    return Recorded(folder, cfg, metrics, steps, remarks)


def read_config(tree):
    """The configuration of a run, and a remark on each key that only it or only this commit knows."""
    remarks = []
    for section, kind in {"": Config, **SECTIONS}.items():
        part = tree.setdefault(section, {}) if section else tree
        for name in sorted(part.keys() ^ kind.model_fields.keys()):
            key = f"{section}.{name}".removeprefix(".")
            if name in part:
                remarks.append(f"this commit does not know {key}={part.pop(name)}: ignored")
            else:
                remarks.append(f"the run, of another commit, does not know {key}: the default is used")
    return Config.model_validate(tree), remarks
