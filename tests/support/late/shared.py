"""Memory of a late device that two processes have: host memory that both map.

Its handle says where a process of this user finds it."""

from __future__ import annotations

import mmap
import os
import re

import torch

_HANDLE = re.compile(rb"late:(\d+):(\d+):(\d+)")


class Shared:
    """See ``datastates.system.devices.Shared``. The memory goes with the last tensor of it."""

    def __init__(self, fd: int, handle: bytes) -> None:
        self._fd, self.handle = fd, handle
        self._tensor: torch.Tensor | None = torch.frombuffer(
            mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8
        )

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "it was closed"
        return self._tensor

    def close(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            os.close(self._fd)


def make_shared(index: int, length: int) -> Shared:
    fd = os.memfd_create("late device", os.MFD_CLOEXEC)
    os.ftruncate(fd, length)
    return Shared(fd, b"late:%d:%d:%d" % (index, os.getpid(), fd))


def open_shared(handle: bytes) -> tuple[int, Shared]:
    found = _HANDLE.fullmatch(handle)
    if found is None:
        raise RuntimeError("invalid argument: this is no handle")
    index, pid, number = map(int, found.groups())
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise RuntimeError(f"invalid resource handle: {exc}") from exc
    return index, Shared(fd, b"")
