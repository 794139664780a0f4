"""The ranks of a run: joining the process group, devices, collectives on Python objects, output. Knows no trainer."""

import datetime
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from config import RankError, UserError
from grpo.parts.base import processes

# ---------------------------------------------------------------- before there is a process group


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints for the run; known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Write a line to standard error by one system call, so that threads do not mix their output."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def die_with_torchrun() -> None:
    """Have the kernel kill this process as soon as torchrun ends, however it does; call it early.

    Does nothing without torchrun, as in a dry run: the parent is then a shell, which may end first.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes.die_with_parent()


# ---------------------------------------------------------------- joining the process group

JOIN = datetime.timedelta(minutes=30)  # to meet: a rank may read its data for long
TELL_S = 30  # after which it is said who is awaited


def join_ranks(timeout_s: float) -> None:
    """Create the process group: gloo, on GPUs NCCL (gloo for objects). RankError where ranks do not meet in time."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK={rank} with WORLD_SIZE={world_size}: legal is 0 to {world_size - 1}")
    try:
        store = fresh_store(rank, world_size)
        dist.init_process_group(
            backend, timeout=datetime.timedelta(seconds=timeout_s), store=store, rank=rank, world_size=world_size
        )
    except dist.DistError as error:
        raise RankError(
            f"rank {rank} cannot meet the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0]}). If the address is in use, another job has this MASTER_PORT: choose "
            "another; else rank 0 has ended or is unreachable"
        ) from error


def fresh_store(rank: int, world_size: int) -> dist.Store:
    """A store for init_process_group without entries of an earlier start of these ranks. Every rank calls this.

    Under --max-restarts torchrun keeps its store (docs/dev/field-notes.md), and its restart count is of one node. So
    rank 0 gives this start a name, and sends it to each rank in reply to a random key that only a living rank waits on.
    """
    holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    waiting = {0} if rank else set(range(1, world_size))
    tell = threading.Timer(
        TELL_S, lambda: say(f"rank {rank} waits for rank {', '.join(map(str, sorted(waiting)))} at {address[0]}")
    )
    if rank <= 1:  # one of them tells
        tell.start()
    try:
        store = dist.TCPStore(*address, world_size, holds_store, JOIN, wait_for_workers=False, multi_tenant=True)
        name = uuid.uuid4().hex
        if rank:
            store.set(f"hello/{rank}", name)
            name = store.get(f"name/{name}").decode()
            store.set(f"heard/{name}/{rank}", "")
            return dist.PrefixStore(name, store)
        end = time.monotonic() + JOIN.total_seconds()
        while waiting:
            for other in [r for r in waiting if store.check([f"hello/{r}"])]:
                store.set(f"name/{store.get(f'hello/{other}').decode()}", name)
            waiting -= {r for r in waiting if store.check([f"heard/{name}/{r}"])}
            if time.monotonic() > end:
                raise RankError(f"rank {', '.join(map(str, sorted(waiting)))} did not come within {JOIN}")
            time.sleep(0.02)
        return dist.PrefixStore(name, store)
    finally:
        tell.cancel()


def note_failure() -> bool:
    """Note in the store that this rank has failed. Returns whether it is the first of its machine in this start, which
    it also is where the store does not answer.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=5))  # a machine may be gone
    try:
        return store.add(f"failed/{socket.gethostname()}", 1) == 1
    except dist.DistError:
        return True


# ---------------------------------------------------------------- collectives; all ranks call these at the same place


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same on every rank."""
    flags = torch.tensor(float(flag), device=device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def on_first_rank(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0; returns its result there, else None. A UserError or ValueError is a UserError on all."""
    result = None
    message = [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except (UserError, ValueError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message)
    if message[0] is not None:
        raise UserError(message[0])
    return result


def describe(values: Sequence[str], machines: Sequence[str] = ()) -> str:
    """Which ranks have which of `values`: "a on rank 0, 1; b on rank 2 (south)", the last where `machines` differ."""
    holders = defaultdict(list)
    for rank, value in enumerate(values):
        holders[value].append(rank)
    parts = []
    for value, held_by in holders.items():
        part = f"{value} on rank {', '.join(map(str, held_by))}"
        if len(set(machines)) > 1:
            part += f" ({', '.join(dict.fromkeys(machines[rank] for rank in held_by))})"
        parts.append(part)
    return "; ".join(parts)


def gather(value: Any) -> list:
    """All-gather a value that can be pickled; the values of all ranks, in the order of ranks, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(x: torch.Tensor, to: torch.device | str) -> torch.Tensor:
    """A tensor on the host, copied to the device `to`; the host does not wait for the copy."""
    return x.pin_memory().to(to, non_blocking=True) if torch.device(to).type == "cuda" else x.to(to)
