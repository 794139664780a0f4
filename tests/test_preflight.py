"""The checks before the start, and what running out of memory means."""

from pathlib import Path

import pytest
import torch

from support.check import preflight


def test_machine(tmp_path):
    preflight.check_shared_memory(1)
    preflight.check_disk(tmp_path / "not/yet", 1)
    preflight.check_writable(tmp_path / "not/yet")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"/dev/shm has .* GiB free, 1024\.00 GiB .*docker run --shm-size"):
        preflight.check_shared_memory(2**40)
    with pytest.raises(ValueError, match=r"output_dir=.*not/yet: .*train.save_every\) or .*train.keep_last"):
        preflight.check_disk(tmp_path / "not/yet", 2**60)
    with pytest.raises(ValueError, match=r"output_dir=/proc/out: cannot write in /proc "):
        preflight.check_writable(Path("/proc/out"))


@pytest.mark.parametrize(
    ("phase", "keys"),
    [
        ("rollout", ["rollout.gpu_memory_utilization", "rollout.vllm.max_num_seqs", "rollout.tp"]),
        ("train", ["train.max_tokens_per_micro_batch", "megatron.recompute_granularity=full", "parallel.cp"]),
        ("logprob", ["train.logprob_max_tokens_per_micro_batch", "parallel.tp"]),
        ("sync", ["rollout.sync_bucket_mb"]),
        ("build", ["parallel.pp"]),
    ],
)
def test_out_of_memory(phase, keys):
    text = preflight.explain_out_of_memory(phase, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"))
    assert f"in the phase {phase}" in text and "Tried 2 GiB." in text and "more" not in text
    assert all(key in text for key in keys)
