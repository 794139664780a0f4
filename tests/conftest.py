"""One tiny model, one way to start a run, the runs that many quick tests read, and what several tests check of runs."""

import contextlib
import dataclasses
import gc
import gzip
import hashlib
import json
import os
import subprocess
from functools import partial
from types import SimpleNamespace

import datasets
import huggingface_hub
import make_tiny
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import megatron_bridge as bridge
from grpo.parts.base import ranks
from grpo.parts.base.read_config import KEYS, SECTIONS, load_config
from grpo.parts.engine.vllm_process import engine_options
from grpo.run.preflight import equal_bits
from oracle.run import read_rows
from tests import museum
from tests.compare_runs import lasting
from tests.fork_server import ForkServer, free_port
from tests.processes import REPO, Torchrun

pytest_plugins = ["tests.forks", "tests.step.one_rank"]  # fixtures: fork, build


def pytest_addoption(parser):
    parser.addoption("--museum-page", action="store_true", help="write docs/dev/museum.md after all of tests/museum")
    parser.addoption("--kills", type=int, default=3, help="runs that tests/faults/test_kills.py kills")
    parser.addoption("--all-starts", action="store_true", help="all healthy runs of tests/faults, not some")


def pytest_generate_tests(metafunc):
    """The healthy runs of tests/faults: all with --all-starts, else one in EVERY of the module."""
    if "start" in metafunc.fixturenames and hasattr(metafunc.module, "STARTS"):
        every = 1 if metafunc.config.getoption("--all-starts") else metafunc.module.EVERY
        metafunc.parametrize("start", list(metafunc.module.STARTS)[::every])


def pytest_itemcollected(item):
    """Mark the tests on several ranks, beside which `make test` runs the others. Slow ones of tests/faults, which wait
    most of their time, run with the others."""
    is_waiting = item.path.parent.name == "faults" and item.get_closest_marker("slow")
    if "fork_server" in item.fixturenames and not is_waiting:
        item.add_marker(pytest.mark.ranks)


def pytest_collection_finish():
    """Put the bug that MUTANT names in after the tests have imported what they test."""
    museum.put_in(os.environ)


def pytest_runtest_setup(item):
    """Skip a test marked `gpu` where `pytest -m gpu` sees too few GPUs for its `ranks`; with only=True, in any call.

    Every test computes with one thread, whatever one before it has set: more would spin, on cores that ranks need.
    """
    torch.set_num_threads(1)
    mark = item.get_closest_marker("gpu")
    asked = "gpu" in item.config.option.markexpr.replace("not gpu", "")
    if mark is None or not (asked or mark.kwargs.get("only")):
        return
    needed, there = mark.kwargs.get("ranks", 1), torch.cuda.device_count()
    if there < needed:
        pytest.skip(f"needs {needed} GPUs, {there} are visible")


def differs_from_upstream(*files):
    """Whether files differ from upstream's, so that this is a fork.

    Upstream is what git finds under the name `upstream` (a tag or a branch) or `upstream/main` (of a remote); where
    there is neither, the last commit. A copy without git counts as a fork.
    """
    git = ["git", "-C", str(REPO)]
    for base in ("upstream", "upstream/main", "HEAD"):
        found = subprocess.run([*git, "rev-parse", "--verify", "-q", f"{base}^{{commit}}"], capture_output=True)
        if found.returncode == 0:
            return subprocess.run([*git, "diff", "--quiet", base, "--", *files]).returncode != 0
    return True


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with an untrained tied Qwen2 (2 layers) and the reversal task."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder / "model")
    write_rows(folder / "train.jsonl", make_tiny.reversal_rows(3, 200, seed=0))
    return folder


