"""One tiny model and one way to start torchrun, shared by all tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tools"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with an untrained tied Qwen2 (2 layers) and the reversal task."""
    import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny.save_model(folder / "model", make_tiny.char_tokenizer("0123456789>+-="), hidden=64, layers=2)
    rows = make_tiny.reversal_rows(3, 200, seed=0)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Run:
    """A finished torchrun: its exit code, what it printed, and its output folder."""

    def __init__(self, process: subprocess.CompletedProcess, out: Path):
        self.code, self.text, self.out = process.returncode, process.stdout, out

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").open()]

    def rollouts(self, step: int) -> list[dict]:
        return [json.loads(line) for line in (self.out / f"rollouts/step_{step:06d}.jsonl").open()]


@pytest.fixture
def train(tiny, tmp_path):
    """train(nproc, "section.key=value", ..., script=...) → Run: torchrun on configs/tiny.yaml with the tiny model."""

    def run(nproc: int, *overrides: str, script: Path = REPO / "train_grpo.py", config="configs/tiny.yaml") -> Run:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", str(script),
            "--config", str(REPO / config), f"output_dir={tmp_path / 'out'}", f"model.path={tiny / 'model'}",
            f"data.train={tiny / 'train.jsonl'}", *overrides,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
        process = subprocess.run(
            command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )
        return Run(process, tmp_path / "out")

    return run
