"""Checkpoints: the same state on every layout, an exact resume, damage that is found, updates that are skipped."""

import json
import shutil
import time

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file, save_file

from config import UserError
from grpo.parts.base import rollout_files, versions
from grpo.parts.model import checkpoint
from grpo.parts.model.checkpoint import CheckpointWriter, find_damage, list_checkpoints
from grpo.parts.model.shards import CheckpointError, check_coverage, read_sharded
from grpo.run import evaluation
from grpo.run.inputs import check_base
from tests.compare_runs import lasting
from tests.conftest import check_state, refused, tiny_config, tiny_model, wrap
from tests.layout_worker import equal

DENSE = {
    "tp2": {"tp": 2}, "vpp": {"tp": 2, "pp": 2, "vpp": 2}, "cp2": {"cp": 2},
    "layout": {"pp": 2, "vpp": 2, "megatron": {"pipeline_model_parallel_layout": "E|tt|t|tL"}},
}  # fmt: skip
EXPERTS = {
    "dp4": {}, "pp2ep2": {"pp": 2, "ep": 2}, "etp2": {"tp": 2, "ep": 2, "etp": 2}, "ep4": {"ep": 4},
}  # fmt: skip


@pytest.mark.parametrize("adapters", [0, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arch, dtype, layouts",
    [("qwen2", "fp32", DENSE), pytest.param("qwen2_moe", "bf16", EXPERTS, marks=pytest.mark.slow)],
)
def test_state_is_the_same_on_every_layout(fork_server, tmp_path, arch, dtype, layouts, adapters):
    """Of the whole model, and of adapters of a rank."""
    tiny_model(tmp_path / "model", arch, layers=4, hidden=128)
    check_state(fork_server, tmp_path, dtype, layouts, 4, adapters)


def test_adapters_where_the_first_stage_has_no_layer(fork_server, tmp_path):
    tiny_model(tmp_path / "model")
    empty = {"pp": 2, "megatron": {"pipeline_model_parallel_layout": "E|ttL"}}
    check_state(fork_server, tmp_path, "fp32", {"empty": empty, "even": {"pp": 2}}, 2, adapters=8)


def test_resume_is_exact(shared, train_forked, tmp_path):
    """The shared run goes on from its own first step, since the newest checkpoint is damaged: the same bits again."""
    out = tmp_path / "out"
    shutil.copytree(shared.out, out)

    # One bit of the newest checkpoint is turned, and there are traces of a fourth step.
    shutil.rmtree(out / "checkpoints/step_000002")
    file = next((out / "checkpoints/step_000003").glob("rank_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with (out / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "rew')
    for name in ("step_000004.jsonl", "eval_000004.jsonl", "step_000002.jsonl.tmp", "my_notes.txt"):
        (out / "rollouts" / name).touch()

    resumed = train_forked(2, *shared.overrides, "resume=auto", "train.keep_last=2", out=out)
    assert resumed.code == 0 and "has changed since it was written" in resumed.text, resumed.text
    assert "after step 1" in resumed.text and "ends in half a line" in resumed.text

    assert equal(shared.weights(3), resumed.weights(3))
    assert lasting(resumed.metrics) == lasting(shared.metrics)
    for path in shared.out.glob("rollouts/*"):
        assert (out / "rollouts" / path.name).read_bytes() == path.read_bytes()

    left = {path.name for path in (out / "rollouts").iterdir()} - {path.name for path in shared.out.glob("rollouts/*")}
    assert left == {"my_notes.txt"}
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {"step_000002", "step_000003", "step_000003.damaged"}


@pytest.mark.slow
def test_a_resume_while_the_loss_scale_is_searched_is_exact(train_forked, tmp_path):
    """fp16 on experts, two ranks: five updates overflow; the run goes on from the checkpoint after the second."""
    tiny_model(tmp_path / "model", "qwen3_moe", tied=False)
    keys = (
        f"model.path={tmp_path / 'model'}", "model.dtype=fp16", "parallel.ep=2", "megatron.initial_loss_scale=16384",
        "train.steps=9", "train.save_every=1", "train.keep_last=0", "rollout.prompts_per_step=4", "train.max_skipped=1",
    )  # fmt: skip
    whole = train_forked(2, *keys, out=tmp_path / "whole", code=0)
    scales = [m["loss_scale"] for m in whole.metrics]
    overflows = sum(m["update/overflow"] for m in whole.metrics)
    assert 3 <= overflows < 9 and scales[: overflows + 1] == [2.0 ** (14 - n) for n in range(overflows + 1)]
    shutil.copytree(whole.out, tmp_path / "resumed")
    for step in range(3, 10):
        shutil.rmtree(tmp_path / f"resumed/checkpoints/step_{step:06d}")
    resumed = train_forked(2, *keys, "resume=auto", out=tmp_path / "resumed")
    assert resumed.code == 0 and resumed.result(9) == whole.result(9), resumed.text


def sharded(*tensors):
    """Tensors of a model on one rank, all 0."""
    return {name: ShardedTensor.from_rank_offsets(name, torch.zeros(4, 4)) for name in tensors}


def saved(folder, step, *tensors, **state):
    """A checkpoint with these tensors."""
    writer = CheckpointWriter(folder, keep_last=0, keep_every=0)
    writer.start(step, {"step": step, **state}, sharded(*tensors))
    return writer.finish()


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda p: None, None),
        (lambda p: (p / "state.json").write_text('{"step": 3}'), "state.json has changed"),
        (lambda p: (p / "rank_00000_000.safetensors").unlink(), "No such file"),
        (lambda p: (p / "manifest.json").write_text("{}"), "does not list rank_00000_000.safetensors, state.json, ver"),
        (lambda p: shutil.copy(p / "rank_00000_000.safetensors", p / "rank_00001_000.safetensors"), "list rank_00001"),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(world, tmp_path, harm, message):
    saved(tmp_path, 1, "weight")
    newest = saved(tmp_path, 2, "weight")
    (tmp_path / "step_000003.tmp").mkdir()  # the rest of a save that was killed
    harm(newest)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000001"]
    found = find_damage(newest)
    assert found is None if message is None else message in found
    assert checkpoint.find_valid_checkpoint(tmp_path).name == ("step_000002" if message is None else "step_000001")
    assert (tmp_path / "step_000002.damaged").exists() == (message is not None)
    (tmp_path / "step_000001/state.json").unlink()
    if message is not None:
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
            checkpoint.find_valid_checkpoint(tmp_path)
        assert (tmp_path / "step_000001").exists()


def test_an_abandoned_checkpoint_is_resumed_from(world, tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, "weight")
    first = checkpoint.find_checkpoint(str(tmp_path / "step_000001"), tmp_path)
    assert first.name == "step_000001" and list_checkpoints(tmp_path) == [first]
    second = checkpoint.find_checkpoint(str(tmp_path / "step_000002.abandoned"), tmp_path)
    assert second.name == "step_000002.abandoned" and list_checkpoints(tmp_path) == [first]


def test_what_a_resumed_run_must_share(world, tmp_path, capsys):
    now = {"data": {"train": "a.jsonl"}, "train": {"steps": 9, "lr": 2.0}}
    data = {"rows": "abc", "columns besides the prompt": "1", "token ids": "2"}
    path = saved(tmp_path, 3, "weight", data=data, config={**now, "train": {"steps": 9, "lr": 1.0}})
    (path / "versions.json").write_text(json.dumps({**versions.versions(), "torch": "2.12.0"}))
    assert checkpoint.check_resumed(path, now, data | {"columns besides the prompt": "3"}) == 3
    assert capsys.readouterr().out.splitlines()[1:] == [
        "         changed: data.train, columns besides the prompt",
        "         changed: train.lr: 1.0 → 2.0", f"         changed: torch: 2.12.0 → {versions.versions()['torch']}",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"data.train=a.jsonl: not the prompts that"):
        checkpoint.check_resumed(path, now, data | {"rows": "another"})
    with pytest.raises(UserError, match=r"train.steps=2, but .* is already after step 3"):
        checkpoint.check_resumed(path, {**now, "train": {"steps": 2, "lr": 2.0}}, data)


def test_weights_that_an_older_commit_stacked_over_the_layers(world, tmp_path):
    whole = torch.arange(12.0).view(2, 3, 2)
    parts = {"param.layers.fc.weight@0,0,0": whole[:1], "param.layers.fc.weight@1,0,0": whole[1:, :2]}
    parts["param.layers.fc.weight@1,2,0"] = whole[1:, 2:]
    parts = {name: part.contiguous() for name, part in parts.items()}
    shapes = json.dumps(dict.fromkeys(parts, whole.shape))
    save_file(parts, tmp_path / "rank_00000_000.safetensors", {"shapes": shapes})
    keys = ["param.layers.0.fc.weight", "param.layers.1.fc.weight"]
    wanted = {key: ShardedTensor.from_rank_offsets(key, torch.empty(3, 2)) for key in keys}
    assert torch.equal(torch.stack(list(read_sharded(tmp_path, wanted).values())), whole)


@pytest.mark.parametrize("was, warned", [("abc", 0), ("another formula", 1)])
def test_a_fingerprint_of_another_formula_is_not_other_data(world, tmp_path, capsys, was, warned):
    now = {"data": {"train": "a.jsonl"}, "train": {"steps": 9}}
    path = saved(tmp_path, 3, "weight", data=was, config=now)
    assert checkpoint.check_resumed(path, now, {"rows": "abc", "token ids": "2"}) == 3
    assert capsys.readouterr().out.count("warning: ") == warned


@pytest.mark.parametrize("key", ["lora.rank=4", "algo.kl_coef=0.1"])
def test_a_resume_needs_the_same_initial_weights_wherever_they_are(world, tiny, tmp_path, key):
    """Adapters are added to them, and the reference has them; the same tensors may be elsewhere, in other files."""
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "all.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, "all.safetensors")})
    )
    cfg = tiny_config(key, f"model.path={folder}")
    base = check_base(None, cfg, str(tiny / "model"))
    path = saved(tmp_path, 3, "weight", base=base, config=cfg.model_dump())
    assert check_base(path, cfg, str(folder)) == base
    save_file({name: weight * 1.01 for name, weight in weights.items()}, folder / "all.safetensors")
    with pytest.raises(UserError, match=r"model.path=.*: not the weights that .*step_000003 was trained on"):
        check_base(path, cfg, str(folder))


def test_without_a_folder_the_newest_checkpoint_is_exported_and_evaluated(world, tmp_path):
    cfg = tiny_config(f"output_dir={tmp_path}", "resume=auto")
    assert evaluation.chosen_checkpoint(cfg) is None
    with pytest.raises(UserError, match=r"output_dir=.*: no checkpoint in it to export"):
        evaluation.export_checkpoint(cfg, "")
    first, newest = (saved(tmp_path / "checkpoints", step, "weight") for step in (1, 2))
    for resume, found in (("none", newest), (first, first)):
        assert evaluation.chosen_checkpoint(tiny_config(f"output_dir={tmp_path}", f"resume={resume}")) == found


@pytest.mark.slow
def test_a_checkpoint_is_exported_on_another_layout(shared, train_forked, tmp_path):
    """The same bits as the run's own export of that step, without its data; nothing happens to later checkpoints."""
    later = shared.out / "checkpoints/step_000003"
    run = train_forked(
        2, "--export", *shared.overrides, f"resume={later.with_name('step_000002')}", "parallel.pp=2",
        "data.train=nowhere.jsonl", code=0,
    )  # fmt: skip
    assert equal(run.weights(2), shared.weights(2)) and later.exists()
    assert [path.name for path in run.out.iterdir()] == ["hf"]


def test_a_checkpoint_gets_its_name_after_the_samples_before_it(world, tmp_path, monkeypatch):
    writer, named = CheckpointWriter(tmp_path, keep_last=0, keep_every=0), []

    def write_slowly(write_at_once, *job):
        time.sleep(0.3)
        named.append((tmp_path / "step_000002").exists())
        write_at_once(*job)

    wrap(monkeypatch, rollout_files, "write_rows", write_slowly)
    writer.start(2, {"step": 2}, sharded("weight"))
    writer.rollouts.write({tmp_path / "samples.jsonl": []})
    state = json.loads((writer.finish() / "state.json").read_text())
    assert named == [False] and (tmp_path / "samples.jsonl").exists()
    assert state == {"step": 2}


@pytest.mark.parametrize(
    "shards, message",
    [
        ({"weight@0,0": [2, 4], "weight@2,0": [2, 4]}, None),
        ({"weight@0,0": [2, 4]}, "weight has 8 of 16 elements"),
        ({"bias@0,0": [4, 4]}, r"weight is missing, this model wants \(4, 4\); it was saved from another model"),
        ({"weight@0,0": [4, 5]}, r"weight is \(4, 5\), this model wants \(4, 4\)"),
    ],
)
def test_a_checkpoint_without_each_number_once_is_refused(world, tmp_path, shards, message):
    whole = {name: shape if shape == [4, 5] else [4, 4] for name, shape in shards.items()}
    values = {name: torch.ones(shape) for name, shape in shards.items()}
    save_file(values, tmp_path / "rank_00000_000.safetensors", {"shapes": json.dumps(whole)})
    with refused(CheckpointError, message):
        assert torch.equal(read_sharded(tmp_path, sharded("weight"))["weight"], torch.ones(4, 4))


def test_what_nobody_reads_is_an_error(world, tmp_path):
    path = saved(tmp_path, 1, "param.a", "param.b", "past_1.a", "critic.param.a")
    read_sharded(path, sharded("param.a", "param.b"))
    read_sharded(path, sharded("critic.param.a"))
    read_sharded(path, sharded("param.a", "param.b", "past_1.a"), others=["critic"])
    with pytest.raises(CheckpointError, match=r"nobody reads param\.b; it was saved from another model"):
        read_sharded(path, sharded("param.a"))
    with pytest.raises(CheckpointError, match=r"nobody reads critic\.param\.a; it was saved from another model"):
        read_sharded(path, sharded("param.a", "param.b"), others=[])


def test_a_save_without_each_number_once_is_no_checkpoint(world, tmp_path):
    check_coverage([[("w@0,0", 8, 16)], [("w@2,0", 8, 16), ("b@0", 4, 4)], []])
    with pytest.raises(CheckpointError, match="w@0,0 is saved twice"):
        check_coverage([[("w@0,0", 8, 16)]] * 2)
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_every=0)
    writer.start(1, {}, {"half": ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), (0, 1, 2))})
    with pytest.raises(CheckpointError, match=r"w has 16 of 32 elements\. Earlier checkpoints are unchanged"):
        writer.finish()
    assert not list(tmp_path.glob("step_*"))
