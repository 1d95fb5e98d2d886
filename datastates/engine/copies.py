"""Copies of durable states onto the further tiers of a repository.

Each tier has a separate thread, because a slow bucket must delay neither captures, nor the disk,
nor another tier. A state counts as copied once the tier confirms that it holds it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import msgspec

from datastates.errors import (
    Closed,
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
)
from datastates.lineage import lookup
from datastates.lineage.database import Database
from datastates.lineage.query.retained import outstanding
from datastates.lineage.states import Status
from datastates.lineage.views.text import plural
from datastates.lineage.write.clones import repository_uid
from datastates.lineage.write.replicas import SAFETY, mark
from datastates.state.manifest import Manifest
from datastates.storage.dedup import places_of
from datastates.storage.durable_files import Pace
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload, Reader, SupportsManifests, Tier
from datastates.storage.tiers import payload_of
from datastates.system.files import hold
from datastates.system.interrupts import Mutex
from datastates.system.logs import event, reason_of
from datastates.system.telemetry import Recorder
from datastates.system.threads import yield_disk

from .handle import Progress

_logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""The seconds after which no further copy begins when a training or repository is closed."""

_MEMORY_SHARE = 8
"""A state is copied from memory if it takes at most this part of the memory: it stays there until
it is copied."""

_MOVING_S = 2.0
"""A copy that moved bytes within this time, in seconds, is waited for when a training is closed."""

STALL_S = 10.0
"""A tier that has moved no bytes of a copy for this long, in seconds, does not respond."""

_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 4.0
"""The first and the longest pause between two queries for the parts of other ranks, in seconds."""

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
"""The first and the longest pause before a failed copy is tried again, in seconds."""


@dataclass(slots=True)
class _Copy:
    """A state to copy: the ranks whose parts this process has, and the handle to notify, if any."""

    uid: str
    ranks: Sequence[int]
    progress: Progress | None = None

    def reach(self, status: Status) -> None:
        """Note that the state has reached a status."""
        if self.progress is not None and self.progress.state is not None:
            self.progress.advance(replace(self.progress.state, status=status))

    def give_up(self, why: str) -> None:
        """Note that the state will not reach the tier."""
        if self.progress is not None:
            self.progress.give_up(why)


@dataclass(frozen=True, slots=True)
class CopyContext:
    """What copies need of a repository.

    ``on_done`` is called after each attempt. The parts of other ranks are awaited for
    ``patience_s``. States that an earlier process left in the ``folder`` without a copy are copied
    first. Each tier gets at most ``bytes_per_s``. States are read from ``memory`` while they are
    there.
    """

    durable: LocalTier
    database: Database
    on_done: Callable[[], None]
    patience_s: float
    folder: str = ""
    bytes_per_s: int | None = None
    recorder: Recorder = field(default_factory=Recorder)
    memory: MemoryTier | None = None


