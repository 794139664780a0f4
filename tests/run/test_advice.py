"""A run that cannot learn warns within a few steps, and ends if nothing could change that. No healthy run does."""

import json
import math
import re

import numpy as np
import pytest

from config import Config
from grpo.parts.base.read_config import override
from grpo.run.advice import RULES, Advice
from grpo.run.preflight import explain
from tests.conftest import REPO, legal_keys, read_rows, write_rows
from tools.report import Run

CFG = Config(model={"path": "m"}, data={"train": "d"})
HEALTHY = {
    "reward/mean": 0.5, "reward/std": 0.5, "reward/a/mean": 0.5, "reward/a/max": 1.0, "groups/zero_std_frac": 0.2,
    "advantage/nonzero_frac": 0.8, "update/applied": 1, "lr": 1e-6, "tokens/truncated_frac": 0.1,
    "tokens/response_max": 90.0, "sync/changed": 1.0,
    "busy_frac": 0.8, "grad_norm": 0.3, "moe/load": 1.5, "mem/train_peak_gb": 40.0,
}  # fmt: skip
SKIPPED = {"groups/zero_std_frac": 1.0, "advantage/nonzero_frac": 0.0, "update/applied": 0, "sync/changed": 0.0}


def all_equal(reward):
    """What metrics show of a step in which every answer has this reward."""
    return {**SKIPPED, "reward/mean": reward, "reward/std": 0.0, "reward/a/mean": reward, "reward/a/max": reward}


def advise(steps, **keys):
    """({rule: the first step at which it spoke}, the advice) of a run whose steps differ from HEALTHY by these."""
    advice = Advice(override(CFG, {key.replace("__", "."): value for key, value in keys.items()}))
    told = {}
    for number, step in enumerate(steps, 1):
        for rule in advice.add({"step": number} | HEALTHY | step):
            told.setdefault(rule, number)
    return told, advice


CASES = [  # rule, calm steps before, the step, how many of it, keys
    ("one_reward", 0, all_equal(0.0), 5, {}),
    ("collapsed_rewards", 9, all_equal(0.25), 5, {}),
    ("no_mixed_group", 9, SKIPPED, 5, {}),
    ("no_end_token", 0, {"tokens/truncated_frac": 1.0}, 5, {}),
    ("all_empty", 9, {"tokens/response_max": 1.0, "tokens/truncated_frac": 0.0}, 3, {}),
    ("masked_tokens", 9, {"mismatch/cut_frac": 0.98}, 3, {"algo__correction": "seq_mask"}),
    ("unchanged_push", 9, {"sync/changed": 0.0}, 3, {}),
    ("idle_gpus", 9, {"busy_frac": 0.4}, 10, {}),
    ("uneven_experts", 9, {"moe/load": 3.1}, 10, {}),
    ("exploding_gradients", 9, {"grad_norm": 4.0}, 3, {}),
    ("nothing_learnt", 9, {"lr": 0.0, "reward/mean": 0.1}, 5, {}),
    ("nothing_learnt", 0, {**all_equal(0.0), "update/applied": 1}, 5, {"algo__kl_coef": 0.001}),
]


@pytest.mark.parametrize("rule, before, step, steps, keys", CASES)
def test_a_rule_speaks_as_soon_as_its_evidence_is_enough(rule, before, step, steps, keys):
    calm = [{"reward/mean": 0.3 + 0.2 * (i % 2)} for i in range(before)]
    assert advise(calm + [step] * (steps + 40), **keys)[0][rule] == before + steps
    assert rule not in advise((calm + [step] * (steps - 1) + [{}]) * 3, **keys)[0]


def test_every_rule_names_keys_that_exist():
    """As do the remedies of memory."""
    text = json.dumps([RULES, explain.MEMORY, explain.VLLM_MEMORY])
    keys = set(re.findall(r"\b(?:algo|data|megatron|model|parallel|reward|rollout|train)\.\w+(?:\.\w+)*", text))
    assert len(keys) >= 30 and keys <= legal_keys()


def column(name, values):
    """Steps in which one metric has these values."""
    return [{name: value} for value in values]


CALM = {
    "healthy": [{}] * 200,
    "metrics that are off": [{"moe/load": None, "mem/train_peak_gb": None, "busy_frac": None, "grad_norm": None}] * 50,
    "memory that grows with the answers": column("mem/train_peak_gb", np.linspace(20, 60, 30)),
    "load of trained experts": column("moe/load", [3.0, 4.9] * 20),
    "single spikes": column("grad_norm", ([0.3] * 8 + [30.0] * 2) * 10),
    "overflows": column("grad_norm", [math.inf, math.nan] + [0.3] * 20),
}


@pytest.mark.parametrize("name", CALM)
def test_calm_runs_are_left_alone(name):
    assert advise(CALM[name])[0] == {}


