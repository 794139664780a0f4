"""Run the museum of silent bugs (tests/museum): each failure in a run of a tiny model, and who notices it.

    python -m tools.museum                   all exhibits and the same runs without them; writes docs/museum.md
    python -m tools.museum --only NAME       one exhibit; prints what its run says, writes nothing

Exit code 0: each exhibit is noticed as its record says or sooner, and no run without one is stopped. 1: not.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fork_server import ForkServer
from tests.museum import VARIABLE, Exhibit
from tests.museum.exhibits import COMMON, EXHIBITS, SETTINGS
from tools import make_tiny

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs/museum.md"
TRL_RESULTS = REPO / "docs/bench/museum_trl.json"  # written by tools.museum_trl
CHAT = "{% for message in messages %}<{{ message['content'] }}{% endfor %}="  # a template with a header and an end
# A reward that fails for some of the answers.
FAILING = """
def reward(text, answer, row):
    if len(text) % 2:
        raise KeyError(text)
    return len(set(text)) / 4
"""
RANKING = ("nothing", "test", "run", "start")  # the later, the sooner a failure is noticed


@dataclasses.dataclass
class Outcome:
    """What a run said, or the test that its exhibit names."""

    seen: str  # one of RANKING
    step: int  # of this start, in which the run ended; 0: before any
    message: str  # of its error, else its last warning; of a test its id
    text: str = dataclasses.field(default="", repr=False)  # all that the run printed


# ---------------------------------------------------------------- runs


def write_models(folder: Path) -> None:
    """Write the tiny models of SETTINGS, and their data, into `folder`."""
    tokenizer = make_tiny.char_tokenizer("0123456789>+-=<.")  # with <eos> and <pad> an even number, for tp
    for name, family in (("model", "qwen2"), ("experts", "qwen3_moe"), ("chat", "qwen2")):
        make_tiny.save_model(folder / name, tokenizer, family, hidden=64)
    (folder / "chat/chat_template.jinja").write_text(CHAT)
    rows = make_tiny.reversal_rows(3, 200, seed=0)
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "long.jsonl", [{**row, "prompt": row["prompt"] * 50} for row in rows[:4]])
    (folder / "failing.py").write_text(FAILING)


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Museum:
    """Runs in a folder of write_models, on the ranks of a fork server, which knows the sources."""

    def __init__(self, folder: Path, server: ForkServer):
        self.folder = folder
        self.server = server

    def visit(self, exhibit: Exhibit) -> Outcome:
        """Run with the exhibit and, where that notices nothing, the test that it names."""
        outcome = self.run(exhibit.setting, exhibit.name)
        if outcome.seen == "nothing" and exhibit.seen == "test" and fails(exhibit):
            return dataclasses.replace(outcome, seen="test", message=exhibit.message)
        return outcome

    def run(self, setting: str, mutant: str = "") -> Outcome:
        """Train three steps with the options of a setting, and with an exhibit or without."""
        options = [option.replace("{folder}", str(self.folder)) for option in SETTINGS[setting]]
        if setting == "resumed":
            options += [f"resume={self.checkpoint()}", "train.steps=6"]
        return self.train(f"{setting}_{mutant}", options, mutant)

    def checkpoint(self) -> Path:
        """The checkpoint of a healthy run, made once."""
        folder = self.folder / "saved/checkpoints/step_000003"
        if not folder.exists():
            outcome = self.train("saved", [*SETTINGS["resumed"], "train.save_every=3"], "")
            assert outcome.seen == "nothing", outcome.text
        return folder

    def train(self, name: str, options: list[str], mutant: str) -> Outcome:
        """Train into the folder `name` on two ranks."""
        out = self.folder / re.sub(r"\W", "_", name)
        printed = Path(f"{out}.txt")
        inputs = [f"output_dir={out}", f"model.path={self.folder}/model", f"data.train={self.folder}/train.jsonl"]
        arguments = ("--config", "configs/tiny.yaml", *inputs, *COMMON, *options)
        code = self.server.run(printed, REPO / "tests/museum/announced.py", *arguments, nproc=2, **{VARIABLE: mutant})
        return read_outcome(code, printed.read_text(errors="replace"))


def read_outcome(code: int, text: str) -> Outcome:
    """What a run with this exit code and output noticed."""
    begun = [int(number) for number in re.findall(r"begins step (\d+)", text)]
    step = begun[-1] - begun[0] + 1 if begun else 0
    if code == 0:
        return Outcome("nothing", step, complaint(text, "warning"), text)
    return Outcome("run" if begun else "start", step, complaint(text, "error"), text)


def complaint(text: str, kind: str) -> str:
    """The first line of a run's error or, with kind="warning", its last warning; empty: there is none."""
    lines = re.findall(rf"^{kind}: (.*)", text, re.MULTILINE)
    if kind == "error" and not lines:  # a mistake in the code: the end of a traceback
        lines = re.findall(r"^(\w+(?:Error|Exception)\b.*)", text, re.MULTILINE)
    lines = [line for line in lines if "another rank is gone" not in line]
    return lines[0 if kind == "error" else -1] if lines else ""


