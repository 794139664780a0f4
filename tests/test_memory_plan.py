"""The plan of memory: what is held, to the byte, against real ranks; transient memory against an update on a CPU."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import make_tiny
import numpy as np
import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_bridge as bridge
import train_grpo
from benchmarks import works
from config import UserError
from support.base import ranks
from support.base.read_config import load_config, override
from support.check import memory_formulas, memory_plan
from support.check.memory_count import Held, count
from support.run import logs
from support.step.packing import to_micro_batches
from tests import hub_models
from tests.conftest import REPO
from tests.memory_worker import held_bytes
from tests.processes import Torchrun

TINY = str(REPO / "configs/tiny.yaml")
GPU = 80 * memory_plan.GB
FULL = [f"megatron.recompute_{k}" for k in ("granularity=full", "method=uniform", "num_layers=1")]
OFFLOAD = "megatron.optimizer_cpu_offload=true"
PRECISE = "megatron.use_precision_aware_optimizer=true"


KINDS = ("weights", "gradients", "optimizer", "reference")
SETS = ("reference", "past", "teacher")


def state_bytes(held: Held) -> list[int]:
    return [held.gpu.get(kind, 0) for kind in KINDS]


# ---------------------------------------------------------------- what is held
# fp32, on 9 layouts in `make test` and on all of them in `make test-all`: tests/test_layouts.py


def test_the_count_is_that_of_a_real_rank_in_bf16(world, tiny):
    options = [f"model.path={tiny / 'model'}", "data.train=unused", "model.dtype=bf16", "algo.kl_coef=0.1"]
    found = {}
    for name, more in {"gpu": [], "host": [OFFLOAD], "precise": [OFFLOAD, PRECISE]}.items():
        cfg = load_config(TINY, [*options, *more])
        bridge.init_model_parallel(cfg.parallel, cfg.seed)
        model = bridge.build_model(cfg.model.path, cfg.parallel, torch.bfloat16, cfg.megatron)
        found[name] = held_bytes(model, bridge.build_optimizer(model, cfg.train, cfg.megatron))
        bridge.mpu.destroy_model_parallel()
    train_grpo.dist.destroy_process_group()
    for name, more in {"gpu": [], "host": [OFFLOAD], "precise": [OFFLOAD, PRECISE]}.items():
        assert state_bytes(count(load_config(TINY, [*options, *more]), 1, 0)) == found[name], name
    weights, gradients, optimizer, reference = found["gpu"]
    padded, real = weights // 2, reference // 2
    assert gradients == 4 * padded and optimizer == 12 * real and padded - real < 128  # worked by hand
    assert found["host"][2] == 4 * real and found["precise"][2] == 0
    ranks.init_distributed(timeout_s=60)  # for the fixture, which ends it


LAYOUTS = {
    "qwen2": {
        "DP4": [], "TP2·PP2": ["parallel.tp=2", "parallel.pp=2"], "CP2": ["parallel.cp=2"],
        "PP2·VPP2": ["parallel.pp=2", "parallel.vpp=2"], "PP4": ["parallel.pp=4"],
        "buckets": ["megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true",
                    "megatron.bucket_size=50000"],
        "wide buckets": ["megatron.pad_buckets_for_high_nccl_busbw=true"],
        "bf16 gradients": ["megatron.grad_reduce_in_fp32=false"], "host": [OFFLOAD], "precise": [OFFLOAD, PRECISE],
    },
    "qwen3_moe": {
        "TP2": ["parallel.tp=2"], "EP2": ["parallel.ep=2"], "EP4": ["parallel.ep=4"],
        "EP2·TP2·ETP2": ["parallel.ep=2", "parallel.tp=2", "parallel.etp=2"],
        "PP2·EP2": ["parallel.pp=2", "parallel.ep=2"], "CP2·EP2": ["parallel.cp=2", "parallel.ep=2"],
    },
}  # fmt: skip


@pytest.mark.slow
def test_the_counts_are_those_of_4_ranks(tmp_path):
    """In bf16, embeddings tied and not; and there is nothing else: the count has all tensors that a rank has made."""
    cases = {}
    for family, tied in (("qwen2", True), ("qwen2", False), ("qwen3_moe", False)):
        folder = tmp_path / f"{family}-{tied}"
        alphabet = make_tiny.char_tokenizer("0123456789>+-=ab")
        make_tiny.save_model(folder, alphabet, family, tied=tied, hidden=128, layers=4, ffn=2)
        options = [f"model.path={folder}", "data.train=unused", "model.dtype=bf16", "algo.kl_coef=0.1"]
        cases |= {f"{folder.name} {name}": [*options, *layout] for name, layout in LAYOUTS[family].items()}
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(json.dumps({"out": str(out), "layouts": cases}))
    worker = Torchrun(tmp_path / "printed.txt", "tests/memory_worker.py", str(plan), nproc=4)
    try:
        assert worker.end(900) == 0, worker.text
    finally:
        worker.kill()
    for name, found in json.loads(out.read_text()).items():
        for rank, (*held, new) in enumerate(found):
            counted = count(load_config(TINY, cases[name]), 4, rank)
            assert state_bytes(counted) == held, (name, rank)
            assert OFFLOAD in cases[name] or 0 <= new - sum(held[:3]) < 20_000, (name, rank)


@pytest.mark.parametrize(("size", "layout"), [("0.5B", (8, 2, 2)), ("30B-A3B", (64, 2, 2, 32))])
def test_the_whole_model_is_counted_once(tmp_path, size, layout):
    """The stages' weights add up to those of the model's card, tied embeddings included."""
    gpus, tp, pp, *ep = layout
    name = next(name for name in hub_models.SHAPES if f"-{size}" in name)
    keys = [f"model.path={hub_models.model_folder(name, tmp_path)}", f"parallel.tp={tp}", f"parallel.pp={pp}"]
    cfg = load_config(str(REPO / "configs/qwen7b.yaml"), [*keys, f"parallel.ep={ep[0] if ep else 1}"])
    whole = [count(cfg, gpus, stage * gpus // pp).stage_weights for stage in range(pp)]
    assert sum(whole) == works.count(works.MODELS[hub_models.SHAPES[name]])


# ---------------------------------------------------------------- transient memory


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have returned and that are still there."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.sizes[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum({ref.cdata: size for ref, size in self.sizes.items()}.values()))
        return out


def peaks(cfg) -> tuple[int, int]:
    """Bytes of scoring and of an update beyond weights and gradients, of one row of 512 tokens."""
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    model = bridge.build_model(cfg.model.path, cfg.parallel, torch.float32, cfg.megatron)
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    weights, gradients, *_ = held_bytes(model, optimizer)
    ids = np.random.default_rng(0).integers(2, 4000, (4, 128)).tolist()
    samples = [train_grpo.Sample(n, [1], ids[n], [-1.0] * 128, True, "", "") for n in range(4)]
    batch = train_grpo.flatten(samples)
    with Live() as scoring:
        old_logp = train_grpo.score(model, batch, cfg)
    weights_F = train_grpo.loss_weights(batch.trained, batch.seq_id, [0, 1, 2, 3], "token_mean", 128)
    batch = replace(batch, weights=weights_F, advantages=torch.ones(512), old_logp=old_logp)
    (row,) = to_micro_batches(batch, [0, 1, 2, 3], 512, cfg)
    with Live() as training:
        train_grpo.forward_backward(model, optimizer, [row], cfg)
    bridge.mpu.destroy_model_parallel()
    return scoring.peak - weights, training.peak - weights - gradients


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", []),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("qwen2", FULL), ("qwen3", []), ("qwen3_moe", []), ("qwen2_moe", FULL))
        ),
    ],
)
def test_the_formulas_are_near_a_real_update(world, tmp_path, family, more):
    """One stage on a CPU, a vocabulary of 4,096: the peak is while the last logits and all activations are there."""
    alphabet = make_tiny.char_tokenizer("".join(chr(0x4E00 + n) for n in range(4094)))
    make_tiny.save_model(tmp_path, alphabet, family, tied=False, hidden=256, layers=6, ffn=3)
    rows = [f"train.{kind}max_tokens_per_micro_batch=512" for kind in ("", "logprob_")]
    cfg = load_config(TINY, [f"model.path={tmp_path}", "data.train=unused", "algo.entropy_coef=0.1", *rows, *more])
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    scoring, training = peaks(cfg)
    kept, _ = memory_formulas.activation_bytes(hf, cfg, 0, 1)
    assert kept + memory_formulas.head_bytes(hf, cfg, 512, memory_formulas.LOGIT_TRAIN) == pytest.approx(
        training, rel=0.1
    )
    assert memory_formulas.head_bytes(hf, cfg, 512, memory_formulas.LOGIT_SCORE) == pytest.approx(scoring, rel=0.1)


def test_what_leaves_the_gpu(tmp_path):
    """From a push to the next update; the optimizer's state comes back when the activations are gone."""
    options = [
        f"model.path={hub_models.model_folder('Qwen/Qwen2.5-7B-Instruct', tmp_path)}",
        "train.updates_per_step=1",
    ]

    def on_gpu(*more: str) -> dict[str, str]:
        found = memory_plan.plan(load_config(str(REPO / "configs/qwen7b.yaml"), [*options, *more]), 8, GPU)
        return {phase: "".join(kind[0] for kind in KINDS if kind in parts) for phase, parts in found.phases.items()}

    phases = ("build", "rollout", "logprob", "train", "sync", "save")
    assert [*on_gpu("train.offload=none").values()] == ["wgor"] * 6
    assert on_gpu() == dict(zip(phases, ["wgor", "wor", "wor", "wgor", "wor", "wor"], strict=True))
    away = on_gpu("train.offload=optimizer", "algo.reference_on=host", "train.max_tokens_per_micro_batch=98304")
    assert away == dict(zip(phases, ["wgo", "w", "wr", "wg", "w", "w"], strict=True))
    assert on_gpu("train.offload=optimizer")["train"] == "wgor"  # the update takes more than the activations


