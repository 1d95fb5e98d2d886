"""Decides which chunks to request from which feed, and when. Events come in, actions go out.

This module touches no task, clock or byte, so a test of a rule calls ``handle``. ``fetch`` acts.
Chunks that are requested together are a *unit*. Units are known by number here.

Rules:
- Units are pulled: each feed has up to ``window`` of them under way, and the next goes to the feed
  that would deliver it first. This divides the work by speed.
- While some feeds are still connecting, those that are here take at most their equal share, for no
  longer than ``GRACE_S``.
- Near the end a feed takes no unit that it would deliver long after all feeds together could have
  delivered everything.
- A feed that fails gives its units back. A feed that holds the last units also gives them
  back if an idle one could deliver them much sooner. It is *robbed*, and measured again.
- Chunks with a wrong digest are requested from another feed, or from the same one if it is the
  only one. If they are wrong twice, the clone fails.
- If the sink has memory only for the first chunks of a unit, its other chunks become a new unit.
- The clone also fails when no feed is left and none is coming, or when the sink has no free buffer
  although nothing is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

GRACE_S = 0.2
"""How long the connected feeds leave their share to those that are still connecting."""

_ROB_S = 0.5
_ROB_FACTOR = 4.0
_LATE_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Joined:
    """These feeds are connected. Feeds of one event begin together."""

    feeds: tuple[int, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Absent:
    """An expected feed will not come."""

    feed: int
    now: float


@dataclass(frozen=True, slots=True)
class Received:
    """A unit's bytes are here; they are being checked."""

    feed: int
    unit: int
    now: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The bytes were right."""

    unit: int
    now: float


@dataclass(frozen=True, slots=True)
class Refuted:
    """Some of the bytes were wrong; the unit now has only their chunks."""

    unit: int
    now: float


@dataclass(frozen=True, slots=True)
class Returned:
    """A unit of a dropped feed will not come. Its buffers are not written any more."""

    feed: int
    unit: int
    now: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A feed failed with this unit. Its buffers are not written any more."""

    feed: int
    unit: int
    now: float


@dataclass(frozen=True, slots=True)
class Start:
    """Receive a unit from a feed."""

    feed: int
    unit: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """These receives were not begun, since there is no buffer for them at the moment.

    ``split`` is a unit that was begun in part, and the new unit that has its other chunks."""

    starts: tuple[Start, ...]
    now: float
    split: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """The sink may have a free buffer again."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


Event = Joined | Absent | Received | Accepted | Refuted | Returned | Lost | NoRoom | Freed | Tick


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop everything that is under way from this feed."""

    feed: int


