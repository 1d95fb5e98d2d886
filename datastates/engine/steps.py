"""The engine's own steps for a state, in order: digests, into memory, into the lineage, to disk.

``Copies`` puts durable states onto the further tiers, on a separate thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from datastates.errors import (
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
)
from datastates.lineage import lookup
from datastates.lineage.database import Database
from datastates.lineage.schema import to_us
from datastates.lineage.states import State, StateFacts, Status
from datastates.lineage.views.text import plural
from datastates.lineage.write.replicas import SAFETY, mark
from datastates.state.digest import chunk_digest, digest_of
from datastates.state.manifest import VERSION, Chunk, Content, Manifest, Origin
from datastates.storage.arena import Arena
from datastates.storage.copying import on_threads
from datastates.storage.local import LocalTier, Put
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload, Placed, SupportsManifests, Tier
from datastates.storage.tiers import payload_of
from datastates.system.logs import event, reason_of
from datastates.system.telemetry import Recorder
from datastates.system.threads import yield_disk

from .handle import Work, Writing
from .outbox import Journal
from .processors import Priority


class Digest:
    """Computes xxh3_128 of each chunk that its device did not digest, and BLAKE3 of the content
    and the parents' digests."""

    name, priority = "digest", int(Priority.DIGEST)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def process(self, work: Work) -> None:
        """Make the state's manifest."""
        found = dict(work.known)

        def look_at(index: int) -> None:
            found[index] = chunk_digest(self._arena.memory(work.slots[index], work.lengths[index]))

        left = [index for index in range(len(work.lengths)) if index not in found]
        if work.is_from_device:  # a state crosses faster than one core reads it
            on_threads(left, look_at)
        else:  # the other cores belong to the training
            for index in left:
                look_at(index)
        chunks = tuple(Chunk(found[index], length) for index, length in enumerate(work.lengths))
        content = msgspec.structs.replace(work.content, chunks=chunks)
        work.manifest = manifest_of(work.facts, content, work.parent_digests, rank=work.rank or 0)


def manifest_of(
    facts: StateFacts, content: Content, parent_digests: tuple[str, ...], *, rank: int = 0
) -> Manifest:
    """The manifest that is kept with the bytes of a state made here. ``parent_digests`` belong to
    ``facts.parents``, in order.

    A part of several names no parents yet, because they are unknown: see ``finished``.
    """
    is_part = facts.world_size > 1
    origin = Origin(
        uid=facts.uid,
        parents=() if is_part else facts.parents,
        parent_digests=() if is_part else parent_digests,
        run=facts.run,
        branch=facts.branch,
        step=facts.step,
        micro_step=facts.micro_step,
        created_at_us=to_us(facts.created_at),
        message=facts.message,
        metrics=facts.metrics,
        attributes=facts.attributes,
        rank=rank,
        world_size=facts.world_size,
    )
    return Manifest(VERSION, digest_of(content, origin), origin, content)


def finished(part: Manifest, state: State, parent_digests: tuple[str, ...]) -> Manifest:
    """The manifest of a part once its state is whole. It has the lineage's facts of the state, so
    that they can be read from any part."""
    origin = msgspec.structs.replace(
        part.origin,
        parents=state.parents,
        parent_digests=parent_digests,
        created_at_us=to_us(state.created_at),
        message=state.message,
        metrics=state.metrics,
        attributes=state.attributes,
    )
    return msgspec.structs.replace(part, origin=origin)


# --- Step 2: into memory, each distinct chunk once ---


class Dedup:
    """Hands a state's slots over to the memory tier; slots of chunks that other states hold
    already are returned."""

    name, priority = "dedup", int(Priority.DEDUP)

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory

    def process(self, work: Work) -> None:
        """Hand the slots over to the tier, and empty the list; if the tier refuses, the caller
        keeps them."""
        work.bytes_new = self._memory.adopt(work.digested(), work.slots).bytes_new


# --- Step 3: into the lineage ---


