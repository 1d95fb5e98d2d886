"""Memory that another process can map: for an arena whose states survive their process.

Direct writes from small pages take seven times the processor time of huge ones, and the kernel
rarely gives huge pages to a memfd. A tmpfs mounted with ``huge=always`` has them. Any user can
mount one in a private user and mount namespace, so a short-lived child does that, and passes on
an unlinked file. Without permission, a sealed memfd takes its place.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from datastates.errors import Unavailable

_CHILD_S = 10.0
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

_MOUNT = r"""
import ctypes, os, socket, sys
size, peer = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
def check(result):
    if result:
        sys.exit(os.strerror(ctypes.get_errno()))
check(libc.unshare(0x10000000 | 0x00020000))
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
check(libc.mount(None, b"/", None, 0x44000, None))
options = f"huge=always,mode=0700,size={size}".encode()
check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, options))
name = "/tmp/arena"
made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.ftruncate(made, size)
read = os.open(name, os.O_RDONLY)
os.unlink(name)
socket.send_fds(peer, [b"."], [made, read])
"""
"""The program of the child. It is private to its namespaces, and nothing of it is left when it has
ended but the file."""


class Pages(StrEnum):
    """The kinds of shared memory, the best first."""

    HUGE = "huge"
    SMALL = "small"


@dataclass(slots=True)
class SharedMemory:
    """A file of ``size`` bytes in memory.

    ``fd`` can be mapped for writing, ``read_fd`` only for reading. Both are -1 once it is closed.
    ``reason`` is why its pages are small, else empty. Whoever has it closes it.
    """

    fd: int
    read_fd: int
    size: int
    pages: Pages
    reason: str = ""

    def close(self) -> None:
        """Close the descriptors; what is mapped stays mapped. Idempotent."""
        fds, self.fd, self.read_fd = (self.fd, self.read_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)


def make_shared_memory(size: int, pages: Pages | None = None) -> SharedMemory:
    """Shared memory of this size, in bytes: with huge pages if this user may mount a tmpfs, unless
    ``pages`` chooses.

    No page takes memory before it is touched.

    :raises Unavailable: the kernel gives none.
    """
    reason = "chosen"
    if pages is not Pages.SMALL:
        try:
            return SharedMemory(*_huge(size), size, Pages.HUGE)
        except (OSError, subprocess.SubprocessError) as exc:
            reason = f"no tmpfs with huge pages can be mounted here: {exc}"
            if pages is Pages.HUGE:
                raise Unavailable(f"no memory can be shared with an agent: {reason}") from exc
    try:
        fd, read_fd = _sealed(size)
    except OSError as exc:
        raise Unavailable(f"no memory can be shared with an agent: {exc}") from exc
    return SharedMemory(fd, read_fd, size, Pages.SMALL, reason)


def _huge(size: int) -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MOUNT, str(size), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_S,
            check=False,
        )
        if child.returncode:
            raise OSError(child.stderr.strip().rpartition("\n")[2] or "the kernel refused")
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
    for fd in fds:
        os.set_inheritable(fd, False)
    made, read = fds
    return made, read


def _sealed(size: int) -> tuple[int, int]:
    fd = os.memfd_create("datastates-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        for seal in _SEALS:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, getattr(fcntl, seal))
        return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(fd)
        raise
