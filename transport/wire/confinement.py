"""What a process that strangers can reach gives up: every right that it does not need to move bytes between sockets and memory.

Linux only, through the C library. What a kernel or a container does not allow is named, so that ``datastates doctor`` can report it.

    bind_to   the process ends with its parent
    before    no new privileges, no capabilities, limits; no file except what the kernel says of devices, and those in ``/tmp``, where UCX
              writes what it finds; no signal, no debugging beyond this process (Landlock)
    after     no system call except those that UCX and Python still need (seccomp): it writes only to open descriptors, starts no program,
              looks at no other process, and turns no memory into code; no ``/tmp`` for the thread that talks to peers
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Final

__all__ = ["SWITCH", "after", "before", "bind_to"]

SWITCH: Final = "DATASTATES_UCX_CONFINED"
"""If this is 0 in the environment, the helper omits Landlock and seccomp, to find out whether one of them keeps a device from working."""

_MEMORY = 2 << 30  # what strangers can make it take, beyond what UCX has when it has started
_DESCRIPTORS = 4096

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 38, 4
_CAPABILITIES_3 = 0x20080522
_CAP_IPC_LOCK = 14  # devices of InfiniBand register memory
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ, _ORDER = 0b1100, 0b1110 | 1 << 15  # files and folders; also write to devices and control them
_ANYTHING = (1 << 16) - 1
_FILES: Final = {"/sys": _READ, "/proc/sys": _READ, "/proc/self/net": _READ, "/dev/infiniband": _ORDER}
_libc = ctypes.CDLL(None, use_errno=True)


def bind_to(parent: int) -> None:
    """End when the thread that started this process ends, and at once if ``parent`` is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def before() -> list[str]:
    """Confine the process before it listens to anything. Returns what could not be forbidden."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    with open("/proc/self/statm") as file:
        _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + _MEMORY)
    problems = []
    if not _drop_capabilities():
        problems.append("capabilities")
    if os.environ.get(SWITCH) == "0" or not _landlock({**_FILES, "/tmp": _ANYTHING}):  # tmpfile() knows no other place
        problems.append("Landlock")
    return problems


def after() -> list[str]:
    """Confine the process further once UCX has started. Returns what could not be forbidden."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)  # does not bind root, but seccomp does
    if os.environ.get(SWITCH) == "0":
        return ["seccomp"]
    _landlock(_FILES)  # a failure was already reported
    return [] if _seccomp() else ["seccomp"]


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _drop_capabilities() -> bool:
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data) != 0:
        return False
    kept = struct.unpack("=6I", data.raw)[1] & 1 << _CAP_IPC_LOCK
    return bool(_libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)) == 0)


# --- Landlock ---------------------------------------------------------------------------------------------------------------


def _landlock(files: Mapping[str, int]) -> bool:
    """Allow reading what the kernel says of devices, and no other file; signals, abstract sockets and debugging stay in this process."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}.get(version, (1 << 16) - 1)
    attributes = struct.pack("=Q", rights) if version < 6 else struct.pack("=QQQ", rights, 0, 0b11)
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for folder, permitted in files.items():
            if os.path.isdir(folder) and not _permit(ruleset, folder, rights & permitted):
                return False
        return bool(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _permit(ruleset: int, folder: str, rights: int) -> bool:
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        return bool(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0) == 0)
    finally:
        os.close(place)


# --- seccomp ----------------------------------------------------------------------------------------------------------------

_LOAD, _IF_EQUAL, _IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SET_FILTER, _ALL_THREADS = 1, 1
_PROT_EXEC, _CLONE_THREAD = 4, 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_AF_UNIX, _AF_PACKET = 1, 17
_TIOCSTI, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15

# Numbers on x86-64 and on aarch64; None: the call does not exist there.
_ALLOWED: Final[dict[str, tuple[int | None, int | None]]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57), "fstat": (5, 80),
    "newfstatat": (262, 79), "lseek": (8, 62), "stat": (4, None), "lstat": (6, None), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents64": (217, 61), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "dup": (32, 23),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "pipe2": (293, 59),
    "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203), "getsockname": (51, 204),
    "getpeername": (52, 205), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "setsockopt": (54, 208), "getsockopt": (55, 209), "shutdown": (48, 210), "recvmmsg": (299, 243), "sendmmsg": (307, 269),
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "mlock": (149, 228), "munlock": (150, 229),
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
    "membarrier": (324, 283), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "nanosleep": (35, 101), "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169), "time": (201, None), "sigaltstack": (131, 132), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "restart_syscall": (219, 128), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getrusage": (98, 165),
    "getrlimit": (97, 163), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
# Calls that are allowed unless the argument at this place is one of these values.
_UNLESS: Final[dict[str, tuple[tuple[int, int], int, tuple[int, ...]]]] = {
    "socket": ((41, 198), 0, (_AF_UNIX, _AF_PACKET)),
    "ioctl": ((16, 29), 1, (_TIOCSTI, _FIOSETOWN, _SIOCSPGRP)),
    "fcntl": ((72, 25), 1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
}
# Calls that are allowed unless an argument has these bits, or only if it has them.
_BITS: Final[dict[str, tuple[tuple[int, int], int, int, bool]]] = {
    "openat": ((257, 56), 2, _WRITING, False),  # for each link, UCX reads how fast each device is
    "mmap": ((9, 222), 2, _PROT_EXEC, False),
    "mprotect": ((10, 226), 2, _PROT_EXEC, False),
    "clone": ((56, 220), 0, _CLONE_THREAD, True),
}
_TGKILL, _PRLIMIT, _CLONE3 = (234, 131), (302, 261), 435
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _seccomp() -> bool:
    column, architecture = _ARCHITECTURES.get(platform.machine(), (-1, 0))
    if column < 0 or sys.byteorder != "little":
        return False
    program = b"".join(_program(column, architecture))
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    number = (317, 277)[column]
    return bool(_libc.syscall(number, _SET_FILTER, _ALL_THREADS, described) == 0)


def _program(column: int, architecture: int) -> list[bytes]:
    lines = [_line(_LOAD, _ARCHITECTURE), _line(_IF_EQUAL, architecture, 1, 0), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            lines += _case(number, [_line(_RETURN, _ALLOW)])
    for numbers, place, values in _UNLESS.values():
        tests = [line for value in values for line in (_line(_IF_EQUAL, value, 0, 1), _line(_RETURN, _REFUSE))]
        lines += _case(numbers[column], [_argument(place), *tests, _line(_RETURN, _ALLOW)])
    for numbers, place, bits, must in _BITS.values():
        ends = (_ALLOW, _REFUSE) if must else (_REFUSE, _ALLOW)
        lines += _case(numbers[column], [_argument(place), _line(_IF_ANY, bits, 0, 1), *(_line(_RETURN, end) for end in ends)])
    for numbers, owner in ((_TGKILL, os.getpid()), (_PRLIMIT, 0)):  # to itself: abort needs it
        test = [_argument(0), _line(_IF_EQUAL, owner, 0, 1), _line(_RETURN, _ALLOW), _line(_RETURN, _REFUSE)]
        lines += _case(numbers[column], test)
    return [*lines, *_case(_CLONE3, [_line(_RETURN, _ABSENT)]), _line(_RETURN, _REFUSE)]


def _case(number: int, then: list[bytes]) -> list[bytes]:
    """The instructions for one system call; ``then`` ends the program."""
    return [_line(_IF_EQUAL, number, 0, len(then)), *then]


def _argument(place: int) -> bytes:
    return _line(_LOAD, _ARGUMENTS + 8 * place)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
