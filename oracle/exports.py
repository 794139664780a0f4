"""What a step leaves: exported weights and adapters, the folders that others load, the positions in a checkpoint."""

import json
import math
from pathlib import Path

import torch
import transformers

from oracle.algorithm import at_step
from oracle.models import merge_factors, rounded, token_logp
from oracle.nuclei import fill_nuclei
from oracle.trainer import answer_of

ELEMENTS = {"fp32": 3, "fp16": 32, "bf16": 32}  # of a tensor that make most of its way, so that rounding averages out
FILES = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer, which an export has as its base does
ANSWERS = 4  # that are scored by what transformers loads


def judge_exports(state, step, answers):
    """The model and the adapters that a step exports. The last model of a run is loaded, and scores some of its
    `answers`.
    """
    trainer = state.trainer
    folder = state.run.has("hf", step)
    adapter = state.run.has("adapter", step)
    if folder is None:
        return
    if trainer is None:
        return state.report.note("exports", "there is no model")

    weights = trainer.read(folder, trainer.dtype)
    factors = None
    if adapter is not None:  # by our names
        factors = {n.removeprefix("base_model.model."): w for n, w in trainer.read(adapter, "fp32").items()}
    judge_ways(state, step, weights, factors)

    judge_files(state, folder)
    if adapter is not None:
        judge_adapter(state, adapter, weights, factors)
    if step == state.run.steps[-1]:
        judge_loaded(state, folder, answers[:ANSWERS])


# ---------------------------------------------------------------- weights


def judge_ways(state, step, weights, factors):
    """The exported weights, and factors if there are any. Tensors of ours that are not the run's we take from them."""
    trainer = state.trainer
    report = state.report
    trained = weights if factors is None else factors
    if state.unknown:
        report.note("weights", "ours are an export's where the run's were unknown")
    else:
        shadow = trainer.shadow
        ways = trainer.current(), trainer.start(), trainer.before()
        judge_weights(state, "weights", weights, shadow and shadow.current(), *ways)
        if factors is not None:
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
    answers = [answer_of(row, state.cfg, state.cfg.eval) for row in rows]
    after = at_step(state.run.cfg, step + 1)
    answers = answers or [answer_of(row, after) for row in state.run.rollouts(step + 1)]
    fill_nuclei(state, answers)

    def gap():
        trainer.score(answers, "before")
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


# ---------------------------------------------------------------- folders that others load


def judge_files(state, folder):
    """The configuration and the tokenizer of an exported model, which are the base's."""
    base = state.trainer.folder
    ours, theirs = content_of(base), content_of(folder)
    differ = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    state.report.say("exports", f"{differ} of {folder.name} are not those of {base}" if differ else "")


def content_of(folder):
    """{name: content} of the files of FILES, without indices of weights, which are an export's own."""
    return {
        file.name: json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()
        for file in Path(folder).iterdir()
        if file.suffix in FILES and ".index." not in file.name
    }


def judge_adapter(state, adapter, weights, factors):
    """What PEFT would make of an adapter: it must have the base and the options of the run, and give the export."""
    trainer = state.trainer
    lora = state.cfg.lora
    wanted = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in factors}), "bias": "none", "inference_mode": True,
        "base_model_name_or_path": Path(trainer.folder).name,
    }  # fmt: skip
    written = json.loads((adapter / "adapter_config.json").read_text())
    written["target_modules"] = sorted(written["target_modules"])
    written["base_model_name_or_path"] = Path(written["base_model_name_or_path"]).name  # its place may be another

    # An option of PEFT that is null, zero or false changes nothing.
    pairs = {name: (written.get(name) or None, wanted.get(name)) for name in written | wanted}
    problems = [f"{name} is {one}, not {other}" for name, (one, other) in pairs.items() if one != other]
    state.report.say("adapters", f"adapter_config.json: {'; '.join(problems)}" if problems else "")

    # The base with these factors is the exported model: how far it is away, as a share of what they change.
    merged = merge_factors(trainer.frozen, factors, lora, trainer.dtype)
    found = distances("adapter", weights, merged, trainer.frozen, trainer.frozen)
    state.report.check("adapters", "merged: the base with the adapter", *found["export: adapter"])


def judge_loaded(state, folder, answers):
    """AutoModelForCausalLM must compute what the base's configuration does with the weights of the folder."""
    trainer = state.trainer
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # of transformers
        problem = f"transformers cannot load {folder.name}: {' '.join(str(error).split())[:160]}"
        return state.report.say("exports", problem)

    prompts, responses = ([row[name] for row in answers] for name in ("prompt_ids", "response_ids"))
    with torch.no_grad():
        own = trainer.model.answers_logp(trainer.read(folder, "fp32"), prompts, responses, 1.0)
        for prompt, response, wanted in zip(prompts, responses, own, strict=True):
            logits = loaded(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found = token_logp(logits.log_softmax(-1), response)
            state.report.check("exports", f"loaded: log-probs by {folder.name}", found, wanted.cpu())


# ---------------------------------------------------------------- checkpoints


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
