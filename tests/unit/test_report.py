"""The report: what it says of a real run's files, and that the page works in a browser."""

import base64
import gzip
import json
import re
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from config import UserError
from grpo.parts.base.rollout_files import write_rows
from tests import compare_runs
from tools.report import Run, build_page, curve, main, read_group

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def sample(**values):
    """A line of rollouts/."""
    usual = {
        "group": 0, "prompt_ids": [8, 2, 12], "response_ids": [2, 8, 0], "rollout_logp": [-0.5, -1.25, -0.001],
        "finished": True, "text": "06", "source": "a", "graded": "ok", "error": "", "reward": 1.0,
        "reward_parts": {"reward": 1.0}, "advantage": 0.5,
    }  # fmt: skip
    return usual | values


def test_the_page_holds_every_sample_and_names_no_address(shared):
    text = build_page("shared", [Run(shared.out)])
    assert not re.search(r"https?://", text)
    blocks = re.findall(r'data-file="([^"]+)">([^<]*)<', text)
    found = {name: json.loads(gzip.decompress(base64.b64decode(content))) for name, content in blocks}
    for step in (1, 2, 3):
        block, lines = found[f"step_{step:06d}"], shared.rollouts(step)
        answers = [answer for group in block["groups"] for answer in group["answers"]]
        assert [a["ids"] for a in answers] == [line["response_ids"] for line in lines]
        assert [a["logp"] for a in answers] == [pytest.approx(line["rollout_logp"], rel=1e-3) for line in lines]
        assert [a["reward"] for a in answers] == [line["reward"] for line in lines]
        shown = ["".join(block["texts"][str(i)] for i in a["ids"]) for a in answers]
        assert [re.sub(r"<\w+>", "", answer) for answer in shown] == [line["text"] for line in lines]
    assert "rollout.group_size" in text and "reward/mean" in text and "step 3 of 3" in text


def test_a_run_that_goes_on_or_lacks_files_is_read(shared, tmp_path, capsys):
    out = shutil.copytree(shared.out, tmp_path / "out", ignore=shutil.ignore_patterns("checkpoints", "hf"))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    (out / "config.yaml").write_text(re.sub(r"  path: .*", "  path: nowhere/model", (out / "config.yaml").read_text()))
    run = Run(out)
    assert run.steps[-1]["step"] == 3 and run.tokenizer is None
    assert "--tokenizer" in build_page("", [run, Run(shared.out)])
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        Run(tmp_path)
    assert main([str(tmp_path)]) == 2


def test_curves_and_values_of_tokens_by_hand(shared):
    run = Run(shared.out)
    run.rows = [{"step": 1, "x": 0.0}, {"step": 2, "x": None}, {"step": 3, "x": 1.0}]
    assert 'points="0.0,106.0 300.0,4.0"' in curve("x", [run]) and curve("y", [run]) == ""
    (plain,) = read_group(0, [sample()])["answers"]
    assert plain["advantage"] == [0.5] * 3
    (answer,) = read_group(0, [sample(advantages=[0.5, -1.0, 0.0])])["answers"]  # as recipes write them
    assert answer["advantage"] == [0.5, -1.0, 0.0]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_shows_the_page_and_runs_no_text_of_a_model(shared, tmp_path):
    out, hostile = shutil.copytree(shared.out, tmp_path / "out"), "<img src=x onerror=alert(1)>"
    write_rows(out / "rollouts/step_000003.jsonl", [sample(error=hostile, graded="error")])
    (tmp_path / "page.html").write_text(build_page(hostile, [Run(out)]))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom")
    flags += (f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000")
    address = (tmp_path / "page.html").as_uri()
    dom = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, check=True, timeout=120).stdout
    assert 'data-ready="yes"' in dom and dom.count('class="answer"') == 1 and "<img" not in dom
    assert dom.count("background-color: color-mix") == 3 and "&lt;img src=x onerror" in dom


# ---------------------------------------------------------------- two runs compared bit for bit

METRICS = [
    {"step": 1, "reward/mean": 0.1, "grad_norm": float("nan"), "kl/ref": None, "time/step": 1.0, "mem/peak_gb": 1.0},
    {"step": 2, "reward/mean": 0.3, "grad_norm": 0.5, "kl/ref": None, "speed/samples_per_s": 3.0, "idle_frac": 0.1},
]
WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.zeros(3)}


def write_run(folder, metrics=METRICS, weights=WEIGHTS):
    """The output folder of a run; returns its path."""
    for name in ("rollouts", "hf/step_000002"):
        (folder / name).mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "rollouts/step_000001.jsonl", [sample()])
    save_file(weights, folder / "hf/step_000002/model-00000.safetensors")
    return str(folder)


def test_runs_that_differ_in_times_alone_are_equal(tmp_path, capsys):
    other = [METRICS[0] | {"time/step": 9.0, "mem/peak_gb": None, "idle/save": 0.5}, METRICS[1]]
    assert compare_runs.main(write_run(tmp_path / "a"), write_run(tmp_path / "b", other)) == 0
    assert capsys.readouterr().out.count(": equal, ") == 3


def test_planted_differences_are_found_and_named(tmp_path, capsys):
    metrics = [METRICS[0], METRICS[1] | {"reward/mean": 0.30000000000000004}]
    weights = WEIGHTS | {"norm": torch.tensor([0.0, -0.0, 0.0])}
    assert compare_runs.main(write_run(tmp_path / "a"), write_run(tmp_path / "b", metrics, weights)) == 1
    printed = capsys.readouterr().out
    assert "first difference: line 2, step 2: reward/mean: A 0.3, B 0.30000000000000004\n" in printed
    assert "hf/step_000002: norm: element 1 of 3: A 0.0, B -0.0\n" in printed and printed.count("DIFFERENT") == 2
