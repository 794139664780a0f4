"""What configs/qwen3_30b_a3b.yaml combines, on a small Qwen3-MoE and two ranks with expert parallelism.

The options are read from the file, so one that is added there is tested here: Adam on the host with precision-aware
state, full recompute, replayed routes, fp32 routers and head, IcePop, one update a step.
"""

import pytest
from safetensors.torch import load_file, save_file

from support.base.read_config import load_config
from tests.conftest import REPO
from tests.oracle.plain import TEMPERATURE, worst_gradient
from tests.test_checkpoint import equal, lasting
from tests.test_layouts import run_worker
from tests.test_routes import forced_reference, make_moe, routed_plan, routed_samples

RECIPE = load_config(str(REPO / "configs/qwen3_30b_a3b.yaml"), [])
MEGATRON = {f"megatron.{name}": value for name, value in RECIPE.megatron.items()}
HOST = {name: value for name, value in MEGATRON.items() if "optimizer" in name}  # of bf16 models alone
LOSS = {f"algo.{name}": getattr(RECIPE.algo, name) for name in ("correction", "correction_level", "replay_routes")}
BF16 = {"model.dtype": "bf16", "model.fp32_head": RECIPE.model.fp32_head}


def overrides(*chosen: dict) -> list[str]:
    """The overrides of some options, with experts on two ranks."""
    keys = {key: value for options in chosen for key, value in options.items()}
    return ["parallel.ep=2", *(f"{key}={str(value).lower()}" for key, value in keys.items())]


FP32 = overrides({name: value for name, value in MEGATRON.items() if name not in HOST}, LOSS)
ALL = overrides(MEGATRON, LOSS, BF16)
UNCLIPPED = "algo.loss=reinforce"


def test_the_recipe_has_what_is_tested_here():
    """An option that goes from the file must not go from the tests unseen."""
    names = ("moe_router_dtype", "optimizer_cpu_offload", "use_precision_aware_optimizer", "recompute_granularity")
    assert MEGATRON.keys() >= {f"megatron.{name}" for name in names}
    assert LOSS["algo.correction"] == "icepop" and LOSS["algo.replay_routes"] and RECIPE.model.fp32_head
    assert len(FP32) == len(ALL) - len(HOST) - len(BF16) and RECIPE.parallel.ep == 8
    assert RECIPE.train.updates_per_step == RECIPE.train.epochs_per_step == 1


@pytest.mark.slow
def test_gradients_equal_plain_transformers(fork_server, tmp_path):
    """fp32 to 1e-5; bf16 with all options as near as bf16 is without recompute and host Adam.

    In bf16 the loss has no clip: a ratio that rounding takes over the bound would count a token more or less.
    """
    plain = overrides(LOSS, BF16, {"megatron.moe_router_dtype": "fp32"})
    cases = {"fp32": {"all": FP32}, "bf16": {"all": [*ALL, UNCLIPPED], "plain": [*plain, UNCLIPPED]}}
    plans = []
    for dtype, layouts in cases.items():
        (tmp_path / dtype).mkdir()
        plans.append(routed_plan(tmp_path / dtype, layouts=layouts))
    weights = load_file(tmp_path / "bf16/model/model.safetensors")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(rounded, tmp_path / "bf16/model/model.safetensors", metadata={"format": "pt"})
    exact, half = run_worker(fork_server, tmp_path, 2, *plans)

    wanted = forced_reference(tmp_path / "fp32/model", routed_samples(), exact["all"], correction="icepop")
    assert exact["all"]["same"] == 1 and (exact["all"]["logp"] - wanted["logp"]).abs().max() < 1e-5
    assert exact["all"]["loss"].item() == pytest.approx(wanted["loss"], rel=1e-5)
    error, name = worst_gradient(exact["all"], wanted)
    print(f"fp32: largest relative error {error:.1e} ({name})")
    assert error < 1e-5, name

    errors = {}
    for layout, found in half.items():
        options = {"loss": "reinforce", "correction": "icepop"}
        wanted = forced_reference(tmp_path / "bf16/model", routed_samples(), found, **options)
        assert found["same"] == 1
        errors[layout], name = worst_gradient(found, wanted)
        print(f"bf16, {layout}: largest relative error {errors[layout]:.1e} ({name})")
    assert errors["all"] < 0.15 and errors["all"] < 1.5 * errors["plain"]  # 0.07 with and without the options


SMALL = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", f"rollout.temperature={TEMPERATURE}", "train.warmup_steps=0",
    f"train.adam_beta2={RECIPE.train.adam_beta2}", f"train.weight_decay={RECIPE.train.weight_decay}",
    f"algo.advantage={RECIPE.algo.advantage}", "algo.overlong_buffer=2",
)  # fmt: skip


@pytest.mark.slow
def test_trainer_and_vllm_agree_in_fp32(train_forked, tmp_path):
    """All routes are equal, nothing is left out, and every push arrives; the weights move from step to step."""
    run = train_forked(2, *SMALL, make_moe(tmp_path / "model"), *FP32, "train.steps=4", "train.save_every=0")
    assert run.code == 0, run.text
    for line in run.metrics:
        assert line["routes/differ_frac"] == line["routes/missing_frac"] == line["mismatch/cut_frac"] == 0
        assert abs(line["mismatch/k3"]) <= 1e-6 and line["sync/checked"] == 1 and line["grad_norm"] > 0


@pytest.mark.slow
def test_a_run_with_all_options_resumes_bit_for_bit(train_forked, tmp_path):
    chosen = (*SMALL, make_moe(tmp_path / "model"), *ALL, "rollout.max_logp_gap=inf", "train.save_every=1")
    straight = train_forked(2, *chosen, "train.steps=4", out=tmp_path / "straight")
    half = train_forked(2, *chosen, "train.steps=2")
    resumed = train_forked(2, *chosen, "train.steps=4", "resume=auto")
    assert straight.code == half.code == resumed.code == 0, straight.text + half.text + resumed.text
    assert "after step 2" in resumed.text
    assert lasting(resumed.metrics) == lasting(straight.metrics)
    assert equal(resumed.weights(4), straight.weights(4)) and not equal(straight.weights(4), half.weights(2))
    for line in straight.metrics:
        assert line["sync/checked"] == 1 and line["routes/missing_frac"] == 0 and line["update/skipped"] == 0
