"""What keeps a run from being lost, stuck or mixed up: stop requests, a watchdog, a lock, checks before the start.

Knows torchrun and torch.distributed, no trainer. Importing it does nothing; messages are ValueErrors for the user.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import sandbox

# ---------------------------------------------------------------- stop requests

SAME_REQUEST_S = 2.0  # a scheduler may signal every process while torchrun passes the same signal on


class StopSignals:
    """Turns SIGTERM and SIGINT into `requested`, the first one's name; make it on the main thread.

    `requested` is this rank's alone and changes at any moment: the ranks have to agree on it before they act.
    """

    # torchrun starts each rank in a session of its own, so a Ctrl-C reaches the ranks through torchrun only (torch
    # 2.13). It passes the signal on once, waits --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT; 30 s, before torch
    # 2.12 always), then kills. A second Ctrl-C makes it send SIGTERM, not SIGINT. Its own exit code is 1 either way.

    def __init__(self):
        self.requested: str | None = None
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A handler runs once the main thread is back in Python; the pipe is written at once, even in a collective.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _note(self, number: int, _frame=None) -> None:
        self.requested = self.requested or signal.Signals(number).name

    def _listen(self, pipe: int) -> None:
        first, since = None, 0.0
        while True:
            number = os.read(pipe, 1)[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if first is None:
                first, since = number, time.monotonic()
                self._note(number)
                if os.environ.get("RANK", "0") == "0":
                    say(f"{self.requested}: finishing this phase, then saving; a second Ctrl-C stops at once")
            elif signal.SIGINT in (first, number) and time.monotonic() - since >= SAME_REQUEST_S:
                os._exit(130)


def say(text: str) -> None:
    """Write to standard error in one piece, whatever the main thread is doing with it."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def die_with_torchrun() -> None:
    """Be killed as soon as torchrun ends, however it does; call it early. Does nothing without torchrun."""
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


# ---------------------------------------------------------------- watchdog

STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "stuck in the kernel: a disk, network or GPU driver does not return",
    "Z": "dead",
}


