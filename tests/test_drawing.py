"""The pictures of a configuration: held against Megatron's own groups, real weights and the formula of the bubble."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import make_tiny
import pytest
import torch
import transformers

import megatron_bridge as bridge
from config import ParallelConfig
from support import drawing, hf_folder, launch
from support.packing import bubble
from support.read_config import load_config
from tests.conftest import REPO

mpu = bridge.mpu


def parallel(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (parallel(tp=2, pp=2), 8),
        (parallel(tp=2, cp=2, pp=2), 16),
        (parallel(tp=2, pp=2, ep=4), 16),
        (parallel(cp=2, ep=2, etp=2), 8),
    ],
)
def test_a_rank_is_where_megatron_puts_it(layout, ranks):
    """Megatron itself, asked as each rank in turn, in groups that send nothing."""
    found = drawing.places(layout, ranks, rollout_tp=2)
    for rank in range(ranks):
        with drawing.pretended_world(layout, ranks, rank):
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


@pytest.mark.parametrize("arch", make_tiny.ARCHITECTURES)
def test_sizes_from_config_json_are_those_of_the_weights(tmp_path, arch):
    tokenizer = make_tiny.char_tokenizer("0123456789")
    make_tiny.save_model(tmp_path, tokenizer, arch, tied=False, hidden=64, layers=2, kv_heads=1, ffn=3)
    files = hf_folder.safetensor_files(str(tmp_path))
    weights = {}
    for file in set(files.values()):
        with bridge.safe_open(file, framework="pt") as handle:
            weights |= {name: handle.get_tensor(name).numel() for name in handle.keys()}  # noqa: SIM118
    assert drawing.weight_sizes(transformers.AutoConfig.from_pretrained(tmp_path)) == weights


@pytest.mark.parametrize("arch", ["qwen2", "qwen2_moe"])
def test_a_stage_holds_what_a_built_model_holds(world, tmp_path, arch):
    layout = parallel()
    make_tiny.save_model(tmp_path, make_tiny.char_tokenizer("0123456789"), arch)
    bridge.init_model_parallel(layout, seed=0)
    model = bridge.build_model(str(tmp_path), layout, torch.float32, {})
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    config = bridge.transformer_config(hf, layout, torch.float32, {})
    (stage,) = drawing.stage_weights(hf, config, layout)
    built = {name: weight.numel() for name, weight in bridge.named_weights(model).items()}
    assert {name: shape.numel() for name, shape in stage.items()} == built


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
    assert launch.command([*start, str(file), "--dry-run", "--world-size", "2"], "", lambda cfg: None, None) == 0
    assert "2 ranks = tp 1" in " ".join(ElementTree.parse(file).getroot().itertext())
    assert launch.command([*start, str(tmp_path / "no/plan.svg"), "--dry-run"], "", lambda cfg: None, None) == 2
    with pytest.raises(SystemExit, match="2"):
        launch.command([*start, str(file)], "", lambda cfg: None, None)
    assert "--draw goes with --dry-run" in capfd.readouterr().err
