"""Repeat a run from its output folder by an independent trainer, and say what agrees and what differs first.

    make check RUN=outputs/x                                    finished or stopped, also while it runs
    make check RUN=outputs/x ARGS="--mine loss,order --steps 5"

Exit code 0 if all was judged and agrees or is named by --mine as your own, 1 if another item differs, 2 if the folder
cannot be judged, 3 if all agrees but something was not judged. docs/dev/checks.md explains the items. Run it from the
checkout that made the run.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # vLLM computes beside: threads that spin would take its cores

import torch
import transformers

from oracle import again
from oracle.repeat import repeat
from oracle.report import ITEMS
from oracle.run import read_run
from oracle.twin import begin_twins, has_room, torchrun


def main(argv) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    parser.add_argument("--mine", default="", help=f"items that your fork changes: {', '.join(ITEMS)}")
    parser.add_argument("--steps", type=int, help="only this many steps, from the first")
    parser.add_argument("--no-twin", action="store_true", help="do not start the twins of a run in half precision")
    args = parser.parse_args(argv)

    mine = [name.strip() for name in args.mine.split(",") if name.strip()]
    for name in mine:
        if name not in ITEMS:
            print(f"--mine {name}: there is no such item; it must be one of {', '.join(ITEMS)}")
            return 2

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        run = read_run(args.run, args.steps)
    except ValueError as error:
        print(" ".join(str(error).split()))
        return 2
    twins = begin_twins(run, None if args.no_twin else torchrun)
    if has_room(run):
        twins = list(twins)  # all begin
    report = repeat(run, again.own_process)
    code, words = report.verdict(mine)
    print(report.table(mine))
    for end in twins:
        twin = end()
        its_code, its_words = twin.verdict(mine)
        print(f"{twin.name:14}{its_words}")
        code = 1 if 1 in (code, its_code) else max(code, its_code)
        words += f"; {twin.name} {('agrees', 'PARTS', '', 'not judged')[its_code]}"
    print(f"\n{args.run}, {len(run.steps)} steps: {words}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
