"""The ranks of a run: how they meet, devices, collectives on Python objects, output."""

import datetime
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist

from config import RankError, UserError
from grpo.parts.base import processes

# ---------------------------------------------------------------- before there is a process group


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints for the run; known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def tell(text):
    """Print a line, on the first rank."""
    if is_first_rank():
        print(text, flush=True)


def say(text):
    """Write a line to standard error in one system call, so that threads do not mix their output."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def die_with_torchrun():
    """Have the kernel kill this process as soon as torchrun ends, however it ends. Call this early.

    Without torchrun, as in a dry run, it does nothing: the parent is then a shell, which may end first.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes.die_with_parent()


# ---------------------------------------------------------------- joining the process group

JOIN = datetime.timedelta(minutes=30)  # for all ranks to meet: one may read its data for long
TELL_S = 30  # seconds until a line says which ranks are missing


def join_ranks(timeout_s):
    """Create the process group: gloo, and on GPUs NCCL for tensors. Raises RankError if ranks do not meet in time."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = fresh_store(rank, world_size)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    except dist.DistError as error:
        raise RankError(
            f"rank {rank} cannot meet the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0]}). If the address is in use, another job has this MASTER_PORT: choose "
            "another. Otherwise rank 0 has ended or is unreachable"
        ) from error


def fresh_store(rank, world_size) -> dist.Store:
    """A store for init_process_group without entries of an earlier start of these ranks. Every rank calls this.

    Under --max-restarts torchrun keeps its store (docs/dev/field-notes.md), and its restart count is of one node. So
    rank 0 gives this start a name, and sends it to each rank in reply to a random key that only a living rank waits on.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    missing = set(range(1, world_size)) if rank == 0 else {0}
    reminder = threading.Timer(TELL_S, lambda: say(f"rank {rank} waits for rank {listed(missing)} at {host}"))
    if rank <= 1:  # one of them reminds
        reminder.start()

    try:
        holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(host, port, world_size, holds_store, JOIN, wait_for_workers=False, multi_tenant=True)
        name = uuid.uuid4().hex
        if rank == 0:
            send_name(store, name, missing)
        else:
            store.set(f"hello/{rank}", name)
            name = store.get(f"name/{name}").decode()
            store.set(f"heard/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    finally:
        reminder.cancel()


def send_name(store, name, missing: set[int]):
    """Send the start's name to the ranks in `missing`, and remove each that has it. Raises RankError after JOIN."""
    end = time.monotonic() + JOIN.total_seconds()
    while missing:
        if time.monotonic() > end:
            raise RankError(f"rank {listed(missing)} did not come within {JOIN}")
        for rank in list(missing):
            if store.check([f"heard/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]):  # perhaps of an earlier start, until this start's overwrites it
                key = store.get(f"hello/{rank}").decode()
                store.set(f"name/{key}", name)
        time.sleep(0.02)


def listed(ranks):
    """Numbers of ranks for a message: "1, 2"."""
    return ", ".join(map(str, sorted(ranks)))


def note_failure() -> bool:
    """Note in the store that this rank has failed. Returns whether it is the first of its machine in this start.

    If the store does not answer, the rank counts as the first.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=5))  # a machine may be gone
    try:
        return store.add(f"failed/{socket.gethostname()}", 1) == 1
    except dist.DistError:
        return True


# ---------------------------------------------------------------- collectives; all ranks call these at the same place


def on_any_rank(flag) -> bool:
    """Whether the flag is set on any rank. The answer is the same on every rank."""
    flags = torch.tensor(float(flag), device=device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def on_first_rank(action: Callable):
    """Run `action` on rank 0. Returns its result there, else None. A UserError or ValueError is a UserError on all."""
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


def describe(values: list[str], machines=()) -> str:
    """Which ranks have which of `values`: "a on rank 0, 1; b on rank 2". If `machines` differ, they are named too."""
    holders = defaultdict(list)
    for rank, value in enumerate(values):
        holders[value].append(rank)

    parts = []
    for value, held_by in holders.items():
        part = f"{value} on rank {listed(held_by)}"
        if len(set(machines)) > 1:
            names = dict.fromkeys(machines[rank] for rank in held_by)
            part += f" ({', '.join(names)})"
        parts.append(part)
    return "; ".join(parts)


def gather(value) -> list:
    """The values of all ranks, in the order of ranks, on every rank. They are pickled."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(x: torch.Tensor, to: torch.device | str) -> torch.Tensor:
    """Copy a tensor on the host to the device `to`. The host does not wait for the copy."""
    return x.pin_memory().to(to, non_blocking=True) if torch.device(to).type == "cuda" else x.to(to)
