"""The engine decides which state is written next, and which states leave memory. It takes events and returns actions (``events``).

It touches no thread, clock, file or database, so every rule is tested by calling ``handle``. ``runner`` carries the actions out.

Rules:
- A line is one tracker on one branch. Its newest recorded state is its head.
- ``pacing`` has the facts with which a line's policy is asked. It is asked at each capture, when time has passed, and when a write ended.
- A state is *wanted* when it must become durable: its cadence says so, a tag names it, a caller waits for it, or it is a head when
  the line closes. Wanted states are written one at a time, in the order in which they were wanted.
- A policy may keep what it picks near: such a state stays off the user's further tiers, until something else wants it.
- The best so far by a metric that a training is told to keep stays in memory until it is durable, and is written before any other
  state of its line. So wherever a crash puts the branch back to, its best is on disk. A state that is no longer the best is not
  written for this reason.
- A state that was cloned from a peer counts as the head of a line of its own, until it leaves memory. At closing it is written
  only if a ref names it.
- A state may leave memory when it is durable, or when it is neither wanted, nor a head, nor named by a ref.
- A capture that waits for room waits for captures in flight (the heads that they follow may leave then) and for writes under way.
  When neither is left, memory holds less than two states for each line. Then clones are written, whose room is free for
  good afterwards. After that the head of the capturing line gives way unwritten, if its cadence would not write it
  now and what the line wrote last is durable. Otherwise what is not durable is written, oldest first.
- With ``memory_latest`` a state that may leave memory does so once that many newer ones of its line are recorded. When room is needed,
  the newest of each line leave after all others that may.
- At most ``most_held`` states that may leave memory stay in it: even states that share all their bytes cost something.
- Waiting always ends: when writing has failed for everything that is held, the waiting capture is refused. A failed state is tried
  again for the sake of room ``RETRY_S`` later.

A disk that is full, away or stalled is a *trouble* that passes, unless the training wants its errors (``on_failure="raise"``):
- A state whose write failed stays wanted. Nothing is tried until the time that ``next_tick`` gives, which is twice as far away after each
  failure. Then heads come first, next what tags name, then what callers wait for, and then the rest in the order in which they were wanted.
  While every write fails, they take turns.
- A capture that finds memory full meanwhile makes unwritten states give way: the oldest first, then those that callers wait for, then its
  own head, which it follows, then the best so far, and last of all what tags name. The heads of other branches stay. If nothing else is
  left, the capture is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from datastates.config import BackPressure
from datastates.policy.rules import Best

from .events import (
    Action,
    Adopted,
    BestKnown,
    Closing,
    Event,
    Evict,
    GiveUp,
    GiveWay,
    LineOpened,
    Paced,
    PassOn,
    Recorded,
    RefsChanged,
    Refuse,
    Retry,
    RoomNeeded,
    Stalled,
    Tick,
    Wanted,
    Withdrawn,
    Write,
    WriteFailed,
    Written,
)
from .pacing import Pacing

__all__ = ["Engine"]

MOST_HELD = 1000
"""The most states in memory: of a model that does not change, any number would fit."""

RETRY_S = 5.0
"""For how long, in seconds, a state that could not be written is not tried again only because room is needed."""

FIRST_RETRY_S = 0.5
"""For how long nothing is tried after a failure that may pass; doubled after each further failure, up to ``LAST_RETRY_S``."""

LAST_RETRY_S = 15.0


@dataclass(slots=True)
class _Line:
    """One line. ``is_safe``: the last write of one of its states succeeded."""

    pacing: Pacing
    branch: str
    head: str | None = None
    is_safe: bool = False
    bests: dict[Best, tuple[float, str] | None] = field(default_factory=dict)


def _bests_of(line: _Line) -> list[str]:
    return [best[1] for best in line.bests.values() if best is not None]


@dataclass(slots=True)
class _Entry:
    """A state in memory. ``is_near``: only a policy wants it, and that policy keeps it near."""

    line: str
    is_durable: bool = False
    is_near: bool = False


@dataclass(slots=True)
class Engine:
    """The state behind the decisions; owned by one runner, called under its lock."""

    most_held: int = MOST_HELD
    memory_latest: int | None = None
    _lines: dict[str, _Line] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _queue: dict[str, None] = field(default_factory=dict)
    _writing: str | None = None
    _tagged: frozenset[str] = frozenset()
    _branches: dict[str, str] = field(default_factory=dict)
    _failed: dict[str, float] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _adopted: set[str] = field(default_factory=set)
    _awaited: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    """Heads of closed lines, until they are durable."""
    _retry_at: float | None = None
    _retry_s: float = 0.0
    _tries: dict[str, int] = field(default_factory=dict)
    """How often writing each state has failed, in a way that may pass, since a write last succeeded."""
    _is_resting: bool = False
    _is_stalled: bool = False
    _is_behind: bool = False
    """Whether wanted states had to wait for a disk: then those that matter most are written first."""
    _near: dict[str, None] = field(default_factory=dict)
    _onward: list[str] = field(default_factory=list)

    def handle(self, event: Event) -> list[Action]:
        """The actions to carry out now, after this event."""
        actions = self._handle(event)
        if self._onward:
            actions.append(PassOn(tuple(self._onward)))
            self._onward.clear()
        return actions

    def keeps_near(self, uid: str) -> bool:
        """Whether a state that is durable now stays off the further tiers."""
        entry = self._entries.get(uid)
        if entry is None or not entry.is_near:
            return False
        self._near[uid] = None
        return True

    def _handle(self, event: Event) -> list[Action]:
        match event:
            case LineOpened(line, cadence, branch):
                self._lines[line] = _Line(Pacing(cadence), branch)
            case BestKnown(line_name, bests):
                self._lines[line_name].bests = dict(bests)
            case Recorded():
                self._on_recorded(event)
                return [*self._next_write(), *self._drop_surplus()]
            case Adopted(uid):
                self._on_adopted(uid)
            case Wanted(uid, is_near):
                if not is_near:
                    self._awaited.add(uid)
                if uid in self._entries or uid in self._near:
                    self._want(uid, is_near=is_near)
                else:
                    self._asked.add(uid)  # not recorded yet
            case RefsChanged(tagged, branches):
                self._tagged, self._branches = tagged, dict(branches)
                for uid in tagged:
                    self._want(uid)
            case Written(uid, began, ended, further_s):
                self._on_write_ended(uid, failed_at=None)
                if began is not None and ended is not None:
                    paced = self._learn(uid, began, ended, further_s)
                    return [*self._next_write(), *paced]
            case Withdrawn(uid):
                self._on_withdrawn(uid)
            case WriteFailed(uid, now, is_passing):
                self._on_write_ended(uid, failed_at=now)
                if is_passing:
                    self._rest(uid, now)
            case Stalled(is_stalled):
                self._is_stalled = is_stalled and self._writing is not None
            case Retry():
                self._is_resting = False
            case RoomNeeded():
                return [*self._make_room(event), *self._next_write()]
            case Tick(now):
                self._is_resting = self._is_resting and self._retry_at is not None and now < self._retry_at
                for each in self._lines.values():
                    self._want_if_due(each, now)
            case Closing(line_name):
                self._on_closing(line_name)
        return self._next_write()

    def forget(self, uid: str) -> None:
        """Forget a state that has left memory."""
        self._entries.pop(uid, None)
        self._adopted.discard(uid)
        self._awaited.discard(uid)
        self._ended.discard(uid)
        self._queue.pop(uid, None)
        self._failed.pop(uid, None)

    def hold_of(self, uid: str, *, is_captured: bool) -> str | None:
        """Why a state must stay in memory for now; None if it need not. ``is_captured``: a capture of this process made it."""
        if is_captured and uid not in self._entries:
            return "it is being recorded: try again in a moment"
        if uid == self._writing or uid in self._queue or uid in self._asked:
            return "it is on its way to disk: try again in a moment"
        if uid in {line.head for line in self._lines.values()}:
            return "a training of this process stands there: end that, or drop an older state"
        return None

    def unwritten_clones(self) -> list[str]:
        """Clones that are not durable, the oldest first."""
        return [uid for uid, entry in self._entries.items() if uid in self._adopted and not entry.is_durable]

    @property
    def pending_writes(self) -> int:
        """How many states are being written or are waiting to be written."""
        return len(self._queue) + (self._writing is not None)

    def unwritten(self) -> list[str]:
        """The states that are being written or are waiting to be written, the most urgent first."""
        return sorted([*([] if self._writing is None else [self._writing]), *self._queue], key=self._urgency())

    @property
    def is_stalled(self) -> bool:
        """Whether the write that is under way makes no progress."""
        return self._is_stalled

    @property
    def is_in_trouble(self) -> bool:
        """Whether nothing can be written at the moment."""
        return self._retry_at is not None or self._is_stalled

    def next_tick(self) -> float | None:
        """The time at which a ``Tick`` would do something; None: never, unless another event comes."""
        due = [
            at
            for line in self._lines.values()
            if line.head is not None and self._is_in_memory_only(line.head) and (at := self._next_due(line)) is not None
        ]
        if self._is_resting and self._retry_at is not None:
            due.append(self._retry_at)
        return min(due, default=None)

    def _on_recorded(self, event: Recorded) -> None:
        uid = event.uid
        if uid in self._entries:
            return  # this event came before
        line = self._lines.get(event.line)
        self._entries[uid] = _Entry(event.line)
        if line is None:  # its tracker ended while the state waited for parts of other ranks
            self._ended.add(uid)
            self._want(uid)
            return
        line.head = uid
        for rule, best in line.bests.items():
            if rule.is_better(event.taken.metrics.get(rule.key, math.nan), None if best is None else best[0]):
                line.bests[rule] = event.taken.metrics[rule.key], uid
        if line.branch in self._branches:
            self._branches[line.branch] = uid  # its former head is free now, before the refs are next read
        if line.pacing.is_due_at_capture(event.taken, event.now, is_writing=self._is_writing):
            self._want(uid, is_near=line.pacing.keeps_near)
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

    def _on_write_ended(self, uid: str, *, failed_at: float | None) -> None:
        self._writing, self._is_stalled = None, False
        if failed_at is None:
            self._retry_at, self._is_resting = None, False
            self._tries.clear()
        entry = self._entries.get(uid)
        if entry is None:
            return
        if failed_at is None:
            entry.is_durable = True
            self._awaited.discard(uid)
            self._ended.discard(uid)
            self._failed.clear()  # there is room again, or whatever the trouble was has passed
        else:
            self._failed[uid] = failed_at
        line = self._lines.get(entry.line)
        if line is not None:
            line.is_safe = failed_at is None

    def _on_withdrawn(self, uid: str) -> None:
        entry = self._entries.get(uid)
        if entry is None:
            return
        entry.is_durable = False
        if uid in self._tagged:  # a user named it meanwhile
            self._want(uid)

    def _rest(self, uid: str, now: float) -> None:
        """Keep a state wanted whose write failed, and try nothing for a while."""
        if uid in self._entries:
            self._queue = {uid: None, **self._queue}
            self._tries[uid] = self._tries.get(uid, 0) + 1
        self._retry_s = FIRST_RETRY_S if self._retry_at is None else min(2 * self._retry_s, LAST_RETRY_S)
        self._retry_at, self._is_resting, self._is_behind = now + self._retry_s, True, True

    def _heads(self) -> set[str | None]:
        return {*(line.head for line in self._lines.values()), *self._adopted}

    def _learn(self, uid: str, began: float, ended: float, further_s: float | None) -> list[Action]:
        """Tell the lines what a write cost the trainings meanwhile, and want the states that are due now that it has ended."""
        entry = self._entries.get(uid)
        own = None if entry is None else entry.line
        paced: list[Action] = []
        for name, line in self._lines.items():
            has_changed = line.pacing.wrote(began, ended, is_own=name == own, further_s=further_s)
            if name == own and line.pacing.costs is not None:
                paced.append(Paced(name, line.pacing.costs, line.pacing.choice, has_changed))
            if line.pacing.policy.is_computed:
                self._want_if_due(line, ended)
        return paced

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None or bool(self._queue)

    def _want_if_due(self, line: _Line, now: float) -> None:
        """Want the head of a line if it is due, after time has passed or a write ended."""
        head = line.head
        if head is not None and self._is_in_memory_only(head) and line.pacing.is_due_now(now, is_writing=self._is_writing):
            self._want(head, is_near=line.pacing.keeps_near)

    def _next_due(self, line: _Line) -> float | None:
        return line.pacing.next_due(is_writing=self._is_writing)

    def _is_in_memory_only(self, uid: str) -> bool:
        entry = self._entries.get(uid)
        return entry is not None and not entry.is_durable

    def _want(self, uid: str, *, is_near: bool = False) -> None:
        entry = self._entries.get(uid)
        line = None if entry is None else self._lines.get(entry.line)
        if line is not None and self._is_in_memory_only(uid) and uid != self._writing:
            for best in _bests_of(line):  # a crash may put the branch back to this state: its best must be on disk by then
                self._want_alone(best, is_near=is_near)
        self._want_alone(uid, is_near=is_near)

    def _want_alone(self, uid: str, *, is_near: bool = False) -> None:
        entry = self._entries.get(uid)
        if entry is not None:
            is_wanted = uid in self._queue or uid == self._writing
            entry.is_near = is_near and (entry.is_near or not is_wanted)
        if uid in self._near and not is_near:
            del self._near[uid]
            self._onward.append(uid)
        if self._is_in_memory_only(uid) and uid != self._writing:
            self._queue.setdefault(uid)

    def _on_closing(self, line_name: str | None) -> None:
        for name in list(self._lines) if line_name is None else [line_name]:
            line = self._lines.pop(name, None)
            if line is not None and line.head is not None:
                for uid in (*_bests_of(line), line.head):
                    self._want(uid)
                    if self._is_in_memory_only(uid):
                        self._ended.add(uid)
        if line_name is None:
            for uid in self._branches.values():
                self._want(uid)

    def _next_write(self) -> list[Action]:
        self._is_behind = self._is_behind and bool(self._queue)
        if self._writing is not None or not self._queue or self._is_resting:
            return []
        uid = self._most_urgent() if self._is_behind else next(iter(self._queue))
        del self._queue[uid]
        self._writing = uid
        entry = self._entries.get(uid)
        return [Write(uid, entry is not None and entry.is_near)]

    def _most_urgent(self) -> str:
        """The most urgent of the states that were tried least: one state that cannot be written must not block the others."""
        urgency = self._urgency()
        return min(self._queue, key=lambda uid: (self._tries.get(uid, 0), urgency(uid)))

    def _urgency(self) -> Callable[[str], int]:
        """A sort key for the urgency of writing a state; the lowest is the most urgent."""
        heads = {*self._heads(), *self._ended, *self._branches.values(), *self._bests()}
        kinds = (heads, self._tagged, self._awaited)
        return lambda uid: next((rank for rank, kind in enumerate(kinds) if uid in kind), len(kinds))

    def _held(self) -> set[str | None]:
        return {*self._heads(), *self._tagged, *self._branches.values(), *self._bests()}

    def _bests(self) -> list[str]:
        return [uid for line in self._lines.values() for uid in _bests_of(line)]

    def _drop_surplus(self) -> list[Action]:
        if self.memory_latest is None and len(self._entries) <= self.most_held:
            return []
        newest, free = self._newest(), self._free(self._held())
        surplus = free[: max(0, len(free) - self.most_held)]
        if self.memory_latest is not None:
            surplus = list(dict.fromkeys([*surplus, *(uid for uid in free if uid not in newest)]))
        return [Evict(tuple(surplus), None)] if surplus else []

    def _free(self, held: set[str | None]) -> list[str]:
        """The states that may leave memory, in the order in which they should: oldest first, and last of all those that lines keep."""
        free = [uid for uid, entry in self._entries.items() if self._may_leave(uid, entry, held)]
        return sorted(free, key=self._newest().__contains__)

    def _newest(self) -> set[str]:
        """The newest states of each line, as many as it should keep."""
        if self.memory_latest is None:
            return set()
        of: dict[str, list[str]] = {}
        for uid, entry in self._entries.items():
            of.setdefault(entry.line, []).append(uid)
        return {uid for uids in of.values() for uid in uids[-self.memory_latest :]}

    def _make_room(self, event: RoomNeeded) -> list[Action]:
        held = self._held()
        free = self._free(held)
        actions: list[Action] = [Evict(tuple(free), event.slots)] if free else []
        if not event.is_blocked:
            return actions
        if event.back_pressure is BackPressure.DROP_OLDEST:
            droppable = tuple(uid for uid in self._queue if uid not in held)
            if droppable and not free:
                del self._queue[droppable[0]]
                actions += [GiveUp(droppable[:1]), Evict(droppable[:1], event.slots)]
        if actions or event.in_flight:
            return actions
        is_to_be_tried = not (self._is_writing or self._is_resting)  # nothing else will try again
        if self.is_in_trouble and not is_to_be_tried and event.back_pressure is not BackPressure.SKIP:
            is_being_tried = self._writing is not None and not self._is_stalled
            return [] if is_being_tried else self._give_way(event)
        return [] if self._is_writing_since(event.since) else self._squeeze(event)

    def _may_leave(self, uid: str, entry: _Entry, held: set[str | None]) -> bool:
        if uid == self._writing:
            return False
        if entry.is_durable:
            return True
        return uid not in self._queue and uid not in held

    def _is_writing_since(self, since: float) -> bool:
        """Whether a write is wanted or under way that has not failed as far as a caller that has waited since then is concerned."""
        return any(uid is not None and not self._has_failed(uid, since) for uid in (self._writing, *self._queue))

    def _has_failed(self, uid: str, since: float) -> bool:
        failed_at = self._failed.get(uid)
        return failed_at is not None and failed_at >= since - RETRY_S

    def _squeeze(self, event: RoomNeeded) -> list[Action]:
        """Make room when no state may leave: write a clone, or else drop a head, or write what is not durable."""
        clone = next((uid for uid in self._adopted if self._is_in_memory_only(uid) and not self._has_failed(uid, event.since)), None)
        if clone is not None:
            self._want(clone)
            return []
        line = None if event.line is None else self._lines.get(event.line)
        if line is not None and line.head is not None and self._may_give_way(line, line.head, event.now):
            return [Evict((line.head,), event.slots)]
        kept = [uid for uid, entry in self._entries.items() if not entry.is_durable]
        for uid in kept:
            if not self._has_failed(uid, event.since):
                self._want(uid)
                written_of = self._lines.get(self._entries[uid].line)
                if written_of is not None:
                    written_of.pacing.last_write = event.now
                return []
        return [Refuse(tuple(kept))] if kept else []

    def _give_way(self, event: RoomNeeded) -> list[Action]:
        """Drop states unwritten when nothing can be written, if the capture is patient; else refuse it."""
        line = None if event.line is None else self._lines.get(event.line)
        heads, bests = {*self._heads(), *self._ended, *self._branches.values()}, set(self._bests())
        kept = [uid for uid, entry in self._entries.items() if not entry.is_durable and uid != self._writing]
        older = [uid for uid in kept if uid not in heads]
        own = [uid for uid in kept if line is not None and uid == line.head and not self._is_named_beside(uid, line)]
        named = [uid for uid in older if uid in self._tagged]
        best = [uid for uid in older if uid in bests and uid not in self._tagged]
        others = sorted((uid for uid in older if uid not in self._tagged and uid not in bests), key=self._awaited.__contains__)
        leaving = (*others, *own, *best, *named)
        if leaving and event.is_patient:
            return [GiveWay(leaving, event.slots)]
        return [Refuse(tuple(kept))] if kept else []

    def _is_named_beside(self, head: str, line: _Line) -> bool:
        """Whether a tag, or a branch other than the line's own, names the head of a line."""
        return head in self._tagged or any(uid == head and branch != line.branch for branch, uid in self._branches.items())

    def _may_give_way(self, line: _Line, head: str, now: float) -> bool:
        """Whether the capture that replaces a head may take its room, because no more is lost than a crash would cost."""
        if not self._is_in_memory_only(head) or not line.is_safe or head in self._queue or head == self._writing:
            return False
        if head in _bests_of(line) or self._is_named_beside(head, line):
            return False
        due = self._next_due(line)
        return due is None or now < due