def test_a_reference_and_a_teacher(tmp_path):
    """Where they wait, and that of those on the host the largest alone comes for the log-probs."""
    small, large = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    folders = {name: hub_models.model_folder(name, tmp_path / name.rpartition("/")[2]) for name in (small, large)}
    keys = [f"model.path={folders[large]}", f"algo.teacher={folders[small]}"]
    size = {name: 2 * works.count(works.MODELS[hub_models.SHAPES[name]]) for name in folders}

    def on_gpu(*more: str) -> dict[str, dict[str, int]]:
        cfg = load_config(str(REPO / "configs/qwen7b.yaml"), [*keys, "parallel.tp=1", "parallel.pp=1", *more])
        phases = memory_plan.plan(cfg, 8, GPU).phases
        return {phase: {kind: parts[kind] for kind in SETS if kind in parts} for phase, parts in phases.items()}

    everywhere = {"reference": size[large], "teacher": size[small]}
    assert all(found == everywhere for found in on_gpu().values())
    away = on_gpu("algo.reference_on=host")
    assert {phase: [*found.values()] for phase, found in away.items() if found} == {"logprob": [size[large]]}
    assert on_gpu("algo.reference_on=host", "algo.kl_coef=0")["logprob"] == {"teacher": size[small]}


def test_rows_under_way(tmp_path):
    """Of 4 stages with 2 chunks each: 4, 3, 2, 1 rows without chunks; 11, 9, 7, 5 halves of one with them."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    options = [f"model.path={folder}", "parallel.tp=1", "parallel.pp=4"]
    hf = transformers.AutoConfig.from_pretrained(folder)

    def kept(vpp: int, rows: int) -> list[float]:
        cfg = load_config(str(REPO / "configs/qwen7b.yaml"), [*options, f"parallel.vpp={vpp}"])
        return [memory_formulas.activation_bytes(hf, cfg, stage, rows)[0] for stage in range(4)]

    one = kept(1, 1)[0]
    assert [bytes_ / one for bytes_ in kept(1, 99)] == [4, 3, 2, 1] and kept(1, 2) == [2 * one, 2 * one, 2 * one, one]
    assert [bytes_ / one for bytes_ in kept(2, 99)] == [5.5, 4.5, 3.5, 2.5] and kept(2, 2)[0] == 2 * one


# ---------------------------------------------------------------- what it says


def dry_run(capfd, folder, *options: str) -> tuple[int, str, str]:
    arguments = [
        "--config",
        str(REPO / "configs/qwen7b.yaml"),
        "--dry-run",
        "--world-size",
        "8",
        f"model.path={folder}",
    ]
    code = train_grpo.main([*arguments, *options])
    return code, *capfd.readouterr()


def test_config_json_alone_is_enough_for_a_plan(tmp_path, capfd, offline):
    """What else is missing is told after it."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    code, out, err = dry_run(capfd, folder, "--gpu-memory-gb", "80")
    assert code == 2 and "error: data.train: hf://" in err
    assert (
        out.startswith("memory:  of a GPU of 80.0 GB (10⁹ bytes)")
        and "optimizer 11.4 + reference 3.8 + vLLM 48.0" in out
    )
    assert "warning" not in out
    for wrong in ("0", "-1", "nan", "inf"):
        code, out, err = dry_run(capfd, folder, f"--gpu-memory-gb={wrong}")
        assert code == 2 and not out and f"--gpu-memory-gb={float(wrong)}: must be above 0" in err


