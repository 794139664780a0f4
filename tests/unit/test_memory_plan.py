"""The plan of memory: what is held, to the byte, against real ranks; transient memory against an update on a CPU."""

from dataclasses import replace

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
from grpo.parts.base import ranks
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.read_config import load_config
from grpo.parts.model import layers
from grpo.run.preflight import memory_plan as plan
from grpo.step.packing import to_micro_batches
from tests import hub_models
from tests.conftest import REPO, build_model, tiny_config
from tests.layout_worker import KINDS, held_bytes
from tests.oracle.layouts import FULL

QWEN = str(REPO / "configs/qwen7b.yaml")
OFFLOAD = "megatron.optimizer_cpu_offload=true"
PRECISE = "megatron.use_precision_aware_optimizer=true"

# fp32, on 7 layouts in `make test` and on all of them in `make test-all`: tests/oracle/test_layouts.py

BF16 = {
    "gpu": [], "host": [OFFLOAD], "precise": [OFFLOAD, PRECISE], "buckets": ["megatron.bucket_size=20000"],
    "overlap": ["megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true"],
    "bf16 gradients": ["megatron.grad_reduce_in_fp32=false"],
    "wide buckets": ["megatron.pad_buckets_for_high_nccl_busbw=true"],
}  # fmt: skip


def test_the_count_is_that_of_a_real_rank_in_bf16(world, tiny):
    options = [f"model.path={tiny / 'model'}", "data.train=unused", "model.dtype=bf16", "algo.kl_coef=0.1"]

    found = {}
    for name, more in BF16.items():
        cfg = tiny_config(*options, *more)
        model = build_model(cfg)
        found[name] = held_bytes(model, bridge.build_optimizer(model, cfg.train, cfg.megatron))
    bridge.mpu.destroy_model_parallel()
    train_grpo.dist.destroy_process_group()

    for name, more in BF16.items():
        gpu = plan.count(tiny_config(*options, *more), 1, 0).gpu
        assert [gpu.get(kind, 0) for kind in KINDS] == found[name], name

    weights, gradients, optimizer, reference = found["gpu"]
    padded, real = weights // 2, reference // 2
    assert gradients == 4 * padded and optimizer == 12 * real and padded - real < 128  # worked by hand
    assert found["host"][2] == 4 * real and found["precise"][2] == 0
    ranks.join_ranks(timeout_s=60)  # for the fixture, which ends it


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


def peaks(cfg, prompt, answer):
    """Bytes of scoring and of an update beyond weights and gradients, of one row: four answers to a prompt."""
    model = build_model(cfg)
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    weights, gradients, *_ = held_bytes(model, optimizer)

    ids = np.random.default_rng(0).integers(2, 4000, (4, answer)).tolist()
    samples = [train_grpo.Sample(n, [1] * prompt, ids[n], [-1.0] * answer, True, "", "") for n in range(4)]
    batch = train_grpo.flatten(samples)

    with Live() as scoring:
        old_logp = train_grpo.score(model, batch, cfg)
    batch = replace(
        batch, weights=batch.mask / batch.mask.sum(), advantages=torch.ones_like(old_logp), old_logp=old_logp
    )

    (row,) = to_micro_batches(batch, [0, 1, 2, 3], 512, cfg)
    with Live() as training:
        train_grpo.forward_backward(model, optimizer, [row], cfg)
    return scoring.peak - weights, training.peak - weights - gradients


SLOW = [("qwen2", FULL), ("qwen3_moe", [])]


