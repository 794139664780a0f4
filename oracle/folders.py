"""What others load: the folders of an exported model and of its adapters, against the base model's."""

import json
import math
from pathlib import Path

import torch
import transformers

from oracle.models import merge_factors

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

    base, own = content_of(trainer.folder), content_of(folder)
    differ = sorted(name for name in base | own if base.get(name) != own.get(name))
    report.say("exports", f"{differ} of {folder.name} are not those of {trainer.folder}" if differ else "")
    if adapter is not None:
        judge_adapter(state, adapter, folder)
    if step == state.run.steps[-1]:
        judge_loaded(state, folder, answers[:ANSWERS])


def content_of(folder):
    """{name: content} of the files of FILES, without indices of weights, which are an export's own."""
    return {
        file.name: json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()
        for file in Path(folder).iterdir()
        if file.suffix in FILES and ".index." not in file.name
    }


def judge_adapter(state, adapter, folder):
    """What PEFT would make of an adapter: it must have the base and the options of the run, and give the export."""
    trainer = state.trainer
    lora = state.cfg.lora
    factors = factors_of(trainer, adapter)
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
    apart = distance(trainer.read(folder, trainer.dtype), merged)
    moved = distance(trainer.frozen, merged)
    state.report.check("adapters", "merged: the base with the adapter", apart / moved if moved else apart, 0.0)


def factors_of(trainer, adapter):
    """The factors in the folder of an adapter, by our names."""
    return {name.removeprefix("base_model.model."): w for name, w in trainer.read(adapter, "fp32").items()}


def distance(one, other):
    """The norm of the difference between two sets of weights."""
    return math.sqrt(sum((one[name] - other[name]).double().pow(2).sum().item() for name in other))


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
        for prompt, response, (wanted, *_) in zip(prompts, responses, own, strict=True):
            logits = loaded(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            state.report.check("exports", f"loaded: log-probs by {folder.name}", found, wanted.cpu())