@pytest.mark.parametrize("peaks", [[40.0, 52.0] * 6, [40.0, 60.0, 35.0, 55.0, 42.0, 61.0, 38.0, 57.0]])
def test_memory_that_swings(peaks):
    assert advise(column("mem/train_peak_gb", peaks))[0]["memory_swings"] <= 10


def test_a_gradient_that_doubles():
    assert advise(column("grad_norm", [0.3 * 2**n for n in range(12)]))[0] == {"exploding_gradients": 10}


def test_a_source_is_told_alone_and_the_cause_names_the_key():
    """One of two data sources has a wrong answer column; the other trains."""
    told, advice = advise([{}, {"reward/b/mean": 0.0, "reward/b/max": 0.0}] * 5)
    assert told == {"one_reward": 10} and advice.idle_steps == 0
    text = advice.add({"step": 11} | HEALTHY)["one_reward"]
    assert "0 in the source b: try data.answer_key" in text and "source a" not in text


@pytest.mark.parametrize(
    "steps, keys, idle",
    [
        ([all_equal(0.0)] * 40 + [{}] + [all_equal(0.0)] * 19, {}, 19),
        ([{}] * 9 + [all_equal(1.0)] * 60, {}, 0),  # at its best
        ([{}] * 9 + [all_equal(0.25)] * 60, {}, 60),  # collapsed
        ([{"reward/mean": 0.1}] * 9 + [{"reward/mean": 0.9, **SKIPPED}] * 60, {}, 0),  # converged
        ([{}] + [{**all_equal(0.0), "update/applied": 1}] * 60, {"algo__kl_coef": 0.01}, 0),  # the KL leads back
        ([{**SKIPPED, "update/applied": 1}] * 60, {"algo__kl_coef": 0.01, "algo__teacher_kl": "reverse"}, 0),
    ],
)  # fmt: skip
def test_steps_that_learn_nothing(steps, keys, idle):
    assert advise(steps, **keys)[1].idle_steps == idle


# ---------------------------------------------------------------- real runs


@pytest.mark.slow
def test_a_dead_run_saves_ends_and_goes_on_when_mended(train_forked, tiny, tmp_path):
    """On two ranks; the steps before a resume count, and the report has what the screen had."""
    rows = [{**row, "number": "x"} for row in read_rows(tiny / "train.jsonl")]  # which no answer has
    write_rows(tmp_path / "train.jsonl", rows)
    keys = (
        "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=5", "train.warmup_steps=0",
        "train.save_every=0", "train.steps=8", "train.patience=4", "algo.entropy_coef=0", "data.answer_key=number",
        f"data.train={tmp_path / 'train.jsonl'}",
    )  # fmt: skip
    run = train_forked(2, *keys, "train.save_every=2", "train.keep_last=1")
    assert run.code == 1 and len(run.metrics) == 4, run.text
    assert "error: step 4: the run has learnt nothing for 4 steps in a row" in run.text
    assert "no update learns: no answer is better than others to its prompt" in run.text
    assert "train.patience=0 goes on regardless" in run.text and "stopped after step 4, saved in" in run.text
    assert [path.name for path in (run.out / "checkpoints").iterdir()] == ["step_000004"]
    again = train_forked(2, *keys, "resume=auto")
    assert again.code == 1 and len(again.metrics) == 5, again.text
    assert "warning: step 5: every reward was the same so far: 0 in the source reverse" in again.text
    assert len(Run(again.out).find_hints()) == 2  # one_reward and nothing_learnt
    # The same prompts with another answer column are other data; another reward mends it too.
    (tmp_path / "reward.py").write_text("def reward(text, answer, row):\n    return float(len(text))\n")
    on = train_forked(2, *keys, f"reward.custom={tmp_path / 'reward.py'}:reward", "resume=auto")
    assert on.code == 0 and len(on.metrics) == 8, on.text


def healthy_runs():
    """{name: overrides} of short runs that learn. The name may be a configuration's."""
    found = {f"ablations/{path.stem}": [] for path in sorted((REPO / "configs/ablations").glob("*.yaml"))}
    return found | {
        "tiny": [],
        "tiny_turns": ["data.train='123'"],
        "lora": ["lora.rank=8", "train.lr=3e-3"],
        "self": ["algo.teacher=self", "data.hint_key=answer", "algo.advantage=none"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name, overrides", healthy_runs().items(), ids=healthy_runs())
def test_no_healthy_run_ends(train_forked, name, overrides):
    """Even if it may learn nothing for three steps alone."""
    config = name if (REPO / f"configs/{name}.yaml").exists() else "tiny"
    run = train_forked(1, "train.steps=10", "train.patience=3", "train.save_every=0", *overrides, config=config)
    assert run.code == 0 and len(run.metrics) == 10, run.text
    assert "learnt nothing" not in run.text and "warning: step" not in run.text, json.dumps(run.metrics[-1])
