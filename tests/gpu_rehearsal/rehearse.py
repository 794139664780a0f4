"""train_grpo.py with a stand-in for vLLM, on a GPU that is not there (device.py), or on the CPU with the same answers.

    torchrun --standalone --nproc_per_node=2 tests/gpu_rehearsal/rehearse.py [--on cpu] \\
        --config configs/tiny.yaml parallel.ep=2 ...

It takes the arguments of train_grpo.py. On the GPU, each rank of a run that succeeds writes
output_dir/waits_<rank>.json: {"counts": [[phase, place, kind, number], ...], "units": {"update": number, ...},
"launches": [[phase, place, operation, number], ...]}.

The answers are random numbers that follow from the seeds of their prompts, so they are the same on any layout. Besides
what FakeTensors refuse, the run fails if a weight is pushed that is not on the GPU, or not contiguous.
"""

import argparse
import collections
import json
import os
import sys
from pathlib import Path

from tests.gpu_rehearsal import shim


def main(argv: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu")
    args, argv = parser.parse_known_args(argv)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compiler of torch's, nor Triton's below
    if args.on == "gpu":
        shim.load()
        from tests.gpu_rehearsal import device

        device.install()
    import train_grpo
    from grpo.parts.model import kernels
    from tests.gpu_rehearsal import stand_ins

    kernels.runs_on = lambda x: False
    train_grpo.Engine = stand_ins.Engine
    units: collections.Counter = collections.Counter()
    if args.on == "gpu":
        stand_ins.replace_nccl()
        stand_ins.follow_phases(device.WAITS, units)
    code = train_grpo.main(argv)
    if args.on == "gpu" and code == 0:
        (out,) = (text.removeprefix("output_dir=") for text in argv if text.startswith("output_dir="))
        counts, launches = (
            [[*key, number] for key, number in sorted(found.items())]
            for found in (device.WAITS.counts, device.WAITS.launches)
        )
        file = Path(out, f"waits_{os.environ['RANK']}.json")
        file.write_text(json.dumps({"counts": counts, "units": units, "launches": launches}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
