"""The rules that keep the code plain, held by `ast`; tests/unit/test_structure.py asks them of every file.

    python -m tests.structure         all findings of the core, sizes of the wings

A rule of one file takes its tree and yields (line, what is wrong).
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SCRIPT = "train_grpo.py"
TOP = (SCRIPT, "config.py", "megatron_bridge.py", "rollout.py", "reward.py")
FUNCTION_LINES = 60
# Tokens of code of a wing: Python's tokens without comments, blank lines and docstrings, which are free; of recipes the
# lines that they add; of "docs" the words. These numbers only fall: a commit that deletes lowers them to what is left,
# and one that adds says in its message what left for it.
BUDGET = {
    "top": 17095,
    "support/base": 8050,
    "support/data": 6273,
    "support/engine": 4773,
    "support/judge": 2492,
    "support/model": 21736,
    "support/preflight": 8267,
    "support/run": 13245,
    "support/step": 12780,
    "rewards": 3521,
    "oracle": 13803,
    "tools": 12507,
    "benchmarks": 9580,
    "tests": 106065,
    "recipes": 10446,
    "docs": 42804,
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FREE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
Findings = Iterator[tuple[int, str]]


def core(root: Path) -> list[Path]:
    """The five top files, rewards/, and all of support/, folders in it too."""
    return [root / name for name in TOP] + sorted(root.glob("rewards/*.py")) + sorted((root / "support").rglob("*.py"))


# ---------------------------------------------------------------- what a tree is made of


@cache
def parse(path: Path) -> ast.Module:
    """The tree of a file, read once."""
    return ast.parse(path.read_text())


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def tokens(source: str) -> int:
    """Tokens of code of a Python source, or of some lines of one that tokenize by themselves."""
    starts = {(node.lineno, node.end_lineno) for node in docstrings(ast.parse(source))}
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in FREE and not any(a <= token.start[0] <= b for a, b in starts) for token in found)


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    """The docstrings of a module, its classes and its functions."""
    owners = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return [node.body[0] for node in owners if node.body and is_docstring(node.body[0])]


def added_tokens(patch: str) -> int:
    """Tokens of the Python lines that a patch adds, each line by itself."""
    lines = [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return sum(len(re.findall(r"\w+|[^\w\s]", line.partition("  # ")[0])) for line in lines if line[:1] != "#")


def pages(root: Path) -> list[Path]:
    """The documents: SECURITY.md, those for users in docs/, those for maintainers in docs/dev/."""
    return [*root.glob("SECURITY.md"), *sorted(root.glob("docs/*.md")), *sorted(root.glob("docs/dev/*.md"))]


def modules(node: ast.AST) -> list[str]:
    """The modules that a node imports, "support.step" and "support.step.packing" alike."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    return [f"support.{alias.name}" for alias in node.names] if node.module == "support" else [node.module or ""]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable, parameter and attribute."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr"):
            if isinstance(getattr(node, field, None), str):
                yield node.lineno, getattr(node, field)


# ---------------------------------------------------------------- rules of a file


def long_functions(tree: ast.Module) -> Findings:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, more than {FUNCTION_LINES}; divide it"


RULES = (long_functions,)


# ---------------------------------------------------------------- shape suffixes

SUFFIXED = re.compile(r"[a-z]\w*_([A-Z])$")


def check_legend(root: Path) -> list[str]:
    """What is wrong between the shape suffixes of the core and the paragraph "Names:" of the script's docstring."""
    paragraph = ast.get_docstring(parse(root / SCRIPT)).partition("Names:")[2].partition("\n\n")[0]
    letters = re.findall(r"_([A-Z])\s+[^,.;]+", paragraph)
    used = {}  # letter → where
    for path in core(root):
        for line, name in names(parse(path)):
            if SUFFIXED.match(name):
                used.setdefault(name[-1], f"{path.relative_to(root)}:{line}: {name}")
    wrong = [f"{SCRIPT}:1: the legend gives _{letter} two meanings" for letter in letters if letters.count(letter) > 1]
    wrong += [f"{SCRIPT}:1: no name has the suffix _{letter} of the legend" for letter in letters if letter not in used]
    lacking = [where for letter, where in used.items() if letter not in letters]
    return wrong + [f"{where} has a suffix that the legend of {SCRIPT} lacks" for where in lacking]


# ---------------------------------------------------------------- the budget


