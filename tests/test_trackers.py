"""TensorBoard and Weights & Biases hold what metrics.jsonl holds, read back by their own libraries, and end no run."""

import gzip
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from config import UserError
from support.base import versions
from support.base.read_config import load_config
from support.check import checks
from support.run import trackers
from support.step.metrics import PHASES
from tests.conftest import REPO, read_rows, write_rows
from tests.test_timeline import check_nesting, check_sums, tracks_of

SAMPLE = {"prompt_ids": [1, 2], "response_ids": [3], "rollout_logp": [-0.5], "graded": "ok", "finished": True}


def sample(reward: float, text: str, **fields) -> dict:
    return {**SAMPLE, "reward": reward, "text": text, "advantage": 2 * reward, "reward_parts": {"a": reward}, **fields}


def made_up_run(out: Path, steps: int) -> list[dict]:
    """Files of a run of so many steps; returns its metrics."""
    (out / "rollouts").mkdir(parents=True)
    (out / "config.yaml").write_text("seed: 3\n")
    metrics = [{"step": 0, "eval/a/avg@1": 0.1}]
    for step in range(1, steps + 1):
        metrics.append({"step": step, "reward/mean": step / 3, "kl/ref": None, "lr": 1e-7 * step, "groups/sampled": 2})
        samples = [sample(i / 7, f"# {i} | *b*\n<b>", response_ids=[1] * i) for i in range(20)]
        write_rows(out / f"rollouts/step_{step:06d}.jsonl", samples)
    write_rows(out / "metrics.jsonl", metrics)
    return metrics


