"""What the phases of a step take, and errors of memory on GPU and host.

There is no GPU here: what GPUs say is made up, in the words of torch 2.13 and vLLM 0.32.
"""

import pytest
import torch

from grpo.parts.base import processes
from grpo.run import clock
from grpo.run.preflight import costs, explain, machines
from tests.conftest import tiny_config

MB = 2**20


@pytest.fixture
def timer(world):
    """A clock of a world of one rank."""
    timer = clock.Clock(stall_timeout_s=0)
    yield timer
    timer.stop()


def test_memory_by_phase(timer):
    """300 MB for a moment in one phase, 200 MB for good in the next."""
    with timer("logprob"):
        pass
    with timer("rollout"):
        torch.ones(300 * MB // 4)
    with timer("train"):
        kept = torch.ones(200 * MB // 4)
    with timer("sync"):
        pass

    found = timer.memory.numbers()
    gb = {name.removeprefix("mem/").removesuffix("_gb"): value for name, value in found.items()}
    assert 0.25 < gb["rollout_peak"] - gb["logprob_peak"] < 0.35
    assert 0.17 < gb["train_peak"] - gb["logprob_peak"] < 0.23
    assert abs(gb["sync_peak"] - gb["train_peak"]) < 0.05  # the peak of the phase before is forgotten
    assert gb["peak"] >= gb["rollout_peak"] and abs(gb["host"] - gb["sync_peak"]) < 0.05 < gb["host_free"]
    assert gb["free_asleep"] is None and gb["reward_peak"] == 0 and len(kept)
    timer.start_step(1)
    assert timer.memory.numbers()["mem/rollout_peak_gb"] == 0


# ---------------------------------------------------------------- errors

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nsecond line")
FREE = "Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9)"
WAKE = "CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"
WARM = "CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs`"
TORCH_CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 B"


@pytest.mark.parametrize(
    "phase, error, said",
    [
        ("rollout", GPU, ["rollout.gpu_memory_utilization", "rollout.vllm.max_num_seqs", "rollout.tp", "Tried 2 GiB."]),
        ("train", GPU, ["train.max_tokens_per_micro_batch", "recompute_granularity=full", "parallel.cp"]),
        ("build", ValueError(FREE), ["memory for vLLM", "rollout.gpu_memory_utilization down", "3.1/79.2 GiB"]),
        ("build", RuntimeError(WARM), ["rollout.vllm.max_num_seqs down"]),
        ("sync", RuntimeError(WAKE), ["out of memory for vLLM: ", "rollout.gpu_memory_utilization down"]),
        ("build", MemoryError(), ["out of host memory", "MemoryError", "rollout.tp up", "Slurm: --mem"]),
        ("save", RuntimeError(TORCH_CPU), ["out of host memory, of which ", "reward.workers down"]),
    ],
)
def test_out_of_memory(phase, error, said):
    text = explain.out_of_memory(phase, error)
    assert "second line" not in text
    assert 3 <= len(text.partition("turn one of: ")[2].split("; ")) <= 5
    assert all(part in text for part in said), text


# ---------------------------------------------------------------- the host


def test_limits_of_a_container_or_job_count(tmp_path):
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/old\n0::/job/step\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "job/memory.max").write_text(f"{10 * MB}\n")
    (tmp_path / "job/memory.current").write_text(f"{8 * MB}\n")
    (tmp_path / "job/memory.stat").write_text(f"anon 1\ninactive_file {3 * MB}\n")
    assert processes.host_free_bytes(tmp_path, tmp_path / "own") == 5 * MB
    (tmp_path / "job/memory.current").write_text(f"{80 * MB}\n")
    assert processes.host_free_bytes(tmp_path, tmp_path / "own") == 0
    assert processes.host_free_bytes(tmp_path, tmp_path / "none") > 5 * MB


def test_host_memory_is_looked_at_before_the_build(monkeypatch, capfd):
    """7 B in bf16 on 8 ranks, vLLM with tp 2: 7 GB of weights asleep and 10.5 GB of a checkpoint a rank."""
    options = ["model.dtype=bf16", "parallel.tp=2", "parallel.pp=2", "rollout.tp=2", "rollout.sleep_level=1"]

    def host_bytes(*more, on_gpu=True):
        return costs.host_bytes(tiny_config(*options, *more), 7 * 10**9, 8, on_gpu)

    needed = host_bytes()
    assert needed == 7e9 + 10.5e9
    # Asleep at level 2 nothing is kept of vLLM; state and reference wait in pinned memory: 10.5 and 3.5 GB, twice.
    waiting = ["rollout.sleep_level=2", "train.offload=optimizer", "algo.kl_coef=0.1", "algo.reference_on=host"]
    assert host_bytes(*waiting) == 10.5e9 + 2 * (10.5e9 + 3.5e9)
    # Without a GPU: also weights and gradients of a quarter of the model, and the optimizer.
    assert host_bytes(on_gpu=False) == needed + 7e9 / 4 * (2 + 4) + 10.5e9
    monkeypatch.setattr(machines.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(machines.hf_folder, "count_weights", lambda path: 7 * 10**9)
    monkeypatch.setattr(costs, "host_bytes", lambda *_: int(needed))
    monkeypatch.setattr(processes, "host_free_bytes", lambda: 64e9)
    cfg = tiny_config(*options)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machines.check_host_memory(cfg)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    machines.check_host_memory(cfg)
    assert capfd.readouterr().err.startswith("warning: 8 rank(s) on this machine will hold about 130.39 GiB of host")


@pytest.mark.parametrize("more, a_weight", [(["algo.kl_coef=0.1"], 12 + 2), (["lora.rank=8"], 2)])
def test_what_a_run_saves(more, a_weight):
    """A checkpoint and an export; the reference is read from its folder, adapters are few."""
    assert costs.disk_bytes(tiny_config("model.dtype=bf16", *more), 10**9) == a_weight * 10**9
