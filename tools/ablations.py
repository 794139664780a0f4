"""Train every configs/ablations/*.yaml on the tiny task, one after the other, and write docs/ablations.md.

    python tools/ablations.py [--only grpo tis] [section.key=value ...]

Needs build/tiny (tools/make_tiny.py). With --only or overrides it prints the table and does not write docs/.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parent.parent
WINDOW = 10  # steps that a mean reward is taken over
GOAL = 0.9  # mean reward over WINDOW steps that counts as learned

HEAD = f"""\
# Ablations

Written by `make ablations`. Each algorithm trains on the task of `make demo` (reverse three digits, a third of
the reward for each correct digit), from the same untrained model, with one seed. The third column is the
first step at which the mean reward of the last {WINDOW} steps is at least {GOAL}. The table shows that each one
trains, not which is better: the task is a toy. Seconds depend on the machine and on what else it does. MaxRL is made
for rewards of 0 and 1.

| algorithm | configuration | reached {GOAL} at step | last {WINDOW} steps | steps | seconds |
|---|---|---|---|---|---|
"""


def train(config: Path, overrides: list[str]) -> list[dict]:
    """Train on two ranks and return the metrics of each step. Raises CalledProcessError."""
    out = REPO / "outputs/ablations" / config.stem
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    command += ["--config", str(config), f"output_dir={out}", *overrides]
    subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def format_row(config: Path, metrics: list[dict]) -> str:
    """A table row: title, file, first step whose last WINDOW steps average GOAL, final mean reward, steps, seconds."""
    rewards = [m["reward/mean"] for m in metrics]
    means = [mean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    reached = next((i + WINDOW for i, value in enumerate(means) if value >= GOAL), None)
    title = config.read_text().splitlines()[0].removeprefix("# ")
    seconds = sum(m["time/step"] for m in metrics)
    path = config.relative_to(REPO)
    return f"| {title} | `{path}` | {reached or 'not'} | {means[-1]:.3f} | {len(metrics)} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    lines = HEAD.splitlines()
    for config in sorted((REPO / "configs/ablations").glob("*.yaml")):
        if not args.only or config.stem in args.only:
            lines.append(format_row(config, train(config, args.overrides)))
            print(lines[-1], flush=True)
    if not args.only and not args.overrides:
        (REPO / "docs/ablations.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
