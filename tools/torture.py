"""Kill the tiny job with SIGKILL at random moments, resume it, and see that nothing is lost or changed.

    python tools/torture.py [--runs 100] [--seed 0] [--out outputs/torture] [section.key=value ...]

Needs build/tiny (tools/make_tiny.py). First an undisturbed run; then `--runs` runs of the same job, each killed at
least once: in a random phase of a random step, a random moment after the phase began, either torchrun with all ranks at
once or one rank alone. After each kill no process may be left, and what has the name of a checkpoint must be whole;
after the last resume the exported weights, the rollouts and the metrics (but for times and memory) must be those of the
undisturbed run, bit by bit. Prints a line a kill, and at the end a table as JSON; exits with 1 at the first difference.
"""

import argparse
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

from processes import REPO, Torchrun
from safetensors import SafetensorError, safe_open

STEPS = 5
JOB = [
    "train.save_every=1", "train.export_every=2", "train.keep_last=2", f"train.steps={STEPS}", "resume=auto",
    "algo.kl_coef=0.01", "train.updates_per_step=2",
]  # fmt: skip
PHASES = ("rollout", "update", "push", "save", "export")
NOT_COMPARED = re.compile("time/|speed/|mem/|idle")


# ---------------------------------------------------------------- in the job: say where it is


def worker(argv: list[str]) -> int:
    """train_grpo.py, unchanged but for a line in the file $TORTURE_LOG as each phase begins and ends."""
    sys.path.insert(0, str(REPO))
    import train_grpo
    from support import checkpoint, hf_folder

    def announce(owner, name: str, phase: str) -> None:
        function = getattr(owner, name)

        def announced(*args, **kwargs):
            log.write(f"begin {phase} {time.monotonic()}\n")
            try:
                return function(*args, **kwargs)
            finally:
                log.write(f"end {phase} {time.monotonic()}\n")

        setattr(owner, name, announced)

    if os.environ["RANK"] == "0":
        log = open(os.environ["TORTURE_LOG"], "a", buffering=1)  # noqa: SIM115, open as long as the job
        announce(train_grpo, "answer", "rollout")
        announce(train_grpo, "forward_backward", "update")
        announce(train_grpo, "push_weights", "push")
        announce(hf_folder, "export_hf", "export")
        announce(checkpoint, "write_shards", "save")  # in its thread
        announce(checkpoint.CheckpointWriter, "finish", "save")
    return train_grpo.main(argv)


# ---------------------------------------------------------------- outside: kill, look, compare


class Job(Torchrun):
    """A torchrun of two ranks, and the phases that it says it is in."""

    def __init__(self, out: Path, overrides: list[str]):
        self.log, number = out.with_suffix(".phases"), len(list(out.parent.glob(f"{out.name}_*.log")))
        self.log.write_text("")
        super().__init__(
            out.with_name(f"{out.name}_{number}.log"), __file__, "--worker", "--config", "configs/tiny.yaml",
            f"output_dir={out}", *JOB, *overrides, TORTURE_LOG=str(self.log),
        )  # fmt: skip

    def reaches(self, phase: str, count: int) -> bool:
        """Wait until the phase begins for the count-th time; False if the job ends before."""
        while self.process.poll() is None:
            if self.log.read_text().count(f"begin {phase} ") >= count:
                return True
            time.sleep(0.002)
        return False

    def strike(self, everything: bool, dice: random.Random) -> None:
        """SIGKILL to torchrun and all ranks at once, or to one rank."""
        ranks = list(self.ranks().values())
        for pid in [self.process.pid, *ranks] if everything else [dice.choice(ranks)]:
            os.kill(pid, signal.SIGKILL)


def durations(log: Path) -> dict[str, float]:
    """Mean seconds of each phase in an undisturbed run."""
    began, total, count = {}, Counter(), Counter()
    for line in log.read_text().splitlines():
        what, phase, moment = line.split()
        if what == "begin":
            began[phase] = float(moment)
        else:
            total[phase] += float(moment) - began[phase]
            count[phase] += 1
    return {phase: total[phase] / count[phase] for phase in count}


