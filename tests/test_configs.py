"""Every file in configs/ loads, passes the checks of keys, and dry-runs in its own layout, with the shape of its own
model where it is on the hub; its plan of memory fits.

The data sets are on the hub, so one thing stays untested here: whether the real columns are named as the file says.
"""

import math
import shutil

import pytest

import train_grpo
from support.base.read_config import load_config
from support.check import checks, run_plan
from tests import hub_models
from tests.conftest import REPO

CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPO / "configs")))
def test_a_config_dry_runs(path, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    cfg = load_config(str(path), [])
    p = cfg.parallel
    ranks = math.lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp, cfg.rollout.tp)
    shapes = [f"model.path={tiny / 'model'}", "data.max_prompt_tokens=8"]
    if cfg.model.path in hub_models.SHAPES:
        ranks, shapes = hub_models.world_size(path), hub_models.shape_overrides(cfg, tmp_path)
        for folder in tmp_path.iterdir():
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(tiny / "model" / file, folder)
    checks.check_config(cfg, ranks)
    train_grpo.rehearse(cfg)
    assert run_plan.describe(cfg, ranks)
    rows = tiny / "train.jsonl"
    data = [f"data.train={rows}", "data.prompt_key=prompt", "data.answer_key=answer", "data.custom=null"]
    if cfg.data.eval is not None:
        data.append(f"data.eval={rows}")
    command = ["--config", str(path), "--dry-run", "--world-size", str(ranks), "--gpu-memory-gb", "80"]
    assert train_grpo.main([*command, *shapes, *data]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "200 prompts" in out and "does not fit" not in out and "no room" not in out
