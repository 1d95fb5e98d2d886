"""Connections to the processes from which states come: sessions for questions, and one more for
each state that they hold open for us."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from datastates.config import Data
from datastates.errors import Closed, DatastatesError, Disconnected, InvalidInput, PeerFault
from datastates.lineage.states import State

from .chain import Forwarder
from .contract import Feed, Sink, Tls
from .fetch import Fetched, fetch
from .limits import LISTED_BYTES, LISTING_TIMEOUTS, Budget, Share
from .protocol import CHUNKS, StatePage
from .registry import transport_for
from .session import Session, SessionFeed
from .state_parts import OpenParts, fetch_parts, open_parts, scratch_for
from .untrusted import CheckedManifest, read_manifest, state_of, states_of

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenState:
    """A state that sources hold open for us. Its chunks come through ``feeds``, one for each
    source. Or they come through a chain, by ``forwarder``; or in several ``parts``, from the
    holders of each. ``urls`` names the sources that have it. ``sessions`` belong to this state
    alone, and end with it.
    """

    state: State
    manifest: CheckedManifest
    feeds: list[Feed]
    repository: str
    source: str
    urls: Sequence[str]
    forwarder: Forwarder | None = None
    parts: OpenParts | None = None
    sessions: Sequence[Session] = ()

    async def fetch(
        self, sink: Sink, *, timeout_s: float, on_progress: Callable[[int, int], None] | None = None
    ) -> Fetched:
        """Bring what is missing in ``sink``, from the sources that have it."""
        if self.forwarder is not None:
            return await self.forwarder.fetch(sink, timeout_s=timeout_s, on_progress=on_progress)
        if self.parts is not None:
            return await fetch_parts(
                sink, self.parts.parts, timeout_s=timeout_s, on_progress=on_progress
            )
        return await fetch(sink, self.feeds, timeout_s=timeout_s, on_progress=on_progress)

    @property
    def scratch(self) -> int:
        """How many chunks may be on their way at once."""
        if self.parts is not None:
            return max(16, scratch_for(self.parts.parts))
        return 2 * CHUNKS if len(self.feeds) == 1 else 16

    async def close(self) -> None:
        """Release the state."""
        if self.parts is not None:
            await self.parts.close()
        for feed in self.feeds:
            await feed.close()
        for session in self.sessions:
            await session.close()
        if self.forwarder is not None:
            await self.forwarder.close()

    async def end_chain(self) -> None:
        """Leave the chain, once the receivers behind us have what they wait for."""
        if self.forwarder is not None:
            await self.forwarder.drain()
            await self.forwarder.close()


@dataclass(slots=True)
class _OpenedSource:
    """A state that one source has opened."""

    url: str
    manifest: CheckedManifest
    feed: SessionFeed
    session: Session


class Sources:
    """Other processes' repositories, by url.

    Made on any thread; every coroutine runs on the transport's."""

    def __init__(
        self,
        urls: tuple[str, ...],
        token: bytes,
        tls: Tls | None,
        timeout_s: float,
        data: Data = Data.AUTO,
    ) -> None:
        self.urls, self.timeout_s = urls, timeout_s
        self._token, self._tls, self._data = token, tls, data
        self._for_questions: dict[str, Session] = {}
        self._repositories: dict[str, str] = {}
        self._all: set[Session] = set()
        self._pid = os.getpid()
        self.is_closed = False

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and not the parent of a forked child."""
        return self._pid == os.getpid()

    # --- questions --------------------------------------------------------------------------------

    async def sessions(self) -> list[tuple[str, Session]]:
        """A session for requests with every reachable url.

        :raises Disconnected: none does.
        """
        self._check_open()
        missing = [url for url in self.urls if not self._answers(url)]
        made = await asyncio.gather(
            *(self.connected(url) for url in missing), return_exceptions=True
        )
        errors = [
            error
            for each in made
            if (error := each if isinstance(each, BaseException) else each.error) is not None
        ]
        self._for_questions |= {
            url: each for url, each in zip(missing, made, strict=True) if isinstance(each, Session)
        }
        found = [(url, self._for_questions[url]) for url in self.urls if self._answers(url)]
        if not found:
            raise errors[0]
        for error in errors:
            _logger.warning("a source does not answer and is left out: %s", error)
        return found

    async def connected(self, url: str) -> Session:
        """A further session; it ends with these sources at the latest."""
        self._check_open()
        session = await Session.connect(
            url, token=self._token, timeout_s=self.timeout_s, tls=self._tls, data=self._data
        )
        self._all = {session, *(each for each in self._all if each.is_open)}
        served = _repository_of(session)
        if self._repositories.setdefault(url, served) != served:
            await session.close()
            raise Disconnected(
                f"{url} is gone: another process serves repository {served[:10]} there now; connect"
                " again to use that one"
            )
        if self.is_closed:  # meanwhile
            await session.close()
            self._check_open()
        return session

    async def first(
        self, ask: Callable[[Session], Awaitable[T]], *, among: Sequence[str] | None = None
    ) -> T:
        """The answer of the first source that is still connected; ``among`` names by their urls
        those that can answer."""
        error: DatastatesError | None = None
        sessions = await self.sessions()
        able = [session for url, session in sessions if among is None or url in among]
        for session in able or [session for _, session in sessions]:
            try:
                return await ask(session)
            except (Disconnected, Closed) as exc:
                error = exc
        assert error is not None, "there is at least one session"
        raise error

    async def listed(
        self, ask: Callable[[Session], Awaitable[T]], *, among: Sequence[str] | None = None
    ) -> T:
        """``first`` for lists that come in pages: the source decides how many pages there are,
        but not how long they may take."""
        patience_s = LISTING_TIMEOUTS * self.timeout_s

        async def within(session: Session) -> T:
            try:
                async with asyncio.timeout(patience_s):
                    return await ask(session)
            except TimeoutError:
                raise Disconnected(
                    f"{session.peer} lists states without coming to an end for {patience_s:g} s:"
                    " pass a limit, or connect with a longer timeout_s"
                ) from None

        return await self.first(within, among=among)

    # --- states -----------------------------------------------------------------------------------

    async def open(self, rev: str, *, chain: bool = False) -> OpenState:
        """Open a state at every source that has it, each through its own connection; with
        ``chain``, as a link of the first one's chain.
        """
        states = await self.resolve(rev)
        url, state = next(iter(states.items()))
        if state.world_size > 1:
            return await self._open_parts(state, tuple(states), is_chain=chain)
        if chain:
            return await self._join_chain(url, state)
        opened = await asyncio.gather(*(self._open_at(url, state) for url, state in states.items()))
        found = [each for each in opened if isinstance(each, _OpenedSource)]
        errors = [each for each in opened if isinstance(each, DatastatesError)]
        if not found:
            raise errors[0]
        for error in errors:
            _logger.warning("a source is left out: %s", error)
        first = found[0]
        urls = [each.url for each in found]
        return OpenState(
            states[first.url],
            first.manifest,
            [each.feed for each in found],
            _repository_of(first.session),
            ", ".join(urls),
            urls,
            sessions=[each.session for each in found],
        )

    async def _open_at(self, url: str, state: State) -> _OpenedSource | DatastatesError:
        """The state at one source, or the reason why the source is left out."""
        session = None
        try:
            session = await self.connected(url)
            opened, feed = await session.open(state.uid)
            manifest = await asyncio.to_thread(_read, opened.manifest, state, url)
        except BaseException as exc:
            if session is not None:
                await session.close()
            if isinstance(exc, DatastatesError):
                return exc
            raise
        return _OpenedSource(url, manifest, feed, session)

    async def resolve(self, rev: str) -> Mapping[str, State]:
        """The state that a revision names, by the urls of the sources that agree on it."""
        sessions = await self.sessions()
        records = await asyncio.gather(
            *(session.resolve(rev) for _, session in sessions), return_exceptions=True
        )
        states = {
            url: state_of(record)
            for (url, _), record in zip(sessions, records, strict=True)
            if not isinstance(record, BaseException)
        }
        if not states:
            raise next(record for record in records if isinstance(record, BaseException))
        first = next(iter(states.values()))
        for url, state in states.items():
            if state.digest != first.digest:
                _logger.warning("%s is another state at %s, which is left out", rev, url)
        return {url: state for url, state in states.items() if state.digest == first.digest}

    async def _open_parts(self, state: State, urls: Sequence[str], *, is_chain: bool) -> OpenState:
        if is_chain:
            raise InvalidInput(
                f"state {state.uid} has {state.world_size} parts, and a chain passes on states of"
                " one part: leave chain=True out, or clone on all ranks of a job with group="
            )
        parts = await open_parts(state, urls, self.connected)
        source = ", ".join(dict.fromkeys(holder.url for holder in parts.holders))
        return OpenState(state, parts.manifest, [], parts.repository, source, urls, parts=parts)

    async def _join_chain(self, url: str, state: State) -> OpenState:
        forwarder = await Forwarder.join(
            url,
            state.uid,
            connect=self.connected,
            transport=transport_for(url),
            token=self._token,
            tls=self._tls,
            data=self._data,
        )
        try:
            manifest = await asyncio.to_thread(_read, forwarder.manifest, state, url)
        except BaseException:
            await forwarder.close()
            raise
        return OpenState(
            state, manifest, [], forwarder.repository, f"a chain from {url}", [url], forwarder
        )

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every session; transfers under way fail."""
        await asyncio.gather(*(session.close() for session in self._all))
        self._all.clear()
        self._for_questions.clear()

    def _answers(self, url: str) -> bool:
        return url in self._for_questions and self._for_questions[url].is_open

    def _check_open(self) -> None:
        if not self.is_ours:
            raise Closed(
                "this connection belongs to the parent process: connect again in the child"
            )
        if self.is_closed:
            raise Closed("the connection is closed: connect again")