def result(out: Path) -> dict[str, str]:
    """What must not depend on kills: {file: SHA-256}."""
    files = [*out.glob("hf/step_*/*.safetensors"), *out.glob("rollouts/*.jsonl")]
    files += [p for p in out.glob(f"checkpoints/step_{STEPS:06d}/*") if p.suffix == ".safetensors"]
    found = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    kept = [{key: value for key, value in line.items() if not NOT_COMPARED.match(key)} for line in lines]
    return {**found, "metrics": json.dumps(kept)}


def half_checkpoints(out: Path) -> list[str]:
    """What has the name of a checkpoint or an export and is not whole."""
    bad = []
    for path in out.glob("checkpoints/step_*"):
        if re.fullmatch(r"step_\d{6}", path.name):
            try:
                for name, (size, sha) in json.loads((path / "manifest.json").read_text()).items():
                    data = (path / name).read_bytes()
                    if len(data) != size or hashlib.sha256(data).hexdigest() != sha:
                        bad.append(f"{path}/{name}")
            except (OSError, ValueError) as error:
                bad.append(f"{path}: {error}")
    for path in out.glob("hf/step_*"):
        if re.fullmatch(r"step_\d{6}", path.name):
            try:
                json.loads((path / "config.json").read_text())
                weights = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
                for name in set(weights.values()):
                    with safe_open(path / name, framework="numpy") as file:  # checks the length of the file
                        here = {key for key, holder in weights.items() if holder == name}
                        bad += [f"{path}/{name}: no {key}" for key in here - set(file.keys())]
            except (OSError, ValueError, SafetensorError) as error:
                bad.append(f"{path}: {error}")
    return bad


def torture(out: Path, runs: int, seed: int, overrides: list[str]) -> dict:
    """Counts of what was done; raises SystemExit with what went wrong."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    calm = Job(out / "undisturbed", overrides)
    if calm.end():
        raise SystemExit(f"the undisturbed run failed, see {calm.printed}")
    wanted, seconds = result(out / "undisturbed"), durations(calm.log)
    print("undisturbed:", {phase: round(seconds[phase], 3) for phase in PHASES}, flush=True)
    dice, kills, how, resumed = random.Random(seed), Counter(), Counter(), Counter()
    times = {"rollout": STEPS, "update": 2 * STEPS, "push": STEPS + 1, "save": 2 * STEPS, "export": 3}
    for run in range(runs):
        folder, planned, killed = out / f"run_{run:03d}", 1 + (dice.random() < 0.1), True
        while killed:
            job, killed = Job(folder, overrides), False
            phase = dice.choice(PHASES)
            count = dice.randint(1, times[phase])
            if planned and job.reaches(phase, count):
                time.sleep(dice.uniform(0, 1.2) * seconds[phase])
                everything = dice.random() < 0.7
                if job.process.poll() is None:
                    job.strike(everything, dice)
                    planned, killed = planned - 1, True
                    kills[phase] += 1
                    how["all processes" if everything else "one rank"] += 1
                    saved = sorted(path.name for path in folder.glob("checkpoints/step_*"))
                    print(f"run {run}: killed in {phase} {count}, {saved}", flush=True)
            if job.end() and not killed:
                raise SystemExit(f"run {run} failed by itself, see {job.printed}")
            resumed.update(re.findall(r"resume:  (after step \d+|no checkpoint)", job.text))
            if bad := half_checkpoints(folder):
                raise SystemExit(f"run {run}: half written: {bad}")
        found = result(folder)
        different = [name for name in wanted | found if found.get(name) != wanted.get(name)]
        if different:
            raise SystemExit(f"run {run} differs from the undisturbed run in {different}, see {folder}")
        shutil.rmtree(folder)
    return {"runs": runs, "kills": dict(kills), "killed": dict(how), "resumed": dict(resumed), "different": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPO / "outputs/torture")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    start = time.monotonic()
    counts = torture(args.out.resolve(), args.runs, args.seed, args.overrides)
    print(json.dumps({**counts, "minutes": round((time.monotonic() - start) / 60, 1)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(sys.argv[2:]))
    main()
