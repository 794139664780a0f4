"""The rules that keep the code plain, held by `ast`. tests/unit/test_structure.py holds every file to them.

python -m tests.structure         all findings of the core, sizes of the wings
"""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

SCRIPT = "train_grpo.py"
TOP = (SCRIPT, "config.py", "megatron_bridge.py", "rollout.py", "reward.py")
FUNCTION_LINES = 60
# Rhythm: the share of functions of LONG lines or more, in the core and the oracle, that have neither a blank line nor a
# comment line; and tokens a line of code in the five top files.
LONG, WITHOUT_PARAGRAPH, TOKENS_A_LINE = 15, 0.2, 9.5
# Tokens of code of a wing: Python's tokens without comments, blank lines and docstrings, which are free; of recipes the
# lines that they add; of "docs" the words. These numbers only fall: a commit that deletes lowers them to what is left,
# and one that adds says in its message what left for it.
BUDGET = {
    "top": 16818,
    "grpo/step": 12780,
    "grpo/parts": 44781,
    "grpo/run": 27043,
    "rewards": 6471,
    "examples": 393,
    "oracle": 28328,
    "tools": 7395,
    "benchmarks": 11857,
    "tests": 119474,
    "recipes": 7354,
    "docs": 40812,
}

FOLDERS = ("grpo/step", "grpo/parts", "grpo/run", "rewards", "examples", "oracle", "tools", "benchmarks", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FREE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def core(root):
    """The five top files, rewards/, and all of grpo/."""
    return [root / name for name in TOP] + sorted(root.glob("rewards/*.py")) + sorted((root / "grpo").rglob("*.py"))


# ---------------------------------------------------------------- what a tree is made of


@cache
def parse(path):
    """The tree of a file, read once."""
    return ast.parse(path.read_text())


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def tokens(source) -> list[tokenize.TokenInfo]:
    """Tokens of code of a Python source, or of some lines of one that tokenize by themselves; no docstrings."""
    docs = [node.body[0] for node in blocks(ast.parse(source)) if node.body and is_docstring(node.body[0])]
    free = {line for doc in docs for line in range(doc.lineno, doc.end_lineno + 1)}
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in found if token.type not in FREE and token.start[0] not in free]


def blocks(tree):
    """A module, its classes and its functions, without a look into expressions."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, DOCUMENTED):
            yield node
        todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))]


def added_tokens(patch):
    """Tokens of the Python lines that a patch adds, each line by itself."""
    lines = [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return sum(len(re.findall(r"\w+|[^\w\s]", line.partition("  # ")[0])) for line in lines if line[:1] != "#")


def pages(root):
    """The documents: SECURITY.md, those for users in docs/, those for maintainers in docs/dev/."""
    return [*root.glob("SECURITY.md"), *sorted(root.glob("docs/*.md")), *sorted(root.glob("docs/dev/*.md"))]


def modules(node):
    """The modules that a node imports; of `from a import b` it is a.b, whether b is a module or not."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    return [f"{node.module}.{alias.name}" for alias in node.names]


