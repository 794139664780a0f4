"""TensorBoard and Weights & Biases hold what metrics.jsonl holds, read back by their own libraries, and end no run."""

import json
import re
import sys
import time
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from config import UserError
from grpo.parts.base import versions
from grpo.parts.base.memory import PHASES
from grpo.run import trackers
from grpo.run.clock import Clock
from grpo.run.preflight import configuration
from grpo.run.profiler import Profiler
from grpo.step.records import Sample
from tests.conftest import ranges, tiny_config
from tests.processes import wait_until


def sample(reward, text, length=1, **fields):
    logps = [-0.5] * length
    return Sample(0, [1, 2], [3] * length, logps, True, text, "", reward=reward, reward_parts={"a": reward}, **fields)


def config(out, name):
    return tiny_config(f"output_dir={out}", f"log.{name}=true", "log.samples_every=2")


def feed(out, name, done, steps):
    """Give a tracker made-up steps, and wait for it; returns their metrics."""
    fed = trackers.Trackers(config(out, name), done, str)
    metrics = [{"step": step, "reward/mean": step / 3 + done, "kl/ref": None, "nan": np.nan} for step in steps]
    for numbers in metrics:
        fed.add(numbers, [sample(i / 7, f"# {i} | *b*\n<b>", length=i) for i in range(20)] if numbers["step"] else None)
    fed.close()
    return metrics


