"""What a step leaves: exported weights, adapters, and the positions in a checkpoint."""

import json
import math

from oracle.models import rounded


def judge_exports(state, step):
    """The exported weights and adapters after a step. Where ours are not the run's, we take the export's."""
    trainer = state.trainer
    report = state.report
    folder = state.run.has("hf", step)
    adapter = state.run.has("adapter", step)
    if folder is None or state.barred:
        return
    weights = trained = trainer.read(folder, trainer.dtype)
    if adapter is not None:
        trained = {n.removeprefix("base_model.model."): w for n, w in trainer.read(adapter, "fp32").items()}
        written = json.loads((adapter / "adapter_config.json").read_text())
        scale = written["lora_alpha"] / written["r"]
        own = state.cfg.lora.alpha / state.cfg.lora.rank
        report.say("adapters", f"alpha / r: {scale:g}, not {own:g}" if scale != own else "")

    if not state.unknown:
        judge_weights(report, "weights", weights, trainer.current(), trainer.start())
        if adapter is not None:
            ours, first = ({n: rounded(w, trainer.dtype) for n, w in x.items()} for x in (trainer.main, trainer.first))
            judge_weights(report, "adapters", trained, ours, first)
    elif trainer.main.keys() == trained.keys():
        trainer.restart(trained)
        state.unknown = ""
        state.has_moments = False
        report.note("weights", "ours are an export's where the run's were unknown")


def judge_weights(report, item, theirs, ours, first):
    """The distance of the run's weights from ours, as a share of how far ours moved from the first."""
    if theirs.keys() != ours.keys():
        return report.say(item, f"only one side has {sorted(theirs.keys() ^ ours.keys())[:3]}")
    apart = distance(theirs, ours)
    moved = distance(first, ours)
    report.check(item, f"export: {item}", apart / moved if moved else apart, 0.0)


def distance(one, other):
    """The norm of the difference between two sets of weights."""
    return math.sqrt(sum((one[name] - other[name]).double().pow(2).sum().item() for name in other))


def judge_checkpoint(state, step):
    """The positions in the data and in the course of updates that a checkpoint holds."""
    folder = state.run.has("checkpoints", step)
    if folder is None:
        return
    found = json.loads((folder / "state.json").read_text())
    wanted = {"step": step, "prompts_taken": state.taken}
    if state.metrics:
        wanted["updates"] = state.updates
    for name, value in wanted.items():
        state.report.check("checkpoints", f"state: {name}", found[name], value)