def weights(root: Path) -> dict[str, int]:
    """The size of each wing, as BUDGET counts it."""
    wings = {"top": [root / name for name in TOP]}
    folders = [path.parent for path in sorted(root.glob("support/*/__init__.py"))]
    for folder in (*folders, *(root / name for name in ("rewards", "oracle", "tools", "benchmarks", "tests"))):
        wings[folder.relative_to(root).as_posix()] = sorted(folder.rglob("*.py"))
    sizes = {name: sum(tokens(path.read_text()) for path in wing) for name, wing in wings.items()}
    sizes["recipes"] = sum(added_tokens(path.read_text()) for path in sorted(root.glob("recipes/*.patch")))
    return sizes | {"docs": sum(len(path.read_text().split()) for path in [root / "README.md", *pages(root)])}


def over_budget(sizes: dict[str, int]) -> list[str]:
    """A line for each wing that is larger than its number; a new wing has none."""
    rule = "delete as much, or say in the commit why this is worth more than what could leave"
    return [
        f"{name}: {size}, {size - BUDGET.get(name, 0)} above its budget in tests/structure.py; {rule}"
        for name, size in sizes.items()
        if size > BUDGET.get(name, 0)
    ]


# ---------------------------------------------------------------- floors

# A wing of support/, rewards/ or a top-level file → its floor. An import leads to the same wing or to a lower floor.
FLOORS = {
    SCRIPT: 8, "run": 7, "preflight": 6, "step": 5, "megatron_bridge.py": 4, "rollout.py": 4,
    "reward.py": 4, "rewards": 4, "model": 3, "engine": 3, "judge": 3, "data": 3, "base": 2, "config.py": 1,
}  # fmt: skip

ABOVE = {"benchmarks", "oracle", "tools", "tests", "rewards"}  # they use the core, and the core imports none


def place_of(module: str) -> str:
    """The place in FLOORS or ABOVE that a module is in; of support/ its wing: "support.step.packing" → "step"."""
    first, _, rest = module.partition(".")
    if first == "support":
        return rest.partition(".")[0]
    return f"{first}.py" if f"{first}.py" in TOP else first


def check_floors(root: Path) -> list[str]:
    """Imports of the core that lead up, or across to another wing or file of the same floor.

    So there is no circle of wings either. An import inside a function counts as well.
    """
    found = []
    for path in core(root):
        relative = path.relative_to(root)
        if relative.as_posix() == "support/__init__.py":
            continue
        place = relative.parts[1] if relative.parts[0] == "support" else relative.parts[0]
        if place not in FLOORS:
            found.append(f"{relative}:1: lies in no wing; the wings are the folders in FLOORS")
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(f"{relative}:{node.lineno}: a relative import; name the wing")
            for target in sorted({place_of(module) for module in modules(node)} - {place}):
                if target in ABOVE:
                    found.append(f"{relative}:{node.lineno}: imports {target}, which is above the core")
                elif FLOORS.get(target, 0) >= FLOORS[place]:
                    floors = f"floor {FLOORS[place]} imports {target} of floor {FLOORS[target]}"
                    found.append(f"{relative}:{node.lineno}: {floors}; imports lead to lower floors")
    return found


# ---------------------------------------------------------------- all findings


def check_file(root: Path, path: Path) -> list[str]:
    """What is wrong with one file of the core, as "file:line: what"."""
    relative = path.relative_to(root).as_posix()
    tree = parse(path)
    found = [finding for rule in RULES for finding in rule(tree)]
    return [f"{relative}:{line}: {message}" for line, message in sorted(found)]


def uncalled(root: Path) -> list[str]:
    """Public functions of support/ that neither the core nor tools/ uses; a test alone does not count."""
    trees = {path: parse(path) for path in [*core(root), *sorted((root / "tools").rglob("*.py"))]}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found = []
    for path, tree in trees.items():
        relative = path.relative_to(root).as_posix()
        if not relative.startswith("support/"):
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in used and node.name[0] != "_":
                found.append(f"{relative}:{node.lineno}: {node.name} has no caller in the core or tools/")
    return found


def main(root: Path) -> None:
    print("".join(f"{line}\n" for path in core(root) for line in check_file(root, path)), end="")
    print("\n".join(check_legend(root) + uncalled(root) + check_floors(root) + over_budget(weights(root))))
    print("  ".join(f"{name} {size}/{BUDGET.get(name, 0)}" for name, size in weights(root).items()))


if __name__ == "__main__":
    main(Path.cwd())
