"""train_grpo.py with a stand-in for vLLM, on a GPU that is not there (device.py), or on the CPU with the same answers.

    python tests/gpu_rehearsal/rehearse.py [--on cpu] [--before FILE.py] --config configs/tiny.yaml model.path=... ...
    torchrun --standalone --nproc_per_node=2 tests/gpu_rehearsal/rehearse.py --config ... parallel.ep=2

The arguments are those of train_grpo.py. `--before` is a file that is run before the script is. On the GPU, each rank
of a run that succeeds writes output_dir/waits_<rank>.json: {"counts": [[phase, place, kind, number], ...], "units":
{"update": number, ...}}.

The answers are random numbers that follow from the seeds of their prompts, so they are the same on any layout. Besides
what FakeTensors refuse, the run fails if a weight is pushed that is not on the GPU, or not contiguous.
"""

import argparse
import collections
import json
import os
import socket
import sys
from pathlib import Path

from tests.gpu_rehearsal import shim


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--before", type=Path)
    return parser.parse_known_args(argv)


def set_environment() -> None:
    """A world of one rank, where no launcher has made one; no compiler of torch's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": port, "TORCHDYNAMO_DISABLE": 1}).items():
        os.environ.setdefault(name, str(value))


def main(argv: list[str]) -> int:
    args, argv = parse_args(argv)
    set_environment()
    if args.on == "gpu":
        shim.load()
        from tests.gpu_rehearsal import device

        device.install()
    import train_grpo
    from tests.gpu_rehearsal import stand_ins

    stand_ins.replace_vllm()
    units: collections.Counter = collections.Counter()
    if args.on == "gpu":
        stand_ins.replace_nccl()
        stand_ins.follow_phases(device.WAITS, units)
    if args.before:
        exec(compile(args.before.read_text(), args.before, "exec"), {})
    code = train_grpo.main(argv)
    if args.on == "gpu" and code == 0:
        (out,) = (text.removeprefix("output_dir=") for text in argv if text.startswith("output_dir="))
        counts = [[*key, number] for key, number in sorted(device.WAITS.counts.items())]
        file = Path(out, f"waits_{os.environ['RANK']}.json")
        file.write_text(json.dumps({"counts": counts, "units": units}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
