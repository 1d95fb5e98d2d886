"""What the engine decides: which state is written next, and which leave memory. Events in, actions out.

No thread, clock, file or database is touched here, so every rule is tested by calling ``handle``; ``runner`` acts.

Rules:
- A line is one tracker on one branch. Its newest recorded state is its head.
- A state is *wanted* when it is to become durable: its cadence says so, a tag names it, somebody waits for it, or it is
  a head when the line closes. Wanted states are written one at a time, in the order in which they were wanted.
- A state that was cloned from a peer is a line of its own whose head it is, until it leaves memory; it is not written at closing
  unless a ref names it.
- A state may leave memory when it is durable, or when it is neither wanted, nor a head, nor named by a ref.
- When a capture waits for room and nothing may leave and nothing is on its way to disk, the oldest head that is not yet
  durable is wanted, so that waiting always ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datastates.config import BackPressure
from datastates.policy.cadence import Cadence

__all__ = [
    "Action",
    "Adopted",
    "Closing",
    "Engine",
    "Event",
    "Evict",
    "GiveUp",
    "LineOpened",
    "Recorded",
    "RefsChanged",
    "RoomNeeded",
    "Tick",
    "Wanted",
    "Write",
    "WriteFailed",
    "Written",
]


@dataclass(frozen=True, slots=True)
class LineOpened:
    """A tracker begins on a branch."""

    line: str
    cadence: Cadence


@dataclass(frozen=True, slots=True)
class Recorded:
    """A state of a line is in memory, digested and in the lineage; it is the line's head now."""

    uid: str
    line: str
    now: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that no line captured is in memory and in the lineage: a clone."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody asked for a state to become durable."""

    uid: str


@dataclass(frozen=True, slots=True)
class RefsChanged:
    """The uids that tags and branches name now."""

    tagged: frozenset[str]
    named: frozenset[str]


@dataclass(frozen=True, slots=True)
class Written:
    """A state is durable."""

    uid: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Writing a state failed; it is wanted no longer."""

    uid: str


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """``slots`` slots are to be free. ``is_blocked``: a capture waits for them."""

    slots: int
    is_blocked: bool
    back_pressure: BackPressure


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""

    now: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A line ends (None: all of them): its head is wanted."""

    line: str | None


Event = LineOpened | Recorded | Adopted | Wanted | RefsChanged | Written | WriteFailed | RoomNeeded | Tick | Closing


@dataclass(frozen=True, slots=True)
class Write:
    """Write this state to the local tier."""

    uid: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these states from memory, in this order, until ``until`` slots are free."""

    uids: tuple[str, ...]
    until: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These wanted states will not become durable: they may be dropped for room."""

    uids: tuple[str, ...]


Action = Write | Evict | GiveUp


@dataclass(slots=True)
class _Line:
    cadence: Cadence
    head: str | None = None
    count: int = 0
    last_write: float | None = None


@dataclass(slots=True)
class _Entry:
    line: str
    is_durable: bool = False


