"""The second trainer: hand-worked numbers, a real run, what it finds, what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from config import Config
from tests.conftest import REPO, read_rows, write_rows
from tests.oracle import algorithm
from tests.oracle.comparison import Comparison
from tests.oracle.models import initial_factors, merge_factors, module_weights
from tests.oracle.recorded import Refusal, check_options, read_run
from tests.oracle.trainer import repeat, sampled_places

# ---------------------------------------------------------------- by hand


def answer(tokens: int, group: int = 0, of_tokens: list | None = None, **parts: float) -> dict:
    """An answer as rollouts/ has it, with rewards of tokens as [place, reward]."""
    found = {"group": group, "response_ids": [1] * tokens, "reward_parts": parts, "token_rewards": None}
    if of_tokens is not None:
        found["token_rewards"] = {"t": of_tokens}
        found["reward_parts"]["t"] = sum(value for _, value in of_tokens)
    found["reward"] = sum(found["reward_parts"].values())
    return found


def test_credit_of_tokens():
    """Cut after the first token, where an answer has a reward; the second answer ends there, and stays as it is."""
    answers = [answer(3, of_tokens=[[0, 1.0]], whole=2.0), answer(1, whole=0.5)]
    algo = {"advantage": "dr_grpo", "credit": "to_go"}
    free = [[0.0] * 3, [0.0]]
    assert algorithm.group_advantages(answers, free, algo) == [[1.25, 0.75, 0.75], [-1.25]]
    assert algorithm.group_advantages(answers, free, algo | {"credit": "answer"}) == [[1.25] * 3, [-1.25]]
    charged = [[0.0, 0.5, 0.5], [0.0]]
    assert algorithm.group_advantages(answers, charged, algo) == [[0.75, 0.25, 0.25], [-0.75]]


def test_whitening_goes_over_trained_tokens():
    white = algorithm.whiten([[1.0, 1.0], [-1.0]], [[True, False], [True]])
    assert white == [[pytest.approx(0.5**0.5)] * 2, [pytest.approx(-(0.5**0.5))]]


def test_schedules_and_parts():
    config = {
        "train": {"lr": 1.0, "steps": 5, "warmup_steps": 4},
        "algo": {"kl_coef": 0.5, "entropy_coef": 0.1},
        "rollout": {"temperature": 1.0},
        "schedule": dict.fromkeys(("lr", "kl_coef", "entropy_coef", "temperature")),
    }
    config["schedule"]["lr"] = {"shape": "cosine", "to": 0.0, "steps": 0}
    config["schedule"]["kl_coef"] = {"shape": "linear", "to": 0.0, "steps": 3}
    found = algorithm.scheduled(config, 3)
    assert found == {"lr": pytest.approx(0.5 * 0.75), "kl_coef": 0.0, "entropy_coef": 0.1, "temperature": 1.0}
    assert sampled_places({"turns": [2, 1, 3]}) == [0, 1, 3, 4, 5]


def test_adapters_and_experts():
    name = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    weights = {name.format(e, part): torch.full((2, 2), float(e)) for e in range(2) for part in ("gate", "up", "down")}
    lora = {"rank": 1, "alpha": 3.0, "targets": ["fc2"]}
    factors = initial_factors(weights, lora, "fp32")
    assert sorted(factors) == [
        name.format(e, "down").replace("weight", f"lora_{x}.weight") for e in (0, 1) for x in "AB"
    ]
    factors = {key: torch.ones_like(factor) for key, factor in factors.items()}
    merged = module_weights(merge_factors(weights, factors, lora, "fp32"))
    assert merged["model.layers.0.mlp.experts.down_proj"][:, 0, 0].tolist() == [3.0, 4.0]
    assert merged["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 4, 2)


def test_the_first_value_that_parts_is_kept():
    comparison = Comparison("fp32")
    comparison.step = 2
    comparison.check("entropy", 1.0, 1.0 + 1e-7)
    assert comparison.first is None
    comparison.check("loss/total", [0.5, 0.5], [0.5, 0.6])
    comparison.check("grad_norm", None, 1.0)
    assert comparison.first.startswith("step 2, loss/total: the run has 0.5, the second trainer 0.6: 0.1 apart, bound")
    assert [line.split()[-1] for line in comparison.table().splitlines()] == ["ok", "yes", "NO", "NO"]


# ---------------------------------------------------------------- a real run


@pytest.fixture
def copied(shared, tmp_path):
    """A copy of a real run's output, without checkpoints."""
    return shutil.copytree(shared.out, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "eval*"))


def audit(folder: Path) -> Comparison:
    """The run in this output folder, repeated and compared."""
    run = read_run(folder)
    comparison = Comparison(run.config["model"]["dtype"])
    repeat(run, comparison)
    return comparison


def test_a_given_run_is_repeated(request):
    """The run of --run, else none."""
    folder = request.config.getoption("--run")
    if folder is None:
        pytest.skip("--run OUTPUT_DIR names no run")
    comparison = audit(Path(folder))
    print(comparison.table())
    assert comparison.first is None, comparison.first