@pytest.mark.parametrize(
    "family, more", [("qwen2", []), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_formulas_are_near_a_real_update(world, tmp_path, monkeypatch, family, more):
    """One stage on a CPU, a vocabulary of 4,096: the peak is while the last logits and all activations are there."""
    alphabet = make_tiny.char_tokenizer("".join(chr(0x4E00 + n) for n in range(4094)))
    make_tiny.save_model(tmp_path, alphabet, family, tied=False, hidden=256, layers=6, ffn=3)
    rows = [f"train.{kind}max_tokens_per_micro_batch=512" for kind in ("", "logprob_")]
    cfg = tiny_config(f"model.path={tmp_path}", "data.train=unused", "algo.entropy_coef=0.1", *rows, *more)
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    monkeypatch.setattr(layers, "BLOCK", 1 << 30)  # all logits at a time, as on a GPU
    scoring, training = peaks(cfg, prompt=1, answer=128)
    planned = plan.activation_bytes(hf, cfg, 0)[0] + plan.head_bytes(hf, cfg, 512)
    assert planned == pytest.approx(training, rel=0.1)
    assert plan.head_bytes(hf, cfg, 512) == pytest.approx(scoring, rel=0.1)
    shared = peaks(cfg, prompt=160, answer=72)
    assert np.less(shared, (scoring, training)).all()  # copies are within


def test_what_a_compared_model_needs_by_hand(tmp_path):
    """On 4 ranks, 2 replicas of tp 2: of 4 prompts with 4 answers, in 2 updates, a replica has 4 answers of 10 tokens
    at a time; in bf16."""
    for name, hidden in (("model", 64), ("teacher", 128)):
        make_tiny.save_model(tmp_path / name, make_tiny.char_tokenizer("0123456789>+-="), hidden=hidden)  # 16 tokens
    cfg = tiny_config(
        f"model.path={tmp_path / 'model'}", "data.train=unused", "model.dtype=bf16", "parallel.tp=2",
        "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=10", "train.updates_per_step=2",
        "algo.kl=full", "algo.kl_coef=0.1", f"algo.teacher={tmp_path / 'teacher'}", "algo.teacher_kl=forward",
    )  # fmt: skip
    reference, teacher = (4 * 10 * 64 * 2, 8 * 64 * 2), (4 * 10 * 128 * 2, 8 * 128 * 2)
    assert plan.compared_bytes(cfg, 4) == [reference, teacher]

    # Rows of 4 hidden states a token, and LOGIT bytes for each logit of three models.
    hf = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert plan.head_bytes(hf, cfg, 6, others=2) == 6 * 4 * 64 * 2 + 3 * 6 * 8 * plan.LOGIT


def on_gpu(*keys):
    """{phase: {kind of weights or state: bytes}} of a plan."""
    phases = plan.plan(load_config(QWEN, [*keys]), 8, 80 * plan.GB).phases
    return {phase: {k: parts[k] for k in (*KINDS, "teacher") if k in parts} for phase, parts in phases.items()}


def test_what_leaves_the_gpu(tmp_path):
    """From a push to the next update; the optimizer's state comes back when the activations are gone."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)

    def letters(*more):
        found = on_gpu(f"model.path={folder}", "train.updates_per_step=1", *more)
        assert [*found] == ["build", "rollout", "logprob", "train", "sync", "save"]
        return ["".join(kind[0] for kind in parts) for parts in found.values()]

    assert letters("train.offload=none") == ["wgor"] * 6
    assert letters() == ["wgor", "wor", "wor", "wgor", "wor", "wor"]
    moving = ("train.offload=optimizer", "algo.reference_on=host", "train.max_tokens_per_micro_batch=98304")
    assert letters(*moving) == ["wgo", "w", "wr", "wg", "w", "w"]
    assert letters("train.offload=optimizer")[3] == "wgor"  # the update takes more than the activations


@pytest.fixture
def kept(tmp_path):
    """kept("section.key=value", ..., stage=...) → elements that a stage of the 0.5B keeps of each token of a row."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    hf = transformers.AutoConfig.from_pretrained(folder)

    def of(*keys, stage=0):
        cfg = load_config(str(REPO / "configs/qwen2.5_0.5b_1gpu.yaml"), [f"model.path={folder}", *keys])
        return plan.activation_bytes(hf, cfg, stage)[0] / (2 * cfg.train.max_tokens_per_micro_batch)

    return of


def test_rows_under_way(kept):
    """Of 4 stages with 2 chunks each: 4, 3, 2, 1 rows without chunks; 11, 9, 7, 5 halves of one with them."""
    one = kept("parallel.pp=4", stage=3)
    for vpp, rows in ((1, [4, 3, 2, 1]), (2, [5.5, 4.5, 3.5, 2.5])):
        assert [kept("parallel.pp=4", f"parallel.vpp={vpp}", stage=stage) / one for stage in range(4)] == rows
    uneven = ("parallel.pp=4", "megatron.num_layers_in_first_pipeline_stage=3")  # 3, 7, 7 and 7 layers
    assert [kept(*uneven, stage=stage) * 6 / one for stage in range(4)] == [4 * 3, 3 * 7, 2 * 7, 7]


def test_recomputed_layers_keep_their_input(kept):
    """Of 24 layers: all, and in groups of eight, worked by hand."""
    assert kept() == 24 * (4 * 896 + 3 * 896 + 3 * 128 + 3 * 4864)
    assert kept(*FULL, "megatron.recompute_num_layers=8") == 3 * 896


def test_states_of_linear_attention_in_vllms_cache(tmp_path):
    """vLLM logs 528 tokens for a block of this shape: as many as hold a state, in multiples of 16."""
    folder = hub_models.model_folder("Qwen/Qwen3.5-4B", tmp_path)
    cfg = load_config(str(REPO / "configs/qwen3.5_4b_lora_1gpu.yaml"), [f"model.path={folder}"])
    token, state = 2 * 4 * 256 * 2, 3 * (2 * 2048 + 4096) * 2 + 32 * 128 * 128 * 4  # bytes of one layer
    block = 8 * 528 * token  # of the layers with attention
    assert 527 * token - 16 * token < state <= 528 * token
    weights = plan.count_by_config(str(folder))
    found = plan.plan_sampling(read_config(folder), cfg, weights, 80 * plan.GB, 512)
    assert found.sequences == found.cache // block // 5  # 1,024 tokens take two blocks, states of 24 layers three
    assert plan.report(cfg, 1, 80) is None


def test_config_json_alone_is_enough_for_a_plan(tmp_path, capfd, offline):
    """An error names what else is missing, after the plan."""
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    given = ["--config", QWEN, "--world-size", "8", f"model.path={folder}"]
    assert train_grpo.main([*given, "--dry-run", "--gpu-memory-gb", "80"]) == 2
    out, err = capfd.readouterr()
    assert "error: data.train: hf://" in err
    assert out.startswith("memory:  of a GPU of 80.0 GB (10⁹ bytes)")
    assert "optimizer 11.4 + reference 3.8 + vLLM 48.0" in out and "warning" not in out
    assert train_grpo.main([*given, "--dry-run", "--gpu-memory-gb=nan"]) == 2
    assert "--gpu-memory-gb=nan: must be above 0" in capfd.readouterr().err


def test_what_does_not_fit_is_told_with_what_to_turn(tmp_path):
    folder = hub_models.model_folder("Qwen/Qwen2.5-7B-Instruct", tmp_path)

    def shortage(share, *more):
        keys = [f"model.path={folder}", f"rollout.gpu_memory_utilization={share}", *more]
        return plan.report(load_config(QWEN, keys), 8, 80)

    first, turn, save, again = shortage("0.8").splitlines()
    assert first == "rollout does not fit a GPU of 80.0 GB, by 11.0 GB" and save.startswith("save does not fit")
    assert all("turn one of " in line and "rollout.gpu_memory_utilization down" in line for line in (turn, again))
    assert ", by 19.0 GB" in shortage("0.8", "train.gpu_reserve=0.2")
    assert "no room for one sample of 2048 tokens" in shortage("0.1")
