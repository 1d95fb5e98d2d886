"""Copies of durable states onto the further tiers of a repository.

A separate thread makes them, because a slow bucket must delay neither captures nor the disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
from datastates.lineage.states import Status
from datastates.lineage.views.text import plural
from datastates.lineage.write.replicas import SAFETY, mark
from datastates.state.manifest import Manifest
from datastates.storage.tier import SupportsManifests, Tier
from datastates.storage.tiers import payload_of
from datastates.system.logs import event, reason_of
from datastates.system.threads import yield_disk

from .handle import Progress

_logger = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 4.0


@dataclass(frozen=True, slots=True)
class _Copy:
    uid: str
    ranks: Sequence[int]
    tier: Tier
    progress: Progress | None

    def tell(self, status: Status) -> None:
        if self.progress is not None and self.progress.state is not None:
            self.progress.advance(replace(self.progress.state, status=status))

    def give_up(self, why: str) -> None:
        if self.progress is not None:
            self.progress.give_up(why)


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
        self._halves: list[tuple[_Copy, float]] = []
        """The copies that wait for the parts of other ranks, and since when."""
        self._look_at = self._look_every_s = 0.0
        self._turns: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._late: dict[str, deque[_Copy]] = {tier.name: deque() for tier in further}
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

    def put(self, uid: str, ranks: Sequence[int], progress: Progress | None) -> None:
        """Note that a state became durable, of which this process has the parts of these ranks.

        Any thread; never waits."""
        with self._lock:
            for tier in self._further:
                self._waiting[uid] += 1
                self._put += 1
                self._turns.put(_Copy(uid, ranks, tier, progress))

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

    def _next(self) -> _Copy | None:
        while self._halves:
            left = self._look_at - time.monotonic()
            if left > 0:
                with suppress(queue.Empty):
                    return self._turns.get(timeout=left)
            self._look()
            self._look_every_s = min(2 * self._look_every_s, _LAST_LOOK_S)
            self._look_at = time.monotonic() + self._look_every_s
        return self._turns.get()

    def _work_off(self, late: deque[_Copy]) -> None:
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
                if newest.progress is not None:
                    newest.progress.hold_up(Unavailable(said))
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
                self._await_parts(turn)
            if was_late:
                _logger.warning(
                    "the %s tier takes states again",
                    turn.tier.name,
                    extra=event("tier.back", tier=turn.tier.name),
                )
                was_late = False

    def _copy(self, turn: _Copy) -> bool:
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

    def _await_parts(self, turn: _Copy) -> None:
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

    def _give_up(self, tier: Tier, late: deque[_Copy]) -> None:
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

    def _forget(self, turn: _Copy) -> None:
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