def send(out: Path, *arguments: str, shell: str = "", **env: str) -> subprocess.CompletedProcess:
    command = f"{shell} exec {sys.executable} -m support.run.trackers {out} {' '.join(arguments)}"
    settings = {"env": os.environ | env, "cwd": REPO, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(["bash", "-c", command], **settings)


# ---------------------------------------------------------------- read back by their own libraries


def tensorboard_numbers(out: Path) -> tuple[dict[int, dict[str, float]], object]:
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


def wandb_history(out: Path) -> dict[int, dict]:
    """{step: {name: value}} of the one run under out/wandb: records of wandb's protocol in LevelDB's log format, blocks
    of 32 KiB with records of [crc 4][length 2][kind 1] and data; kinds: 1 whole, 2 first, 3 middle, 4 last."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="log.wandb is optional")
    (path,) = out.glob("wandb/*run-*/run-*.wandb")
    data, place, whole, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record, whole = pb.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                values = found.setdefault(record.history.step.num, {})
                for item in record.history.item:  # a table or a histogram has an item for each of its fields
                    name, *fields = item.nested_key or [item.key]
                    value = json.loads(item.value_json)
                    values[name] = values.get(name, {}) | {"/".join(fields): value} if fields else value
    return found


def numbers_of(metrics: list[dict]) -> dict[int, dict[str, float]]:
    """What a tracker has to hold of metrics.jsonl."""
    return {m["step"]: {k: v for k, v in m.items() if k != "step" and v is not None} for m in metrics}


def in_float32(numbers: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """What TensorBoard can hold of them; its data server shows no scalars of another type."""
    return {step: {k: float(np.float32(v)) for k, v in values.items()} for step, values in numbers.items()}


def numbers_in(history: dict[int, dict]) -> dict[int, dict[str, float]]:
    kept = {step: {k: v for k, v in items.items() if not k.startswith("_")} for step, items in history.items()}
    return {step: {k: v for k, v in items.items() if isinstance(v, (int, float))} for step, items in kept.items()}


def test_tensorboard_has_the_numbers_the_histograms_and_the_answers(tmp_path):
    pytest.importorskip("tensorboard", reason="log.tensorboard is optional")
    metrics = made_up_run(tmp_path / "run", steps=4)
    sent = send(tmp_path / "run", "tensorboard", "--table-every=2")
    assert (sent.returncode, sent.stderr) == (0, "")
    found, accumulator = tensorboard_numbers(tmp_path / "run")
    assert found == in_float32(numbers_of(metrics))
    from tensorboard.util.tensor_util import make_ndarray

    lengths = make_ndarray(accumulator.Tensors("tokens/response_histogram")[0].tensor_proto)
    assert lengths[:, 2].sum() == 20 and (lengths[0, 0], lengths[-1, 1]) == (0, 19)
    tables = accumulator.Tensors("answers")
    assert [event.step for event in tables] == [2, 4]
    head, *rows = make_ndarray(tables[0].tensor_proto)
    assert [cell.decode() for cell in head] == trackers.COLUMNS and len(rows) == trackers.TABLE_ROWS
    assert rows[-1][-1].decode() == "    # 19 | *b*\n    <b>"  # the highest reward, as code

    again = [*metrics[:3], {"step": 3, "reward/mean": 9.0}]  # it stopped after 4 and went on after 2, without a step 4
    write_rows(tmp_path / "run/metrics.jsonl", again)
    assert send(tmp_path / "run", "tensorboard", "--done=2").returncode == 0
    assert tensorboard_numbers(tmp_path / "run")[0] == in_float32(numbers_of(again))


def test_a_disk_that_is_full_costs_a_warning(tmp_path):
    """A limit on the size of files stands for the disk: the next write fails in the same way."""
    pytest.importorskip("tensorboard", reason="log.tensorboard is optional")
    made_up_run(tmp_path / "run", steps=60)
    sent = send(tmp_path / "run", "tensorboard", shell="ulimit -f 16;")
    assert sent.returncode == 0 and len(sent.stderr.splitlines()) == 1, sent.stderr
    assert "warning: log.tensorboard: OSError: [Errno 27] File too large; the run goes on without it" in sent.stderr


@pytest.mark.slow
def test_wandb_without_a_key_is_offline_and_has_the_numbers(tmp_path):
    pytest.importorskip("wandb", reason="log.wandb is optional")
    metrics = made_up_run(tmp_path / "run", steps=4)
    sent = send(tmp_path / "run", "wandb", "--table-every=2", HOME=str(tmp_path), WANDB_API_KEY="", WANDB_MODE="")
    assert sent.returncode == 0 and sent.stderr.count("warning:") == 1, sent.stderr
    assert "this run is written offline" in sent.stderr
    history = wandb_history(tmp_path / "run")
    assert numbers_in(history) == numbers_of(metrics)
    assert sum(history[1]["tokens/response_histogram"]["values"]) == 20
    assert [step for step in history if "answers" in history[step]] == [2, 4]


# ---------------------------------------------------------------- beside a run


def test_the_process_is_missed_once(tmp_path, monkeypatch):
    cfg = SimpleNamespace(
        log=SimpleNamespace(tensorboard=True, wandb=False, samples_every=0), model=SimpleNamespace(path=str(tmp_path)),
        output_dir=str(tmp_path / "none"),
    )  # fmt: skip
    process = trackers.Trackers(cfg, done=0)
    process.process.wait(60)  # there is no such run, so it ends at once
    assert "has ended (exit code 1); the run goes on without it" in process.warning() and process.warning() is None
    process.close()


def test_a_tracker_that_is_not_installed_is_told_before_training(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B leaves in a working directory: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    cfg = load_config(str(REPO / "configs/tiny.yaml"), ["log.wandb=true"])
    with pytest.raises(UserError, match=r"pip install wandb==.*, or use log.wandb=false"):
        checks.check_config(cfg, world_size=2)


def test_answers_on_the_screen():
    samples = [sample(i / 8, f"{i}\x1b[2J" + "x" * 100) for i in range(8)] + [sample(1.0, "ok", finished=False)]
    samples[8]["reward_parts"] = {"a": 0.75, "b": 0.25}
    lines = trackers.format_answers(samples, decode=lambda ids: f"prompt {ids}").splitlines()
    assert len(lines) == 3 and all(line.isprintable() and len(line) < 200 for line in lines)
    assert lines[0].startswith("  reward 0.000  advantage +0.00  'prompt [1, 2]' → '0\\x1b[2Jxxx") and " … " in lines[0]
    assert lines[2] == "  reward 1.000 (a 0.75, b 0.25)  advantage +2.00  'prompt [1, 2]' → 'ok'  (cut off)"


@pytest.mark.slow
def test_a_run_with_everything_on(train, tiny):
    """Two ranks; what trackers hold, what the timeline holds, what the screen shows."""
    on = [f"log.{name}=true" for name in versions.TRACKERS if versions.installed(name)]
    run = train(
        2, "train.steps=6", "rollout.prompts_per_step=4", "train.epochs_per_step=2", "algo.kl_coef=0.05", *on,
        "log.samples_every=2", "profile.start=3", "profile.stop=4", "profile.torch=true", "train.eval_every=3",
        f"data.eval={tiny / 'train.jsonl'}", WANDB_MODE="offline",
    )  # fmt: skip
    assert run.code == 0 and "warning: log" not in run.text and "warning: profile" not in run.text, run.text
    assert [m["step"] for m in run.metrics] == list(range(7))

    trace = json.loads((run.out / "traces/steps_3_4.json").read_text())
    tracks = tracks_of(trace)
    assert list(tracks) == ["rank 0", "rank 1"]
    for name, events in tracks.items():
        check_nesting(events)
        seconds = check_sums(events)
        names = [event["name"] for event in events if event["args"]["step"] == 3]
        assert {"step 3", "eval", "rollout", "reward", "gather", "logprob", "train", "sync", "save", "wait"} <= {*names}
        assert names.count("train") == 2
        for step in (3, 4) if name == "rank 0" else ():  # whose seconds the metrics have
            assert seconds[step] == pytest.approx(run.metrics[step]["time/step"], rel=1e-6)
    meetings = [[e["ts"] for e in events if e["name"] == "gather"] for events in tracks.values()]
    assert all(abs(a - b) < 5000 for a, b in zip(*meetings, strict=True))  # µs: they meet, on one clock
    for rank in (0, 1):
        with gzip.open(run.out / f"traces/torch_3_4_rank{rank}.json.gz") as file:
            assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])
    for m in run.metrics[1:]:
        phases = [m[f"time/{phase}"] for phase in PHASES if phase != "step"]
        assert sum(phases) == pytest.approx(m["time/step"], rel=1e-6)
        assert m["idle_frac"] == pytest.approx(sum(m[key] for key in m if key.startswith("idle/")))

    shown = re.findall(r"answers of step (\d+), .*\n((?:  reward .*\n)+)", run.text)
    assert [step for step, _ in shown] == ["2", "4", "6"] and all(text.count("\n") == 3 for _, text in shown)
    texts = {row["text"] for row in run.rollouts(4)}
    assert all(any(repr(text) in line for text in texts) for line in shown[1][1].splitlines())

    if "log.tensorboard=true" in on:
        assert tensorboard_numbers(run.out)[0] == in_float32(numbers_of(run.metrics))
    if "log.wandb=true" in on:
        assert numbers_in(wandb_history(run.out)) == numbers_of(run.metrics)
    if len(on) < 2:
        pytest.skip("the rest passed; log.tensorboard and log.wandb need packages that are optional")


@pytest.mark.slow
def test_trackers_that_die_end_no_run(tiny, tmp_path):
    """W&B's own process is killed after some steps, then ours: a warning each, and the run's end is the same."""
    pytest.importorskip("wandb", reason="log.wandb is optional")
    from tests.conftest import Training

    for victim, said in (
        ("wandb-core", "warning: log.wandb: ConnectionResetError"),
        ("python", "has ended (exit code -9)"),
    ):
        run = Training(
            tiny, tmp_path / victim, "train.steps=300", "rollout.prompts_per_step=2", "log.wandb=true", nproc=1,
            WANDB_MODE="offline",
        )  # fmt: skip
        try:
            run.wait_for("log.wandb: ")
            feeders = [p for p in run.family() if "support.run.trackers" in p.cmdline()]
            dying = feeders if victim == "python" else [p for p in run.family() if p.name() == victim]
            assert dying
            for process in dying:
                process.kill()
            assert run.end() == 0 and said in run.text, run.text
            assert len(re.findall(r"warning: (?:log|step)", run.text)) == 1, run.text
        finally:
            run.kill()
    assert len(read_rows(run.out / "metrics.jsonl")) == 300
