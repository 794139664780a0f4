"""Hostile answers through the real grader: each costs its own reward, the rest is graded, nothing is left behind."""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from support import grading as reward
from support import sandbox

EXPRESSIONS = {
    "tower": "\\boxed{9^{9^{9^{9}}}}",
    "plain tower": "9**9**9**9",
    "factorial": "\\boxed{(10^9)!}",
    "one megabyte": "\\boxed{" + "1+" * 500_000 + "1}",
    "a megabyte of digits": "9" * 1_000_000,
    "boxes that never close": "\\boxed{" * 140_000,
    "parentheses": "\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 200 + "1" + "}" * 200 + "}",
    "a long sum": "\\boxed{\\sum_{n=1}^{10^9} \\frac{1}{n}}",
    "an integral": "\\boxed{\\int_0^{\\infty} e^{-x^{x^x}} \\sin(x^x) dx}",
    "a large power": "\\boxed{(x+y+z+w)^{300}-1}",
    "blanks": "final answer is" + " " * 100_000 + "x",
    "dollars": "$" * 100_000,
    "commas": "1," * 500_000,
    "thoughts": "<think>" * 100_000,
}


def processes_below(pid: int) -> set[int]:
    """All living descendants."""
    found, new = set(), {pid}
    while new:
        new = sandbox.family(new | found) - found - {pid}
        found |= new
    return found


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.fixture
def nothing_left(monkeypatch, tmp_path):
    """No process or file of the grading outlives the test, and with no process no memory but this one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before, memory = processes_below(os.getpid()), resident_mb()
    yield
    assert processes_below(os.getpid()) <= before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("grading-", "answer-"))]
    assert resident_mb() < memory + 100


@pytest.mark.parametrize("name", ["math", "gsm8k", "multiple_choice", "format"])
def test_hostile_expressions(name, nothing_left):
    answer = {"multiple_choice": "B"}.get(name, "7")
    good = {"multiple_choice": "Answer: B", "format": "<think>3 + 4</think> 7"}.get(name, "\\boxed{7}")
    timeout_s = 4.0 if name == "math" else 60.0  # the others never need it, but for a machine that stands still
    grader = reward.Grader(name, {}, None, timeout_s, workers=2, memory_gb=2.0)
    jobs = [("s", text, answer, {}) for hostile in EXPRESSIONS.values() for text in (good, hostile)]
    grades = grader.grade(jobs)
    grader.close()
    assert all(grade == reward.Grade({"reward": 1.0}) for grade in grades[::2])
    for what, grade in zip(EXPRESSIONS, grades[1::2], strict=True):
        assert sum(grade.parts.values()) == 0, what
        allowed = ("ok", "timeout", "error") if name == "math" else ("ok",)
        assert grade.status in allowed, (what, grade)


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


FORK = "import os\nwhile True:\n    os.fork()"
THREADS = "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()"
RECURSION = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x + 1)\nf(0)"
REGEX = "import re\nre.match('(a+)+b', 'a' * 60)"
DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n1 / 0"
PROGRAMS = {
    "endless loop": ("while True:\n    pass", "timeout"),
    "sleep": ("import time\ntime.sleep(1000)", "timeout"),
    "ignored signals": (
        "import signal\nfor s in (1, 2, 15):\n    signal.signal(s, lambda *a: 0)\nwhile True: 0",
        "timeout",
    ),
    "catastrophic regular expression": (REGEX, "timeout"),
    "fork bomb": (FORK, "ok"),
    "shell": ("import subprocess\nsubprocess.run(['sh', '-c', ':(){ :|:& };:'], check=True)", "ok"),
    "10 GB": ("x = bytearray(10 * 2**30)", "ok"),
    "10 GB in pieces": ("x = []\nwhile True:\n    x.append(b'x' * 2**20)", "ok"),
    "deep recursion": (RECURSION, "ok"),
    "tower": ("9**9**9**9", "timeout"),
    "threads": (THREADS, "ok"),
    "many folders in each other": (DEEP, "ok"),
    "large file": ("open('large', 'w').write('x' * 2**28)", "ok"),
    "flood": ("while True:\n    print('x' * 2**20)", "ok"),
    "exit": ("import os\nos._exit(0)", "ok"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "ok"),
    "kill the parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "ok"),
    "kill everything": ("import os, signal\nos.kill(-1, signal.SIGTERM)", "ok"),
    "own session": ("import os\nos.setsid()", "ok"),
    "more memory": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**50, 2**50))", "ok"),
}
REACH = """
import os, socket
def refused(call, *args):
    try:
        call(*args)
    except OSError as error:
        return error.errno in (1, 13)
    return False
