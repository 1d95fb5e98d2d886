"""A state of several parts, opened at every process that has one, and fetched from all of them
at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from datastates.errors import (
    Corrupt,
    DatastatesError,
    Disconnected,
    PeerFault,
    Unavailable,
    Unsupported,
)
from datastates.lineage.states import State
from datastates.state.digest import first_chunks
from datastates.state.manifest import Manifest
from datastates.storage.parallel_read import NOT_HERE
from datastates.system.failures import describe, revive

from .contract import Feed, Sink
from .data_plane import finish
from .fetch import Fetched, FetchProgress, fetch_with_fallback
from .handshake import may_dial
from .limits import Budget
from .protocol import BODY_BYTES, PARTS
from .session import Session, SessionFeed
from .untrusted import CheckedManifest, join_parts, read_part

_HOLDERS_AT_ONCE = 4
"""The most holders of one part that share its chunks by speed; more would only divide the same
links further."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The numbers of the sources of one part: those that serve it, and those to ask when these
    have failed, the best first."""

    serving: tuple[int, ...]
    spare: tuple[int, ...] = ()


def plan(places: Sequence[bytes], parts: int) -> list[Holders]:
    """For each part, the sources that serve it. ``places`` is the distance of each
    part from each source, or 255 if the source does not have the part.

    The nearest sources serve, at most four. Each part begins with the next source, so that the load
    is even.
    """
    return [_holders(part, [each[part] for each in places]) for part in range(parts)]


def _holders(part: int, far: Sequence[int]) -> Holders:
    turned = [(part + number) % len(far) for number in range(len(far))]
    found = sorted((number for number in turned if far[number] < NOT_HERE), key=far.__getitem__)
    near = [number for number in found if far[number] == far[found[0]]][:_HOLDERS_AT_ONCE]
    return Holders(tuple(near), tuple(number for number in found if number not in near))


# A state of several parts, opened at every process that has one, and fetched from all of them at
# once.


_logger = logging.getLogger(__name__)

_MANIFESTS_BYTES = 1 << 30
"""The most bytes that the manifests of all parts may have together."""

_PARTS_AT_ONCE = 8  # parts that are being opened, processes that are being dialled
_HELD = 32  # states that one session holds open; the other side allows twice as many
_IN_FLIGHT = 32
_WINDOW = 8

Connect = Callable[[str], Awaitable[Session]]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class OpenPart:
    """One rank's part. ``first`` is the index of its first chunk in the joined state. ``spare``
    are functions that open further holders, the best first, for when all ``feeds`` have failed.
    """

    manifest: Manifest
    feeds: list[Feed]
    spare: list[Callable[[], Awaitable[Feed]]]
    first: int = 0

    @property
    def rank(self) -> int:
        """The rank whose part it is."""
        return self.manifest.origin.rank

    @property
    def indices(self) -> range:
        """The indices of its chunks in the joined state."""
        return range(self.first, self.first + len(self.manifest.content.chunks))


@dataclass(frozen=True, slots=True)
class OpenParts:
    """All parts of a state, by rank, and the joined state. ``holders`` are kept open until
    ``close``; ``repository`` is the uid of their lineage.
    """

    manifest: CheckedManifest
    parts: tuple[OpenPart, ...]
    holders: list[Holder]
    repository: str

    async def close(self) -> None:
        """End the connections: the parts are unpinned."""
        await _end(self.holders)


class Holder:
    """A process that may have parts: its connections, which end with ``close``."""

    def __init__(self, url: str, connect: Connect) -> None:
        self.url, self._connect = url, connect
        self.places = b""
        self.repository = ""
        self._sessions: list[Session] = []
        self._opened = 0
        self._turn = asyncio.Lock()

    async def reach(self, uid: str, size: int) -> Sequence[str]:
        """Ask how far away the parts are; returns the urls of the other processes of its job, as
        far as they may be dialled.

        :raises PeerFault: it reports another number of parts.
        """
        session = await self._session()
        self.repository = session.identity.repository if session.identity is not None else ""
        reached = await session.reach(uid)
        if len(reached.places) != size:
            raise PeerFault(
                f"{self.url} tells of {len(reached.places)} parts of state {uid[:10]}, which has"
                f" {size}"
            )
        self.places = reached.places
        told = [url for url in reached.others if may_dial(url, session.remote)]
        if len(told) < len(reached.others):
            _logger.warning(
                "%s names %d processes that are not dialled",
                self.url,
                len(reached.others) - len(told),
            )
        return told

    async def open(
        self, uid: str, rank: int, size: int, *, limit: int = BODY_BYTES
    ) -> tuple[Manifest, SessionFeed]:
        """Open a part, which is pinned there."""
        session = await self._session(opening=1)
        opened, feed = await session.open(uid, part=rank, limit=limit)
        source = f"the manifest of rank {rank} of {uid[:10]} from {self.url}"
        return (
            await asyncio.to_thread(read_part, opened.manifest, uid, rank, size, source=source),
            feed,
        )

    async def close(self) -> None:
        """End its connections."""
        await asyncio.gather(*(session.close() for session in self._sessions))

    async def _session(self, *, opening: int = 0) -> Session:
        async with self._turn:
            if (
                not self._sessions
                or not self._sessions[-1].is_open
                or self._opened + opening > _HELD
            ):
                self._sessions.append(await self._connect(self.url))
                self._opened = 0
            self._opened += opening
            return self._sessions[-1]


async def open_parts(state: State, urls: Sequence[str], connect: Connect) -> OpenParts:
    """Open a state at the processes that serve it at ``urls``, and at the other processes of their
    jobs, which they name.

    :raises Unavailable: no source has a part; the error names its rank.
    :raises Corrupt: the parts are not those of this state.
    """
    size = state.world_size
    if size > PARTS:
        raise Unsupported(
            f"state {state.uid} has {size} parts: at most {PARTS} are cloned; bring its folder of"
            " packs"
        )
    holders = [Holder(url, connect) for url in urls]
    try:
        return await _open(state, holders, connect)
    except BaseException:
        await finish(asyncio.ensure_future(_end(holders)))
        raise


async def fetch_parts(
    sink: Sink, parts: Sequence[OpenPart], *, timeout_s: float, on_progress: Progress | None = None
) -> Fetched:
    """Bring every chunk that is missing in ``sink``, which receives the joined state, from all
    parts at once; like ``fetch``.

    :raises DatastatesError: a part is no longer available; the error names its rank.
    """
    missing = set(sink.missing())
    views = [
        _SinkRange(sink, part.indices) for part in parts if not missing.isdisjoint(part.indices)
    ]
    wanted = [part for part in parts if not missing.isdisjoint(part.indices)]
    progress = FetchProgress(sum(sink.lengths[index] for index in missing), on_progress)
    window = _window(wanted)
    fetching = [
        asyncio.create_task(_fetch_part(view, part, progress, window=window, timeout_s=timeout_s))
        for view, part in zip(views, wanted, strict=True)
    ]
    began = asyncio.get_running_loop().time()
    try:
        if fetching:
            await asyncio.wait(fetching, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in fetching:
            task.cancel()
        await finish(asyncio.gather(*fetching, return_exceptions=True))
    found = [task.result() for task in sorted(fetching, key=_has_ended_well)]
    seconds = asyncio.get_running_loop().time() - began
    lost = {name: error for each in found for name, error in each.lost.items()}
    return Fetched(
        dict(sum((Counter(each.bytes_by_feed) for each in found), Counter())),
        sum(each.chunks for each in found),
        seconds,
        lost,
    )


async def _open(state: State, holders: list[Holder], connect: Connect) -> OpenParts:
    """As ``open_parts``; the processes that are named are then among the ``holders``, however it
    ends."""
    told, errors = await _reach(holders, state)
    urls = {holder.url for holder in holders}
    others = [Holder(url, connect) for url in dict.fromkeys(told) if url not in urls][
        : state.world_size
    ]
    holders += others
    errors |= (await _reach(others, state))[1]
    here = [holder for holder in holders if holder.places]
    if not here:
        raise next(iter(errors.values()))
    for url, error in errors.items():
        _logger.warning("a source of state %s is left out: %s (%s)", state.uid[:10], url, error)
    parts = await _open_each(state, here, errors)
    manifests = [part.manifest for part in parts]
    joined = await asyncio.to_thread(join_parts, manifests)
    if joined.manifest.digest != state.digest:
        raise PeerFault(
            f"{', '.join(holder.url for holder in here)} sent parts that make another state than"
            f" {state.uid[:10]}: one of them is not honest, or damaged"
        )
    for part, first in zip(parts, first_chunks(manifests), strict=False):
        part.first = first
    return OpenParts(joined, tuple(parts), holders, here[0].repository)


async def fetch_part(
    sink: Sink, part: OpenPart, *, timeout_s: float, on_progress: Progress | None = None
) -> Fetched:
    """Bring every chunk of one part that is missing in ``sink``, which receives that part alone."""
    missing = sink.missing()
    progress = FetchProgress(sum(sink.lengths[index] for index in missing), on_progress)
    return await _fetch_part(sink, part, progress, window=_WINDOW, timeout_s=timeout_s)


def scratch_for(parts: Sequence[OpenPart]) -> int:
    """How many chunks may be on their way at once."""
    return _window(parts) * max(1, sum(max(1, len(part.feeds)) for part in parts))


def _window(parts: Sequence[OpenPart]) -> int:
    feeds = sum(max(1, len(part.feeds)) for part in parts)
    return max(1, min(_WINDOW, _IN_FLIGHT // max(1, feeds)))


def _has_ended_well(task: asyncio.Task[Fetched]) -> tuple[bool, bool]:
    """A sort key: failed tasks come first, then the tasks that were cancelled because of them."""
    return not task.cancelled() and task.exception() is None, task.cancelled()


async def _fetch_part(
    view: Sink, part: OpenPart, progress: FetchProgress, *, window: int, timeout_s: float
) -> Fetched:
    """Fetch one part from the feeds that serve it. When these have failed, fetch the missing chunks
    from the next holder that has it."""

    async def fallback(
        failed: Sequence[Feed], error: DatastatesError
    ) -> tuple[Sequence[Feed], Feed | None]:
        # if several feeds disagree, it cannot be decided here which one is right
        is_final = isinstance(error, Corrupt) and len(failed) > 1
        if is_final or not isinstance(error, Disconnected | Unavailable | Corrupt | PeerFault):
            raise _of_part(part, error) from error
        while part.spare:
            try:
                feed = await part.spare.pop(0)()
            except DatastatesError as exc:
                error = exc
                continue
            _logger.warning(
                "chunks of the part of rank %d now come from %s: %s", part.rank, feed.name, error
            )
            return [feed], None
        raise _of_part(part, error) from error

    return await fetch_with_fallback(
        view, part.feeds, fallback, progress=progress, window=window, timeout_s=timeout_s
    )


def _of_part(part: OpenPart, error: DatastatesError) -> DatastatesError:
    """The same error, naming the rank whose part it is about."""
    origin = part.manifest.origin
    return _about(origin.uid, origin.rank, origin.world_size, error)


def _about(uid: str, rank: int, size: int, error: DatastatesError) -> DatastatesError:
    message = f"the part of rank {rank} of {size} of state {uid} cannot be had: {error}"
    return revive(msgspec.structs.replace(describe(error), message=message))


async def _end(holders: Sequence[Holder]) -> None:
    await asyncio.gather(*(holder.close() for holder in holders))


async def _reach(
    holders: Sequence[Holder], state: State
) -> tuple[list[str], dict[str, DatastatesError]]:
    """Ask all holders what they reach; returns the urls of the other processes of their jobs,
    and the holders that do not answer."""
    room = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def ask(holder: Holder) -> Sequence[str]:
        async with room:
            return await holder.reach(state.uid, state.world_size)

    told, errors = list[str](), dict[str, DatastatesError]()
    answers = await asyncio.gather(*(ask(holder) for holder in holders), return_exceptions=True)
    for holder, answer in zip(holders, answers, strict=True):
        if isinstance(answer, DatastatesError):
            errors[holder.url] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told += answer
    return told, errors


async def _open_each(
    state: State, holders: Sequence[Holder], errors: Mapping[str, DatastatesError]
) -> list[OpenPart]:
    """Open every part at the holders that the plan names.

    :raises Unavailable: no source has one of them.
    """
    size = state.world_size
    plans = plan([holder.places for holder in holders], size)
    lacking = [str(rank) for rank, each in enumerate(plans) if not each.serving]
    if lacking:
        away = "".join(f"; {url} does not answer ({error})" for url, error in errors.items())
        asked = ", ".join(holder.url for holder in holders)
        raise Unavailable(
            f"state {state.uid} has {size} parts, and nobody has the part of rank"
            f" {', '.join(lacking)}: {asked} were asked{away}; give the url of whoever has it, or"
            " clone a state that is durable"
        )
    room, budget = asyncio.Semaphore(_PARTS_AT_ONCE), Budget(_MANIFESTS_BYTES)

    async def opened(rank: int, who: Holders) -> OpenPart:
        async with room:
            return await _open_one(state, rank, who, holders, budget)

    opening = [asyncio.create_task(opened(rank, who)) for rank, who in enumerate(plans)]
    try:
        return await asyncio.gather(*opening)
    finally:
        for task in opening:
            task.cancel()
        await finish(asyncio.gather(*opening, return_exceptions=True))


async def _open_one(
    state: State, rank: int, who: Holders, holders: Sequence[Holder], budget: Budget
) -> OpenPart:
    """Open a part at the holders that should serve it, or at the first other one that has it."""

    async def open_at(number: int) -> tuple[Manifest, SessionFeed]:
        limit = min(BODY_BYTES, max(0, budget.limit - budget.taken))
        return await holders[number].open(state.uid, rank, state.world_size, limit=limit)

    found, failed, spare = (
        list[tuple[Manifest, SessionFeed]](),
        list[DatastatesError](),
        list(who.spare),
    )
    turns = [who.serving]
    for turn in turns:
        for each in await asyncio.gather(*map(open_at, turn), return_exceptions=True):
            if isinstance(each, DatastatesError):
                failed.append(each)
            elif isinstance(each, BaseException):
                raise each
            else:
                found.append(each)
        if not found and spare:
            turns.append((spare.pop(0),))
    if not found:
        raise _about(state.uid, rank, state.world_size, failed[-1]) from failed[-1]
    manifest = found[0][0]
    budget.taken += len(found[0][1].manifest)
    if budget.taken > budget.limit:
        raise PeerFault(
            f"the manifests of the parts of one state have more than {_MANIFESTS_BYTES} bytes:"
            " it is refused as a trap"
        )
    feeds: list[Feed] = [feed for each, feed in found if each.digest == manifest.digest]
    if len(feeds) < len(found):
        _logger.warning(
            "rank %d of state %s is another part at %d of its holders: they are left out",
            rank,
            state.uid[:10],
            len(found) - len(feeds),
        )
    return OpenPart(
        manifest, feeds, [partial(_open_spare, holders[number], manifest) for number in spare]
    )


async def _open_spare(holder: Holder, manifest: Manifest) -> Feed:
    origin = manifest.origin
    found, feed = await holder.open(origin.uid, origin.rank, origin.world_size)
    if found.digest != manifest.digest:
        raise PeerFault(
            f"{holder.url} has another part of rank {origin.rank} of state {origin.uid[:10]}"
        )
    return feed


class _SinkRange(Sink):
    """A stretch of a sink's chunks, as a sink."""

    def __init__(self, sink: Sink, indices: range) -> None:
        self._sink, self._indices = sink, indices
        self.lengths = tuple(sink.lengths[index] for index in indices)

    def missing(self) -> Sequence[int]:
        first = self._indices.start
        return [index - first for index in self._sink.missing() if index in self._indices]

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        return self._sink.buffers(self._indices[index])

    def accept(self, index: int) -> bool:
        return self._sink.accept(self._indices[index])

    def forget(self, index: int) -> None:
        self._sink.forget(self._indices[index])

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        return self._sink.pieces(self._indices[index])
