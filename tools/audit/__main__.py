"""Repeat a small run from the answers that it sampled, in plain transformers and loops, and compare every step.

    python -m tools.audit outputs/tiny

Begins with the weights of model.path and computes advantages, log-probs, losses, gradients and updates of its own.
Prints what was compared and the largest differences. Exit code 0: all within the bounds of rounding; 1: not, with the
first value that parts; 2: the run cannot be repeated, with the reason. docs/audit.md says more.
"""

import argparse
import sys
from pathlib import Path

import transformers

from tools.audit.comparison import Comparison
from tools.audit.recorded import MAX_PARAMETERS, Refusal, read_run
from tools.audit.trainer import repeat


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="OUTPUT_DIR")
    parser.add_argument("--max-parameters", type=int, default=MAX_PARAMETERS, help="refuse larger models")
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    try:
        run = read_run(args.run, args.max_parameters)
    except Refusal as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    comparison = Comparison(run.config["model"]["dtype"])
    repeat(run, comparison)
    print(f"{args.run}: {len(run.metrics)} steps, {run.config['model']['dtype']}")
    print(comparison.table())
    if comparison.first:
        print(f"\nfirst to part: {comparison.first}")
        return 1
    print("\nall within the bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
