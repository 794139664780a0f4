"""Run untrusted Python. docs/rewards.md says what is guaranteed. As a program, this file is the confined process."""

import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import types

READY = b"ready\n"  # what the confined process writes to its standard error before it runs the program

# The kernel's numbers, by the names of its headers.
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14  # LANDLOCK_ACCESS_FS_..., as the next is
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # directories, files, links, devices, sockets, pipes
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1 << 0, 1 << 1

# ---------------------------------------------------------------- outside: start, wait, read


def values_of(program, tests: list[list[tuple[str, bool]]], **limits) -> list:
    """Run tests after a program. Returns the repr of each test's values, or None for a test that raised.

    A test is a list of Python sources, each with whether it is an expression. The values of expressions are returned,
    in Python's own types. The others are statements. A hostile program may replace a test's list by any JSON value.
    `limits` go to `run`.
    """
    secret = secrets.token_hex(16)  # so that a program that ends early, or prints, cannot pass
    _, output = run({"program": program, "tests": tests, "secret": secret}, **limits)
    _, _, written = output.partition(secret)

    try:
        results = json.loads(written)
    except (ValueError, RecursionError):  # the program ended early, or wrote something itself
        results = []
    if not isinstance(results, list) or len(results) != len(tests):
        return [None] * len(tests)
    return results


def output_of(program, stdin, **limits) -> str | None:
    """What the program prints when it reads `stdin`, or None if it failed. `limits` go to `run`."""
    code, output = run({"program": program, "stdin": stdin}, **limits)
    return output if code == 0 else None


def run(job: dict, *, seconds, memory_mb, file_mb, allow_writes) -> tuple[int, str]:
    """Run job["program"] confined. Returns its exit code and its standard output, or the results of its tests.

    Raises subprocess.TimeoutExpired after `seconds` of wall clock. Raises RuntimeError if this machine cannot confine a
    program.
    """
    folder = tempfile.mkdtemp(prefix="answer-")
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    message = json.dumps({**job, "limits": limits, "folder": folder}).encode()
    command = [sys.executable, "-I", "-X", "utf8", __file__]
    # A numeric library gets one thread, since more only multiply the memory that it reserves.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder, "HOME": folder}

    try:
        with tempfile.TemporaryFile() as stdout:  # RLIMIT_FSIZE limits a file, but not a pipe
            ended = subprocess.run(
                command, input=message, stdout=stdout, stderr=subprocess.PIPE, cwd=folder, env=env, timeout=seconds,
                check=False,
            )  # fmt: skip
            if not ended.stderr.endswith(READY):
                raise RuntimeError(f"no sandbox: {ended.stderr.decode(errors='replace').strip().splitlines()[-1:]}")
            stdout.seek(0)
            return ended.returncode, stdout.read().decode(errors="replace")
    finally:  # the program may have nested its folder deeper than shutil.rmtree can follow
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


# ---------------------------------------------------------------- inside: drop rights, then run

