"""The ranks of a run: how they meet, agree and speak. Knows torchrun and torch.distributed, no trainer."""

import datetime
import itertools
import os
import pickle
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from config import RankError, UserError
from support import sandbox

# ---------------------------------------------------------------- before there is a process group


def is_first_rank() -> bool:
    """Whether this process speaks for the run, known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Write to standard error in one piece, whatever the main thread is doing with it."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def die_with_torchrun() -> None:
    """Be killed as soon as torchrun ends, however it does; call it early. Does nothing without torchrun.

    The parent is another then: srun's daemon, which ends its ranks itself, or a shell that may end before them.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    sandbox.die_with_parent()
    if os.getsid(0) != os.getpid():
        return  # a wrapper script is in between
    parent = os.getppid()
    try:
        maps = Path(f"/proc/{parent}/maps").read_text(errors="replace")
        gone = bool(maps) and "libtorch" not in maps
    except OSError as error:
        gone = isinstance(error, PermissionError) and parent == 1  # an init of another user; torchrun can be read
    if gone:  # torchrun ended before this call, and another process adopted this one
        say("torchrun is gone, so this rank ends too")
        os._exit(1)


# ---------------------------------------------------------------- meeting


def join_ranks(timeout_s: float) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT; see init_distributed. Raises RankError."""
    try:
        init_distributed(timeout_s)
    except dist.DistError as error:
        raise RankError(
            f"rank {os.environ['RANK']} cannot meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({str(error).splitlines()[0]}). If the address "
            "is in use, another job has this MASTER_PORT: choose another; else rank 0 is gone or out of reach"
        ) from error


def init_distributed(timeout_s: float) -> None:
    """Join the launcher's world: gloo on the CPU, NCCL (and gloo for Python objects) on GPUs.

    A collective that takes longer than `timeout_s` fails. Raises torch's DistError.
    """
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=fresh_store(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def fresh_store() -> dist.Store:
    """A store for init_process_group with nothing of an earlier start of these ranks in it. Every rank calls this.

    Under --max-restarts torchrun keeps its store (torch 2.13, pytorch issue 135712): a rank could read the address of a
    dead one there, then fail or hang. TORCHELASTIC_RESTART_COUNT does not tell the starts apart: each node has its own.
    So rank 0 gives this start a name, and tells it to each rank in reply to a number that only a living one waits on.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    name = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", name)
        name = store.get(f"name/{name}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    waiting = set(range(1, world_size))
    while waiting:
        for other in [r for r in waiting if store.check([f"hello/{r}"])]:
            store.set(f"name/{store.get(f'hello/{other}').decode()}", name)
        waiting = {r for r in waiting if not store.check([f"heard/{name}/{r}"])}
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


# ---------------------------------------------------------------- agreeing; all ranks call these at the same place


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same on every rank."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def on_first_rank(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, None elsewhere. A mistake it finds raises UserError on every rank."""
    result, message = None, [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except (UserError, ValueError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message)
    if message[0] is not None:
        raise UserError(message[0])
    return result


def gather(value: Any) -> list:
    """The value of every rank, in the order of ranks; anything that can be pickled, the same on every rank.

    Contiguous numpy arrays anywhere in it travel as the bytes they are, and come back as views of one buffer of all
    ranks: a rank's parts are broadcast into it one after the other, so that uneven shares need no padding.
    """
    buffers = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=lambda array: buffers.append(array.raw()))
    headers = [None] * dist.get_world_size()
    dist.all_gather_object(headers, (pickled, [len(buffer) for buffer in buffers]))
    places, total = [], 0  # where each rank's arrays begin, at multiples of 8 bytes, and the end of the last
    for _, sizes in headers:
        places.append(total + np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)]))
        total = int(places[-1][-1])
    array = np.empty(total, np.uint8)  # by numpy, which asks for huge pages: few page faults
    whole, view = torch.from_numpy(array), memoryview(array)
    for start, buffer in zip(places[dist.get_rank()][:-1], buffers, strict=True):
        view[start : start + len(buffer)] = buffer.cast("B")
    for rank, starts in enumerate(places):
        if starts[-1] > starts[0]:
            dist.broadcast(whole[starts[0] : starts[-1]], src=rank)
    return [
        pickle.loads(pickled, buffers=[view[start : start + size] for start, size in zip(starts, sizes, strict=False)])
        for (pickled, sizes), starts in zip(headers, places, strict=True)
    ]


def gather_samples(samples: list, notes: Any) -> tuple[list, list]:
    """The samples of all ranks in the order of their groups, and each rank's notes; on every rank.

    Texts go to rank 0 alone, which writes them; elsewhere `text` is None, so that code which needs it fails at once.
    """
    texts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([sample.text for sample in samples], texts)
    for sample in samples:
        sample.text = None
    everywhere = gather((samples, notes))
    samples = [sample for part, _ in everywhere for sample in part]
    for sample, text in zip(samples, itertools.chain(*texts or []), strict=False):
        sample.text = text
    return sorted(samples, key=lambda sample: sample.group), [notes for _, notes in everywhere]
