"""Runs of the museum: each failure in a run of a tiny model, who notices it, and the page that says so."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import make_tiny
import pyarrow.parquet

from oracle.repeat import repeat
from oracle.run import read_run
from oracle.twin import begin_twins
from tests.conftest import REPO, ForkedTraining, write_rows
from tests.museum import VARIABLE, Exhibit
from tests.museum.exhibits import EXHIBITS
from tests.museum.forks import FORKS
from tests.museum.settings import COMMON, SETTINGS
from tests.museum.unseen import UNSEEN

PAGE = REPO / "docs/dev/museum.md"
TABLE = "| bugs | the run | `make check` | a test | nothing |"  # the first line of its score
# A template with a header, and with an opening of the answer
CHAT = "{% for message in messages %}<{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
LINEAR = {  # the sizes of which vLLM has kernels for CPUs
    "hidden": 128, "ffn": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
MODELS = {  # name → family, options of make_tiny.save_model
    "model": ("qwen2", {}), "experts": ("qwen3_moe", {}), "chat": ("qwen2", {}), "norms": ("qwen3", {}),
    "untied": ("qwen2", {"tied": False}), "qwen3.5": ("qwen3_5_text", LINEAR),
}  # fmt: skip
# A reward that fails for some of the answers.
FAILING = """
def reward(text, answer, row):
    if len(text) % 2:
        raise KeyError(text)
    return len(set(text)) / 4
