"""No dead knobs: every key of the configuration is used, and a budget reaches the phase it names and no other."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from config import config_items
from support import grading as rewards
from tests.conftest import REPO
from train_grpo import Config, RewardConfig

# Every optional path at once: evaluation, KL, corrections, penalties, several rounds and updates, saving, exporting.
OPTIONAL_PATHS = (
    "data.eval={train}", "train.eval_every=1", "data.chat_template=true", "data.system_prompt='1'",
    "data.max_prompt_tokens=20", "rollout.prompts_per_step=4", "rollout.group_size=8", "algo.kl_coef=0.1",
    "algo.correction=tis", "algo.max_rounds=2", "algo.overlong_buffer=2", "algo.mask_truncated=true",
    "algo.loss_norm=seq_mean_token_sum_norm", "train.updates_per_step=2", "train.steps=2", "train.lr=0",
    "train.save_every=1", "train.export_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def worker(tiny, tmp_path_factory):
    """worker("section.key=value", ...) → what tests/knobs_worker.py found."""

    def run(*overrides: str) -> dict:
        folder = tmp_path_factory.mktemp("knobs")
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1",
             str(REPO / "tests/knobs_worker.py"), str(folder / "found.json"), "--config", "configs/tiny.yaml",
             f"output_dir={folder / 'out'}", f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}",
             *(override.format(train=tiny / "eval.jsonl") for override in OPTIONAL_PATHS), *overrides],
            cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return json.loads((folder / "found.json").read_text())

    (tiny / "eval.jsonl").write_text("".join((tiny / "train.jsonl").open().readlines()[:4]))
    return run


@pytest.fixture(scope="module")
def found(worker) -> dict:
    return worker()


def test_every_key_is_read(found):
    handed_over = {f"reward.{field.name}" for field in dataclasses.fields(RewardConfig)}  # see the next test
    unread = {key for key, _ in config_items(Config())} - set(found["read"]) - handed_over
    assert not unread
    assert "reward.max_error_frac" in found["read"]


@pytest.mark.parametrize(
    "key, value",
    [
        ("default", "gsm8k"), ("by_source", {"a": "exact"}), ("custom", "file.py:f"), ("timeout_s", 3.0),
        ("workers", 2), ("options", {"model": {}}), ("memory_gb", 1.0),
    ],
)  # fmt: skip
def test_reward_keys_reach_the_grader(key, value):
    def built(cfg: RewardConfig) -> dict:
        grader = rewards.Grader(**dataclasses.asdict(cfg))
        state = {name: getattr(grader, name) for name in ("default", "by_source", "custom", "options", "timeout_s")}
        state |= {"memory_gb": grader.memory_gb, "workers": len(grader.workers)}
        grader.close()
        return state

    assert built(RewardConfig(**{key: value})) == {**built(RewardConfig()), key: value}


def test_budgets_reach_their_own_phase(found):
    """One step of 32 samples and two updates, packed again with other budgets."""
    packed = found["packed"]
    assert packed["none"] == {"logprob": [1, 1], "train": [1, 1]} == packed["none again"]  # old and ref; two updates
    assert packed["train"]["logprob"] == [1, 1] and min(packed["train"]["train"]) > 1
    assert packed["logprob"]["train"] == [1, 1] and min(packed["logprob"]["logprob"]) > 1


@pytest.mark.slow
def test_the_budget_of_vllm_reaches_vllm_alone(found, worker):
    """The answers are the same, and neither phase of the trainer notices."""
    fewer = worker("rollout.vllm.max_num_seqs=3")
    assert fewer["max_num_seqs"] == 3 != found["max_num_seqs"]
    assert fewer["response_ids"] == found["response_ids"] and fewer["packed"] == found["packed"]
