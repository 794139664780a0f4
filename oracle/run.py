"""What a run recorded in its output folder."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from config import Config
from grpo.parts.base.read_config import SECTIONS

FIELDS = {  # of an answer in rollouts/, and of a line of metrics.jsonl, without which nothing can be repeated
    "group", "seed", "prompt_ids", "response_ids", "rollout_logp", "turns", "text", "source", "finished", "graded",
    "reward", "reward_parts", "advantage",
}  # fmt: skip
METRICS = {
    "reward/mean", "groups/sampled", "groups/trained", "loss/total", "loss/policy", "grad_norm", "entropy", "kl/ref",
    "logp_gap/mean", "logp_gap/max", "ratio/clip_frac", "lr", "update/applied", "update/skipped",
}  # fmt: skip


@dataclass
class Recorded:
    """The output folder of a run, finished or stopped."""

    folder: Path
    cfg: Config
    metrics: dict[int, dict]  # of each step that has a line; of 0 those of the evaluation before the first
    steps: list[int]  # with a file of answers, from 1 on
    remarks: list[str]  # what is missing

    def rollouts(self, step, kind="step"):
        """The answers of a step, or with kind="eval" of the evaluation after it; none where there was no such."""
        path = self.folder / f"rollouts/{kind}_{step:06d}.jsonl"
        return read_rows(path) if path.exists() else []

    def updates(self, step):
        """What each update of a step trained and gave; None where an earlier version made the step, as before a resume
        by this one.
        """
        path = self.folder / f"rollouts/updates_{step:06d}.jsonl"
        return read_rows(path) if path.exists() else None

    def has(self, folder, step):
        """The folder of a step in hf/, adapter/ or checkpoints/, if there is one."""
        path = self.folder / f"{folder}/step_{step:06d}"
        return path if path.is_dir() else None


def read_rows(path: Path) -> list[dict]:
    """The objects of a file with one a line, without half a line that a killed process left at its end."""
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.endswith("\n")]


def read_run(folder: Path, steps: int | None = None):
    """What the run in this output folder recorded, of the first `steps`. ValueError where it cannot be judged."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} has no config.yaml: give the output_dir of a run")
    cfg, remarks = read_config(yaml.safe_load((folder / "config.yaml").read_text()))
    log = folder / "metrics.jsonl"
    lines = read_rows(log) if log.exists() else []
    metrics = {line["step"]: line for line in lines if "reward/mean" in line or line["step"] == 0}
    paths = {int(path.stem.removeprefix("step_")): path for path in folder.glob("rollouts/step_*.jsonl")}

    # A run that was stopped, or goes on, may have one of the two of its last step.
    done = max({*metrics} & {*paths}, default=0)
    if lacking := sorted({*range(1, done + 1)} - ({*metrics} & {*paths})) or [1] * (not done):
        missing = "rollouts/ has no answers" if lacking[0] not in paths else "metrics.jsonl has no line"
        raise ValueError(f"{folder}: {missing} of step {lacking[0]}, so that nothing after it can be repeated")
    if unfinished := sorted({*metrics, *paths} - {*range(done + 1)}):
        remarks.append(f"step {unfinished[0]} has not ended: it is not repeated")

    # An earlier version wrote less, and no updates.
    steps = [*range(1, done + 1)][:steps]
    recorded = {int(path.stem.removeprefix("updates_")) for path in folder.glob("rollouts/updates_*.jsonl")}
    for step in steps:
        if recorded and step > min(recorded) and step not in recorded:
            path = folder / f"rollouts/updates_{step:06d}.jsonl"
            raise ValueError(f"{path} is missing, so that nothing after step {step - 1} can be repeated")
        rows = read_rows(paths[step])
        if not rows:
            raise ValueError(f"{paths[step]} is empty")
        for what, names, found in (("metrics.jsonl", METRICS, metrics[step]), (paths[step].name, FIELDS, rows[0])):
            if lacking := sorted(names - found.keys()):
                raise ValueError(f"{folder}: {what} lacks {', '.join(lacking)}: the run is of an earlier version")
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