def test_a_real_run_is_repeated(shared):
    comparison = audit(shared.out)
    assert comparison.first is None, comparison.table()
    assert "export: weights" in comparison.quantities


def test_a_changed_record_is_named(copied):
    rows = read_rows(copied / "rollouts/step_000002.jsonl")
    trained = next(row for row in rows if row["advantage"])
    trained["advantage"] *= -1
    write_rows(copied / "rollouts/step_000002.jsonl", rows)
    lines = read_rows(copied / "metrics.jsonl")
    lines[-1]["loss/total"] += 0.1
    write_rows(copied / "metrics.jsonl", lines)
    assert audit(copied).first.startswith("step 2, sample: advantage: the run has")


def change_config(folder, key: str, value) -> None:
    """Set a key in the config.yaml of a run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    section, name = key.split(".")
    config[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("algo.advantage", "rank", "algo.advantage=rank: the second trainer knows grpo,"),
        ("algo.cov_share", 0.1, "algo.cov_share: the second trainer knows no such key"),
        ("rollout.vllm", {"quantization": "fp8"}, "rollout.vllm.quantization: an option that may change log-probs"),
        ("megatron.moe_aux_loss_coeff", 0.1, "megatron.moe_aux_loss_coeff: an option that may change"),
        ("rollout.top_p", 0.9, "rollout.top_p=0.9: the second trainer knows 1"),
        ("algo.replay_routes", True, "rollouts/ has the routes only with log.tokens=true"),
        ("model.path", "Qwen/Qwen2.5-0.5B", "no folder with safetensors"),
    ],
)
def test_a_configuration_that_cannot_be_repeated_is_refused(copied, key, value, reason):
    change_config(copied, key, value)
    with pytest.raises(Refusal, match=re.escape(reason)):
        read_run(copied)


def test_what_is_missing_is_refused(copied, tmp_path):
    lines = [line for line in read_rows(copied / "metrics.jsonl") if line["step"] != 1]
    write_rows(copied / "metrics.jsonl", lines)
    with pytest.raises(Refusal, match="every step from 1 is needed"):
        read_run(copied)
    with pytest.raises(Refusal, match=r"has no config\.yaml"):
        read_run(tmp_path)


def test_every_key_is_known():
    check_options(Config(model={"path": "m"}, data={"train": "d"}).model_dump())


def test_it_imports_nothing_of_the_trainer():
    code = "import sys, tests.oracle.trainer; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, capture_output=True, check=True)
    modules = json.loads(done.stdout.replace("'", '"'))
    top = {name.split(".")[0] for name in modules}
    assert "transformers" in top
    assert not top & {"train_grpo", "megatron_bridge", "rollout", "reward", "megatron", "vllm"}
    own = {name for name in modules if name.startswith(("support.step.", "support.proof."))}
    assert own == {"support.proof.formulas", "support.step.records"}


# ---------------------------------------------------------------- forks with a planted mistake

# Mistake → (file, line, what stands there instead, how the first value that parts begins)
MISTAKES = {
    "the wrong sign of the KL": (
        "loss_T = loss_T + algo.kl_coef * token_kl(",
        "loss_T = loss_T - algo.kl_coef * token_kl(", "step 2, loss/total",
    ),
    "prompt tokens are trained": (
        'parts["mask"] += [np.zeros(predicted, bool), s.sampled]',
        'parts["mask"] += [np.ones(predicted, bool), s.sampled]', "step 1, logp_gap/mean",
    ),
    "advantages of another answer": (
        "advantages_F = torch.from_numpy(advantages_N).float()",
        "advantages_F = torch.from_numpy(np.roll(advantages_N, 1)).float()",
        "step 1, grad_norm",  # the only mixed group has answers of one length: the ratio is 1, and the loss sum(A) / T
    ),
}  # fmt: skip

# Module of support/proof → what a fork appends to it so that its runs are not checked
UNCHECKED = {
    "rows.py": "\n\ndef check_credit(*_): ...\n\n\ndef check_update(*_): ...\n",
    "formulas.py": "\n\ndef check_loss(*_): ...\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_named(mistake, train, tmp_path):
    line, instead, first = MISTAKES[mistake]
    folder = tmp_path / "fork"
    shutil.copytree(REPO / "support", folder / "support", ignore=shutil.ignore_patterns("__pycache__"))
    for file in REPO.glob("*.py"):
        shutil.copy(file, folder / file.name)
    source = (folder / "train_grpo.py").read_text()
    assert source.count(line) == 1
    (folder / "train_grpo.py").write_text(source.replace(line, instead))
    for module, without in UNCHECKED.items():  # else the run itself notices the mistake
        with (folder / "support/proof" / module).open("a") as file:
            file.write(without)
    run = train(
        2, "train.steps=3", "train.warmup_steps=0", "train.lr=0.003", "algo.kl_coef=0.5", "rollout.prompts_per_step=4",
        "rollout.group_size=4", "rollout.max_logp_gap=inf", "train.save_every=0", script=folder / "train_grpo.py",
    )  # fmt: skip
    assert run.code == 0, run.text
    assert audit(run.out).first.startswith(first)
