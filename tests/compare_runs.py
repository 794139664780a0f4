"""Say whether two runs computed the same, bit for bit.

    python -m tests.compare_runs outputs/a outputs/b

Compares the lines of metrics.jsonl without the columns of EXCLUDED, all fields of all samples in rollouts/, and the
exported weights in hf/ and adapter/. The exit code is 0 if they are equal and 1 if not. It fails if a folder has no
metrics.jsonl.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from oracle.run import read_rows

# Prefixes of the columns that depend on the machine and its load.
EXCLUDED = ("time/", "speed/", "idle", "mem/", "gpu/", "busy_frac")


def main(a, b):
    print(f"A = {a}, B = {b}")
    all_a, all_b = read(Path(a)), read(Path(b))
    code = 0

    for kind, in_a in all_a.items():
        found = first_difference(in_a, all_b[kind])
        print(f"{kind}: {'DIFFERENT' if found else 'equal'}, {len(in_a.keys() | all_b[kind].keys())} places compared")
        if found:
            print(f"  first difference: {found}")
            code = 1
    return code


def read(run) -> dict[str, dict]:
    """{kind: {place: values by name}} of a run."""
    metrics = lasting(read_rows(run / "metrics.jsonl"))
    samples = {}
    for path in sorted(run.glob("rollouts/*.jsonl")):
        for number, row in enumerate(read_rows(path), 1):
            samples[f"rollouts/{path.name} line {number}"] = row

    exports = sorted([*run.glob("hf/step_*/*.safetensors"), *run.glob("adapter/step_*/*.safetensors")])
    return {
        "metrics": {f"line {number}, step {row['step']}": row for number, row in enumerate(metrics, 1)},
        "rollouts": samples,
        "weights": {str(path.parent.relative_to(run)): load_file(path) for path in exports},
    }


def first_difference(a, b):
    """Where two values of JSON, or two tensors, differ first, and how; empty if all bits are equal."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        a, b = ({f"item {number}": item for number, item in enumerate(values)} for values in (a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        for name in a | b:
            if name not in a or name not in b:
                return f"{name}: only in {'A' if name in a else 'B'}"
            found = first_difference(a[name], b[name])
            if found:
                return f"{name}: {found}"
        return ""

    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"A {a.dtype} {list(a.shape)}, B {b.dtype} {list(b.shape)}"
        bits_a, bits_b = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
        differ = (bits_a != bits_b).nonzero()
        if not len(differ):
            return ""
        n = int(differ[0]) // a.element_size()
        return f"element {n} of {a.numel()}: A {a.flatten()[n].item()!r}, B {b.flatten()[n].item()!r}"

    a, b = json.dumps(a), json.dumps(b)  # NaN equals NaN
    return "" if a == b else f"A {a}, B {b}"


def lasting(metrics: list[dict]) -> list[dict]:
    """Metrics without times and memory: the columns that two equal runs share."""
    return [{name: value for name, value in row.items() if not name.startswith(EXCLUDED)} for row in metrics]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
