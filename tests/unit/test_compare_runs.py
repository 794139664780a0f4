"""Two runs compared bit for bit: equal ones, and one planted difference of each kind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compare_runs import main
from tests.conftest import write_rows

METRICS = [
    {"step": 1, "reward/mean": 0.1, "grad_norm": float("nan"), "kl/ref": None, "time/step": 1.0, "mem/peak_gb": 1.0},
    {"step": 2, "reward/mean": 0.3, "grad_norm": 0.5, "kl/ref": None, "speed/samples_per_s": 3.0, "idle_frac": 0.1},
]
SAMPLES = [
    {"response_ids": [3, 4, 0], "rollout_logp": [-0.5, -0.25, -1.0], "reward": 1.0, "advantage": 0.5, "turns": [3]},
    {"response_ids": [5], "rollout_logp": [-0.125], "reward": 0.0, "advantage": -0.5, "turns": [1]},
]
WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.ones(4, dtype=torch.bfloat16)}


def write_run(folder: Path, metrics=METRICS, samples=SAMPLES, weights=WEIGHTS) -> str:
    """The output folder of a run; returns its path."""
    for name in ("rollouts", "hf/step_000002"):
        (folder / name).mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "rollouts/step_000001.jsonl", samples)
    save_file(weights, folder / "hf/step_000002/model-00000.safetensors")
    return str(folder)


def changed(rows: list[dict], number: int, **values) -> list[dict]:
    """A copy of the rows with other values in one of them."""
    return [row | values if i == number else row for i, row in enumerate(rows)]


def test_runs_that_differ_in_times_alone_are_equal(tmp_path, capsys):
    other = changed(METRICS, 0, **{"time/step": 9.0, "mem/peak_gb": None, "idle/save": 0.5})
    assert main(write_run(tmp_path / "a"), write_run(tmp_path / "b", other)) == 0
    assert capsys.readouterr().out.count(": equal, ") == 3


NORM = torch.ones(4, dtype=torch.bfloat16)
NORM[2] = 1.0078125  # the next number of bfloat16
SIGN = WEIGHTS["embed"].clone()
SIGN[0, 0] = -0.0


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"metrics": changed(METRICS, 1, **{"reward/mean": 0.30000000000000004})},
            "metrics: DIFFERENT, 8 values compared\n"
            "  first difference: line 2, step 2, reward/mean: A 0.3, B 0.30000000000000004\n",
        ),
        ({"metrics": changed(METRICS, 0, grad_norm=0.0)}, "line 1, step 1, grad_norm: A NaN, B 0.0\n"),
        (
            {"samples": changed(SAMPLES, 0, response_ids=[3, 7, 0])},
            "rollouts/step_000001.jsonl line 1, response_ids: item 1: A 4, B 7\n",
        ),
        ({"weights": WEIGHTS | {"norm": NORM}}, "hf/step_000002, norm: element 2 of 4: A 1.0, B 1.0078125\n"),
        ({"weights": WEIGHTS | {"embed": SIGN}}, "embed: element 0 of 6: A 0.0, B -0.0\n"),
        (
            {"weights": {"norm": WEIGHTS["norm"]}},
            "weights: DIFFERENT, 2 values compared\n  only in A: 1 values, the first is hf/step_000002, embed\n",
        ),
        ({"metrics": METRICS[:1]}, "only in A: 4 values, the first is line 2, step 2, step\n"),
    ],
)
def test_a_planted_difference_is_found_and_named(tmp_path, capsys, change, wanted):
    assert main(write_run(tmp_path / "a"), write_run(tmp_path / "b", **change)) == 1
    printed = capsys.readouterr().out
    assert wanted in printed and printed.count("DIFFERENT") == 1
