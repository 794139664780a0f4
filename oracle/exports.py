"""What a step leaves: exported weights, adapters, and the positions in a checkpoint."""

import json
import math

import torch

from oracle.folders import factors_of
from oracle.models import rounded
from oracle.trainer import scored

ELEMENTS = {"fp32": 3, "fp16": 32, "bf16": 32}  # of a tensor that make most of its way, so that rounding averages out


def judge_exports(state, step):
    """The exported weights and adapters after a step. Tensors of ours that are not the run's we take from them."""
    trainer = state.trainer
    report = state.report
    folder = state.run.has("hf", step)
    adapter = state.run.has("adapter", step)
    if folder is None or state.trainer is None:
        return
    weights = trained = trainer.read(folder, trainer.dtype)
    if adapter is not None:
        trained = factors_of(trainer, adapter)

    if state.unknown:
        report.note("weights", "ours are an export's where the run's were unknown")
    else:
        shadow = trainer.shadow
        ways = trainer.current(), trainer.start(), trainer.before()
        judge_weights(state, "weights", weights, shadow and shadow.current(), *ways)
        if adapter is not None:
            others = (shadow.main if shadow else {}), trainer.main, trainer.first, trainer.previous
            ways = [{n: rounded(w, trainer.dtype) for n, w in weights.items()} for weights in others]
            judge_weights(state, "adapters", trained, *ways)

    if trainer.main.keys() == trained.keys():
        if state.unknown:
            trainer.take(trained)
        elif state.theirs:
            take_nearer(state, step, {name: trained[name] for name in state.theirs & trained.keys()})
        state.unknown = state.doubt = ""


def take_nearer(state, step, theirs):
    """Take the values of tensors of an export, unless the answers that come next have the log-probs of ours: then the
    export alone is wrong.
    """
    trainer = state.trainer
    rows = state.run.rollouts(step, "eval") if state.cfg.eval.temperature else []
    rows = rows or state.run.rollouts(step + 1)
    answers = [scored(row, state.cfg) for row in rows]

    def gap():
        trainer.score(answers, "before", state.cfg.rollout.temperature)
        return sum((a.before - a.rollout).abs().sum().item() for a in answers)

    ours = {name: trainer.main[name].clone() for name in theirs}
    gap_of_ours = gap()
    trainer.take(theirs)
    if gap() > gap_of_ours:
        trainer.take(ours)


def judge_weights(state, item, theirs, shadow, *ways):
    """The run's weights against ours, with `ways` of distances; `shadow` has the shadow's weights, if there is one.

    Tensors that part are the run's own from then on. They part by the item of an update that was not ours, if one was.
    """
    report = state.report
    ours, first, _ = ways
    if theirs.keys() != ours.keys():
        return report.say(item, f"only one side has {sorted(theirs.keys() ^ ours.keys())[:3]}")
    of_problem = state.doubt or item
    elements = ELEMENTS[state.cfg.model.dtype]

    # Tensor by tensor.
    for name in [name for name in ours if name not in state.theirs]:
        problem = tensor_problem(name, elements, *((w[name] - first[name]).double().flatten() for w in (theirs, ours)))
        if problem:
            report.say(of_problem, problem, 0)
            state.theirs.add(name)

    # All others together.
    def others(weights):
        return {name: weight for name, weight in weights.items() if name not in state.theirs}

    if not others(ours):
        return report.note(item, "no tensor moves as ours does")
    ways = [others(weights) for weights in ways]
    if shadow:
        for name, (value, ideal) in distances(item, others(shadow), *ways).items():
            report.measure(name, abs(value - ideal))
    found = distances(item, others(theirs), *ways)
    is_apart = any(report.compare(name, *values).parts for name, values in found.items())
    for name, (value, ideal) in found.items():
        report.check(of_problem if is_apart else item, name, value, ideal)
    if is_apart:
        state.theirs |= ours.keys()


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


def tensor_problem(name, elements, way, own):
    """How a tensor moved otherwise than about as far as ours, by the ways [elements] of both; empty if it did not. A
    gradient that is nothing but rounding, as of the biases of keys, moves it elsewhere, but as far.
    """
    squares = own.pow(2)
    moved = squares.sum().item()
    if moved**2 < elements * (squares @ squares).item() or not moved:
        return ""
    size = way.norm().item() / math.sqrt(moved)
    slope = (way @ own).item() / moved
    is_off = not 0.5 < size < 2
    return f"{name} moved {size:.2f} times as far as ours, {slope:.2f} times our way" if is_off else ""


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
