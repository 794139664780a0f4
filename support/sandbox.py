"""Run Python that nobody has read. Knows no rewards; started as a program, this file is the confined process itself.

The process can be killed alone, since it cannot start another. docs/rewards.md says what this guarantees and what not.
"""

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


# The kernel's numbers, by the names of its headers.
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14  # LANDLOCK_ACCESS_FS_...
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # directories, files, links, devices, sockets, pipes
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1 << 0, 1 << 1

# ---------------------------------------------------------------- outside: start, wait, read


def values_of(program: str, tests: list[list[tuple[str, bool]]], **limits) -> list[list[str] | None]:
    """What the tests find after the program: for each the repr of its values, None where it raised.

    A test is a list of Python sources, each with whether it is an expression, whose value is wanted; others are
    statements. Values are in Python's own types. `limits` as in `run`.
    """
    secret = secrets.token_hex(16)  # so that a program that ends early, or prints, cannot pass
    _, output = run({"program": program, "tests": tests, "secret": secret}, **limits)
    try:
        found = json.loads(output.partition(secret)[2])
    except (ValueError, RecursionError):  # it ended early, or wrote more
        found = []
    sound = isinstance(found, list) and len(found) == len(tests)
    return [texts if is_texts(texts) else None for texts in found] if sound else [None] * len(tests)


def is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def output_of(program: str, stdin: str, **limits) -> str | None:
    """What the program prints when it reads `stdin`; None if it failed. `limits` as in `run`."""
    code, output = run({"program": program, "stdin": stdin}, **limits)
    return output if code == 0 else None


def run(job: dict, *, seconds: float, memory_mb: int, file_mb: int, allow_writes: bool) -> tuple[int, str]:
    """Run job["program"] confined; returns its exit code and its standard output, with tests what they found.

    Raises TooLong after `seconds` of wall clock, RuntimeError where this machine cannot confine a program.
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "file_mb": file_mb, "allow_writes": allow_writes}
    folder = tempfile.mkdtemp(prefix="answer-")
    report_out, report_in = os.pipe()
    try:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps({**job, **limits, "folder": folder, "report": report_in}).encode())
            stdin.seek(0)
            command = [sys.executable, "-I", "-X", "utf8", __file__]
            # One thread for a numeric library: more only multiply the memory it reserves.
            env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder, "HOME": folder}
            files = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "pass_fds": [report_in]}
            process = subprocess.Popen(command, **files, cwd=folder, env=env)
            os.close(report_in)
            report_in = None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise TooLong from None
            finally:
                process.kill()
                process.wait()
            if os.read(report_out, 6) != b"ready\n":
                stderr.seek(0)
                raise RuntimeError(f"no sandbox: {stderr.read().decode(errors='replace').strip().splitlines()[-1:]}")
            stdout.seek(0)
            return code, stdout.read().decode(errors="replace")
    finally:
        os.close(report_out)
        if report_in is not None:
            os.close(report_in)
        remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder that a program may have nested deeper than shutil.rmtree can follow."""
    subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


# ---------------------------------------------------------------- inside: give up rights, then run

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


def confine(folder: str, seconds: float, memory_mb: int, file_mb: int, allow_writes: bool) -> None:
    """Give up, for good, what a program may not have. Raises OSError or RuntimeError if that is not possible here."""
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

    def must(result: int, what: str) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
        return result

    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if not allow_writes:
        confine_writes(libc, must, folder)
    # No capabilities, or root could raise its limits again.
    must(libc.capset(struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    if platform.machine() not in ARCHITECTURES:
        raise RuntimeError(f"the code reward knows no system calls of {platform.machine()}")
    program = syscall_filter(platform.machine())
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "PR_SET_SECCOMP")


def confine_writes(libc, must, folder: str) -> None:
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
    rules = must(libc.syscall(LANDLOCK_CREATE_RULESET, attribute, len(attribute), 0), "landlock_create_ruleset")
    of_files = rights & (WRITE_FILE | TRUNCATE)
    for path, allowed in ((folder, rights), ("/dev/null", of_files)):
        beneath = struct.pack("=Qi", allowed, os.open(path, os.O_PATH | os.O_CLOEXEC))
        must(libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, beneath, 0), "landlock_add_rule")
    must(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def syscall_filter(machine: str) -> bytes:
    """A seccomp program: REFUSED and CONDITIONS on this machine, calls of another architecture kill the process."""

    def step(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("HBBI", code, true, false, k)

    load, equal, above, keep, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
    column = list(ARCHITECTURES).index(machine)
    steps = [step(load, 4), step(equal, ARCHITECTURES[machine], 1, 0), step(give, kill), step(load, 0)]
    steps += [step(above, 0x40000000, 0, 1), step(give, kill)]  # x32's numbers
    steps += [step(equal, CLONE3, 0, 1), step(give, unknown)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            steps += [step(equal, numbers[column], 0, 1), step(give, refuse)]
    for *numbers, argument, mask, value in CONDITIONS.values():
        test = [step(load, 16 + 8 * argument), step(keep, mask), step(equal, value, 0, 1)]
        steps += [step(equal, numbers[column], 0, 5), *test, step(give, allow), step(give, refuse)]
    return b"".join([*steps, step(give, allow)])


def main() -> None:
    """Read the job, give up rights, run the program; its tests, if any, in its own module, the values to where its
    standard output would have gone."""
    job = json.load(sys.stdin)
    tests, secret, report, found = job.get("tests"), job.get("secret", ""), job["report"], os.dup(1)
    # By names of its own, which the program cannot put others under.
    write, leave, execute, evaluate, show = os.write, os._exit, exec, eval, repr
    quote = json.encoder.encode_basestring_ascii
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # support/ is out of reach here (-I)
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
    os.dup2(null, 2)
    write(report, b"ready\n")
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
                    texts.append(quote(show(plain(evaluate(source, module.__dict__)))))
                else:
                    execute(source, module.__dict__)
            results[number] = "[" + ",".join(texts) + "]"
    write(found, (secret + "[" + ",".join(results) + "]").encode())
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