@dataclass(frozen=True, slots=True)
class Done:
    """Every unit was accepted."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The chunks of a unit were wrong twice, from these feeds."""

    unit: int
    feeds: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No feed is left; this one was the last."""

    feed: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """The sink has had no free buffer for this long, and no unit is under way that could free
    one."""

    seconds: float


Action = Start | Drop | Done | Refuse | GiveUp | Stuck


@dataclass(slots=True)
class _Feed:
    """What is known of a feed.

    Its *pace* is the number of seconds that it takes for a unit while it has several under way."""

    number: int
    flying: set[int] = field(default_factory=set)
    taken: int = 0
    done: int = 0
    busy_s: float = 0.0
    moved_at: float = 0.0
    is_lost: bool = False
    is_dropped: bool = False

    def pace(self, now: float) -> float | None:
        """The pace, or None if not measured. A unit that is overdue counts as if it came now."""
        quiet_s = now - self.moved_at if self.flying else 0.0
        if self.done == 0:
            return self.busy_s or None
        return max((self.busy_s + quiet_s) / self.done, quiet_s)

    def take(self, unit: int, now: float) -> None:
        if not self.flying:
            self.moved_at = now
        self.flying.add(unit)
        self.taken += 1

    def give(self, unit: int, now: float, *, is_done: bool) -> None:
        self.flying.discard(unit)
        if is_done:
            self.busy_s += now - self.moved_at
            self.moved_at = now
            self.done += 1


class Schedule:
    """The state behind the decisions for one clone.

    Each of ``expected`` feeds will either join or be absent. While ``backlog`` units wait for their
    digests, none is requested: more would have left the caches before their turn."""

    def __init__(
        self,
        units: Iterable[int],
        *,
        window: int,
        expected: int,
        timeout_s: float,
        now: float,
        backlog: int = 8,
    ) -> None:
        self._queue = deque(dict.fromkeys(units))
        self._total = self._left = len(self._queue)
        self._window, self._expected, self._timeout_s = window, expected, timeout_s
        self._backlog = backlog
        self._feeds: dict[int, _Feed] = {}
        self._again: list[int] = []
        self._wrong: dict[int, int] = {}
        self._checking: dict[int, int] = {}
        self._last_lost: int | None = None
        self._is_full, self._full_since = False, now
        self._began = now
        self._is_over = False

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; returns the actions to perform now."""
        if self._is_over:
            return []
        actions: list[Action] = []
        match event:
            case Received(number, unit, now):
                self._feeds[number].give(unit, now, is_done=True)
                self._checking[unit] = number
                self._settle(self._feeds[number])
            case Accepted(unit, now):
                del self._checking[unit]
                self._left -= 1
                self._is_full = False
            case Refuted(unit, now):
                self._is_full = False
                actions += self._refuted(unit)
            case Joined(numbers, now):
                self._feeds |= {number: _Feed(number) for number in numbers}
                self._expected -= len(numbers)
            case Absent(number, now):
                self._expected -= 1
                self._last_lost = number
            case Returned(number, unit, now):
                self._put_back(self._feeds[number], unit, now)
            case Lost(number, unit, now):
                actions += self._lost(self._feeds[number], unit, now)
            case NoRoom(starts, now, split):
                self._no_room(starts, split, now)
            case Freed(now):
                self._is_full = False
            case Tick(now):
                actions += self._tick(now)
        actions += self._assign(now)
        actions += self._end()
        return actions

    def _lost(self, feed: _Feed, unit: int, now: float) -> Iterator[Action]:
        is_news = not feed.is_dropped  # dropping a unit may break other units of its feed
        if is_news:
            feed.is_lost = feed.is_dropped = True
            self._last_lost = feed.number
        self._put_back(feed, unit, now)
        if is_news and feed.flying:
            yield Drop(feed.number)

    def _put_back(self, feed: _Feed, unit: int, now: float) -> None:
        feed.give(unit, now, is_done=False)
        self._enqueue(unit)
        self._is_full = False
        self._settle(feed)

    def _settle(self, feed: _Feed) -> None:
        if not feed.flying and not feed.is_lost:
            feed.is_dropped = False

    def _enqueue(self, unit: int) -> None:
        (self._again.append if unit in self._wrong else self._queue.appendleft)(unit)

    def _refuted(self, unit: int) -> Iterator[Action]:
        number = self._checking.pop(unit)
        if unit in self._wrong:
            self._is_over = True
            yield Refuse(unit, (self._wrong[unit], number))
            return
        self._wrong[unit] = number
        self._again.append(unit)

    def _no_room(
        self, starts: tuple[Start, ...], split: tuple[int, int] | None, now: float
    ) -> None:
        for start in reversed(starts):
            self._put_back(self._feeds[start.feed], start.unit, now)
            self._feeds[start.feed].taken -= 1
        if split is not None:
            begun, rest = split
            if begun in self._wrong:
                self._wrong[rest] = self._wrong[begun]
            self._enqueue(rest)
            self._left += 1
            self._total += 1
        self._is_full = True

    def _tick(self, now: float) -> Iterator[Action]:
        if self._is_busy() or not self._is_full:
            self._full_since = now
        elif now - self._full_since > self._timeout_s:
            self._is_over = True
            yield Stuck(now - self._full_since)
        self._is_full = self._is_full and self._is_busy()
        if not self._queue and not self._again and not self._is_over:
            yield from self._rob(now)

    def _rob(self, now: float) -> Iterator[Action]:
        best = min(
            (feed.busy_s / feed.done for feed in self._usable() if feed.done and not feed.flying),
            default=None,
        )
        if best is None:
            return
        for feed in [feed for feed in self._usable() if feed.flying]:
            units = len(feed.flying)
            needs_s = max(now - feed.moved_at, units * feed.busy_s / max(feed.done, 1))
            if needs_s > max(_ROB_S, _ROB_FACTOR * units * best):
                feed.is_dropped = True
                # measured again: until it delivers, it counts as slow as it just was
                feed.busy_s = max(feed.busy_s / max(feed.done, 1), now - feed.moved_at)
                feed.done = 0
                yield Drop(feed.number)

    def _assign(self, now: float) -> Iterator[Action]:
        while (
            (self._queue or self._again)
            and not self._is_full
            and not self._is_over
            and len(self._checking) < self._backlog
        ):
            start = self._pick(now)
            if start is None:
                return
            self._feeds[start.feed].take(start.unit, now)
            yield start

    def _pick(self, now: float) -> Start | None:
        """The feed that would deliver one more unit first, and a unit for it."""
        feeds = [
            feed
            for feed in self._usable()
            if len(feed.flying) < self._window and feed.taken < self._share(now)
        ]
        if not feeds:
            return None
        paces = {feed.number: pace for feed in self._usable() if (pace := feed.pace(now))}
        best = min(paces.values(), default=1.0)
        feeds.sort(
            key=lambda feed: ((len(feed.flying) + 1) * paces.get(feed.number, best), feed.taken)
        )
        latest = self._latest(paces)
        for feed in feeds:
            is_in_time = (len(feed.flying) + 1) * paces.get(feed.number, best) <= latest
            if (unit := self._unit_for(feed, is_in_time=is_in_time)) is not None:
                return Start(feed.number, unit)
        return None

    def _latest(self, paces: dict[int, float]) -> float:
        """The time, in seconds from now, by which a unit begun now should be here: not long
        after all feeds could have everything."""
        if (
            not paces
            or len(self._feeds) == 1
            or not any(feed.flying for feed in self._feeds.values())
        ):
            return float("inf")
        flying = sum(len(feed.flying) for feed in self._feeds.values())
        together = sum(1.0 / pace for pace in paces.values())
        return _LATE_FACTOR * (len(self._queue) + len(self._again) + flying) / together

    def _share(self, now: float) -> float:
        """The number of units that a feed may have taken by now."""
        if not self._expected or now - self._began >= GRACE_S:
            return float("inf")
        return max(self._window, self._total / (len(self._feeds) + self._expected))

    def _unit_for(self, feed: _Feed, *, is_in_time: bool) -> int | None:
        """The next unit for this feed.

        A unit that was wrong comes first, even if it is late, because few feeds may bring it."""
        is_alone = not self._expected and not any(
            each is not feed and not each.is_lost for each in self._feeds.values()
        )
        for unit in self._again:
            if is_alone or self._wrong[unit] != feed.number:
                self._again.remove(unit)
                return unit
        return self._queue.popleft() if self._queue and is_in_time else None

    def _end(self) -> Iterator[Action]:
        if self._left == 0 and not self._is_over:
            self._is_over = True
            yield Done()
        elif (
            not self._is_over
            and self._last_lost is not None
            and not self._expected
            and all(feed.is_lost for feed in self._feeds.values())
            and not self._is_busy()
        ):
            self._is_over = True
            yield GiveUp(self._last_lost)

    def _usable(self) -> Iterator[_Feed]:
        return (feed for feed in self._feeds.values() if not feed.is_dropped)

    def _is_busy(self) -> bool:
        return bool(self._checking) or any(feed.flying for feed in self._feeds.values())