# Calls that reach beyond the process, refused with EPERM. The numbers stand in the order of the names.
REFUSED = {
    "x86_64": [
        # the network
        41, 42, 49, 46, 307,  # socket, connect, bind, sendmsg, sendmmsg
        # other processes and programs
        57, 58, 59, 322,  # fork, vfork, execve, execveat
        # signals, and sessions that a kill would miss
        62, 200, 234, 424,  # kill, tkill, tgkill, pidfd_send_signal
        129, 297, 109, 112,  # rt_sigqueueinfo, rt_tgsigqueueinfo, setpgid, setsid
        # memory and files of other processes
        101, 310, 311, 438,  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
        # the kernel
        272, 308, 321, 298,  # unshare, setns, bpf, perf_event_open
        323, 425, 250, 248,  # userfaultfd, io_uring_setup, keyctl, add_key
        # modes, owners, sizes, times and attributes of files, which Landlock leaves open
        90, 91, 268, 452, 92, 94,  # chmod, fchmod, fchmodat, fchmodat2, chown, lchown
        93, 260, 76, 132, 235, 261,  # fchown, fchownat, truncate, utime, utimes, futimesat
        280, 188, 189, 190,  # utimensat, setxattr, lsetxattr, fsetxattr
        # what outlives the process
        29, 64, 68, 240,  # shmget, semget, msgget, mq_open
        # the scheduling of others
        141, 251, 203,  # setpriority, ioprio_set, sched_setaffinity
        142, 144, 314,  # sched_setparam, sched_setscheduler, sched_setattr
    ],
    "aarch64": [
        198, 203, 200, 211, 269,  # socket, connect, bind, sendmsg, sendmmsg
        221, 281,  # execve, execveat
        129, 130, 131, 424,  # kill, tkill, tgkill, pidfd_send_signal
        138, 240, 154, 157,  # rt_sigqueueinfo, rt_tgsigqueueinfo, setpgid, setsid
        117, 270, 271, 438,  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
        97, 268, 280, 241,  # unshare, setns, bpf, perf_event_open
        282, 425, 219, 217,  # userfaultfd, io_uring_setup, keyctl, add_key
        52, 53, 452, 55, 54,  # fchmod, fchmodat, fchmodat2, fchown, fchownat
        45, 88, 5, 6, 7,  # truncate, utimensat, setxattr, lsetxattr, fsetxattr
        194, 190, 186, 180,  # shmget, semget, msgget, mq_open
        140, 30, 122,  # setpriority, ioprio_set, sched_setaffinity
        118, 119, 274,  # sched_setparam, sched_setscheduler, sched_setattr
    ],
}  # fmt: skip
# Calls that are allowed only if argument & mask == value: name -> (x86_64, aarch64, argument, mask, value).
CONDITIONS = {
    "clone": (56, 220, 0, 0x10000, 0x10000),  # CLONE_THREAD: threads, no processes
    # A file may signal its owner, any process: F_SETOWN, F_SETOWN_EX and F_SETSIG; FIOSETOWN and SIOCSPGRP of sockets.
    "fcntl": (72, 25, 1, 8, 0),
    "ioctl": (16, 29, 1, 0x8000, 0),
    "prlimit64": (302, 261, 0, 0xFFFFFFFF, 0),  # its own limits, which it can only lower
    "socketpair": (53, 199, 1, 0xF, 1),  # SOCK_STREAM, which reaches only its other end; asyncio needs it
}
CLONE3 = 435  # a filter cannot see its flags, so it is refused with ENOSYS, and libc takes clone
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # in the numbers of calls of x86_64's other interface
# Instructions of BPF (linux/bpf_common.h): load a word of seccomp_data, jump if equal, jump if at least, and, return.
LD_ABS, JEQ, JGE, AND, RET = 0x20, 0x15, 0x35, 0x54, 0x06
# Offsets in seccomp_data, and what a filter returns: SECCOMP_RET_...
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
RET_ALLOW, RET_ERRNO, RET_KILL = 0x7FFF0000, 0x50000, 0x80000000


