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
SAMPLES = [{"response_ids": [3, 4, 0], "rollout_logp": [-0.5, -0.25, -1.0], "reward": 1.0, "turns": [3]}]
WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.zeros(3)}


def write_run(folder: Path, metrics=METRICS, samples=SAMPLES, weights=WEIGHTS) -> str:
    """The output folder of a run; returns its path."""
    for name in ("rollouts", "hf/step_000002"):
        (folder / name).mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "rollouts/step_000001.jsonl", samples)
    save_file(weights, folder / "hf/step_000002/model-00000.safetensors")
    return str(folder)


def test_runs_that_differ_in_times_alone_are_equal(tmp_path, capsys):
    other = [METRICS[0] | {"time/step": 9.0, "mem/peak_gb": None, "idle/save": 0.5}, METRICS[1]]
    assert main(write_run(tmp_path / "a"), write_run(tmp_path / "b", other)) == 0
    assert capsys.readouterr().out.count(": equal, ") == 3


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"metrics": [METRICS[0], METRICS[1] | {"reward/mean": 0.30000000000000004}]},
         "first difference: line 2, step 2, reward/mean: A 0.3, B 0.30000000000000004\n"),
        ({"samples": [SAMPLES[0] | {"response_ids": [3, 7, 0]}]},
         "rollouts/step_000001.jsonl line 1, response_ids: item 1: A 4, B 7\n"),
        ({"weights": WEIGHTS | {"norm": torch.tensor([0.0, -0.0, 0.0])}},
         "hf/step_000002, norm: element 1 of 3: A 0.0, B -0.0\n"),
        ({"weights": {"norm": WEIGHTS["norm"]}}, "only in A: 1 values, the first is hf/step_000002, embed\n"),
    ],
)  # fmt: skip
def test_a_planted_difference_is_found_and_named(tmp_path, capsys, change, wanted):
    assert main(write_run(tmp_path / "a"), write_run(tmp_path / "b", **change)) == 1
    printed = capsys.readouterr().out
    assert wanted in printed and printed.count("DIFFERENT") == 1
