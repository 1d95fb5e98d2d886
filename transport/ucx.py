"""Bytes over UCX: control frames over our own TCP channel, data as tag messages between worker addresses.

UCX's own listeners are not used: they bind every interface and authenticate nobody. ``worker`` and ``ucx_link`` know UCXX, and are
imported when they are needed: it is optional, and takes a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from datastates.errors import Disconnected, PeerFault, Unavailable

from .contract import Link
from .loop import at_stop
from .tcp_transport import TcpTransport

if TYPE_CHECKING:
    from .ucx_link import UcxLink
    from .worker import Worker

__all__ = ["UcxTransport"]

_MAGIC = b"datastates-ucx-1"
_DIGEST_BYTES = 16
_THREADS = 4
_CLOSE_NS = 10**9


class UcxTransport(TcpTransport):
    """``ucx://host:port``. One UCX worker in a process, made on first use, on the transport's loop."""

    scheme = "ucx"

    def __init__(self) -> None:
        super().__init__()
        self._worker: Worker | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._links: set[UcxLink] = set()

    @property
    def planes(self) -> tuple[str, ...]:
        """Ours and UCX's."""
        return ("tcp", "ucx")

    @property
    def located(self) -> bytes:
        """The address of the worker, if there is one."""
        raw = self._worker.address if self._worker is not None else b""
        return _MAGIC + blake3(raw).digest(_DIGEST_BYTES) + raw if raw else b""

    async def address(self) -> bytes:
        """The worker's address, with all interfaces that UCX_NET_DEVICES allows."""
        await self._prepare()
        return self.located

    async def link(self, address: bytes) -> Link:
        """An endpoint to a worker."""
        raw = _checked(address)
        await self._prepare()
        from .ucx_link import UcxLink

        endpoint = await self._connected(raw)
        link = UcxLink(self._started()[0], endpoint, self._aside, self._links.discard)
        self._links.add(link)
        return link

    async def close(self) -> None:
        """Abort every link, and end UCX's threads."""
        await super().close()
        for link in list(self._links):
            await link.abort()
        worker, threads, self._worker, self._threads = self._worker, self._threads, None, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
        if worker is not None:
            worker.close()

    async def _prepare(self) -> None:
        if self._worker is None:
            await asyncio.to_thread(_import_worker)
        self._started()

    def _started(self) -> tuple[Worker, ThreadPoolExecutor]:
        if self._worker is None or self._threads is None:
            at_stop(self.close)
            self._worker = _import_worker()()
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="datastates-ucx")
            self._threads.submit(_warm_up, self._worker)
        return self._worker, self._threads

    async def _connected(self, address: bytes) -> Any:
        from .worker import UcxError

        worker, threads = self._started()
        making = asyncio.get_running_loop().run_in_executor(threads, worker.endpoint, address)
        try:
            return await asyncio.shield(making)
        except UcxError as exc:
            raise Disconnected(f"the peer's data plane cannot be reached ({exc}): see UCX_NET_DEVICES and UCX_TLS") from exc
        except asyncio.CancelledError:
            making.add_done_callback(_close_unwanted)
            raise

    async def _aside(self, work: Callable[[], None]) -> None:
        """Do it in a thread of our own: those of the loop may all be busy with slow stores."""
        await asyncio.get_running_loop().run_in_executor(self._started()[1], work)


def _checked(address: bytes) -> bytes:
    """UCX's part of an address. UCX ends the process when it is given a damaged one."""
    digest, raw = address[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES], address[len(_MAGIC) + _DIGEST_BYTES :]
    if not address.startswith(_MAGIC) or not raw or blake3(raw).digest(_DIGEST_BYTES) != digest:
        raise PeerFault(f"the peer's address for data ({len(address)} bytes) is damaged, or none of UCX: does it serve ucx:// too?")
    return raw


def _import_worker() -> type[Worker]:
    try:
        from .worker import Worker
    except (ImportError, OSError) as exc:
        raise Unavailable(
            f"UCX cannot be loaded ({exc}): if MPI brought another UCX into this process, import datastates.groups before mpi4py.MPI, "
            "or let both use the site's (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1)"
        ) from exc
    return Worker


def _warm_up(worker: Worker) -> None:
    """The first endpoint of a process takes 0.1 s, further ones a hundredth: make it while the handshake is going on."""
    with suppress(Exception):
        worker.endpoint(worker.address).close_blocking(_CLOSE_NS, 1)


def _close_unwanted(making: asyncio.Future[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close_blocking(_CLOSE_NS, 1)
