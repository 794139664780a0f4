"""The last line of `make check`, its exit code, and what it says of a folder that cannot be judged."""

import json
import re
from pathlib import Path

import check
import pytest
import yaml

from oracle import run
from oracle.report import ITEMS, Report
from tests.conftest import REPO, tiny_config, write_rows


def report_of(*items):
    """A report in which these items were judged, and agree; of a run with these keys."""
    cfg = tiny_config(*(key for key in items if key not in ITEMS))
    report = Report(run.Recorded(Path("absent"), cfg, {}, [1], []))
    for item in ITEMS:
        report.say(item, count=item in items)
    return report


RECORDED = [name for name in ITEMS if name not in report_of().absent]


def test_each_item_is_explained_on_the_page():
    _, table = (REPO / "docs/dev/checks.md").read_text().split("| item |")
    rows = re.findall(r"^\| (`.*?`) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert re.findall(r"[\w-]+", " ".join(rows)) == [*ITEMS]


def test_the_verdict_counts_and_what_nobody_compared_is_not_judged_either():
    report = report_of(*RECORDED)
    assert report.verdict() == (0, f"agrees: {len(RECORDED)}")
    for item in ("loss", "gradient"):
        report.note(item, "there is no model")
    assert report.verdict() == (3, f"agrees: {len(RECORDED) - 2}; not judged: loss, gradient (there is no model)")
    assert report.verdict(["loss", "gradient"])[0] == 0

    report = report_of(*RECORDED[1:])
    assert report.verdict() == (3, f"agrees: {len(RECORDED) - 1}; not judged: order (nothing of it is recorded)")


def test_what_the_run_does_not_have_is_no_gap():
    report = report_of(*RECORDED)
    report.note("teacher", "there is no model")
    assert report.verdict()[0] == 0 and "not in this run: reference, teacher, weights," in report.table()


@pytest.fixture
def parting():
    """A report whose loss parts in two quantities, and its order in one, in steps 2 and 3."""
    report = report_of(*RECORDED)
    for report.step in (2, 3):
        report.check("loss", "loss/total", 1.0, 2.0)
        report.check("loss", "loss/policy", 1.0, 2.0)
        report.say("order", f"group {report.step} has the prompt '{report.step}=', not number 1")
    return report


def test_an_item_that_parts_shows_each_of_its_quantities_once(parting):
    problems = {name: [*item.problems.values()] for name, item in parting.items.items() if item.problems}
    assert problems == {
        "order": ["from step 2 on: group 2 has the prompt '2=', not number 1"],
        "loss": [f"from step 2 on: loss/{name}: the run has 1, the oracle 2" for name in ("total", "policy")],
    }


def test_the_verdict_names_the_first_problem_that_is_not_yours(parting):
    agree = f"agrees: {len(RECORDED) - 2}"
    first = "the first in step 2, loss: loss/total: the run has 1, the oracle 2"
    assert parting.verdict() == (1, f"PARTS: order, loss, {first}; {agree}")
    first = "the first in step 2, order: group 2 has the prompt '2=', not number 1"
    assert parting.verdict(["loss"]) == (1, f"PARTS: order, {first}; yours: loss; {agree}")
    assert parting.verdict(["loss", "order"]) == (0, f"yours: order, loss; {agree}")


def test_a_loss_that_depends_on_micro_batches_has_no_formula():
    report = report_of(*RECORDED, "megatron.moe_aux_loss_coeff=0.1")
    assert report.check("gradient", "grad_norm", 1.0, 2.0) and not report.check("entropy", "entropy", 1.0, 2.0)
    assert report.unjudged() == {"gradient": ["the balancing loss depends on which answers share a micro-batch"]}


# ---------------------------------------------------------------- folders

ROW = dict.fromkeys(run.FIELDS)


@pytest.fixture
def folder(tmp_path):
    """A run of two steps, as far as read_run looks."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(tiny_config().model_dump_json())))
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        write_rows(tmp_path / f"rollouts/step_{step:06d}.jsonl", [ROW])
    write_rows(tmp_path / "metrics.jsonl", [dict.fromkeys(run.METRICS) | {"step": step} for step in (1, 2)])
    return tmp_path


BROKEN = {  # what happens to which file → what is said
    "": ("config.yaml", None, "has no config.yaml: give the output_dir of a run"),
    "no answers": ("rollouts/step_000001.jsonl", None, "rollouts/ has no answers of step 1"),
    "empty answers": ("rollouts/step_000002.jsonl", [], "rollouts/step_000002.jsonl is empty"),
    "no metrics": ("metrics.jsonl", None, "metrics.jsonl has no line of step 1"),
    "empty metrics": ("metrics.jsonl", [], "metrics.jsonl has no line of step 1"),
    "half": ("metrics.jsonl", [dict.fromkeys(run.METRICS) | {"step": 2}], "metrics.jsonl has no line of step 1"),
    "old": ("rollouts/step_000001.jsonl", [{"group": 0}], "step_000001.jsonl lacks advantage, finished, graded"),
    "old metrics": ("metrics.jsonl", [{"step": 1, "reward/mean": 0}], "metrics.jsonl lacks entropy, grad_norm"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_cannot_be_judged(folder, what, capsys):
    file, rows, words = BROKEN[what]
    (folder / file).unlink()
    if rows is not None:
        write_rows(folder / file, rows)
    assert check.main([str(folder)]) == 2
    said = capsys.readouterr().out
    assert words in said and said.count("\n") == 1


def test_the_step_in_which_a_run_was_stopped_is_left_out(folder):
    assert run.read_run(folder).steps == [1, 2]
    write_rows(folder / "metrics.jsonl", [dict.fromkeys(run.METRICS) | {"step": 1}])
    found = run.read_run(folder)
    assert found.steps == [1] and found.remarks == ["step 2 has not ended: it is not repeated"]