inside = open("inside", "w").write("x") == 1
made = refused(open, {outside!r} + "/new", "w")
written = refused(open, {kept!r}, "w")
removed = refused(os.unlink, {kept!r})
renamed = refused(os.rename, {kept!r}, "mine")
cut = refused(os.truncate, {kept!r}, 0)
opened = refused(os.chmod, {kept!r}, 0o777)
linked = refused(os.symlink, "inside", {outside!r} + "/link")
tcp = refused(socket.create_connection, ("127.0.0.1", {port}), 1)
udp = refused(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
local = refused(socket.socket, socket.AF_UNIX)
spied = refused(open, "/proc/%d/environ" % os.getppid())
import asyncio, threading
threads = [threading.Thread(target=print) for _ in range(4)]
[t.start() for t in threads]
async def five():
    await asyncio.sleep(0.01)
    return 5
harmless = asyncio.run(five()) == 5
"""
HELD = [
    "inside",
    "made",
    "written",
    "removed",
    "renamed",
    "cut",
    "opened",
    "linked",
    "tcp",
    "udp",
    "local",
    "spied",
    "harmless",
]


def test_hostile_programs(nothing_left):
    """Among good ones. What fails by itself is wrong, or late on a busy machine; it is never an error of the run."""
    options = {"code": {"seconds": 4.0, "memory_mb": 512}}
    grader = reward.Grader("code", {}, None, timeout_s=30.0, workers=2, options=options)
    row = {"tests": ["assert 1 + 1 == 2"]}
    jobs = [("s", text, "", row) for hostile, _ in PROGRAMS.values() for text in (fenced("x = 1"), fenced(hostile))]
    grades = grader.grade(jobs)
    grader.close()
    assert [grade for grade in grades[::2] if grade != reward.Grade({"reward": 1.0})] == []
    for (what, (_, status)), grade in zip(PROGRAMS.items(), grades[1::2], strict=True):
        assert grade.parts.get("reward", 0.0) == 0.0, (what, grade)
        assert grade.status in (("timeout",) if status == "timeout" else ("ok", "timeout")), (what, grade)


def test_program_reaches_nothing_outside_its_folder(nothing_left, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        program = REACH.format(outside=str(tmp_path), kept=str(kept), port=server.getsockname()[1])
        grader = reward.Grader("code", {}, None, 30.0, 1, options={"code": {"seconds": 20.0, "partial": True}})
        jobs = [("s", fenced(program), "", {"tests": [f"assert {name}"]}) for name in HELD]
        grades = dict(zip(HELD, grader.grade(jobs), strict=True))
        grader.close()
        with pytest.raises(TimeoutError):
            server.accept()
    assert {name: grade for name, grade in grades.items() if grade != reward.Grade({"reward": 1.0})} == {}
    assert kept.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


CUSTOM = """
import os, subprocess, sys, time

def judge(text, answer, row):
    if text == "memory":
        return len(bytearray(10 * 2**30))
    if text == "recursion":
        return judge(text, answer, row)
    if text == "children":  # in their own sessions, one of them orphaned
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 1000 & setsid setsid sleep 1000 & sleep 1000"])
    if text == "orphans then death":
        subprocess.Popen(["sleep", "1000"])
        os._exit(3)
    if text == "exit":
        sys.exit(5)
    if text == "files":
        import tempfile
        tempfile.mkdtemp()
        time.sleep(1000)
    return 1.0
"""


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "judge.py").write_text(CUSTOM)
    return f"{tmp_path}/judge.py:judge"


def test_hostile_rewards(custom, nothing_left):
    texts = ["memory", "recursion", "children", "orphans then death", "exit", "files"]
    grader = reward.Grader("custom", {}, custom, timeout_s=2.0, workers=2)
    grades = grader.grade([("s", text, "", {}) for hostile in texts for text in ("fine", hostile)])
    assert [grade.parts for grade in grades[::2]] == [{"reward": 1.0}] * len(texts)
    statuses = dict(zip(texts, grades[1::2], strict=True))
    assert [grade.status for grade in statuses.values()] == ["error", "error", "timeout", "error", "error", "timeout"]
    assert "MemoryError" in statuses["memory"].error and "RecursionError" in statuses["recursion"].error
    assert "exit code 3" in statuses["orphans then death"].error and "exit code 5" in statuses["exit"].error
    assert len(processes_below(os.getpid())) <= 2  # the workers: what the rewards started is gone already
    grader.close()


def test_import_that_never_ends_and_import_that_fails(tmp_path, monkeypatch, nothing_left):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\ndef judge(text, answer, row): return 1.0")
    (tmp_path / "fails.py").write_text("1 / 0")
    monkeypatch.setattr(reward, "LOAD_S", 1.0)
    for name, message in (("slow", "loading the reward took more than 1 s"), ("fails", "ZeroDivisionError")):
        grader = reward.Grader("custom", {"good": "exact"}, f"{tmp_path}/{name}.py:judge", timeout_s=5.0, workers=1)
        failed, graded = grader.grade([("s", "", "", {}), ("good", "a", "a", {})])
        grader.close()
        assert failed.status == "error" and message in failed.error
        assert graded == reward.Grade({"reward": 1.0})


def test_workers_end_with_the_program_that_started_them(custom, tmp_path):
    """Even when it is killed in the middle of a grading."""
    program = (
        f"import reward\ngrader = reward.Grader('custom', {{}}, {custom!r}, 1000.0, 1)\n"
        "grader.submit('s', 'files', '', {})\nprint('ready', flush=True)\ngrader.collect()"
    )
    folder = Path(reward.__file__).parent
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # after SIGKILL the workers' temporary folders stay
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while not (workers := processes_below(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        process.kill()
    time.sleep(1)
    assert workers and not [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists() and alive(pid)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_graders_do_not_wait_for_each_other(custom):
    """Several in one process, as with the tests of a trainer; each keeps its own order."""
    graders = [reward.Grader("exact", {}, None, 5.0, 1) for _ in range(2)]
    results = {}
    threads = [
        threading.Thread(
            target=lambda i=i: results.update({i: graders[i].grade([("s", str(n), str(i), {}) for n in range(50)])})
        )
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, grader in enumerate(graders):
        assert [grade.parts["reward"] for grade in results[i]] == [float(n == i) for n in range(50)]
        grader.close()
