"""Say whether two runs computed the same, bit for bit.

    python -m tests.compare_runs outputs/a outputs/b
    python -m tests.compare_runs --shared outputs/a outputs/b     of two versions: without columns that only one has

Compares the lines of metrics.jsonl without the columns of EXCLUDED, all fields of all samples in rollouts/, and the
exported weights in hf/ and adapter/. Prints one line a kind; below it what only one run has, and the first value that
differs. With --shared a column of metrics.jsonl that only one run has is listed, but is no difference. Exit code 0:
equal, 1: not equal, 2: a folder holds no metrics.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Prefixes of the columns that depend on the machine and its load.
EXCLUDED = ("time/", "speed/", "idle", "mem/", "gpu/")

Pair = tuple[str, dict | None, dict | None]  # place, record of A, record of B; None where a run has no such record


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="OUTPUT_A")
    parser.add_argument("b", type=Path, metavar="OUTPUT_B")
    parser.add_argument("--shared", action="store_true", help="compare the columns of metrics.jsonl that both have")
    args = parser.parse_args(argv)
    for folder in (args.a, args.b):
        if not (folder / "metrics.jsonl").exists():
            print(f"error: {folder} holds no metrics.jsonl; give the output_dir of a run", file=sys.stderr)
            return 2
    print(f"A = {args.a}, B = {args.b}")
    equal = True
    for kind, pairs, describe in (
        ("metrics", metrics_pairs(args.a, args.b), describe_values),
        ("rollouts", rollout_pairs(args.a, args.b), describe_values),
        ("weights", weight_pairs(args.a, args.b), describe_tensors),
    ):
        count, missing, differences = compare(pairs, describe)
        if not (args.shared and kind == "metrics"):
            differences = missing + differences
            missing = []
        print(f"{kind}: {'DIFFERENT' if differences else 'equal'}, {count} records compared")
        for line in missing:
            print(f"  left out: {line}")
        for line in differences:
            print(f"  {line}")
        equal = equal and not differences
    return 0 if equal else 1


def compare(pairs: Iterator[Pair], describe: Callable[[Any, Any], str | None]) -> tuple[int, list[str], list[str]]:
    """The number of records; every name that only one run has; records that only one has, the first differing value.

    `describe` says how two values differ; None where they are equal.
    """
    records = 0
    missing: dict[str, str] = {}  # what one run lacks → where it is first missing
    whole: dict[str, str] = {}  # the same of whole records
    first = []
    for place, a, b in pairs:
        records += 1
        if a is None or b is None:
            whole.setdefault(f"only in {'A' if b is None else 'B'}: whole records", place)
            continue
        for name in [*a, *(name for name in b if name not in a)]:
            if name not in b:
                missing.setdefault(f"only in A: {name}", place)
            elif name not in a:
                missing.setdefault(f"only in B: {name}", place)
            elif not first and (text := describe(a[name], b[name])):
                first = [f"first difference: {place}, {name}: {text}"]
    return records, list_places(missing), list_places(whole) + first


def list_places(found: dict[str, str]) -> list[str]:
    return [f"{what}, first at {place}" for what, place in found.items()]


def describe_values(a: Any, b: Any) -> str | None:
    """How two values of JSON differ, None where they are equal; two lists by their first differing item. NaN equals
    NaN, 1 equals 1.0."""
    if a == b or json.dumps(a) == json.dumps(b):
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        items = enumerate(map(describe_values, a, b))
        return next(f"item {number}: {text}" for number, text in items if text)
    return f"A {json.dumps(a)}, B {json.dumps(b)}"


def describe_tensors(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How two tensors differ, None where type, shape and all bits are equal."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"A {a.dtype} {list(a.shape)}, B {b.dtype} {list(b.shape)}"
    bytes_a, bytes_b = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    if torch.equal(bytes_a, bytes_b):
        return None
    place = int((bytes_a != bytes_b).nonzero()[0]) // a.element_size()
    return f"element {place} of {a.numel()}: A {a.flatten()[place].item()!r}, B {b.flatten()[place].item()!r}"


def metrics_pairs(a: Path, b: Path) -> Iterator[Pair]:
    """The lines of metrics.jsonl side by side, without the columns of EXCLUDED."""
    for number, (row_a, row_b) in enumerate(zip_longest(*(read_rows(run / "metrics.jsonl") for run in (a, b))), 1):
        step = (row_a or row_b).get("step")
        yield f"line {number}, step {step}", comparable(row_a), comparable(row_b)


def comparable(row: dict | None) -> dict | None:
    """The columns of a line of metrics.jsonl that two equal runs share."""
    if row is None:
        return None
    return {name: value for name, value in row.items() if not name.startswith(EXCLUDED)}


def rollout_pairs(a: Path, b: Path) -> Iterator[Pair]:
    """The samples of rollouts/ side by side, file by file."""
    for name in names_in(a, b, "rollouts/*.jsonl"):
        samples = zip_longest(read_rows(a / name), read_rows(b / name))
        for number, (sample_a, sample_b) in enumerate(samples, 1):
            yield f"{name} line {number}", sample_a, sample_b


def weight_pairs(a: Path, b: Path) -> Iterator[Pair]:
    """The tensors of each exported folder side by side, as {name: tensor}."""
    for name in [*names_in(a, b, "hf/step_*"), *names_in(a, b, "adapter/step_*")]:
        yield name, read_tensors(a / name), read_tensors(b / name)


def names_in(a: Path, b: Path, pattern: str) -> list[str]:
    """Paths in either run that match, relative to it."""
    return sorted({str(path.relative_to(run)) for run in (a, b) for path in run.glob(pattern)})


def read_rows(path: Path) -> Iterator[dict]:
    """The objects of a file of JSON lines, none where there is no such file."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def read_tensors(folder: Path) -> dict[str, torch.Tensor] | None:
    """All tensors in the safetensors of a folder, None where there is no such folder."""
    if not folder.exists():
        return None
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
