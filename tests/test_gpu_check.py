"""tools/gpu_check.py: its verdicts on made-up results, its checks that end badly, and all of it on the CPU."""

import json
import math
import re
import shlex
import shutil

import pytest
import torch

from benchmarks import works
from tests.conftest import REPO
from tools import gpu_check
from tools.gpu_check import FAILED, NOT_RUN, OK, Machine, Outcome
from tools.gpu_checks import checks
from tools.gpu_checks.checks import KILLED, ROWS, Check, Row

FEW = [Row("small", "≤", 0.5, "relative", "make it small"), Row("large", "≥", 2, "of 3", "make it large")]
GPU_ONLY = Row("on a GPU", "≤", 1, "", "none", gpu=True)
ONE_GPU = Machine(gpus=1, gib=80, nproc=1)


def outcome(folder, answers: dict, code: int | None = 0, text: str = "") -> Outcome:
    lines = [json.dumps({"row": row, "figure": figure, "note": "n"}) for row, figure in answers.items()]
    (folder / ROWS).write_text("".join(f"{line}\n" for line in lines))
    return Outcome(folder, text, code, 1000.0)


@pytest.mark.parametrize(
    ("answers", "code", "expected"),
    [
        ({"small": 0.5, "large": 2}, 0, [OK, OK]),
        ({"small": 0.501, "large": 1.99}, 0, [FAILED, FAILED]),
        ({"small": math.nan, "large": math.inf}, 0, [FAILED, OK]),
        ({"small": 0.1}, 1, [OK, FAILED]),
        ({}, None, [NOT_RUN, NOT_RUN]),  # killed at its time limit: that says nothing of the machine
        ({"large": 1}, None, [NOT_RUN, FAILED]),
        ({"small": 0.1, "large": 3}, 1, [OK, OK, FAILED]),  # it crashed after the last answer
        ({"small": 0.1, "large": 3}, None, [OK, OK, FAILED]),
    ],
)
def test_verdicts(tmp_path, answers, code, expected):
    text = "[rank0]: ValueError: too bad\nnoise\nE1122 08:00:00.000000 1 torch/distributed/x.py:1] report"
    found = list(gpu_check.verdicts(Check("c", 1, 1, FEW, ""), FEW, outcome(tmp_path, answers, code, text)))
    assert [each.verdict for each in found] == expected
    for each in found:
        shown = gpu_check.line(each)
        assert bool(shown.remedy) == (each.verdict == FAILED)
        if each.figure is None:
            end = "did not end within its time limit; last: noise"
            assert shown.found in ("exit code 1: [rank0]: ValueError: too bad", end, "no answer either")
        if each.verdict == FAILED and each.figure is not None:
            assert f"not {each.row.sign} {each.row.bound:g}" in shown.found


def test_what_cannot_be_tried_is_not_run():
    check = Check("c", 1, 1, [*FEW, GPU_ONLY], "", least_ranks=2, least_gib=44)
    reasons = [
        gpu_check.reason_not_to_run(check, check.rows[row], Machine(gpus, gib, nproc))
        for row, gpus, gib, nproc in ((2, 0, 0, 2), (0, 1, 80, 1), (0, 2, 39.6, 2), (0, 0, 0, 2), (2, 2, 80, 2))
    ]
    assert reasons[:2] == ["needs a GPU", "needs --nproc=2 or more"] and reasons[3:] == [None, None]
    assert reasons[2] == "needs a GPU of 44 GiB, this has 40"


def test_a_benchmark_without_room_is_not_run(tmp_path):
    text = "error: --model qwen2.5-1.5b in bf16 needs about 31.5 GiB of memory, 20.0 GiB are free on these 1 ranks'"
    check = next(check for check in checks.all_checks(gpu=True) if check.name == "bench qwen2.5-1.5b")
    found = list(gpu_check.verdicts(check, check.rows, outcome(tmp_path, {}, 1, text)))
    assert [each.verdict for each in found] == [NOT_RUN] * 3
    assert found[0].note == text.removeprefix("error: ").partition(" on these")[0]
    lost = list(gpu_check.verdicts(check, check.rows, outcome(tmp_path, {}, 1, "error: other")))
    assert [each.verdict for each in lost] == [FAILED] * 3