@dataclass(slots=True)
class Engine:
    """The state behind the decisions; owned by one runner, called under its lock."""

    _lines: dict[str, _Line] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _queue: dict[str, None] = field(default_factory=dict)
    _writing: str | None = None
    _named: frozenset[str] = frozenset()
    _asked: set[str] = field(default_factory=set)
    _adopted: set[str] = field(default_factory=set)

    def handle(self, event: Event) -> list[Action]:
        """Take one event in; what is to be done now comes out."""
        match event:
            case LineOpened(line, cadence):
                self._lines[line] = _Line(cadence)
            case Recorded(uid, line, now):
                self._on_recorded(uid, line, now)
            case Adopted(uid):
                self._on_adopted(uid)
            case Wanted(uid):
                if uid in self._entries:
                    self._want(uid)
                else:
                    self._asked.add(uid)  # not recorded yet
            case RefsChanged(tagged, named):
                self._named = named
                for uid in tagged:
                    self._want(uid)
            case Written(uid):
                self._writing = None
                if uid in self._entries:
                    self._entries[uid].is_durable = True
            case WriteFailed(_):
                self._writing = None
            case RoomNeeded():
                return [*self._make_room(event), *self._next_write()]
            case Tick(now):
                for each in self._lines.values():
                    self._want_if_due(each, each.head, each.count - 1, now, is_tick=True)
            case Closing(line_name):
                self._on_closing(line_name)
        return self._next_write()

    def forget(self, uid: str) -> None:
        """The state left memory."""
        self._entries.pop(uid, None)
        self._adopted.discard(uid)

    def hold_of(self, uid: str, *, is_captured: bool) -> str | None:
        """Why a state must stay in memory for now; None when it need not. ``is_captured``: a capture of this process made it."""
        if is_captured and uid not in self._entries:
            return "it is being recorded: try again in a moment"
        if uid == self._writing or uid in self._queue or uid in self._asked:
            return "it is on its way to disk: try again in a moment"
        if uid in {line.head for line in self._lines.values()}:
            return "a training of this process stands there: end that, or drop an older state"
        return None

    @property
    def pending_writes(self) -> int:
        """How many states are being written or wait to be."""
        return len(self._queue) + (self._writing is not None)

    def next_tick(self) -> float | None:
        """When a ``Tick`` would want something; None: never, as it stands."""
        due = [
            at
            for line in self._lines.values()
            if line.head is not None and self._is_in_memory_only(line.head) and (at := line.cadence.next_due(line.last_write)) is not None
        ]
        return min(due, default=None)

    def _on_recorded(self, uid: str, line_name: str, now: float) -> None:
        line = self._lines[line_name]
        self._entries[uid] = _Entry(line_name)
        line.head = uid
        line.count += 1
        self._want_if_due(line, uid, line.count - 1, now)
        if uid in self._asked:
            self._asked.remove(uid)
            self._want(uid)

    def _on_adopted(self, uid: str) -> None:
        if uid in self._entries:
            return
        self._entries[uid] = _Entry(uid)
        self._adopted.add(uid)
        if uid in self._asked:
            self._asked.remove(uid)
            self._want(uid)

    def _heads(self) -> set[str | None]:
        return {*(line.head for line in self._lines.values()), *self._adopted}

    def _want_if_due(self, line: _Line, uid: str | None, index: int, now: float, *, is_tick: bool = False) -> None:
        if uid is None or not self._is_in_memory_only(uid):
            return
        cadence = Cadence(every=None, interval_s=line.cadence.interval_s) if is_tick else line.cadence
        if cadence.is_due(index=index, now=now, last_write=line.last_write, is_newest=uid == line.head):
            line.last_write = now
            self._want(uid)

    def _is_in_memory_only(self, uid: str) -> bool:
        entry = self._entries.get(uid)
        return entry is not None and not entry.is_durable

    def _want(self, uid: str) -> None:
        if self._is_in_memory_only(uid) and uid != self._writing:
            self._queue.setdefault(uid)

    def _on_closing(self, line_name: str | None) -> None:
        for name in list(self._lines) if line_name is None else [line_name]:
            line = self._lines.pop(name, None)
            if line is not None and line.head is not None:
                self._want(line.head)

    def _next_write(self) -> list[Action]:
        if self._writing is not None or not self._queue:
            return []
        uid = next(iter(self._queue))
        del self._queue[uid]
        self._writing = uid
        return [Write(uid)]

    def _make_room(self, event: RoomNeeded) -> list[Action]:
        heads = self._heads()
        free = [uid for uid, entry in self._entries.items() if self._may_leave(uid, entry, heads)]
        actions: list[Action] = [Evict(tuple(free), event.slots)] if free else []
        if not event.is_blocked:
            return actions
        if event.back_pressure is BackPressure.DROP_OLDEST:
            droppable = tuple(uid for uid in self._queue if uid not in heads and uid not in self._named)
            if droppable and not free:
                del self._queue[droppable[0]]
                actions += [GiveUp(droppable[:1]), Evict(droppable[:1], event.slots)]
        if not actions and not self.pending_writes:
            self._want_oldest_head()
        return actions

    def _may_leave(self, uid: str, entry: _Entry, heads: set[str | None]) -> bool:
        if uid == self._writing:
            return False
        if entry.is_durable:
            return True
        return uid not in self._queue and uid not in heads and uid not in self._named

    def _want_oldest_head(self) -> None:
        heads = self._heads()
        for uid, entry in self._entries.items():
            if not entry.is_durable and (uid in heads or uid in self._named):
                self._want(uid)
                return
