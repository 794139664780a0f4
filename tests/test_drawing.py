"""The pictures of a configuration: held against Megatron's own groups, real weights and the formula of the bubble."""

import ast
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import make_tiny
import pytest
import torch

import megatron_bridge as bridge
from config import ParallelConfig
from support.base import hf_folder, ranks
from support.base.read_config import load_config
from support.check import memory_count
from support.run import launch
from support.step.packing import bubble
from tests.conftest import REPO
from tools import drawing

mpu = bridge.mpu


def parallel(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (parallel(tp=2, pp=2), 8),
        (parallel(tp=2, cp=2, pp=2), 16),
        (parallel(tp=2, pp=2, ep=4), 16),
        (parallel(cp=2, ep=2, etp=2), 8),
    ],
)
def test_a_rank_is_where_megatron_puts_it(layout, world_size):
    """Megatron itself, asked as each rank in turn, in a fake process group."""
    found = drawing.rank_coordinates(layout, world_size, rollout_tp=2)
    for rank in range(world_size):
        with memory_count.fake_process_groups(layout, world_size, rank):
            assert found[rank] == {
                "tp": mpu.get_tensor_model_parallel_rank(), "cp": mpu.get_context_parallel_rank(),
                "dp": mpu.get_data_parallel_rank(), "pp": mpu.get_pipeline_model_parallel_rank(),
                "etp": mpu.get_expert_tensor_parallel_rank(), "ep": mpu.get_expert_model_parallel_rank(),
                "edp": mpu.get_expert_data_parallel_rank(), "engine": rank // 2, "rollout_tp": rank % 2,
            }  # fmt: skip


def test_a_schedule_by_hand():
    """Two stages, three micro-batches: the first runs one ahead of the second, then both alternate."""
    assert drawing.schedule(2, 1, 3, stage=0) == [
        ("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("F", 2, 0), ("B", 1, 0), ("B", 2, 0),
    ]  # fmt: skip
    first, second = drawing.timeline(2, 1, 1)
    assert first == [(0, 1, "F", 0, 0), (4, 6, "B", 0, 0)] and second == [(1, 2, "F", 0, 0), (2, 4, "B", 0, 0)]


@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 1, 1), (2, 1, 7), (4, 1, 8), (2, 2, 2), (3, 2, 6), (4, 2, 16), (4, 3, 8)]
)
def test_every_stage_of_a_timeline_idles_as_long_as_the_formula_says(p, v, m):
    rows = drawing.timeline(p, v, m)
    end = max(stop for row in rows for _, stop, *_ in row)
    for row in rows:
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(row))  # one thing at a time
        assert sorted(work[2:] for work in row) == sorted((k, i, c) for k in "FB" for i in range(m) for c in range(v))
        assert 1 - sum(stop - begin for begin, stop, *_ in row) / end == pytest.approx(bubble(m, parallel(pp=p, vpp=v)))


@pytest.mark.parametrize("arch", ["qwen2", "qwen2_moe"])
def test_a_stage_has_the_shapes_of_a_real_model(world, tmp_path, arch):
    """Those of the fake process group are those of a model that is built with its weights."""
    make_tiny.save_model(tmp_path, make_tiny.char_tokenizer("0123456789"), arch)
    cfg = load_config(str(REPO / "configs/tiny.yaml"), [f"model.path={tmp_path}", "data.train=unused"])
    bridge.init_model_parallel(cfg.parallel, seed=0)
    model = bridge.build_model(str(tmp_path), cfg.parallel, torch.float32, {})
    built = {name: weight.shape for name, weight in bridge.named_weights(model).items()}
    bridge.mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    try:
        assert drawing.stage_shapes(cfg, 1) == [built]
    finally:
        ranks.init_distributed(timeout_s=60)  # for the fixture, which ends it


def test_the_pictures_say_what_the_configuration_means(tiny):
    def words_of(*layout: str) -> dict[str, str]:
        cfg = load_config(str(REPO / "configs/tiny.yaml"), [f"model.path={tiny / 'model'}", "parallel.pp=2", *layout])
        found = drawing.pictures(cfg, 8)
        return {name: " ".join(ElementTree.fromstring(picture).itertext()) for name, picture in found.items()}

    words = words_of("parallel.tp=2", "rollout.tp=2")
    assert "8 ranks = tp 2 × cp 1 × pp 2 × dp 2; 4 vLLM engines" in words["layout"]
    assert (
        "stage 1, norm, head layer 1" in " ".join(words["layout"].split())
        and "rank 6: engine 3, rollout_tp 0" in words["layout"]
    )
    assert "2 micro-batches" in words["pipeline"] and "idle 33%" in words["pipeline"]
    size = hf_folder.count_weights(str(tiny / "model")) * 4
    assert f"A push: {drawing.size_of(size)} in 2 buckets" in words_of()["push"]  # two stages: never in one


def test_a_dry_run_draws(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    data = [f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", "reward.default=exact"]
    start = ["--config", str(REPO / "configs/tiny.yaml"), *data, "--draw"]
    file = tmp_path / "plan.svg"
    nothing = ("", lambda cfg: None, None, None, None)
    assert launch.command([*start, str(file), "--dry-run", "--world-size", "2"], *nothing) == 0
    assert "2 ranks = tp 1" in " ".join(ElementTree.parse(file).getroot().itertext())
    assert launch.command([*start, str(tmp_path / "no/plan.svg"), "--dry-run"], *nothing) == 2
    with pytest.raises(SystemExit, match="2"):
        launch.command([*start, str(file)], *nothing)
    assert "--draw goes with --dry-run" in capfd.readouterr().err
    loaded = [
        node for node in ast.parse((REPO / "support/run/launch.py").read_text()).body if "drawing" in ast.dump(node)
    ]
    assert [type(node) for node in loaded] == [ast.FunctionDef], "a start without --draw must not load the drawing"
