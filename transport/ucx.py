"""Bytes over UCX: control frames over our own TCP channel, data as UCXX tag messages between worker addresses.

UCX's own listeners are not used: they bind every interface and authenticate nobody. Settings come from measurements (see
``docs/benchmarks.md``); what the user sets as ``UCX_…`` in the environment wins over them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from blake3 import blake3

from datastates.errors import Disconnected, PeerFault, Unavailable

from . import tcp
from .contract import Channel, Link, Listener, Tls, Transport
from .loop import at_stop

__all__ = ["UcxTransport"]

_OPTIONS = {"TCP_TX_SEG_SIZE": "1M", "TCP_RX_SEG_SIZE": "1M"}
_ABORT_NS = 10**9
_MAGIC = b"datastates-ucx-1"
_DIGEST_BYTES = 16


class UcxTransport(Transport):
    """``ucx://host:port``. One context and one worker in a process, made on first use, on the transport's loop."""

    scheme = "ucx"

    def __init__(self) -> None:
        self._context: Any = None
        self._links: set[_UcxLink] = set()

    async def listen(self, url: str, accept: Callable[[Channel], Awaitable[None]], *, tls: Tls | None = None) -> Listener:
        """Listen for control channels on one address."""
        self._start()
        return await tcp.listen(url, accept, tls=tls)

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        """Open a control channel."""
        self._start()
        return await tcp.dial(url, timeout_s=timeout_s, tls=tls)

    def address(self) -> bytes:
        """The worker's address, with all interfaces that UCX_NET_DEVICES allows."""
        raw = bytes(self._start().get_worker_address())
        return _MAGIC + blake3(raw).digest(_DIGEST_BYTES) + raw

    async def link(self, address: bytes) -> Link:
        """An endpoint to a worker. Wiring it up takes a while at first, and happens off the loop."""
        module, raw = self._start(), _checked(address)
        from ucxx._lib.libucxx import UCXEndpoint
        from ucxx._lib_async.endpoint import Endpoint

        try:
            place = module.get_ucx_address_from_buffer(raw)
            made = await asyncio.to_thread(UCXEndpoint.create_from_worker_address, self._context.worker, place, True)
        except module.exceptions.UCXError as exc:
            raise Disconnected(f"the peer's data plane cannot be reached ({exc}): see UCX_NET_DEVICES and UCX_TLS") from exc
        link = _UcxLink(module, Endpoint(endpoint=made, ctx=self._context, tags=None), self._links)
        self._links.add(link)
        return link

    async def close(self) -> None:
        """Abort every link, and end UCXX's threads."""
        for link in list(self._links):
            await link.abort()
        context, self._context = self._context, None
        if context is not None:
            context.worker.stop_request_notifier_thread()  # wakes it, or it would sleep on for a second
            context.stop_notifier_thread()

    def _start(self) -> Any:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # of its own UCX_MEMTYPE_CACHE, for one
        import ucxx
        from ucxx import core

        if self._context is None:
            try:
                ucxx.init(options=dict(_OPTIONS), env_takes_precedence=True, progress_mode="thread", enable_python_future=True)
                at_stop(self.close)
            except RuntimeError:  # somebody else in this process has initialised it: its one context serves both
                pass
            except ucxx.exceptions.UCXError as exc:
                raise Unavailable(f"UCX does not start ({exc}): datastates doctor says more") from exc
            self._context = core._get_ctx()
        return ucxx


def _checked(address: bytes) -> bytes:
    """UCX's part of an address. UCX ends the process when it is given a damaged one."""
    digest, raw = address[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES], address[len(_MAGIC) + _DIGEST_BYTES :]
    if not address.startswith(_MAGIC) or not raw or blake3(raw).digest(_DIGEST_BYTES) != digest:
        raise PeerFault(f"the peer's address for data ({len(address)} bytes) is damaged, or none of UCX: does it serve ucx:// too?")
    return raw


class _UcxLink(Link):
    """One endpoint, and what is under way on it."""

    def __init__(self, module: Any, endpoint: Any, links: set[_UcxLink]) -> None:
        self._module, self._endpoint, self._links = module, endpoint, links
        self._pending: set[asyncio.Future[object]] = set()
        self._is_aborted = False

    async def send(self, tag: int, data: memoryview) -> None:
        await self._transfer(self._endpoint.send, tag, data)

    async def receive(self, tag: int, into: memoryview) -> None:
        await self._transfer(self._endpoint.recv, tag, into)

    async def abort(self) -> None:
        self._links.discard(self)
        if not self._is_aborted:
            self._is_aborted = True
            self._endpoint.abort(period=_ABORT_NS)
        if self._pending:  # all of them end as cancelled; until then UCX may still write
            await asyncio.wait(set(self._pending))

    async def _transfer(self, start: Callable[..., Awaitable[object]], tag: int, memory: memoryview) -> None:
        self._check_whole()
        # Not awaited directly: a caller that is cancelled must not cancel UCXX's future, which it will still complete.
        transfer = asyncio.ensure_future(start(memory, tag=self._module.types.Tag(tag), force_tag=True))
        self._pending.add(transfer)
        transfer.add_done_callback(self._forget)
        try:
            await asyncio.shield(transfer)
        except self._module.exceptions.UCXMessageTruncatedError as exc:
            raise PeerFault(f"the message of tag {tag} does not have the {memory.nbytes} bytes that were waited for") from exc
        except self._module.exceptions.UCXError as exc:
            raise Disconnected("the link was aborted" if self._is_aborted else f"the peer's data plane is gone ({exc})") from exc
        self._check_whole()

    def _check_whole(self) -> None:
        if self._is_aborted:
            raise Disconnected("the link was aborted")

    def _forget(self, transfer: asyncio.Future[object]) -> None:
        self._pending.discard(transfer)
        if not transfer.cancelled():
            transfer.exception()  # nobody may be waiting any more
