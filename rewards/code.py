"""Run the program of an answer on the tests of its row, in a sandbox: reward.functions.code=rewards/code.py:code.

If a test compares a value with a literal, the program only returns the value and the comparison is made here, so the
process of the program never holds the expected value. docs/rewards.md says which tests are of that kind.
"""

import ast
import contextlib
import functools
import json
import operator
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from rewards import sandbox

MAX_VALUE = 1_000_000  # characters of a value's repr; parsing takes 300 times as much memory


class Step(NamedTuple):
    """A part of a test: statements to run, or an expression whose value must satisfy `accepts`."""

    source: str
    accepts: Callable[[Any], bool] | None = None


def code(
    text: str,
    answer: str,
    row: dict,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    file_mb: int = 16,
    partial: bool = False,
    allow_writes: bool = False,
    prelude: str = "",
) -> float:
    """1 if the program of the text, after `prelude`, passes all tests of the row, else 0. With `partial`: their share.

    Tests are assert statements, a program's input and output, or calls; `find_tests` says where they may be.
    Raises subprocess.TimeoutExpired if one run takes longer than `seconds`, ValueError for a row without tests.
    """
    tests = find_tests(row, answer)
    block = find_program(text)
    if block is None:
        return 0.0
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    return share_passed(f"{prelude}\n{block}", tests, partial, **limits)


# ---------------------------------------------------------------- which program

# Blocks between fences of ``` or ~~~: of Python by their tag, wherever they begin, and all that begin a line or have no
# tag.
FENCE = r"(?<![`~])(`{3,}+|~{3,}+)"
TAGGED = re.compile(FENCE + r"[ \t{.]*i?py(?:thon)?[\d.]*(?!\w)[^\n`]*\n(.*?)\1", re.DOTALL | re.IGNORECASE)
FENCED = re.compile(r"(?:^[ \t]*|(?<!`)(?=`{3,}+[ \t]*\n))" + FENCE + r"[^\n`]*\n(.*?)\1", re.DOTALL | re.MULTILINE)


def find_program(text: str) -> str | None:
    """The last block that is tagged as Python or, without one, the last that reads as Python statements; else None."""
    text = text.replace("\r\n", "\n")
    tagged = TAGGED.findall(text)
    if tagged:
        return textwrap.dedent(tagged[-1][1])
    for _, block in reversed(FENCED.findall(text)):
        program = textwrap.dedent(block)
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            # A value alone, such as "3", is an example of the output.
            if any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in ast.parse(program).body):
                return program
    return None


# ---------------------------------------------------------------- which tests


def find_tests(row: dict, answer: str) -> dict:
    """`tests`, or `inputs`, `outputs` and perhaps `fn_name`. Raises ValueError for a row without tests.

    They are columns of the row, or JSON in its reference answer or in verl's `reward_model.ground_truth`.
    """
    verl = row.get("reward_model")
    ground_truth = verl.get("ground_truth") if isinstance(verl, dict) else None
    for candidate in (row, answer, ground_truth):
        found = read_tests(candidate)
        if found:
            return found
    raise ValueError(
        "the row has no tests: give assert statements in `tests`, or `inputs` and `outputs`, as columns or as JSON in "
        "the answer or in reward_model.ground_truth"
    )


def read_tests(candidate: Any) -> dict | None:
    """The tests that a row holds, or a JSON text in it. None if there are none."""
    candidate = from_json(candidate)
    if isinstance(candidate, list):
        candidate = {"tests": candidate}
    if not isinstance(candidate, dict):
        return None
    if candidate.get("functional"):  # as LeetCode's data sets have it
        return {"tests": candidate["functional"]}
    return candidate if candidate.get("tests") or candidate.get("inputs") else None


def check_row(answer: str, row: dict):
    """Raises ValueError for a row whose tests cannot be run. The start calls it for some rows."""
    cases_of(find_tests(row, answer))


def cases_of(found: dict) -> list:
    """Each test of a row, or each pair of an input and its output. Raises ValueError."""
    if found.get("tests"):
        cases = listed(from_json(found["tests"]))
        if not all(isinstance(test, str) for test in cases):
            raise ValueError("a test in `tests` is a text of Python, such as an assert statement")
        return cases

    inputs, outputs = listed(found["inputs"]), listed(found.get("outputs"))
    if len(inputs) != len(outputs):
        raise ValueError(f"the row has {len(inputs)} `inputs` and {len(outputs)} `outputs`: give a list of each")
    return list(zip(inputs, outputs, strict=True))


