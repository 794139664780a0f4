"""docs/configs.md names every file that trains a real model; some recipes run, on a CPU with small models."""

import re

import make_tiny
import pytest

import train_grpo
from config import EvalConfig
from support.base.read_config import load_config
from support.step import metrics
from support.step.records import Sample
from tests import hub_models
from tests.conftest import REPO

PAGE = (REPO / "docs/configs.md").read_text()


def test_every_file_is_on_the_page():
    assert all(path.stem in PAGE for path in hub_models.files())
    commands = re.findall(r"^    torchrun --nproc_per_node=(\d+) .*--config (\S+)", PAGE, re.MULTILINE)
    assert len(commands) >= 8
    for ranks, path in commands:
        assert hub_models.world_size(REPO / path) == int(ranks)


def test_a_card_that_is_too_small_is_told_with_what_helps(tiny, tmp_path, capfd, monkeypatch):
    """After the plan, and everything else that a dry run says; a larger card is fine."""
    monkeypatch.chdir(REPO)
    path = "configs/qwen2.5_0.5b_1gpu.yaml"
    shapes = hub_models.shape_overrides(load_config(path, []), tmp_path)
    (folder,) = tmp_path.iterdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((tiny / "model" / file).read_bytes())
    rows = [f"data.{part}={tiny / 'train.jsonl'}" for part in ("train", "eval")]
    command = ["--config", path, "--dry-run", *shapes, *rows, "data.prompt_key=prompt"]
    assert train_grpo.main([*command, "--gpu-memory-gb", "24"]) == 2
    out, err = capfd.readouterr()
    assert "200 prompts" in out and "error: the plan does not fit a GPU of 24.0 GB: train by" in err
    assert "  train: turn one of train.max_tokens_per_micro_batch down; " in err
    smaller = ["train.max_tokens_per_micro_batch=2048", "train.logprob_max_tokens_per_micro_batch=8192"]
    assert train_grpo.main([*command, "--gpu-memory-gb", "24", *smaller]) == 0


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


CPU = (
    "model.dtype=fp32", "model.fp32_head=false", "parallel.tp=1", "parallel.pp=1", "rollout.tp=1", "train.steps=2",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8", "data.max_prompt_tokens=512",
    "data.prompt_key=prompt", "data.answer_key=answer", "train.eval_every=2", "train.save_every=0",
    "rollout.gpu_memory_utilization=0.6",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["qwen2.5_7b_tools", "qwen2.5_distill_1gpu", "qwen2.5_1.5b_1gpu"])
def test_a_recipe_runs_with_a_small_model(stem, train_forked, tiny, tmp_path):
    cfg = load_config(str(REPO / f"configs/{stem}.yaml"), [])
    more = [f"data.eval={tiny / 'train.jsonl'}"]
    if cfg.algo.teacher:
        tokenizer = make_tiny.char_tokenizer("0123456789>+-=")
        make_tiny.save_model(tmp_path / "teacher", tokenizer, hidden=64, layers=2, seed=5)
        more.append(f"algo.teacher={tmp_path / 'teacher'}")
    run = train_forked(2, *CPU, *more, config=stem)
    assert run.code == 0, run.text
    last = run.metrics[-1]
    assert last["grad_norm"] is not None and "eval/reverse/pass@1" in last
    assert (last["turns/mean"] is not None) == bool(cfg.rollout.turns)
    assert (last["kl/teacher"] is not None) == bool(cfg.algo.teacher)
    assert ("eval/reverse/part/strict" in last) == isinstance(cfg.reward.default, dict)