@pytest.fixture(scope="session")
def equal_bits_here():
    """Skips a test where this CPU cannot give trainer and vLLM equal bits, as a start would find."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    hf = SimpleNamespace(hidden_size=128, intermediate_size=1536, **sizes)
    for dtype in bridge.DTYPES:
        reason = equal_bits.why_not_here(tiny_config(f"model.dtype={dtype}"), hf)
        if reason:
            pytest.skip(reason)


@pytest.fixture
def tokenizer(tiny):
    """The tokenizer of the tiny model, for a test that may change it."""
    return transformers.AutoTokenizer.from_pretrained(tiny / "model")


def tiny_config(*overrides):
    """configs/tiny.yaml with these overrides."""
    return load_config(str(REPO / "configs/tiny.yaml"), list(overrides))


def tiny_model(folder, arch="qwen2", **options):
    """A folder with an untrained model of a family, of 2 layers and a tokenizer of digits."""
    make_tiny.save_model(folder, make_tiny.char_tokenizer("0123456789>+-="), arch, **{"hidden": 64, **options})
    return folder


def wrap(monkeypatch, module, name, around):
    """Until the test ends, calls of a function are around(the function, *arguments)."""
    monkeypatch.setattr(module, name, partial(around, getattr(module, name)))


def write_rows(path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def refused(error, message):
    """Expects the error with this message, a pattern; None if no error is expected."""
    return contextlib.nullcontext() if message is None else pytest.raises(error, match=message)


class Outputs:
    """The output folder of a run of train_grpo.py, `out`."""

    @property
    def metrics(self) -> list[dict]:
        return read_rows(self.out / "metrics.jsonl")

    def rollouts(self, step, kind="step") -> list[dict]:
        """The samples of a step, or with kind="eval" of the evaluation after it."""
        return read_rows(self.out / f"rollouts/{kind}_{step:06d}.jsonl")

    def weights(self, step) -> dict[str, torch.Tensor]:
        """What was exported after the step."""
        return load_file(self.out / f"hf/step_{step:06d}/model-00000.safetensors")

    def result(self, step):
        """What no fault may change in a run of `step` steps: the last export, all samples, the metrics."""
        files = [self.out / f"hf/step_{step:06d}/model-00000.safetensors", *sorted(self.out.glob("rollouts/*.jsonl"))]
        return {path.name: path.read_bytes() for path in files} | {"metrics": lasting(self.metrics)}


def command_line(tiny, out, overrides: tuple[str, ...], config) -> list[str]:
    """The arguments of train_grpo.py for the tiny model."""
    inputs = [f"output_dir={out}", f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}"]
    return ["--config", f"configs/{config}.yaml", *inputs, *overrides]


def next_printed(out):
    """A new file beside the output folder, for what a run prints."""
    return out.parent / f"printed_{len(list(out.parent.glob('printed_*')))}.txt"


class Training(Outputs, Torchrun):
    """A torchrun of train_grpo.py on configs/tiny.yaml with the tiny model, and its output folder."""

    def __init__(self, tiny, out, *overrides, script="train_grpo.py", config="tiny", **settings):
        self.out, self.overrides = out, overrides
        super().__init__(next_printed(out), script, *command_line(tiny, out, overrides, config), **settings)


class ForkedTraining(Outputs):
    """The same on ranks of the fork server, ended: its exit `code` and what it printed, `text`.

    Raises AssertionError where it ended with another code than the one given, if any.
    """

    def __init__(
        self, server, tiny, out, *overrides, script="train_grpo.py", config="tiny",
        code=None, **settings,
    ):  # fmt: skip
        self.out, self.overrides = out, overrides
        printed = next_printed(out)
        self.code = server.run(printed, script, *command_line(tiny, out, overrides, config), **settings)
        self.text = printed.read_text(errors="replace")
        assert code in (None, self.code), self.text


@pytest.fixture
def start(tiny, tmp_path, request):
    """start(nproc, "section.key=value", ..., script=..., out=...) → the Training; what is left is killed afterwards."""

    def run(nproc, *overrides, out=tmp_path / "out", **settings):
        training = Training(tiny, out, *overrides, nproc=nproc, **settings)
        request.addfinalizer(training.kill)
        return training

    return run


@pytest.fixture(scope="session")
def fork_server():
    """ForkServer for all tests."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def train_forked(fork_server, tiny, tmp_path):
    """train_forked(nproc, ..., code=0) → ForkedTraining: in seconds, for what does not depend on torchrun."""

    def run(nproc, *overrides, out=tmp_path / "out", **settings) -> ForkedTraining:
        return ForkedTraining(fork_server, tiny, out, *overrides, nproc=nproc, **settings)

    return run


@pytest.fixture
def offline(monkeypatch):
    """No name is looked for on the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def world(monkeypatch):
    """This process is a world of one rank, for what needs neither torchrun nor vLLM; see build_model."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    gc.freeze()  # so that the collection below looks at nothing older, which would take a second
    ranks.join_ranks(timeout_s=60)
    yield
    bridge.mpu.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()  # threads of a group that is still referred to wake a hundred times a second
    gc.unfreeze()


