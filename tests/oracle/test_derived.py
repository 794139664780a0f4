"""What the oracle derives anew: metrics of answers, GDPO's advantages, and what others load of an export."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import train_grpo
from grpo.step import gdpo, metrics
from grpo.step.records import Collected, Sample
from oracle import algorithm, exports
from oracle.grading import Grader
from oracle.metrics import of_evaluation, of_samples
from oracle.models import module_weights, read_weights
from oracle.report import Report
from oracle.run import Recorded
from oracle.trainer import Trainer, weight_of
from rollout import Trace
from tests.conftest import tiny_config, tiny_model


@pytest.fixture
def samples():
    """Answers of three sources, of several parts and turns."""
    draw = np.random.default_rng(0)
    found = []
    for group in range(6):
        for _ in range(4):
            turns = [2, 1, 1 + int(draw.integers(3))]
            parts = {"x": 0.5 * float(draw.integers(2)), "y/q": -2.0 * float(draw.random()), "overlong": -0.1}
            if draw.random() < 0.2:
                del parts["x"]
            if group == 5:
                parts = {"x": 0.5}
            found.append(
                Sample(
                    group=group, prompt_ids=[1] * (group + 1), response_ids=[2] * sum(turns),
                    rollout_logp=[0.0] * sum(turns), finished=draw.random() < 0.7, text="", source=f"s{group % 3}",
                    trace=Trace(turns=turns), graded="timeout" if draw.random() < 0.2 else "ok", reward_parts=parts,
                    reward=sum(parts.values()),
                )
            )  # fmt: skip
    return found


def rows_of(samples):
    return json.loads(json.dumps([s.as_row() for s in samples], default=lambda array: array.tolist()))


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path):
    """A published Qwen3.5 has all experts of a layer in one; an export has a tensor for each."""
    layer = "model.layers.0.mlp.experts"
    whole = {f"{layer}.gate_up_proj": torch.arange(24.0).view(2, 4, 3), f"{layer}.down_proj": torch.ones(2, 3, 2)}
    save_file(whole, tmp_path / "model.safetensors")
    weights = read_weights(tmp_path, "fp32", tied=False)
    assert weights[f"{layer}.1.up_proj.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]
    again = module_weights(weights)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


SECRETS = {  # of the row → what is wrong with a conversation in which a guess of 3 is too low
    "7": None, "1": "the environment replies '-', its tokens are '+'",
    "3": "the environment replies None, its tokens are '+'",
}  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_a_conversation_with_the_row_of_another_is_named(secret):
    game = "examples/tiny_turns.py"
    grader = Grader(tiny_config(f"rollout.turns={game}:higher_or_lower", f"reward.custom={game}:won"))
    answer = {"text": "3+5", "source": "default", "response_ids": [5, 13, 7]}
    prompt = SimpleNamespace(row={"prompt": ">", "answer": secret}, answer=secret)
    found, _ = grader.parts(answer, prompt, ["3", "+", "5"], ended=True)
    assert found == (SECRETS[secret] or {"reward": 0.2}) and grader.has_returned


def test_metrics_of_answers(samples):
    cfg = tiny_config("rollout.turns=a.py:b", "rollout.prompts_per_step=6", "eval.samples=4", "eval.pass_reward=-0.5")
    rows = rows_of(samples)
    theirs = metrics.sample_metrics(Collected(samples, samples, 1, []), has_turns=True)
    ours = of_samples(rows, cfg)
    assert ours == pytest.approx({name: theirs[name] for name in ours})
    assert theirs.keys() - ours.keys() == {"groups/sampled", "groups/trained", "groups/rounds"}
    assert of_evaluation(rows, cfg.eval) == pytest.approx(metrics.evaluation(samples, cfg.eval))

    algo = SimpleNamespace(max_rounds=3)
    rounds = algorithm.rounds_of(rows, SimpleNamespace(rollout=cfg.rollout, algo=algo))
    assert rounds == [6, 1, 1], "a group has equal rewards"


def test_advantages_by_gdpo(samples):
    reward = SimpleNamespace(by_source={f"s{n}": {"x": 0.5, "y": -2.0} for n in range(3)}, default="custom")
    cfg = SimpleNamespace(reward=reward, algo=SimpleNamespace(overlong_coef=0.1))
    rewards = gdpo.normalize_parts(samples, reward, 0.1)
    theirs = train_grpo.group_advantages(rewards, np.array([s.group for s in samples]), "gdpo")
    answers = []
    for row in rows_of(samples):
        weights = {part: weight_of(part, row["source"], cfg) for part in row["reward_parts"]}
        answers.append(SimpleNamespace(row=row, part_weights=weights, sampled=[0], is_trained=True))
    found = algorithm.advantages_of(answers, SimpleNamespace(advantage="gdpo"))
    assert found == pytest.approx(theirs) and found.any()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


def judged(base, tmp_path):
    """What is said of the folder hf/step_000001 of a run."""
    cfg = tiny_config(f"model.path={base}")
    run = Recorded(tmp_path, cfg, {}, [1], [])
    state = SimpleNamespace(run=run, cfg=cfg, report=Report(run), trainer=Trainer(cfg))
    exports.judge_files(state, tmp_path / "hf/step_000001")
    exports.judge_loaded(state, tmp_path / "hf/step_000001", [{"prompt_ids": [3, 4, 5] * 5, "response_ids": [6, 7]}])
    return state.report.items["exports"]


CHANGES = {  # change of an export's config.json → whether transformers computes something else with it
    "none": ({}, False),
    "another base of its positions": ({"rope_theta": 100.0, "rope_parameters": None}, True),
    "another epsilon": ({"rms_norm_eps": 0.1}, True),
    "another dtype": ({"dtype": "float16"}, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_export_is_what_its_base_says(base, tmp_path, change):
    values, computes = CHANGES[change]
    folder = shutil.copytree(base, tmp_path / "hf/step_000001")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    problems = list(judged(base, tmp_path).problems.values())
    assert any("config.json" in problem for problem in problems) == bool(values)
    assert any("loaded: log-probs" in problem for problem in problems) == computes
