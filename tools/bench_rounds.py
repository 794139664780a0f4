"""Run the works of tools/bench_works.py with ours and with TRL, in turn, and say how they compare.

    python tools/bench_rounds.py                                       # all works, all systems, 3 rounds
    python tools/bench_rounds.py --works tiny-64 small-bf16-64 --rounds 1 --systems ours trl
    python tools/bench_rounds.py --table                               # only write the tables into docs/performance.md

Every run is a process group of its own, 3 steps to warm up and 6 that are timed; round by round the systems take
turns, so that what else the machine does falls on all. Results go to docs/bench/WORK.json; a run that is there is not
run again, so an interrupted set goes on where it was. Ratios are of medians over the steps of all rounds.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_trl
import bench_works
from bench_works import REPO, WORKS

SYSTEMS = {"ours": "train_grpo", "trl": "TRL, transformers", "trl-vllm": "TRL, colocated vLLM"}
RESULTS = REPO / "docs/bench"
PAGE = REPO / "docs/performance.md"
TRL = REPO / "build/trl-venv"
RANKS = 2
TIMEOUT_S = 600  # of a run


def command(work: str, system: str, number: int) -> list[str]:
    """What runs one system on one work; its result goes to the work's file."""
    script = ["tools/bench.py"] if system == "ours" else ["tools/bench_trl.py", *["--vllm"] * (system == "trl-vllm")]
    python = sys.executable if system == "ours" else str(TRL / "bin/python")
    start = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    result = RESULTS.relative_to(REPO) / f"{work}.json"
    return [*start, *script, "--work", work, "--round", str(number), "--json", str(result)]


def run(work: str, system: str, number: int) -> bool:
    """Run it, unless its result is there; whether there is a result then."""
    there = [(old["system"], old["round"]) for old in bench_works.results(RESULTS / f"{work}.json")]
    if (system, number) in there:
        return True
    start = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    log = REPO / "build/bench" / f"{work}.{system}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        code = subprocess.run(
            ["timeout", str(TIMEOUT_S), *command(work, system, number)],
            cwd=REPO,
            env=environment,
            stdout=out,
            stderr=out,
        ).returncode
    seconds = time.perf_counter() - start
    print(
        f"{work} {system} round {number}: {seconds:.0f} s" + f", exit code {code}, see {log}" * (code != 0), flush=True
    )
    return code == 0


# ---------------------------------------------------------------- what came out


def steps(runs: list[dict], system: str, pick) -> list[float]:
    """The values of all timed steps of a system; `pick(run)` is the list of a run."""
    return [value for run in runs if run["system"] == system for value in pick(run)]


def spread(values: list[float], digits: int) -> str:
    """Median and range, as a table's cell has them."""
    if not values:
        return "–"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def ratio(above: list[float], below: list[float]) -> str:
    return f"{median(above) / median(below):.2f}" if above and below else "–"


def rates(run: dict) -> list[float]:
    return run["tokens_per_s"]


def passes(phase: str):
    """Response tokens a second of one phase, so that works with lengths by chance compare too."""

    def per_second(run: dict) -> list[float]:
        rows = zip(run["tokens_per_s"], run["step_s"], run["seconds"][phase], strict=True)
        return [rate * step / seconds for rate, step, seconds in rows if seconds]

    return per_second


def ratio_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of tokens/s of each system, and of the ratios."""
    names = [*SYSTEMS.values(), "÷ TRL, transformers", "÷ TRL, vLLM", "training ÷ TRL's", "log-probs ÷ TRL's"]
    lines = [f"| work | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for work, runs in found.items():
        cells = [spread(steps(runs, system, rates), 0) for system in SYSTEMS]
        cells += [ratio(steps(runs, "ours", rates), steps(runs, system, rates)) for system in ("trl", "trl-vllm")]
        for phase in ("train", "logprob"):
            trl = [value for system in ("trl", "trl-vllm") for value in steps(runs, system, passes(phase))]
            cells.append(ratio(steps(runs, "ours", passes(phase)), trl))
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def phase_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of our phases in milliseconds, beside bare vLLM, MFU, the push check and memory."""
    shown = ("rollout", "reward", "logprob", "train", "sync")
    others = ("step ÷ bare vLLM", "MFU of train %", "MFU of step %", "push check % of step")
    lines = [f"| work | step, ms | {', ms | '.join(shown)}, ms | {' | '.join(others)} | peak GiB a rank |"]
    lines.append("|---" * (len(shown) + len(others) + 3) + "|")
    for work, runs in found.items():
        ours = [run for run in runs if run["system"] == "ours"]
        if ours:
            tables = [bench_works.summary(run) for run in ours]
            cells = [spread([1000 * s for s in steps(runs, "ours", lambda run: run["step_s"])], 0)]
            cells += [f"{1000 * median(steps(runs, 'ours', lambda run, p=p: run['seconds'][p])):.0f}" for p in shown]
            cells += [f"{median(table[name] for table in tables):.3g}" for name in others]
            cells.append(f"{max(max(run['peak_gib'].values()) for run in ours):.2f}")
            lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def ceiling_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of what the machine reached in the same runs, a rank with all ranks busy."""
    lines = [
        "| work | matmul, GFLOP/s | copy, GB/s | all-reduce, GB/s | bare vLLM, tokens/s |",
        "|---|---|---|---|---|",
    ]
    for work, runs in found.items():
        ours = [run for run in runs if run["system"] == "ours"]
        names = ("matmul_flops_per_s", "copy_bytes_per_s", "all_reduce_bytes_per_s")
        cells = [spread([run["ceilings"][name] / 1e9 for run in ours], 2) for name in names]
        lines.append(
            f"| {work} | {' | '.join(cells)} | {spread(steps(runs, 'ours', lambda r: r['bare_tokens_per_s']), 0)} |"
        )
    return lines


def origin_lines(found: dict[str, list[dict]]) -> list[str]:
    """When, where and with what command the numbers were measured."""
    runs = [run for of_work in found.values() for run in of_work]
    dates = sorted(run["date"] for run in runs)
    machines, commits = ({run[key] for run in runs if key in run} for key in ("machine", "commit"))
    rounds = len({run["round"] for run in runs})
    return [
        f"`make bench`, {dates[0]} to {dates[-1]}, {', '.join(sorted(machines))};",
        f"commit {', '.join(sorted(map(str, commits)))}; rounds: {rounds}, of {len(runs[0]['step_s'])} timed steps.",
        "Medians over all steps, in parentheses the range.",
    ]


def write_tables(page: Path, found: dict[str, list[dict]]) -> None:
    """Put each table between its marks, <!-- NAME --> and <!-- end -->, in the page."""
    text = page.read_text()
    tables = {"origin": origin_lines, "ratios": ratio_lines, "phases": phase_lines, "ceilings": ceiling_lines}
    for name, lines in tables.items():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = head + mark + "\n".join(["", *lines(found), "", ""]) + rest[rest.index("<!-- end -->") :]
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    failed = 0
    if not args.table:
        if set(args.systems) - {"ours"}:
            bench_trl.setup(TRL)
        for number in range(1, args.rounds + 1):
            for work in args.works:
                failed += sum(not run(work, system, number) for system in args.systems)
    found = {work: runs for work in WORKS if (runs := bench_works.results(RESULTS / f"{work}.json"))}
    if found:
        print("\n".join(ratio_lines(found)))
        write_tables(PAGE, found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