def names(tree):
    """(line, name) of every variable, parameter and attribute."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr"):
            if isinstance(getattr(node, field, None), str):
                yield node.lineno, getattr(node, field)


# ---------------------------------------------------------------- rules of a file


def long_functions(tree):
    for node in blocks(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, more than {FUNCTION_LINES}; divide it"


# ---------------------------------------------------------------- shape suffixes

SUFFIXED = re.compile(r"[a-z]\w*_([A-Z])$")


def check_legend(root):
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


def weights(root):
    """The size of each wing, as BUDGET counts it."""
    wings = {"top": [root / name for name in TOP]}
    for folder in FOLDERS:
        wings[folder] = sorted((root / folder).rglob("*.py"))
    sizes = {name: sum(len(tokens(path.read_text())) for path in wing) for name, wing in wings.items()}
    sizes["recipes"] = sum(added_tokens(path.read_text()) for path in sorted(root.glob("recipes/*.patch")))
    return sizes | {"docs": sum(len(path.read_text().split()) for path in [root / "README.md", *pages(root)])}


def over_budget(sizes):
    """A line for each wing that is larger than its number; a new wing has none."""
    rule = "delete as much, or say in the commit why this is worth more than what could leave"
    return [
        f"{name}: {size}, {size - BUDGET.get(name, 0)} above its budget in tests/structure.py; {rule}"
        for name, size in sizes.items()
        if size > BUDGET.get(name, 0)
    ]


# ---------------------------------------------------------------- rhythm


def long_bodies(path):
    """The functions of a file with LONG lines or more after their docstring, and these lines."""
    lines = path.read_text().splitlines()
    for node in blocks(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if is_docstring(node.body[0]) and len(node.body) > 1 else node.body[0]
            body = lines[first.lineno - 1 : node.end_lineno]
            if len(body) >= LONG:
                yield node, body


def without_paragraphs(root):
    """(number of long functions, those without a blank line or a comment line) of the core and the oracle."""
    count, found = 0, []
    for path in [*core(root), *sorted((root / "oracle").glob("*.py"))]:
        for node, body in long_bodies(path):
            count += 1
            if all(line.strip() and not line.strip().startswith("#") for line in body):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {node.name} has no paragraph")
    return count, found


def tokens_a_line(paths):
    """Tokens of code of the files for each line of code."""
    total, lines = 0, 0
    for path in paths:
        code = tokens(path.read_text())
        total += len(code)
        lines += len({line for token in code for line in range(token.start[0], token.end[0] + 1)})
    return total / lines


# ---------------------------------------------------------------- floors

# A folder of grpo/, rewards/ or a top file → its floor. An import leads to the same folder or to a lower floor.
FLOORS = {
    SCRIPT: 8, "grpo/run": 7, "grpo/run/preflight": 6, "grpo/step": 5, "megatron_bridge.py": 4, "rollout.py": 4,
    "reward.py": 4, "rewards": 4, "rewards/latex.py": 3, "grpo/parts/model": 3, "grpo/parts/engine": 3,
    "grpo/parts/data": 3, "grpo/parts/base": 2, "config.py": 1,
}  # fmt: skip

ABOVE = {"benchmarks", "examples", "oracle", "tools", "tests", "rewards"}  # they use the core, and it imports none
# What reaches a file of another folder without an import.
HIDDEN = re.compile(r"runpy|run_path|(tools|docs)/[\w-]+\.(py|md)\"")


def place_of(module):
    """The place in FLOORS or ABOVE that a module is in: "grpo.step.packing" → "grpo/step"; else its first name."""
    names = module.split(".")
    folders = ["/".join(names[:length]) for length in range(len(names), 0, -1)]
    return next((name for folder in folders for name in (folder, f"{folder}.py") if name in FLOORS), names[0])


def check_floors(root):
    """Imports of the core that lead up, or across to another folder or file of the same floor.

    So there is no circle of folders either. An import inside a function counts as well, and so does a file that is
    run or read by its path.
    """
    found = []
    for path in core(root):
        relative = path.relative_to(root)
        place = relative.parent.as_posix() if len(relative.parts) > 1 else relative.name
        if not path.read_text():  # of a package
            continue
        if place not in FLOORS:
            found.append(f"{relative}:1: lies in no folder of FLOORS")
            continue
        found += [f"{relative}:1: {hit[0]} is a hidden import" for hit in HIDDEN.finditer(path.read_text())]
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(f"{relative}:{node.lineno}: a relative import; name the folder")
            for target in sorted({place_of(module) for module in modules(node)} - {place}):
                if target in ABOVE:
                    found.append(f"{relative}:{node.lineno}: imports {target}, which is above the core")
                elif FLOORS.get(target, 0) >= FLOORS[place]:
                    floors = f"floor {FLOORS[place]} imports {target} of floor {FLOORS[target]}"
                    found.append(f"{relative}:{node.lineno}: {floors}; imports lead to lower floors")
    return found


# ---------------------------------------------------------------- all findings


def check_file(root, path):
    """What is wrong with one file of the core, as "file:line: what"."""
    relative = path.relative_to(root).as_posix()
    tree = parse(path)
    return [f"{relative}:{line}: {message}" for line, message in sorted(long_functions(tree))]


def uncalled(root):
    """Public functions of grpo/ that neither the core nor tools/ uses; a test alone does not count."""
    trees = {path: parse(path) for path in [*core(root), *sorted((root / "tools").rglob("*.py"))]}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found = []
    for path, tree in trees.items():
        relative = path.relative_to(root).as_posix()
        if not relative.startswith("grpo/"):
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in used and node.name[0] != "_":
                found.append(f"{relative}:{node.lineno}: {node.name} has no caller in the core or tools/")
    return found


def main(root):
    print("".join(f"{line}\n" for path in core(root) for line in check_file(root, path)), end="")
    count, dull = without_paragraphs(root)
    print("\n".join(dull))
    top = tokens_a_line([root / name for name in TOP])
    print(f"{len(dull)} of {count} long functions without a paragraph; {top:.1f} tokens a line in the five files")
    print("\n".join(check_legend(root) + uncalled(root) + check_floors(root) + over_budget(weights(root))))
    print("  ".join(f"{name} {size}/{BUDGET.get(name, 0)}" for name, size in weights(root).items()))


if __name__ == "__main__":
    main(Path.cwd())
