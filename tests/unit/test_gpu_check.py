"""tools/gpu_check.py on made-up results of its parts, and the marker `gpu`."""

import pytest

from tests.conftest import REPO
from tools import gpu_check

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_attention" name="test_a[1]" time="2.1"><properties><property name="error" value="3e-3"/>
</properties></testcase>
<testcase classname="tests.test_push" name="test_b" time="9"><failure message="AssertionError: lost&#10;more"/>
</testcase>
<testcase classname="tests.test_push" name="test_c" time="0"><skipped message="needs 2 GPUs, 1 are visible"/></testcase>
<testcase classname="tests.test_push" name="test_d" time="0"><skipped message="needs 2 GPUs, 1 are visible"/></testcase>
</testsuite></testsuites>"""
BENCH = "tokens/s                         812.5\ntrain s                           1.25\nanswers of 9 tokens\n"


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """command(part="shell command", ...) → (exit code, the table) with these in place of what the parts run."""
    monkeypatch.setattr(gpu_check.machine, "smi_facts", lambda: {"gpus": [{"total_mib": "51200"}]})
    monkeypatch.setattr(gpu_check, "TIMES_S", {"doctor": 9, "tests": 9, "bench": 2})
    real = gpu_check.run

    def run(doctor="echo 9 rows", tests=f"echo '{REPORT}' > {tmp_path}/tests.xml; exit 1", bench=f"echo '{BENCH}'"):
        own = {"doctor": doctor, "tests": tests, "bench qwen2.5-0.5b": bench}
        monkeypatch.setattr(gpu_check, "run", lambda part, _, *rest: real(part, ["sh", "-c", own[part]], *rest))
        return gpu_check.main(["--folder", str(tmp_path)], gpus=1), (tmp_path / "table.txt").read_text().splitlines()

    return run


def test_the_table_says_what_was_done_measured_and_failed(command):
    code, lines = command()
    assert code == 1 and lines == [
        "ok       doctor: 9 rows",
        "ok       test_attention test_a[1]: error 3e-3, 2 s",
        "failed   test_push test_b: AssertionError: lost",
        "skipped  2 tests: needs 2 GPUs, 1 are visible",
        "ok       bench qwen2.5-0.5b: tokens/s 812.5, train s 1.25",
        "skipped  bench qwen2.5-1.5b: needs 70 GiB, this GPU has 50, or --no-bench",
        "3 ok, 1 failed, 2 skipped",
    ]


def test_parts_that_break_have_failed(command):
    code, lines = command("echo 'STOP  driver: too old'; exit 1", "echo no module; exit 4", "echo warm; sleep 9")
    assert code == 1 and lines[:3] == [
        "failed   doctor: driver: too old",
        "failed   tests: exit code 4: no module",
        "failed   bench qwen2.5-0.5b: not within its time limit: warm",
    ]


def test_the_tests_of_a_gpu_are_those_of_the_document():
    files = [file for file in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    marked = {file.stem for file in files} - {"test_gpu_check"}
    assert len(marked) >= 6 and all(f"`{name}`" in (REPO / "docs/machines.md").read_text() for name in marked)
