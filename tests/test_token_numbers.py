"""What log.tokens writes of each response token: the trainer's log-prob before a step's updates, and the ratio after
them; the same numbers from plain transformers, and a training that does not notice."""

import dataclasses
import gzip
import json

import pytest
import torch
import transformers

from config import Config
from support.base.read_config import override
from support.base.rollout_files import as_row
from support.step import metrics
from tests.oracle.plain import response_logps
from tests.test_exact import policies
from tools.report import Run
from train_grpo import Sample, flatten

CFG = Config(model={"path": "m"}, data={"train": "d"})


def test_numbers_of_tokens_by_hand():
    """Two answers of 2 and 1 tokens; the last became twice as likely, the others stayed."""
    samples = [Sample(0, [1, 2], [3, 4], [-1.0, -1.0], True, "", ""), Sample(0, [1], [5], [-2.0], True, "", "")]
    before_F = torch.tensor([0.0, -0.5, -0.25, -2.0])
    after_F = before_F + torch.tensor([1.0, 1.0, 1.0, 2.0]).log()
    metrics.note_tokens(samples, flatten(samples), before_F, after_F)
    rows = [as_row(sample) for sample in samples]
    assert [row["trainer_logp"].tolist() for row in rows] == [[-0.5, -0.25], [-2.0]]
    assert [row["ratio"].tolist() for row in rows] == [[1.0, 1.0], [2.0]]
    assert not {"tokens", "routes"} & rows[0].keys()


def test_a_pass_is_made_only_where_the_step_has_none():
    batch = flatten([Sample(0, [1], [2], [-1.0], True, "", "")])
    old = dataclasses.replace(batch, old_logp=torch.tensor([-3.0]))

    assert metrics.trainer_logp(batch, CFG, lambda: torch.tensor([-4.0])).item() == -4.0
    assert metrics.trainer_logp(old, CFG, lambda: torch.tensor([-4.0])).item() == -3.0
    by_vllm = override(CFG, {"log.tokens": True, "algo.old_logp": "rollout"})
    assert metrics.trainer_logp(old, by_vllm, lambda: torch.tensor([-4.0])).item() == -4.0


@pytest.mark.slow
def test_what_is_written_is_what_transformers_finds(train_forked, tiny, tmp_path):
    keys = (
        "train.steps=2", "train.export_every=1", "train.lr=0.01", "rollout.prompts_per_step=4",
        "rollout.group_size=4", "rollout.temperature=0.8",
    )  # fmt: skip
    on, off = (train_forked(2, *keys, f"log.tokens={flag}", out=tmp_path / flag) for flag in ("true", "false"))
    assert on.code == off.code == 0, on.text + off.text
    assert all(torch.equal(weight, off.weights(2)[name]) for name, weight in on.weights(2).items())
    for step, (before, after) in enumerate(
        zip(policies(on, tiny / "model"), sorted(on.out.glob("hf/step_*")), strict=True), start=1
    ):
        before, after = (
            transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (before, after)
        )
        for row, plain in zip(on.rollouts(step), off.rollouts(step), strict=True):
            old, new = (response_logps(model, row).detach() for model in (before, after))
            torch.testing.assert_close(torch.tensor(row.pop("trainer_logp")), old, atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(row.pop("ratio")), (new - old).exp(), atol=1e-4, rtol=1e-4)
            assert row == plain
    (first, *_) = json.loads(gzip.decompress(Run(on.out).block("step_000002")))["groups"]
    assert all(len(answer["gap"]) == len(answer["ratio"]) == len(answer["ids"]) for answer in first["answers"])
