"""Hostile answers in real grading processes: each costs its own reward, the rest is graded, nothing is left behind."""

import ctypes
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from grpo.step.grading import Outcome
from tests.conftest import REPO
from tests.pools import JUDGE, fenced, grade, grade_with, pool_of
from tests.processes import wait_until

EXPRESSIONS = {
    "tower": "\\boxed{9^{9^{9^{9}}}}",
    "factorial": "\\boxed{(10^9)!}",
    "one megabyte": "\\boxed{" + "1+" * 500_000 + "1}",
    "parentheses": "\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 200 + "1" + "}" * 200 + "}",
    "blanks": "final answer is" + " " * 100_000 + "x",
    "commas": "1," * 500_000,
    "thoughts": "<think>" * 100_000,
}


def processes_below(pid):
    """All living descendants."""
    return {process for process in psutil.Process(pid).children(recursive=True) if alive(process)}


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def nothing_left(monkeypatch, tmp_path):
    """No process or file of the grading outlives the test, and with no process no memory but this one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before, memory = processes_below(os.getpid()), psutil.Process().memory_info().rss
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # other tests want to see what becomes of orphans
    assert processes_below(os.getpid()) <= before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("grading-", "answer-"))]
    assert psutil.Process().memory_info().rss < memory + 100 * 2**20


@pytest.mark.parametrize("name", [pytest.param("math", marks=pytest.mark.slow), "gsm8k", "multiple_choice", "format"])
def test_hostile_expressions(name, nothing_left):
    answer = {"multiple_choice": "B"}.get(name, "7")
    good = {"multiple_choice": "Answer: B", "format": "<think>3 + 4</think> 7"}.get(name, "\\boxed{7}")
    timeout_s = 1.5 if name == "math" else 60.0  # the others need it only if the machine stands still
    jobs = [("s", text, answer, {}) for hostile in EXPRESSIONS.values() for text in (good, hostile)]
    outcomes = grade_with(name, jobs, timeout_s=timeout_s, workers=2, memory_gb=2.0)
    assert all(outcome == Outcome({"reward": 1.0}) for outcome in outcomes[::2])
    for what, outcome in zip(EXPRESSIONS, outcomes[1::2], strict=True):
        assert sum(outcome.parts.values()) == 0, what
        assert outcome.status in (("ok", "timeout", "error") if name == "math" else ("ok",)), (what, outcome)


PATIENT = {"code": {"seconds": 20.0, "partial": True}}


PROGRAMS = {
    "ignored signals": "import signal as s\nfor i in (1, 2, 15): s.signal(i, print)\nwhile True: 0",
    "catastrophic regular expression": "import re\nre.match('(a+)+b', 'a' * 60)",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "shell": "import subprocess\nsubprocess.run(['sh', '-c', ':(){ :|:& };:'], check=True)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x + 1)\nf(0)",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "many folders in each other": "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n1 / 0",
    "flood": "while True:\n    print('x' * 2**20)",
    "exit": "import os\nos._exit(0)",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGTERM)",
    "own session": "import os\nos.setsid()",
}
ENDLESS = ("ignored signals", "catastrophic regular expression")  # the others may be late on a busy machine
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
HELD = [*re.findall(r"^(\w+) = refused", REACH, re.MULTILINE), "inside", "harmless"]


def test_hostile_programs(nothing_left):
    """Among good ones. A program that fails by itself is wrong, and never an error of the run."""
    options = {"code": {"seconds": 1.5, "memory_mb": 512}}
    row = {"tests": ["assert 1 + 1 == 2"]}
    jobs = [("s", text, "", row) for hostile in PROGRAMS.values() for text in (fenced("x = 1"), fenced(hostile))]
    outcomes = grade_with("code", jobs, workers=2, options=options)
    assert [outcome for outcome in outcomes[::2] if outcome != Outcome({"reward": 1.0})] == []
    for what, outcome in zip(PROGRAMS, outcomes[1::2], strict=True):
        assert outcome.parts.get("reward", 0.0) == 0.0, (what, outcome)
        assert outcome.status == "timeout" or (outcome.status == "ok" and what not in ENDLESS), (what, outcome)


def test_program_reaches_nothing_outside_its_folder(nothing_left, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        program = REACH.format(outside=str(tmp_path), kept=str(kept), port=server.getsockname()[1])
        jobs = [("s", fenced(program), "", {"tests": [f"assert {name}"]}) for name in HELD]
        outcomes = dict(zip(HELD, grade_with("code", jobs, options=PATIENT), strict=True))
        with pytest.raises(TimeoutError):
            server.accept()
    assert {name: outcome for name, outcome in outcomes.items() if outcome != Outcome({"reward": 1.0})} == {}
    assert kept.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


ANY = """
class Any:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "Any()"
    def __float__(self): return 0.0
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
"""
FORGERIES = {
    "equals everything": f"{ANY}def f(x): return Any()",
    "a subclass of int": "class I(int):\n    def __eq__(self, other): return True\ndef f(x): return I()",
    "asserts that do nothing": "import builtins\nbuiltins.AssertionError = SystemExit\ndef f(x): return 0",
    "results that are patched": "import json\njson.dumps = lambda *a: '[[], [], []]'\ndef f(x): 0",
    "results that are no texts": "import json\njson.dumps = lambda *a: '[[[]], [7], [null]]'\ndef f(x): 0",
    "a flood in their place": "import os\nfor i in 3, 4, 5, 6:\n  try: os.write(i, b'x' * 2**15)\n"
    "  except OSError: 0\ndef f(x): 0",
    "results that are closed": "import os\nos.closerange(3, 99)\ndef f(x): 0",
    "a deep value": "def f(x):\n    y = []\n    for _ in range(900):\n        y = [y]\n    return y",
    "a large value": "def f(x): return ['x' * 100] * 50_000",
    "an item in itself": "class N:\n    def item(self): return self\ndef f(x): return N()",
    "names of the test's frame": "import sys\ndef f(x): return [*map(str, sys._getframe(1).f_locals.values())]",
}


# Of each test: what it asserts of an answer's f, and a right one. The literal of `assert f(x) == literal` never enters
# the answer's process, nor does its == count. Other tests run there as they are written, and the answer cannot put its
# own functions in the place of those that run them.
COMPARED = (
    ["assert f(1) == 64207", "assert 'a' == f(2)", "assert f(3) == [1, 2]"],
    "def f(x): return [0, 64207, 'a', [1, 2]][x]",
)
WRITTEN = (["assert f(1) > 5", "for i in range(3):\n    assert abs(f(i)) >= 6"], "def f(x): return 6")

PATCHED = [name for name in FORGERIES if "patched" in name or name.startswith(("results", "asserts"))]


@pytest.mark.parametrize("tests, right, forgeries", [(*COMPARED, [*FORGERIES]), (*WRITTEN, PATCHED)])
def test_forged_values_earn_nothing(nothing_left, tests, right, forgeries):
    jobs = [("s", fenced(program), "", {"tests": tests}) for program in [right, *map(FORGERIES.get, forgeries)]]
    good, *outcomes = grade_with("code", jobs, workers=2, options=PATIENT)
    assert good == Outcome({"reward": 1.0})
    assert [what for what, outcome in zip(forgeries, outcomes, strict=True) if outcome.parts != {"reward": 0.0}] == []


OWNED = """
import fcntl, os, socket
def f(pid):
    read, write = os.pipe()
    for owner, setting in ((fcntl.F_SETOWN, pid), (10, 9)):  # F_SETSIG, SIGKILL
        try:
            fcntl.fcntl(read, owner, setting)
        except OSError:
            pass
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(write, b"x")
    here, there = socket.socketpair()
    fcntl.ioctl(here, 0x8901, pid.to_bytes(4, "little"))  # FIOSETOWN