def test_figures_of_a_benchmark(tmp_path):
    """Worked by hand: 200 tokens a step, sampled in 1 s; 1e9 operations in 0.5 s on 2 ranks that reach 4e9 each."""
    step = {
        "system": "ours", "round": 1, "ranks": 2, "step": 1, "tokens_per_s": 100.0, "step_s": 2.0, "train_flops": 1e9,
        "bare_tokens_per_s": 250.0, "rollout_s": 1.0, "reward_s": 0.0, "logprob_s": 0.2, "train_s": 0.5, "sync_s": 0.1,
        "push_digests_s": 0.01, "push_gather_s": 0.01, "push_compare_s": 0.01, "matmul_flops_per_s": 4e9,
        "copy_bytes_per_s": 1e9, "all_reduce_bytes_per_s": 1e9,
    }  # fmt: skip
    step |= {f"{phase}_peak_gib": 3.0 for phase in works.PHASES}
    works.add_results(tmp_path / "bench.csv", [step])
    rows = checks.bench_rows("m", 25)
    found = list(checks.read_bench(outcome(tmp_path, {}), rows))
    assert [each["figure"] for each in found] == pytest.approx([25, 0.8, 0.1])
    assert "peak 3.0 GiB" in found[0]["note"] and found[1]["note"] == "200 tokens/s, vLLM alone 250"


def test_what_the_demo_learned(tmp_path):
    (tmp_path / "out").mkdir()
    steps = [{"reward/mean": n / 20, "logp_gap/mean": 0.01 * (n == 7), "time/step": 0.5} for n in range(21)]
    lines = [{"step": 0, "eval/avg": 1.0}, *steps]  # an evaluation has no reward of a step
    (tmp_path / "out/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(checks.read_demo(outcome(tmp_path, {})))
    assert [each["figure"] for each in found] == pytest.approx([0.775, 0.01])
    assert found[0]["note"] == "21 steps, 0.50 s each, from 0.00"
    assert not list(checks.read_demo(outcome(tmp_path, {}, code=1)))


def test_what_the_others_say_of_a_killed_rank(tmp_path):
    check = next(check for check in checks.TRIALS if check.name == "killed rank")
    text = "error: rank 0, in the phase train: another rank is gone (x)\n  exitcode  : -9 (pid: 12)\n"
    (tmp_path / "killed").touch()
    ended = (tmp_path / "killed").stat().st_mtime + 3
    found = list(gpu_check.verdicts(check, KILLED, Outcome(tmp_path, text, 1, ended)))
    assert [each.verdict for each in found] == [OK, OK] and found[0].figure == pytest.approx(3)
    assert found[0].note == "rank 0, in the phase train: another rank is gone"
    hung = list(gpu_check.verdicts(check, KILLED, Outcome(tmp_path, "", None, ended + 60)))
    assert [each.verdict for each in hung] == [FAILED] * 3  # nor did it end by itself
    cut = list(gpu_check.verdicts(check, KILLED, Outcome(tmp_path, "", None, ended)))
    assert [each.verdict for each in cut] == [NOT_RUN, NOT_RUN]


def test_checks_agree_with_their_programs_and_the_document():
    document = (REPO / "docs/gpu-check.md").read_text()
    for check in {check.name: check for gpu in (True, False) for check in checks.all_checks(gpu)}.values():
        assert (REPO / check.script).exists() and len({row.name for row in check.rows}) == len(check.rows)
        assert f"`{check.name}`" in document or check.name.startswith("bench ")
        assert all(row.remedy and row.sign in "≤≥" for row in check.rows)
    names = [row.name for check in checks.all_checks(gpu=True) for row in check.rows]
    assert len(set(names)) == len(names)


def test_tensors_that_moved_are_named():
    """Parameters, buffers, and what a kernel of vLLM's keeps to itself."""
    from support.engine.push_check import moved_tensors
    from tools.gpu_checks import try_engine

    class Kernel:
        __module__ = "vllm.made_up"

        def __init__(self):
            self.packed = [torch.zeros(3), torch.ones(2)]

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].kernel = Kernel()
    before = try_engine.tensor_places(model)
    assert {"0._parameters.weight", "1._buffers.running_mean", "0.kernel.packed.1"} <= before.keys()
    assert moved_tensors(before, try_engine.tensor_places(model)) == []
    kept = model[0].weight.data, model[0].kernel.packed[1]
    model[0].weight.data = kept[0].clone()
    model[0].kernel.packed[1] = kept[1].clone()
    assert moved_tensors(before, try_engine.tensor_places(model)) == ["0._parameters.weight", "0.kernel.packed.1"]


@pytest.mark.parametrize("ranks, eager", [(1, ["dense"]), (2, []), (8, [])])
def test_a_sharded_engine_captures_graphs(monkeypatch, ranks, eager):
    """rollout.tp=2 with CUDA graphs is what configs/qwen7b.yaml starts."""
    from tools.gpu_checks import try_engine, worker

    monkeypatch.setattr(worker.dist, "get_world_size", lambda: ranks)
    settings = {kind: try_engine.overrides(kind) for kind in worker.MODELS}
    assert [kind for kind, keys in settings.items() if "rollout.vllm.enforce_eager=true" in keys] == eager
    assert ("rollout.tp=2" in settings["dense"]) == (ranks > 1)


