"""Some recorded requests, asked of vLLM once more with the weights that the run had.

The settings are those that the configuration says, and the seed of a request decides its random numbers. So on a CPU
the tokens are the same but where rounding turns one. It turns a token at most as often as the mean |Δ| of log-probs: so
far apart are the two distributions, in nats, that the same random numbers are drawn from.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from oracle.algorithm import at_step
from oracle.answers import requests_of
from oracle.metrics import by

GROUPS, ANSWERS, TOKENS = 4, 4, 64  # that are asked for again: groups of a step, answers of each, tokens of a turn
ROUNDING = {"fp32": (1e-6, 1e-5), "fp16": (1e-4, 4e-3), "bf16": (1e-3, 0.03)}  # mean |Δ|: least, most
CHANCE = 1e-6  # that rounding turns as many answers or more
SECONDS = 600  # at most, of vLLM


def ask(state, engine):
    """Have `engine` answer some requests again, beside. Returns (its future, the requests), or None and a note why."""
    cfg = state.cfg
    run = state.run
    if state.trainer is None or state.tokenizer is None:
        return state.report.note("sampling", "asked again: there is no model")
    versions = run.folder / "versions.json"
    if torch.cuda.is_available() or (versions.exists() and json.loads(versions.read_text()).get("driver")):
        return state.report.remarks.append("vLLM is not asked again: on a GPU random numbers depend on the device")

    # Of the first step, and of the one after the last export that has one after it.
    saved = [step for step in run.steps[:-1] if run.has("hf", step)][-1:]
    folders = {0: state.trainer.folder} | {step: run.has("hf", step) for step in saved}
    models = [{"folder": str(folder), "requests": asked_of(state, step)} for step, folder in folders.items()]
    requests = [request for model in models for request in model["requests"]]

    options = {
        "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[cfg.model.dtype],
        "max_model_len": max(len(r["ids"]) + r["settings"]["max_tokens"] for r in requests) + 1,
        "enforce_eager": True, "enable_prefix_caching": False, "enable_chunked_prefill": False,
        "logprobs_mode": "processed_logprobs", "load_format": "safetensors", "use_tqdm_on_load": False,
        "kv_cache_memory_bytes": 2**30,
    }  # fmt: skip
    if cfg.model.fp32_head:
        options["hf_overrides"] = {"head_dtype": "float32"}
    job = {"dtype": cfg.model.dtype, "options": options | cfg.rollout.vllm, "models": models}
    return ThreadPoolExecutor(1).submit(engine, job), requests


def own_process(job):
    """What the vLLM of engine.py answers, in a process of its own. Raises ValueError."""
    command = [sys.executable, "-m", "oracle.engine"]
    how = {"cwd": Path(__file__).parent.parent, "capture_output": True, "text": True, "timeout": SECONDS}
    try:
        done = subprocess.run(command, input=json.dumps(job), **how)
    except subprocess.TimeoutExpired:
        raise ValueError(f"vLLM took longer than {SECONDS} s") from None
    if done.returncode:
        *_, line = done.stderr.strip().splitlines() or [""]
        raise ValueError(f"vLLM says {line[:160]}")
    return json.loads(done.stdout)


def asked_of(state, step):
    """The requests of some answers that the weights after a step gave: of the next step, and of an evaluation."""
    cfg = state.cfg
    limit = cfg.rollout.max_new_tokens
    training = at_step(cfg, step + 1).rollout
    found = []
    for number, row in some_of(state.run.rollouts(step + 1)):
        found += again(row, number, requests_of(state, row, number, training, limit), step + 1)
    for number, row in some_of(state.run.rollouts(step, "eval")):
        found += again(row, number, requests_of(state, row, number, cfg.eval, cfg.eval.max_new_tokens or limit), step)
    return found


def again(row, number, settings, step):
    """The requests of an answer, the `number`-th of its group, with the tokens and log-probs that the run has."""
    found = []
    for turn, given in enumerate(settings):
        start = sum(row["turns"][: 2 * turn])
        stop = start + min(row["turns"][2 * turn], TOKENS)
        given |= {"max_tokens": min(given["max_tokens"], TOKENS), "stop_token_ids": sorted(given["stop_token_ids"])}
        found.append({
            "ids": row["prompt_ids"] + row["response_ids"][:start], "settings": given, "step": step,
            "tokens": row["response_ids"][start:stop], "logps": row["rollout_logp"][start:stop],
            "name": f"group {row['group']}, answer {number}, turn {turn}",
        })  # fmt: skip
    return found


def some_of(rows):
    """(number in its group, answer) of ANSWERS answers of each of GROUPS groups."""
    groups = by(rows, "group")
    return [(n, groups[g][n]) for g in some(sorted(groups), GROUPS) for n in some(range(len(groups[g])), ANSWERS)]


def some(values, count):
    """At most `count` of the values, from all over."""
    return values[:: max(1, len(values) // count)][:count]


# ---------------------------------------------------------------- what came back


def judge_again(state, asked):
    """Compare the answers of the vLLM that `ask` started, once it has ended, with the run's."""
    report = state.report
    running, requests = asked
    try:
        answers = [answer for model in running.result() for answer in model]
    except ValueError as error:
        return report.note("sampling", f"asked again: {error}")

    problem, report.step = difference(requests, answers, state.cfg.model.dtype)
    report.say("sampling", problem, len(answers))


def difference(requests, answers, dtype):
    """What is wrong with the recorded tokens of `requests`, given the (token ids, log-probs) that vLLM gives now, and
    the step where; empty if rounding may have turned those that differ.
    """
    gaps = []
    turned = []  # requests whose tokens differ, and where
    for request, (ids, logps) in zip(requests, answers, strict=True):
        theirs = request["tokens"]
        same = 0
        while same < len(theirs) and theirs[: same + 1] == ids[: same + 1]:
            same += 1
        gaps += [abs(one - other) for one, other in zip(request["logps"][:same], logps[:same], strict=True)]
        if theirs != ids:
            turned.append((request, same, ids))
    if not turned:
        return "", requests[0]["step"]

    # The chance that as many are turned, by Poisson.
    least, most = ROUNDING[dtype]
    gap = min(max(sum(gaps) / max(len(gaps), 1), least), most)
    expected = gap * (len(gaps) + len(turned))
    chance = torch.special.gammainc(*torch.tensor([len(turned), expected], dtype=torch.float64))
    request, place, ids = turned[0]
    problem = (
        f"{len(turned)} of {len(requests)} answers are others if vLLM is asked again, rounding makes "
        f"{expected:.1g}: {request['name']}, token {place} was {request['tokens'][place:][:1]}, is {ids[place:][:1]}"
    )
    return problem if chance < CHANCE else "", request["step"]
