"""Every file in configs/ loads, passes the checks of keys, and dry-runs in its own layout with a tiny model.

Their own models and data sets are on the hub, so two things stay untested here: whether the layout divides the real
model, and whether the real columns are named as the file says.
"""

import math

import pytest

import train_grpo
from support import checks
from support.read_config import load_config
from tests.conftest import REPO

CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPO / "configs")))
def test_a_config_dry_runs(path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    cfg = load_config(str(path), [])
    p = cfg.parallel
    ranks = math.lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp, cfg.rollout.tp)
    checks.check_config(cfg, ranks)
    train_grpo.rehearse(cfg)
    assert checks.describe(cfg, ranks)
    overrides = [
        f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", "data.prompt_key=prompt",
        "data.max_prompt_tokens=8",
    ]  # fmt: skip
    command = ["--config", str(path), "--dry-run", "--world-size", str(ranks), *overrides]
    assert train_grpo.main(command) == 0, capsys.readouterr().err
    assert "200 prompts" in capsys.readouterr().out
