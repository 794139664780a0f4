"""The lock of the output folder, with a process that holds it; the folder of an earlier run; files of samples."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from config import UserError
from grpo.parts.base.files import check_output_dir, complete_folder, lock_output_dir, open_output_dir
from grpo.parts.base.hf_folder import export_hf
from grpo.parts.base.rollout_files import RolloutWriter
from tests.conftest import REPO, refused, wrap


def test_one_run_in_an_output_folder(tmp_path):
    program = """
import pathlib, sys, time
from grpo.parts.base.files import lock_output_dir
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

    for _ in range(2):  # as the holder does; a folder moved aside changes nothing
        open_output_dir(out, "seed: 0\n", "none", 0)
    with pytest.raises(UserError, match=in_use):
        lock_output_dir(out)

    holder.kill()
    holder.wait()
    with lock_output_dir(out):
        assert (tmp_path / "deep/out.lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(37, "No locks available")))
    assert lock_output_dir(tmp_path / "out") is None
    assert "out cannot be locked (No locks available); start no second run in it" in capsys.readouterr().out


def test_an_earlier_run_is_moved_aside(tmp_path, capsys):
    out = tmp_path / "out"
    for number in range(3):
        open_output_dir(out, f"seed: {number}\n", "none", 0)
    found = {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()}
    assert found == {"out": "seed: 2\n", "out.1": "seed: 0\n", "out.2": "seed: 1\n"}
    assert capsys.readouterr().out.count("moved the earlier run in") == 2
    (out / "checkpoints/step_000005.tmp").mkdir(parents=True)  # of a save that was killed
    open_output_dir(out, "seed: 3\n", "auto", 0)
    assert (out / "config.yaml").read_text() == "seed: 3\n" and len(list(tmp_path.iterdir())) == 3
    assert not list((out / "checkpoints").iterdir())

    # A branch continues in the folder of its checkpoint alone.
    open_output_dir(out, "seed: 4\n", str(out / "checkpoints/step_000005"), 5)
    assert len(list(tmp_path.iterdir())) == 3
    open_output_dir(out, "seed: 5\n", str(tmp_path / "out.1/checkpoints/step_000005"), 5)
    assert (tmp_path / "out.3/config.yaml").read_text() == "seed: 4\n"

    (out / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"output_dir=.*out: Expecting value"):
        open_output_dir(out, "seed: 3\n", "auto", 2)


def test_an_export_has_what_transformers_saves_of_a_tokenizer(world, tiny, tmp_path):
    source = shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "rag": "c"}
    tokenizer.save_pretrained(source)
    export_hf([("weight", torch.ones(2))], source, tmp_path / "export")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == tokenizer.chat_template
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*")} for folder in (source, tmp_path / "export")]
    assert files[0] - files[1] == {"model.safetensors"}


OURS = ["out/versions.json", "out/config.yaml", "out/metrics.jsonl"]
HELD = "output_dir=out holds {}"
FOLDERS = [  # files that are there, resume, what a run reads, what the refusal says (None if there is none)
    (["out/log.txt", "model/a"], "none", {"model.path": ["model", "self", "Qwen/Qwen3-8B"]}, None),
    (
        ["out/model/a"],
        "none",
        {"model.path": ["out/model"]},
        HELD.format("model.path=out/model, which would move aside"),
    ),
    (["out/data/a.jsonl"], "none", {"data.train": ["out/d*/*.jsonl:test"]}, HELD.format("data.train=out/d*")),
    (
        ["out/r.py"],
        "none",
        {"reward.custom": ["./out/../out/r.py:f"]},
        HELD.format("reward.custom=./out/../out/r.py:f"),
    ),
    ([*OURS, "out/hf/step_000003/a"], "none", {"model.path": ["out/hf/step_000003"]}, HELD.format("model.path=out/hf")),
    (OURS, "none", {"--config": ["out/config.yaml"]}, None),  # the run's own, read before it moves
    (["out/config.yaml"], "auto", {"--config": ["out/config.yaml"]}, "out/config.yaml is not of an earlier run"),
    (["out/metrics.jsonl"], "none", {}, "out/metrics.jsonl is not of an earlier run"),
    (["out/checkpoints/step_000002/manifest.json", "out/config.yaml"], "auto", {}, None),  # all that was copied
]


