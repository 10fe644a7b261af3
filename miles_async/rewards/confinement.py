"""Confine a process before it becomes an untrusted program.

A seccomp filter allows computing: memory, threads, its own pipes, reading files. The process can start no
process, signal none, connect to nothing, and open no file for writing. Landlock, if the kernel has it (5.13 and
later), lets it read Python's own libraries only: no /proc, no data, no keys. It has no capabilities, so that being root
doesn't open other processes' memory to it. Not guarded against: bugs of the kernel. Standard library only, since it is
imported for every test.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sysconfig
from collections.abc import Iterable, Sequence

OUTPUT_BYTES = 4 << 20  # that a program may print, if stdout is a file

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, everywhere
_LANDLOCK_VERSION, _PATH_BENEATH = 1, 1  # linux/landlock.h
_HANDLED = (1 << 13) - 1  # what Landlock's first version can forbid: execute, write, read, list, make and remove
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_CLONE_THREAD = 0x10000  # linux/sched.h
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)

# Offsets in struct seccomp_data; arguments are 64 bits wide, both architectures are little-endian.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
_X32 = 0x40000000  # bit of the numbers of x86's other calling convention, which would bypass ours

Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, if false, operand

# Audit architecture and column of the tables.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Numbers on x86_64 (asm/unistd_64.h) and aarch64 (asm-generic/unistd.h); None: does not exist there.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # memory
    "brk": (12, 214), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "mincore": (27, 232), "get_mempolicy": (239, 236), "membarrier": (324, 283),
    # open files, and reading
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66), "close": (3, 57),
    "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "socketpair": (53, 199), "eventfd2": (290, 19), "select": (23, None), "pselect6": (270, 72), "poll": (7, None),
    "ppoll": (271, 73), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "umask": (95, 166),
    # threads, timers, the end
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "arch_prctl": (158, None), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "setitimer": (38, 103), "getitimer": (36, 102), "alarm": (37, None),
    "exit": (60, 93), "exit_group": (231, 94),
    # facts
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "getrlimit": (97, 163), "times": (100, 153), "time": (201, None), "gettimeofday": (96, 169),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "getrandom": (318, 278),
}  # fmt: skip

_ALLOWED_WITH_VALUES: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030)),  # duplicates and flags; no owner, which would get signals
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # terminal?, size, bytes to read, flags
}
"""Numbers, index of an argument, its allowed values: the kernel takes its lower half."""

_ALLOWED_WITH_NULL: dict[str, tuple[tuple[int, int], int]] = {
    "prlimit64": ((302, 261), 2),  # asking: there is no new limit, which could be another process's
}
"""Numbers, index of a pointer argument, which must be null in both halves."""

_ALLOWED_WITH_BITS: dict[str, tuple[tuple[int, int | None], int, int, bool]] = {
    "open": ((2, None), 1, _WRITING, False),
    "openat": ((257, 56), 2, _WRITING, False),
    "clone": ((56, 220), 0, _CLONE_THREAD, True),
}
"""Numbers, index of an argument, bits of it, whether one of them has to be set or none."""


def keep_memory_private() -> None:
    """Keep other processes of this user out of this one's /proc files (environment, memory), unless they may trace."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def landlock_version() -> int:
    """Landlock's version in this kernel; 0 if it has none, or forbids it here."""
    return max(0, _call(ctypes.CDLL(None), _CREATE_RULESET, None, 0, _LANDLOCK_VERSION))


OPEN_FILES = 64


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Bound CPU time, memory and output of the process. Raises ValueError, OSError."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),  # buffers of sockets count as nobody's memory
    ):
        resource.setrlimit(kind, (value, value))


def confine(*, readable: Sequence[str] | None) -> None:
    """Confine this process, forever. Raises OSError if the kernel doesn't let it.

    ``readable``: directories that it may read under Landlock, as well as Python's own; None: without Landlock.
    """
    library = ctypes.CDLL(None, use_errno=True)
    keep_memory_private()
    _drop_capabilities(library)
    _require(library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if readable is not None:
        _restrict_reading(library, readable)
    instructions = ctypes.create_string_buffer(code := _filter(), len(code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(instructions)))
    _require(library.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def _drop_capabilities(library: ctypes.CDLL) -> None:
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _require(library.capset(header, ctypes.create_string_buffer(24)), "capset")


def _restrict_reading(library: ctypes.CDLL, more: Sequence[str]) -> None:
    rules = ctypes.create_string_buffer(struct.pack("Q", _HANDLED))
    ruleset = _require(_call(library, _CREATE_RULESET, rules, 8, 0), "Landlock")
    for path in filter(os.path.exists, (*more, *_readable())):
        allowed = _READ_FILE | _READ_DIRECTORY if os.path.isdir(path) else _READ_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        beneath = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
        _require(_call(library, _ADD_RULE, ruleset, _PATH_BENEATH, beneath, 0), "Landlock")
        os.close(descriptor)
    _require(_call(library, _RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _readable() -> Iterable[str]:
    """Python, and the system's libraries."""
    ours = (sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    files = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
    return (*ours, *system, *files)


def _call(library: ctypes.CDLL, number: int, *arguments: object) -> int:
    result: int = library.syscall(number, *arguments)
    return result


def _require(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel does not let a process confine itself ({what})")
    return result


def _filter() -> bytes:
    """The program of the kernel's packet filter that decides about every system call."""
    architecture, column = ARCHITECTURES[os.uname().machine]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | errno.EPERM)
    kill, absent = (_RETURN, 0, 0, _KILL), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)

    def argument(index: int, *, upper: bool = False) -> Instruction:
        return _LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * upper

    def about(number: int | None, *code: Instruction) -> tuple[Instruction, ...]:
        return () if number is None else ((_EQUAL, 0, len(code), number), *code)

    code: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), kill]
    code += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), kill]
    for numbers in _ALLOWED.values():
        code += about(numbers[column], allow)
    for numbers, index, values in _ALLOWED_WITH_VALUES.values():
        choices = (instruction for value in values for instruction in ((_EQUAL, 0, 1, value), allow))
        code += about(numbers[column], argument(index), *choices, refuse)
    for pointer_numbers, index in _ALLOWED_WITH_NULL.values():
        null = (_EQUAL, 1, 0, 0), refuse
        code += about(pointer_numbers[column], argument(index), *null, argument(index, upper=True), *null, allow)
    for numbers, index, bits, wanted in _ALLOWED_WITH_BITS.values():
        code += about(numbers[column], argument(index), (_BITS, int(not wanted), int(wanted), bits), allow, refuse)
    code += about(435, absent)  # clone3: the C library then uses clone, whose flags can be seen
    code.append(refuse)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
