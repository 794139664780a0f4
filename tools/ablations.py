"""Train every configs/ablations/*.yaml on the tiny task, one after the other, and write docs/ablations.md.

    python tools/ablations.py [--only grpo tis] [section.key=value ...]

Needs build/tiny (tools/make_tiny.py). With --only or overrides it prints the table and leaves docs/ alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parent.parent
WINDOW, GOAL = 10, 0.9


def train(config: Path, overrides: list[str]) -> list[dict]:
    """The metrics of a run on two ranks. Raises CalledProcessError."""
    out = REPO / "outputs/ablations" / config.stem
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    command += ["--config", str(config), f"output_dir={out}", *overrides]
    subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def row(config: Path, metrics: list[dict]) -> str:
    """A line of the table: what the file is, the first step whose last WINDOW steps average GOAL, the end, the time."""
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
    lines = [
        "# Ablations",
        "",
        "Written by `make ablations`: each algorithm on the task of `make demo` (reverse three digits, a third of the",
        "reward for each digit in its place), from the same untrained model, one seed. Reached: the first step whose",
        f"last {WINDOW} steps average {GOAL}. It shows that each one trains, not which is better: this is a toy.",
        "",
        f"| algorithm | configuration | reached {GOAL} at step | last {WINDOW} steps | steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for config in sorted((REPO / "configs/ablations").glob("*.yaml")):
        if not args.only or config.stem in args.only:
            lines.append(row(config, train(config, args.overrides)))
            print(lines[-1], flush=True)
    if not args.only and not args.overrides:
        (REPO / "docs/ablations.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
