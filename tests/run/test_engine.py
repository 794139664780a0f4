"""Trainer and vLLM hold the same weights, for every family, layout and precision; where they do not, the run stops."""

import math
import re

import make_tiny
import numpy as np
import pytest
import torch

from config import EvalConfig
from grpo.run import evaluation
from grpo.step import metrics as step_metrics
from oracle.repeat import repeat
from oracle.run import read_run
from tests.conftest import EXACT, REPO, read_rows, tiny_model
from tests.oracle import layouts
from train_grpo import Sample, main

TABLE = (REPO / "docs/metrics.md").read_text().partition("With `data.eval`")[0]
METRICS = {name for row in re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE) for name in re.findall(r"`(\S+)`", row)}
# Names that stand for several, or are of experts or a schedule, which this run has not.
OTHERS = re.compile(r"reward/.+/|schedule/|moe/load/")
UNEVEN = "megatron.num_layers_in_first_pipeline_stage=1"  # of 3
WINDOW = {"sliding_window": 8}  # answers are longer
CONFIGS = layouts.CONFIGS | {
    "mistral": WINDOW,
    "llama": {"layers": 3, **layouts.CONFIGS["llama"]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0, "kv_heads": 1, **WINDOW},
}

# How a step deals answers to updates, and values that change with the steps; a KL is shown at the coefficient 0 too. A
# teacher is asked with a hint; truncated answers are not trained.
CAPABILITIES = (
    "train.updates_per_step=2", "train.epochs_per_step=2", "algo.kl_coef=0.05", "schedule.kl_coef={to: 0}",
    "schedule.temperature={to: 0.7}", "schedule.entropy_coef={to: 0.02, shape: constant}", "algo.mask_truncated=true",
    "algo.teacher=self", "data.hint_key=answer", "algo.teacher_coef=2.0",
)  # fmt: skip