class Copies:
    """Copies durable states onto the further tiers.

    Without such tiers it has no thread and costs nothing.
    """

    def __init__(self, context: CopyContext, further: Sequence[Tier]) -> None:
        self._statuses = [tier.gives for tier in (context.durable, *further)]
        self._each = [_TierCopies(tier, context) for tier in further]

    @property
    def pending(self) -> int:
        """The number of copies that were not tried yet."""
        return sum(each.pending for each in self._each)

    @property
    def took_s(self) -> float | None:
        """How long it took to put the newest state onto all further tiers together, in seconds.
        None if no state was put onto any."""
        took = [each.took_s for each in self._each if each.took_s is not None]
        return sum(took) if took else None

    @property
    def trouble(self) -> str | None:
        """Why states do not reach a tier, since when, and how many wait. None while copies work."""
        return next(filter(None, (each.trouble() for each in self._each)), None)

    def check_goal(self, goal: Status) -> None:
        """Raise unless a tier gives this status, or a later one.

        :raises InvalidInput: none does.
        """
        if all(SAFETY[status] < SAFETY[goal] for status in self._statuses):
            raise InvalidInput(
                f"no tier of this repository makes states {goal}: open it with Config(tiers=[…]),"
                " or wait for 'durable'"
            )

    def awaited_by(self, uid: str) -> str | None:
        """The name of a tier onto which a state is still to be put. None if there is none."""
        return next((each.tier.name for each in self._each if each.is_waiting(uid)), None)

    def is_waiting(self, uid: str, tier: str) -> bool:
        """Whether a state is still to be put onto the tier of this name."""
        return any(each.is_waiting(uid) for each in self._each if each.tier.name == tier)

    def put(
        self, uid: str, ranks: Sequence[int], progress: Progress | None, *, to: str | None = None
    ) -> None:
        """Note that a state is durable, of which this process has the parts of these ranks. ``to``
        names the tier that gets it. None means all of them.

        Any thread; never waits."""
        for each in self._each:
            if to is None or each.tier.name == to:
                each.put(_Copy(uid, ranks, progress))

    def drop(self, uid: str) -> str | None:
        """Stop waiting for the copies of a state, whose bytes are about to leave the disk. Returns
        the name of a tier that does not have it yet."""
        name = self.awaited_by(uid)
        for each in self._each:
            each.drop(uid)
        return name

    def end_by(self, deadline: float | None) -> None:
        """Begin no copy after this time of the monotonic clock; newest states go first until then.
        None takes that back."""
        for each in self._each:
            each.deadline = deadline

    @property
    def is_moving(self) -> bool:
        """Whether a caller that closes should wait: copies may still begin, or one moves bytes."""
        return any(each.is_moving() for each in self._each)

    def close(self, within_s: float = CLOSING_S) -> None:
        """Begin no copy after ``within_s`` seconds, then end the threads; ``join`` waits for that.
        Idempotent."""
        for each in self._each:
            each.close(within_s)

    def join(self) -> None:
        """Wait until the threads have ended, except those whose tier does not respond. Then log
        which states are not on their tiers, and notify their handles."""
        for each in self._each:
            each.join()


