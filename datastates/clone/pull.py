"""Receiving a state: what is asked for, where it lands, and how a failed clone continues."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress

from datastates.errors import Closed, Conflict, Dirty
from datastates.lineage.change import clones
from datastates.lineage.states import Ref, RefKind, Run, State
from datastates.objects.report import RestoreReport
from datastates.opening.core import Core
from datastates.system.logs import event
from datastates.system.memory import available_memory_bytes
from datastates.transport import loop
from datastates.transport.clone.fetch import Fetched
from datastates.transport.limits import LISTED_BYTES, Budget, Share
from datastates.transport.session.session import Session
from datastates.transport.sink import Sink
from datastates.transport.wire.plane import surely

from . import arrivals
from .landing import ObjectsSink, Shadows
from .listing import PAGE, enter
from .records import ref_of, runs_of, states_of
from .sources import OpenState, Sources
from .transfer import Move, Progress

__all__ = ["Arrival", "IntoObjects", "IntoRepository", "Pull"]

_logger = logging.getLogger(__name__)
_SPARE = 1.25


class Arrival(ABC):
    """The destination of a clone."""

    sink: Sink

    @abstractmethod
    def land(self, opened: OpenState, fetched: Fetched) -> tuple[State, RestoreReport | None]:
        """Finish: every chunk is in the sink."""

    @abstractmethod
    def drop(self) -> None:
        """Release what came."""

    def explain(self, error: BaseException) -> BaseException:
        """The error that a waiting caller gets for an error."""
        return error

    def joined_by(self, opened: OpenState) -> None:
        """Note that the rest comes from elsewhere."""
        del opened


class IntoObjects(Arrival):
    """Live objects, written by the thread that owns them; see ``Peer.clone`` for the options."""

    def __init__(
        self,
        opened: OpenState,
        into: Mapping[str, object],
        *,
        only: str | Sequence[str] | None,
        strict: bool,
        atomic: bool | None,
        skip_equal: bool,
        shadows: Shadows,
    ) -> None:
        if atomic is None:
            atomic = not skip_equal and available_memory_bytes() > _SPARE * sum(opened.manifest.lengths)
        self._names, self._uid = tuple(into), opened.state.uid
        self._sink = self.sink = ObjectsSink(
            opened.manifest,
            into,
            only=only,
            strict=strict,
            atomic=atomic,
            skip_equal=skip_equal,
            keep=opened.forwarder is not None,
            shadows=shadows,
            scratch=opened.scratch,
        )

    def land(self, opened: OpenState, fetched: Fetched) -> tuple[State, RestoreReport]:
        report = self._sink.commit()
        loop.run(opened.end_chain())
        self._sink.close()
        sources = ", ".join(fetched.bytes_by_feed)
        landed = event("clone.landed", state=opened.state.uid, step=opened.state.step, bytes=sum(fetched.bytes_by_feed.values()))
        _logger.info("cloned state %s, step %d, from %s", opened.state.uid[:10], opened.state.step, sources, extra=landed)
        return opened.state, report

    def explain(self, error: BaseException) -> BaseException:
        if not self._sink.is_dirty or not isinstance(error, Exception):
            return error
        names = ", ".join(self._names)
        return Dirty(f"{names} are half old, half new: the clone of {self._uid[:10]} failed ({error}); clone again, or restore them")

    def drop(self) -> None:
        self._sink.close()


class IntoRepository(Arrival):
    """A repository's memory and lineage, with the ancestors that it lacks, and with ``tags`` on what comes if they are asked for."""

    def __init__(self, opened: OpenState, core: Core, ancestry: Sequence[State], tags: Sequence[Ref], made_by: Mapping[str, Run]) -> None:
        self._core, self._ancestry, self._tags, self._made_by = core, ancestry, tags, made_by
        relatives = [state.uid for state in ancestry[:10]]
        self._sink = self.sink = arrivals.make_room(core, opened.manifest, party=opened.source, relatives=relatives)

    @classmethod
    def of(cls, sources: Sources, opened: OpenState, core: Core, *, tags: bool) -> IntoRepository:
        """Room for the state, once it is known which of its ancestors come with it."""
        with core.database.read() as session:
            is_same = clones.repository_uid(session) == opened.repository
            is_shared = is_same and bool(clones.known(session, [opened.state.uid]))  # else one of the two is a copy of the other
        if is_shared:
            return cls(opened, core, [], [], {})
        coming = sources.listed(lambda session: _ancestry(session, core, opened.state, tags=tags), among=opened.urls)
        return cls(opened, core, *loop.run(coming))

    def land(self, opened: OpenState, fetched: Fetched) -> tuple[State, None]:
        loop.run(opened.end_chain())
        state = arrivals.land(
            self._core,
            self._sink,
            opened.state,
            ancestry=self._ancestry,
            tags=self._tags,
            came=clones.Provenance(self._sink.party, opened.repository, sum(fetched.bytes_by_feed.values()), self._made_by),
        )
        return state, None

    def joined_by(self, opened: OpenState) -> None:
        self._sink.party = f"{self._sink.party}, {opened.source}"

    def drop(self) -> None:
        arrivals.abandon(self._core, self._sink)