def fails(exhibit: Exhibit) -> bool:
    """Whether the test that an exhibit names fails with it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.museum.plugin", exhibit.message]
    env = {**os.environ, VARIABLE: exhibit.name}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True).returncode == 1


def healthy(setting: str) -> str:
    """What notices something in a run of a setting without an exhibit; a failing reward ends it."""
    return "run" if setting == "failing reward" else "nothing"


def judge(exhibit: Exhibit, outcome: Outcome) -> str:
    """What is worse than the exhibit's record; empty: nothing."""
    if RANKING.index(outcome.seen) < RANKING.index(exhibit.seen):
        return f"{exhibit.name}: noticed by {outcome.seen}, expected: {exhibit.seen}"
    if outcome.seen == exhibit.seen and exhibit.message not in outcome.message:
        return f"{exhibit.name}: {outcome.message!r}, expected: {exhibit.message!r}"
    return ""


# ---------------------------------------------------------------- the page

HEAD = """# The museum of silent bugs

Failures of real trainers, each as a mutant of this one by one line (`tests/museum/exhibits.py`): three steps of a tiny
model on two ranks with real vLLM, with that line exchanged. `python -m tools.museum` runs them and writes this page. An
issue is named where a tracker has the failure; its cause there may have been another one with the same effect.

The column TRL is what three steps of TRL 1.16 say whose own code has the failure (`python -m tools.museum_trl`); empty:
it needs what TRL does not have, or not in these runs on a CPU, which sample with transformers. An error or a Python
warning counts; TRL's own log was not searched.

"""
COLUMNS = "| failure | where it happened | noticed by | TRL | message |\n|---|---|---|---|---|\n"


def write_page(outcomes: dict[str, Outcome], controls: dict[str, Outcome]) -> str:
    """docs/museum.md from {exhibit: outcome} and {setting: outcome of the run without an exhibit}."""
    groups = list(dict.fromkeys(exhibit.group for exhibit in EXHIBITS.values()))
    trl = json.loads(TRL_RESULTS.read_text())
    tables = []
    for group in groups:
        names = [name for name in outcomes if EXHIBITS[name].group == group]
        rows = [table_row(EXHIBITS[name], outcomes[name], trl.get(name)) for name in names]
        tables.append(f"## {group.capitalize()}\n\n{COLUMNS}{''.join(rows)}")
    noticed = sum(bool(said["error"] or said["warnings"]) for said in trl.values())
    compared = f"TRL notices {noticed} of the {len(trl)} that its code was given."
    return f"{HEAD}{score(outcomes, controls)} {compared}\n\n" + "\n".join(tables)


def score(outcomes: dict[str, Outcome], controls: dict[str, Outcome]) -> str:
    """How many failures are noticed by whom."""
    count = {seen: sum(outcome.seen == seen for outcome in outcomes.values()) for seen in RANKING}
    steps = [outcome.step for outcome in outcomes.values() if outcome.seen == "run"]
    stopped = sum(outcome.seen != healthy(setting) for setting, outcome in controls.items())
    by_run = count["run"] + count["start"]
    return (
        f"**{by_run} of {len(outcomes)} are noticed by the run itself: {count['start']} before the first step, "
        f"{steps.count(1)} in step 1, {steps.count(2)} in step 2, {sum(step > 2 for step in steps)} later. A test "
        f"notices {count['test']} more, nothing {count['nothing']}. Of {len(controls)} runs without a bug, "
        f"{stopped} were stopped.**"
    )


def table_row(exhibit: Exhibit, outcome: Outcome, trl: dict | None) -> str:
    """The line of an exhibit; `trl`: the entry of tools.museum_trl, None where TRL has no such line."""
    by = {"run": f"the run, step {outcome.step}", "start": "the start", "test": "a test", "nothing": "nothing"}
    message = outcome.message.replace("|", "\\|")
    if len(message) > 160:
        message = message[:157] + "..."
    shown = f"`{message}`" if message and outcome.seen != "nothing" else ""
    said = "" if trl is None else trl["error"] or "; ".join(trl["warnings"]) or "nothing"
    return f"| {exhibit.what} | {exhibit.where} | {by[outcome.seen]} | {said} | {shown} |\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=EXHIBITS, help="these exhibits alone")
    args = parser.parse_args(argv)
    chosen = [EXHIBITS[name] for name in args.only or EXHIBITS]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        museum = Museum(Path(folder), ForkServer())
        controls = {}
        for setting in dict.fromkeys(exhibit.setting for exhibit in chosen):
            controls[setting] = museum.run(setting)
            if controls[setting].seen != healthy(setting):
                wrong.append(f"the run {setting!r} without a bug: {controls[setting]}")
        outcomes = {}
        for exhibit in chosen:
            outcomes[exhibit.name] = outcome = museum.visit(exhibit)
            print(f"{exhibit.name}: {outcome.seen}, step {outcome.step}: {outcome.message}", flush=True)
            wrong.append(judge(exhibit, outcome))
        museum.server.close()
    if args.only:
        print(*(outcome.text for outcome in outcomes.values()), sep="\n")
    else:
        PAGE.write_text(write_page(outcomes, controls))
        print(score(outcomes, controls))
    print(*filter(None, wrong), sep="\n")
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
