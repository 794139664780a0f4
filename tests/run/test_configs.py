"""Every file in configs/ dry-runs in its own layout, with the shape of its own model where it is on the hub, and fits.

test_advice.py trains those in ablations/, which have no dry run here. One thing stays
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
from tests.conftest import REPO, read_rows, write_rows

CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
EVEN = "megatron.account_for_embedding_in_pipeline_split=true megatron.account_for_loss_in_pipeline_split=true"
UNEVEN = (REPO / "configs/qwen3_235b_a22b.yaml", f"parallel.pp=8 parallel.ep=8 {EVEN}")
LARGE = (
    "qwen2.5_7b_tools", "qwen2.5_14b", "qwen2.5_32b", "qwen2.5_32b_8gpu", "qwen2.5_72b", "qwen3.5_27b",
    "qwen3.5_35b_a3b", "qwen3_235b_a22b",
)  # fmt: skip
CASES = [
    pytest.param(path, "", marks=pytest.mark.slow if path.stem in LARGE else ())
    for path in CONFIGS
    if path.parent.name != "ablations"
]
CASES += [pytest.param(*UNEVEN, marks=pytest.mark.slow)]


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

    rows = tmp_path / "train.jsonl"
    write_rows(rows, read_rows(tiny / "train.jsonl")[:4])  # each is graded before a start
    data = [f"data.train={rows}", "data.prompt_key=prompt", "data.answer_key=answer", "data.custom=null"]
    data += ["reward.workers=1"]
    if cfg.data.eval is not None:
        data.append(f"data.eval={rows}")

    size = re.search(r"GPUs of (\d+) GB", path.read_text())
    memory = size[1] if size else "80"
    command = ["--config", str(path), "--dry-run", "--world-size", str(ranks), "--gpu-memory-gb", memory]
    assert train_grpo.main([*command, *shapes, *data, *more.split()]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "4 prompts" in out and "does not fit" not in out and "no room" not in out


def test_every_file_of_a_real_model_is_on_the_page():
    page = (REPO / "docs/configs.md").read_text()
    of_hub = [path for path in CONFIGS if load_config(str(path), []).model.path in hub_models.SHAPES]
    assert of_hub and all(path.stem in page for path in of_hub)
    commands = re.findall(r"^    torchrun --nproc_per_node=(\d+) .*--config (\S+)", page, re.MULTILINE)
    assert len(commands) >= 8
    for ranks, path in commands:
        assert hub_models.world_size(REPO / path) == int(ranks)