@pytest.mark.parametrize(
    "arch, layout",
    [
        ("qwen3_moe", ["parallel.ep=2", "rollout.tp=2", *CAPABILITIES]),
        pytest.param("qwen3", ["parallel.tp=2", "rollout.tp=1"], marks=pytest.mark.slow),
        pytest.param("llama", ["parallel.pp=2", UNEVEN, "rollout.tp=2"], marks=pytest.mark.slow),
        pytest.param("mistral", ["parallel.cp=2", "rollout.tp=1"], marks=pytest.mark.slow),
        pytest.param("qwen2", ["parallel.tp=2", "parallel.sp=false", "rollout.tp=2"], marks=pytest.mark.slow),
        pytest.param("qwen2_moe", ["parallel.tp=2", "parallel.ep=2", "rollout.tp=1"], marks=pytest.mark.slow),
        pytest.param("mixtral", ["parallel.pp=2", "rollout.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_trainer_transformers_and_vllm_agree(train_forked, tmp_path, arch, layout):
    """The second trainer repeats both steps; the second samples from pushed, changed weights, which are exported."""
    tiny_model(tmp_path / "model", arch, **{"tied": False, **CONFIGS.get(arch, {})})
    small = ("train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=12")
    run = train_forked(2, *small, *EXACT, f"model.path={tmp_path / 'model'}", *layout, code=0)
    assert all(m["sync/checked"] == 1 for m in run.metrics)
    if "moe" in arch or arch == "mixtral":
        assert all(m["moe/load"] == max(m["moe/load/layer_00"], m["moe/load/layer_01"]) >= 1 for m in run.metrics)
    comparison = repeat(read_run(run.out))
    assert not comparison.parted(), comparison.table()
    assert all(m["logp_gap/max"] < 1e-5 for m in run.metrics)


LOOPS = """
import os
from vllm.v1.core.kv_cache_manager import KVCacheManager
from config import Config
from rollout import Engine
from grpo.parts.base import ranks
from grpo.parts.engine import lean

ranks.join_ranks(timeout_s=600)
model = {"path": MODEL, "dtype": "fp32"}
cfg = Config(model=model, data={"train": "-"}, rollout={"vllm": {"block_size": 32}})
engine = Engine(cfg.model.path, cfg.model, cfg.rollout, 128, asleep=False)
llm, lean_loop = engine.llm.llm_engine, engine.collect
manager = llm.engine_core.engine_core.scheduler.kv_cache_manager
lean_slots = manager.allocate_slots
assert lean_loop is lean.lean_loop and "allocate_slots" in vars(manager)

prompts = [[2 + i % 10] * (1 + 5 * i) for i in range(8)]
limits = [1, 31, 32, 33, 70, 2, 64, 40]

def sample(temperature):
    n = 3 if temperature else 1  # vLLM refuses equal answers
    sampling = cfg.rollout.model_copy(update={"temperature": temperature})
    engine.ask([(i, prompts[i], i, limits[i]) for i in range(8)], n, sampling)
    steps, first = engine.steps(sampling), {}
    while len(first) < 8:
        first |= next(steps)
    assert next(steps) == []
    longer = [prompts[i] + first[i][0].ids for i in range(8)]  # as a second turn does: its blocks are cached
    return first, dict(engine.generate(longer, range(8), 1, sampling.model_copy(update={"stop_token_ids": [5]}), 20))

for temperature in (0, 1):
    found = []
    for loop, slots in ((lean.own_loop, KVCacheManager.allocate_slots.__get__(manager)), (lean_loop, lean_slots)):
        assert engine.llm.reset_prefix_cache()
        engine.collect, manager.allocate_slots = loop, slots
        found.append(sample(temperature))
    own, answers = found
    assert answers == own
assert {a.finished for turn in own for group in turn.values() for a in group} == {False, True}

left = engine.generate(prompts, range(8), 3, cfg.rollout, 60)  # and nobody takes what is not done
next(left)
llm.abort_request([*llm.output_processor.request_states], internal=True)
assert not llm.has_unfinished_requests() and sample(1) == answers

del manager.allocate_slots  # the method of the class is left
lean.VERSIONS = ("0.1.",)
assert lean.choose_loop(llm) is lean.own_loop and "allocate_slots" not in vars(manager)
os._exit(0)
"""


def test_the_lean_loop_samples_what_vllms_own_does(fork_server, tiny, tmp_path):
    """Bit for bit, log-probs too; with another version of vLLM its own loop samples, and a line says so."""
    (tmp_path / "loops.py").write_text(LOOPS.replace("MODEL", repr(str(tiny / "model"))))
    printed = tmp_path / "output.txt"
    assert fork_server.run(printed, tmp_path / "loops.py", nproc=1) == 0, printed.read_text()
    assert printed.read_text().count("note: vLLM's own loop samples") == 1


ALPHABET = [*"0123456789>+-=", "7+8"]  # ids from 2 on; 0 is <eos>, 1 is <pad>, special as well
# The second text ends inside the token 7+8, the others but the first span two tokens.
STOPS = (f"rollout.stop={['<pad>', '7+', *(f'{digit}1' for digit in range(10))]}", "rollout.stop_token_ids=[15]")


@pytest.mark.slow
def test_answers_end_at_their_stops(train_forked, tmp_path, tiny):
    """The answers of a turn too. The second trainer agrees on ends, texts, log-probs and updates. An evaluation has its
    own stops, here none."""
    make_tiny.save_model(tmp_path / "model", make_tiny.char_tokenizer(ALPHABET), hidden=64)
    run = train_forked(
        2, *EXACT, *STOPS, "rollout.turns=examples/tiny_turns.py:higher_or_lower", f"model.path={tmp_path / 'model'}",
        "train.steps=2", "rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.max_new_tokens=24",
        "train.eval_every=2", f"data.eval={tiny / 'train.jsonl'}", "eval.stop=[]",
    )  # fmt: skip
    assert run.code == 0 and "warning: step" not in run.text, run.text

    comparison = repeat(read_run(run.out))
    assert not comparison.parted(), comparison.table()
    answers = [row for step in (1, 2) for row in run.rollouts(step) if row["finished"]]
    assert {row["response_ids"][-1] for row in answers} >= {0, 1, 3, 15, 16}  # <eos>, <pad>, the 1 of 31, =, 7+8
    assert all(row["text"].endswith("7+8") for row in answers if row["response_ids"][-1] == 16)

    evaluated = run.rollouts(2, "eval")
    assert any(16 in row["response_ids"][:-1] for row in evaluated)
    assert any(len(row["turns"]) > 1 for row in evaluated)


def test_metrics(shared):
    """A run reports the metrics of docs/metrics.md, and no others."""
    always = {name for name in METRICS if not OTHERS.match(name)}
    for metrics in shared.metrics[1:]:
        sources = {row["source"] for row in shared.rollouts(metrics["step"])}
        kinds = ("mean", "max", "timeout_frac", "error_frac")
        outcomes = {f"reward/{source}/{kind}" for source in sources for kind in kinds}
        assert {name for name in metrics if not name.startswith("eval/") and name != "time/eval"} == always | outcomes
    text = (shared.out / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_rewards_that_fail(shared):
    """Those of answers that begin with 0 or 1; tests/oracle/test_check.py grades the others anew, and computes the
    shares."""
    for row in (row for step in (1, 2, 3) for row in shared.rollouts(step)):
        assert (row["graded"] == "error") == (row["text"][:1] in ("0", "1"))
    assert shared.text.count("warning: the reward of source ") == 1


def test_evaluation_before_the_first_step_and_on_the_way(shared):
    """tests/oracle/test_check.py computes its metrics anew."""
    assert [m["step"] for m in shared.metrics] == [0, 1, 2, 3]
    evaluated = {m["step"]: m for m in shared.metrics if "time/eval" in m}
    assert list(evaluated) == [0, 2, 3] and not any(key.startswith("reward/") for key in evaluated[0])
    for step in evaluated:
        samples = shared.rollouts(step, "eval")
        assert len(samples) == 20 and max(len(s["response_ids"]) for s in samples) > 4


@pytest.mark.slow
def test_an_evaluation_of_a_checkpoint_equals_the_one_after_its_step(shared, train_forked):
    """On two engines, as in the run. It needs no data.train."""
    resume = f"resume={shared.out}/checkpoints/step_000002"
    run = train_forked(2, "--evaluate", *shared.overrides, resume, "data.train=nowhere.jsonl", code=0)
    assert f"evaluation of {run.out}/hf/step_000002" in run.text
    rows = read_rows(run.out / "evaluation.jsonl")
    assert rows == shared.rollouts(2, kind="eval")
    (wanted,) = (row for row in shared.metrics if row["step"] == 2)
    found = re.findall(r"^  (\w+): accuracy ([\d.]+) ± ([\d.]+).*?(?:pass@4 ([\d.]+))?$", run.text, re.MULTILINE)
    assert [source for source, *_ in found] == ["even", "reverse", "all"]
    for source, share, _, best in found[:2]:
        assert float(share) == pytest.approx(wanted[f"eval/{source}/pass@1"], abs=1e-4)
        assert float(best) == pytest.approx(wanted[f"eval/{source}/pass@4"], abs=1e-3)
    assert float(found[2][1]) == pytest.approx(np.mean([row["reward"] >= 0.3 for row in rows]), abs=1e-4)
    assert f"answers: {run.out / 'evaluation.jsonl'}" in run.text


def test_the_error_is_of_prompts_not_of_answers():
    rewards = [[1, 0.7 + 0.2 + 0.1], [1, 0], [0, 0], [0.9, 1.1]]  # shares 1, 1/2, 0, 1/2 of answers with a reward of 1
    samples = [Sample(g, [1], [2], [0.0], True, "", "", reward=r) for g, pair in enumerate(rewards) for r in pair]
    share, error = evaluation.accuracy(samples, pass_reward=1.0)
    assert (share, error) == (0.5, pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4)))
    assert math.isnan(evaluation.accuracy(samples[:2], pass_reward=1.0)[1])


def test_both_parses_of_an_evaluation_by_hand():
    """Three right answers of four, one of them after "####"; a reward of one part has no shares of parts."""
    parts = [{"gsm8k": 0.9, "strict": 0.1}, {"gsm8k": 0.9, "strict": 0.0}, {"gsm8k": 0.9, "strict": 0.0}, {}]
    samples = [
        Sample(n, [1], [2], [0.0], True, "", "math", reward=sum(p.values()), reward_parts=p)
        for n, p in enumerate(parts)
    ]
    samples.append(Sample(4, [1], [2], [0.0], True, "", "other", reward=1.0, reward_parts={"reward": 1.0}))
    found = step_metrics.evaluation(samples, EvalConfig(pass_reward=0.9))
    shares = {name: value for name, value in found.items() if "/part/" in name}
    assert shares == {"eval/math/part/gsm8k": 0.75, "eval/math/part/strict": 0.25}
    assert found["eval/math/pass@1"] == 0.75 and found["eval/math/avg@1"] == pytest.approx((0.9 * 3 + 0.1) / 4)


def test_without_data_to_evaluate_it_names_the_key(capfd):
    config = str(REPO / "configs/tiny.yaml")
    assert main(["--config", config, "--evaluate"]) == 2
    assert "--evaluate: data.eval is not set" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["--config", config, "--evaluate", "--dry-run"])


@pytest.mark.slow
@pytest.mark.gpu
def test_the_demo_learns(start):
    """On a GPU in bf16, where the reward at its end varies."""
    gpus = torch.cuda.device_count()
    ranks, bound = (min(gpus, 2), 0.5) if gpus else (2, 0.9)
    dtype = "model.dtype=bf16" if gpus else "model.dtype=fp32"
    run = start(ranks, "model.path=build/tiny/model", "data.train=build/tiny/train.jsonl", dtype)
    assert run.end() == 0, run.text
    rewards = [m["reward/mean"] for m in run.metrics]
    assert rewards[0] < 0.2 and sum(rewards[-10:]) / 10 >= bound
    assert all(m["sync/checked"] == 1 for m in run.metrics)
    assert sum(m["time/step"] for m in run.metrics) < 240
    assert gpus or 2 * run.metrics[-1]["mem/peak_gb"] < 6