class Record:
    """Records states in the lineage, now or when the database is back.

    A transaction costs about as much for ten states as for one.
    """

    name, priority = "record", int(Priority.RECORD)

    def __init__(self, journal: Journal, tier: Tier, holder: str) -> None:
        self._journal, self._tier, self._holder = journal, tier, holder

    def process(self, work: Work) -> None:
        """Record one state; raises the reason if it was refused."""
        for error in self.process_all([work]).values():
            raise error

    def process_all(self, works: Sequence[Work]) -> dict[str, Exception]:
        """Record the states of a round in one go; returns, by uid, why some of them were
        refused."""
        entries = [work.be_told(self._tier, self._holder) for work in works]
        return self._journal.record(entries) if entries else {}


# --- Step 4, for states that become durable: to disk ---


_logger = logging.getLogger(__name__)


class Write:
    """Copies states from memory to this node's disk, and records this in the lineage. States of one
    group are written together."""

    name, priority = "write", int(Priority.WRITE)

    def __init__(
        self, memory: MemoryTier, local: LocalTier, journal: Journal, recorder: Recorder
    ) -> None:
        self._memory, self._local, self._journal, self._recorder = memory, local, journal, recorder

    def process(self, group: Sequence[Writing]) -> None:
        """Write states without verifying them: their digests were made from this very memory,
        and reading verifies them."""
        began = time.monotonic()
        with ExitStack() as stack:
            puts = [put for writing in group for put in self._puts(writing, stack)]
            placed = self._local.put_all(puts)
        of_each: dict[str, list[Placed]] = {}
        for part in placed:
            of_each.setdefault(part.manifest.origin.uid, []).append(part)
        put, newest = time.monotonic(), placed[-1].manifest.origin
        self._recorder.span("put", began, put, newest.uid, newest.step)
        for each in of_each.values():  # before any caller hears that it is durable
            self._count(each)
        self._journal.mark(of_each)
        for writing in group:
            each = of_each[writing.uid]
            writing.manifest, writing.size = each[0].manifest, sum(part.bytes_new for part in each)
        ended = time.monotonic()
        self._recorder.span("mark", put, ended, newest.uid, newest.step)
        self._recorder.span("write", began, ended, newest.uid, newest.step)
        for each in of_each.values() if _logger.isEnabledFor(logging.DEBUG) else ():
            origin, added = each[0].manifest.origin, sum(part.bytes_new for part in each)
            durable = event(
                "state.durable",
                state=origin.uid,
                step=origin.step,
                bytes=added,
                seconds=ended - began,
            )
            _logger.debug(
                "state %s, step %d, is durable after %.3f s",
                origin.uid,
                origin.step,
                ended - began,
                extra=durable,
            )

    def _puts(self, writing: Writing, stack: ExitStack) -> Iterator[Put]:
        for rank in self._memory.ranks(writing.uid):
            reader = stack.enter_context(self._memory.open_part(writing.uid, rank, verify=False))
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            yield Put(Payload(reader.manifest, chunks), writing.base, writing.is_of_base)

    def _count(self, each: Sequence[Placed]) -> None:
        self._recorder.count("written")
        for placed in each:
            manifest = placed.manifest
            self._recorder.count("bytes_written", placed.bytes_new)
            # its own pack is first
            self._recorder.count(
                "chunks_shared", sum(ref.pack >= bool(placed.bytes_new) for ref in manifest.refs)
            )


# --- Copies onto further tiers ---
# A separate thread makes them, because a slow bucket must delay neither captures nor the disk.


_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 4.0


class Told(Protocol):
    """A caller that waits for a state to reach a further tier."""

    state: State | None

    def advance(self, state: State) -> None:
        """Called when the state reached a further tier."""

    def hold_up(self, why: Unavailable) -> None:
        """Called when the state cannot reach the tier for now."""

    def give_up(self, why: str) -> None:
        """Called when the state will not reach the tier."""


@dataclass(frozen=True, slots=True)
class _Turn:
    uid: str
    ranks: Sequence[int]
    tier: Tier
    told: Told | None

    def tell(self, status: Status) -> None:
        if self.told is not None and self.told.state is not None:
            self.told.advance(replace(self.told.state, status=status))

    def give_up(self, why: str) -> None:
        if self.told is not None:
            self.told.give_up(why)


