"""The patches of this repository, applied to a copy of it and run."""

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPO, ForkedTraining, differs_from_upstream
from tests.fork_server import ForkServer

PATCHES = {path.stem: path for path in sorted((REPO / "recipes").glob("*.patch"))}
EXERCISES = {path.stem: path for path in sorted((REPO / "docs/exercises").glob("*.patch"))}


def new_files(diff) -> list[str]:
    """Files that a diff makes."""
    return re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", diff, flags=re.MULTILINE)


def changed_files(diff) -> list[str]:
    """Files that a diff changes, in its order."""
    return re.findall(r"^--- a/(.+)$", diff, flags=re.MULTILINE)


def apply(name, folder):
    """Apply a patch to a copy of the sources in the new `folder`; skips the test in a fork that does not take it."""
    for part in ("grpo", "tools", "examples", "rewards"):
        shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in REPO.glob("*.py"):
        shutil.copy(file, folder / file.name)
    patch = (PATCHES | EXERCISES)[name]
    done = subprocess.run(["git", "apply", "-C1", str(patch)], cwd=folder, text=True, capture_output=True)
    if done.returncode == 0:
        return

    diff = patch.read_text()
    if differs_from_upstream(*changed_files(diff), *new_files(diff)):
        pytest.skip(f"sources that differ from upstream's do not take the patch: {done.stderr.strip()}")
    pytest.fail(
        f"{done.stderr}git apply --3way {patch.relative_to(REPO)} shows where; if this is a fork, tag the upstream "
        "commit that it began from: git tag upstream COMMIT"
    )


def server_of(name, folder) -> contextlib.closing[ForkServer]:
    """The fork server of a copy of the sources with that patch, in the new `folder`."""
    apply(name, folder)
    return contextlib.closing(ForkServer(folder))


def train_fork(server, sources, tiny, out, *overrides, nproc=2) -> ForkedTraining:
    """A run of the script in the server's sources, which ends well."""
    return ForkedTraining(server, tiny, out, *overrides, nproc=nproc, script=sources / "train_grpo.py", code=0)


def load(name, file, monkeypatch):
    """A file as the module `name`, until the test ends."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(name) → the script with that patch, as a module; of the other files, those that the patch makes."""

    def forked(name):
        folder = tmp_path / "fork"
        apply(name, folder)
        for file in new_files((PATCHES | EXERCISES)[name].read_text()):
            if file.endswith(".py"):
                load(file.removesuffix(".py").replace("/", "."), folder / file, monkeypatch)
        return load("forked_train_grpo", folder / "train_grpo.py", monkeypatch)

    return forked
