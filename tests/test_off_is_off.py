"""Off is off: a step enters no function of a capability whose keys have their defaults."""

import sys
from pathlib import Path

import train_grpo
from tests.conftest import REPO
from tests.test_step import build  # noqa: F401, a fixture

# The files of support/ that a default step on a CPU does not enter, whatever folder they are in.
OFF = {"gdpo", "lora", "mixing", "offload", "routes", "schedule", "teacher", "turns"}

# Keys that turn some of them on, and the files that a step then enters.
ON = (
    "lora.rank=4", "train.offload=grads", "schedule.entropy_coef.to=0.0", "algo.teacher=self", "data.hint_key=answer",
    "algo.advantage=gdpo",
)  # fmt: skip
ENTERED = {"gdpo", "lora", "offload", "schedule", "teacher"}


def functions_of_a_step(run: train_grpo.Run) -> set[tuple[str, str]]:
    """(file, function) of all code in the script, beside it and in support/ that the main thread of a step runs."""
    codes = set()

    def note(frame, event, _):
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        train_grpo.train_step(run, 1)
    finally:
        sys.setprofile(None)
    own = {path.resolve() for path in [*REPO.glob("*.py"), *REPO.glob("support/**/*.py")]}
    # a comprehension counts as the function that it stands in
    functions = {(Path(code.co_filename).resolve(), code.co_qualname.partition(".<locals>")[0]) for code in codes}
    return {(str(path.relative_to(REPO)), function) for path, function in functions if path in own}


def test_a_default_step_enters_no_capability_that_is_off(build):  # noqa: F811
    functions = functions_of_a_step(build())
    assert {path.stem for path in REPO.glob("support/**/*.py")} >= OFF, "a file that is renamed is renamed in OFF too"
    assert {("train_grpo.py", name) for name in ("train_step", "add_advantages", "grpo_loss")} <= functions
    entered = sorted(f"{file}:{function}" for file, function in functions if Path(file).stem in OFF)
    assert not entered, "a default step runs functions of capabilities that are off:\n" + "\n".join(entered)


def test_a_step_with_their_keys_enters_them(build):  # noqa: F811
    """The profile sees these files where they are on, so the test above can fail."""
    files = {Path(file).stem for file, _ in functions_of_a_step(build(*ON))}
    assert files >= ENTERED
