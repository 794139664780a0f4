"""Repeat a run from its output folder by an independent trainer, and say what agrees and what differs first.

    make check RUN=outputs/x                                    finished or stopped, also while it runs
    make check RUN=outputs/x ARGS="--mine loss,order --steps 5"

Exit code 0, or 1 if an item differs that --mine does not name as the fork's own, or 2 if nothing can be compared. Run
it from the checkout that made the run.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from oracle.repeat import repeat
from oracle.report import ITEMS
from oracle.run import read_run


def main(argv) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    parser.add_argument("--mine", default="", help=f"items that your fork changes: {', '.join(ITEMS)}")
    parser.add_argument("--steps", type=int, help="only this many steps, from the first")
    args = parser.parse_args(argv)

    mine = [name.strip() for name in args.mine.split(",") if name.strip()]
    for name in mine:
        if name not in ITEMS:
            print(f"--mine {name}: there is no such item; it must be one of {', '.join(ITEMS)}")
            return 2

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        run = read_run(args.run, args.steps)
    except ValueError as error:
        print(" ".join(str(error).split()))
        return 2

    report = repeat(run)
    print(report.table(mine))
    other = [name for name in report.parted() if name not in mine]
    verdict = "all that was compared agrees"
    if other:
        verdict = f"{', '.join(other)} differ: the first is {report.first}"
    elif report.parted():
        verdict += ", except yours"
    print(f"\n{args.run}, {len(run.steps)} steps: {verdict}")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
