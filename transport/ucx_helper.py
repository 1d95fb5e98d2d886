"""The process that runs UCX for a training: ``python -m datastates.transport.ucx_helper SOCKET OUT
IN PARENT``.

OUT, IN and SOCKET are descriptors.

Anyone who reaches UCX's TCP port may write to any address of the process that opened it, and a bad
address from a peer ends that process. This process therefore holds no secret, no file, and no
memory except bytes in transit. It is single-threaded: it waits for UCX and for
orders at once, and reports everything that has ended by then together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .ucx_messages import (
    Close,
    Closed,
    Connect,
    Connected,
    Ended,
    Failed,
    Go,
    Inbox,
    Order,
    Receive,
    Report,
    Send,
    Started,
    frame,
)

SWITCH: Final = "DATASTATES_UCX_CONFINED"
"""If this is 0 in the environment, the helper omits Landlock and seccomp, to find out whether
one of them keeps a device from working."""

_MEMORY = 2 << 30  # what strangers can make it take, beyond what UCX has when it has started
_DESCRIPTORS = 4096

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_DUMPABLE = 4
_CAPABILITIES_3 = 0x20080522
_CAP_IPC_LOCK = 14  # devices of InfiniBand register memory
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_CONFINEMENT_READ = 12
_ORDER = 14 | 1 << 15
_ANYTHING = (1 << 16) - 1
_FILES: Final = {
    "/sys": _CONFINEMENT_READ,
    "/proc/sys": _CONFINEMENT_READ,
    "/proc/self/net": _CONFINEMENT_READ,
    "/dev/infiniband": _ORDER,
}
_libc = ctypes.CDLL(None, use_errno=True)


def bind_to(parent: int) -> None:
    """End when the thread that started this process ends, and at once if ``parent`` is dead
    already."""
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
    if os.environ.get(SWITCH) == "0" or not _landlock({**_FILES, "/tmp": _ANYTHING}):
        # tmpfile() uses no other folder
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


# --- Landlock -------------------------------------------------------------------------------------


def _landlock(files: Mapping[str, int]) -> bool:
    """Allow reading the kernel's files about devices, and no other file. Forbid signals, abstract
    sockets and debugging to other processes."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}.get(
        version, (1 << 16) - 1
    )
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
        return bool(
            _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0) == 0
        )
    finally:
        os.close(place)


# --- seccomp --------------------------------------------------------------------------------------

_LOAD = 32
_IF_EQUAL = 21
_IF_ANY = 69
_RETURN = 6
_ALLOW = 2147418112
_REFUSE = 327681
_ABSENT = 327718
_KILL = 2147483648
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_SET_FILTER = 1
_ALL_THREADS = 1
_PROT_EXEC = 4
_CLONE_THREAD = 65536
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_AF_UNIX = 1
_AF_PACKET = 17
_TIOCSTI = 21522
_FIOSETOWN = 35073
_SIOCSPGRP = 35074
_F_SETOWN = 8
_F_SETSIG = 10
_F_SETOWN_EX = 15

