"""Layouts of recipes at their own number of ranks, 8 to 64, each against plain transformers in float64.

`make test-all` runs one in EVERY, `pytest --all-starts tests/oracle/test_large_layouts.py` all. The models have the
recipe's family and as many layers, heads and experts as its layout needs. docs/dev/layouts.md has errors and sources.
"""

import json
import re

import pytest

from tests.conftest import check_state
from tests.oracle.layouts import check_update, make_model, make_plan, make_samples, run_worker
from tests.oracle.plain import reference

EVERY = 9
WIDE = {"hidden": 256, "kv_heads": 8}  # 8 heads
EXPERTS = {"num_experts": 8, "kv_heads": 4}
BOTH = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# "ranks: sizes" → (family, entries of its config.json, options of Megatron-core).
STARTS = {
    "8: tp2 pp2": ("qwen2", {}, ()),  # configs/qwen7b.yaml and qwen2.5_7b_tools.yaml; verl, Qwen3-8B
    "8: tp4": ("qwen2", {}, ()),  # configs/qwen2.5_14b.yaml
    "8: tp4 pp2": ("qwen2", {}, ()),
    "8: ep8": ("qwen3_moe", EXPERTS, ()),  # configs/qwen3_30b_a3b.yaml; verl, Qwen3-30B-A3B
    "8: tp4 ep8": ("qwen3_moe", EXPERTS, ()),  # slime, Qwen3-30B-A3B
    "8: tp4 pp2 vpp2 ep2": ("qwen3_moe", EXPERTS, ()),  # verl, Qwen3-30B-A3B
    "8: tp2 pp2 cp2 ep4": ("qwen3_moe", EXPERTS, ()),  # verl, Qwen3-30B-A3B with LoRA
    "16: tp4 pp4": ("qwen2", {}, ()),
    "16: tp8": ("qwen2", WIDE, ()),  # configs/qwen2.5_32b.yaml
    "32: tp2 pp2 vpp8 ep4": ("qwen3_moe", {**EXPERTS, "layers": 16}, ()),  # ROLL, Qwen3-30B-A3B
    "32: pp2 vpp8 cp4 ep4": ("qwen3_moe", {**EXPERTS, "layers": 16}, ()),  # ROLL, Qwen3-30B-A3B
    "64: tp4 pp2": ("qwen2", {}, ()),
    "64: tp8 pp2": ("qwen2", WIDE, ()),  # configs/qwen2.5_72b.yaml
    "64: tp8 pp8": ("qwen2", {**WIDE, "layers": 8}, ()),
    "64: tp2 ep8": ("qwen3_moe", EXPERTS, ()),  # NeMo-RL, Qwen3-30B-A3B
    "64: tp4 pp2 ep32": ("qwen3_moe", {**EXPERTS, "num_experts": 32}, ()),  # configs/qwen3_235b_a22b.yaml
    "64: tp4 pp8 ep8": ("qwen3_moe", {**EXPERTS, "layers": 14}, BOTH),  # the same with 94 layers in 8 stages
}


@pytest.mark.slow
def test_a_layout_at_its_own_size(fork_server, tmp_path, start, record_property):
    """An update, the digests of a push, a checkpoint that another layout reads."""
    family, options, fields = STARTS[start]
    nproc, sizes = int(start.partition(":")[0]), {key: int(size) for key, size in re.findall(r"([a-z]+)(\d+)", start)}
    keys = [f"parallel.{key}={size}" for key, size in sizes.items()] + [f"megatron.{field}=true" for field in fields]
    plan = make_plan(tmp_path, family, layouts={"large": keys})
    make_model(tmp_path / "model", family, **options)
    samples = make_samples() * (1 + nproc // 32)  # so that every replica has some
    samples = [sample | {"group": n // 4} for n, sample in enumerate(samples)]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    ((found,),) = (each.values() for each in run_worker(fork_server, tmp_path, nproc, plan))
    error = check_update(found, reference(tmp_path / "model", samples, found))
    record_property("gradient, relative error", f"{error:.0e}")
    layouts = {"large": sizes | {"megatron": dict.fromkeys(fields, True)}, "other": {"tp": 2, "pp": 2}}
    check_state(fork_server, tmp_path, "fp32", layouts, nproc)
