"""What a step leaves: exported weights, adapters, and the positions in a checkpoint."""

import json
import math

import torch

from oracle.folders import factors_of
from oracle.models import rounded

ELEMENTS = 32  # of a tensor that make the most of its way, so that rounding averages out


def judge_exports(state, step):
    """The exported weights and adapters after a step. Where ours are not the run's, we take the export's."""
    trainer = state.trainer
    report = state.report
    folder = state.run.has("hf", step)
    adapter = state.run.has("adapter", step)
    if folder is None or state.trainer is None:
        return
    weights = trained = trainer.read(folder, trainer.dtype)
    if adapter is not None:
        trained = factors_of(trainer, adapter)

    if not state.unknown:
        shadow = trainer.shadow
        ways = trainer.current(), trainer.start(), trainer.before()
        judge_weights(report, "weights", weights, shadow and shadow.current(), *ways)
        if adapter is not None:
            others = (shadow.main if shadow else {}), trainer.main, trainer.first, trainer.previous
            ways = [{n: rounded(w, trainer.dtype) for n, w in weights.items()} for weights in others]
            judge_weights(report, "adapters", trained, *ways)
    elif trainer.main.keys() == trained.keys():
        trainer.restart(trained)
        state.unknown = ""
        state.has_moments = False
        report.note("weights", "ours are an export's where the run's were unknown")


def judge_weights(report, item, theirs, shadow, *ways):
    """The run's weights against ours, with `ways` of distances; `shadow` has the shadow's weights, if there is one."""
    ours, *_ = ways
    if theirs.keys() != ours.keys():
        return report.say(item, f"only one side has {sorted(theirs.keys() ^ ours.keys())[:3]}")
    if shadow:
        for name, (value, ideal) in distances(item, shadow, *ways).items():
            report.measure(name, abs(value - ideal))
    for name, (value, ideal) in distances(item, theirs, *ways).items():
        report.check(item, name, value, ideal)
    for name, weight in ours.items():
        judge_tensor(report, item, name, *((w - ways[1][name]).double().flatten() for w in (theirs[name], weight)))


def distances(item, theirs, ours, first, previous):
    """{quantity: (its value, that of equal weights)} of two sets of weights: their distance as a share of how far ours
    moved from the `first`, then how much of that way, and of our last update from the `previous` weights, the others
    made. There rounding averages out.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    for name, weight in ours.items():
        own = (weight - first[name]).double().flatten()
        way = (theirs[name] - first[name]).double().flatten()
        last = (weight - previous[name]).double().flatten()
        sums += torch.stack([own @ own, way @ own, way @ way, last @ last, (way - own) @ last]).cpu()

    moved, along, size, updated, ahead = sums.tolist()
    apart = math.sqrt(max(moved - 2 * along + size, 0))
    found = {f"export: {item}": (apart / math.sqrt(moved) if moved else apart, 0.0)}
    if moved:
        found[f"slope: {item} on ours"] = (along / moved, 1.0)
        found[f"slope: ours on {item}"] = (along / size if size else 0.0, 1.0)
    if updated:
        found[f"slope: {item} on our last update"] = (1 + ahead / updated, 1.0)
    return found


def judge_tensor(report, item, name, way, own):
    """Whether a tensor moved about as far as ours, by the ways [elements] of both. A gradient that is nothing but
    rounding, as of the biases of keys, moves it elsewhere, but as far.
    """
    squares = own.pow(2)
    moved = squares.sum().item()
    if moved**2 < ELEMENTS * (squares @ squares).item() or not moved:
        return
    size = way.norm().item() / math.sqrt(moved)
    slope = (way @ own).item() / moved
    is_off = not 0.5 < size < 2
    report.say(item, f"{name} moved {size:.2f} times as far as ours, {slope:.2f} times our way" if is_off else "", 0)


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