def test_debug_does_not_reach_into_the_fake_process_group(tmp_path):
    """Torch's DETAIL wraps every process group in one that connects."""
    level, hook = torch.distributed.get_debug_level(), sys.excepthook
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        folder = hub_models.model_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
        count(load_config(str(REPO / "configs/qwen7b.yaml"), [f"model.path={folder}"]), 8, 7)
        assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL and sys.excepthook is hook
    finally:
        torch.distributed.set_debug_level(level)


def test_what_does_not_fit_is_told_and_what_helps_does(tmp_path):
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    options = [f"model.path={folder}", "rollout.gpu_memory_utilization=0.8"]
    cfg = load_config(str(REPO / "configs/qwen7b.yaml"), options)
    found = memory_plan.plan(cfg, 8, GPU)
    text = memory_plan.describe(cfg, 8, found)
    over = found.total("save") - GPU
    assert f"does not fit a GPU of 80.0 GB: rollout by 11.0 GB, save by {over / 1e9:.1f} GB" in text
    (short,) = memory_plan.shortages(cfg, replace(found, gpu=found.total("save") - 10**6))
    assert short.endswith("save by less than 0.1 GB")
    helps = [line.split(": ") for line in text.splitlines() if line.endswith(", fits")]
    assert len(helps) >= 3 and [found.utilization] == [
        float(keys.partition("=")[2]) for keys, _ in helps if keys.startswith("    rollout.gpu_memory_utilization")
    ]
    for keys, less in helps:
        mended = memory_plan.plan(load_config(str(REPO / "configs/qwen7b.yaml"), [*options, *keys.split()]), 8, GPU)
        assert mended.fits and found.total("save") - mended.total("save") == pytest.approx(
            float(less.split()[0]) * 1e9, abs=6e7
        )
    more = [*options, f"rollout.gpu_memory_utilization={found.utilization + 0.01:.2f}"]
    assert not memory_plan.plan(load_config(str(REPO / "configs/qwen7b.yaml"), more), 8, GPU).fits


