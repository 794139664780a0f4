"""Healthy runs of trained weights, two steps each: no check may stop one, or warn.

The model is SmolLM2 (build/smollm2/model, by `make llm`), whose weights have the outlier channels and the growing
residual norms of training. `--all-starts` runs all, else one of each dtype.
"""

import itertools

import pytest

from tests.conftest import REPO

SMOLLM2 = REPO / "build/smollm2/model"
COMMON = [
    f"model.path={SMOLLM2}", "data.train=build/smollm2/train.jsonl", "train.steps=2", "train.warmup_steps=0",
    "train.eval_every=0", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=16",
]  # fmt: skip
WAYS = {
    "dp2 plain": [],
    "pp2 plain": ["parallel.pp=2"],
    "dp2 kl, two updates": ["algo.kl_coef=0.05", "train.updates_per_step=2"],
    "dp2 lora": ["lora.rank=8", "train.lr=1e-4"],
}
STARTS = {  # each on two ranks
    f"{dtype} T{T} {way}": [f"model.dtype={dtype}", f"rollout.temperature={T}", *WAYS[way]]
    for dtype, T, way in itertools.product(("bf16", "fp32", "fp16"), (0.7, 1.0, 1.3), WAYS)
}
EVERY = 13


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs build/smollm2/model, by `make llm`")
def test_a_run_of_trained_weights_trains_two_steps(train_forked, start):
    run = train_forked(2, *COMMON, *STARTS[start], config="smollm2", seconds=900)
    assert run.code == 0 and "warning: step" not in run.text, run.text
    assert len(run.metrics) == 2
