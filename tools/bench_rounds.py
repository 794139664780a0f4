"""Run the works of tools/bench_works.py with ours and with TRL, in turn, and say how they compare.

    python tools/bench_rounds.py                                       # all works, all systems, 3 rounds
    python tools/bench_rounds.py --works tiny-64 small-bf16-64 --rounds 1 --systems ours trl
    python tools/bench_rounds.py --tune                                # find TRL's fastest setting of each work first
    python tools/bench_rounds.py --table                               # only write the tables into docs/performance.md

Every run is a process group of its own, 3 steps to warm up and 6 that are timed; round by round the systems take
turns, so that what else the machine does falls on all. Results are appended to docs/bench/rounds.csv; a run that is
there is not run again, so an interrupted set goes on where it was. Ratios are of medians over the steps of all rounds.
TRL runs in the setting that was the fastest for the work under --tune (docs/bench/trl-settings.csv, one run each,
of 1 warm-up step and 2 timed ones).
The tables of GPUs come from docs/bench/gpu-check-*.json, which tools/gpu_check.py --json writes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_trl
import bench_works
from bench_works import REPO, WORKS, TrlSetting, values

SYSTEMS = {"ours": "train_grpo", "trl": "TRL, transformers", "trl-vllm": "TRL, colocated vLLM"}
RESULTS = REPO / "docs/bench/rounds.csv"
SETTINGS = REPO / "docs/bench/trl-settings.csv"
PAGE = REPO / "docs/performance.md"
TRL = REPO / "build/trl-venv"
RANKS = 2
TIMEOUT_S = 900  # of a run
TUNING_WARMUP, TUNING_STEPS = 1, 2  # in each setting of TRL: it has nothing to compile on a CPU
LAUNCH = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]


def trl_command(work: str, system: str, setting: TrlSetting, results: Path, number: int) -> list[str]:
    """The command that times TRL on a work in a setting and appends its results."""
    options = ["--work", work, "--setting", str(setting), "--round", str(number)]
    if results == SETTINGS:
        options += ["--warmup", str(TUNING_WARMUP), "--steps", str(TUNING_STEPS)]
    if system == "trl-vllm":
        options.append("--vllm")
    return [str(TRL / "bin/python"), *LAUNCH, "tools/bench_trl.py", *options, "--csv", str(results.relative_to(REPO))]


def our_command(work: str, number: int) -> list[str]:
    """The command that times this trainer on a work and appends its results."""
    options = ["--work", work, "--round", str(number), "--csv", str(RESULTS.relative_to(REPO))]
    return [sys.executable, *LAUNCH, "tools/bench.py", *options]


def run(command: list[str], name: str) -> bool:
    """Run a command, its output in build/bench/NAME.log; whether it ended well."""
    start = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    log = REPO / "build/bench" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        timed = ["timeout", str(TIMEOUT_S), *command]
        code = subprocess.run(timed, cwd=REPO, env=environment, stdout=out, stderr=out).returncode
    report = f"{name}: {time.perf_counter() - start:.0f} s"
    if code != 0:
        report += f", exit code {code}, see {log}"
    print(report, flush=True)
    return code == 0


def run_round(work: str, system: str, number: int) -> bool:
    """Time one system on one work, unless its result is there; whether there is a result then."""
    for row in rows_on(RESULTS, work):
        if row["system"] == system and row["round"] == number:
            return True
    name = f"{work}.{system}.{number}"
    if system == "ours":
        return run(our_command(work, number), name)
    setting = fastest_setting(work, system)
    return run(trl_command(work, system, setting, RESULTS, number), name)


def tune(work: str, system: str) -> int:
    """Time TRL on a work in each setting that may be its fastest; returns how many runs failed."""
    from support.model.cpu_backend import has_bf16_units

    measured = {row["setting"] for row in rows_on(SETTINGS, work) if row["system"] == system}
    failed = 0
    for setting in bench_works.trl_settings(WORKS[work], has_bf16_units()):
        if str(setting) not in measured:
            name = f"{work}.{system}.{str(setting).replace(' ', '.')}"
            failed += not run(trl_command(work, system, setting, SETTINGS, 1), name)
    return failed


def rows_on(results: Path, work: str) -> list[dict]:
    """The rows of a results file that were measured on a work."""
    return [row for row in bench_works.read_results(results) if bench_works.work_of(row) == WORKS[work]]


def fastest_setting(work: str, system: str) -> TrlSetting:
    """TRL's setting with the most tokens a second (median) on a work. Raises SystemExit where none was measured."""
    rates: dict[str, list[float]] = {}
    for row in rows_on(SETTINGS, work):
        if row["system"] == system:
            rates.setdefault(row["setting"], []).append(row["tokens_per_s"])
    if not rates:
        raise SystemExit(f"no setting of {system} was measured on {work}: run python tools/bench_rounds.py --tune")
    return TrlSetting.parse(max(rates, key=lambda setting: median(rates[setting])))