def tensorboard_numbers(out):
    """({step: {name: value}}, the accumulator) of the event files of a run."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="log.tensorboard is optional"
    )
    found = {}
    accumulator = event_accumulator.EventAccumulator(str(out / "tensorboard"), {"scalars": 0, "tensors": 0})
    accumulator.Reload()
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found, accumulator


def in_float32(metrics):
    """What TensorBoard has to hold of metrics.jsonl."""
    numbers = {m["step"]: {k: v for k, v in m.items() if k not in ("step", "nan") and v is not None} for m in metrics}
    return {step: {k: float(np.float32(v)) for k, v in values.items()} for step, values in numbers.items()}


def test_tensorboard_has_the_numbers_the_histograms_and_the_answers(tmp_path):
    pytest.importorskip("tensorboard", reason="log.tensorboard is optional")
    metrics = feed(tmp_path, "tensorboard", 0, [0, 1, 2, 3, 4])
    found, accumulator = tensorboard_numbers(tmp_path)
    assert found == in_float32(metrics)
    lengths = accumulator.Histograms("tokens/response_histogram")[0].histogram_value
    assert (lengths.num, lengths.min, lengths.max) == (20, 0, 19)
    tables = accumulator.Tensors("answers/text_summary")
    assert [event.step for event in tables] == [2, 4]
    (table,) = tables[0].tensor_proto.string_val
    assert table.count(b"answer: ") == trackers.TABLE_ROWS and table.endswith(b"    answer: # 19 | *b*\n    <b>")

    time.sleep(1.1)  # event files are read in the order of the second in their names
    again = feed(tmp_path, "tensorboard", 2, [3])  # it stopped after 4 and goes on after 2
    assert tensorboard_numbers(tmp_path)[0] == in_float32([*metrics[:3], *again])


@pytest.mark.slow
def test_wandb_without_a_key_is_offline_and_has_the_numbers(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb", reason="log.wandb is optional")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "")
    metrics = feed(tmp_path, "wandb", 0, [0, 1, 2, 3, 4])
    assert capfd.readouterr().err.count("this run is written offline") == 1
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: b"answers" in path.read_bytes())  # by its own process
    written = path.read_bytes()  # each number as JSON
    assert all(json.dumps(numbers["reward/mean"]).encode() in written for numbers in metrics)
    assert b"tokens/response_histogram" in written
    assert len([*tmp_path.glob("wandb/offline-run-*/files/media/table/answers_*")]) == 2


def fail(*arguments):
    raise ConnectionResetError("gone")


@pytest.mark.parametrize(
    "opened",
    [fail, lambda cfg, done: (fail, fail)],
    ids=["at the start", "at a step"],
)
def test_a_tracker_that_fails_costs_a_warning(opened, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(trackers.OPEN, "tensorboard", opened)
    feed(tmp_path, "tensorboard", 0, [1, 2])
    assert capfd.readouterr().err == (
        "warning: log.tensorboard: ConnectionResetError: gone; the run goes on without it. "
        "metrics.jsonl and rollouts/ have everything\n"
    )


# ---------------------------------------------------------------- beside a run


def test_a_tracker_that_is_not_installed_is_told_before_training(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B leaves in a working directory: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"pip install wandb==.*, or use log.wandb=false"):
        configuration.check_config(config(tmp_path, "wandb"), world_size=2)


def test_answers_on_the_screen():
    samples = [sample(i / 8, f"{i}\x1b[2J" + "x" * 100) for i in range(9)]
    lines = trackers.format_answers(samples, decode=lambda ids: f"prompt {ids}").splitlines()
    assert len(lines) == 3 and all(line.isprintable() and len(line) < 200 for line in lines)
    assert lines[0].startswith("  reward 0.000  advantage +0.00  'prompt [1 2]' → '0\\x1b[2Jxxx") and " … " in lines[0]


def test_a_window_to_the_last_step_is_written_without_a_process_group(tmp_path, monkeypatch):
    """The group has ended by then, with vLLM."""
    profiler = Profiler(tmp_path, tiny_config("profile.start=1", "profile.stop=2").profile, rank=3)
    profiler.start_step(1)
    profiler.start_step(2)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", None)
    assert not dist.is_initialized()
    profiler.close()
    names = ranges(tmp_path / "steps_1_2_rank3.json.gz")
    assert "ProfilerStep#1" in names and "ProfilerStep#2" in names


def test_phases_are_ranges_of_nvtx_on_a_gpu(monkeypatch):
    """There is no GPU here: torch's two calls of NVTX are recorded."""
    calls = []
    timer = Clock(stall_timeout_s=0)
    monkeypatch.setattr(timer, "memory", MagicMock())
    for name in ("push", "pop"):
        monkeypatch.setattr(torch.cuda.nvtx, f"range_{name}", lambda *args, name=name: calls.append((name, *args)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    with timer("train"):
        pass
    assert calls == [("push", "train"), "synchronize", ("pop",)]


@pytest.mark.slow
def test_a_run_with_everything_on(train_forked, tiny):
    """Two ranks; which ranges the traces have, what the screen shows; the trackers, where they are installed."""
    on = [f"log.{name}=true" for name in versions.TRACKERS if versions.installed(name)]
    run = train_forked(
        2, "train.steps=6", "rollout.prompts_per_step=4", "train.epochs_per_step=2", "algo.kl_coef=0.05", *on,
        "log.samples_every=2", "profile.start=5", "profile.stop=6", "train.eval_every=3",
        f"data.eval={tiny / 'train.jsonl'}", WANDB_MODE="offline",
    )  # fmt: skip
    assert run.code == 0 and "warning: log" not in run.text and "warning: profile" not in run.text, run.text
    assert [m["step"] for m in run.metrics] == list(range(7))
    if "log.tensorboard=true" in on:
        assert tensorboard_numbers(run.out)[0] == in_float32(run.metrics)

    for rank in (0, 1):
        names = ranges(run.out / f"traces/steps_5_6_rank{rank}.json.gz")
        last = names.index("ProfilerStep#6")
        assert {"eval", "rollout", "reward", "gather", "logprob", "train", "sync", "save", "wait"} <= {*names[last:]}
        assert names[:last].count("train") == names[last:].count("train") == 2 and "ProfilerStep#5" in names[:last]
    for m in run.metrics[1:]:
        assert sum(m[f"time/{phase}"] for phase in (*PHASES, "other")) == pytest.approx(m["time/step"], rel=1e-6)
        assert m["idle_frac"] == pytest.approx(sum(m[key] for key in m if key.startswith("idle/")))

    assert re.findall(r"answers of step (\d+), .*\n(?:  reward .*\n){3}", run.text) == ["2", "4", "6"]
    if len(on) < 2:
        pytest.skip("the rest passed; log.tensorboard and log.wandb need packages that are optional")
