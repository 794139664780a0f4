"""Say whether two runs computed the same, bit for bit.

    python -m tests.compare_runs outputs/a outputs/b
    python -m tests.compare_runs --shared outputs/a outputs/b     of two versions: without columns that only one has

Compares the lines of metrics.jsonl without the columns of EXCLUDED, all fields of all samples in rollouts/, and the
exported weights in hf/ and adapter/. Prints one line a kind; below it what only one run has, and the first value that
differs. Exit code 0: equal, 1: not equal, 2: a folder holds no metrics.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Prefixes of the columns that depend on the machine and its load.
EXCLUDED = ("time/", "speed/", "idle", "mem/", "gpu/")

Records = dict[str, dict]  # place → {name: value}


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
    code = 0
    for kind, read in {"metrics": read_metrics, "rollouts": read_rollouts, "weights": read_weights}.items():
        a, b = read(args.a), read(args.b)
        found = differences(a, b, shared=args.shared and kind == "metrics")
        print(f"{kind}: {'DIFFERENT' if found else 'equal'}, {len(a.keys() | b.keys())} records compared")
        for line in found:
            print(f"  {line}")
            code = 1
    return code


def differences(a: Records, b: Records, shared: bool) -> list[str]:
    """What only one run has, each with its first place, and the first value that differs; `shared`: names that only
    one has do not count."""
    lacking: dict[str, str] = {}
    first = []
    for place in dict.fromkeys([*a, *b]):
        if place not in a or place not in b:
            lacking.setdefault(f"only in {'A' if place in a else 'B'}: whole records", place)
            continue
        for name in dict.fromkeys([*a[place], *b[place]]):
            if name not in a[place] or name not in b[place]:
                if not shared:
                    lacking.setdefault(f"only in {'A' if name in a[place] else 'B'}: {name}", place)
            elif not first and (text := describe(a[place][name], b[place][name])):
                first = [f"first difference: {place}, {name}: {text}"]
    return [f"{what}, first at {place}" for what, place in lacking.items()] + first


def describe(a: Any, b: Any) -> str | None:
    """How two values of JSON, or two tensors, differ; None where they are equal. Two lists differ by their first item
    that does. NaN equals NaN, 1 equals 1.0; of tensors all bits count."""
    if isinstance(a, torch.Tensor):
        return describe_tensors(a, b)
    if a == b or json.dumps(a) == json.dumps(b):
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        items = enumerate(map(describe, a, b))
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


# ---------------------------------------------------------------- what a run wrote


def read_metrics(run: Path) -> Records:
    """The lines of metrics.jsonl, without the columns of EXCLUDED."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    return {f"line {n}, step {row['step']}": row for n, row in enumerate(lasting(rows), 1)}


def lasting(metrics: list[dict]) -> list[dict]:
    """Metrics without times and memory: the columns that two equal runs share."""
    return [{name: value for name, value in row.items() if not name.startswith(EXCLUDED)} for row in metrics]


def read_rollouts(run: Path) -> Records:
    """The samples of rollouts/."""
    return {
        f"{path.relative_to(run)} line {n}": json.loads(line)
        for path in sorted(run.glob("rollouts/*.jsonl"))
        for n, line in enumerate(path.open(encoding="utf-8"), 1)
    }


def read_weights(run: Path) -> Records:
    """The tensors of each exported folder."""
    weights: Records = {}
    for path in sorted([*run.glob("hf/step_*/*.safetensors"), *run.glob("adapter/step_*/*.safetensors")]):
        weights.setdefault(str(path.parent.relative_to(run)), {}).update(load_file(path))
    return weights


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