class Copies:
    """Copies durable states onto the further tiers. Without such tiers it has no thread and costs
    nothing. ``on_done`` is called after each attempt. It waits ``patience_s`` for the parts of
    other ranks.
    """

    def __init__(
        self,
        durable: Tier,
        further: Sequence[Tier],
        database: Database,
        on_done: Callable[[], None],
        patience_s: float,
    ) -> None:
        self._durable, self._further, self._database, self._on_done = (
            durable,
            further,
            database,
            on_done,
        )
        self._patience_s = patience_s
        self._halves: list[tuple[_Turn, float]] = []
        """The copies that wait for the parts of other ranks, and since when."""
        self._look_at = self._look_every_s = 0.0
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._late: dict[str, deque[_Turn]] = {tier.name: deque() for tier in further}
        self._put = self._done = 0  # each is written by one thread at a time
        self._waiting = Counter[str]()
        self._took_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if further:
            self._thread = threading.Thread(target=self._run, name="datastates-copies", daemon=True)
            self._thread.start()

    @property
    def pending(self) -> int:
        """The number of copies that were not tried yet."""
        return self._put - self._done

    @property
    def took_s(self) -> float | None:
        """How long it took to put the newest state onto all further tiers together, in seconds.
        None if no state was put onto any."""
        return sum(self._took_s.copy().values()) if self._took_s else None

    def check_goal(self, goal: Status) -> None:
        """Raise unless a tier gives this status, or a later one.

        :raises InvalidInput: none does.
        """
        if all(SAFETY[tier.gives] < SAFETY[goal] for tier in (self._durable, *self._further)):
            raise InvalidInput(
                f"no tier of this repository makes states {goal}: open it with Config(tiers=[…]),"
                " or wait for 'durable'"
            )

    def is_pending(self, uid: str) -> bool:
        """Whether a state is still to be put onto a tier. This object then informs callers that
        wait for it."""
        with self._lock:
            return uid in self._waiting

    def put(self, uid: str, ranks: Sequence[int], told: Told | None) -> None:
        """Note that a state became durable, of which this process has the parts of these ranks.

        Any thread; never waits."""
        with self._lock:
            for tier in self._further:
                self._waiting[uid] += 1
                self._put += 1
                self._turns.put(_Turn(uid, ranks, tier, told))

    def close(self) -> None:
        """End the thread once it has tried what waits; ``join`` waits for that. Idempotent."""
        self._turns.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        yield_disk()
        while (turn := self._next()) is not None:
            late = self._late[turn.tier.name]
            late.append(turn)
            try:
                self._work_off(late)
            finally:
                self._done += 1
                self._on_done()
        for tier in self._further:
            self._give_up(tier, self._late[tier.name])
        self._look()
        for turn, _ in self._halves:
            turn.give_up(
                f"state {turn.uid} is durable, and not all of its parts were on the"
                f" {turn.tier.name} tier when its repository was closed"
            )
            self._forget(turn)

    def _next(self) -> _Turn | None:
        while self._halves:
            left = self._look_at - time.monotonic()
            if left > 0:
                with suppress(queue.Empty):
                    return self._turns.get(timeout=left)
            self._look()
            self._look_every_s = min(2 * self._look_every_s, _LAST_LOOK_S)
            self._look_at = time.monotonic() + self._look_every_s
        return self._turns.get()

    def _work_off(self, late: deque[_Turn]) -> None:
        """Copy what waits for one tier, in order, until the tier fails."""
        was_late = len(late) > 1
        while late:
            turn = late[0]
            try:
                is_whole = self._copy(turn)
            except (Corrupt, Unsupported) as exc:
                _logger.warning(
                    "state %s is not put onto the %s tier: %s", turn.uid, turn.tier.name, exc
                )
                turn.give_up(f"state {turn.uid} is not put onto the {turn.tier.name} tier: {exc}")
                is_whole = True  # as far as it goes
            except BaseException as exc:
                # a tier of the user's may raise anything; it is tried again
                newest = late[-1]  # those before it were told when they came
                why = reason_of(exc)
                said = (
                    f"state {newest.uid} is durable and not on the {turn.tier.name} tier: {why}; it"
                    " is tried again with the next"
                )
                if newest.told is not None:
                    newest.told.hold_up(Unavailable(said))
                if not was_late:
                    _logger.warning(
                        "%s",
                        said,
                        exc_info=exc,
                        extra=event("tier.away", tier=turn.tier.name, state=newest.uid, reason=why),
                    )
                return
            late.popleft()
            if is_whole:
                self._forget(turn)
            else:
                self._await_others(turn)
            if was_late:
                _logger.warning(
                    "the %s tier takes states again",
                    turn.tier.name,
                    extra=event("tier.back", tier=turn.tier.name),
                )
                was_late = False

    def _copy(self, turn: _Turn) -> bool:
        """Put what this process has of a state; returns whether the whole state is on the tier
        now, or never will be."""
        tier, began, now = turn.tier, time.monotonic(), None
        for rank in turn.ranks:
            try:
                reader = self._durable.open_part(turn.uid, rank)
            except NotFound:
                return True  # it was dropped meanwhile
            with reader:
                size = reader.manifest.origin.world_size
                if size > 1 and not tier.holds_parts:
                    raise Unsupported(
                        f"it has {size} parts, and that tier holds states of one: load it, and"
                        " capture that"
                    )
                placed = tier.put(payload_of(reader), base=_relative(tier, reader.manifest))
            with self._database.write(durable=True) as session:
                now = mark(
                    session,
                    turn.uid,
                    tier.gives,
                    tier=tier.name,
                    node=tier.node,
                    rank=rank,
                    bytes=placed.bytes_new,
                )
        self._took_s[tier.name] = time.monotonic() - began
        if now is None or not _is_as_safe(now, tier):
            return False
        turn.tell(now)
        return True

    def _await_others(self, turn: _Turn) -> None:
        self._halves.append((turn, time.monotonic()))
        self._look_every_s = _FIRST_LOOK_S
        self._look_at = time.monotonic() + _FIRST_LOOK_S

    def _look(self) -> None:
        """Ask the lineage which states are now whole on their tiers."""
        statuses = self._statuses({turn.uid for turn, _ in self._halves})
        halves, self._halves = self._halves, []
        for turn, since in halves:
            now, waited_s = statuses.get(turn.uid), time.monotonic() - since
            if now is not None and _is_as_safe(now, turn.tier):
                turn.tell(now)
            elif now is not None and not now.is_restorable:
                turn.give_up(
                    f"state {turn.uid} was dropped before all of its parts were on the"
                    f" {turn.tier.name} tier"
                )
            elif waited_s > self._patience_s:
                said = (
                    f"state {turn.uid} is durable, and parts of other ranks are not on the"
                    f" {turn.tier.name} tier after {waited_s:.0f} s"
                )
                turn.give_up(f"{said}: the logs of those ranks may say why")
            else:
                self._halves.append((turn, since))
                continue
            self._forget(turn)

    def _statuses(self, uids: Iterable[str]) -> dict[str, Status]:
        """The status of each state that the lineage returns."""
        found = dict[str, Status]()
        with suppress(DatastatesError), self._database.read() as session:
            for uid in uids:
                try:
                    found[uid] = lookup.state(session, uid).status
                except NotFound:
                    found[uid] = Status.EVICTED
        return found

    def _give_up(self, tier: Tier, late: deque[_Turn]) -> None:
        self._work_off(late)
        if late:
            _logger.warning(
                "not on the %s tier: %s that became durable, the last of them %s",
                tier.name,
                plural(len(late), "state"),
                late[-1].uid,
            )
        for turn in late:
            self._forget(turn)
            turn.give_up(
                f"state {turn.uid} is durable, and not on the {tier.name} tier, as its repository"
                " was closed"
            )

    def _forget(self, turn: _Turn) -> None:
        with self._lock:
            self._waiting[turn.uid] -= 1
            if not self._waiting[turn.uid]:
                del self._waiting[turn.uid]


def _is_as_safe(now: Status, tier: Tier) -> bool:
    return SAFETY[now] >= SAFETY[tier.gives]


def _relative(tier: Tier, manifest: Manifest) -> Manifest | None:
    """The manifest of a parent that the tier has, so that shared chunks are not stored again."""
    if isinstance(tier, SupportsManifests):
        for uid in manifest.origin.parents:
            with suppress(NotFound, Corrupt, Unavailable):
                return tier.manifest(uid)
    return None
