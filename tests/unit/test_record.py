"""What a run records of an update, without a run."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import torch

from grpo.parts.base.rollout_files import write_rows
from grpo.run import record
from grpo.step.records import Sample
from rollout import Trace
from tests.conftest import read_rows, tiny_config
from train_grpo import flatten


def sample(turns, advantage=0.5, group=0):
    """An answer of these turns of model, environment, model, ..., after a prompt of two tokens."""
    size = sum(turns)
    return Sample(group, [7, 8], [*range(size)], [-1.0] * size, True, "", "", Trace(turns=turns), advantage=advantage)


def test_weights_are_a_number_or_a_list_and_null_for_answers_that_are_not_trained():
    """The second answer has another weight at its last token, the third an environment's turn, the fourth none."""
    sampled = [sample([2]), sample([2]), sample([1, 2, 1]), sample([3])]
    of_another_step = sample([2], group=9)
    samples = [*sampled, of_another_step]
    batch = flatten(samples)
    weights = batch.mask.float()
    weights[int(batch.starts_N[1]) + 2] = 0.25
    advantages = torch.full_like(weights, 0.5)
    advantages[int(batch.starts_N[0]) + 1] = 2.0
    weighted = replace(batch, weights=weights, advantages=advantages)

    updates = SimpleNamespace(sampled=sampled, samples=samples)
    line = record.Updates.trained(updates, weighted, [0, 1, 2, 4])
    line = msgspec.json.decode(msgspec.json.encode(line, enc_hook=lambda array: array.tolist()))
    assert line["weights"] == [1.0, [1.0, 0.25], 1.0, None, 1.0]
    assert line["advantages"] == [[2.0, 0.5], None, None, None, None]
    assert [row["group"] for row in line["others"]] == [9]


def test_values_are_named_by_their_dotted_keys():
    keys = record.keys_of(tiny_config("train.lr=7"))
    assert keys["train.lr"] == 7 and keys["schedule.lr"] is None and "train" not in keys


def test_a_number_that_is_none_reads_back_as_none(tmp_path):
    write_rows(tmp_path / "updates.jsonl", [{"loss": float("nan"), "grad_norm": float("inf")}])
    assert read_rows(tmp_path / "updates.jsonl") == [{"loss": None, "grad_norm": None}]