def test_the_plan_tries_every_remedy_for_memory(tmp_path):
    """What an error of memory would name, as keys with values; a key that is no number of the plan is left out."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    cfg = load_config(str(REPO / "configs/qwen7b.yaml"), [f"model.path={folder}"])
    found = {key: value for keys in memory_plan.levers(cfg) for key, value in keys.items()}
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    assert found == {
        "parallel.tp": 4, "parallel.pp": 4, "parallel.cp": 2, "parallel.ep": 2, "rollout.tp": 2 * cfg.rollout.tp,
        "train.max_tokens_per_micro_batch": max(cfg.train.max_tokens_per_micro_batch // 2, longest),
        "train.logprob_max_tokens_per_micro_batch": max(cfg.train.logprob_max_tokens_per_micro_batch // 2, longest),
        "rollout.sync_bucket_mb": cfg.rollout.sync_bucket_mb // 2, "train.offload": "optimizer",
        "algo.reference_on": "host", "megatron.recompute_granularity": "full", "megatron.recompute_method": "uniform",
        "megatron.recompute_num_layers": 1, "megatron.optimizer_cpu_offload": True,
        "megatron.use_precision_aware_optimizer": True,
    }  # fmt: skip


def test_a_cache_without_room_for_one_sample(tmp_path):
    folder = hub_models.model_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    path = str(REPO / "configs/qwen2.5_0.5b_1gpu.yaml")
    cfg = load_config(path, [f"model.path={folder}", "rollout.gpu_memory_utilization=0.03"])
    text = memory_plan.describe(cfg, 1, memory_plan.plan(cfg, 1, GPU))
    assert "warning: vLLM's share of the GPU has no room for one sample of 1024 tokens" in text
    assert text.endswith("    rollout.gpu_memory_utilization=0.8: fits") and "does not fit" not in text


def test_the_size_of_a_gpu(monkeypatch):
    assert memory_plan.gpu_bytes(None) == GPU and memory_plan.gpu_bytes(24) == 24 * 10**9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("GPU", (), {"total_memory": 150 * 2**30}))
    assert memory_plan.gpu_bytes(None) == 150 * 2**30 and memory_plan.gpu_bytes(80) == GPU
    with pytest.raises(UserError, match="--gpu-memory-gb=-1: must be above 0"):
        memory_plan.gpu_bytes(-1)


def cpu_seconds(*arguments) -> tuple[float, subprocess.CompletedProcess]:
    """What a Python process with one thread takes of a core, and what it printed."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = os.times()
    done = subprocess.run([sys.executable, *arguments], cwd=REPO, env=settings, capture_output=True, text=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, done


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), [("qwen7b", 8), ("qwen3_235b_a22b", 64)])
def test_a_plan_takes_less_than_its_imports(tmp_path, config, ranks):
    """Not in seconds: the imports of the libraries alone take 5 to 11 of them, as the machine is."""
    path = REPO / f"configs/{config}.yaml"
    folder = hub_models.model_folder(load_config(str(path), []).model.path, tmp_path)
    imports, _ = cpu_seconds("-c", "import torch, transformers, datasets, megatron.core.models.gpt")
    dry_run = ["train_grpo.py", "--config", path, "--dry-run", "--world-size", str(ranks), f"model.path={folder}"]
    seconds, done = cpu_seconds(*dry_run)
    assert done.stdout.startswith("memory: ") and done.returncode == 2
    assert seconds < 2 * imports


