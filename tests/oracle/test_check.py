"""`make check`: a real run, what it says of planted changes, of forks and of what is missing."""

import itertools
import json
import shutil
import subprocess
import sys

import check
import pytest
import torch
import yaml

from grpo.parts.data.mixing import draw_sets
from grpo.parts.data.prompts import shuffle_epochs
from oracle import formulas
from oracle.algorithm import order_of
from oracle.repeat import repeat
from oracle.report import ITEMS
from oracle.run import read_run
from oracle.trainer import Trainer
from tests.conftest import REPO, read_rows, wrap, write_rows


@pytest.fixture
def copied(shared, tmp_path):
    """A copy of a real run's output."""
    return shutil.copytree(shared.out, tmp_path / "copy")


def reconfigure(folder, section, **values):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config[section] |= values
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_real_run_is_repeated(shared):
    report = repeat(read_run(shared.out))
    assert not report.parted(), report.table()
    judged = {name for name, item in report.items.items() if item.count}
    assert judged == set(ITEMS) - {"teacher", "adapters"}
    assert report.verdict() == (0, "agrees: 19") and report.table().endswith("not in this run: teacher, adapters")


CHANGES = {  # item that parts → how the row of an answer, or the metrics of step 1, is changed
    "seeds": lambda row: {"seed": row["seed"] + 1, "sampling": [row["sampling"][0] | {"seed": row["seed"] + 1}]},
    "sampling": lambda row: {"sampling": [row["sampling"][0] | {"temperature": 2.0}]},
    "answers": lambda row: {"text": f"{row['text']}<eos>"},
    "rewards": lambda row: {"reward_parts": {"another": row["reward"]}},
    "groups": lambda line: {"groups/sampled": line["groups/sampled"] + 1},
    "log-probs": lambda row: {"rollout_logp": [row["rollout_logp"][0] - 0.1, *row["rollout_logp"][1:]]},
    "advantages": lambda row: {"advantage": row["advantage"] + 1},
    "lr": lambda line: {"lr": line["lr"] * 1.00001},
    "metrics": lambda line: {"tokens/response_mean": line["tokens/response_mean"] + 1},
}
ALSO = {  # what a changed record leads to
    "answers": {"answers", "rewards"},  # of what was graded
    "advantages": {"advantages", "loss"},
}


@pytest.mark.parametrize("item", CHANGES)
def test_a_changed_record_is_named_and_nothing_else(copied, item):
    """`item` is the key of CHANGES, and ALSO has the items that part with it."""
    rows = read_rows(copied / "rollouts/step_000001.jsonl")
    (line,) = (line for line in read_rows(copied / "metrics.jsonl") if line["step"] == 1)
    if item in ("groups", "lr", "metrics"):
        line |= CHANGES[item](line)
    else:
        row = next(row for row in rows if row["advantage"])
        row |= CHANGES[item](row)
    write_rows(copied / "rollouts/step_000001.jsonl", rows)
    write_rows(copied / "metrics.jsonl", [line])
    report = repeat(read_run(copied, steps=1))
    assert item in report.parted() and set(report.parted()) <= ALSO.get(item, {item}), report.table()


def test_what_a_run_leaves_is_compared(copied, shared):
    """The prompts of an evaluation, the positions of a checkpoint, an export."""
    rows = read_rows(copied / "rollouts/eval_000002.jsonl")
    write_rows(copied / "rollouts/eval_000002.jsonl", [row for row in rows if row["group"]])
    state = copied / "checkpoints/step_000002/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"prompts_taken": 3}))
    shutil.copytree(shared.out / "hf/step_000002", copied / "hf/step_000003", dirs_exist_ok=True)
    report = repeat(read_run(copied))
    assert report.parted() == ["order", "weights", "checkpoints", "metrics"], report.table()


def test_metrics_of_the_first_update_are_those_of_its_record(copied):
    names = ("kl/ref", "loss/total", "loss/policy", "entropy", "grad_norm", "ratio/clip_frac")
    lines = read_rows(copied / "metrics.jsonl")
    write_rows(copied / "metrics.jsonl", [line | {name: line.get(name, 0) + 1 for name in names} for line in lines])
    report = repeat(read_run(copied, steps=1))
    problems = " ".join(report.items["metrics"].problems.values())
    assert report.parted() == ["metrics"] and all(f"metric: {name}:" in problems for name in names), report.table()


# ---------------------------------------------------------------- forks


def test_an_edited_formula_is_named_and_the_rest_agrees(shared, monkeypatch):
    """The oracle takes twice the advantage, so that the code seems edited."""
    wrap(monkeypatch, formulas, "compare", lambda compare, *given: 2 * compare(*given))
    report = repeat(read_run(shared.out))
    assert report.parted() == ["advantages"], report.table()
    assert report.items["weights"].count == 12, "the exports of all steps are judged, and the way of the updates"


EDITS = {  # an item → what the oracle does to a tensor: to its gradient, and to its way in an update
    "gradient": ("model.embed_tokens.weight", 0.1, 1.0),
    "weights": ("model.norm.weight", 1.0, 0.1),
}