@pytest.mark.parametrize("files, resume, inputs, message", FOLDERS)
def test_a_folder_with_what_a_run_reads_or_with_files_of_others_is_refused(
    tmp_path, monkeypatch, files, resume, inputs, message
):
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    with refused(UserError, message and re.escape(message)):
        check_output_dir(Path("out"), resume, inputs)


def test_a_folder_is_complete_or_absent(tmp_path):
    def names():
        return {path.name: sorted(file.name for file in path.iterdir()) for path in tmp_path.iterdir()}

    (tmp_path / "export.tmp").mkdir()
    (tmp_path / "export.tmp/left_by_a_kill").touch()
    with complete_folder(tmp_path / "export") as folder:
        (folder / "a").touch()
        assert names() == {"export.tmp": ["a"]}
    assert names() == {"export": ["a"]}
    with pytest.raises(OSError, match="no space"), complete_folder(tmp_path / "export") as folder:
        (folder / "b").touch()
        raise OSError("no space")
    assert names() == {"export": ["a"]}
    with complete_folder(tmp_path / "export") as folder:
        (folder / "c").touch()
    assert names() == {"export": ["c"]}


def test_files_are_on_the_disk_before_their_folder_has_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda file: order.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    wrap(monkeypatch, os, "rename", lambda rename, *paths: order.append("rename") or rename(*paths))
    with complete_folder(tmp_path / "export") as folder:
        (folder / "a").touch()
    assert order == ["a", "export.tmp", "rename", tmp_path.name]


# ---------------------------------------------------------------- files of samples


@pytest.fixture
def writer():
    return RolloutWriter()


def made_up(text="ab"):
    """A sample with what JSON does not know: float32, of which it has to be said which number of 64 bits it is."""
    logp = np.array([-0.1, -1e-7, -0.0, -12.5], np.float32)
    return {"ids": np.array([5, 150_000], np.int32), "logp": logp, "text": text, "parts": {"x": 0.1}, "group": 3}


def test_a_file_of_samples_is_what_json_makes_of_lists(writer, tmp_path):
    texts = ["ab", "été 😀 \u2028", 'a "quoted"\nline', ""]
    writer.write({tmp_path / "step_000001.jsonl": [made_up(text) for text in texts]})
    writer.finish()
    written = (tmp_path / "step_000001.jsonl").read_text(encoding="utf-8")
    assert "-1.0000000116860974e-7,-0.0,-12.5" in written and written.count("\n") == written.count("}\n") == 4
    plain = {"ids": [5, 150_000], "logp": made_up()["logp"].tolist()}
    rows = [json.loads(line) for line in written.split("\n")[:-1]]
    assert rows == [{**plain, "text": text, "parts": {"x": 0.1}, "group": 3} for text in texts]


def test_a_run_that_fails_writes_its_last_samples(tmp_path):
    program = """if True:
        import pathlib, sys
        from grpo.parts.base.rollout_files import RolloutWriter
        RolloutWriter().write({pathlib.Path(sys.argv[1]): [{"text": "last"}]})
        raise ValueError("the end")
    """
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "a"], cwd=REPO, capture_output=True, text=True)
    assert "ValueError: the end" in done.stderr and (tmp_path / "a").read_text() == '{"text":"last"}\n'


def test_a_full_disk_is_told_by_the_next_call(writer, tmp_path):
    path = tmp_path / "step_000001.jsonl"
    (tmp_path / f"{path.name}.tmp").symlink_to("/dev/full")
    writer.write({path: [made_up()]})
    for call in (writer.finish, writer.finish, lambda: writer.write({tmp_path / "step_000002.jsonl": []})):
        with pytest.raises(OSError, match="No space left on device") as raised:
            call()
    assert raised.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []
