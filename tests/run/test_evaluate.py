"""--evaluate: the answers and the accuracy that a training run's own evaluation of the same weights has."""

import math
import re

import numpy as np
import pytest

from config import EvalConfig
from support.run import evaluation, launch
from support.step import metrics
from tests.conftest import REPO, read_rows
from train_grpo import Sample


def test_it_equals_the_evaluation_before_the_first_step(shared, train_forked):
    """On two engines, as there; it needs no data.train."""
    own = [override for override in shared.overrides if not override.startswith("data.train=")]
    run = train_forked(2, "--evaluate", *own, "data.train=nowhere.jsonl", code=0)
    assert [path.name for path in run.out.iterdir()] == ["evaluation.jsonl"]
    rows = read_rows(run.out / "evaluation.jsonl")
    assert rows == shared.rollouts(0, kind="eval")
    wanted = next(row for row in shared.metrics if row["step"] == 0 and "time/eval" in row)
    found = re.findall(r"^  (\w+): accuracy ([\d.]+) ± ([\d.]+).*?(?:pass@4 ([\d.]+))?$", run.text, re.MULTILINE)
    assert [source for source, *_ in found] == ["even", "reverse", "all"]
    for source, share, _, best in found[:2]:
        assert float(share) == pytest.approx(wanted[f"eval/{source}/pass@1"], abs=1e-4)
        assert float(best) == pytest.approx(wanted[f"eval/{source}/pass@4"], abs=1e-3)
    assert float(found[2][1]) == pytest.approx(np.mean([row["reward"] >= 0.3 for row in rows]), abs=1e-4)
    assert f"answers: {run.out / 'evaluation.jsonl'}" in run.text


def test_that_of_a_checkpoint_equals_the_one_after_its_step(shared, train_forked):
    run = train_forked(2, "--evaluate", *shared.overrides, f"resume={shared.out}/checkpoints/step_000002", code=0)
    assert read_rows(run.out / "evaluation.jsonl") == shared.rollouts(2, kind="eval")
    assert f"evaluation of {run.out}/hf/step_000002" in run.text


def test_the_error_is_of_prompts_not_of_answers():
    rewards = [[1, 1], [1, 0], [0, 0], [0.9, 1.1]]  # shares 1, 1/2, 0, 1/2 of answers with a reward of 1
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
    found = metrics.evaluation(samples, EvalConfig(pass_reward=0.9))
    shares = {name: value for name, value in found.items() if "/part/" in name}
    assert shares == {"eval/math/part/gsm8k": 0.75, "eval/math/part/strict": 0.25}
    assert found["eval/math/pass@1"] == 0.75 and found["eval/math/avg@1"] == pytest.approx((0.9 * 3 + 0.1) / 4)


def test_without_data_to_evaluate_it_names_the_key(capfd):
    config = str(REPO / "configs/tiny.yaml")
    assert launch.command(["--config", config, "--evaluate"], "", None, None, None, None) == 2
    assert "--evaluate: data.eval is not set" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        launch.command(["--config", config, "--evaluate", "--dry-run"], "", None, None, None, None)
