"""How two processes of one host and one user prove that they are: over an abstract Unix socket,
whose ends the kernel identifies.

    server     names a socket in its first sealed frame: random, revealed to nobody else
    client ->  the session's name, nonce
               each side reads the other's user and pid from the kernel (SO_PEERCRED)
    server ->  nonce
    client ->  HMAC(key, "near client", name, both nonces)
    server ->  HMAC(key, "near server", …), where its beacon is, the beacon

After this proof, the server reveals the addresses of chunks, and the client reads them. The
connection stays open as long as the session. While it does, the process that the kernel identified
is alive, and no other process has its pid.
"""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import os
import re
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import numpy as np

from datastates.agent.messages import who

from .connections import keep_from_children, receive_exactly, stop_listening
from .contract import Terms, size_of
from .data_plane import finish

SWITCH: Final = "DATASTATES_NEAR"
"""If this is 0 in the environment, no process of this host is read directly; chunks then travel
over the transport."""

_NEAR_AT_ONCE = 2  # reads; more would share one memory bus
_BYTES = 32


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_random = ctypes.create_string_buffer(secrets.token_bytes(_BYTES), _BYTES)
_readv = (
    getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if sys.platform == "linux"
    else None
)
if _readv is not None:
    _stretches = ctypes.POINTER(_Stretch)
    _readv.argtypes = [
        ctypes.c_int,
        _stretches,
        ctypes.c_ulong,
        _stretches,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    _readv.restype = ctypes.c_ssize_t


class ProcessMemory:
    """A process whose memory can be read, for as long as it keeps ``connection`` open.

    Safe from any thread."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid, self._connection = pid, connection

    def read(self, address: int, into: Sequence[memoryview]) -> bool:
        """Fill ``into`` with the bytes from ``address`` on. False if they cannot all be read; some
        of ``into`` may then be written.

        A process that exists after the read also existed before it. Therefore no other process
        with the same pid was read.
        """
        assert _readv is not None, "reach found it"
        length = sum(view.nbytes for view in into)
        here = (_Stretch * len(into))(*(_Stretch(address_of(view), view.nbytes) for view in into))
        there = _Stretch(address, length)
        return (
            bool(_readv(self._pid, here, len(into), ctypes.byref(there), 1, 0) == length)
            and self._is_alive()
        )

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


class LocalChunks:
    """Chunks of one state in the memory of a near process; ``addresses`` has the address of each
    chunk. Belongs to the loop thread; ``close`` it there.

    ``took`` is called with the numbers of chunks and bytes that each ``receive`` has read.
    """

    def __init__(
        self, near: ProcessMemory, addresses: Sequence[int], took: Callable[[int, int], None]
    ) -> None:
        self._near, self._addresses, self._took = near, addresses, took
        self._threads = ThreadPoolExecutor(_NEAR_AT_ONCE, "datastates-near")

    async def receive(
        self, chunks: Mapping[int, Sequence[memoryview]], arrived: Callable[[int], None]
    ) -> None:
        """Fill the memory of some chunks, up to the first one that cannot be read. ``arrived`` is
        called on a thread with the index of each. When this is cancelled it still waits for the
        present read to end."""
        done = list[int]()
        is_cancelled = threading.Event()

        def read() -> None:
            for index, buffers in chunks.items():
                if is_cancelled.is_set() or not self._near.read(self._addresses[index], buffers):
                    return
                arrived(index)
                done.append(index)

        reading = asyncio.wrap_future(self._threads.submit(read))
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            is_cancelled.set()
            await finish(reading)  # a millisecond; then the buffers are not written any more
            raise
        finally:
            if done:
                self._took(len(done), sum(size_of(chunks[index]) for index in done))

    def close(self) -> None:
        """Read nothing any more."""
        self._threads.shutdown(wait=False)


# How two processes of one host and one user prove that they are: over an abstract Unix socket,
# whose ends the kernel identifies.


_NONCE_BYTES = _CODE_BYTES = 32
_NAME = re.compile(r"datastates-[0-9a-f]{32}")
_MEET_S = 2.0
_NEIGHBOURS_AT_ONCE = 64
_place = struct.Struct(f">Q{_NONCE_BYTES}s")


class LocalPeers:
    """The Unix socket to which processes of this host connect, for all sessions of one server.
    Belongs to the loop thread. ``name`` is empty if no process can connect."""

    def __init__(self) -> None:
        self.name = ""
        self._server: asyncio.Server | None = None
        self._expected: dict[bytes, Terms] = {}
        self._here: dict[bytes, asyncio.StreamWriter] = {}
        self._arriving: set[asyncio.StreamWriter] = set()
        self._news = asyncio.Event()
        self._is_closed = False

    async def open(self) -> None:
        """Let them in from now on."""
        if not is_wanted():
            return
        name = f"datastates-{secrets.token_hex(16)}"
        with suppress(OSError):
            self._server = await asyncio.start_unix_server(self._visit, "\0" + name, limit=256)
            keep_from_children(self, self._server.sockets[0])
            self.name = name

    def expect(self, terms: Terms) -> None:
        """Expect the other end of a session."""
        self._expected[terms.name] = terms
        self._news.set()
        self._news = asyncio.Event()

    def has(self, name: bytes) -> bool:
        """Whether the other end of a session has proved that it is near."""
        return name in self._here

    def forget(self, name: bytes) -> None:
        """Forget a session that is over; idempotent."""
        self._expected.pop(name, None)
        writer = self._here.pop(name, None)
        if writer is not None:
            writer.close()

    async def close(self) -> None:
        """Accept no more processes, and disconnect those that are here; idempotent."""
        self._is_closed = True
        server, self._server = self._server, None
        if server is not None:
            await stop_listening(server)
        self._expected.clear()
        for writer in [*self._arriving, *self._here.values()]:
            writer.close()
        self._here.clear()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        _, user, _ = who(connection)
        if self._is_closed or user != os.geteuid() or len(self._arriving) >= _NEIGHBOURS_AT_ONCE:
            writer.close()
            return
        keep_from_children(writer, connection)
        self._arriving.add(writer)
        try:
            async with asyncio.timeout(_MEET_S):
                name = await self._greet(reader, writer)
        except (OSError, EOFError, TimeoutError):
            name = None
        finally:
            self._arriving.discard(writer)
        if name is None:
            writer.close()
        else:
            with suppress(OSError):
                await reader.read(1)  # until the other end leaves
            self.forget(name)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """The name of the session whose other end has proved itself."""
        hello = await reader.readexactly(16 + _NONCE_BYTES)
        name, nonce = hello[:16], secrets.token_bytes(_NONCE_BYTES)
        while (
            terms := self._expected.get(name)
        ) is None:  # it came before its own last frame of the handshake
            await self._news.wait()
        writer.write(nonce)
        said = await reader.readexactly(_CODE_BYTES)
        if name in self._here or not hmac.compare_digest(
            said, _code(terms, b"client", hello + nonce)
        ):
            return None
        if name not in self._expected:
            return None  # the session ended meanwhile
        self._here[name] = writer
        writer.write(
            _code(terms, b"server", hello + nonce)
            + _place.pack(ctypes.addressof(_random), _random.raw)
        )
        return name


async def meet(name: str, terms: Terms) -> ProcessMemory | None:
    """The memory of the process behind such a socket, if it is of this host and user, proves the
    session's key, and can be read."""
    if not is_wanted() or not _NAME.fullmatch(name):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_MEET_S):
            near = await _met(connection, name, terms)
    except (OSError, EOFError, TimeoutError):
        near = None
    except BaseException:
        connection.close()
        raise
    if near is None:
        connection.close()
    else:
        keep_from_children(near, connection)
    return near


async def _met(connection: socket.socket, name: str, terms: Terms) -> ProcessMemory | None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, "\0" + name)
    pid, user, _ = who(connection)
    if user != os.geteuid() or pid in {0, os.getpid()}:
        return None
    hello = terms.name + secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, hello)
    nonce = await receive_exactly(connection, _NONCE_BYTES)
    await loop.sock_sendall(connection, _code(terms, b"client", hello + nonce))
    said = await receive_exactly(connection, _CODE_BYTES + _place.size)
    if not hmac.compare_digest(said[:_CODE_BYTES], _code(terms, b"server", hello + nonce)):
        return None
    near, seen = ProcessMemory(pid, connection), bytearray(_NONCE_BYTES)
    address, beacon = _place.unpack(said[_CODE_BYTES:])
    return near if near.read(address, [memoryview(seen)]) and bytes(seen) == beacon else None


def _code(terms: Terms, role: bytes, said: bytes) -> bytes:
    return hmac.digest(terms.key, b"datastates near " + role + b"\0" + said, "sha256")