# What a check's process does, in place of one: it answers a row, then fails; and one that never ends.
CRASHES = (
    'import os, sys\nopen(os.environ["GPU_CHECK_FOLDER"] + "/rows.jsonl", "w").write(sys.argv[1] + "\\n")\nos.abort()'
)
HANGS = "import time\ntime.sleep(1000)"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command(checks, *options) → (exit code, the JSON) of gpu_check on a machine without a GPU, with these checks."""
    facts = {
        "torch": {"gpus": [], "cuda": None, "nccl": None}, "driver": None,
        "packages": dict.fromkeys(gpu_check.PACKAGES, "1.0"),
    }  # fmt: skip
    monkeypatch.setattr(gpu_check, "run_doctor", lambda: {"facts": facts, "rows": [{"verdict": "ok"}]})
    monkeypatch.setattr(gpu_check, "make_demo", lambda folder: None)

    def run(asked: list[Check], *options: str):
        monkeypatch.setattr(gpu_check, "all_checks", lambda gpu: asked)
        path = tmp_path / "found.json"
        code = gpu_check.main([*options, "--folder", str(tmp_path / "work"), "--json", str(path)])
        return code, json.loads(path.read_text()) if path.exists() else None

    return run


def test_one_that_crashes_or_hangs_ends_no_other(command, monkeypatch, tmp_path, capsys):
    (tmp_path / "crashes.py").write_text(CRASHES)
    (tmp_path / "hangs.py").write_text(HANGS)
    answer = json.dumps({"row": "small", "figure": 0.7}).replace("{", "{{").replace("}", "}}")
    monkeypatch.setattr(gpu_check, "CPU_TIMES", 1)
    hangs = Check("hangs", 3, 1, [FEW[0]._replace(name="waits")], str(tmp_path / "hangs.py"))
    crashes = Check("crashes", 60, 1, [*FEW, GPU_ONLY], str(tmp_path / "crashes.py"), (answer,))
    code, found = command([hangs, crashes], "--cpu")
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 1 and {name: row["verdict"] for name, row in rows.items()} == {
        "machine": OK, "waits": NOT_RUN, "on a GPU": NOT_RUN, "small": FAILED, "large": FAILED,
    }  # fmt: skip
    assert "did not end within its" in rows["waits"]["note"] and "needs a GPU" in rows["on a GPU"]["note"]
    assert rows["small"]["figure"] == 0.7 and rows["large"]["figure"] is None
    printed = capsys.readouterr().out
    assert "0.7 not ≤ 0.5 relative" in printed and "make it small" in printed
    assert "5 rows, this call took " in printed and "1 ok, 2 failed, 2 not run" in printed
    assert "  hangs                from minute 0.0, about 1 s, at most 3\n" in printed
    assert printed.endswith("verdict: a run learns from right numbers here; mind what failed: make it small; see the "
                            "output of the check\n")  # fmt: skip


def test_time_that_is_over_is_no_failure(command):
    code, found = command([Check("c", 60, 30, FEW, "none.py")], "--cpu", "--minutes", "0.01")
    assert code == 0 and [row["verdict"] for row in found["rows"]] == [OK, NOT_RUN, NOT_RUN]
    assert found["rows"][1]["note"].startswith("the 0.01 minutes were over")


ANSWERS = (
    'import os, sys\nopen(os.environ["GPU_CHECK_FOLDER"] + "/rows.jsonl", "w").write(sys.argv[1] + "\\n")\n'
    "if len(sys.argv) > 2:\n    import time\n    time.sleep(1000)"
)


@pytest.mark.slow
def test_answers_before_the_time_was_over_count(command, tmp_path):
    (tmp_path / "slow.py").write_text(ANSWERS)
    answer = json.dumps({"row": "small", "figure": 0.1}).replace("{", "{{").replace("}", "}}")
    slow = Check("slow", 1000, 1, FEW, str(tmp_path / "slow.py"), (answer, "hang"))
    code, found = command([slow], "--cpu", "--minutes", "0.25")
    assert code == 0 and [row["verdict"] for row in found["rows"]] == [OK, OK, NOT_RUN]
    assert found["rows"][2]["note"].startswith("the 0.25 minutes were over")


@pytest.mark.slow
def test_a_second_call_adds_to_the_first(command, tmp_path, capsys):
    """Results of other checks are kept, but not those of another commit."""
    (tmp_path / "answers.py").write_text(ANSWERS)
    both = []
    for name, row, figure in (("one", FEW[0], 0.7), ("two", FEW[1], 2.5)):
        answer = json.dumps({"row": row.name, "figure": figure}).replace("{", "{{").replace("}", "}}")
        both.append(Check(name, 60, 1, [row], str(tmp_path / "answers.py"), (answer,)))
    path = tmp_path / "found.json"
    assert command(both, "--cpu", "--only", "one")[0] == 1
    text = path.read_text()
    code, found = command(both, "--cpu", "--only", "two")
    assert code == 0 and {row["name"]: row["figure"] for row in found["rows"]} == {
        "machine": 0,
        "large": 2.5,
        "small": 0.7,
    }
    assert "make it small" in capsys.readouterr().out
    path.write_text(text.replace('"commit": "', '"commit": "other'))
    assert {row["name"] for row in command(both, "--cpu", "--only", "two")[1]["rows"]} == {"machine", "large"}


def test_advice():
    def told(*rows: tuple[str, str], missing=()) -> str:
        found = [gpu_check.Verdict("c d", Row(name, "≤", 1, "", f"mend {name}"), verdict) for name, verdict in rows]
        return gpu_check.advice(found, [*missing])

    assert told(("push, gqa", OK), ("m: push", OK)) == "train"
    assert told(("m: push", FAILED), ("gradient, moe, bf16", FAILED)).startswith(
        "do not train here yet, 'gradient, moe"
    )
    assert told(("m: push", FAILED), ("machine", OK)).endswith("mind what failed: mend m: push")
    assert told(("push, moe", NOT_RUN)) == 'nothing failed, but not all was tried. Not tried: --only "c d"'
    assert told(("push, moe", OK), missing=["demo"]).endswith('Not tried: --only "demo"')
    assert told(("m: push", NOT_RUN)) == "train"


def test_checks_that_were_not_asked_for_are_named(command, tmp_path, capsys):
    (tmp_path / "answers.py").write_text(ANSWERS)
    answer = json.dumps({"row": "small", "figure": 0.1}).replace("{", "{{").replace("}", "}}")
    one = Check("one", 60, 1, FEW[:1], str(tmp_path / "answers.py"), (answer,))
    other = Check("other", 60, 1, [FEW[1]._replace(name="push, large")], "none.py")
    assert command([one, other], "--cpu", "--only", "one")[0] == 0
    assert capsys.readouterr().out.endswith(
        'verdict: nothing failed, but not all was tried. Not tried: --only "other"\n'
    )


def test_two_calls_fit_ten_minutes_each():
    """Those that docs/gpu-check.md names, by the estimates; nothing else is left."""
    document = (REPO / "docs/gpu-check.md").read_text()
    calls = [shlex.split(line)[3:] for line in re.findall(r"^ +(python tools/gpu_check.py --only .*)$", document, re.M)]
    every = {check.name: check for check in checks.all_checks(gpu=True)}
    assert sorted(name for call in calls for name in call) == sorted(every) and len(calls) == 2
    assert all(sum(every[name].expected for name in call) <= 540 for call in calls)


def test_figures_of_a_gpu_name_its_machine(tmp_path):
    step = {name: 1.0 for name in works.COLUMNS if works.TYPES.get(name, float) is float}
    step |= {"model": "qwen2.5-0.5b", "dtype": "bf16", "lengths": "tail", "max_tokens": 256, "system": "ours"}
    step |= {"round": 1, "ranks": 1, "step": 1, "date": "d", "machine": "2 cores of a CPU", "commit": "c"}
    works.add_results(tmp_path / "work/bench-m/bench.csv", [step])
    found = [gpu_check.Verdict("bench m", FEW[0], OK, 0.1)]
    rows = gpu_check.bench_rows(tmp_path / "work", found, "1x-nvidia-h100")
    written = json.loads(gpu_check.as_json({}, found, rows))["bench"]
    assert [(row["model"], row["machine"]) for row in written] == [("qwen2.5-0.5b", "1x-nvidia-h100")]


def test_without_a_gpu_it_says_so(command, capsys):
    code, found = command([Check("c", 60, 30, FEW, "none.py")])
    assert code == 2 and found is None
    assert capsys.readouterr().out.startswith("error: no GPU is visible")


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path):
    """Two ranks, so that models are split and a rank can be killed."""
    path = tmp_path / "found.json"
    options = ["--cpu", "--nproc", "2", "--minutes", "90", "--folder", str(tmp_path / "work"), "--json", str(path)]
    code = gpu_check.main(options)
    rows = json.loads(path.read_text())["rows"]
    failed = {row["name"]: row for row in rows if row["verdict"] == FAILED}
    printed = "".join(path.read_text()[-3000:] for path in tmp_path.glob("work/*/printed.txt")) if failed else ""
    assert code == 0 and not failed, f"{failed}\n{printed}"
    assert {row["note"] for row in rows if row["verdict"] == NOT_RUN} == {"needs a GPU"}
    assert sum(row["verdict"] == OK for row in rows) >= 25
    shutil.rmtree(tmp_path / "work")