def share_passed(program: str, found: dict, partial: bool, **limits) -> float:
    """1 if the program passes all tests, else 0. With `partial`: the share that it passes. Raises as sandbox.run."""
    cases = cases_of(found)
    if found.get("tests"):
        passed = count_passed(program, [steps_of(test) for test in cases], **limits)
    elif found.get("fn_name"):
        calls = [[call(program, found["fn_name"], *case)] for case in cases]
        passed = count_passed(program, calls, **limits)
    else:
        passed = count_printed(program, cases, partial, **limits)
    return passed / len(cases) if partial else float(passed == len(cases))


def count_printed(program: str, cases: list[tuple], partial: bool, **limits) -> int:
    """For how many (input, output) the program prints the output. Without `partial` the first failure ends it."""
    passed = 0
    for stdin, wanted in cases:
        output = sandbox.output_of(program, as_text(stdin), **limits)
        if output is not None and lines_of(output) == lines_of(as_text(wanted)):
            passed += 1
        elif not partial:
            break
    return passed


def from_json(value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(value)
    return value


def listed(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def as_text(value: Any) -> str:
    """Input or output of a program: a text, lines, or a number."""
    return "\n".join(map(str, listed(value)))


def lines_of(output: str) -> list[str]:
    """Lines without white space at their ends or empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


# ---------------------------------------------------------------- the steps of a test


@functools.lru_cache(maxsize=1024)  # the answers of a group have the same tests
def steps_of(test: str) -> list[Step]:
    """The statements of a test. `assert f(x) == literal` becomes the expression f(x)."""
    try:
        return [step_of(statement) for statement in ast.parse(test).body]
    except (SyntaxError, ValueError, RecursionError):
        return [Step(test)]  # it fails when it is run


def step_of(statement: ast.stmt) -> Step:
    whole = Step(ast.unparse(statement))
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
        return whole
    compared = statement.test
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
        return whole

    (right,) = compared.comparators
    for expression, expected in ((compared.left, right), (right, compared.left)):
        with contextlib.suppress(ValueError, TypeError):
            return Step(ast.unparse(expression), functools.partial(operator.eq, literal(expected)))
    return whole


def literal(node: ast.expr) -> Any:
    """The value of a literal, or of one in set(…), frozenset(…), list(…) or tuple(…). Raises ValueError, TypeError."""
    kinds = {"set": set, "frozenset": set, "list": list, "tuple": tuple}
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        kind = kinds.get(ast.unparse(node.func))
        if kind:
            return kind(literal(node.args[0]))
    return ast.literal_eval(node)


def call(program: str, name: str, arguments: str | list, wanted: Any) -> Step:
    """A call of a function, or of a method of the class Solution, as APPS, TACO and Eurus write it.

    The arguments are a list, or JSON with one argument per line; the wanted value is a value or JSON.
    """
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.strip().split("\n")]

    if re.search(r"^class Solution\b", program, re.MULTILINE):
        name = f"Solution().{name}"
    values = ", ".join(map(repr, listed(arguments)))
    return Step(f"{name}({values})", functools.partial(is_returned, from_json(wanted)))


def is_returned(wanted: Any, value: Any) -> bool:
    """Whether a value equals the wanted one as JSON, which has no tuples. APPS wraps some values in a list."""
    with contextlib.suppress(TypeError, ValueError):
        value = json.loads(json.dumps(value))
    return value == wanted or (isinstance(wanted, list) and len(wanted) == 1 and value == wanted[0])


# ---------------------------------------------------------------- results


def count_passed(program: str, tests: list[list[Step]], **limits) -> int:
    """How many of the tests hold after the program. Raises as sandbox.run."""
    sources = [[(step.source, step.accepts is not None) for step in steps] for steps in tests]
    values = sandbox.values_of(program, sources, **limits)
    return sum(map(has_passed, tests, values))


def has_passed(steps: list[Step], values: Any) -> bool:
    """Whether a test passed, given the values of its expressions as text, or None if a step failed."""
    conditions = [step.accepts for step in steps if step.accepts]
    try:
        for accepts, text in zip(conditions, values, strict=True):
            if len(text) > MAX_VALUE or not accepts(ast.literal_eval(text)):
                return False
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # a program may write anything
        return False
    return True


code.check_row = check_row