# ---------------------------------------------------------------- tables


def rows_by_work(rows: list[dict]) -> dict[str, list[dict]]:
    """{name of a work: its rows} of the works that have any."""
    found = {name: [row for row in rows if bench_works.work_of(row) == work] for name, work in WORKS.items()}
    return {name: of_work for name, of_work in found.items() if of_work}


def runs_of(rows: list[dict]) -> list[list[dict]]:
    """The rows of each run, by system and round."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["system"], row["round"]), []).append(row)
    return list(runs.values())


def of_system(rows: list[dict], *systems: str) -> list[dict]:
    return [row for row in rows if row["system"] in systems]


def spread(numbers: list[float], digits: int) -> str:
    """Median and range, as a table's cell has them."""
    if not numbers:
        return "–"
    return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f}–{max(numbers):.{digits}f})"


def ratio(above: list[float], below: list[float]) -> str:
    """The ratio of two medians, as a table's cell has it."""
    if not above or not below:
        return "–"
    return f"{median(above) / median(below):.2f}"


def phase_rates(rows: list[dict], phase: str) -> list[float]:
    """Response tokens a second of one phase, so that works with lengths by chance compare too."""
    timed = [row for row in rows if row[f"{phase}_s"]]
    return [row["tokens_per_s"] * row["step_s"] / row[f"{phase}_s"] for row in timed]