class Watchdog:
    """Ends a run in which no rank has finished a phase for `timeout_s`, after printing which ranks lag, and where.

    Every rank makes one after init_process_group; 0 turns it off. All ranks exit with 1, so that torchrun
    --max-restarts can go on from a checkpoint. A rank whose main thread holds Python's lock inside a C call cannot
    answer: the others print and kill it, and it is asked for its stack by SIGUSR2.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s, self.interval = timeout_s, min(timeout_s / 10, 5.0)
        self.rank, self.host = int(os.environ["RANK"]), os.environ.get("GROUP_RANK", "0")
        self.at = (0, "start", time.monotonic())  # replaced as a whole, so no thread sees half of it
        self.total = 0  # phases that all ranks together have finished, as last heard
        self.alarm, self.ended = threading.Event(), threading.Event()
        self.talk = threading.Thread(target=self._talk, daemon=True)
        if timeout_s:
            name = [f"watchdog/{uuid.uuid4().hex}"]  # not the restart's count: see fresh_store
            dist.broadcast_object_list(name)
            self.name = name[0]
            if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                faulthandler.register(signal.SIGUSR2, all_threads=False)  # needs no lock of Python's
            atexit.register(self.stop)  # Python aborts if it ends while a thread is inside the store
            self.talk.start()
            threading.Thread(target=self._judge, daemon=True).start()

    def enter(self, phase: str) -> None:
        """Say that the main thread has finished a phase and what it does now. Costs a microsecond."""
        self.at = (self.at[0] + 1, phase, time.monotonic())

    def stop(self) -> None:
        """Watch no longer: what follows may take as long as it likes."""
        if not self.ended.is_set():
            self.enter("ended")
            self.ended.set()
        if self.talk.is_alive():
            self.talk.join(2.0)

    def _talk(self) -> None:
        """Tell the others of this rank's phases and hear of theirs. All calls that may block are made here."""
        try:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
            store, told, ended = dist.PrefixStore(self.name, store), -1, False
            while True:
                sequence, phase, _ = self.at
                if sequence != told:
                    store.set(
                        f"at/{self.rank}", json.dumps([sequence, phase, self.host, os.getpid(), socket.gethostname()])
                    )
                    store.add("finished", sequence - told)
                    told = sequence
                self.total = store.add("finished", 0)
                if ended:
                    return
                if self.alarm.is_set() or store.check(["alarm"]):
                    self.alarm.set()
                    self._report(store)
                ended = self.ended.wait(self.interval)
        except Exception as error:  # torch's and Python's own; the store ends with torchrun, or with rank 0
            if not self.ended.is_set():
                what = str(error).splitlines()[0]
                say(f"rank {self.rank}: the watchdog lost torchrun's store and now sees this rank alone ({what})")

    def _judge(self) -> None:
        """Raise the alarm when all has stood still for too long; never blocks.

        Time counts only while this thread runs, so a job that its scheduler or a laptop suspended is not stuck.
        """
        idle, last, seen, patience = 0.0, time.monotonic(), None, 4 * self.interval + 15
        while not self.ended.wait(self.interval):
            now, progress = time.monotonic(), (self.total, self.at[0])
            idle = idle + min(now - last, 2 * self.interval) if progress == seen or self.alarm.is_set() else 0.0
            last, seen = now, progress
            if idle > self.timeout_s:
                self.alarm.set()
            if self.alarm.is_set() and (not self.talk.is_alive() or idle > self.timeout_s + patience):
                _, phase, since = self.at
                say(
                    f"watchdog: rank {self.rank} has been in the phase {phase!r} for {now - since:.0f} s, more than "
                    f"{self.timeout_s:g} s, and the store of torchrun does not answer\n{main_stack()}"
                )
                os._exit(1)

    def _report(self, store: dist.Store) -> None:
        """Write down where this rank is; the first to come prints all ranks. Ends the process."""
        first = store.add("alarm", 1) == 1
        sequence, phase, since = self.at
        seconds, workers = time.monotonic() - since, siblings()
        mine = [sequence, phase, seconds, main_stack(), self.host, workers]
        store.set(f"report/{self.rank}", json.dumps(mine))
        wait_s = 2 * self.interval + 3
        if first:
            say(self._table(store, wait_s))
            store.set("printed", "")
        store.wait(["printed"], timedelta(seconds=2 * wait_s + 5))
        # A silent rank, stopped or inside a C call, cannot take torchrun's SIGTERM either, and would cost it 30 s.
        silent = [pid for host, pid in json.loads(store.get("silent")) if host == self.host and str(pid) in workers]
        killer = store.add(f"kill/{self.host}", 1) == 1
        for pid in silent if killer else []:
            if workers[str(pid)] not in STATES:
                say(f"\nprocess {pid} asked for its stack:")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(0.6 if silent and not killer else 0.5)  # rank 0 may hold the store: all read, then end
        for pid in silent if killer else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _table(self, store: dist.Store, wait_s: float) -> str:
        """Phase and state of every rank, and the stacks of those that lag; also names the silent ones in the store."""
        ranks, deadline = range(dist.get_world_size()), time.monotonic() + wait_s
        while not store.check([f"report/{r}" for r in ranks]) and time.monotonic() < deadline:
            time.sleep(0.1)
        reports = {r: json.loads(store.get(f"report/{r}")) for r in ranks if store.check([f"report/{r}"])}
        known = {r: json.loads(store.get(f"at/{r}")) for r in ranks if store.check([f"at/{r}"])}
        workers = {host: states for *_, host, states in reports.values()}
        lowest = min([r[0] for r in reports.values()] + [k[0] for r, k in known.items() if r not in reports])
        lines = [f"watchdog: no rank has finished a phase for {self.timeout_s:g} s", "rank  phase       seconds  state"]
        silent, stacks = [], defaultdict(list)
        for rank in ranks:
            if rank in reports:
                sequence, phase, seconds, stack, *_ = reports[rank]
                lines.append(f"{rank:4d}  {phase:10s} {seconds:8.0f}  {'lags' if sequence == lowest else 'waits'}")
                if sequence == lowest:
                    stacks[stack].append(str(rank))
                continue
            _, phase, host, pid, name = known.get(rank, (0, "start", None, 0, ""))
            state = "stopped (SIGSTOP), dead, or in a call that never returns"
            if host in workers:  # another rank of this torchrun has looked
                state = STATES.get(workers[host].get(str(pid), "Z"), "in a call that never returns")
            where = f" (process {pid} on {name})" if pid else ""
            lines.append(
                f"{rank:4d}  {phase:10s} {'?':>8s}  " + ("ended" if phase == "ended" else f"no answer: {state}{where}")
            )
            if pid and phase != "ended":
                silent.append((host, pid))
        store.set("silent", json.dumps(silent))
        for stack, which in stacks.items():
            lines.append(f"\nrank{'s' * (len(which) > 1)} {', '.join(which)}, most recent call last:\n{stack}")
        return "\n".join(lines)


