"""Say whether two runs computed the same, bit for bit.

    python -m tests.compare_runs outputs/a outputs/b

Compares the lines of metrics.jsonl without the columns of EXCLUDED, all fields of all samples in rollouts/, and the
exported weights in hf/ and adapter/. Exit code 0: equal, 1: not equal; it fails where a folder has no metrics.jsonl.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from oracle.run import read_rows

# Prefixes of the columns that depend on the machine and its load.
EXCLUDED = ("time/", "speed/", "idle", "mem/", "gpu/")

Values = dict[tuple[str, str], object]  # (place, name) → a value of JSON, or a tensor


def main(a: str, b: str) -> int:
    print(f"A = {a}, B = {b}")
    code = 0
    others = read(Path(b))
    for kind, in_a in read(Path(a)).items():
        in_b = others[kind]
        if kind == "weights":  # a resumed run may have exported more often
            in_a, in_b = shared_exports(in_a, in_b)
        found = differences(in_a, in_b)
        print(f"{kind}: {'DIFFERENT' if found else 'equal'}, {len(in_a.keys() | in_b.keys())} values compared")
        for line in found:
            print(f"  {line}")
            code = 1
    return code


def shared_exports(a: Values, b: Values) -> tuple[Values, Values]:
    """The values of the exports that both runs have, if they share any; says which others there are."""
    exports = [{place for place, _ in values} for values in (a, b)]
    shared = set.intersection(*exports)
    if not shared:
        return a, b
    for run, other in zip("AB", exports, strict=True):
        for place in sorted(other - shared):
            print(f"  only {run} exported {place}")
    return tuple({key: value for key, value in values.items() if key[0] in shared} for values in (a, b))


def differences(a: Values, b: Values) -> list[str]:
    """How many values only one run has, with the first of them, and the first value that differs."""
    found = []
    for run, lacking in (("A", [key for key in a if key not in b]), ("B", [key for key in b if key not in a])):
        if lacking:
            found.append(f"only in {run}: {len(lacking)} values, the first is {', '.join(lacking[0])}")
    for place, name in a:
        if (place, name) in b and (text := describe(a[place, name], b[place, name])):
            return [*found, f"first difference: {place}, {name}: {text}"]
    return found


def describe(a, b) -> str:
    """How two values of JSON, or two tensors, differ; empty where all bits are equal."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next((f"item {n}: {text}" for n, text in enumerate(map(describe, a, b)) if text), "")
    if not isinstance(a, torch.Tensor):
        a, b = json.dumps(a), json.dumps(b)
        return "" if a == b else f"A {a}, B {b}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"A {a.dtype} {list(a.shape)}, B {b.dtype} {list(b.shape)}"
    bits_a, bits_b = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    if torch.equal(bits_a, bits_b):
        return ""
    n = int((bits_a != bits_b).nonzero()[0]) // a.element_size()
    return f"element {n} of {a.numel()}: A {a.flatten()[n].item()!r}, B {b.flatten()[n].item()!r}"


def read(run: Path) -> dict[str, Values]:
    """The values of each kind."""
    metrics = lasting(read_rows(run / "metrics.jsonl"))
    files = sorted(run.glob("rollouts/*.jsonl"))
    samples = [(f"rollouts/{path.name} line {n}", row) for path in files for n, row in enumerate(read_rows(path), 1)]
    weights = sorted([*run.glob("hf/step_*/*.safetensors"), *run.glob("adapter/step_*/*.safetensors")])
    return {
        "metrics": values_of((f"line {n}, step {row['step']}", row) for n, row in enumerate(metrics, 1)),
        "rollouts": values_of(samples),
        "weights": values_of((str(path.parent.relative_to(run)), load_file(path)) for path in weights),
    }


def values_of(rows) -> Values:
    """The values of (place, {name: value})."""
    return {(place, name): value for place, row in rows for name, value in row.items()}


def lasting(metrics: list[dict]) -> list[dict]:
    """Metrics without times and memory: the columns that two equal runs share."""
    return [{name: value for name, value in row.items() if not name.startswith(EXCLUDED)} for row in metrics]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
