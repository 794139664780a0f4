"""Kill the tiny job with SIGKILL at random moments, resume it, and compare; test_kills.py runs this.

First one undisturbed run; then runs of the same job, each killed at least once, in a random phase of a random step, at
a random moment after the phase began: either torchrun with all ranks at once, or one rank. After each kill no process
may be left, and every checkpoint and export must be complete. After the last resume the exported weights, the rollouts
and the metrics (except times and memory) must equal those of the undisturbed run bit for bit.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tests.compare_runs import read_metrics
from tests.processes import Torchrun

STEPS = 5
JOB = [
    "train.save_every=1", "train.export_every=2", "train.keep_last=2", f"train.steps={STEPS}", "resume=auto",
    "algo.kl_coef=0.01", "train.updates_per_step=2",
]  # fmt: skip
PHASES = ("rollout", "update", "push", "save", "export")
TIMES = {"rollout": STEPS, "update": 2 * STEPS, "push": STEPS + 1, "save": 2 * STEPS, "export": 3}  # in one run


# ---------------------------------------------------------------- in the job: log the phases


def worker(argv: list[str]) -> int:
    """Run train_grpo.py; rank 0 writes a line to the file $TORTURE_LOG when a phase begins and when it ends."""
    import train_grpo
    from support.base import hf_folder
    from support.model import checkpoint

    def log_phase(owner, name: str, phase: str) -> None:
        """Replace the function `name` of `owner` by one that logs its begin and end as `phase`."""
        function = getattr(owner, name)

        def logged(*args, **kwargs):
            log.write(f"begin {phase} {time.monotonic()}\n")
            try:
                return function(*args, **kwargs)
            finally:
                log.write(f"end {phase} {time.monotonic()}\n")

        setattr(owner, name, logged)

    if os.environ["RANK"] == "0":
        log = open(os.environ["TORTURE_LOG"], "a", buffering=1)  # noqa: SIM115, open until the job ends
        log_phase(train_grpo, "sample_and_grade", "rollout")
        log_phase(train_grpo, "forward_backward", "update")
        log_phase(train_grpo, "push_weights", "push")
        log_phase(hf_folder, "export_hf", "export")
        log_phase(checkpoint, "write_shards", "save")  # runs in the writer's thread
        log_phase(checkpoint.CheckpointWriter, "finish", "save")
    return train_grpo.main(argv)


# ---------------------------------------------------------------- outside: kill, check, compare


class Job(Torchrun):
    """A torchrun of two ranks with the log of its phases."""

    def __init__(self, out: Path, overrides: list[str]):
        number = len(list(out.parent.glob(f"{out.name}_*.log")))
        self.log = out.with_suffix(".phases")
        self.log.write_text("")
        super().__init__(
            out.with_name(f"{out.name}_{number}.log"), __file__, "--config", "configs/tiny.yaml",
            f"output_dir={out}", *JOB, *overrides, TORTURE_LOG=str(self.log),
        )  # fmt: skip

    def wait_for_phase(self, phase: str, count: int) -> bool:
        """Wait until the phase begins for the count-th time. Returns False if the job ends first."""
        while self.process.poll() is None:
            if self.log.read_text().count(f"begin {phase} ") >= count:
                return True
            time.sleep(0.002)
        return False

    def send_sigkill(self, everything: bool, rng: random.Random) -> None:
        """Send SIGKILL to torchrun and all ranks at once, or to one random rank."""
        ranks = list(self.ranks().values())
        targets = [self.process.pid, *ranks] if everything else [rng.choice(ranks)]
        for pid in targets:
            os.kill(pid, signal.SIGKILL)


def mean_durations(log: Path) -> dict[str, float]:
    """Return the mean seconds of each phase from a log of phases."""
    began = {}
    total, count = Counter(), Counter()
    for line in log.read_text().splitlines():
        what, phase, moment = line.split()
        if what == "begin":
            began[phase] = float(moment)
        else:
            total[phase] += float(moment) - began[phase]
            count[phase] += 1
    return {phase: total[phase] / count[phase] for phase in count}


def read_result(out: Path) -> dict[str, str]:
    """Return all that must not depend on kills: {file: SHA-256} and the metrics."""
    files = [*out.glob("hf/step_*/*.safetensors"), *out.glob("rollouts/*.jsonl")]
    files += out.glob(f"checkpoints/step_{STEPS:06d}/*.safetensors")
    hashes = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    return {**hashes, "metrics": json.dumps(read_metrics(out))}


def find_incomplete(out: Path) -> list[str]:
    """Return what is wrong with checkpoints and exports under their final names."""
    problems = []
    for path in out.glob("checkpoints/step_*"):
        if re.fullmatch(r"step_\d{6}", path.name):
            problems += check_checkpoint(path)
    for path in out.glob("hf/step_*"):
        if re.fullmatch(r"step_\d{6}", path.name):
            problems += check_export(path)
    return problems


def check_checkpoint(path: Path) -> list[str]:
    """Return the files whose size or SHA-256 differs from the manifest, or why it cannot be read."""
    problems = []
    try:
        for name, (size, sha) in json.loads((path / "manifest.json").read_text()).items():
            data = (path / name).read_bytes()
            if len(data) != size or hashlib.sha256(data).hexdigest() != sha:
                problems.append(f"{path}/{name}")
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {error}")
    return problems


def check_export(path: Path) -> list[str]:
    """Return the tensors of the index that the files lack, or why they cannot be read."""
    problems = []
    try:
        json.loads((path / "config.json").read_text())
        weights = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        for name in set(weights.values()):
            with safe_open(path / name, framework="numpy") as file:  # checks the length of the file
                expected = {key for key, holder in weights.items() if holder == name}
                problems += [f"{path}/{name}: no {key}" for key in expected - set(file.keys())]
    except (OSError, ValueError, SafetensorError) as error:
        problems.append(f"{path}: {error}")
    return problems


def torture(out: Path, runs: int, seed: int, overrides: list[str]) -> dict:
    """Return counts of kills and resumes. Raises AssertionError with the first failure."""
    out.mkdir()
    undisturbed = Job(out / "undisturbed", overrides)
    if undisturbed.end():
        raise AssertionError(f"the undisturbed run failed, see {undisturbed.printed}")
    expected = read_result(out / "undisturbed")
    seconds = mean_durations(undisturbed.log)
    print("undisturbed:", {phase: round(seconds[phase], 3) for phase in PHASES}, flush=True)
    rng = random.Random(seed)
    counts = {"kills": Counter(), "killed": Counter(), "resumed": Counter()}
    for run in range(runs):
        folder = out / f"run_{run:03d}"
        kill_and_resume(run, folder, seconds, rng, counts, overrides)
        found = read_result(folder)
        different = [name for name in expected | found if found.get(name) != expected.get(name)]
        if different:
            raise AssertionError(f"run {run} differs from the undisturbed run in {different}, see {folder}")
        shutil.rmtree(folder)
    return {"runs": runs, **{name: dict(counter) for name, counter in counts.items()}, "different": 0}


def kill_and_resume(
    run: int, folder: Path, seconds: dict[str, float], rng: random.Random, counts: dict[str, Counter], overrides: list
) -> None:
    """Run the job with one kill (two in a tenth of the runs), resuming until it ends by itself. Adds to `counts`."""
    planned = 2 if rng.random() < 0.1 else 1
    killed = True
    while killed:
        killed = False
        job = Job(folder, overrides)
        phase = rng.choice(PHASES)
        count = rng.randint(1, TIMES[phase])
        if planned and job.wait_for_phase(phase, count):
            time.sleep(rng.uniform(0, 1.2) * seconds[phase])
            everything = rng.random() < 0.7
            if job.process.poll() is None:
                job.send_sigkill(everything, rng)
                killed = True
                planned -= 1
                counts["kills"][phase] += 1
                counts["killed"]["all processes" if everything else "one rank"] += 1
                saved = sorted(path.name for path in folder.glob("checkpoints/step_*"))
                print(f"run {run}: killed in {phase} {count}, {saved}", flush=True)
        if job.end() and not killed:
            raise AssertionError(f"run {run} failed without a kill, see {job.printed}")
        counts["resumed"].update(re.findall(r"resume:  (after step \d+|no checkpoint)", job.text))
        problems = find_incomplete(folder)
        if problems:
            raise AssertionError(f"run {run}: incomplete: {problems}")


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1:]))