class _TierCopies:
    """The copies onto one tier, and their thread."""

    def __init__(self, tier: Tier, context: CopyContext) -> None:
        self.tier, self._durable, self._database = tier, context.durable, context.database
        self._folder, self._recorder, self._memory = (
            context.folder,
            context.recorder,
            context.memory,
        )
        rate = context.bytes_per_s
        self._pace = None if rate is None else Pace(rate)
        self._last: dict[int, tuple[Manifest, Manifest]] = {}
        """By rank, the last state that was put: its manifest here, and its manifest there."""
        self._on_done, self._patience_s = context.on_done, context.patience_s
        self.took_s: float | None = None
        self.deadline: float | None = None
        self._put = self._done = 0  # each is written by one thread at a time
        self._new: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._late: deque[_Copy] = deque()
        self._halves: list[tuple[_Copy, float]] = []
        """The copies that wait for the parts of other ranks, and since when."""
        self._waiting: dict[str, _Copy] = {}
        self._lock = Mutex()
        self._why: str | None = None
        self._failing_since: float | None = None
        self._under_way: str | None = None
        self._moved_at: float | None = None
        """When the copy under way moved bytes last. None if none is under way."""
        self._retry_at = self._retry_every_s = self._look_at = self._look_every_s = 0.0
        self._is_closing = self._is_closed = self._is_checked = False
        self._thread = threading.Thread(
            target=self._run, name=f"datastates-copies-{tier.name}", daemon=True
        )
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The number of copies that were not tried yet."""
        return self._put - self._done

    def is_waiting(self, uid: str) -> bool:
        """Whether a state is still to be put onto the tier."""
        return uid in self._waiting

    def put(self, copy: _Copy) -> None:
        """Queue a copy, unless the state waits already."""
        with self._lock:
            known = self._waiting.get(copy.uid)
            if known is not None:
                known.progress = known.progress or copy.progress
                return
            self._waiting[copy.uid] = copy
            self._put += 1
            self._new.put(copy)

    def drop(self, uid: str) -> None:
        """Give up the copy of a state that leaves the disk.

        A copy that is under way is made: its reader keeps the bytes.
        """
        if uid == self._under_way:
            return
        with self._lock:
            copy = self._waiting.pop(uid, None)
        if copy is not None:
            said = f"state {uid} left the disk before it was copied to the {self.tier.name} tier"
            _logger.warning("%s", said, extra=event("copy.dropped", tier=self.tier.name, state=uid))
            copy.give_up(said)

    def trouble(self) -> str | None:
        """Why states do not reach the tier. None while they do."""
        now, moved_at, waiting = time.monotonic(), self._moved_at, len(self._waiting)
        wait = f"{plural(waiting, 'state')} wait{'s' * (waiting == 1)} for it"
        if moved_at is not None and now - moved_at > STALL_S:
            return f"the {self.tier.name} tier has not responded for {now - moved_at:.0f} s; {wait}"
        if self._failing_since is not None:
            return (
                f"the {self.tier.name} tier has failed for {now - self._failing_since:.0f} s"
                f" ({self._why}); {wait}"
            )
        return None

    def is_moving(self) -> bool:
        """Whether a copy may still begin, or the one under way has moved bytes lately."""
        if not self.pending:
            return False
        now, moved_at = time.monotonic(), self._moved_at
        may_begin = self.deadline is None or now < self.deadline
        return may_begin or (moved_at is not None and now - moved_at < _MOVING_S)

    def close(self, within_s: float) -> None:
        """Begin no copy after ``within_s`` seconds."""
        self.deadline = time.monotonic() + within_s
        self._is_closing = True
        self._new.put(None)

    def join(self) -> None:
        """Wait for the thread while it moves bytes, then report what is not on the tier."""
        if self._thread is threading.current_thread():
            return
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.05)
            if time.monotonic() - (self._moved_at or began) > CLOSING_S:
                break
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting.values()), {}
        if not left:
            return
        _logger.warning(
            "not on the %s tier: %s that became durable, the last of them %s; they are copied when"
            " the repository is next opened for writing",
            *(self.tier.name, plural(len(left), "state"), left[-1].uid),
            extra=event("copies.left", tier=self.tier.name, states=len(left)),
        )
        halves = {copy.uid for copy, _ in self._halves}
        for copy in left:
            what = "not all of its parts were" if copy.uid in halves else "it was not"
            copy.give_up(
                f"state {copy.uid} is durable, and {what} on the {self.tier.name} tier when its"
                " repository was closed"
            )

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        yield_disk()
        try:
            self._check()
        except DatastatesError as exc:  # it was logged when the repository was opened
            self._why = reason_of(exc)
            self._failing_since, self._retry_every_s = time.monotonic(), _FIRST_RETRY_S
        self._moved_at = None
        with ExitStack() as stack:
            if self._folder:
                self._queue_outstanding(stack)
            self._serve()

    def _queue_outstanding(self, stack: ExitStack) -> None:
        """Queue the states that earlier processes left in the folder without a copy, unless another
        process does: it holds a lock while it copies."""
        try:
            lock = hold(self._durable.root / f".copies-{self.tier.name}")
            if lock is None:
                return
            stack.callback(lock.close)
            parts: dict[str, list[int]] = {}
            here = {"tier": self._durable.name, "node": self._folder}
            with self._database.read() as session:
                for uid, rank in outstanding(session, **here, further=self.tier.name):
                    parts.setdefault(uid, []).append(rank)
        except (DatastatesError, OSError) as exc:
            _logger.warning(
                "states that are not on the %s tier yet are not looked for: %s", self.tier.name, exc
            )
            return
        for uid, ranks in parts.items():
            self.put(_Copy(uid, ranks))

    def _serve(self) -> None:
        while not (self._is_closing and self._new.empty()):
            copy = self._next()
            if copy is not None:
                self._late.append(copy)
            try:
                if self._halves and time.monotonic() >= self._look_at:
                    self._look()
                self._work_off()
            finally:
                if copy is not None:
                    self._done += 1
                self._on_done()
        self._look()

    def _next(self) -> _Copy | None:
        """The next copy. None when the repository is being closed, and when it is time to try or to
        query again."""
        due = [self._look_at] if self._halves else []
        if self._late and not self._is_over():
            due.append(self._retry_at)
        timeout = None if not due else max(0.0, min(due) - time.monotonic())
        with suppress(queue.Empty):
            return self._new.get(timeout=timeout)
        return None

    def _is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _work_off(self) -> None:
        """Copy what waits for the tier, in order, until the tier fails."""
        while self._late and not self._is_over():
            newest_first = self.deadline is not None
            copy = self._late[-1 if newest_first else 0]
            is_over = True
            if self.is_waiting(copy.uid):
                try:
                    is_over = self._copy(copy)
                except (Conflict, Corrupt, Unsupported) as exc:
                    said = f"state {copy.uid} is not put onto the {self.tier.name} tier: {exc}"
                    _logger.warning("%s", said)
                    copy.give_up(said)
                except BaseException as exc:
                    # a tier of the user's may raise anything; it is tried again
                    self._fail(exc)
                    return
                finally:
                    self._under_way = self._moved_at = None
                if self._failing_since is not None:
                    self._recover()
            self._late.remove(copy)
            if is_over:
                self._forget(copy)
            else:
                self._await_parts(copy)

    def _fail(self, error: BaseException) -> None:
        """Note that the tier failed: the newest state's handle gets the reason."""
        self._recorder.count("copies_failed")
        self._why = reason_of(error)
        newest = self._late[-1]  # the handles of those before it have their reasons
        why = self._why
        said = (
            f"state {newest.uid} is durable and not on the {self.tier.name} tier: {why}; it is"
            " tried again"
        )
        if newest.progress is not None:
            newest.progress.hold_up(Unavailable(said))
        if self._failing_since is None:
            self._failing_since, self._retry_every_s = time.monotonic(), _FIRST_RETRY_S
            if not self._is_closed:  # else the repository was closed meanwhile
                _logger.warning(
                    "%s",
                    said,
                    exc_info=None if isinstance(error, DatastatesError) else error,
                    extra=event("tier.away", tier=self.tier.name, state=newest.uid, reason=why),
                )
        else:
            self._retry_every_s = min(2 * self._retry_every_s, _LAST_RETRY_S)
        self._retry_at = time.monotonic() + self._retry_every_s

    def _recover(self) -> None:
        self._why = self._failing_since = None
        _logger.warning(
            "the %s tier takes states again",
            self.tier.name,
            extra=event("tier.back", tier=self.tier.name),
        )

    def _copy(self, copy: _Copy) -> bool:
        """Put what this process has of a state; returns whether the whole state is on the tier
        now, or never will be."""
        tier, began, now = self.tier, time.monotonic(), None
        requests = getattr(tier, "requests", 0)
        self._check()
        for rank in copy.ranks:
            try:
                placed_here = self._durable.sound(copy.uid, rank).manifest
                reader = self._open(placed_here)
            except NotFound:
                self._under_way = None
                self.drop(copy.uid)
                return True
            with reader:
                size = reader.manifest.origin.world_size
                if size > 1 and not tier.holds_parts:
                    raise Unsupported(
                        f"it has {size} parts, and that tier holds states of one: load it, and"
                        " capture that"
                    )
                self._under_way = copy.uid
                self._moved_at = time.monotonic()
                base = self._base(placed_here)
                placed = tier.put(self._watched(payload_of(reader)), base=base)
                self._last[rank] = placed_here, placed.manifest
                self._recorder.count("bytes_further", placed.bytes_new)
            if not tier.has_part(copy.uid, rank):  # what a store cannot confirm does not count
                raise Unavailable(
                    f"the tier took the state and does not list it: check that {tier.name}'s keys"
                    " or holds return what write has stored"
                )
            if self._is_closed and not self.is_waiting(copy.uid):
                return True  # it took too long: the next process that opens the repository marks it
            with self._database.write(durable=True) as session:
                now = mark(
                    session,
                    copy.uid,
                    tier.gives,
                    tier=tier.name,
                    node=tier.node,
                    rank=rank,
                    bytes=placed.bytes_new,
                )
        ended = time.monotonic()
        self.took_s = ended - began
        self._recorder.count("copied")
        self._recorder.count("requests", getattr(tier, "requests", 0) - requests)
        self._recorder.span("copy", began, ended, copy.uid)
        if now is None or not _is_as_safe(now, tier):
            return False
        copy.reach(now)
        return True

    def _check(self) -> None:
        self._moved_at = time.monotonic()
        if not self._is_checked:
            with self._database.read() as session:
                repository = repository_uid(session)
            self.tier.check(repository)
            self._is_checked = True

    def _open(self, placed: Manifest) -> Reader:
        """A part from memory if it is still there and takes little of it, which costs no read of
        the disk; else from the folder."""
        uid, rank = placed.origin.uid, placed.origin.rank
        size = sum(chunk.length for chunk in placed.content.chunks)
        if self._memory is not None and size * _MEMORY_SHARE <= self._memory.capacity:
            with suppress(NotFound, Closed):
                return self._memory.open_part(uid, rank)
        return self._durable.open_part(uid, rank)

    def _watched(self, payload: Payload) -> Payload:
        """The payload; reading one of its chunks shows that the copy moves."""
        return replace(payload, chunks=_WatchedChunks(payload.chunks, self._move))

    def _move(self, size: int) -> None:
        self._moved_at = time.monotonic()
        if self._pace is not None:
            self._pace.wait(self._durable.root, size)

    def _base(self, manifest: Manifest) -> Manifest | None:
        """The tier's manifest of an earlier state, with the chunks that this state shares.

        Digests of chunks can be forged. Two states share a chunk where both refer to one place in a
        pack here, because its bytes were compared when it was written.
        """
        rank, parents = manifest.origin.rank, manifest.origin.parents
        here, there = self._last.get(rank, (None, None))
        if there is None and rank == 0 and isinstance(self.tier, SupportsManifests):
            for uid in parents:
                with suppress(NotFound, Corrupt):
                    here, there = self._durable.manifest(uid), self.tier.manifest(uid)
                    break
        if here is None or there is None or not there.refs:
            return there
        theirs, mine = places_of(here), places_of(manifest)
        shared = [
            (chunk, ref)
            for chunk, ref in zip(there.content.chunks, there.refs, strict=True)
            if (key := (chunk.digest, chunk.length)) in mine and mine[key] == theirs.get(key)
        ]
        content = msgspec.structs.replace(there.content, chunks=tuple(chunk for chunk, _ in shared))
        refs = tuple(ref for _, ref in shared)
        return msgspec.structs.replace(there, content=content, refs=refs)

    def _await_parts(self, copy: _Copy) -> None:
        self._halves.append((copy, time.monotonic()))
        self._look_every_s = _FIRST_LOOK_S
        self._look_at = time.monotonic() + _FIRST_LOOK_S

    def _look(self) -> None:
        """Query which states are now whole on the tier."""
        statuses = self._statuses({copy.uid for copy, _ in self._halves})
        halves, self._halves = self._halves, []
        name = self.tier.name
        for copy, since in halves:
            now, waited_s = statuses.get(copy.uid), time.monotonic() - since
            if now is not None and _is_as_safe(now, self.tier):
                copy.reach(now)
            elif now is not None and not now.is_restorable:
                copy.give_up(
                    f"state {copy.uid} was dropped before all of its parts were on the {name} tier"
                )
            elif waited_s > self._patience_s:
                copy.give_up(
                    f"state {copy.uid} is durable, and parts of other ranks are not on the {name}"
                    f" tier after {waited_s:.0f} s: the logs of those ranks may say why"
                )
            else:
                self._halves.append((copy, since))
                continue
            self._forget(copy)
        self._look_every_s = min(2 * self._look_every_s, _LAST_LOOK_S)
        self._look_at = time.monotonic() + self._look_every_s

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

    def _forget(self, copy: _Copy) -> None:
        with self._lock:
            self._waiting.pop(copy.uid, None)


class _WatchedChunks(Sequence[memoryview]):
    """The chunks of a payload; calls ``on_read`` with the size of each one that is read."""

    def __init__(self, chunks: Sequence[memoryview], on_read: Callable[[int], None]) -> None:
        self._chunks, self._on_read = chunks, on_read

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # the two overloads add nothing
        chunk = self._chunks[index]
        self._on_read(chunk.nbytes)
        return chunk


def _is_as_safe(now: Status, tier: Tier) -> bool:
    return SAFETY[now] >= SAFETY[tier.gives]
