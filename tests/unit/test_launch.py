"""The command without its algorithm: exit codes, who speaks, and what failures of machines mean."""

import os
import re
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch

import megatron_bridge as bridge
import train_grpo
from config import RankError, TrainingError, UserError
from grpo.parts.model import attention
from grpo.run import launch
from grpo.run.preflight import configuration, run_plan
from tests.conftest import REPO, refused, tiny_config, tiny_model
from tests.fork_server import free_port
from tests.museum import Exhibit
from tests.museum.runs import planted
from tests.oracle.layouts import FULL

CONFIG = str(REPO / "configs/tiny.yaml")


@pytest.fixture
def command(tiny, monkeypatch, capfd):
    """command("section.key=value", ..., rehearse=...) → (exit code, what it printed); nothing is trained.

    `rehearse` gets the configuration of each step that is rehearsed.
    """
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*options, rehearse=lambda cfg: None):
        monkeypatch.setattr(train_grpo.rehearsal, "run", lambda cfg, *functions: rehearse(cfg))
        data = [f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", "reward.default=exact"]
        code = train_grpo.main(["--config", CONFIG, *options, *data])
        shown = capfd.readouterr()
        return code, shown.out + shown.err

    return run


def test_a_dry_run_rehearses_and_prints_the_plan(command, monkeypatch):
    rehearsed = []
    keys = ("parallel.tp=2", "parallel.pp=2", "rollout.group_size=8", "train.updates_per_step=2")
    code, text = command("--dry-run", "--world-size", "4", *keys, rehearse=rehearsed.append)
    assert code == 0 and rehearsed[0].parallel.tp == 2
    assert "layout:  4 ranks = tp 2 × pp 2 × dp 1; rollout: 4 vLLM engines of tp 1" in text
    assert "16 prompts × 8 = 128 samples → 2 updates of 64 samples" in text
    assert "data:    200 prompts\n" in text
    assert "warning" not in command("--dry-run", "--world-size", "4", "parallel.tp=2")[1]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "warning: --max-restarts=3: each restart begins from resume=none again; use auto" in command("--dry-run")[1]
    assert "warning" not in command("--dry-run", "resume=auto")[1]
    for options in (["--dry-run", "--world-size", "0"], ["--world-size", "2"], ["--vers"]):
        with pytest.raises(SystemExit, match="2"):
            command(*options)


def test_a_run_that_does_not_fit_is_told_without_its_data_too(command):
    code, text = command("--dry-run", "--gpu-memory-gb", "0.1", "data.eval=nowhere.jsonl")
    assert code == 2 and re.search(r"(?s)error: .*has no room for one sample.*\nerror: .*nowhere\.jsonl", text), text


def test_a_rank_beyond_the_world_is_told(command, monkeypatch, capfd):
    """Rank 0 alone speaks later."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        command("--dry-run")
    assert "RANK=1 with WORLD_SIZE=1: must be 0 to 0" in capfd.readouterr().err


@pytest.mark.parametrize(
    "dtype, gpu, found, is_refused",
    [("bf16", False, {}, False), ("bf16", True, {"fla-core": "0.6.0"}, False), ("bf16", True, {}, True)],
)  # fmt: skip
def test_linear_attention_on_a_gpu_needs_its_kernels(monkeypatch, tmp_path, dtype, gpu, found, is_refused):
    """In bf16, as pip installs them; a machine without a GPU, as of a dry run, needs none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(configuration.versions, "installed", found.get)
    message = r"pip install fla-core==0\.6\.0, or use model\.dtype=fp32"
    with refused(UserError, message if is_refused else None):
        model = str(tiny_model(tmp_path, "qwen3_5_text"))
        configuration.check_model(tiny_config(f"model.dtype={dtype}"), model, rollout_tp=1)


@pytest.mark.parametrize("option, connections", [("tp", "1"), ("cp", "1"), ("pp", None)])
def test_one_queue_where_communication_overlaps(monkeypatch, option, connections):
    """Megatron-core asks for it with tensor or context parallelism; CUDA reads it as it starts."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for users, wanted in (("8", "8"), (None, connections)):
        monkeypatch.setattr(os, "environ", {name: users} if users else {})
        launch.prepare_process(tiny_config(f"parallel.{option}=2"))
        assert os.environ.get(name) == wanted


def test_flash_attention_can_be_turned_off(monkeypatch):
    """On a machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked = []
    for options in ([], ["model.flash_attention=false"], ["model.dtype=fp32"], ["model.dtype=fp16"]):
        cfg = tiny_config("model.dtype=bf16", *options)
        launch.prepare_process(cfg)
        asked.append(attention.uses_varlen(bridge.device(), bridge.DTYPES[cfg.model.dtype]))
    assert asked == [True, False, False, True]


def test_the_plan_tells_what_will_be_slow(command, monkeypatch):
    """16 × 16 samples of up to 12 tokens."""
    few = ("rollout.prompts_per_step=1", "rollout.group_size=3", "train.max_tokens_per_micro_batch=64")
    (line,) = run_plan.warnings(tiny_config("parallel.pp=4", *few), world_size=4)
    assert "3 samples a replica for parallel.pp=4 stages, which idle at least 50% of it" in line
    for keys, count in (["parallel.pp=4"], 0), (["parallel.pp=8"], 1), (["parallel.pp=8", *FULL], 0):
        found = run_plan.warnings(tiny_config(*keys), 8)
        assert sum("the first of parallel.pp=8 stages keeps" in text for text in found) == count
    code, text = command("--dry-run", "train.max_tokens_per_micro_batch=6145")
    assert code == 0 and re.search("warning: .* at most 3072 tokens a replica.* rollout.prompts_per_step", text), text
    stops = run_plan.warnings(tiny_config(r"rollout.stop=\n\nQ"), 1)
    assert sum(r"a stop is '\\n\\nQ', with a backslash" in warning for warning in stops) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert any(
        "rollout.tp=16 spans machines of 8" in text for text in run_plan.warnings(tiny_config("rollout.tp=16"), 16)
    )


@pytest.mark.parametrize(
    "keys, said",
    [
        ("train.warmup_steps=300", "train.warmup_steps=300 of train.steps=300: "),
        ("train.warmup_steps=299", None),
        ("train.lr=1.0e-3 train.weight_decay=2000", "train.lr · train.weight_decay = 2 of each weight"),
        ("algo.kl_coef=1.0e+9", "algo.kl_coef=1e+09: "),
        ("algo.kl_coef=1 train.weight_decay=0.1", None),
    ],
)
def test_numbers_beside_which_nothing_is_learnt(keys, said):
    found = run_plan.warnings(tiny_config(*keys.split()), 1)
    assert len(found) == (said is not None) and all(text.startswith(said) for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONSAFEPATH": "1"}])
def test_a_terminal_without_utf_8_and_a_python_without_the_folder_of_its_script(tiny, variables):
    words = [f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", "--dry-run"]
    program = [sys.executable, "train_grpo.py", "--config", CONFIG, *words]
    out = subprocess.check_output(program, cwd=REPO, env={**os.environ, **variables}, text=True)
    assert re.search("layout:  1 rank = tp 1 [?×] pp 1", out)


MEET = """
import datetime, sys
from grpo.parts.base import ranks
ranks.TELL_S, ranks.JOIN = 0.1, datetime.timedelta(seconds=1)
try: ranks.join_ranks(60)
except Exception as error: print(error)
"""


LOST = {  # (rank, ranks) → what it says; of one rank the port is taken
    (0, 1): "rank 0 cannot meet the others at localhost:.*address already in use.*choose another",
    (0, 3): "rank 0 waits for rank 1, 2 at localhost.*rank 1, 2 did not come within 0:00:01",
    (1, 3): "rank 1 waits for rank 0 at localhost.*rank 1 cannot meet the others",
}


@pytest.mark.slow
def test_ranks_that_do_not_come_and_a_port_that_is_taken_are_named():
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = []
        for rank, size in LOST:
            port = taken.getsockname()[1] if size == 1 else free_port()
            env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
            started.append(subprocess.Popen([sys.executable, "-c", MEET], cwd=REPO, env=env, **pipes))
        printed = [process.communicate()[0] for process in started]
    for text, said in zip(printed, LOST.values(), strict=True):
        assert re.search(said, text, re.DOTALL), text


@pytest.mark.parametrize(
    "options, plan",  # of 200 prompts, 16 a step
    [
        (["train.steps=null", "train.epochs=3"], "38 steps (3 epochs) = 9728 samples"),  # 37.5 of them
        (["train.steps=null", "train.epochs=1.1", "rollout.prompts_per_step=20"], "11 steps (1.1 epochs)"),
        (["train.steps=null"], "train.steps=null: say how long"),
    ],
)
def test_epochs_stand_for_steps(command, options, plan):
    rehearsed = []
    code, text = command("--dry-run", *options, rehearse=rehearsed.append)
    assert code == (2 if "say how long" in plan else 0) and plan in text
    assert len(rehearsed) == (0 if code else 2) and all(cfg.train.steps for cfg in rehearsed)


def test_a_mistake_ends_with_2_and_a_failure_with_1(command, monkeypatch):
    def failed(error):
        return command(rehearse=mock.Mock(side_effect=error))

    assert failed(UserError("algo.loss=x: legal is y")) == (2, "error: algo.loss=x: legal is y\n")
    assert failed(TrainingError("lost"))[0] == 1
    code, text = command()
    assert code == 2 and text.startswith("error: start with torchrun "), text  # before model and data are read
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    assert failed(UserError("known to all")) == (2, "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # of a second machine, which may lack a file of the first
    assert failed(UserError("known to this machine")) == (2, "error: known to this machine\n")
    assert failed(RankError("known to me")) == (1, "error: known to me\n")


SLIPS = {  # what is said → function of the script, piece of its source, what a fork has there
    r"train_grpo.py, line \d+, in grpo_loss: NameError: name 'weigth_T'": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = (loss_T * weigth_T).sum()"),
    r"train_grpo.py, line \d+, in policy_loss: RuntimeError: The size of tensor a": (
        "policy_loss", "log_ratio_T = logp_T - old_logp_T", "log_ratio_T = logp_T[1:] - old_logp_T"),
    r"grpo_loss returns the shapes {'the loss sum': \[27\], .*; each must be one number": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = loss_T * weight_T"),
    r"train_grpo.py, line \d+, in grpo_loss: the loss sum of six .* is .* but .* in two. Return the sum": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = (loss_T * weight_T).mean()"),
    r"in grpo_loss: the loss sum .* divide by no number of tokens": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = (loss_T * weight_T).sum() / mask_T.sum()"),
    r"in grpo_loss: the loss sum .* What needs the whole batch": (  # of a single term, with a small coefficient
        "grpo_loss", "loss = (loss_T * weight_T).sum()",
        "loss = (loss_T * weight_T).sum() - 1e-3 * entropy_T[mask_T > 0].mean()"),
    r"in grpo_loss: the number of tokens .* is 1 in one micro-batch, but 1 \+ 1 in two": (
        "grpo_loss", "denominator = (weight_T > 0).sum().int()", "denominator = (weight_T > 0).any().int()"),
}  # fmt: skip


@pytest.mark.parametrize("message", SLIPS)
def test_a_slip_of_a_fork_is_told_with_its_line(message):
    function, before, after = SLIPS[message]
    exhibit = Exhibit("", "", f"train_grpo:{function}", before, after)
    with planted(exhibit), pytest.raises(UserError, match=message):
        train_grpo.rehearse(tiny_config())


def test_random_numbers_in_a_loss_are_no_slip():
    noisy = "return loss + torch.randn(()), denominator"
    with planted(Exhibit("", "", "train_grpo:grpo_loss", "return loss, denominator", noisy)):
        train_grpo.rehearse(tiny_config())