def _repository_of(session: Session) -> str:
    return session.identity.repository if session.identity is not None else ""


def _read(raw: bytes, state: State, url: str) -> CheckedManifest:
    checked = read_manifest(raw, source=f"the manifest of {state.uid[:10]} from {url}")
    manifest = checked.manifest
    if (manifest.origin.uid, manifest.digest) != (state.uid, state.digest):
        raise PeerFault(
            f"{url} sent the manifest of state {manifest.origin.uid[:10]} when {state.uid[:10]} was"
            " asked for"
        )
    return checked


# Lists of states that a peer sends page by page.


PAGE = 1000
"""States in a page."""


Page = Callable[..., Awaitable[StatePage]]
"""A request that is answered in pages: called with ``limit``, ``after`` and ``room`` (see
``Session.find``)."""


async def all_pages(page: Page, limit: int | None) -> list[State]:
    """The states of every page, up to ``limit``."""
    found: dict[str, State] = {}
    after: str | None = None
    room = Share(Budget(2 * LISTED_BYTES))
    while limit is None or len(found) < limit:
        got = await page(
            limit=PAGE if limit is None else min(PAGE, limit - len(found)), after=after, room=room
        )
        enter(found, states_of(got.states, got.runs))
        after = got.next
        if after is None or not got.states:
            break
    return list(found.values())


def enter(found: dict[str, State], page: Iterable[State]) -> None:
    """Add a page of a list that must come to an end: none of its states may have been there before.

    :raises PeerFault: one was.
    """
    for state in page:
        if state.uid in found:
            raise PeerFault(
                f"the peer lists state {state.uid[:10]} twice: its list does not come to an end"
            )
        found[state.uid] = state
