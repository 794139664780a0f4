"""Run the works of benchmarks/works.py with ours and with TRL, in turn, and say how they compare.

    python benchmarks/against_trl.py                                    # all works, all systems, 3 rounds
    python benchmarks/against_trl.py --works tiny-64 small-bf16-64 --rounds 1 --systems ours trl
    python benchmarks/against_trl.py --rounds 0                         # only print the table

Every run is a process group of its own, 3 steps to warm up and 6 that are timed; round by round the systems take
turns, so that what else the machine does falls on all. Results are appended to docs/bench/rounds.csv; a run that is
there is not run again, so an interrupted set goes on where it was. Ratios are of medians over the steps of all rounds.
TRL runs in the fastest setting that docs/bench/trl-settings.csv has for the work; theirs.py --csv adds others.
The works of smollm2 need `make build/smollm2/model` and such settings first; without --works they are left out.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import theirs, works
from benchmarks.works import REPO, WORKS

SYSTEMS = {
    "ours": "train_grpo",
    "ours-unshared": "unshared",
    "trl": "TRL, transformers",
    "trl-vllm": "TRL, colocated vLLM",
}
RESULTS = REPO / "docs/bench/rounds.csv"
SETTINGS = REPO / "docs/bench/trl-settings.csv"
TRL = REPO / "build/trl-venv"
RANKS = 2
TIMEOUT_S = 900  # of a run
LAUNCH = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]


def command_of(work: str, system: str, number: int) -> list[str]:
    options = ["--work", work, "--round", str(number), "--csv", str(RESULTS.relative_to(REPO))]
    if system.startswith("ours"):
        shared = str(system == "ours").lower()
        return [sys.executable, *LAUNCH, "benchmarks/ours.py", *options, f"train.share_prompts={shared}"]
    if system == "trl-vllm":
        options.append("--vllm")
    options += ["--setting", fastest_setting(work, system)]
    return [str(TRL / "bin/python"), *LAUNCH, "benchmarks/theirs.py", *options]


def run(command: list[str], name: str) -> bool:
    """Run a command, its output in build/bench/NAME.log. Returns whether it ended well."""
    start = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    log = works.FOLDER / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        timed = ["timeout", str(TIMEOUT_S), *command]
        code = subprocess.run(timed, cwd=REPO, env=environment, stdout=out, stderr=out).returncode
    report = f"{name}: {time.perf_counter() - start:.0f} s"
    if code != 0:
        report += f", exit code {code}, see {log}"
    print(report, flush=True)
    return code == 0


def rows_on(results: Path, work: str) -> pandas.DataFrame:
    """The rows of a results file that were measured on a work."""
    table, wanted = works.read_results(results), asdict(WORKS[work])
    return table[(table[[*wanted]] == pandas.Series(wanted)).all(axis=1)]


def fastest_setting(work: str, system: str) -> str:
    """TRL's setting with the most tokens a second (median) on a work. Raises SystemExit where none was measured."""
    rates = rows_on(SETTINGS, work).query("system == @system").groupby("setting").tokens_per_s.median()
    if rates.empty:
        raise SystemExit(f"no setting of {system} was measured on {work}: benchmarks/theirs.py --csv {SETTINGS}")
    return rates.idxmax()


# ---------------------------------------------------------------- tables


def spread(numbers: pandas.Series) -> str:
    """Median and range, as a table's cell has them."""
    return "–" if numbers.empty else f"{numbers.median():.0f} ({numbers.min():.0f}–{numbers.max():.0f})"


def ratio(rows: pandas.DataFrame, column: str, systems: list[str]) -> str:
    """The median of ours ÷ the median of other systems, as a table's cell has it."""
    ours = rows[column][rows.system == "ours"].median()
    theirs = rows[column][rows.system.isin(systems)].median()
    return "–" if math.isnan(ours / theirs) else f"{ours / theirs:.2f}"


def ratio_lines(found: dict[str, pandas.DataFrame]) -> list[str]:
    """A table of tokens/s of each system, and of ours ÷ theirs: whole steps, then training alone."""
    others = {"unshared": ["ours-unshared"], "TRL": ["trl"], "TRL, vLLM": ["trl-vllm"]}
    names = [*SYSTEMS.values(), *(f"÷ {other}" for other in others), "training ÷ unshared", "training ÷ TRL's"]
    lines = [f"| work | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for work, rows in found.items():
        if rows.empty:
            continue
        # Response tokens a second of training, so that works with lengths by chance compare too.
        rows = rows.assign(train_rate=rows.tokens_per_s * rows.step_s / rows.train_s)
        cells = [spread(rows.tokens_per_s[rows.system == system]) for system in SYSTEMS]
        cells += [ratio(rows, "tokens_per_s", systems) for systems in others.values()]
        cells += [ratio(rows, "train_rate", systems) for systems in (["ours-unshared"], ["trl", "trl-vllm"])]
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = [name for name, work in WORKS.items() if work.model != "smollm2"]
    parser.add_argument("--works", nargs="+", choices=WORKS, default=made)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    if args.rounds and any(system.startswith("trl") for system in args.systems):
        theirs.setup(TRL)
        for work in args.works:
            works.make_inputs(WORKS[work])

    failed = 0
    for number in range(1, args.rounds + 1):
        for work in args.works:
            for system in args.systems:
                done = rows_on(RESULTS, work)
                if not ((done.system == system) & (done["round"] == number)).any():
                    failed += not run(command_of(work, system, number), f"{work}.{system}.{number}")

    print("\n".join(ratio_lines({work: rows_on(RESULTS, work) for work in WORKS})))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