"""
RANKING = ("nothing", "test", "check", "run", "start")  # the later, the sooner a failure is noticed


@dataclasses.dataclass
class Outcome:
    """Who noticed what: a run, `make check` on its folder, or the test that the exhibit names."""

    seen: str  # one of RANKING
    step: int  # of this start, in which the run ended; 0: before any
    message: str  # of its error; of a check the item and what parts, or what was not judged; of a test its id
    text: str = dataclasses.field(default="", repr=False)  # all that was printed
    parted: set = frozenset()  # the items that part by a check


# ---------------------------------------------------------------- runs


def write_models(folder):
    """Write the tiny models of SETTINGS, and their data, into `folder`."""
    tokenizer = make_tiny.char_tokenizer("0123456789>+-=<.")  # with <eos> and <pad> an even number, for tp
    for name, (family, options) in MODELS.items():
        make_tiny.save_model(folder / name, tokenizer, family, **{"hidden": 64} | options)
    (folder / "chat/chat_template.jinja").write_text(CHAT)
    rows = make_tiny.reversal_rows(3, 200, seed=0)
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "few.jsonl", rows[-10:])
    write_rows(folder / "lengths.jsonl", [{**row, "prompt": row["prompt"][n % 3 :]} for n, row in enumerate(rows)])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    write_rows(folder / "long.jsonl", [{**row, "prompt": row["prompt"] * 50} for row in rows[:4]])
    (folder / "failing.py").write_text(FAILING)


class Museum:
    """Runs in a folder of write_models, on the ranks of a fork server, which knows the sources."""

    def __init__(self, folder, server):
        self.folder = folder
        self.server = server

    def visit(self, exhibit):
        """Run with the exhibit and, where that notices nothing, check its folder, then the test that it names."""
        outcome = self.run(exhibit.setting, exhibit.name)
        if outcome.seen == "nothing":
            with planted(exhibit):  # in this process: the checkout that checks has the bug too
                outcome = self.check(exhibit.setting, exhibit.name)
        if outcome.seen == "nothing" and exhibit.seen == "test" and fails(exhibit):
            return dataclasses.replace(outcome, seen="test", message=exhibit.message)
        return outcome

    def run(self, setting, mutant=""):
        """Train three steps with the options of a setting, and with an exhibit or without."""
        options = self.options(setting)
        if setting.endswith("resumed"):
            shutil.copytree(self.saved(setting), self.out(setting, mutant))
            options += ["resume=auto", "train.steps=6"]
        return self.train(setting, options, mutant)

    def options(self, setting):
        """The options of a setting besides COMMON."""
        return [option.replace("{folder}", str(self.folder)) for option in SETTINGS[setting]]

    def check(self, setting, mutant=""):
        """What `make check` says of the folder of a run."""
        try:
            run = read_run(self.out(setting, mutant))
            report = repeat(run)
            if not report.parted() and can_ask_again(mutant):
                report = repeat(run, self.engine)
        except ValueError as error:  # a folder that cannot be judged
            return Outcome("check", 0, self.without_paths(str(error)))

        code, words = report.verdict()
        message = words if code == 3 else report.first
        text = report.table()
        parted = set(report.parted())
        for end in [] if code == 1 else begin_twins(run, partial(self.start_twin, mutant)):
            twin = end()
            code, words = twin.verdict()
            text += f"\n{twin.name}: {words}"
            if code:
                message = f"{twin.name}: {words}"
            if code == 1:
                parted.add(twin.name)
        return Outcome("check" if parted else "nothing", 0, self.without_paths(message), text, parted)

    def start_twin(self, mutant, config, ranks, printed):
        """Train a twin with an exhibit or without; a function that returns the exit code."""
        settings = {"nproc": ranks, VARIABLE: mutant}
        code = self.server.run(printed, REPO / "tests/museum/announced.py", "--config", str(config), **settings)
        return lambda: code

    def engine(self, job):
        """What a healthy vLLM answers, forked from the server."""
        file, answers = self.folder / "job.json", self.folder / "answers.json"
        file.write_text(json.dumps(job))
        printed = self.folder / "engine.txt"
        script = REPO / "tests/museum/engine.py"
        if self.server.run(printed, script, str(file), str(answers), nproc=1):
            raise ValueError(printed.read_text())
        return json.loads(answers.read_text())

    def fork(self, name):
        """What stopped a run of a fork of FORKS or its resume, or else what `make check` says of it."""
        options = [*FORKS[name].options, "train.export_every=1"]
        outcome = self.train("fork", options, name)
        if outcome.seen == "nothing" and "train.save_every=2" in options:
            outcome = self.train("fork", [*options, "train.steps=5", "resume=auto"], name)

        if outcome.seen != "nothing":
            return outcome
        with planted(*FORKS[name].exhibits()):
            return self.check("fork", name)

    def without_paths(self, text):
        """A text for the page, without the folders of this machine."""
        return text.replace(f"{self.folder}/", "").replace(f"{REPO}/", "")

    def out(self, setting, mutant):
        """The output folder of a run."""
        return self.folder / re.sub(r"\W", "_", f"{setting}_{mutant}")

    def saved(self, setting):
        """The folder of a healthy run of three steps of a setting that is resumed, made once."""
        folder = self.out(f"saved, {setting}", "")
        if not folder.exists():
            outcome = self.train(f"saved, {setting}", [*self.options(setting), "train.save_every=3"], "")
            assert outcome.seen == "nothing", outcome.text
        return folder

    def train(self, setting, options: list[str], mutant):
        """Train on two ranks; what the run noticed."""
        settings = {"script": REPO / "tests/museum/announced.py", "nproc": 2, VARIABLE: mutant}
        run = ForkedTraining(self.server, self.folder, self.out(setting, mutant), *COMMON, *options, **settings)
        text = self.without_paths(run.text)
        begun = [int(number) for number in re.findall(r"begins step (\d+)", text)]
        step = begun[-1] - begun[0] + 1 if begun else 0
        if run.code == 0:
            return Outcome("nothing", step, "", text)
        errors = re.findall(r"^error: (.*)", text, re.MULTILINE)
        errors = errors or re.findall(r"^(\w+(?:Error|Exception)\b.*)", text, re.MULTILINE)  # a mistake in the code
        message = next((line for line in errors if "another rank is gone" not in line), "")
        return Outcome("run" if begun else "start", step, message, text)


@contextlib.contextmanager
def planted(*exhibits) -> Iterator[None]:
    """Put exhibits into this process, for a while."""
    codes = {exhibit.find(): exhibit.find().__code__ for exhibit in exhibits}
    for exhibit in exhibits:
        exhibit.apply()
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


def can_ask_again(mutant):
    """Whether another vLLM can answer again: one without an exhibit of vLLM itself."""
    return mutant not in EXHIBITS or not EXHIBITS[mutant].function.startswith("vllm.")


def fails(exhibit):
    """Whether the test that an exhibit names fails with it, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", exhibit.message]
    return subprocess.run(command, cwd=REPO, env=os.environ | {VARIABLE: exhibit.name}).returncode == 1


