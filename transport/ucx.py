"""Bytes over UCX: control frames over our own TCP channel, data as tag messages between workers in
helper processes.

UCX's own listeners are not used: they bind every interface, without authentication. The port of a
worker cannot be avoided, so UCX runs in a process that has nothing to lose (``ucx_helper``). It is
started when the first bytes have to travel, and restarted when it ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import msgspec
import numpy as np
from blake3 import blake3

from datastates.errors import DatastatesError, Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.system.failures import again

from .connections import ConnectionLimiter, device_of, rdma_devices
from .contract import Channel, Link, Listener, Tls
from .data_connection import TcpTransport
from .data_plane import StagedLink, fail
from .loop import at_stop
from .ucx_messages import (
    PART_BYTES,
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
    Region,
    Report,
    Send,
    Started,
    Stretch,
    frame,
)

_OUT_BYTES = 64 << 20
_IN_BYTES = 128 << 20
_START_S = 60.0
_END_S = 2.0
_CLOSE_S = 5.0
_LINK_S = 10.0
_SAID_BYTES = 256 << 10  # bytes of UCX's log that are passed on
_ETHERNET = ("tcp/", "self/")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONHOME")
_OURS = {
    "UCX_TLS": (
        "^sm,cuda"
    ),  # a peer's address decides what is opened and dialled: other processes' memory is excluded
    "UCX_TCP_TX_SEG_SIZE": "1M",  # the defaults move a third of what this moves
    "UCX_TCP_RX_SEG_SIZE": "1M",
    "UCX_TCP_CONN_NB": "y",  # an address that does not answer blocks nothing
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # it just ends, and its last words are passed on
}


@dataclass(slots=True)
class _Transfer:
    region: Region
    stretch: Stretch
    done: asyncio.Future[None]


class Helper:
    """A helper, created by ``start``; belongs to the loop thread.

    ``address`` is the address of its worker. ``open`` lists the rights that it could not give up.
    Once it ``is_over``, everything raises ``Disconnected``, with the reason why it ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        said: IO[bytes],
        out: Region,
        into: Region,
    ) -> None:
        self._process, self._control, self._said, self.out, self.into = (
            process,
            control,
            said,
            out,
            into,
        )
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._transfers: dict[int, _Transfer] = {}
        self._connecting: dict[int, asyncio.Future[None]] = {}
        self._closing: dict[int, asyncio.Future[None]] = {}
        self._started: asyncio.Future[Started] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Task[None] | None = None
        self._error: DatastatesError | None = None
        self._channel: asyncio.WriteTransport | None = None
        self._log = _HelperLog()
        self.closing: set[asyncio.Task[None]] = set()
        self.moved = 0
        self.address = b""
        self.versions = ("", "")
        self.resources: tuple[str, ...] = ()
        self.open: tuple[str, ...] = ()

    @classmethod
    async def start(cls, environment: dict[str, str]) -> Helper:
        """A process that waits for orders. ``environment`` has the settings of UCX that this class
        does not set itself.

        :raises Unavailable: it does not start; the error gives the reason.
        """
        with ExitStack() as ours, ExitStack() as its:
            try:
                here, there = socket.socketpair()
                ours.callback(here.close)
                its.callback(there.close)
                read_end, write_end = os.pipe()
                ours.callback(os.close, read_end)
                its.callback(os.close, write_end)
                out = Region("datastates-out", _OUT_BYTES, is_written_here=True)
                ours.callback(out.close, Disconnected("never used"))
                into = Region("datastates-in", _IN_BYTES, is_written_here=False)
                ours.callback(into.close, Disconnected("never used"))
                # on the loop's own thread: the child ends with the thread that starts it
                process = _spawn((there.fileno(), out.fd, into.fd), write_end, environment)
            except OSError as exc:
                raise Unavailable(f"the process that runs UCX cannot be started ({exc})") from exc
            ours.pop_all()
        helper = cls(process, here, os.fdopen(read_end, "rb"), out, into)
        _alive.add(helper)
        await helper._connect()
        return helper

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is ending."""
        return self._error is not None

    @property
    def error(self) -> DatastatesError | None:
        """The reason why it ended, if it has."""
        return self._error

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._process.pid

    async def close(self) -> None:
        """End it; idempotent."""
        self._end(Disconnected("the data plane was closed"))
        await asyncio.shield(self._ended)

    # --- orders to the helper ---------------------------------------------------------------------

    async def connect(self, address: bytes) -> int:
        """The number of a new link to a worker."""
        link = next(self._numbers)
        self._order(Connect(link, address))
        made = self._connecting[link] = self._loop.create_future()
        try:
            async with asyncio.timeout(_LINK_S):
                await asyncio.shield(made)
        except TimeoutError:
            self._hang()
            await made  # it failed with the helper
        except asyncio.CancelledError:
            made.add_done_callback(
                lambda made: self._forget(link) if not made.exception() else None
            )
            raise
        return link

    async def disconnect(self, link: int) -> None:
        """Release a link. A helper that does not do so within seconds hangs, and is ended."""
        if self.is_over:
            return
        closed = self._closing[link] = self._loop.create_future()
        self._order(Close(link))
        done, _ = await asyncio.wait({closed}, timeout=_CLOSE_S)
        if not done:
            self._hang()

    def _hang(self) -> None:
        self._end(
            Disconnected(f"the process that runs UCX (pid {self.pid}) does not answer any more")
        )

    def send(self, link: int, tag: int, stretch: Stretch) -> asyncio.Future[None]:
        """Send the bytes in a stretch of ``out``, which is given back afterwards.

        A caller that stops waiting leaves the future done."""
        return self._begin(
            self.out, stretch, Send(next(self._numbers), link, tag, stretch.start, stretch.length)
        )

    def receive(self, link: int, tag: int, stretch: Stretch) -> asyncio.Future[None]:
        """Receive into a stretch of ``into``.

        If that succeeds while the future is waited for, the caller gives the stretch back."""
        return self._begin(
            self.into,
            stretch,
            Receive(next(self._numbers), link, tag, stretch.start, stretch.length),
        )

    def _begin(
        self, region: Region, stretch: Stretch, order: Send | Receive
    ) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        self._order(order)
        self._transfers[order.number] = _Transfer(region, stretch, done)
        return done

    def _forget(self, link: int) -> None:
        if not self.is_over:
            self._closing[link] = self._loop.create_future()
            self._order(Close(link))

    def _order(self, order: Order) -> None:
        if self._error is not None:
            raise self._gone()
        assert self._channel is not None, "it was started"
        self._channel.write(frame(order))

    def _gone(self) -> DatastatesError:
        assert self._error is not None
        return again(self._error)

    # --- reports from the helper ------------------------------------------------------------------

    def take(self, report: Report) -> None:
        """Act on a report.

        :raises ValueError: it belongs to no request.
        """
        match report:
            case Ended():
                self._on_ended(report)
            case Connected(link, problem):
                made = self._connecting.pop(link, None)
                if made is None:
                    raise ValueError(f"a link {link} that nobody asked for")
                error = None
                if problem is not None:
                    error = Disconnected(
                        f"the peer's data plane cannot be reached ({_printable(problem)}): see"
                        " UCX_NET_DEVICES and UCX_TLS"
                    )
                _settle(made, error)
            case Closed(link):
                closed = self._closing.pop(link, None)
                if closed is None:
                    raise ValueError(f"the end of link {link}, which nobody asked for")
                _settle(closed, None)
            case Started():
                if self._started.done():
                    raise ValueError("that it started, again")
                self._started.set_result(report)
            case Failed(problem):
                hint = "check the UCX_… variables; UCX_LOG_LEVEL=info says more"
                self._end(Unavailable(f"UCX does not start ({_printable(problem)}): {hint}"))

    def _on_ended(self, report: Ended) -> None:
        transfer = self._transfers.pop(report.number, None)
        if transfer is None:
            raise ValueError(f"the end of transfer {report.number}, which nobody asked for")
        is_received = transfer.region is self.into and report.problem is None
        if not is_received or transfer.done.done():
            transfer.region.give_back(transfer.stretch)
        error: DatastatesError | None = None
        if report.is_too_long:
            error = PeerFault("a message is longer than what was waited for")
        elif report.problem is not None:
            error = Disconnected(f"the peer's data plane is gone ({_printable(report.problem)})")
        else:
            self.moved += 1
        _settle(transfer.done, error)

    # --- life and death ---------------------------------------------------------------------------

    async def _connect(self) -> None:
        await self._loop.connect_read_pipe(lambda: self._log, self._said)
        self._channel, _ = await self._loop.create_connection(
            lambda: _Protocol(self), sock=self._control
        )
        try:
            async with asyncio.timeout(_START_S):
                started = await asyncio.shield(self._started)
        except TimeoutError:
            self._end(Unavailable(f"the process that runs UCX has not started in {_START_S:g} s"))
            await asyncio.shield(self._ended)
            raise self._gone() from None
        except asyncio.CancelledError:
            self._end(Disconnected("the data plane was closed"))
            raise
        self.address, self.versions, self.resources, self.open = (
            started.address,
            started.versions,
            started.resources,
            started.open,
        )
        is_registered = any(not resource.startswith(_ETHERNET) for resource in started.resources)
        # RDMA registers memory only as a whole; receivers compare digests
        self.out.hand_over(is_writable_there=is_registered)
        self.into.hand_over(is_writable_there=True)
        self._order(Go(is_registered))

    def lost(self, problem: str | None = None) -> None:
        """Note that the helper's end of the socket is closed, or that it reports nonsense."""
        self._end(Disconnected(problem) if problem else None)

    def _end(self, error: DatastatesError | None) -> None:
        if self._error is None:
            self._error = error or Disconnected("the process that runs UCX ended")
            self._ending = self._loop.create_task(self._clean_up(is_told=error is not None))

    async def _clean_up(self, *, is_told: bool) -> None:
        if is_told:
            self._process.kill()
        try:
            await asyncio.to_thread(self._reap)
        finally:  # the loop may be stopped meanwhile, and that waits for this
            if not is_told:
                self._error = Disconnected(
                    f"the process that runs UCX (pid {self.pid})"
                    f" {_cause(self._process.returncode)}{self._log.last}"
                )
            if self._channel is not None:
                self._channel.close()
            self._log.close()
            _alive.discard(self)
            self._fail()
            self._ended.set_result(None)

    def _reap(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _fail(self) -> None:
        error = self._gone()
        fail(self._started, error)
        for future in (
            *self._connecting.values(),
            *(transfer.done for transfer in self._transfers.values()),
        ):
            fail(future, error)
        for future in self._closing.values():
            _settle(future, None)
        self._transfers.clear()
        for region in (self.out, self.into):
            region.close(error)

    def leave(self) -> None:
        """Forget the helper in a forked child: it belongs to the parent."""
        self._process.returncode = 0  # or else its end would be waited for here
        self._control.close()
        self._said.close()


class _Protocol(asyncio.Protocol):
    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._inbox = Inbox(msgspec.msgpack.Decoder(Report))

    def data_received(self, data: bytes) -> None:
        try:
            for report in self._inbox.take(data):
                self._helper.take(report)
        except ValueError as exc:  # includes msgspec's errors
            self._helper.lost(
                f"the process that runs UCX was ended: it reports what makes no sense ({exc})"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._helper.lost()


class _HelperLog(asyncio.Protocol):
    """The log of UCX, which is copied to standard error. Its last lines explain why UCX ended."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=3)
        self._left = _SAID_BYTES
        self._pipe: asyncio.ReadTransport | None = None

    @property
    def last(self) -> str:
        """The last words, to be appended to the cause."""
        return f", and said: {' / '.join(self._lines)}" if self._lines else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._pipe = transport

    def data_received(self, data: bytes) -> None:
        for line in data.decode(errors="replace").splitlines():
            if line.strip():
                self._lines.append(_printable(line.strip())[:300])
                self._left -= len(line)
                if self._left > 0:
                    sys.stderr.write(_printable(line) + "\n")

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


def _spawn(
    descriptors: tuple[int, int, int], words: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(("UCX_", "UCXX_", "RAPIDS_", "DATASTATES_UCX"))
    }
    places = [os.path.abspath(place) for place in sys.path if place]
    root = str(Path(__file__).resolve().parents[3])
    # NumPy must not start threads, which would keep rights that the helper gives up later
    own = {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, *places]),
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        "-m",
        "datastates.transport.ucx_helper",
        *map(str, descriptors),
        str(os.getpid()),
    ]
    return subprocess.Popen(
        command,
        env={**_OURS, **environment, **kept, **own},
        cwd="/",
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=words,
        start_new_session=True,
    )


def _settle(future: asyncio.Future[None], error: DatastatesError | None) -> None:
    if error is not None:
        fail(future, error)
    elif not future.done():
        future.set_result(None)


def _cause(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with status {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


_alive: weakref.WeakSet[Helper] = weakref.WeakSet()


_inherited: list[Helper] = []


def _leave_all() -> None:
    _inherited.extend(_alive)
    _alive.clear()
    for helper in _inherited:
        helper.leave()
    # asyncio's parts of them belong to the parent's loop: never touched here
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_inherited))


os.register_at_fork(after_in_child=_leave_all)


# One endpoint of UCX, held by a helper, and the transfers under way on it.


_COPIED_AT_ONCE = 256 << 10  # on the loop's thread: waking another thread takes as long


class UcxLink(StagedLink):
    """Tag messages to and from one peer; UCX matches tags over all peers of the helper.

    Bytes are copied into the helper's memory to be sent, and out of it when they arrive. Later
    checks therefore cover bytes that no other process can change. A message of more than
    ``PART_BYTES`` is sent as several with its tag, which UCX keeps in order. UCX detects a message
    that is longer than the memory. A shorter one leaves the end of the memory unchanged, without an
    error; the digest detects it.
    """

    def __init__(
        self,
        helper: Helper,
        number: int,
        threads: ThreadPoolExecutor,
        on_abort: Callable[[UcxLink], None],
    ) -> None:
        super().__init__()
        self._helper, self._number = helper, number
        self._threads, self._on_abort = threads, on_abort
        self._allocators |= {helper.out, helper.into}

    async def send(self, tag: int, data: memoryview) -> None:
        await asyncio.shield(self._begin(self._send(tag, data.cast("B"))))

    async def receive(self, tag: int, into: memoryview) -> None:
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        receiving = self._receive(tag, into.cast("B"), self._begin_post())
        try:
            await asyncio.shield(self._begin(receiving))
        except PeerFault as exc:
            raise PeerFault(
                f"the message of tag {tag} has more than the {into.nbytes} bytes that were"
                " waited for"
            ) from exc

    async def _abort(self) -> None:
        closing = asyncio.create_task(self._helper.disconnect(self._number))
        self._helper.closing.add(closing)
        closing.add_done_callback(self._helper.closing.discard)
        await super()._abort()
        self._on_abort(self)

    async def _send(self, tag: int, data: memoryview) -> None:
        region, sent = self._helper.out, list[asyncio.Future[None]]()
        for part in _parts(data):
            self._check()
            stretch = await region.take(self, part.nbytes)
            try:
                await self._copy(region.view(stretch), part)
                sent.append(self._wait_for(self._helper.send(self._number, tag, stretch)))
            except BaseException:
                region.give_back(stretch)
                raise
        for future in sent:
            await future

    async def _receive(self, tag: int, into: memoryview, posted: asyncio.Future[None]) -> None:
        region, landing = self._helper.into, list[asyncio.Task[None]]()
        try:
            for part in _parts(into):
                self._check()
                stretch = await region.take(self, part.nbytes)
                try:
                    self._check()
                    arrived = self._wait_for(self._helper.receive(self._number, tag, stretch))
                except BaseException:
                    region.give_back(stretch)
                    raise
                landing.append(self._begin(self._land(arrived, stretch, part)))
        finally:
            posted.set_result(None)
        await asyncio.gather(*landing)

    async def _land(
        self, arrived: asyncio.Future[None], stretch: Stretch, into: memoryview
    ) -> None:
        await arrived  # from here on the stretch is ours
        try:
            await self._copy(into, self._helper.into.view(stretch))
        finally:
            self._helper.into.give_back(stretch)

    async def _copy(self, into: memoryview, data: memoryview) -> None:
        self._check()
        if data.nbytes <= _COPIED_AT_ONCE:
            into[:] = data
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, _copy, into, data)
        self._check()


def _parts(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, memory.nbytes, PART_BYTES):
        yield memory[start : start + PART_BYTES]


def _copy(into: memoryview, data: memoryview) -> None:
    # lets other threads run meanwhile
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


# The transport of ``ucx://host:port``.


_MAGIC = b"datastates-ucx-1"
_DIGEST_BYTES = 16
_THREADS = 2
_IN_VAIN = 3  # helpers in a row that end before anything has moved
_PAUSE_S = 10.0
_logger = logging.getLogger(__name__)


class UcxTransport(TcpTransport):
    """The transport of ``ucx://host:port``. One helper for each process, started on first use. It
    is bound to the devices of the addresses that are served or dialled, and ends when this process
    does."""

    scheme = "ucx"

    def __init__(self) -> None:
        super().__init__()
        self._helper: Helper | None = None
        self._making: asyncio.Lock | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._links: set[UcxLink] = set()
        self._devices: set[str | None] = set()
        self._retired: Helper | None = None
        self._cause = ""
        self._in_vain = 0
        self._pause_until = 0.0

    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        """Listen on one address; bytes over UCX may then also travel by its device."""
        listener = await super().listen(url, accept, tls=tls, limiter=limiter)
        await self.bind(urlsplit(listener.url).hostname)
        return listener

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        """Open a control channel; bytes over UCX may then also travel by its device."""
        channel = await super().dial(url, timeout_s=timeout_s, tls=tls)
        await self.bind(channel.host)
        return channel

    @property
    def planes(self) -> tuple[str, ...]:
        return ("tcp", "ucx")

    @property
    def located(self) -> bytes:
        """The address of the worker, if there is one."""
        helper = self._helper
        return _told(helper.address) if helper is not None and not helper.is_over else b""

    @property
    def helper(self) -> Helper | None:
        """The process that runs UCX, if there is one."""
        return self._helper

    async def address(self) -> bytes:
        """The worker's address, with the interfaces of the addresses that are served or dialled."""
        return _told((await self._started()).address)

    async def link(self, address: bytes) -> Link:
        raw = _checked(address)
        helper = await self._started()
        assert self._threads is not None, "made with the helper"
        link = UcxLink(helper, await helper.connect(raw), self._threads, self._links.discard)
        self._links.add(link)
        return link

    async def close(self) -> None:
        helper, threads, self._helper, self._threads, self._making = (
            self._helper,
            self._threads,
            None,
            None,
            None,
        )
        self._in_vain, self._pause_until = 0, 0.0
        self._devices.clear()
        try:
            await super().close()
            for link in list(self._links):
                await link.abort()
        finally:
            if helper is not None:
                await helper.close()
            if threads is not None:
                await asyncio.to_thread(threads.shutdown)

    async def _started(self) -> Helper:
        if self._making is None:  # on this loop; the next one has another
            at_stop(self.close)
            self._making = asyncio.Lock()
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="datastates-ucx")
        if self._helper is not None and not self._helper.is_over:
            return self._helper
        async with self._making:
            if self._helper is None or self._helper.is_over:
                await self._check_last_helper()
                self._helper = await Helper.start(self._environment())
                if self._helper.open:
                    _logger.info(
                        "the process that runs UCX could not be forbidden all: %s",
                        ", ".join(self._helper.open),
                    )
            return self._helper

    async def _check_last_helper(self) -> None:
        """Check why the last helper ended. After several that moved nothing, no helper is started
        for a while.

        :raises Unavailable: this is that while.
        """
        last, self._helper = self._helper, None
        if last is not None:
            await last.close()
            if last is not self._retired:
                self._in_vain = 0 if last.moved else self._in_vain + 1
                self._cause = str(last.error)
                _logger.warning("%s; its links are made again", self._cause)
            if self._in_vain >= _IN_VAIN:
                self._in_vain, self._pause_until = 0, time.monotonic() + _PAUSE_S
        left = self._pause_until - time.monotonic()
        if left > 0:
            raise Unavailable(
                f"{self._cause}; so did {_IN_VAIN} in a row that moved nothing: the next is started"
                f" in {left:.0f} s"
            )

    async def bind(self, host: str | None) -> None:
        """Use the device of this address for data too, or all devices if it is None. A helper
        without the device is replaced."""
        device = device_of(host) if host is not None else None
        if device in self._devices:
            return
        self._devices.add(device)
        helper = self._helper
        if helper is not None and not helper.is_over and "UCX_NET_DEVICES" not in os.environ:
            self._retired = helper
            await helper.close()

    def _environment(self) -> dict[str, str]:
        """The devices that UCX uses: the devices of our addresses, and RDMA. All devices, if one
        address has no device or is the address of all interfaces."""
        if None in self._devices:
            return {}
        found = sorted(device for device in self._devices if device is not None) or ["lo"]
        if found == ["lo"]:
            return {"UCX_NET_DEVICES": "lo"}
        return {
            "UCX_NET_DEVICES": ",".join([*found, *rdma_devices()]),
            "UCX_WARN_INVALID_CONFIG": "n",
        }


def _told(raw: bytes) -> bytes:
    return _MAGIC + blake3(raw).digest(_DIGEST_BYTES) + raw


def _checked(address: bytes) -> bytes:
    """UCX's part of an address.

    Damage in transit is detected; what a peer makes up is the helper's risk."""
    digest, raw = (
        address[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES],
        address[len(_MAGIC) + _DIGEST_BYTES :],
    )
    if not address.startswith(_MAGIC) or not raw or blake3(raw).digest(_DIGEST_BYTES) != digest:
        raise PeerFault(
            f"the peer's address for data ({len(address)} bytes) is damaged, or not an address of"
            " UCX. Check that the peer serves ucx:// too"
        )
    return raw
