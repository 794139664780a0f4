"""Run untrusted Python: docs/rewards.md says what is guaranteed. As a program, this file is the confined process."""

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


class TooLong(Exception):
    """The program ran out of its `seconds`."""


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


def values_of(program: str, tests: list[list[tuple[str, bool]]], **limits) -> list[list[str] | None]:
    """Run tests after a program: for each test the repr of its values, None where it raised.

    A test is a list of Python sources, each with whether it is an expression, whose value is returned; others are
    statements. Values are in Python's own types. `limits` as in `run`.
    """
    secret = secrets.token_hex(16)  # so that a program that ends early, or prints, cannot pass
    _, output = run({"program": program, "tests": tests, "secret": secret}, **limits)
    try:
        results = json.loads(output.partition(secret)[2])
    except (ValueError, RecursionError):  # it ended early, or wrote more
        results = []
    if not isinstance(results, list) or len(results) != len(tests):
        return [None for _ in tests]
    return [  # what a program wrote itself may be anything
        texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else None for texts in results
    ]


def output_of(program: str, stdin: str, **limits) -> str | None:
    """What the program prints when it reads `stdin`; None if it failed. `limits` as in `run`."""
    code, output = run({"program": program, "stdin": stdin}, **limits)
    return output if code == 0 else None


def run(job: dict, *, seconds: float, memory_mb: int, file_mb: int, allow_writes: bool) -> tuple[int, str]:
    """Run job["program"] confined; returns its exit code and its standard output, or the results of its tests.

    Raises TooLong after `seconds` of wall clock, RuntimeError where this machine cannot confine a program.
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    folder = tempfile.mkdtemp(prefix="answer-")
    command = [sys.executable, "-I", "-X", "utf8", __file__]
    # One thread for a numeric library: more only multiply the memory it reserves.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder, "HOME": folder}
    try:
        with tempfile.TemporaryFile() as stdout:  # RLIMIT_FSIZE bounds a file, and not what a pipe brings
            message = json.dumps({**job, **limits, "folder": folder}).encode()
            streams = {"input": message, "stdout": stdout, "stderr": subprocess.PIPE}
            ended = subprocess.run(command, **streams, cwd=folder, env=env, timeout=seconds, check=False)
            if not ended.stderr.endswith(READY):
                raise RuntimeError(f"no sandbox: {ended.stderr.decode(errors='replace').strip().splitlines()[-1:]}")
            stdout.seek(0)
            return ended.returncode, stdout.read().decode(errors="replace")
    except subprocess.TimeoutExpired:  # it is killed
        raise TooLong from None
    finally:
        remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder that a program may have nested deeper than shutil.rmtree can follow."""
    subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


# ---------------------------------------------------------------- inside: drop rights, then run

# Calls that reach beyond the process, refused with EPERM: (number on x86_64, number on aarch64), None where absent.
REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpgid": (109, 154), "setsid": (112, 157),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "keyctl": (250, 219), "add_key": (248, 217),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "truncate": (76, 45),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
# Calls allowed only where argument & mask == value: name -> (x86_64, aarch64, argument, mask, value).
CONDITIONS = {
    "clone": (56, 220, 0, 0x10000, 0x10000),  # CLONE_THREAD: threads, no processes
    "prlimit64": (302, 261, 0, 0xFFFFFFFF, 0),  # its own limits, which it can only lower
    "socketpair": (53, 199, 1, 0xF, 1),  # SOCK_STREAM, which reaches its other end alone; asyncio needs it
}
CLONE3 = 435  # its flags are out of a filter's sight; refused with ENOSYS, so that libc takes clone
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # in the numbers of calls of x86_64's other interface
# Instructions of BPF (linux/bpf_common.h): load a word of seccomp_data, jump if equal, jump if at least, and, return.
LD_ABS, JEQ, JGE, AND, RET = 0x20, 0x15, 0x35, 0x54, 0x06
# Offsets in seccomp_data, and what a filter returns: SECCOMP_RET_...
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
RET_ALLOW, RET_ERRNO, RET_KILL = 0x7FFF0000, 0x50000, 0x80000000