def healthy(setting):
    """What notices something in a run of a setting without an exhibit; a failing reward ends it."""
    return "run" if setting == "failing reward" else "nothing"


# ---------------------------------------------------------------- the page


def write_page(outcomes: dict[str, Outcome], controls: dict[str, Outcome]):
    """docs/dev/museum.md, whose head stays, from {exhibit: outcome} and {setting: outcome without an exhibit}.

    An exhibit that was not run, since it needs equal bits, has what its record says.
    """
    outcomes = {name: outcomes.get(name) or Outcome(e.seen, 0, e.message) for name, e in EXHIBITS.items()}
    alike = {}  # exhibits that are noticed in one place are one list
    for name, outcome in outcomes.items():
        alike.setdefault(place(outcome), []).append(EXHIBITS[name])
    head = PAGE.read_text().partition(TABLE)[0]
    return f"{head}{score(outcomes, controls)}\n" + "".join(paragraph(*group) for group in alike.items())


def score(outcomes: dict[str, Outcome], controls: dict[str, Outcome]):
    """A table of how many failures are noticed by whom, and a sentence on the runs without one."""
    rows = [TABLE, "|---|---|---|---|---|"]
    unseen = {exhibit.name for exhibit in UNSEEN}
    for which, names in {"all": outcomes.keys(), "`unseen.py`": unseen}.items():
        seen = [outcomes[name].seen for name in names]
        by = [seen.count("run") + seen.count("start"), *(seen.count(who) for who in ("check", "test", "nothing"))]
        rows.append(f"| {which}, {len(names)} | {' | '.join(map(str, by))} |")
    starts = sum(outcome.seen == "start" for outcome in outcomes.values())
    steps = [outcome.step for outcome in outcomes.values() if outcome.seen == "run"]
    other = sum(outcome.seen != healthy(setting) for setting, outcome in controls.items())
    return "\n".join(rows) + (
        f"\n\nThe run notices {starts} before the first step, {steps.count(1)} in step 1, "
        f"{sum(step > 1 for step in steps)} later, {steps.count(0)} only with equal bits. Of {len(controls)} runs "
        f"without a bug, {other} were stopped or did not agree."
    )


def place(outcome: Outcome):
    """Who noticed a failure: the run and its step, the item of `make check`, or the test."""
    if outcome.seen == "run":
        return f"the run in step {outcome.step}" if outcome.step else "the run, only with equal bits"
    if outcome.seen == "check":
        twin, item = re.match(r"(?:step \d+, |(twin) in \w+: PARTS: )?(its run|[\w-]+)", outcome.message).groups()
        return f"`make check` of the twin: {item}" if twin else f"`make check`: {item}"
    return {"start": "the start", "test": f"a test: `{outcome.message}`"}.get(outcome.seen, "nothing")


def paragraph(where, exhibits: list[Exhibit]):
    """The list of the exhibits that are noticed in one place."""
    lines = ["", f"Noticed by {where}", ""]
    for exhibit in exhibits:
        lines.append(f"- {exhibit.what} ({exhibit.where})" if exhibit.where else f"- {exhibit.what}")
    return "\n".join(lines) + "\n"