# ---------------------------------------------------------------- against a step


def test_tables_of_penalties_sleep_with_the_weights(tmp_path, monkeypatch):
    """Worked by hand: 1,024 sequences, 151,936 tokens, 4 bytes each and a bit."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    cfg = load_config(str(REPO / "configs/qwen2.5_0.5b_1gpu.yaml"), [f"model.path={folder}"])
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    tables = 4 * 1024 * (151936 + 4748)
    two = memory_plan.plan(cfg, 1, GPU)
    assert two.sampling.tables == tables
    assert two.phases["sync"]["vLLM"] == two.sampling.weights + two.sampling.loading + tables
    one = memory_plan.plan(override(cfg, {"rollout.sleep_level": 1}), 1, GPU, two.held)
    assert one.host == two.host + 2 * 494032768 + tables
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    old = memory_plan.plan(cfg, 1, GPU, two.held)
    assert old.sampling.tables == 0 and old.sampling.cache == two.sampling.cache + tables


@pytest.mark.parametrize(
    ("asleep", "train", "said"),
    [
        (10.0, 34.5, None),
        (10.0, 30.0, None),
        (14.0, 38.0, "51.5 GB of a GPU of 107.4, .*: add the"),
        (5.0, 25.0, "there is room"),
    ],
)
def test_a_step_that_parts_from_the_plan_is_told(asleep, train, said):
    """In GiB: 40 planned of 100; what is in use while vLLM sleeps, and the peak of training over the 4 held then."""
    planned = memory_plan.Plan(100 << 30, {}, {"train": {"all": 40 << 30}}, {}, None, 0)
    metrics = {"mem/free_asleep_gb": 100 - asleep, "mem/train_peak_gb": train, "mem/logprob_gb": 4.0}
    found = memory_plan.compare(planned, metrics)
    assert (found is None) == (said is None) and (said is None or re.search(said, found)), found
    assert memory_plan.compare(planned, {**metrics, "mem/free_asleep_gb": None}) is None


def test_the_first_step_alone_is_held_against_the_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs.dist, "get_rank", lambda: 0)
    planned = memory_plan.Plan(100 << 30, {}, {"train": {"all": 40 << 30}}, {}, None, 0)
    inputs = SimpleNamespace(tokenizer=None, done=0, planned=planned, prompts=[None])
    rollouts = SimpleNamespace(write=lambda *_: None)
    log = logs.Log(load_config(TINY, [f"output_dir={tmp_path}"]), inputs, rollouts, clock=None)
    measured = {"mem/free_asleep_gb": 86.0, "mem/train_peak_gb": 38.0, "mem/logprob_gb": 4.0}
    for step in (1, 2):
        log.write(defaultdict(lambda: 1.0, {**measured, "step": step}), [])
    assert capsys.readouterr().out.count("hint: training took 51.5 GB of a GPU") == 1
