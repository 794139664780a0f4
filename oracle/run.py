"""What a run recorded in its output folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    remarks: list[str] = field(default_factory=list)  # what is missing

    def rollouts(self, step: int, kind: str = "step") -> list[dict]:
        """The answers of a step, or with kind="eval" of the evaluation after it; none where there was no such."""
        path = self.folder / f"rollouts/{kind}_{step:06d}.jsonl"
        return read_rows(path) if path.exists() else []

    def has(self, folder: str, step: int) -> Path | None:
        """The folder of a step in hf/, adapter/ or checkpoints/, if there is one."""
        path = self.folder / f"{folder}/step_{step:06d}"
        return path if path.is_dir() else None


def read_rows(path: Path) -> list[dict]:
    """The objects of a file with one a line; half a line, which a killed process leaves at the end, is none."""
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.endswith("\n")]


def read_run(folder: Path, steps: int | None = None) -> Recorded:
    """What the run in this output folder recorded, of the first `steps`. ValueError where nothing can be judged."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} has no config.yaml: give the output_dir of a run")
    cfg, remarks = read_config(yaml.safe_load((folder / "config.yaml").read_text()))
    names = sorted(path.stem for path in folder.glob("rollouts/step_*.jsonl"))
    found = [int(name.removeprefix("step_")) for name in names][:steps]
    if found[:1] != [1]:
        raise ValueError(f"{folder}/rollouts has no answers of step 1 (step_000001.jsonl): nothing to repeat")
    log = folder / "metrics.jsonl"
    lines = read_rows(log) if log.exists() else []
    metrics = {line["step"]: line for line in lines if "reward/mean" in line}
    if lacking := [step for step in found if step not in metrics]:
        remarks.append(f"metrics.jsonl has no line of step {lacking[0]}: what it would say of {lacking} is not judged")
    steps = [step for number, step in enumerate(found, start=1) if step == number]
    if len(steps) < len(found):
        remarks.append(f"rollouts/ has no answers of step {steps[-1] + 1}: what follows is not judged")
    return Recorded(folder, cfg, metrics, steps, remarks)


def read_config(tree: dict[str, Any]) -> tuple[Config, list[str]]:
    """The configuration of a run, without keys that this commit does not know, and a remark on each such."""
    remarks, lacking = [], []
    for section, kind in {"": Config, **SECTIONS}.items():
        held = tree.setdefault(section, {}) if section else tree
        dot = f"{section}." if section else ""
        for name in sorted(held.keys() - kind.model_fields.keys()):
            remarks.append(f"this commit does not know {dot}{name}={held.pop(name)}: ignored")
        lacking += [f"{dot}{name}" for name in kind.model_fields if name not in held]
    if lacking:
        remarks.append(f"the run knows no {', '.join(lacking)}: it is of another commit; defaults hold")
    return Config.model_validate(tree), remarks