class Pull(Move):
    """A state on its way here."""

    def __init__(self, opened: OpenState, arrival: Arrival, *, timeout_s: float, is_kept: bool) -> None:
        self.state = opened.state
        self.bytes_total = sum(arrival.sink.lengths[index] for index in arrival.sink.missing())
        self._opened, self._arrival = opened, arrival
        self._timeout_s, self._is_kept = timeout_s, is_kept

    async def run(self, progress: Progress) -> Fetched:
        opened = self._opened
        try:
            return await opened.fetch(self._arrival.sink, timeout_s=self._timeout_s, on_progress=progress)
        finally:  # a cancellation at this point must not leave a connection behind
            if opened.forwarder is None:  # else it passes the state on
                await surely(asyncio.create_task(opened.close()))

    def land(self, fetched: Fetched) -> tuple[State, RestoreReport | None]:
        return self._arrival.land(self._opened, fetched)

    def give_up(self, error: BaseException) -> BaseException:
        with suppress(Closed):  # the process is ending
            loop.run(self._opened.close())  # it may have been cancelled before it began
        return self._arrival.explain(error)

    def drop(self) -> None:
        self._arrival.drop()

    @property
    def is_resumable(self) -> bool:
        return self._is_kept

    def resumed(self, sources: Sources) -> Pull:
        """The rest of this transfer: the sink knows which chunks are missing, and every digest."""
        before = self._opened
        opened = loop.run(sources.open(self.state.uid))
        if opened.state.digest != self.state.digest:
            loop.run(opened.close())
            raise Conflict(f"{opened.source} has another state of the uid {self.state.uid}: resume from another peer")
        if opened.source != before.source:
            self._arrival.joined_by(opened)
        return Pull(opened, self._arrival, timeout_s=sources.timeout_s, is_kept=self._is_kept)


async def _ancestry(session: Session, core: Core, state: State, *, tags: bool) -> tuple[list[State], list[Ref], dict[str, Run]]:
    """The ancestors that the repository lacks, newest first, down to where it has every parent; the tags and the runs of all that come.

    A page of which it has every state is not the end: states that a merge brought in from elsewhere may be older than that.
    """
    coming: list[State] = []
    listed = {state.uid: state}
    room = Share(Budget(2 * LISTED_BYTES))
    made_by = runs_of((await session.log(state.uid, limit=1, after=None)).runs)
    after: str | None = state.uid
    while after is not None and await asyncio.to_thread(arrivals.lacks_parents, core, [state, *coming]):
        page = await session.log(state.uid, limit=PAGE, after=after, room=room)
        states = states_of(page.states, page.runs)
        made_by |= runs_of(page.runs)
        enter(listed, states)
        coming += await asyncio.to_thread(arrivals.missing_ancestry, core, states)
        after = page.next if states else None
    if not tags:
        return coming, [], made_by
    uids = {state.uid, *(each.uid for each in coming)}
    found = [ref_of(record) for record in await session.refs()]
    return coming, [ref for ref in found if ref.kind is RefKind.TAG and ref.state in uids], made_by
