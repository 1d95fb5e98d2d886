"""A server: it listens, admits peers that prove the token, and sends states of a store."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from datastates.errors import Closed, DatastatesError, InvalidInput, Unavailable
from datastates.system import admission
from datastates.system.admission import Admission
from datastates.system.logs import RateLimitFilter

from .connections import ConnectionLimiter
from .contract import Channel, Listener, Store, Tls, Transport
from .handshake import offer
from .limits import Budget, Limits
from .protocol import Identity
from .registry import transport_for
from .requests import Chains, Service
from .sending import SendStats
from .session import Session

_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())
_THREADS = 8
_CONNECTIONS = 8  # for each session: its own, those for data, and as many that prove nothing


class Server:
    """Serves a store to its peers until it is closed; every coroutine belongs to the loop thread.

    ``sent`` counts what has left. ``sessions`` are the peers that are connected, ``arrived`` counts
    all that ever were, and ``made_way`` those that were ended because they did nothing while others
    came. ``refused`` counts connections that never became a peer, and ``turned_away`` counts by
    kind what was wrong with those that tried (no token, garbage, too many).
    """

    def __init__(
        self,
        store: Store,
        url: str,
        *,
        token: bytes = b"",
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        limits: Limits | None = None,
        relays: Chains | None = None,
        transport: Transport | None = None,
        data: str = "auto",
    ) -> None:
        if not token and not is_loopback(url):
            raise InvalidInput(
                f"{url} can be reached from other machines, and there is no token: "
                "set DATASTATES_TOKEN, pass token_file=, or serve on 127.0.0.1"
            )
        self._store, self._url, self._token, self._tls = store, url, token, tls
        self._transport = transport_for(url) if transport is None else transport
        self._data = data
        # raises now, not for each peer, if the choice is impossible
        offer(self._transport.planes, self._transport.scheme, data)
        self._timeout_s, self._relays = timeout_s, relays
        self.limits = Limits() if limits is None else limits
        most = _CONNECTIONS * self.limits.sessions
        self.limiter = ConnectionLimiter(
            Admission(admission.Limits(connections=most, per_address=most // 2, proof_s=timeout_s))
        )
        self._listener: Listener | None = None
        self._service: Service | None = None
        self._identity: Identity | None = None
        self._sessions: set[Session] = set()
        self._arriving: set[Channel] = set()
        self._proved: set[Channel] = set()
        self._leaving: set[Session] = set()
        self._visits: set[asyncio.Task[object]] = set()
        self._is_closing = False
        self.sent = SendStats()
        self.arrived = self.made_way = 0
        self.turned_away = Counter[str]()

    @property
    def url(self) -> str:
        """The url that peers dial, with the port that was taken."""
        return self._url if self._listener is None else self._listener.url

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The peers that are connected."""
        return tuple(self._sessions)

    async def start(self) -> None:
        """Accept peers from now on.

        :raises Unavailable: the address cannot be bound.
        """
        if self._is_closing or self._listener is not None:
            raise Closed(
                f"the server at {self.url} was {'closed' if self._is_closing else 'started'}"
                " already: make another one"
            )
        self._identity = await asyncio.to_thread(self._store.identity)
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="datastates-serve")
        try:
            self._service = Service(
                self._store,
                threads,
                self._relays,
                self.sent,
                offers=Budget(self.limits.offer_bytes),
            )
            await self._service.local_peers.open()
            self._listener = await self._transport.listen(
                self._url, self._visit, tls=self._tls, limiter=self.limiter
            )
        except BaseException:
            threads.shutdown(wait=False)
            if self._service is not None:
                await self._service.local_peers.close()
            raise

    async def close(self, *, grace_s: float = 1.0) -> None:
        """Accept no more peers, let chunks under way arrive within ``grace_s``, and end every
        session. Idempotent."""
        self._is_closing = True
        if self._listener is not None:
            await self._listener.close()
        for channel in list(self._arriving):
            await channel.close()
        await asyncio.gather(*(session.drain(grace_s) for session in self.sessions))
        await asyncio.gather(*(session.close("the server was closed") for session in self.sessions))
        if self._visits:
            await asyncio.wait(self._visits)
        if self._service is not None:
            await self._service.local_peers.close()
            self._service.digests.close()
            self._service.threads.shutdown(wait=False)

    async def _visit(self, channel: Channel) -> None:
        visit = asyncio.current_task()
        assert visit is not None, "listeners run this in a task of its own"
        self._visits.add(visit)
        try:
            session = await self._admit(channel)
            if session is not None:
                await session.wait_closed()
                self._sessions.discard(session)
        finally:
            self._visits.discard(visit)

    async def _admit(self, channel: Channel) -> Session | None:
        if self._is_closing or self._service is None or self._identity is None:
            await channel.close()
            return None
        self._arriving.add(channel)
        try:
            session = await Session.serve(
                channel,
                self._service,
                transport=self._transport,
                identity=self._identity,
                token=self._token,
                timeout_s=self._timeout_s,
                admission=lambda: self._make_room(channel),
                data=self._data,
            )
        except DatastatesError as exc:
            self.turned_away[exc.kind] += 1
            _logger.info("turned away: %s", exc)
            return None
        finally:
            self._arriving.discard(channel)
            self._proved.discard(channel)
        channel.hold()
        self._sessions.add(session)
        self.arrived += 1
        return session

    def _make_room(self, channel: Channel) -> None:
        """End the session that has been idle the longest, if a new session needs its place."""
        if self._is_closing:
            raise Unavailable(f"the server at {self.url} is being closed")
        here = self._sessions - self._leaving
        if len(here) + len(self._proved) >= self.limits.sessions:
            idle = max(
                (each for each in here if each.is_idle),
                key=lambda each: each.unused_s,
                default=None,
            )
            if idle is None:
                raise Unavailable(
                    f"the server at {self.url} has {self.limits.sessions} peers already: try again"
                    " later, or ask one of them"
                )
            self.made_way += 1
            self._leaving.add(idle)
            ending = asyncio.create_task(
                idle.close("it was idle, and others wait for its place: connect again")
            )
            ending.add_done_callback(lambda _: self._leaving.discard(idle))
        self._proved.add(channel)


def is_loopback(url: str) -> bool:
    """Whether only this machine can reach a url. Such a url has a host in 127.0.0.0/8, ::1 or
    localhost, or the scheme ``memory``."""
    parts = urlsplit(url)
    if parts.scheme == "memory" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