def main_stack() -> str:
    """Where the main thread is, as in a traceback."""
    return "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])).rstrip()


def siblings() -> dict[str, str]:
    """The processes that torchrun, this one's parent, started on this host, and their states: {id: letter in /proc}."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid():
                found[stat.parent.name] = state
    return found


# ---------------------------------------------------------------- one run in one output folder


def output_lock(path: Path):
    """Lock the output folder `path` for this process; keep the returned file open. Raises ValueError.

    The lock ends with the process, however it dies. It is the folder's own: who renames the folder locks the new one.
    """
    path.mkdir(parents=True, exist_ok=True)
    file = (path / "run.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"output_dir={path} is in use by {owner}: two runs in one output folder would mix; "
            "choose another output_dir"
        ) from None
    except OSError as error:  # some network file systems have no locks
        say(f"warning: output_dir={path} cannot be locked ({error.strerror}); start no second run in it")
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file


# ---------------------------------------------------------------- checks before the start

# First and last version of each package that the tests of this repository have run with.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "megatron-core": ("0.16", "0.16"),
    "vllm": ("0.26", "0.32"),
    "transformers": ("5.16", "5.19"),
}


def check_versions() -> list[str]:
    """A warning for each package whose version was never tested, or that is missing. Imports none of them."""
    warnings = []
    for package, (first, last) in TESTED.items():
        version = sys.version.split()[0] if package == "python" else installed(package)
        if version is None:
            warnings.append(f"{package} is not installed; {first} to {last} were tested")
        elif not numbers(first) <= numbers(version) <= numbers(last):
            tested = f"{first} to {last} were" if first != last else f"{first} was"
            warnings.append(f"{package} {version} was not tested; {tested}")
    return warnings


def installed(package: str) -> str | None:
    """The version of a package, or of its build for the CPU; None if there is neither."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def numbers(version: str) -> list[int]:
    """The first two numbers of a version: "2.13.0+cpu" is [2, 13]."""
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2]]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def check_shared_memory(least_bytes: int, folder: Path = Path("/dev/shm")) -> None:
    """Raises ValueError where processes cannot share `least_bytes`; a container often has 64 MiB."""
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    if free < least_bytes:
        raise ValueError(
            f"{folder} has {gib(free)} free, {gib(least_bytes)} are needed: NCCL and vLLM pass data between "
            "ranks there; start a container with `docker run --shm-size=16g` or --ipc=host, in Kubernetes mount an "
            f"emptyDir with medium: Memory on {folder}"
        )


def check_disk(folder: Path, bytes_needed: int, key: str = "output_dir") -> None:
    """Raises ValueError if the disk that `folder`, the value of `key`, is or will be on has less than that free."""
    free = shutil.disk_usage(existing(folder)).free
    if free < bytes_needed:
        raise ValueError(
            f"{key}={folder}: its disk has {gib(free)} free, {gib(bytes_needed)} are needed for what this run saves; "
            "make room, choose another output_dir, save less often (train.save_every) or keep less (train.keep_last)"
        )


def check_writable(folder: Path) -> None:
    """Raises ValueError if no file can be written in `folder`, or in the nearest folder above that exists."""
    there = existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".writable-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise ValueError(
            f"output_dir={folder}: cannot write in {there} ({error.strerror}); choose an output_dir that this user may "
            "write to, on a disk with room"
        ) from None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def check_same_config(text: str) -> None:
    """Raises ValueError, on every rank, if the ranks do not hold the same YAML text: which keys differ, and where."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    others = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if not others:
        return
    tables = [dict(yaml_keys(text)) for text in texts]
    keys = [k for k in dict.fromkeys(k for table in tables for k in table) if len({t.get(k) for t in tables}) > 1]
    lines = []
    for key in keys or ["the text"]:
        values = defaultdict(list)
        for rank, table in enumerate(tables):
            values[table.get(key, "not set")].append(str(rank))
        lines.append(f"  {key}: " + "; ".join(f"{value} on rank {', '.join(r)}" for value, r in values.items()))
    raise ValueError(
        f"{len(others)} of {len(texts)} ranks have another configuration than rank 0; start every node with the same "
        "files and overrides:\n" + "\n".join(lines)
    )


def yaml_keys(text: str):
    """Yield (dotted key, value) for each line of a YAML text in block style; a list's items count by their place."""
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines()):
        indent = len(line) - len(line.lstrip())
        above = [(i, key) for i, key in above if i < indent]
        key, colon, value = line.strip().partition(":")
        key = key if colon else f"line {number + 1}"
        yield ".".join([*(k for _, k in above), key]), value.strip() if colon else line.strip()
        above.append((indent, key))


