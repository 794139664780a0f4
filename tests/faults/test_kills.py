"""Kills at random moments change nothing (docs/dev/faults.md); --kills 100 makes a longer series."""

import contextlib
import os
import random
import shutil
import signal
import statistics
import time

import pytest

from tests.conftest import check_complete

STEPS = 8
JOB = (
    "train.save_every=1", "train.export_every=2", "train.keep_last=2", f"train.steps={STEPS}", "resume=auto",
    "algo.kl_coef=0.01", "train.updates_per_step=2",
)  # fmt: skip


def result_of(job):
    """All that must not depend on kills."""
    files = [*job.out.glob("hf/step_*/*.safetensors"), *job.out.glob(f"checkpoints/step_{STEPS:06d}/*.safetensors")]
    return job.result(STEPS) | {str(path.relative_to(job.out)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_kills_change_nothing(start, train_forked, tmp_path, request):
    """Of torchrun and all ranks at once, or of one rank; the job then goes on to its end."""
    rng, killed = random.Random(13), 0
    undisturbed = train_forked(2, *JOB, out=tmp_path / "undisturbed", code=0)
    expected = result_of(undisturbed)
    step_s = statistics.median(line["time/step"] for line in undisturbed.metrics)

    runs = request.config.getoption("--kills")
    for number in range(runs):
        out = tmp_path / f"run_{number:03d}"
        job = start(2, *JOB, out=out)
        job.wait_for("resume: ")
        ranks = list(job.ranks().values())
        job.wait_for(rf"\] +{rng.randint(1, STEPS - 1)}/{STEPS} ")
        time.sleep(rng.uniform(0, step_s))
        for pid in [job.process.pid, *ranks] if rng.random() < 0.7 else [rng.choice(ranks)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        killed += job.end() != 0
        check_complete(out)
        found = result_of(train_forked(2, *JOB, out=out, code=0))
        assert not [name for name in expected | found if found.get(name) != expected.get(name)], out
        shutil.rmtree(out)

    assert killed > runs / 2  # came before the end
