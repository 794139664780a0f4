"""The second trainer: a real run, what it finds, what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPO, read_rows, write_rows
from tests.oracle.trainer import read_run, repeat

# ---------------------------------------------------------------- a real run


@pytest.fixture
def copied(shared, tmp_path):
    """A copy of a real run's output, without checkpoints."""
    return shutil.copytree(shared.out, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "eval*"))


def test_a_given_run_is_repeated(request):
    """The run of --run, else none."""
    folder = request.config.getoption("--run")
    if folder is None:
        pytest.skip("--run OUTPUT_DIR names no run")
    comparison = repeat(read_run(Path(folder)))
    print(comparison.table())
    assert comparison.first is None, comparison.first


def test_a_real_run_is_repeated(shared):
    comparison = repeat(read_run(shared.out))
    assert comparison.first is None, comparison.table()
    assert {"export: weights", "answer: number of a prompt's in an evaluation"} <= comparison.quantities.keys()


CHANGES = {  # quantity that parts → how the row of an answer, or the metrics of step 1, is changed
    "answer: seed": lambda row: {"seed": row["seed"] + 1},
    "answer: finished": lambda row: {"finished": not row["finished"]},
    "answer: graded text": lambda row: {"text": f"{row['text']}<eos>"},
    "sample: advantage": lambda row: {"advantage": row["advantage"] + 1},
    "loss/total": lambda line: {"loss/total": line["loss/total"] + 1},
    "grad_norm": lambda line: {"grad_norm": line["grad_norm"] + 1},
}


@pytest.mark.parametrize("quantity", CHANGES)
def test_a_changed_record_is_named(copied, quantity):
    rows = read_rows(copied / "rollouts/step_000001.jsonl")
    (line,) = (line for line in read_rows(copied / "metrics.jsonl") if line["step"] == 1)
    changed = line if quantity in line else next(row for row in rows if row["advantage"])
    changed |= CHANGES[quantity](changed)
    write_rows(copied / "rollouts/step_000001.jsonl", rows)
    write_rows(copied / "metrics.jsonl", [line])
    assert repeat(read_run(copied)).first.startswith(f"step 1, {quantity}")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("algo.advantage", "rank", "algo.advantage=rank: the second trainer knows grpo,"),
        ("rollout.vllm", {"quantization": "fp8"}, "rollout.vllm.quantization: an option that may change log-probs"),
        ("algo.replay_routes", True, "only with one update a step"),
        ("model.path", "Qwen/Qwen2.5-0.5B", "no folder with safetensors"),
    ],
)
def test_a_configuration_that_cannot_be_repeated_is_refused(copied, key, value, reason):
    config = yaml.safe_load((copied / "config.yaml").read_text())
    section, name = key.split(".")
    config[section][name] = value
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_run(copied)


def test_what_is_missing_is_refused(copied, tmp_path):
    write_rows(copied / "metrics.jsonl", [line for line in read_rows(copied / "metrics.jsonl") if line["step"] != 1])
    with pytest.raises(ValueError, match="every step from 1 is needed"):
        read_run(copied)
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        read_run(tmp_path)


def test_it_imports_nothing_of_the_trainer():
    code = "import sys, tests.oracle.trainer; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, capture_output=True, check=True)
    modules = json.loads(done.stdout.replace("'", '"'))
    top = {name.split(".")[0] for name in modules}
    assert "transformers" in top
    assert not top & {"train_grpo", "megatron_bridge", "rollout", "reward", "megatron", "vllm"}
    own = {name for name in modules if name.startswith(("support.step.", "support.proof."))}
    assert own == {"support.proof.formulas", "support.step.records"}
