"""The trainer's own processes: how they are ended, what memory they may take. Imports only the standard library."""

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def kill_family(pid: int):
    """Kill a process that leads its session, all of that session, and all descendants, whatever sessions they made."""
    # A stopped process starts no others, so this loop ends.
    stopped = set()
    running = find_family({pid})
    while running:
        for member in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGSTOP)
        stopped |= running
        running = find_family(stopped | {pid}) - stopped

    for member in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def find_family(members: set[int]) -> set[int]:
    """Living processes among the members, their children, and all in a session that one of them leads."""
    import psutil  # here, since most of the processes do not need it

    related = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile, or belongs to another user
            ids = (process.pid, os.getsid(process.pid), process.ppid())
            if not members.isdisjoint(ids) and process.status() != psutil.STATUS_ZOMBIE:
                related.add(process.pid)
    return related


def die_with_parent(adopt: bool = False):
    """Be killed when the thread that started this process ends. With `adopt`, inherit orphaned grandchildren."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if adopt:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def host_free_bytes(cgroups=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")) -> int:
    """Bytes that this machine and the process's cgroups (version 2) can still give; cached files count as free."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = [int(available[1]) << 10]
    found = re.search("^0::/(.*)$", own.read_text(), re.MULTILINE) if own.exists() else None

    # A limit may be set at any level above the process.
    folders = [cgroups / found[1], *(cgroups / found[1]).parents] if found else []
    for folder in folders:
        limit = folder / "memory.max"
        if limit.exists() and limit.read_text().strip() != "max":
            cached = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            used = int((folder / "memory.current").read_text()) - int(cached[1])
            free.append(int(limit.read_text()) - used)
    return max(min(free), 0)
