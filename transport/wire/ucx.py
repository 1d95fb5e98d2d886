"""Bytes over UCX: control frames over our own TCP channel, data as tag messages between workers that run in processes of their own.

UCX's own listeners are not used: they bind every interface and authenticate nobody. The port of a worker cannot be avoided, so UCX runs in
a process that has nothing to lose (``ucx_helper``). It is started when bytes first have to travel, and started anew when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from blake3 import blake3

from datastates.errors import PeerFault, Unavailable
from datastates.transport.contract import Channel, Link, Listener, Tls
from datastates.transport.loop import at_stop

from .arrival import Door
from .devices import device_of, rdma_devices
from .tcp_transport import TcpTransport
from .ucx_link import UcxLink
from .ucx_process import Helper

__all__ = ["UcxTransport"]

_MAGIC = b"datastates-ucx-1"
_DIGEST_BYTES = 16
_THREADS = 2
_IN_VAIN = 3  # helpers in a row that end before anything has moved
_PAUSE_S = 10.0
_logger = logging.getLogger(__name__)


class UcxTransport(TcpTransport):
    """``ucx://host:port``. One helper for each process, started on first use. It is bound to the devices of the addresses that are served
    or dialled, and ends when this process does."""

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
        self, url: str, accept: Callable[[Channel], Awaitable[None]], *, tls: Tls | None = None, door: Door | None = None
    ) -> Listener:
        """Listen on one address; bytes over UCX may then also travel by its device."""
        listener = await super().listen(url, accept, tls=tls, door=door)
        await self.bind(urlsplit(listener.url).hostname)
        return listener

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        """Open a control channel; bytes over UCX may then also travel by its device."""
        channel = await super().dial(url, timeout_s=timeout_s, tls=tls)
        await self.bind(channel.host)
        return channel

    @property
    def planes(self) -> tuple[str, ...]:
        """Our own plane and UCX."""
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
        """An endpoint to a worker, as a link."""
        raw = _checked(address)
        helper = await self._started()
        assert self._threads is not None, "made with the helper"
        link = UcxLink(helper, await helper.connect(raw), self._threads, self._links.discard)
        self._links.add(link)
        return link

    async def close(self) -> None:
        """Abort every link, and end the helper."""
        helper, threads, self._helper, self._threads, self._making = self._helper, self._threads, None, None, None
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
                await self._look_back()
                self._helper = await Helper.start(self._environment())
                if self._helper.open:
                    _logger.info("the process that runs UCX could not be forbidden all: %s", ", ".join(self._helper.open))
            return self._helper

    async def _look_back(self) -> None:
        """Check why the last helper ended. After several that moved nothing, no helper is started for a while.

        :raises Unavailable: this is that while.
        """
        last, self._helper = self._helper, None
        if last is not None:
            await last.close()
            if last is not self._retired:
                self._in_vain = 0 if last.moved else self._in_vain + 1
                self._cause = str(last.error)
                _logger.warning("%s; its links are made anew", self._cause)
            if self._in_vain >= _IN_VAIN:
                self._in_vain, self._pause_until = 0, time.monotonic() + _PAUSE_S
        left = self._pause_until - time.monotonic()
        if left > 0:
            raise Unavailable(f"{self._cause}; so did {_IN_VAIN} in a row that moved nothing: the next is started in {left:.0f} s")

    async def bind(self, host: str | None) -> None:
        """Let bytes also travel by the device of this address; None: by all devices. A helper that lacks it is replaced by one that has
        it."""
        device = device_of(host) if host is not None else None
        if device in self._devices:
            return
        self._devices.add(device)
        helper = self._helper
        if helper is not None and not helper.is_over and "UCX_NET_DEVICES" not in os.environ:
            self._retired = helper
            await helper.close()

    def _environment(self) -> dict[str, str]:
        """The devices that UCX uses: those of our addresses, and RDMA; all devices if one of the addresses has no device or is every
        address."""
        if None in self._devices:
            return {}
        found = sorted(device for device in self._devices if device is not None) or ["lo"]
        if found == ["lo"]:
            return {"UCX_NET_DEVICES": "lo"}
        return {"UCX_NET_DEVICES": ",".join([*found, *rdma_devices()]), "UCX_WARN_INVALID_CONFIG": "n"}


def _told(raw: bytes) -> bytes:
    return _MAGIC + blake3(raw).digest(_DIGEST_BYTES) + raw


def _checked(address: bytes) -> bytes:
    """UCX's part of an address. Damage in transit is detected; what a peer makes up is the helper's risk."""
    digest, raw = address[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES], address[len(_MAGIC) + _DIGEST_BYTES :]
    if not address.startswith(_MAGIC) or not raw or blake3(raw).digest(_DIGEST_BYTES) != digest:
        raise PeerFault(f"the peer's address for data ({len(address)} bytes) is damaged, or none of UCX: does it serve ucx:// too?")
    return raw
