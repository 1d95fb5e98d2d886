"""The memory of another process of this host, read without its help: one copy instead of the kernel's two and UCX's wake-ups.

Linux lets a process read another that it could debug (``process_vm_readv``): one of the same user, in the same PID namespace, unless Yama
or the container forbids it. The kernel tells whether the process is the session's other end (``neighbours``). Whether it can be read is
found out by trying its *beacon*, random bytes. What is read is checked by its digest, like anything that comes from a peer. UCX's own
``cma`` does the same, but refuses when endpoints handle errors.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from .plane import surely

__all__ = ["Near", "NearChunks", "address_of", "is_wanted", "own_beacon"]

SWITCH: Final = "DATASTATES_NEAR"
"""If this is 0 in the environment, no process of this host is read directly; chunks then travel over the transport."""

_AT_ONCE = 2  # reads; more would share one memory bus
_TELL = 16  # chunks between two messages to the process that is read
_BYTES = 32


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_random = ctypes.create_string_buffer(secrets.token_bytes(_BYTES), _BYTES)
_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None) if sys.platform == "linux" else None
if _readv is not None:
    _stretches = ctypes.POINTER(_Stretch)
    _readv.argtypes = [ctypes.c_int, _stretches, ctypes.c_ulong, _stretches, ctypes.c_ulong, ctypes.c_ulong]
    _readv.restype = ctypes.c_ssize_t


class Near:
    """A process whose memory can be read, for as long as it keeps ``connection`` open. Safe from any thread."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid, self._connection = pid, connection

    def read(self, address: int, into: Sequence[memoryview]) -> bool:
        """Fill ``into`` with the bytes from ``address`` on. False if they cannot all be read; some of ``into`` may then be written.

        A process that exists after the read existed before: the bytes are its own, and not those of another process with the same pid.
        """
        assert _readv is not None, "reach found it"
        length = sum(view.nbytes for view in into)
        here = (_Stretch * len(into))(*(_Stretch(address_of(view), view.nbytes) for view in into))
        there = _Stretch(address, length)
        return bool(_readv(self._pid, here, len(into), ctypes.byref(there), 1, 0) == length) and self._is_alive()

    def close(self) -> None:
        """Read nothing any more; idempotent."""
        self._connection.close()

    def _is_alive(self) -> bool:
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def address_of(view: memoryview) -> int:
    """The address of the first byte of some memory, writable or not."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def is_wanted() -> bool:
    """Whether processes of one host may read each other here."""
    return _readv is not None and os.environ.get(SWITCH) != "0"


def own_beacon() -> tuple[int, bytes]:
    """The address of this process's random bytes, and the bytes."""
    return ctypes.addressof(_random), _random.raw


class NearChunks:
    """Chunks of one state in the memory of a near process; ``addresses`` are those of all chunks. Belongs to the loop thread; ``close`` it
    there.

    ``took`` is called with numbers of chunks and bytes from time to time, and at the end.
    """

    def __init__(self, near: Near, addresses: Sequence[int], took: Callable[[int, int], None]) -> None:
        self._near, self._addresses, self._took = near, addresses, took
        self._threads = ThreadPoolExecutor(_AT_ONCE, "datastates-near")
        self._chunks = self._bytes = 0

    async def receive(self, index: int, buffers: Sequence[memoryview]) -> bool:
        """Fill ``buffers``; False if the bytes cannot be read. When this is cancelled it still waits for the read to end."""
        reading = asyncio.wrap_future(self._threads.submit(self._near.read, self._addresses[index], buffers))
        try:
            is_read = await asyncio.shield(reading)
        except asyncio.CancelledError:
            await surely(reading)  # a millisecond; then nobody writes any more
            raise
        if is_read:
            self._chunks += 1
            self._bytes += sum(buffer.nbytes for buffer in buffers)
            if self._chunks >= _TELL:
                self._tell()
        return is_read

    def close(self) -> None:
        """Read nothing any more."""
        self._tell()
        self._threads.shutdown(wait=False)

    def _tell(self) -> None:
        if self._chunks:
            self._took(self._chunks, self._bytes)
            self._chunks = self._bytes = 0