"""


def test_a_file_signals_no_process(nothing_left):
    """Also where Landlock, which refuses it on Linux 6.12, is off."""
    victim = subprocess.Popen(["sleep", "30"])
    row = {"tests": [f"f({victim.pid})"]}
    (outcome,) = grade_with("code", [("s", fenced(OWNED), "", row)], options={"code": {"allow_writes": True}})
    time.sleep(0.2)
    assert outcome == Outcome({"reward": 0.0}) and victim.poll() is None
    victim.kill()
    victim.wait()


KEEPS_FILES = "(tempfile.mkdtemp(), time.sleep(1000))"
ORPHANS = "['sh', '-c', 'setsid sleep 1000 & setsid setsid sleep 1000 & sleep 1000']"  # in their own sessions
REWARDS = {  # expression → the status and a part of the error
    "len(bytearray(3 * 2**30))": ("error", "MemoryError"),  # of reward.memory_gb, 4 unless set
    "judge(text, answer, row)": ("error", "RecursionError"),
    f"(subprocess.Popen(['sleep', '1000'], start_new_session=True), subprocess.run({ORPHANS}))": ("timeout", ""),
    "(subprocess.Popen(['sleep', '1000']), os._exit(3))": ("error", "exit code 3"),
    "float('nan')": ("error", "ValueError: a reward must be a finite number"),
    "10**400": ("error", "at most 1e+09 in size; reward is 1000"),
    "{'overlong': -1.0}": ("error", "ValueError: a reward has a part 'overlong', which is the trainer's own"),
    KEEPS_FILES: ("timeout", ""),
}


def test_hostile_rewards(nothing_left):
    pool = pool_of("custom", custom=JUDGE, timeout_s=2.0, workers=2, memory_gb=2.0)
    outcomes = grade(pool, [("s", text, "", {}) for hostile in REWARDS for text in ("1.0", hostile)])
    assert [outcome.parts for outcome in outcomes[::2]] == [{"reward": 1.0}] * len(REWARDS)
    for (status, error), outcome in zip(REWARDS.values(), outcomes[1::2], strict=True):
        assert outcome.status == status and error in outcome.error, outcome
    assert len(processes_below(os.getpid())) <= len(pool.workers) == 2  # what the rewards started is gone already
    pool.close()


def test_import_that_never_ends_and_import_that_fails(tmp_path, monkeypatch, nothing_left):
    """In the grading process; this one, which looks at the function too, can import it."""
    for name, line in (("slow", "import time; time.sleep(1000)"), ("fails", "1 / 0")):
        judge = f"import sys\nif 'pytest' not in sys.modules:\n    {line}\ndef judge(text, answer, row): return 1.0"
        (tmp_path / f"{name}.py").write_text(judge)
    monkeypatch.setattr("grpo.step.grading.LOAD_S", 1.0)
    for name, message in (("slow", "loading the reward took more than 1 s"), ("fails", "ZeroDivisionError")):
        jobs = [("s", "", "", {}), ("good", "a", "a", {})]
        failed, graded = grade_with("custom", jobs, by_source={"good": "exact"}, custom=f"{tmp_path}/{name}.py:judge")
        assert failed.status == "error" and message in failed.error
        assert graded == Outcome({"reward": 1.0})


def test_workers_end_with_the_program_that_started_them(tmp_path):
    """Even when it is killed in the middle of a grading."""
    program = (
        f"from tests.pools import pool_of\npool = pool_of('custom', 1000.0, custom={JUDGE!r})\n"
        f"pool.submit('s', {KEEPS_FILES!r}, '', {{}})\nprint('ready', flush=True)\npool.collect()"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # after SIGKILL the workers' temporary folders stay
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPO, env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        wait_until(lambda: list(tmp_path.glob("grading-*/*")))  # the reward has begun
        workers = processes_below(process.pid)
        process.kill()
    assert workers
    wait_until(lambda: not any(alive(worker) for worker in workers))


def test_modules_of_the_working_directory_do_not_shadow_those_of_the_worker(tmp_path, monkeypatch):
    for name in ("reward.py", "config.py", "json.py", "grpo/__init__.py", "grpo/step/grading.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    jobs = [("s", "1.0", "", {}), ("exact", "a", "a", {})]
    assert grade_with("custom", jobs, by_source={"exact": "exact"}, custom=JUDGE) == [Outcome({"reward": 1.0})] * 2
