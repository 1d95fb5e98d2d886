"""One state on its way between processes: it can be waited for, awaited, cancelled and resumed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Protocol, Self

from datastates import values
from datastates.errors import Cancelled, Closed, Conflict, DatastatesError, Dirty, InvalidInput
from datastates.lineage.states import Ref, RefKind, Run, State
from datastates.lineage.write import clones
from datastates.maintenance.core import Core
from datastates.state.report import RestoreReport
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event
from datastates.system.memory import available_memory_bytes
from datastates.system.threads import Latch

from . import loop, receive_states
from .contract import Sink
from .data_plane import finish
from .fetch import Fetched
from .limits import LISTED_BYTES, Budget, Share
from .receive_buffers import StreamMemoryCache
from .receive_objects import ObjectsSink
from .session import Session
from .sources import PAGE, OpenState, Sources, enter
from .untrusted import ref_of, runs_of, states_of

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and their total, on the transport's thread: it must be
quick."""


@dataclass(frozen=True, slots=True)
class Cloned:
    """The result of a clone or a push. ``report`` describes a clone into live objects;
    ``by_source`` counts the bytes that moved, by peer.
    """

    state: State
    report: RestoreReport | None
    bytes_moved: int
    seconds: float
    by_source: Mapping[str, int]


class Connected(Protocol):
    """What ``Transfer.resume`` needs of a peer."""

    @property
    def sources(self) -> Sources:
        """The sources of its states."""


def _peer(value: object, what: str) -> object:
    if not isinstance(values.attribute(value, "sources"), Sources):
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give the peer that datastates.connect returned"
        )
    return value


class Move(ABC):
    """What differs between a clone and a push. ``run`` is called once, on the transport's thread;
    the waiting caller calls everything else.
    """

    state: State
    bytes_total: int
    is_resumable: bool = False
    """Whether what came is kept if the transfer fails."""

    @abstractmethod
    async def run(self, progress: Progress) -> Fetched:
        """Move the bytes."""

    @abstractmethod
    def commit(self, fetched: Fetched) -> tuple[State, RestoreReport | None]:
        """Finish a transfer of which every byte is here."""

    @abstractmethod
    def fail(self, error: BaseException) -> BaseException:
        """Release the other side, even if the transfer never ran.

        Returns the error for the waiting caller."""

    def resume_from(self, sources: Sources) -> None:
        """Let ``run`` bring the missing chunks from other sources; only if it is resumable."""
        raise NotImplementedError

    def drop(self) -> None:  # noqa: B027 # a push keeps nothing
        """Release what came; called once, after ``fail``."""