def ratio_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of tokens/s of each system, and of the ratios."""
    names = [*SYSTEMS.values(), "÷ TRL, transformers", "÷ TRL, vLLM", "training ÷ TRL's", "log-probs ÷ TRL's"]
    lines = [f"| work | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for work, rows in found.items():
        rates = {system: values(of_system(rows, system), "tokens_per_s") for system in SYSTEMS}
        cells = [spread(rates[system], 0) for system in SYSTEMS]
        cells += [ratio(rates["ours"], rates[system]) for system in ("trl", "trl-vllm")]
        for phase in ("train", "logprob"):
            trl = phase_rates(of_system(rows, "trl", "trl-vllm"), phase)
            cells.append(ratio(phase_rates(of_system(rows, "ours"), phase), trl))
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def phase_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of our phases in milliseconds, beside bare vLLM, MFU, the push check and memory."""
    others = ("step ÷ bare vLLM", "MFU of train %", "MFU of step %", "push check % of step")
    heads = ["work", "step, ms", *(f"{phase}, ms" for phase in bench_works.PHASES), *others, "peak GiB a rank"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for work, rows in found.items():
        ours = of_system(rows, "ours")
        if not ours:
            continue
        summaries = [bench_works.summary(of_run) for of_run in runs_of(ours)]
        cells = [spread([1000 * seconds for seconds in values(ours, "step_s")], 0)]
        cells += [f"{1000 * median(values(ours, f'{phase}_s')):.0f}" for phase in bench_works.PHASES]
        cells += [f"{median(summary[name] for summary in summaries):.3g}" for name in others]
        cells.append(f"{max(row[f'{phase}_peak_gib'] for row in ours for phase in bench_works.PHASES):.2f}")
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def ceiling_lines(found: dict[str, list[dict]]) -> list[str]:
    """A table of what the machine reached in the same runs, a rank with all ranks busy."""
    heads = ["work", "matmul, GFLOP/s", "copy, GB/s", "all-reduce, GB/s", "bare vLLM, tokens/s"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for work, rows in found.items():
        ours = of_system(rows, "ours")
        firsts = [of_run[0] for of_run in runs_of(ours)]
        names = ("matmul_flops_per_s", "copy_bytes_per_s", "all_reduce_bytes_per_s")
        cells = [spread([number / 1e9 for number in values(firsts, name)], 2) for name in names]
        cells.append(spread(values(ours, "bare_tokens_per_s"), 0))
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return lines


def setting_lines(settings: list[dict]) -> list[str]:
    """A table of TRL's tokens/s in each setting that was tried, the fastest first."""
    rates: dict[tuple, dict[str, list[float]]] = {}
    for row in settings:
        of_system_and_work = rates.setdefault((bench_works.work_of(row), row["system"]), {})
        of_system_and_work.setdefault(row["setting"], []).append(row["tokens_per_s"])
    if not rates:
        return ["Not measured yet."]
    lines = ["| work | system | tokens/s by setting |", "|---|---|---|"]
    for name, work in WORKS.items():
        for system in ("trl", "trl-vllm"):
            medians = {setting: median(numbers) for setting, numbers in rates.get((work, system), {}).items()}
            if medians:
                ordered = sorted(medians, key=medians.get, reverse=True)
                cells = ", ".join(f"{setting}: {medians[setting]:.0f}" for setting in ordered)
                lines.append(f"| {name} | {SYSTEMS[system]} | {cells} |")
    return lines


def origin_lines(found: dict[str, list[dict]]) -> list[str]:
    """When, where and with what command the numbers were measured."""
    rows = [row for of_work in found.values() for row in of_work]
    dates = sorted(row["date"] for row in rows)
    machines = sorted(set(values(rows, "machine")))
    commits = sorted(set(values(rows, "commit")))
    rounds = len(set(values(rows, "round")))
    return [
        f"`make bench`, {dates[0]} to {dates[-1]}, {', '.join(machines)};",
        f"commit {', '.join(commits)}; rounds: {rounds}, of {max(values(rows, 'step'))} timed steps.",
        "Medians over all steps, in parentheses the range.",
    ]


def read_gpu_checks(folder: Path) -> dict[str, list[dict]]:
    """{model and machine: rows} of the benchmarks in the JSON files of tools/gpu_check.py --json."""
    found = {}
    for path in sorted(folder.glob("gpu-check-*.json")):
        for row in json.loads(path.read_text())["bench"]:
            found.setdefault(f"{row['model']}, {row['machine']}", []).append(row)
    return found


def gpu_lines(found: dict[str, list[dict]]) -> list[str]:
    """The tables of phases and of ceilings for GPUs."""
    if not found:
        return ["Not measured on a GPU."]
    return [*phase_lines(found), "", *ceiling_lines(found)]


def with_tables(text: str, found: dict[str, list[dict]]) -> str:
    """The page's text with each table renewed between its marks, <!-- NAME --> and <!-- end -->."""
    tables = {
        "origin": origin_lines(found),
        "ratios": ratio_lines(found),
        "phases": phase_lines(found),
        "ceilings": ceiling_lines(found),
        "settings": setting_lines(bench_works.read_results(SETTINGS)),
        "gpus": gpu_lines(read_gpu_checks(RESULTS.parent)),
    }
    for name, lines in tables.items():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        text = head + mark + "\n".join(["", *lines, "", ""]) + end + tail
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="time TRL's settings instead")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    failed = 0
    of_trl = [system for system in args.systems if system != "ours"]
    if of_trl and not args.table:
        bench_trl.setup(TRL)
        for work in args.works:
            bench_works.make_inputs(REPO / "build/bench", WORKS[work])
    if args.tune:
        failed = sum(tune(work, system) for work in args.works for system in of_trl)
    elif not args.table:
        for number in range(1, args.rounds + 1):
            for work in args.works:
                failed += sum(not run_round(work, system, number) for system in args.systems)
    found = rows_by_work(bench_works.read_results(RESULTS))
    if found:
        print("\n".join(ratio_lines(found)))
        PAGE.write_text(with_tables(PAGE.read_text(), found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
