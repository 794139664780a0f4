"""The lock of the output folder, with a process that holds it, and the folder of an earlier run."""

import fcntl
import os
import subprocess
import sys

import pytest

from config import UserError
from support.files import lock_output_dir, open_output_dir
from tests.conftest import REPO


def test_one_run_in_an_output_folder(tmp_path):
    program = """
import pathlib, sys, time
from support.files import lock_output_dir
file = lock_output_dir(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(100)
"""
    out = tmp_path / "deep/out"
    holder = subprocess.Popen([sys.executable, "-c", program, str(out)], cwd=REPO, stdout=subprocess.PIPE)
    holder.stdout.readline()
    in_use = f"output_dir=.* is in use by process {holder.pid} on host .*choose another"
    with pytest.raises(UserError, match=in_use):
        lock_output_dir(out)
    out.mkdir()
    (out / "metrics.jsonl").touch()
    open_output_dir(out, "seed: 0\n", "none", 0)  # as the holder does; a folder moved aside changes nothing
    with pytest.raises(UserError, match=in_use):
        lock_output_dir(out)
    holder.kill()
    holder.wait()
    with lock_output_dir(out):
        assert (tmp_path / "deep/out.lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def refuse(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_output_dir(tmp_path / "out").close()
    said = capsys.readouterr().out
    assert "out cannot be locked (No locks available); start no second run in it" in said


def test_an_earlier_run_is_moved_aside(tmp_path, capsys):
    out = tmp_path / "out"
    for number in range(3):
        open_output_dir(out, f"seed: {number}\n", "none", 0)
    found = {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()}
    assert found == {"out": "seed: 2\n", "out.1": "seed: 0\n", "out.2": "seed: 1\n"}
    assert capsys.readouterr().out.count("moved the earlier run in") == 2
    open_output_dir(out, "seed: 3\n", "auto", 0)
    assert (out / "config.yaml").read_text() == "seed: 3\n" and len(list(tmp_path.iterdir())) == 3
    (out / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"output_dir=.*out: Expecting value"):
        open_output_dir(out, "seed: 3\n", "auto", 2)