def confine(folder, seconds, memory_mb, file_mb, allow_writes):
    """Drop rights that a program must not have, for good. Raises OSError or RuntimeError if that is impossible here."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if not allow_writes:
        confine_writes(libc, folder)
    # With its capabilities, root could raise its limits again.
    check(libc.capset(struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)), "capset")

    # The filter comes last, since it refuses some of the calls above.
    if platform.machine() not in ARCHITECTURES:
        raise RuntimeError(f"the code reward knows no system calls of {platform.machine()}")
    program = syscall_filter(platform.machine())
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def check(result, what: str) -> int:
    """The result of a system call. Raises OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def confine_writes(libc, folder):
    """By Landlock, let nothing outside `folder` be written, made, removed or renamed. /dev/null stays open."""
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    if abi < 1:
        raise RuntimeError(
            "this kernel has no Landlock (Linux 5.13), so writes outside the folder cannot be stopped; "
            "reward.options.code.allow_writes=true runs programs nevertheless"
        )

    # What this kernel's version of Landlock can refuse.
    rights = WRITE_FILE | REMOVE_AND_MAKE
    if abi >= 2:
        rights |= REFER
    if abi >= 3:
        rights |= TRUNCATE
    attribute = struct.pack("Q", rights)
    if abi >= 6:
        attribute += struct.pack("QQ", 0, SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)  # to the outside

    # All is refused, but where a rule allows it.
    rules = check(libc.syscall(LANDLOCK_CREATE_RULESET, attribute, len(attribute), 0), "landlock_create_ruleset")
    of_files = rights & (WRITE_FILE | TRUNCATE)
    for path, allowed in ((folder, rights), ("/dev/null", of_files)):
        beneath = struct.pack("=Qi", allowed, os.open(path, os.O_PATH | os.O_CLOEXEC))
        check(libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, beneath, 0), "landlock_add_rule")
    check(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def syscall_filter(machine) -> bytes:
    """A seccomp filter in BPF of REFUSED and CONDITIONS. A call of another architecture kills the process."""

    def step(code, k, jump_true=0, jump_false=0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    column = list(ARCHITECTURES).index(machine)
    steps = [
        step(LD_ABS, ARCH_OFFSET), step(JEQ, ARCHITECTURES[machine], 1, 0), step(RET, RET_KILL),
        step(LD_ABS, NUMBER_OFFSET), step(JGE, X32_BIT, 0, 1), step(RET, RET_KILL),
        step(JEQ, CLONE3, 0, 1), step(RET, RET_ERRNO | errno.ENOSYS),
    ]  # fmt: skip
    for number in REFUSED[machine]:
        steps += [step(JEQ, number, 0, 1), step(RET, RET_ERRNO | errno.EPERM)]
    for *numbers, argument, mask, value in CONDITIONS.values():
        steps += [
            step(JEQ, numbers[column], 0, 5),  # another call: skip the next five
            step(LD_ABS, ARGUMENTS_OFFSET + 8 * argument), step(AND, mask), step(JEQ, value, 0, 1),
            step(RET, RET_ALLOW), step(RET, RET_ERRNO | errno.EPERM),
        ]  # fmt: skip
    return b"".join([*steps, step(RET, RET_ALLOW)])


def main():
    """Read the job, drop rights, run the program, then its tests, if any, in the program's module.

    The values of tests go to what was the standard output. The program's own output goes nowhere in this case, and what
    it writes there by the descriptor's number lacks the secret.
    """
    job = json.load(sys.stdin)
    tests = job.get("tests")
    secret = job.get("secret", "")
    results_out = os.dup(1)

    # Local names, which the program cannot replace.
    write = os.write
    leave = os._exit
    execute = exec
    evaluate = eval
    represent = repr
    quote = json.encoder.encode_basestring_ascii

    # Die with the parent, and give the program its input in memory.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the package cannot be imported here (-I)
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(job.get("stdin", "").encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)

    null = os.open(os.devnull, os.O_RDWR)
    if tests is not None:
        os.dup2(null, 1)
    confine(job["folder"], **job["limits"])
    write(2, READY)
    os.dup2(null, 2)  # from here on the program cannot reach what the parent reads

    module = types.ModuleType("__main__" if tests is None else "answer")
    sys.modules[module.__name__] = module
    program = compile(job.pop("program"), "answer.py", "exec")
    if tests is None:
        exec(program, module.__dict__)
        return
    with contextlib.suppress(SystemExit):
        exec(program, module.__dict__)

    results = ["null"] * len(tests)
    for number, steps in enumerate(tests):
        with contextlib.suppress(BaseException):
            texts = []
            for source, is_expression in steps:
                if is_expression:
                    texts.append(quote(represent(plain(evaluate(source, module.__dict__)))))
                else:
                    execute(source, module.__dict__)
            results[number] = "[" + ",".join(texts) + "]"
    write(results_out, (secret + "[" + ",".join(results) + "]").encode())
    leave(0)


def plain(value):
    """A value in Python's own types, so that its repr is a literal. Takes numbers of libraries. Raises TypeError."""
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    for kind, origins in ((list, list), (tuple, tuple), (set, (set, frozenset))):
        if isinstance(value, origins):
            return kind(plain(entry) for entry in value)
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if hasattr(value, "item"):
        return plain(value.item())
    return float(value)


if __name__ == "__main__":
    main()