def confine(folder: str, seconds: float, memory_mb: int, file_mb: int, allow_writes: bool) -> None:
    """Drop rights that a program must not have, for good. Raises OSError or RuntimeError if that is impossible here."""
    for kind, value in [
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ]:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def check(result: int, what: str) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
        return result

    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if not allow_writes:
        confine_writes(libc, check, folder)
    # No capabilities, or root could raise its limits again.
    check(libc.capset(struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    if platform.machine() not in ARCHITECTURES:
        raise RuntimeError(f"the code reward knows no system calls of {platform.machine()}")
    program = syscall_filter(platform.machine())
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def confine_writes(libc, check, folder: str) -> None:
    """Landlock: nothing outside `folder` can be written, made, removed or renamed; /dev/null stays open."""
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    if abi < 1:
        raise RuntimeError(
            "this kernel has no Landlock (Linux 5.13), so writes outside the folder cannot be stopped; "
            "reward.options.code.allow_writes=true runs all the same"
        )
    rights = WRITE_FILE | REMOVE_AND_MAKE
    if abi >= 2:
        rights |= REFER
    if abi >= 3:
        rights |= TRUNCATE
    attribute = struct.pack("Q", rights)
    if abi >= 6:
        attribute += struct.pack("QQ", 0, SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)  # to the outside
    rules = check(libc.syscall(LANDLOCK_CREATE_RULESET, attribute, len(attribute), 0), "landlock_create_ruleset")
    of_files = rights & (WRITE_FILE | TRUNCATE)
    for path, allowed in ((folder, rights), ("/dev/null", of_files)):
        beneath = struct.pack("=Qi", allowed, os.open(path, os.O_PATH | os.O_CLOEXEC))
        check(libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, beneath, 0), "landlock_add_rule")
    check(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def syscall_filter(machine: str) -> bytes:
    """A seccomp filter in BPF: REFUSED and CONDITIONS of a machine; calls of another architecture kill the process."""

    def step(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    column = list(ARCHITECTURES).index(machine)
    steps = [
        step(LD_ABS, ARCH_OFFSET), step(JEQ, ARCHITECTURES[machine], 1, 0), step(RET, RET_KILL),
        step(LD_ABS, NUMBER_OFFSET), step(JGE, X32_BIT, 0, 1), step(RET, RET_KILL),
        step(JEQ, CLONE3, 0, 1), step(RET, RET_ERRNO | errno.ENOSYS),
    ]  # fmt: skip
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            steps += [step(JEQ, numbers[column], 0, 1), step(RET, RET_ERRNO | errno.EPERM)]
    for *numbers, argument, mask, value in CONDITIONS.values():
        steps += [
            step(JEQ, numbers[column], 0, 5),  # another call: skip the next five
            step(LD_ABS, ARGUMENTS_OFFSET + 8 * argument), step(AND, mask), step(JEQ, value, 0, 1),
            step(RET, RET_ALLOW), step(RET, RET_ERRNO | errno.EPERM),
        ]  # fmt: skip
    return b"".join([*steps, step(RET, RET_ALLOW)])


def main() -> None:
    """Read the job, drop rights, run the program, then its tests, if any, in the program's module.

    The values of tests are written to the standard output, which the program itself cannot reach then.
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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the package is out of reach here (-I)
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(job.get("stdin", "").encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    null = os.open(os.devnull, os.O_RDWR)
    if tests is not None:
        os.dup2(null, 1)
    confine(job["folder"], job["seconds"], job["memory_mb"], job["file_mb"], job["allow_writes"])
    write(2, READY)
    os.dup2(null, 2)  # from here on the program cannot reach what the parent reads
    module = types.ModuleType("__main__" if tests is None else "answer")
    sys.modules[module.__name__] = module
    program = job.pop("program")
    if tests is None:
        exec(compile(program, "answer.py", "exec"), module.__dict__)
        return
    with contextlib.suppress(SystemExit):
        exec(compile(program, "answer.py", "exec"), module.__dict__)
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
    """A value in Python's own types, so that its repr is a literal; numbers of libraries too. Raises TypeError."""
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    for kind, origins in ((list, list), (tuple, tuple), (set, (set, frozenset))):
        if isinstance(value, origins):
            return kind(map(plain, value))
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    return plain(value.item()) if hasattr(value, "item") else float(value)


if __name__ == "__main__":
    main()