@pytest.mark.parametrize("item", EDITS)
def test_an_edited_optimizer_is_named_and_nothing_else(shared, monkeypatch, item):
    """A tensor of the oracle has a tenth of its gradient, or of the learning rate, so that the code seems edited."""
    name, of_gradient, of_way = EDITS[item]
    gradient, step = Trainer.gradient, Trainer.step

    def edited_gradient(trainer, *given):
        sums = gradient(trainer, *given)
        trainer.main[name].grad *= of_gradient
        return sums | {"grad_norm": torch.nn.utils.get_total_norm([w.grad for w in trainer.main.values()]).item()}

    def edited_step(trainer, *given):
        before = trainer.main[name].clone()
        step(trainer, *given)
        trainer.take({name: before + (trainer.main[name] - before) * of_way})

    monkeypatch.setattr(Trainer, "gradient", edited_gradient)
    monkeypatch.setattr(Trainer, "step", edited_step)
    report = repeat(read_run(shared.out))
    assert report.parted() == [item], report.table()


RECORDS = {  # the items that part → how the lines of the updates of step 1 are changed
    "updates": lambda line: {"weights": [None, *line["weights"][1:]]},
    "token-weights": lambda line: {"weights": [value and value / 2 for value in line["weights"]]},
    "advantages": lambda line: {"advantages": [value and 7.0 for value in line["weights"]]},
    "sampling": lambda line: {"values": {"rollout.max_new_tokens": 999}},
    "lr": lambda line: {"values": {"train.lr": 7.0}},
    "loss": lambda line: {"loss": None},
    "gradient": lambda line: {"grad_norm": line["grad_norm"] * 2},
    "entropy": lambda line: {"entropy": None},
}


@pytest.mark.parametrize("item", RECORDS)
def test_a_changed_record_of_an_update_is_named(copied, item):
    lines = read_rows(copied / "rollouts/updates_000001.jsonl")
    write_rows(copied / "rollouts/updates_000001.jsonl", [line | RECORDS[item](line) for line in lines])
    report = repeat(read_run(copied, steps=1))
    assert item in report.parted(), report.table()


def test_updates_that_were_lost_are_named(copied):
    write_rows(copied / "rollouts/updates_000001.jsonl", [])
    report = repeat(read_run(copied, steps=1))
    assert "updates" in report.parted() and "updates: the run has 0, the oracle 2" in report.table(), report.table()

    (copied / "rollouts/updates_000002.jsonl").unlink()
    with pytest.raises(ValueError, match=r"updates_000002\.jsonl is missing"):
        repeat(read_run(copied))


@pytest.mark.parametrize("steps", [[1], [1, 2, 3]])
def test_steps_of_an_earlier_version_are_judged_by_their_metrics(copied, steps):
    """Which recorded no updates; this version may have resumed its run."""
    for step in steps:
        (copied / f"rollouts/updates_{step:06d}.jsonl").unlink()
    report = repeat(read_run(copied))
    assert report.verdict() == (3, "agrees: 17; not judged: token-weights, updates (of steps that an earlier version "
                                   "made, which did not record them)")  # fmt: skip


def test_names_without_a_formula(copied):
    reconfigure(copied, "algo", advantage="mine")
    report = repeat(read_run(copied))
    assert not report.parted() and report.items["gradient"].count == 6, report.table()
    assert report.verdict() == (3, "agrees: 18; not judged: advantages (no formula for algo.advantage=mine)")
    assert report.verdict(["advantages"]) == (0, "agrees: 19")

    reconfigure(copied, "algo", loss="mine", loss_norm="mine", kl="mine")  # which this checkout does not have
    report = repeat(read_run(copied))
    assert not report.parted() and "algo.loss='mine': must be one of" in report.table(), report.table()


@pytest.mark.parametrize(("mine", "code"), [("loss,order", 1), ("seeds", 3), ("prompts", 2)])
def test_the_command(copied, capsys, mine, code):
    reconfigure(copied, "model", path=str(copied))  # deleted; the tokenizer is in the exports
    rows = read_rows(copied / "rollouts/step_000001.jsonl")
    changed = [row | {"seed": 7, "sampling": [row["sampling"][0] | {"seed": 7}]} for row in rows]
    write_rows(copied / "rollouts/step_000001.jsonl", changed)

    assert check.main([str(copied), "--mine", mine, "--steps", "1"]) == code
    said = capsys.readouterr().out
    if code == 2:
        assert said.startswith("--mine prompts: there is no such item; it must be one of order, seeds,")
    else:
        assert "gradient      not judged: there is no model" in said and "advantages    agrees" in said
        assert ("seeds         yours" if code == 3 else "seeds         PARTS") in said


def test_what_is_missing_is_said(copied, tmp_path):
    (copied / "metrics.jsonl").open("a").write('{"half a line')
    reconfigure(copied, "algo", mine=1)
    reconfigure(copied, "data", train=str(tmp_path / "gone.jsonl"))
    report = repeat(read_run(copied, steps=1))
    assert not report.parted() and report.items["advantages"].count, report.table()
    for text in ("does not know algo.mine=1: ignored", "data.train cannot be read: data.train="):
        assert text in report.table()


def test_it_imports_nothing_of_the_trainer():
    code = "import sys, oracle.repeat; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, capture_output=True, check=True)
    modules = {*done.stdout.split()}
    assert "transformers" in modules
    assert not modules & {"train_grpo", "megatron_bridge", "rollout", "megatron", "vllm"}
    of_ours = {".".join(name.split(".")[:3]) for name in modules if name.startswith("grpo.")}
    assert of_ours == {"grpo.parts", "grpo.parts.base"}


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [5, 0.5, 0.013]])
def test_the_order_of_prompts_is_that_of_the_trainer(weights):
    sizes = [10, 25, 7][: len(weights)]
    drawn = draw_sets(weights, 0, 1000, 3) if len(weights) > 1 else [(0, number) for number in range(1000)]
    assert [*itertools.islice(order_of(sizes, weights, 3), 1000)] == shuffle_epochs(drawn, sizes, 3)
