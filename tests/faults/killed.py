"""train_grpo.py whose first rank starts a kill, as test_kills.py plans it; it prints how long each phase took."""

import collections
import json
import os
import random
import subprocess
import sys
import time

import psutil

import train_grpo
from support.base import hf_folder
from support.model import checkpoint

PLAN = "KILL"  # environment variable: [phase, number of its begin, seconds after that, "all" or "one"] in JSON; or []
BEGUN: collections.Counter = collections.Counter()  # phase → how often


def watch(owner, name: str, phase: str) -> None:
    """Let the function `name` of `owner` print how long it took, and start the kill where it begins."""
    function = getattr(owner, name)
    plan = json.loads(os.environ[PLAN])

    def watched(*args, **kwargs):
        BEGUN[phase] += 1
        if plan[:2] == [phase, BEGUN[phase]]:
            start_kill(*plan[2:])
        began = time.monotonic()
        result = function(*args, **kwargs)
        print(f"took {phase} {time.monotonic() - began}\n", end="", flush=True)
        return result

    setattr(owner, name, watched)


def start_kill(seconds: float, whom: str) -> None:
    """Let a shell, which waits for nothing in Python, kill torchrun and all ranks at once, or one random rank."""
    torchrun = psutil.Process(os.getppid())
    ranks = [child.pid for child in torchrun.children() if "RANK" in child.environ()]
    pids = [torchrun.pid, *ranks] if whom == "all" else [random.choice(ranks)]
    command = f"sleep {seconds}; kill -KILL {' '.join(map(str, pids))} && echo the kill is done"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        watch(train_grpo, "sample_and_grade", "rollout")
        watch(train_grpo, "forward_backward", "update")
        watch(train_grpo, "push_weights", "push")
        watch(hf_folder, "export_hf", "export")
        watch(checkpoint, "write_shards", "save")  # runs in the writer's thread
        watch(checkpoint.CheckpointWriter, "finish", "save")
    sys.exit(train_grpo.main(sys.argv[1:]))