# Numbers on x86-64 and on aarch64, or None if the call does not exist there.
_ALLOWED: Final[dict[str, tuple[int | None, int | None]]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "lseek": (8, 62),
    "stat": (4, None),
    "lstat": (6, None),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "dup": (32, 23),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "pipe2": (293, 59),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    "shutdown": (48, 210),
    "recvmmsg": (299, 243),
    "sendmmsg": (307, 269),
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "mlock": (149, 228),
    "munlock": (150, 229),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "nanosleep": (35, 101),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "sigaltstack": (131, 132),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
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
_TGKILL = (234, 131)
_PRLIMIT = (302, 261)
_CLONE3 = 435
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
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            lines += _case(number, [_line(_RETURN, _ALLOW)])
    for numbers, place, values in _UNLESS.values():
        tests = [
            line
            for value in values
            for line in (_line(_IF_EQUAL, value, 0, 1), _line(_RETURN, _REFUSE))
        ]
        lines += _case(numbers[column], [_argument(place), *tests, _line(_RETURN, _ALLOW)])
    for numbers, place, bits, must in _BITS.values():
        ends = (_ALLOW, _REFUSE) if must else (_REFUSE, _ALLOW)
        lines += _case(
            numbers[column],
            [_argument(place), _line(_IF_ANY, bits, 0, 1), *(_line(_RETURN, end) for end in ends)],
        )
    for numbers, owner in ((_TGKILL, os.getpid()), (_PRLIMIT, 0)):  # to itself: abort needs it
        test = [
            _argument(0),
            _line(_IF_EQUAL, owner, 0, 1),
            _line(_RETURN, _ALLOW),
            _line(_RETURN, _REFUSE),
        ]
        lines += _case(numbers[column], test)
    return [*lines, *_case(_CLONE3, [_line(_RETURN, _ABSENT)]), _line(_RETURN, _REFUSE)]


def _case(number: int, then: list[bytes]) -> list[bytes]:
    """The instructions for one system call; ``then`` ends the program."""
    return [_line(_IF_EQUAL, number, 0, len(then)), *then]


def _argument(place: int) -> bytes:
    return _line(_LOAD, _ARGUMENTS + 8 * place)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


# The process that runs UCX for a training: ``python -m datastates.transport.ucx_helper
# SOCKET OUT IN PARENT``.


_RESOURCE = re.compile(r"^#\s+resource\b.* (\w+/\S+)\s*$", re.MULTILINE)
_UCX_HELPER_READ = 256 << 10
_ROUNDS = 256  # of progress before orders are looked at again
_CLOSE_NS = 10**9
_IDLE_S = 1.0


class Helper:
    """One worker, its endpoints, and the transfers under way."""

    def __init__(self, control: socket.socket, out: int, into: int) -> None:
        # not there: ucxx would import all of it for what only its benchmarks use
        sys.modules.setdefault("dask", None)  # type: ignore[arg-type]
        from ucxx import exceptions, get_ucx_address_from_buffer, types
        from ucxx._lib import arr, libucxx

        self._error: type[Exception] = exceptions.UCXError
        self._too_long: type[Exception] = exceptions.UCXMessageTruncatedError
        self._tag, self._whole_tag = types.Tag, types.TagMaskFull
        self._array, self._libucxx, self._place = arr.Array, libucxx, get_ucx_address_from_buffer
        self._control, self._fds = control, (out, into)
        self._inbox = Inbox(msgspec.msgpack.Decoder(Order))
        self._links: dict[int, Any] = {}
        self._under_way: dict[int, tuple[int, Any]] = {}
        self._said = bytearray()
        self._out = self._into = memoryview(b"")

    def start(self) -> None:
        """Make the worker, then give up the rights that making it needed."""
        still_open = before()  # UCX has a thread as soon as there is a context
        context = self._libucxx.UCXContext({})
        resources = tuple(dict.fromkeys(_RESOURCE.findall(context.info)))
        self._worker = self._libucxx.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        import ucxx

        versions = (ucxx.__version__, ".".join(map(str, ucxx.get_ucx_version())))
        still_open += after()
        self._say(Started(bytes(self._worker.address), versions, resources, tuple(still_open)))

    def serve(self) -> None:
        """Follow orders until the training closes the socket."""
        poller = select.epoll()
        poller.register(self._control, select.EPOLLIN)
        poller.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        is_idle = False
        while True:
            if self._said:
                self._flush()
            events = poller.poll(_IDLE_S if is_idle and self._worker.arm() else 0)
            if any(fd == self._control.fileno() for fd, _ in events) and not self._listen():
                return
            rounds = 0
            while rounds < _ROUNDS and self._worker.progress_once():
                rounds += 1
            if not rounds:
                self._worker.progress()  # which also cancels transfers on endpoints that broke
            is_idle = not self._look() and not rounds

    def _listen(self) -> bool:
        try:
            data = self._control.recv(_UCX_HELPER_READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        for order in self._inbox.take(data):
            self._obey(order)
        return bool(data)

    def _obey(self, order: Order) -> None:
        match order:
            case Send():
                self._begin(order, self._out)
            case Receive():
                self._begin(order, self._into)
            case Connect():
                self._connect(order)
            case Close(link):
                self._close(link)
            case Go(is_writable):
                out, into = self._fds
                self._out = _mapped(out, is_writable=is_writable)
                self._into = _mapped(into, is_writable=True)

    def _connect(self, order: Connect) -> None:
        try:
            place = self._place(order.address)
            self._links[order.link] = self._libucxx.UCXEndpoint.create_from_worker_address(
                self._worker, place, True
            )
        except self._error as exc:
            self._say(Connected(order.link, str(exc)[:500]))
        else:
            self._say(Connected(order.link))

    def _begin(self, order: Send | Receive, region: memoryview) -> None:
        endpoint = self._links.get(order.link)
        if endpoint is None:
            self._say(Ended(order.number, "the link is closed"))
            return
        memory = self._array(region[order.start : order.start + order.length])
        try:
            if isinstance(order, Send):
                request = endpoint.tag_send(memory, self._tag(order.tag))
            else:
                request = endpoint.tag_recv(memory, self._tag(order.tag), self._whole_tag)
        except self._error as exc:
            self._say(Ended(order.number, str(exc)[:500]))
        else:
            self._under_way[order.number] = order.link, request

    def _look(self) -> bool:
        """Report what has ended; returns whether anything has."""
        ended = [number for number, (_, request) in self._under_way.items() if request.completed]
        for number in ended:
            _, request = self._under_way.pop(number)
            try:
                request.check_error()
            except self._too_long:
                self._say(Ended(number, "it is longer", is_too_long=True))
            except self._error as exc:
                self._say(Ended(number, str(exc)[:500]))
            else:
                self._say(Ended(number))
        return bool(ended)

    def _close(self, link: int) -> None:
        endpoint = self._links.pop(link, None)
        if endpoint is not None:
            endpoint.close_blocking(_CLOSE_NS, 1)
        while any(
            owner == link and not request.completed for owner, request in self._under_way.values()
        ):
            self._worker.progress()
        self._look()
        self._say(Closed(link))

    def _say(self, report: Report) -> None:
        self._said += frame(report)

    def _flush(self) -> None:
        self._control.sendall(self._said)
        self._said.clear()


def _mapped(fd: int, *, is_writable: bool) -> memoryview:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, protection))


def main() -> None:
    """Run until the training closes its end of the socket, or dies."""
    control_fd, out, into, parent = map(int, sys.argv[1:])
    bind_to(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        helper = Helper(control, out, into)
        helper.start()
    except Exception as exc:  # whatever it is, the training reports it
        control.sendall(frame(Failed(f"{exc}"[:500] or type(exc).__name__)))
        return
    helper.serve()
    # there is nothing to wind up, and UCX's threads need not be waited for
    ctypes.CDLL(None)._exit(0)


if __name__ == "__main__":
    main()