class Transfer:
    """A clone or a push under way. ``wait`` and ``await`` finish it, on the thread that calls them.

    The waiting thread writes live objects at the very end; it must be the thread that owns them.
    With ``atomic=False`` they are written all the time, and must be left alone until then.
    ``bytes_done`` and ``bytes_total`` may be read at any time.

    A transfer that was begun as ``resumable`` keeps what came when it fails, for ``resume``, until
    it is closed: use it as a context manager.
    """

    def __init__(self, move: Move, on_progress: Progress | None = None) -> None:
        self.state, self.bytes_done, self.bytes_total = move.state, 0, move.bytes_total
        self._move, self._on_progress = move, on_progress
        self._is_kept = move.is_resumable
        self._lock = threading.Lock()
        self._result: Cloned | None = None
        self._error: BaseException | None = None
        self._is_given_up = False
        self._pid = os.getpid()
        self._ended = Latch()
        self._future = loop.submit(move.run(self._progress))
        # also if it was cancelled before it began
        self._future.add_done_callback(lambda _: self._ended.set())

    @property
    def is_done(self) -> bool:
        """Whether nothing moves any more: ``wait`` returns, or raises, without waiting for the
        network."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error with which it failed; None if it has not failed."""
        return self._error

    @values.checked
    def wait(self, timeout_s: values.Seconds | None = None) -> Cloned:
        """Wait until every byte is here and checked, and finish. Ctrl-C gives the transfer up, and
        is raised once nothing is written any more.

        :raises TimeoutError: it takes longer; the transfer continues.
        :raises Cancelled: it was cancelled.
        :raises Closed: the peer was closed, or this is a forked child.
        :raises Disconnected: no source is left (or Corrupt, Unavailable: what else went wrong).
        :raises Dirty: the same, and live objects are half new: the cause says why; clone again, or
            restore them.
        """
        self._check_own()
        try:
            if not self._ended.wait(timeout_s):
                raise TimeoutError(
                    f"{self.bytes_done} of {self.bytes_total} bytes are here after {timeout_s} s:"
                    " the clone goes on"
                )
        except KeyboardInterrupt:
            self._is_given_up = True
            self.cancel()
            self._ended.wait()
            self._finish_given_up()
            raise
        return self._finish()

    def cancel(self) -> None:
        """Stop the transfer; ``wait`` then raises Cancelled."""
        self._future.cancel()

    @values.checked
    def resume(
        self, peer: Annotated[Connected, _peer], *, on_progress: Progress | None = None
    ) -> Transfer:
        """Continue from the verified chunks, from any peer that has the state, once this has failed
        or was cancelled.

        :raises InvalidInput: it has not failed, was not begun as ``resumable``, was closed, or was
            resumed already.
        :raises Disconnected: the peer is gone (NotFound, Unavailable: it does not have the state);
            try another.
        """
        with self._lock:
            if self._error is None:
                raise InvalidInput("only a clone that has failed can be resumed: wait for it first")
            if not self._is_kept:
                raise InvalidInput(
                    "nothing was kept of this clone: begin it with resumable=True, and resume it"
                    " once, before it is closed"
                )
            self._is_kept = False
        try:
            self._move.resume_from(peer.sources)
            return Transfer(self._move, on_progress)
        except BaseException:
            self._is_kept = True
            raise

    def close(self) -> None:
        """Give the transfer up if it is under way, and release what it kept.

        Idempotent; does nothing once it is done or was resumed."""
        if self._result is None and self._error is None:
            self._is_given_up = True
            self.cancel()
            self._ended.wait()
            self._finish_given_up()
        with self._lock:
            was_kept, self._is_kept = self._is_kept, False
        if was_kept and self._error is not None:
            self._move.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __await__(self) -> Generator[Any, None, Cloned]:
        return self._await().__await__()

    async def _await(self) -> Cloned:
        self._check_own()
        ended = asyncio.get_running_loop().run_in_executor(None, self._ended.wait)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._is_given_up = True
            self.cancel()
            await asyncio.shield(ended)
            self._finish_given_up()
            raise
        return self._finish()

    def _progress(self, done: int, total: int) -> None:
        self.bytes_done, self.bytes_total = done, total
        if self._on_progress is None:
            return
        try:
            self._on_progress(done, total)
        except Exception:  # what it shows must not end the transfer
            self._on_progress = None
            _logger.exception("on_progress failed, and is not called again")

    def _finish(self) -> Cloned:
        with self._lock:
            if self._result is None and self._error is None:
                try:
                    fetched = self._fetched()
                    state, report = self._move.commit(fetched)
                    moved = sum(fetched.bytes_by_feed.values())
                    self._result = Cloned(
                        state, report, moved, fetched.seconds, fetched.bytes_by_feed
                    )
                except BaseException as exc:
                    self._error = self._move.fail(exc)
                    if not self._is_kept:
                        self._move.drop()
                    if self._error is not exc:
                        raise self._error from exc
                    raise
        if self._error is not None:
            raise self._error
        assert self._result is not None, "it is one or the other"
        return self._result

    def _finish_given_up(self) -> None:
        """Release what came; ``error`` is set to the meaning of that, and the caller gets what
        interrupted it."""
        self._is_kept = False
        with suppress(DatastatesError):
            self._finish()

    def _check_own(self) -> None:
        if self._pid != os.getpid():
            raise Closed(
                f"the transfer of state {self.state.uid[:10]} belongs to the parent process: begin"
                " another one in the child"
            )

    def _fetched(self) -> Fetched:
        cancelled = Cancelled(
            f"the transfer of state {self.state.uid[:10]} was cancelled after {self.bytes_done}"
            " bytes"
        )
        try:
            with undisturbed():
                fetched = self._future.result()  # it has ended
        except concurrent.futures.CancelledError:
            raise cancelled from None
        if self._is_given_up:  # it was too late to stop it
            raise cancelled
        return fetched


