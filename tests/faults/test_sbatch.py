"""docs/train_grpo.sbatch with a real torchrun: srun, scancel, scontrol and what the ranks run are stand-ins."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.processes import wait_until

STANDINS = {
    "srun": """echo "srun $*" >> calls
        shift
        echo $$ > torchrun.pid
        exec "$@" """,
    "scancel": 'echo "scancel $*" >> calls; kill -TERM $(cat torchrun.pid)',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "scontrol $*" >> calls',
}
RANK = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (open("saved." + os.environ["RANK"], "w"), sys.exit(0)))
open("ready." + os.environ["RANK"], "w")
signal.pause() if "stops" in sys.argv else sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stops", "fails"])
def test_a_job_that_must_stop_saves_and_is_requeued_and_one_that_fails_is_not(tmp_path, how):
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train_grpo.py").write_text(RANK)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | job | {"SLURM_GPUS_ON_NODE": "2", "PATH": path}
    script = subprocess.Popen(["bash", REPO / "docs/train_grpo.sbatch", how], cwd=tmp_path, env=env)
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, 120)
    if how == "stops":
        script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 1  # torchrun's, of either
    srun, *calls = (tmp_path / "calls").read_text().splitlines()
    assert srun.startswith("srun --kill-on-bad-exit=1 torchrun --nnodes=1 --nproc_per_node=2 ")
    assert srun.endswith(f" --rdzv-endpoint=localhost:29400 train_grpo.py {how} resume=auto")
    stopped = ["scancel --signal=TERM 4711", "scontrol requeue 4711"]
    assert calls == (stopped if how == "stops" else [])
    assert len(list(tmp_path.glob("saved.*"))) == (2 if how == "stops" else 0)
