"""What a step cost, by hand and against transformers; waiting; progress."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

import train_grpo
from benchmarks import works
from grpo.parts.base.hf_folder import read_config
from grpo.run import logs
from grpo.step import metrics
from tests import hub_models
from tests.conftest import tiny_config


def test_operations_of_a_model_by_hand():
    """Of two layers, one of linear attention; 3 and 5 tokens."""
    sizes = works.sizes(hidden=4, layers=2, heads=2, kv_heads=1, ffn=8, vocab=10, tied=True)
    linear = {
        "linear_num_key_heads": 1, "linear_key_head_dim": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    rule = 4 * 2 * 2 * 3 + 4 * (2 + 2 + 6)  # two states of 2 × 3: decay, read, write, read out; taps × channels
    hf = SimpleNamespace(**sizes, **linear)
    weights = metrics.matrix_weights(hf)  # below, against transformers
    found = metrics.train_flops(hf, 3 + 5, 3**2 + 5**2)
    assert found == 6 * (weights + rule) * (3 + 5) + 6 * 2 * 2 * (3**2 + 5**2)  # one layer has attention


@pytest.mark.parametrize("name", ["Qwen2.5-7B-Instruct", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"])
def test_the_weights_that_a_token_meets_are_those_of_transformers(name, tmp_path):
    hf = read_config(hub_models.model_folder(f"Qwen/{name}", tmp_path))
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(hf).model.layers
    share = getattr(hf, "num_experts_per_tok", 1) / getattr(hf, "num_experts", 1)  # of what has three dimensions
    matrices = [weight for weight in layers.parameters() if weight.dim() > 1 and weight.shape[1] > 1]
    met = sum(weight.numel() * (share if weight.dim() == 3 else 1) for weight in matrices)
    assert metrics.matrix_weights(hf) == met + hf.vocab_size * hf.hidden_size


def test_rates_by_hand(monkeypatch):
    monkeypatch.setattr(metrics.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(metrics.bridge.mpu, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(metrics.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(metrics, "gpu_rate", lambda: 1e9)

    hf = SimpleNamespace(**works.MODELS["tiny"])
    cfg = tiny_config("train.epochs_per_step=2", "model.dtype=bf16")
    samples = [SimpleNamespace(positions=30), SimpleNamespace(positions=50)]
    reports = [{"real": 20, "attended": 200}, {"real": 12, "attended": 100}]

    found = metrics.speed_metrics(samples, reports, hf, cfg, {"step": 4.0, "train": 2.0})
    flops = metrics.train_flops(hf, 32, 300) / 2  # of one of the replica's two ranks
    assert found == {
        "speed/tokens_per_s_per_rank": 82 / 4 / 4,
        "speed/computed_tokens_per_s_per_rank": 32 / 2 / 2,
        "speed/mfu_train": pytest.approx(flops / 2.0 / 1e9),
        "speed/mfu_step": pytest.approx(flops / 4.0 / 1e9),
    }


def test_rows_of_all_ranks(monkeypatch):
    monkeypatch.setattr(metrics.ranks, "gather", lambda own: [own, [50, 100, 7]])
    monkeypatch.setattr(metrics.bridge.mpu, "get_data_parallel_world_size", lambda: 2)
    rows = [{"real": 20, "positions": 40, "micro_batches": 2}, {"real": 30, "positions": 60, "micro_batches": 3}]
    reports = [defaultdict(lambda: 1.0, row) for row in rows]
    batch = train_grpo.flatten([train_grpo.Sample(0, [1], [2], [0.0], True, "", "")])
    batch = replace(batch, advantages=batch.rollout_logp)
    found = metrics.update_metrics(reports, batch, tiny_config())
    assert (found["pack/micro_batches"], found["pack/real_frac"], found["pack/prompt_tokens_saved"]) == (5, 0.5, 9)


def test_whom_the_others_wait_for():
    def idle(*notes):
        rows = [{"rollout": rollout, "reward": reward, "wait": wait} for rollout, reward, wait in notes]
        collected = SimpleNamespace(samples=[], rank_seconds=rows)
        found = metrics.time_metrics(collected, [{"bubble": 0.125}], {"train": 1.0, "other": 0.0, "step": 1.0})
        return [found[f"idle/{cause}"] for cause in ("generation", "grading", "save", "bubble")]

    # The slowest samples until 10, grades until 12; the other is done at 6, waits 4 for the one, 2 for the other.
    assert idle((10, 2, 0), (5, 1, 1)) == [2.0, 1.0, 0.5, 0.125]
    assert idle((10, 2, 0), (11, 0.5, 0)) == [0.0, 0.25, 0.0, 0.125]  # it is done while the slowest grades


def test_progress_by_hand(monkeypatch):
    now = iter([100.0, 110.0, 126.0])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(now))
    run = logs.Progress(steps=12, prompts=40, sampled=20)
    assert run.add({"step": 6, "groups/sampled": 10, "time/step": 8.0}) == {
        "epoch": 0.75, "time/between": 2.0, "time/left": 60.0,
    }  # fmt: skip
    found = run.add({"step": 7, "groups/sampled": 10, "time/step": 8.0, "time/eval": 6.5})
    assert found["epoch"] == 1.0 and found["time/between"] == 1.5
    assert found["time/left"] == 5 * 13.0


@pytest.mark.parametrize(
    "name, rate",
    [("NVIDIA H200", 989e12), ("NVIDIA L40", 181e12), ("NVIDIA RTX A4000", None), ("NVIDIA H100 MIG 1g.10gb", None)],
)
def test_the_rate_of_a_gpu_is_found_by_whole_words(monkeypatch, name, rate):
    monkeypatch.setattr(metrics.torch.cuda, "get_device_name", lambda: name)
    assert metrics.gpu_rate() == rate