# Clones: into live objects, or into a repository.


_SPARE = 1.25


class Pull(Move):
    """A state on its way into ``sink``, which the caller of ``begin_clone`` chose."""

    def __init__(
        self, opened: OpenState, sink: Sink, *, timeout_s: float, is_resumable: bool
    ) -> None:
        self.state, self.is_resumable = opened.state, is_resumable
        self.bytes_total = sum(sink.lengths[index] for index in sink.missing())
        self._opened, self._into, self._timeout_s = opened, sink, timeout_s

    async def run(self, progress: Progress) -> Fetched:
        opened = self._opened
        try:
            return await opened.fetch(self._into, timeout_s=self._timeout_s, on_progress=progress)
        finally:  # a cancellation at this point must not leave a connection behind
            if opened.forwarder is None:  # else it forwards the state
                await finish(asyncio.create_task(opened.close()))

    def fail(self, error: BaseException) -> BaseException:
        with suppress(Closed):  # the process is ending
            loop.run(self._opened.close())  # it may have been cancelled before it began
        return error

    def resume_from(self, sources: Sources) -> None:
        opened = loop.run(sources.open(self.state.uid))
        if opened.state.digest != self.state.digest:
            loop.run(opened.close())
            raise Conflict(
                f"{opened.source} has another state of the uid {self.state.uid}: resume from"
                " another peer"
            )
        self._opened, self._timeout_s = opened, sources.timeout_s
        self.bytes_total = sum(self._into.lengths[index] for index in self._into.missing())


class IntoObjects(Pull):
    """A clone into live objects, written by the thread that owns them; see ``Peer.clone`` for the
    options."""

    def __init__(
        self,
        opened: OpenState,
        into: Mapping[str, object],
        *,
        memory_cache: StreamMemoryCache,
        timeout_s: float,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        atomic: bool | None = None,
        skip_equal: bool = False,
        is_resumable: bool = False,
    ) -> None:
        if atomic is None:
            atomic = not skip_equal and available_memory_bytes() > _SPARE * sum(
                opened.manifest.lengths
            )
        self._names = ", ".join(into)
        self._sink = ObjectsSink(
            opened.manifest,
            into,
            only=only,
            strict=strict,
            atomic=atomic,
            skip_equal=skip_equal,
            keep=opened.forwarder is not None,
            memory_cache=memory_cache,
            scratch=opened.scratch,
        )
        super().__init__(opened, self._sink, timeout_s=timeout_s, is_resumable=is_resumable)

    def commit(self, fetched: Fetched) -> tuple[State, RestoreReport]:
        opened = self._opened
        report = self._sink.commit()
        loop.run(opened.end_chain())
        self._sink.close()
        _logger.info(
            "cloned state %s, step %d, from %s",
            opened.state.uid[:10],
            opened.state.step,
            ", ".join(fetched.bytes_by_feed),
            extra=event(
                "clone.landed",
                state=opened.state.uid,
                step=opened.state.step,
                bytes=sum(fetched.bytes_by_feed.values()),
            ),
        )
        return opened.state, report

    def fail(self, error: BaseException) -> BaseException:
        error = super().fail(error)
        if not self._sink.is_dirty or not isinstance(error, Exception):
            return error
        return Dirty(
            f"{self._names} are half old, half new: the clone of {self.state.uid[:10]} failed"
            f" ({error}); clone again, or restore them"
        )

    def drop(self) -> None:
        self._sink.close()


