"""The exercises of docs/exercises.md: what its patches do, and that the command of the page notices each of them."""

import inspect
import re
import shlex

import pytest

import train_grpo
from oracle.repeat import repeat
from oracle.run import read_run
from tests.conftest import REPO
from tests.forks import EXERCISES
from tests.museum import Exhibit
from tests.museum.exhibits import EXHIBITS
from tests.museum.runs import planted

PAGE = (REPO / "docs/exercises.md").read_text()
COMMANDS = dict(
    re.findall(r"^git apply docs/exercises/([\w-]+)\.patch\n(.+)$", PAGE, re.MULTILINE)
)  # patch → what grades
GRADED = [name for name, command in COMMANDS.items() if "-m pytest" in command]
RUN = [name for name, command in COMMANDS.items() if command.startswith("make demo")]


def exhibit_of(name):
    """The museum's exhibit that a patch puts in. Fails if no exhibit has the lines of the patch."""
    removed, added = re.findall(r"^[-+](?![-+]{2} )(.*)\n", EXERCISES[name].read_text(), re.MULTILINE)
    return next(e for e in EXHIBITS.values() if e.before in removed and removed.replace(e.before, e.after) == added)


def test_every_patch_is_an_exercise_and_its_bug_has_no_name():
    assert list(COMMANDS) == list(EXERCISES) and len(re.findall(r"^\*\*\d+\. ", PAGE, re.MULTILINE)) == 12
    for name in RUN:
        assert exhibit_of(name).name not in PAGE + EXERCISES[name].read_text()


def grade(name):
    """The exit code of the command of an exercise, in this process."""
    return pytest.main([*shlex.split(COMMANDS[name].partition("-m pytest ")[2]), "--tb=no", "-p", "no:faulthandler"])


@pytest.mark.parametrize("name", GRADED)
def test_a_command_of_pytest_fails_with_the_patch(name, fork, monkeypatch):
    """Without it, it is a part of these tests."""
    forked = fork(name)
    for function in vars(train_grpo).values():
        if inspect.isfunction(function) and function.__module__ == "train_grpo":
            monkeypatch.setattr(function, "__code__", getattr(forked, function.__name__).__code__)
    assert grade(name) == 1


HALVES = (  # exercise, function of the script, a piece of its source, what an answer that is half right has there
    ("gap-1", "group_advantages", "(r - r.mean()) * len(r) / (len(r) - 1)", "r - r.mean()"),
    ("gap-2", "token_kl", "d_T = d_T.clamp(-20, 20)", "pass"),
    ("gap-2", "token_kl", "- 1).clamp(-10, 10)", "- 1)"),
    ("gap-3", "policy_loss", "-bounded_T * advantages_T > -ratio_T * advantages_T", "torch.zeros_like(ratio_T).bool()"),
    ("gap-3", "policy_loss", "-bounded_T * advantages_T > -ratio_T * advantages_T", "bounded_T != ratio_T"),
    ("gap-3", "policy_loss", "ratio_T.clamp(1 - algo.clip_low, 1 +", "ratio_T.clamp(0, 1 +"),
    ("gap-4", "flatten", "s.finished or not mask_truncated", "s.finished"),
)


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_half_of_an_answer_is_not_enough(half):
    name, function, before, after = half
    with planted(Exhibit("", "", f"train_grpo:{function}", before, after)):
        assert grade(name) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_the_demo_or_its_check_stops_at_the_bug(name, train_forked):
    keys = re.search(r'ARGS="(.*) output_dir=.*?"', COMMANDS[name])[1].split()
    exhibit = exhibit_of(name)
    # The script calls the one that the exhibit changes.
    run = train_forked(2, *keys, script=REPO / "tests/museum/announced.py", MUTANT=exhibit.name)
    if "make check" not in COMMANDS[name]:
        assert re.search(f"error: .*{exhibit.message}", run.text), run.text
        return
    with planted(exhibit):  # the checkout that checks has the bug too
        report = repeat(read_run(run.out))
    assert run.code == 0 and report.parted(), run.text + report.table()
