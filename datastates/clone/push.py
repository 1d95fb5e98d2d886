"""Sending a state to a peer, with the ancestors that the peer lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from datastates.errors import NotFound
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.search import walk
from datastates.lineage.states import Ref, RefKind, State
from datastates.opening.core import Core
from datastates.store.parts import refuse_parts
from datastates.store.tier import Reader
from datastates.transport.clone.fetch import Fetched
from datastates.transport.protocol import Offer, RunRecord, StateRecord
from datastates.transport.session.session import Session

from .listing import PAGE
from .records import record_of, record_of_ref, records_of, state_of
from .serving import StateSource
from .sources import Sources
from .transfer import Move, Progress

__all__ = ["Push"]


class Push(Move):
    """A state on its way to the first of some sources. ``tags`` says whether tags on it and its ancestors go with it."""

    def __init__(self, sources: Sources, core: Core, state: State, *, tags: bool) -> None:
        self.state, self._sources, self._core, self._tags = state, sources, core, tags
        refuse_parts(state, "a push", instead="serve it here, and clone it there with repo=, which takes any number of parts")
        self._source = _CountedSource(core.open_payload(state, verify=False), partial(core.tiers.reopen, state, verify=False))
        self.bytes_total = sum(self._source.lengths)
        self._landed: StateRecord | None = None

    async def run(self, progress: Progress) -> Fetched:
        url, source, clock = self._sources.urls[0], self._source, asyncio.get_running_loop()
        began = clock.time()
        source.on_chunk = lambda moved: progress(moved, self.bytes_total)
        try:
            session = await self._sources.connected(url)
            try:
                self._landed = await session.push(source, self.state.uid, await self._offer(session))
            finally:
                await session.close()
        finally:
            source.close()
        progress(source.moved, source.moved)  # the peer had the rest
        return Fetched({url: source.moved}, source.chunks, clock.time() - began, {})

    def land(self, fetched: Fetched) -> tuple[State, None]:
        del fetched
        assert self._landed is not None, "it ran to its end"
        return state_of(self._landed), None

    def give_up(self, error: BaseException) -> BaseException:
        self._source.close()  # also of a push that was cancelled before it began
        return error

    def drop(self) -> None:
        pass  # nothing came

    async def _offer(self, session: Session) -> Offer:
        ancestry = await self._unknown_there(session)
        refs = await asyncio.to_thread(self._tags_of, {self.state.uid, *(each.uid for each in ancestry)}) if self._tags else []
        state, records, made_by = await asyncio.to_thread(self._records, ancestry)
        return Offer(self._source.manifest, state, records, tuple(map(record_of_ref, refs)), made_by)

    def _records(self, ancestry: Sequence[State]) -> tuple[StateRecord, tuple[StateRecord, ...], tuple[RunRecord, ...]]:
        with self._core.database.read() as session:
            return record_of(session, self.state), *records_of(session, ancestry)

    async def _unknown_there(self, session: Session) -> list[State]:
        """The ancestors of the state, newest first, down to the first page behind which the peer knows every parent."""
        found: list[State] = []
        known: set[str] = set()
        page = [self.state]
        while page:
            sent = {self.state.uid, *(each.uid for each in found)}
            open_ends = {parent for each in (self.state, *found) for parent in each.parents} - sent
            if not open_ends or await _knows_all(session, open_ends, known):
                break
            page = await asyncio.to_thread(self._ancestors, page[-1].uid)
            found += page
        return found

    def _ancestors(self, after: str) -> list[State]:
        with self._core.database.read() as session:
            return walk.log(session, self.state.uid, limit=PAGE, after=after)

    def _tags_of(self, uids: set[str]) -> list[Ref]:
        with self._core.database.read() as session:
            return [ref for ref in lineage_refs.refs(session, RefKind.TAG) if ref.state in uids]


class _CountedSource(StateSource):
    """A source that counts what a peer asks for of a pushed state: ``moved`` bytes in ``chunks`` chunks so far."""

    def __init__(self, reader: Reader, reopen: Callable[[], Reader]) -> None:
        super().__init__(reader, reopen)
        self.moved = self.chunks = 0
        self._counted: set[int] = set()
        self.on_chunk: Callable[[int], None] = lambda _: None

    async def chunk(self, index: int) -> Sequence[memoryview]:
        """The chunk, where it lies."""
        found = await super().chunk(index)
        if index not in self._counted:  # it is read for its digest too, and again when a link breaks
            self._counted.add(index)
            self.moved += self.lengths[index]
            self.chunks += 1
            self.on_chunk(self.moved)
        return found


async def _knows_all(session: Session, uids: set[str], known: set[str]) -> bool:
    for uid in uids - known:
        try:
            await session.resolve(uid)
        except NotFound:
            return False
        known.add(uid)
    return True
