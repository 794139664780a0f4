"""Test on this machine's GPUs what only GPUs can show, and measure a training step. Run it first on a new cluster.

    python tools/gpu_check.py              # one GPU; make gpu-check
    python tools/gpu_check.py --nproc 8    # eight: also sharded and over NCCL; make gpu-check NPROC=8
    python tools/gpu_check.py -k attention --no-bench

Three parts, each in processes of its own: tools/doctor.py, `pytest -m gpu` and benchmarks/ours.py on two models;
docs/machines.md says what the table at the end shows. Exit code: 0 nothing failed, 1 something failed, 2 no GPU.
"""

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tools import machine  # noqa: E402

TIMES_S = {"doctor": 120, "tests": 1200, "bench": 300}  # limit of each part
BENCHES = {"qwen2.5-0.5b": (16384, 44), "qwen2.5-1.5b": (8192, 70)}  # model → tokens of a row, GiB that it needs
SHOWN = ("tokens/s", "step s", "train s", "sync s", "MFU of train %", "bare vLLM tokens/s")


class Row(NamedTuple):
    what: str
    verdict: str  # ok, failed, skipped
    note: str = ""  # what was measured, why it failed or was skipped


def run(part: str, command: list[str], folder: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """(exit code, None at the time limit; output) of a part, whose output goes into a file of the folder as well."""
    printed = folder / f"{part.replace(' ', '-')}.txt"
    print(f"{part}: {' '.join(command)}", flush=True)
    with printed.open("w") as file:
        try:
            settings = {"cwd": REPO, "env": {**os.environ, **env}, "timeout": TIMES_S[part.partition(" ")[0]]}
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **settings).returncode
        except subprocess.TimeoutExpired:
            code = None
    return code, printed.read_text(errors="replace")


def ended(part: str, code: int | None, text: str) -> Row:
    """The row of a part that has not ended as it should."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
    how = "not within its time limit" if code is None else f"exit code {code}"
    return Row(part, "failed", f"{how}: {last.strip()[:200]}")


def of_doctor(code: int | None, text: str) -> Iterator[Row]:
    stops = re.findall(r"^STOP +(.*)", text, flags=re.MULTILINE)
    if code == 0:
        yield Row("doctor", "ok", text.splitlines()[-1])
    elif stops:
        yield from (Row("doctor", "failed", stop) for stop in stops)
    else:
        yield ended("doctor", code, text)


def of_tests(report: Path, code: int | None, text: str) -> Iterator[Row]:
    """The results of `pytest -m gpu` in its JUnit file, those that were skipped counted by reason."""
    if not report.exists():
        yield ended("tests", code, text)
        return
    skipped = Counter()
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]} {case.get('name')}"
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is not None:
            skipped[case.find("skipped").get("message")] += 1
        elif wrong is not None:
            yield Row(name, "failed", wrong.get("message", "").strip().partition("\n")[0][:200])
        else:
            found = [f"{p.get('name')} {p.get('value')}" for p in case.iter("property")]
            yield Row(name, "ok", ", ".join([*found, f"{float(case.get('time', 0)):.0f} s"]))
    yield from (Row(f"{count} tests", "skipped", reason) for reason, count in skipped.items())


def of_bench(part: str, code: int | None, text: str) -> Iterator[Row]:
    table = dict(re.findall(r"^(\S.*?) {2,}(\S+)$", text, flags=re.MULTILINE))
    if code == 0:
        yield Row(part, "ok", ", ".join(f"{name} {table[name]}" for name in SHOWN if name in table))
    else:
        yield ended(part, code, text)


def check(args: argparse.Namespace, visible: list[str]) -> Iterator[Row]:
    """The rows of all parts, part by part, on the first --nproc of the visible GPUs."""
    env = {"CUDA_VISIBLE_DEVICES": ",".join(visible[: args.nproc]), "TOKENIZERS_PARALLELISM": "false"}
    yield from of_doctor(*run("doctor", [sys.executable, "-m", "tools.doctor"], args.folder, {}))
    report = args.folder / "tests.xml"
    report.unlink(missing_ok=True)
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-ra", f"--junitxml={report}", "tests"]
    yield from of_tests(report, *run("tests", [*tests, *(["-k", args.k] if args.k else [])], args.folder, env))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    gib = min((int(gpu["total_mib"]) / 1024 for gpu in machine.smi_facts()["gpus"]), default=0)
    for model, (row, needed) in BENCHES.items():
        if args.no_bench or gib < needed:
            yield Row(f"bench {model}", "skipped", f"needs {needed} GiB, this GPU has {gib:.0f}, or --no-bench")
            continue
        command = [
            *torchrun, "benchmarks/ours.py", "--model", model, "--dtype", "bf16", "--tokens", "256", "--warmup", "1",
            "--steps", "2", "--csv", str(args.folder / "bench.csv"), f"rollout.prompts_per_step={32 * args.nproc}",
            "rollout.gpu_memory_utilization=0.4", f"train.max_tokens_per_micro_batch={row}",
            f"train.logprob_max_tokens_per_micro_batch={row}",
        ]  # fmt: skip
        yield from of_bench(f"bench {model}", *run(f"bench {model}", command, args.folder, env))


def main(argv: list[str], gpus: int) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1, help="GPUs to use")
    parser.add_argument("-k", help="run only tests with names like this, as pytest has it")
    parser.add_argument("--no-bench", action="store_true", help="measure no speed")
    parser.add_argument("--folder", type=Path, default=REPO / "build/gpu-check", help="for the output")
    args = parser.parse_args(argv)
    if gpus < args.nproc:
        print(f"error: --nproc={args.nproc}, {gpus} GPUs are visible (python -m tools.doctor says why)")
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    rows = list(check(args, named.split(",") if named else [str(number) for number in range(gpus)]))
    text = "\n".join(f"{row.verdict:7}  {row.what}: {row.note}" for row in rows)
    counts = Counter(row.verdict for row in rows)
    text += f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
    (args.folder / "table.txt").write_text(f"{text}\n")
    print(f"\n{text}\noutput: {os.path.relpath(args.folder)}")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    import torch

    sys.exit(main(sys.argv[1:], torch.cuda.device_count()))