def check_groups(groups: dict[str, dist.ProcessGroup | None], timeout_s: float) -> None:
    """One all-reduce in each process group, on all ranks in the same order; None where this rank is in no such group.

    Raises ValueError for one that fails, gives a wrong sum or takes more than `timeout_s`. Where it is one of
    GPUs, leave with os._exit then: a thread may still hang in it.
    """
    for name, group in groups.items():
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu(group) else "cpu"
        outcome = []

        def reduce(group=group, device=device, outcome=outcome) -> None:
            try:
                value = torch.full((1,), dist.get_rank() + 1, dtype=torch.int64, device=device)
                dist.all_reduce(value, group=group, async_op=True).wait(timedelta(seconds=timeout_s))
                outcome.append(value.item())
            except Exception as error:
                if "timed out" not in str(error):
                    outcome.append(str(error).splitlines()[0])

        if on_gpu(group):  # NCCL connects inside the call itself, where its timeout does not count
            thread = threading.Thread(target=reduce, daemon=True)
            thread.start()
            thread.join(timeout_s)
        else:
            reduce()
        if outcome == [sum(ranks) + len(ranks)]:
            continue
        if not outcome:
            what = f"did not finish within {timeout_s:g} s"
        else:
            what = (
                f"gave {outcome[0]}, not {sum(ranks) + len(ranks)}"
                if isinstance(outcome[0], int)
                else f"failed: {outcome[0]}"
            )
        raise ValueError(
            f"the all-reduce of group {name} (ranks {', '.join(map(str, ranks))}) {what}; likely a rank that died "
            "or never started, a network interface that the nodes do not share (NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME), or a firewall between the nodes; NCCL_DEBUG=INFO says more"
        )


def on_gpu(group: dist.ProcessGroup) -> bool:
    """Whether the group connects GPUs."""
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))


# Phase → what sets its memory, and what to turn.
MEMORY = {
    "build": ("parallel.*", ("parallel.tp up", "parallel.pp up", "rollout.gpu_memory_utilization down")),
    "rollout": (
        "rollout.gpu_memory_utilization",
        ("rollout.gpu_memory_utilization down", "rollout.vllm.max_num_seqs down", "rollout.tp up"),
    ),
    "logprob": (
        "train.logprob_max_tokens_per_micro_batch",
        ("train.logprob_max_tokens_per_micro_batch down", "parallel.tp up", "rollout.gpu_memory_utilization down"),
    ),
    "train": (
        "train.max_tokens_per_micro_batch",
        (
            "train.max_tokens_per_micro_batch down",
            "megatron.recompute_granularity=full (with megatron.recompute_method=uniform "
            "megatron.recompute_num_layers=1)",
            "parallel.tp or parallel.cp up",
        ),
    ),
    "sync": (
        "rollout.sync_bucket_mb",
        ("rollout.sync_bucket_mb down", "rollout.gpu_memory_utilization down", "parallel.tp up"),
    ),
    "save": ("parallel.*", ("parallel.tp up", "parallel.pp up", "rollout.gpu_memory_utilization down")),
}
MEMORY["eval"] = MEMORY["rollout"]


def explain_out_of_memory(phase: str, error: BaseException) -> str:
    """What a torch.OutOfMemoryError in a phase means for the configuration; an unknown phase counts as "build"."""
    budget, keys = MEMORY.get(phase, MEMORY["build"])
    return (
        f"out of GPU memory in the phase {phase}, whose budget is {budget}: {str(error).splitlines()[0]}\n"
        f"  turn one of: {'; '.join(keys)}"
    )
