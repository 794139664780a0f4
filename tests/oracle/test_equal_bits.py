"""With model.match_engine, whose forward pass is in vLLM's arithmetic, gradients equal those of plain transformers in
float64 on layouts of each axis; and in real runs no log-prob has other bits than vLLM's.
"""

import pytest

from tests.oracle import layouts
from tests.oracle.layouts import check_update

pytestmark = pytest.mark.usefixtures("equal_bits_here")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
QUICK = {"qwen2": ("TP2·CP2", "TP2·PP2·VPP2, overlap, full recompute"), "qwen3_moe": ("EP2·TP2·ETP2·DP2",)}
CASES = [
    pytest.param(family, layout, marks=() if layout in QUICK.get(family, ()) else pytest.mark.slow)
    for family in FAMILIES
    for layout in layouts.layouts_of(family)
    if layout in (*layouts.EACH_AXIS, *QUICK.get(family, ()))
]


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory) -> layouts.Results:
    return layouts.run_cases(request, fork_server, tmp_path_factory, "model.match_engine=true")


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_update_equals_plain_transformers(results, family, layout):
    found, wanted, _ = results[family]
    check_update(found[layout], wanted)


HALF = "model.dtype=bf16"
TP = ("parallel.tp=2", "rollout.tp=2")
RUNS = {
    "tensor parallelism, adapters, a cut, two updates": (
        2, "qwen2", (HALF, *TP, "lora.rank=4", "rollout.top_p=0.9", "train.updates_per_step=2"),
    ),
    "experts on two ranks": (2, "mixtral", (HALF, "parallel.ep=2")),
}  # fmt: skip
SLOW = {
    "interleaved stages, recomputed": (4, "qwen2", (HALF, *TP, "parallel.pp=2", "parallel.vpp=2", *layouts.FULL)),
    "four tensor-parallel ranks": (4, "qwen3", (HALF, "parallel.tp=4", "rollout.tp=4")),
    "without sequence parallelism": (2, "qwen2", (HALF, *TP, "parallel.sp=false", "model.fp32_head=true")),
    "a window, stripes": (2, "mistral", (HALF, "parallel.cp=2", "rollout.max_new_tokens=40")),
    "fp16": (2, "llama", ("model.dtype=fp16", "train.share_prompts=false")),
    "experts in parts, adapters": (4, "qwen3_moe", (HALF, *TP, "parallel.ep=2", "parallel.etp=2", "lora.rank=4")),
    "experts, routes, stages": (4, "mixtral", (HALF, "parallel.pp=2", "parallel.ep=2", "algo.replay_routes=true")),
}
SMALL = ("train.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=24")


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_no_log_prob_of_a_run_has_other_bits_than_vllms(train_forked, tmp_path, name):
    ranks, family, options = (RUNS | SLOW)[name]
    layouts.make_model(tmp_path / "model", family)
    keys = (*SMALL, f"model.path={tmp_path / 'model'}", "model.match_engine=true", *options)
    run = train_forked(ranks, *keys, code=0)
    assert [m["logp_gap/max"] for m in run.metrics] == [0.0] * 3
