"""What others load: the folders of an exported model and of its adapters, against the base model's."""

import json
import math
from pathlib import Path

import torch
import transformers

from oracle.models import TARGETS, merge_factors

FILES = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer, which an export has as its base does
ANSWERS = 4  # that are scored by what transformers loads


def judge_folders(state, step, answers):
    """The folders that a step leaves. The last model of a run is loaded, and scores some of its `answers`."""
    report = state.report
    trainer = state.trainer
    folder = state.run.has("hf", step)
    adapter = state.run.has("adapter", step)
    if folder is None:
        return
    if trainer is None:
        return report.note("exports", "there is no model")

    differ = [
        name
        for name in names_of(trainer.folder) | names_of(folder)
        if content(trainer.folder, name) != content(folder, name)
    ]
    report.say("exports", f"{sorted(differ)} of {folder.name} are not those of {trainer.folder}" if differ else "")
    if adapter is not None:
        judge_adapter(state, adapter, folder)
    if step == state.run.steps[-1]:
        judge_loaded(state, folder, answers[:ANSWERS])


def names_of(folder):
    """The names of the files of FILES, without indices of weights, which are an export's own."""
    return {file.name for file in Path(folder).iterdir() if file.suffix in FILES and ".index." not in file.name}


def content(folder, name):
    """What a file says; None where there is none."""
    file = Path(folder, name)
    if not file.exists():
        return None
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def judge_adapter(state, adapter, folder):
    """What PEFT would make of an adapter: it must have the base and the targets of the run, and give the export."""
    trainer = state.trainer
    lora = state.cfg.lora
    report = state.report
    written = json.loads((adapter / "adapter_config.json").read_text())
    factors = {n.removeprefix("base_model.model."): w for n, w in trainer.read(adapter, "fp32").items()}
    modules = {name.split(".")[-3] for name in factors}
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    problems = [
        f"{name} is {written.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if written.get(name) != value
    ]
    if {*written["target_modules"]} != modules:
        problems.append(f"target_modules are {written['target_modules']}, its tensors of {sorted(modules)}")
    if left := modules - {part for target in lora.targets for part in TARGETS[target]}:
        problems.append(f"it has {sorted(left)}, which lora.targets does not name")
    if not Path(written["base_model_name_or_path"]).samefile(trainer.folder):
        problems.append(f"its base is {written['base_model_name_or_path']}, not {trainer.folder}")
    for name in ("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if written.get(name):
            problems.append(f"{name} is {written[name]}")
    report.say("exports", f"adapter_config.json: {'; '.join(problems)}" if problems else "")

    # The base with these factors is the exported model: how far it is away, as a share of what they change.
    merged = merge_factors(trainer.frozen, factors, lora, trainer.dtype)
    apart = distance(trainer.read(folder, trainer.dtype), merged)
    moved = distance(trainer.frozen, merged)
    report.check("exports", "merged: the base with the adapter", apart / moved if moved else apart, 0.0)


def distance(one, other):
    """The norm of the difference between two sets of weights."""
    return math.sqrt(sum((one[name] - other[name]).double().pow(2).sum().item() for name in other))


def judge_loaded(state, folder, answers):
    """AutoModelForCausalLM must compute what the base's configuration does with the weights of the folder."""
    trainer = state.trainer
    ours = trainer.read(folder, "fp32")
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # of transformers
        return state.report.say(
            "exports", f"transformers cannot load {folder.name}: {' '.join(str(error).split())[:160]}"
        )

    with torch.no_grad():
        for row in answers:
            prompt, response = row["prompt_ids"], row["response_ids"]
            wanted = trainer.model.logits(ours, [prompt], [response], 1.0).log_softmax(-1)
            ids = torch.tensor([prompt + response])
            found = loaded(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            places = torch.arange(len(response)), torch.tensor(response)
            state.report.check("exports", f"loaded: log-probs by {folder.name}", found[places], wanted.cpu()[places])
