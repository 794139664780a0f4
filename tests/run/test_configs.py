"""Every file in configs/ dry-runs in its own layout, with the shape of its own model where it is on the hub, and fits.

Some train a small model; test_advice.py trains those in ablations/, which have no dry run here. One thing stays
untested: whether the columns of the data on the hub are named as it says.
"""

import math
import re
import shutil
from pathlib import Path

import pytest

import train_grpo
from grpo.parts.base.read_config import load_config
from tests import hub_models
from tests.conftest import REPO, tiny_model

CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
EVEN = "megatron.account_for_embedding_in_pipeline_split=true megatron.account_for_loss_in_pipeline_split=true"
CASES = [(path, "") for path in CONFIGS if path.parent.name != "ablations"] + [
    (REPO / "configs/qwen3_235b_a22b.yaml", f"parallel.pp={pp} parallel.ep={64 // pp} {EVEN}") for pp in (4, 8)
]


@pytest.mark.parametrize("path, more", CASES, ids=lambda value: Path(value).stem)
def test_a_config_dry_runs(path, more, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    cfg = load_config(str(path), [])
    p = cfg.parallel
    ranks = math.lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp, cfg.rollout.tp)

    shapes = [f"model.path={tiny / 'model'}", "data.max_prompt_tokens=8"]
    if cfg.model.path in hub_models.SHAPES:
        ranks = hub_models.world_size(path)
        shapes = [f"model.path={hub_models.model_folder(cfg.model.path, tmp_path)}"]
        if cfg.algo.teacher:
            shapes.append(f"algo.teacher={hub_models.model_folder(cfg.algo.teacher, tmp_path)}")
        for folder in tmp_path.iterdir():
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(tiny / "model" / file, folder)

    rows = tiny / "train.jsonl"
    data = [f"data.train={rows}", "data.prompt_key=prompt", "data.answer_key=answer", "data.custom=null"]
    if cfg.data.eval is not None:
        data.append(f"data.eval={rows}")

    command = ["--config", str(path), "--dry-run", "--world-size", str(ranks), "--gpu-memory-gb", "80"]
    assert train_grpo.main([*command, *shapes, *data, *more.split()]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "200 prompts" in out and "does not fit" not in out and "no room" not in out


def test_every_file_of_a_real_model_is_on_the_page():
    page = (REPO / "docs/configs.md").read_text()
    of_hub = [path for path in CONFIGS if load_config(str(path), []).model.path in hub_models.SHAPES]
    assert of_hub and all(path.stem in page for path in of_hub)
    commands = re.findall(r"^    torchrun --nproc_per_node=(\d+) .*--config (\S+)", page, re.MULTILINE)
    assert len(commands) >= 8
    for ranks, path in commands:
        assert hub_models.world_size(REPO / path) == int(ranks)


CPU = (
    "model.dtype=fp32", "model.fp32_head=false", "parallel.tp=1", "parallel.pp=1", "rollout.tp=1", "train.steps=2",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8", "data.max_prompt_tokens=512",
    "data.prompt_key=prompt", "data.answer_key=answer", "train.eval_every=2", "train.save_every=0",
    "rollout.gpu_memory_utilization=0.6",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["qwen2.5_7b_tools", "qwen2.5_distill_1gpu", "qwen2.5_1.5b_1gpu"])
def test_a_config_trains_a_small_model(stem, train_forked, tiny, tmp_path):
    cfg = load_config(str(REPO / f"configs/{stem}.yaml"), [])
    more = [f"data.eval={tiny / 'train.jsonl'}"]
    if cfg.algo.teacher:
        more.append(f"algo.teacher={tiny_model(tmp_path / 'teacher', seed=5)}")
    run = train_forked(2, *CPU, *more, config=stem, code=0)
    last = run.metrics[-1]
    assert last["grad_norm"] is not None and "eval/reverse/pass@1" in last
    assert (last["turns/mean"] is not None) == bool(cfg.rollout.turns)
    assert (last["kl/teacher"] is not None) == bool(cfg.algo.teacher)
    assert ("eval/reverse/part/strict" in last) == isinstance(cfg.reward.default, dict)
