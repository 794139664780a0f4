"""Checkpoints: the same state on every layout, an exact resume, damage that is found, updates that are skipped."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import save_file

from config import UserError
from support.base.files import digest_file, open_output_dir, write_synced
from support.model import checkpoint, shards
from support.model.checkpoint import CheckpointWriter
from support.model.shards import CheckpointError, check_coverage, read_sharded
from tests.compare_runs import lasting
from tests.conftest import tiny_model


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "arch, dtype, layouts",
    [
        ("qwen2", "fp32", {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "vpp": {"tp": 2, "pp": 2, "vpp": 2}, "cp2": {"cp": 2}}),
        pytest.param("qwen2_moe", "bf16", {
            "ep2tp2": {"tp": 2, "ep": 2}, "dp4": {}, "pp2ep2": {"pp": 2, "ep": 2},
            "etp2": {"tp": 2, "ep": 2, "etp": 2}, "ep4": {"ep": 4}, "tp2pp2": {"tp": 2, "pp": 2},
        }, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_state_is_the_same_on_every_layout(fork_server, tmp_path, arch, dtype, layouts):
    tiny_model(tmp_path / "model", arch, layers=4)
    check_state(fork_server, tmp_path, dtype, layouts, 4)


def check_state(server, folder: Path, dtype: str, layouts: dict[str, dict], nproc: int, *arguments: str) -> None:
    """tests/checkpoint_worker.py with the model in the folder finds the same state on all layouts."""
    printed = folder / "printed.txt"
    paths = (str(folder / "model"), dtype, str(folder / "out"))
    code = server.run(printed, "tests/checkpoint_worker.py", *paths, json.dumps(layouts), *arguments, nproc=nproc)
    text = printed.read_text()
    found = [line for line in text.splitlines() if line.split(":")[0] in layouts]
    assert code == 0 and found == [f"{x}: same" for x in layouts], text


def test_resume_is_exact(shared, train_forked, tmp_path):
    """The shared run goes on from its own first step, since the newest checkpoint is damaged: the same bits again."""
    out = tmp_path / "out"
    shutil.copytree(shared.out, out)
    shutil.rmtree(out / "checkpoints/step_000002")
    file = next((out / "checkpoints/step_000003").glob("rank_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with (out / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "rew')
    resumed = train_forked(2, *shared.overrides, "resume=auto", "train.keep_last=2", out=out)
    assert resumed.code == 0 and "has changed since it was written" in resumed.text, resumed.text
    assert "after step 1" in resumed.text and "ends in half a line" in resumed.text
    assert equal(shared.weights(3), resumed.weights(3))
    assert lasting(resumed.metrics) == lasting(shared.metrics)
    for path in shared.out.glob("rollouts/*.jsonl"):
        assert (out / "rollouts" / path.name).read_bytes() == path.read_bytes()
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {"step_000002", "step_000003", "step_000003.damaged"}


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved_by_hand(folder: Path, step: int) -> Path:
    """A checkpoint as CheckpointWriter leaves it, with one tensor."""
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True)
    save_file(
        {"weight@0,0": torch.ones(4, 4)}, path / "rank_00000_000.safetensors", {"shapes": '{"weight@0,0": [4, 4]}'}
    )
    write_synced(path / "state.json", json.dumps({"step": step}))
    files = {name: digest_file(path / name) for name in ("rank_00000_000.safetensors", "state.json")}
    write_synced(path / "manifest.json", json.dumps(files))
    return path


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda p: None, None),
        (lambda p: (p / "state.json").write_text('{"step": 3}'), "state.json has changed"),
        (lambda p: (p / "rank_00000_000.safetensors").write_bytes(b"short"), "safetensors has changed"),
        (lambda p: (p / "rank_00000_000.safetensors").unlink(), "No such file"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json: Expecting property name"),
        (lambda p: (p / "manifest.json").write_text("{}"), "names no files"),
        (lambda p: (p / "manifest.json").write_text('{"state.json": 3}'), "state.json has changed"),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(alone, tmp_path, harm, message):
    saved_by_hand(tmp_path, 1)
    newest = saved_by_hand(tmp_path, 2)
    (tmp_path / "step_000003.tmp").mkdir()  # the rest of a save that was killed
    harm(newest)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_000002", "step_000001"]
    found = checkpoint.find_damage(newest)
    assert found is None if message is None else message in found
    assert checkpoint.find_valid_checkpoint(tmp_path).name == ("step_000002" if message is None else "step_000001")
    assert (tmp_path / "step_000002.damaged").exists() == (message is not None)
    (tmp_path / "step_000001/state.json").unlink()
    if message is not None:
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
            checkpoint.find_valid_checkpoint(tmp_path)
        assert (tmp_path / "step_000001").exists()


def test_what_a_resumed_run_must_share(alone, tmp_path, capsys):
    path, now = saved_by_hand(tmp_path, 3), {"data": {"train": "a.jsonl"}, "train": {"steps": 9, "lr": 2.0}}
    state = {"step": 3, "data": "abc", "config": {**now, "train": {"steps": 9, "lr": 1.0}}}
    (path / "state.json").write_text(json.dumps(state))
    assert checkpoint.check_resumed(path, now, "abc") == 3
    assert "changed: train.lr: 1.0 → 2.0" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data.train=a.jsonl: not the prompts that"):
        checkpoint.check_resumed(path, now, "another")
    with pytest.raises(UserError, match=r"train.steps=2, but .* is already after step 3"):
        checkpoint.check_resumed(path, {**now, "train": {"steps": 2, "lr": 2.0}}, "abc")


def test_a_resumed_run_drops_what_is_written_of_later_steps_and_nothing_else(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    written = [f"{kind}_{step:06d}.jsonl" for kind in ("step", "eval") for step in (2, 3)]
    for name in (*written, "step_000001.jsonl.tmp", "my_notes.txt"):  # one was being written at the kill
        (tmp_path / "rollouts" / name).touch()
    open_output_dir(tmp_path, "seed: 0\n", "auto", 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["eval_000002.jsonl", "my_notes.txt", "step_000002.jsonl"]


def test_a_checkpoint_gets_its_name_after_the_samples_before_it(alone, slow_disk, tmp_path):
    writer, file = CheckpointWriter(tmp_path / "checkpoints", keep_last=0, keep_every=0), tmp_path / "step_000002.jsonl"
    state = {"step": 2, "of a fork": np.array([0.1, 2.0], np.float32)}
    writer.start(2, state, {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4))})
    writer.rollouts.write(file, [])
    naming = threading.Thread(target=writer.finish)
    naming.start()
    naming.join(0.3)
    named = writer.folder / "step_000002"
    assert naming.is_alive() and not file.exists() and not named.exists()
    slow_disk.set()
    naming.join()
    assert file.exists() and named.exists()
    assert json.loads((named / "state.json").read_text()) == {"step": 2, "of a fork": [float(np.float32(0.1)), 2.0]}


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_one(alone, tmp_path, monkeypatch):
    """Found by tests/faults/test_kills.py: a checkpoint under its own name without its manifest."""

    def killed_midway(path, **_):
        for file in path.glob("manifest.json"):
            file.unlink()
            raise KeyboardInterrupt

    writer = CheckpointWriter(tmp_path, keep_last=1, keep_every=0)
    sharded = {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4))}
    saved_by_hand(tmp_path, 1)
    writer.start(2, {"step": 2}, sharded)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.shutil, "rmtree", killed_midway)
        writer.finish()
    assert [(path.name, checkpoint.find_damage(path)) for path in checkpoint.list_checkpoints(tmp_path)] == [
        ("step_000002", None)
    ]
    writer.start(3, {"step": 3}, sharded)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_000003"]


@pytest.mark.parametrize(
    "shards, message",
    [
        ({"weight@0,0": [2, 4], "weight@2,0": [2, 4]}, None),
        ({"weight@0,0": [2, 4]}, "weight has 8 of 16 elements"),
        ({"weight@0,0": [4, 4], "weight@2,0": [2, 4]}, "weight has 24 of 16 elements"),
        ({"bias@0,0": [4, 4]}, r"weight is missing, this model wants \(4, 4\); it was saved from another model"),
        ({"weight@0,0": [4, 5]}, r"weight is \(4, 5\), this model wants \(4, 4\)"),
    ],
)
def test_a_checkpoint_without_each_number_once_is_refused(alone, tmp_path, shards, message):
    whole = {name: shape if shape == [4, 5] else [4, 4] for name, shape in shards.items()}
    values = {name: torch.ones(shape) for name, shape in shards.items()}
    save_file(values, tmp_path / "rank_00000_000.safetensors", {"shapes": json.dumps(whole)})
    sharded = {"w": ShardedTensor.from_rank_offsets("weight", torch.zeros(4, 4))}
    if message is None:
        assert torch.equal(read_sharded(tmp_path, sharded)["w"], torch.ones(4, 4))
    else:
        with pytest.raises(CheckpointError, match=message):
            read_sharded(tmp_path, sharded)


def test_what_nobody_reads_is_an_error(alone, tmp_path):
    names = ["param.a@0", "param.b@0", "past_1.a@0", "critic.param.a@0"]
    values = {name: torch.ones(4) for name in names}
    save_file(values, tmp_path / "rank_00000_000.safetensors", {"shapes": json.dumps({name: [4] for name in names})})

    def read(*keys: str, **others) -> None:
        read_sharded(tmp_path, {k: ShardedTensor.from_rank_offsets(k, torch.zeros(4)) for k in keys}, **others)

    read("param.a", "param.b"), read("critic.param.a")
    read("param.a", "param.b", "past_1.a", others=["critic"])
    with pytest.raises(CheckpointError, match=r"nobody reads param\.b; it was saved from another model"):
        read("param.a")
    with pytest.raises(CheckpointError, match=r"nobody reads critic\.param\.a and 1 more"):
        read("param.a", "param.b", others=[])


def test_a_save_without_each_number_once_is_no_checkpoint(alone, tmp_path):
    check_coverage([[("w@0,0", 8, 16)], [("w@2,0", 8, 16), ("b@0", 4, 4)], []])
    with pytest.raises(CheckpointError, match="w@0,0 is saved twice"):
        check_coverage([[("w@0,0", 8, 16)], [("w@0,0", 8, 16)]])
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_every=0)
    writer.start(1, {}, {"half": ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), (0, 1, 2))})
    with pytest.raises(CheckpointError, match=r"w has 16 of 32 elements; earlier checkpoints are unchanged"):
        writer.finish()
    assert not list(tmp_path.glob("step_*"))


def test_a_checkpoint_that_cannot_be_written_is_told(alone, tmp_path, monkeypatch):
    sharded = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 4))}
    writer = CheckpointWriter(tmp_path / "file/checkpoints", keep_last=1, keep_every=0)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"step 1 could not be written to .*Not a directory.* \(rank 0\)"):
        writer.start(1, {}, sharded)

    def full(path):
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path / "checkpoints", keep_last=1, keep_every=0)
    monkeypatch.setattr(shards, "sync", full)  # on the thread
    writer.start(1, {}, sharded)
    with pytest.raises(CheckpointError, match=r"OSError: .*No space left on device \(rank 0\); .* Make room"):
        writer.finish()
    assert not list((tmp_path / "checkpoints").iterdir()) and writer.finish() is None
