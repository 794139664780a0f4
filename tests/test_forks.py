"""The diffs of docs/forking.md apply, run and are as short as stated, on a copy of the script that no fork changes.

After a change of train_grpo.py: `cp train_grpo.py tests/data/train_grpo_pinned.py`, then mend the diffs that fail here.
"""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from support.read_config import load_config
from tests.conftest import REPO

PINNED = REPO / "tests/data/train_grpo_pinned.py"
TITLES = r"^##+ (.+)$"


def documented_forks() -> dict[str, tuple[int, list[str], str]]:
    """{title: (changed lines as stated, overrides of its run, diff)} of each section of docs/forking.md with a diff."""
    _, *parts = re.split(TITLES, (REPO / "docs/forking.md").read_text(), flags=re.MULTILINE)
    forks = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        diff = re.search(r"```diff\n(.*?)```", body, flags=re.DOTALL)
        if diff:
            lines, run = re.search(r"(\d+) changed lines", body), re.search(r'make demo(?: ARGS="(.*?)")?`', body)
            forks[title] = int(lines[1]), (run[1] or "").split(), diff[1]
    return forks


FORKS = documented_forks()


def apply(diff: str, script: Path, folder: Path) -> subprocess.CompletedProcess:
    """Apply a diff to a copy of the script, which becomes folder/train_grpo.py."""
    (folder / "train_grpo.py").write_bytes(script.read_bytes())
    return subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, capture_output=True)


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(title) → the pinned script with that diff, as a module."""

    def load(title: str) -> types.ModuleType:
        applied = apply(FORKS[title][2], PINNED, tmp_path)
        assert applied.returncode == 0, applied.stderr
        file = tmp_path / "train_grpo.py"
        assert file.read_bytes() != PINNED.read_bytes()
        spec = importlib.util.spec_from_file_location("forked_train_grpo", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "forked_train_grpo", module)  # dataclasses look their module up
        monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # no requirement of ours
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("title", FORKS)
def test_a_diff_of_the_docs_applies_and_runs(title, fork):
    stated, overrides, diff = FORKS[title]
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= stated
    fork(title).rehearse(load_config(str(REPO / "configs/tiny.yaml"), overrides))


def title_of(word: str) -> str:
    return next(title for title in FORKS if word in title)


def test_clip_cov_by_hand(fork):
    module = fork(title_of("Clip-Cov"))
    samples = [module.Sample(0, [1], [2, 3], logp, True, "", "") for logp in ([-1.0, -2.0], [-3.0, -4.0])]
    batch = dataclasses.replace(module.flatten(samples), advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    # Log-probs less their mean: 1.5, 0.5, -0.5, -1.5; so the products are 1.5, 0.5, 0.5, 1.5.
    assert module.clip_cov(batch, share=0.5).tolist() == [0, 1, -1, 0]
    first = dataclasses.replace(batch, advantages=torch.tensor([2.0, 1.0, -1.0, -1.0]))
    assert module.clip_cov(first, share=0.0).tolist() == [0, 1, -1, -1]


def test_the_diffs_apply_to_todays_script_too(tmp_path):
    """A hint, not a failure: in a fork the script differs, as it should."""
    script = REPO / "train_grpo.py"
    stale = [title for title, (_, _, diff) in FORKS.items() if apply(diff, script, tmp_path).returncode]
    hint = "If this is no fork, see the head of tests/test_forks.py"
    if stale:
        warnings.warn(f"diffs that no longer apply to train_grpo.py: {'; '.join(stale)}. {hint}", stacklevel=1)
    elif script.read_bytes() != PINNED.read_bytes():
        warnings.warn(f"train_grpo.py is not its pinned copy any more, but all diffs apply to it. {hint}", stacklevel=1)
