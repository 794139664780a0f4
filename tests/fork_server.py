"""Forks the ranks of a test from one process that has imported torch, Megatron-core and vLLM.

Those imports take each rank of a torchrun ten seconds and more of a core; most runs of the tests take less. What is
under test runs as ever: the script, its process group, vLLM. Only the start and gloo's threads differ, so tests of a
start, of signals and of torchrun's report use processes.Torchrun.

As a program, this file is that process. It reads a job a line from standard input, the arguments of run_job in JSON,
and answers each with its exit code.
"""

import atexit
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import traceback

import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo.parts.base import processes
from grpo.parts.engine import vllm_process
from tests import museum

SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# ---------------------------------------------------------------- in the tests


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class ForkServer:
    """The process that forks, for the script in `sources`: this folder, or a copy of it with changes."""

    def __init__(self, sources=processes.REPO):
        self.process: subprocess.Popen | None = None
        self.settings = {**SETTINGS, "PYTHONPATH": f"{sources}{os.pathsep}{processes.REPO}"}

    def start(self):
        """Start the process, which imports meanwhile; a run does so where it is not running."""
        env = {**os.environ, **self.settings, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA must not start before a fork
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-P", "-u", __file__], cwd=processes.REPO, env=env, **pipes)

    def run(self, printed, script, *arguments, nproc, seconds=600, **env):
        """Run `script` on `nproc` ranks with what torchrun tells them, and `env`; returns 0, or 1 if a rank failed.

        The ranks print into `printed`. Raises AssertionError if they take longer than these seconds.
        """
        if self.process is None:
            self.start()

        port = free_port()
        world = {
            "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "MASTER_PORT": str(port),
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        env = {**os.environ, **world, **env, **self.settings}
        ranks = [{**env, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(nproc)]

        printed.touch()
        job = {"printed": str(printed), "command": [str(script), *arguments], "ranks": ranks, "port": port}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

        output = select.poll()  # select.select takes no descriptor above 1,023, and a long session of tests has more
        output.register(self.process.stdout, select.POLLIN)
        answer = self.process.stdout.readline() if output.poll(1000 * seconds) else ""
        if not answer:
            self.close()
        assert answer, f"the ranks, or the process that forks them, did not end well:\n{printed.read_text()}"
        return int(answer)

    def close(self):
        """End the process, and with it all ranks."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


# ---------------------------------------------------------------- the process


def serve():
    """Import what the ranks need, in the order in which a rank does, and run the jobs."""
    processes.die_with_parent()
    import tests.checkpoint_worker
    import tests.layout_worker  # noqa: F401, train_grpo.py and Megatron-core

    vllm_process.set_environment()
    import datasets  # noqa: F401
    from vllm import LLM, EngineArgs, SamplingParams  # noqa: F401, most of vLLM
    from vllm.distributed.elastic_ep import elastic_execute  # noqa: F401
    from vllm.logger import configure_logging_if_needed
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: F401
    from vllm.model_executor.layers.quantization.online import base  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import cpu_attn  # noqa: F401
    from vllm.v1.core.sched import scheduler  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401, a worker's part of it

    # What each vLLM does at its start and takes a rank half a second.
    configure_logging_if_needed(EngineArgs().create_logging_config())
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None

    # A collection in a rank would write to all of it, and so copy it. At its end vLLM unfreezes, then collects.
    gc.freeze()
    gc.unfreeze = lambda: None
    for line in sys.stdin:
        print(run_job(**json.loads(line)), flush=True)


def run_job(printed, command: list[str], ranks: list[dict[str, str]], port):
    """Run the script on all ranks; returns 0, or 1 if a rank failed, which ends the others."""
    with open(printed, "w") as output:
        running = {start_rank(command, env, output.fileno()) for env in ranks}
    # After the forks, since it has a thread.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        processes.kill_family(pid)  # what it started
        if status:
            code = 1
            for other in running:
                processes.kill_family(other)
    del store
    return code


def share_device():
    """Give the groups of gloo one device: each has a thread that wakes a hundred times a second, and 64 ranks 1,900."""
    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OneDevice(gloo):
        def __init__(self, store, rank, size, timeout):
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice


def start_rank(command: list[str], env: dict[str, str], output):
    """Fork a process that runs the script as its main program; returns its id."""
    pid = os.fork()
    if pid:
        return pid

    os.setsid()
    processes.die_with_parent()
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)

    sys.argv = command
    code = 0
    try:
        museum.put_in(env)
        share_device()
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1

    threading._shutdown()  # the end of a Python program: waiting for threads, then what is registered
    atexit._run_exitfuncs()
    os._exit(code)  # without freeing each module, which would copy all memory that the ranks share


if __name__ == "__main__":
    serve()