class IntoRepository(Pull):
    """A clone into a repository's memory and lineage, with the ancestors that it lacks, and with
    the ``tags`` on these states."""

    def __init__(
        self,
        opened: OpenState,
        core: Core,
        ancestry: Sequence[State],
        tags: Sequence[Ref],
        made_by: Mapping[str, Run],
        *,
        timeout_s: float,
        is_resumable: bool,
    ) -> None:
        self._core, self._ancestry, self._tags, self._made_by = core, ancestry, tags, made_by
        relatives = [state.uid for state in ancestry[:10]]
        self._sink = receive_states.make_room(
            core, opened.manifest, party=opened.source, relatives=relatives
        )
        super().__init__(opened, self._sink, timeout_s=timeout_s, is_resumable=is_resumable)

    @classmethod
    def of(
        cls, sources: Sources, opened: OpenState, core: Core, *, tags: bool, is_resumable: bool
    ) -> IntoRepository:
        """A clone of the state and of the ancestors that the repository lacks."""
        with core.database.read() as session:
            is_same = clones.repository_uid(session) == opened.repository
            # else one of the two is a copy of the other
            is_shared = is_same and bool(clones.known(session, [opened.state.uid]))
        coming: tuple[list[State], list[Ref], dict[str, Run]] = [], [], {}
        if not is_shared:
            coming = loop.run(
                sources.listed(
                    lambda session: _ancestry(session, core, opened.state, tags=tags),
                    among=opened.urls,
                )
            )
        return cls(opened, core, *coming, timeout_s=sources.timeout_s, is_resumable=is_resumable)

    def commit(self, fetched: Fetched) -> tuple[State, None]:
        loop.run(self._opened.end_chain())
        state = receive_states.land(
            self._core,
            self._sink,
            self._opened.state,
            ancestry=self._ancestry,
            tags=self._tags,
            came=clones.Provenance(
                self._sink.party,
                self._opened.repository,
                sum(fetched.bytes_by_feed.values()),
                self._made_by,
            ),
        )
        return state, None

    def resume_from(self, sources: Sources) -> None:
        before = self._opened.source
        super().resume_from(sources)
        if self._opened.source != before:
            self._sink.party = f"{self._sink.party}, {self._opened.source}"

    def drop(self) -> None:
        receive_states.abandon(self._core, self._sink)


async def _ancestry(
    session: Session, core: Core, state: State, *, tags: bool
) -> tuple[list[State], list[Ref], dict[str, Run]]:
    """The ancestors that the repository lacks, newest first, down to where it has every parent; the
    tags and the runs of all that come.

    A page of which it has every state is not the end: states that a merge brought in from elsewhere
    may be older than that.
    """
    coming: list[State] = []
    listed = {state.uid: state}
    room = Share(Budget(2 * LISTED_BYTES))
    made_by = runs_of((await session.log(state.uid, limit=1, after=None)).runs)
    after: str | None = state.uid
    while after is not None and await asyncio.to_thread(
        receive_states.lacks_parents, core, [state, *coming]
    ):
        page = await session.log(state.uid, limit=PAGE, after=after, room=room)
        states = states_of(page.states, page.runs)
        made_by |= runs_of(page.runs)
        enter(listed, states)
        coming += await asyncio.to_thread(receive_states.missing_ancestry, core, states)
        after = page.next if states else None
    if not tags:
        return coming, [], made_by
    uids = {state.uid, *(each.uid for each in coming)}
    found = [ref_of(record) for record in await session.refs()]
    return coming, [ref for ref in found if ref.kind is RefKind.TAG and ref.state in uids], made_by