def build_model(cfg):
    """The chunks of a configuration's model, in a `world`; ends the layout of an earlier one."""
    bridge.mpu.destroy_model_parallel()
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    m = cfg.model
    dtype = bridge.DTYPES[m.dtype]
    return bridge.build_model(m.path, cfg.parallel, dtype, cfg.megatron, m.fp32_head, adapters=cfg.lora)


# ---------------------------------------------------------------- runs that many quick tests read

# The demo's reward, but that answers which begin with 0 or 1 fail.
SHAKY = """
import sys
sys.path.insert(0, "examples")
from tiny_reward import digits_in_place

def reward(text, answer, row):
    if text[:1] in ("0", "1"):
        raise KeyError(text[:1])
    return digits_in_place(text, answer, row)
"""
EXACT = (  # what makes a step easy to compute again
    "train.export_every=1", "train.warmup_steps=0", "train.lr=0.003", "algo.entropy_coef=0", "rollout.temperature=0.8",
    "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=48",
)  # fmt: skip
SHARED = (
    *EXACT, "train.steps=3", "train.epochs_per_step=2", "train.save_every=1", "train.keep_last=0",
    "algo.kl_coef=0.05", "algo.max_rounds=2", "rollout.prompts_per_step=5", "rollout.group_size=4",
    "reward.max_error_frac=0.9", "reward.by_source.even={custom: 2}",
    "train.eval_every=2", "eval.samples=4", "eval.pass_reward=0.3", "eval.max_new_tokens=6",
)  # fmt: skip


@pytest.fixture(scope="session")
def shared(fork_server, tiny, tmp_path_factory) -> ForkedTraining:
    """Three steps on two replicas with all that several tests look at: KL, two updates a step, groups sampled anew,
    rewards of two sources that fail now and then, evaluations, checkpoints and exports."""
    folder = tmp_path_factory.mktemp("shared")
    rows = [{**row, "source": "even"} if i % 2 == 0 else row for i, row in enumerate(read_rows(tiny / "train.jsonl"))]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "eval.jsonl", rows[:5])
    (folder / "shaky.py").write_text(SHAKY)
    return ForkedTraining(
        fork_server, tiny, folder / "out", *SHARED, f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}", f"reward.custom={folder / 'shaky.py'}:reward", nproc=2, code=0,
    )  # fmt: skip


def check_complete(out):
    """Checkpoints and exports under their final names have what their manifest or index says."""
    for folder in out.glob("checkpoints/step_??????"):
        for name, (size, sha) in json.loads((folder / "manifest.json").read_text()).items():
            data = (folder / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha), folder / name
    for folder in out.glob("hf/step_??????"):
        assert json.loads((folder / "config.json").read_text())
        files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for name in set(files.values()):
            with safe_open(folder / name, framework="numpy") as file:  # checks the length of the file
                assert set(file.keys()) == {key for key, holder in files.items() if holder == name}, folder / name


def check_state(server, folder, dtype, layouts: dict[str, dict], nproc, adapters=0):
    """tests/checkpoint_worker.py with the model in the folder finds the same state on all layouts."""
    printed = folder / "printed.txt"
    arguments = (str(folder / "model"), dtype, str(folder / "out"), json.dumps(layouts), str(adapters))
    code = server.run(printed, "tests/checkpoint_worker.py", *arguments, nproc=nproc)
    text = printed.read_text()
    found = [line for line in text.splitlines() if line.split(":")[0] in layouts]
    assert code == 0 and found == [f"{x}: same" for x in layouts], text


def ranges(path) -> list[str]:
    """The names of the ranges of steps and phases in a trace, in order; one comes before those that it contains."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [
        e for e in events if e.get("cat") == "user_annotation" and not e["name"].startswith(("gloo:", "Optimizer"))
    ]
    return [e["name"] for e in sorted(found, key=lambda e: (e["ts"], -e["dur"]))]


def megatron_fields() -> set[str]:
    """Names of the fields of Megatron's config classes."""
    return {field.name for kind in bridge.CONFIG_CLASSES for field in dataclasses.fields(kind)}


def legal_keys() -> set[str]:
    legal = {*KEYS, *(f"megatron.{key}" for key in megatron_fields())} - SECTIONS.keys()
    return legal | {f"rollout.vllm.{key}" for key in engine_options()}
