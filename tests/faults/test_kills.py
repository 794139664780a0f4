"""Kills at random moments change nothing (docs/dev/faults.md); --kills 100 makes a longer series."""

import collections
import json
import random
import re
import shutil

import pytest

from tests.conftest import REPO, Outputs, check_complete

STEPS = 5
JOB = (
    "train.save_every=1", "train.export_every=2", "train.keep_last=2", f"train.steps={STEPS}", "resume=auto",
    "algo.kl_coef=0.01", "train.updates_per_step=2",
)  # fmt: skip
TIMES = {"rollout": STEPS, "update": 2 * STEPS, "push": STEPS + 1, "save": 2 * STEPS, "export": 3}  # in one run


def result_of(job: Outputs) -> dict:
    """All that must not depend on kills."""
    files = [*job.out.glob("hf/step_*/*.safetensors"), *job.out.glob(f"checkpoints/step_{STEPS:06d}/*.safetensors")]
    return job.result(STEPS) | {str(path.relative_to(job.out)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_kills_change_nothing(start, train_forked, tmp_path, request):
    def run(out: str, plan: list) -> Outputs:
        train = start if plan else train_forked  # a kill is of torchrun and its ranks
        return train(2, *JOB, script=REPO / "tests/faults/killed.py", out=tmp_path / out, KILL=json.dumps(plan))

    rng = random.Random(2)
    undisturbed = run("undisturbed", [])
    assert undisturbed.code == 0, undisturbed.text
    expected = result_of(undisturbed)
    took = collections.defaultdict(list)
    for phase, seconds in re.findall(r"^took (\w+) (\S+)$", undisturbed.text, re.MULTILINE):
        took[phase].append(float(seconds))
    kills, resumed = collections.Counter(), collections.Counter()
    runs = request.config.getoption("--kills")
    for number in range(runs):
        planned = 2 if rng.random() < 0.1 else 1
        code = 1
        while code:
            plan = []
            if planned:
                phase = rng.choice([*TIMES])
                seconds = rng.uniform(0, 1.2) * sum(took[phase]) / len(took[phase])
                plan = [phase, rng.randint(1, TIMES[phase]), seconds, "all" if rng.random() < 0.7 else "one"]
            job = run(f"run_{number:03d}", plan)
            code = job.end() if plan else job.code
            if "the kill is done\n" in job.text:
                kills[phase] += 1
                planned -= 1
            else:
                assert code == 0, job.text
            resumed.update(re.findall(r"resume:  (after step \d+|no checkpoint)", job.text))
            check_complete(job.out)
        found = result_of(job)
        assert not [name for name in expected | found if found.get(name) != expected.get(name)], job.out
        shutil.rmtree(job.out)
    print(f"kills {dict(kills)}, resumed {dict(resumed)}")
    assert sum(kills.values()) >= runs
