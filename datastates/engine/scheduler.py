"""``Engine`` decides which state is written next, and which states leave memory. It takes events
and returns actions.

It touches no thread, clock, file or database, so every rule is tested by calling ``handle``.
``runner`` carries the actions out.

Rules:

- A line is one tracker on one branch. Its newest recorded state is its head.
- ``cadence_stats`` has the facts for a line's policy. The policy decides at each capture, when time
  has passed, and when a write ended.
- A state is *wanted* when it must become durable: its cadence picks it, a tag names it, a caller
  waits for it, or it is a head when the line closes. Wanted states are written in the order in
  which they became wanted.
- Small states are written in groups: as many as are wanted when the writer is free, up to
  ``GROUP_BYTES`` and ``MOST_TOGETHER``. A state whose write failed is written alone.
- A policy may keep its states near. A near state stays off the user's further tiers, until it is
  wanted for another reason.
- The best so far stays in memory until it is durable, and is written before any other state of its
  line. This holds for each metric that a training is configured to keep, or whose name has a
  direction. After a crash, a branch therefore has its best so far on disk. A state that is no
  longer the best is not written for this reason.
- A state that was cloned from a peer counts as the head of a separate line, until it leaves memory.
  At closing it is written only if a ref names it.
- A state may leave memory when it is durable, or when it is neither wanted, nor a head, nor named
  by a ref.
- A capture that needs memory waits for captures in flight (the heads before them may leave then)
  and for writes in progress. When neither is left, memory holds less than two states for each line.
  Then clones are written, whose memory stays free afterwards. After that the head of the capturing
  line is dropped unwritten, if its cadence would not write it now and the line's last written state
  is durable. Otherwise states that are not durable are written, oldest first.
- At most ``AT_A_TIME`` states are named to leave memory at a time, so that the work for a capture
  does not grow with the states held. If these free too little memory, the same event is handled
  again.
- With ``memory_latest`` a state that may leave memory does so once that many newer ones of its line
  are recorded. When memory is needed, the newest of each line leave last.
- Waiting always ends: when writing has failed for everything that is held, the waiting capture is
  refused. A failed state is tried again ``RETRY_S`` later to free its memory.

A disk that is full, away or stalled is a *trouble* that passes, unless the training wants its
errors (``on_failure="raise"``):

- A state whose write failed stays wanted. The next try is at the time that ``next_tick`` gives,
  which is twice as far away after each failure. Then heads come first, next tagged states, then
  states with waiting callers, and then all others in the order in which they became wanted. While
  every write fails, they take turns.
- A capture that finds memory full meanwhile drops unwritten states: the oldest first, then those
  that callers wait for, then its own head, which it follows, then the best so far, and last tagged
  states. The heads of other branches stay. If no other states are left, the capture is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from datastates.config import BackPressure
from datastates.lineage.views.text import named_direction
from datastates.policy.contract import CadenceChoice, Costs, Policy
from datastates.policy.retention import Best

from .cadence_stats import CadenceFacts, CaptureFacts

_UNTOLD = CaptureFacts()


@dataclass(frozen=True, slots=True)
class LineOpened:
    """A tracker begins on a branch. Its states have about ``size`` bytes.

    ``keeps_bests``: the best so far by each metric whose name has a direction becomes durable, as
    for ``BestKnown``.
    """

    line: str
    cadence: Policy
    branch: str = ""
    size: int = 0
    keeps_bests: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """A state of a line is in memory, digested and in the lineage; it is the line's head now.
    ``is_last``: no other state of its round follows, so writing may begin.
    """

    uid: str
    line: str
    now: float
    taken: CaptureFacts = _UNTOLD
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best state by each of these rules up to the tip of a line: its value and uid. None if
    there is none.

    The best so far by a rule stays in memory until it is durable, and becomes durable before any
    other state of its line does.
    """

    line: str
    bests: Mapping[Best, tuple[float, str] | None]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that no line captured, such as a clone, is in memory and in the lineage."""

    uid: str


@dataclass(frozen=True, slots=True)
class Inherited:
    """A state of a process that died is in memory and in the lineage. It is like a state of a line
    that went on: it may leave, unless a ref names it."""

    uid: str
    is_durable: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """A state must become durable on request. ``is_near``: and stay off further tiers."""

    uid: str
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class RefsChanged:
    """The uids that tags name now, and the uid that each branch names."""

    tagged: frozenset[str]
    branches: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Written:
    """States that were written together are durable. ``began`` and ``ended`` are the times of the
    write, if policies should learn from it. ``further_s`` is how long it lately took to put a state
    onto the further tiers. ``size`` is how many bytes the write added to the disk, and ``cpu_s``
    for how long it kept a processor busy.
    """

    uids: tuple[str, ...]
    began: float | None = None
    ended: float | None = None
    further_s: float | None = None
    size: int = 0
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A state is no longer on disk: a retention policy did not keep it."""

    uid: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Writing states failed. They are no longer wanted, unless the failure ``is_passing``."""

    uids: tuple[str, ...]
    now: float
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """The write under way makes no progress, or makes progress again."""

    is_stalled: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """A caller waits: failed writes are tried again now."""


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """Memory is needed for chunks of these ``lengths``. ``is_blocked``: a caller has waited for it
    ``since`` then, for a capture of ``line`` if that is given.

    ``in_flight`` captures are not recorded yet. ``is_patient``: the training continues when nothing
    can be written.
    """

    lengths: tuple[int, ...]
    is_blocked: bool
    back_pressure: BackPressure
    line: str | None = None
    in_flight: int = 0
    since: float = 0.0
    now: float = 0.0
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A line ends: its head is wanted.

    None: all lines end, and whatever a branch names is wanted."""

    line: str | None


Event = (
    LineOpened
    | BestKnown
    | Recorded
    | Adopted
    | Inherited
    | Wanted
    | RefsChanged
    | Written
    | Withdrawn
    | WriteFailed
    | Stalled
    | Retry
    | RoomNeeded
    | Tick
    | Closing
)


@dataclass(frozen=True, slots=True)
class Write:
    """Write these states to the local tier together; those that are ``near`` stay off further
    tiers for now."""

    uids: tuple[str, ...]
    near: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these states from memory, in this order, until chunks of the lengths ``until`` fit. If
    ``until`` is None, drop all of them."""

    uids: tuple[str, ...]
    until: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These wanted states will not become durable, and may be dropped to free memory."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Drop these states unwritten, in this order, until chunks of the lengths ``until`` fit. They
    cannot be written, and the training must continue."""

    uids: tuple[str, ...]
    until: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the capture that waits for memory: these states must be kept, and none of them could
    be written."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CadenceChanged:
    """The costs so far of a line's captures and writes, and what its policy chose. ``has_changed``:
    the choice is new."""

    line: str
    costs: Costs
    choice: CadenceChoice | None
    has_changed: bool


@dataclass(frozen=True, slots=True)
class PassOn:
    """Put these durable states, which were kept near until now, onto the further tiers after
    all."""

    uids: tuple[str, ...]


Action = Write | Evict | GiveUp | GiveWay | Refuse | CadenceChanged | PassOn


# --- The engine ---


AT_A_TIME = 8
"""The most states that one action names to leave memory."""

RETRY_S = 5.0
"""The seconds before a state that could not be written is tried again to free memory."""

GROUP_BYTES = 16 << 20
"""The most bytes that states have that are written together."""

MOST_TOGETHER = 256
"""The most states that are written together."""

FIRST_RETRY_S = 0.5
"""For how long nothing is tried after a failure that may pass; doubled after each further
failure, up to ``LAST_RETRY_S``."""

LAST_RETRY_S = 15.0


@dataclass(slots=True)
class _Line:
    """One line.

    ``keeps_bests``: by each metric whose name has a direction. ``is_safe``: the last write of
    one of its states succeeded."""

    pacing: CadenceFacts
    branch: str
    keeps_bests: bool = False
    head: str | None = None
    is_safe: bool = False
    bests: dict[Best, tuple[float, str] | None] = field(default_factory=dict)


def _bests_of(line: _Line) -> list[str]:
    return [best[1] for best in line.bests.values() if best is not None]


@dataclass(slots=True)
class _Entry:
    """A state in memory. ``number`` gives the order of arrival. If ``size`` is None, it is written
    alone. ``is_near``: only a policy wants it, and that policy keeps it near."""

    line: str
    number: int
    size: int | None = None
    is_durable: bool = False
    is_near: bool = False


@dataclass(slots=True)
class Engine:
    """The state behind the decisions; owned by one runner, called under its lock."""

    memory_latest: int | None = None
    _lines: dict[str, _Line] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _began: int = 0
    _loose: list[tuple[bool, int, str]] = field(default_factory=list)
    """A heap of what may have become free to leave memory (``_rank``); what may not leave when
    it comes up is put in again later."""
    _newest: dict[str, dict[str, None]] = field(default_factory=dict)
    """With ``memory_latest``, the newest states of each line, as many as it should keep."""
    _queue: dict[str, None] = field(default_factory=dict)
    _writing: tuple[str, ...] = ()
    _tagged: frozenset[str] = frozenset()
    _branches: dict[str, str] = field(default_factory=dict)
    _failed: dict[str, float] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _adopted: dict[str, None] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    """Heads of closed lines, until they are durable."""
    _retry_at: float | None = None
    _retry_s: float = 0.0
    _tries: dict[str, int] = field(default_factory=dict)
    """How often writing each state has failed, in a way that may pass, since a write last
    succeeded."""
    _is_resting: bool = False
    _is_stalled: bool = False
    _is_behind: bool = False
    """Whether wanted states had to wait for a disk: then those that matter most are written
    first."""
    _near: dict[str, None] = field(default_factory=dict)
    _onward: list[str] = field(default_factory=list)

    def handle(self, event: Event) -> list[Action]:
        """The actions to carry out now, after this event."""
        actions = self._handle(event)
        if self._onward:
            actions.append(PassOn(tuple(self._onward)))
            self._onward.clear()
        return actions

    def is_near(self, uid: str) -> bool:
        """Whether only a policy wants a state, and that policy keeps it off the further tiers."""
        entry = self._entries.get(uid)
        return entry is not None and entry.is_near

    def keeps_near(self, uid: str) -> bool:
        """Whether a state that is durable now stays off the further tiers."""
        if not self.is_near(uid):
            return False
        self._near[uid] = None
        return True

    def _handle(self, event: Event) -> list[Action]:
        match event:
            case LineOpened(line, cadence, branch, size, keeps_bests):
                self._lines[line] = _Line(CadenceFacts(cadence, size), branch, keeps_bests)
            case BestKnown(line_name, bests):
                before, self._lines[line_name].bests = (
                    _bests_of(self._lines[line_name]),
                    dict(bests),
                )
                self._loosen(*before)
            case Recorded():
                self._on_recorded(event)
                return [*self._next_write(), *self._drop_surplus()] if event.is_last else []
            case Adopted(uid):
                self._on_adopted(uid)
            case Inherited(uid, is_durable):
                self._enter(uid, uid)
                self._entries[uid].is_durable = is_durable
                self._loosen(uid)
            case Wanted(uid, is_near):
                if not is_near:
                    self._awaited.add(uid)
                if uid in self._entries or uid in self._near:
                    self._want(uid, is_near=is_near)
                else:
                    self._asked.add(uid)  # not recorded yet
            case RefsChanged(tagged, branches):
                left = {*self._tagged, *self._branches.values()}.difference(
                    tagged, branches.values()
                )
                self._tagged, self._branches = tagged, dict(branches)
                self._loosen(*left)
                for uid in tagged:
                    if uid in self._entries or uid in self._near:
                        self._want(uid)
            case Written(uids, began, ended):
                for uid in uids:
                    self._on_write_ended(uid, failed_at=None)
                if began is not None and ended is not None:
                    paced = self._learn(event, began, ended)
                    return [*self._next_write(), *paced]
            case Withdrawn(uid):
                self._on_withdrawn(uid)
            case WriteFailed(uids, now, is_passing):
                for uid in uids:
                    self._on_write_ended(uid, failed_at=now)
                if is_passing:
                    self._rest(uids, now)
            case Stalled(is_stalled):
                self._is_stalled = is_stalled and bool(self._writing)
            case Retry():
                self._is_resting = False
            case RoomNeeded():
                return [*self._make_room(event), *self._next_write()]
            case Tick(now):
                self._is_resting = (
                    self._is_resting and self._retry_at is not None and now < self._retry_at
                )
                for each in self._lines.values():
                    self._want_if_due(each, now)
            case Closing(line_name):
                self._on_closing(line_name)
        return self._next_write()

    def forget(self, uid: str) -> None:
        """Forget a state that has left memory."""
        entry = self._entries.pop(uid, None)
        newest = None if entry is None else self._newest.get(entry.line)
        if entry is not None and newest is not None:
            newest.pop(uid, None)
            if not newest:
                del self._newest[entry.line]
        self._adopted.pop(uid, None)
        self._awaited.discard(uid)
        self._ended.discard(uid)
        self._queue.pop(uid, None)
        self._failed.pop(uid, None)

    def hold_of(self, uid: str, *, is_captured: bool) -> str | None:
        """Why a state must stay in memory for now; None if it need not. ``is_captured``: a
        capture of this process made it."""
        if is_captured and uid not in self._entries:
            return "it is being recorded: try again in a moment"
        if uid in self._writing or uid in self._queue or uid in self._asked:
            return "it is on its way to disk: try again in a moment"
        if uid in {line.head for line in self._lines.values()}:
            return "a training of this process stands there: end that, or drop an older state"
        return None

    def unwritten_clones(self) -> list[str]:
        """Clones that are not durable, the oldest first."""
        return [uid for uid in self._adopted if self._is_in_memory_only(uid)]

    @property
    def pending_writes(self) -> int:
        """How many states are being written or are waiting to be written."""
        return len(self._queue) + len(self._writing)

    def unwritten(self) -> list[str]:
        """The states that are being written or are waiting to be written, the most urgent first."""
        return sorted([*self._writing, *self._queue], key=self._urgency())

    @property
    def is_stalled(self) -> bool:
        """Whether the write that is under way makes no progress."""
        return self._is_stalled

    @property
    def is_in_trouble(self) -> bool:
        """Whether nothing can be written at the moment."""
        return self._retry_at is not None or self._is_stalled

    def next_tick(self) -> float | None:
        """The time at which a ``Tick`` would do something. None: never, unless another event
        comes."""
        due = [
            at
            for line in self._lines.values()
            if line.head is not None
            and self._is_in_memory_only(line.head)
            and (at := self._next_due(line)) is not None
        ]
        if self._is_resting and self._retry_at is not None:
            due.append(self._retry_at)
        return min(due, default=None)

    def _on_recorded(self, event: Recorded) -> None:
        uid = event.uid
        if uid in self._entries:
            return  # this event came before
        line = self._lines.get(event.line)
        self._enter(uid, event.line, event.taken.size)
        if line is None:  # its tracker ended while the state waited for parts of other ranks
            self._ended.add(uid)
            self._want(uid)
            return
        before = [line.head, self._branches.get(line.branch), *_bests_of(line)]
        line.head = uid
        if line.keeps_bests:
            known = {rule.key for rule in line.bests}
            line.bests |= {
                Best(key): None
                for key in event.taken.metrics
                if key not in known and named_direction(key) is not None
            }
        for rule, best in line.bests.items():
            if rule.is_better(
                event.taken.metrics.get(rule.key, math.nan), None if best is None else best[0]
            ):
                line.bests[rule] = event.taken.metrics[rule.key], uid
        if line.branch in self._branches:
            self._branches[line.branch] = (
                uid  # its former head is free now, before the refs are next read
            )
        if line.pacing.is_due_at_capture(event.taken, event.now, waiting=self.pending_writes):
            self._want(uid, is_near=line.pacing.keeps_near)
        self._loosen(*before)
        if uid in self._asked:
            self._asked.remove(uid)
            self._want(uid)

    def _on_adopted(self, uid: str) -> None:
        if uid in self._entries:
            return
        self._enter(uid, uid)
        self._adopted[uid] = None
        if uid in self._asked:
            self._asked.remove(uid)
            self._want(uid)

    def _on_write_ended(self, uid: str, *, failed_at: float | None) -> None:
        self._writing, self._is_stalled = (
            tuple(each for each in self._writing if each != uid),
            False,
        )
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
        self._loosen(uid)
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

    def _rest(self, uids: tuple[str, ...], now: float) -> None:
        """Keep states wanted whose write failed, and try nothing for a while."""
        left = [uid for uid in uids if uid in self._entries]
        self._queue = {**dict.fromkeys(left), **self._queue}
        self._tries.update((uid, self._tries.get(uid, 0) + 1) for uid in left)
        self._retry_s = (
            FIRST_RETRY_S if self._retry_at is None else min(2 * self._retry_s, LAST_RETRY_S)
        )
        self._retry_at, self._is_resting, self._is_behind = now + self._retry_s, True, True

    def _heads(self) -> set[str | None]:
        return {*(line.head for line in self._lines.values()), *self._adopted}

    def _learn(self, write: Written, began: float, ended: float) -> list[Action]:
        """Pass the costs of a write to the lines, and want the states that are due now that it has
        ended."""
        own = Counter(
            entry.line for uid in write.uids if (entry := self._entries.get(uid)) is not None
        )
        paced: list[Action] = []
        for name, line in self._lines.items():
            has_changed = line.pacing.wrote(
                *(began, ended),
                is_own=name in own,
                states=max(1, own[name]),
                size=write.size * own[name] // len(write.uids),
                cpu_s=None if write.cpu_s is None else write.cpu_s * own[name] / len(write.uids),
                further_s=write.further_s,
            )
            if name in own and line.pacing.costs is not None:
                paced.append(
                    CadenceChanged(name, line.pacing.costs, line.pacing.choice, has_changed)
                )
            if line.pacing.policy.is_computed:
                self._want_if_due(line, ended)
        return paced

    @property
    def _is_writing(self) -> bool:
        return bool(self._writing or self._queue)

    def _want_if_due(self, line: _Line, now: float) -> None:
        """Want the head of a line if it is due, after time has passed or a write ended."""
        head = line.head
        if (
            head is not None
            and self._is_in_memory_only(head)
            and line.pacing.is_due_now(now, waiting=self.pending_writes)
        ):
            self._want(head, is_near=line.pacing.keeps_near)

    def _next_due(self, line: _Line) -> float | None:
        return line.pacing.next_due(waiting=self.pending_writes)

    def _is_in_memory_only(self, uid: str) -> bool:
        entry = self._entries.get(uid)
        return entry is not None and not entry.is_durable

    def _want(self, uid: str, *, is_near: bool = False) -> None:
        entry = self._entries.get(uid)
        line = None if entry is None else self._lines.get(entry.line)
        if line is not None and self._is_in_memory_only(uid) and uid not in self._writing:
            for best in _bests_of(line):
                # a crash may put the branch back to this state: its best must be on disk by then
                self._want_alone(best, is_near=is_near)
        self._want_alone(uid, is_near=is_near)

    def _want_alone(self, uid: str, *, is_near: bool = False) -> None:
        entry = self._entries.get(uid)
        if entry is not None:
            is_wanted = uid in self._queue or uid in self._writing
            entry.is_near = is_near and (entry.is_near or not is_wanted)
        if uid in self._near and not is_near:
            del self._near[uid]
            self._onward.append(uid)
        if self._is_in_memory_only(uid) and uid not in self._writing:
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
        if self._writing or not self._queue or self._is_resting:
            return []
        urgency = self._urgency()
        # A state that cannot be written must not block other states.
        ready = (
            sorted(self._queue, key=lambda uid: (self._tries.get(uid, 0), urgency(uid)))
            if self._is_behind
            else self._queue
        )
        group, total = list[str](), 0
        for uid in ready:
            size = (
                None
                if self._tries.get(uid) or uid not in self._entries
                else self._entries[uid].size
            )
            total += GROUP_BYTES if size is None else size
            if group and (total > GROUP_BYTES or len(group) == MOST_TOGETHER):
                break
            group.append(uid)
        for uid in group:
            del self._queue[uid]
        self._writing = tuple(group)
        return [
            Write(
                self._writing,
                frozenset(
                    uid for uid in group if uid in self._entries and self._entries[uid].is_near
                ),
            )
        ]

    def _urgency(self) -> Callable[[str], int]:
        """A sort key for the urgency of writing a state; the lowest is the most urgent."""
        heads = {*self._heads(), *self._ended, *self._branches.values(), *self._bests()}
        kinds = (heads, self._tagged, self._awaited)
        return lambda uid: next(
            (rank for rank, kind in enumerate(kinds) if uid in kind), len(kinds)
        )

    def _held(self) -> set[str | None]:
        """What lines and branches keep in memory; see ``_is_held``."""
        return {
            *(line.head for line in self._lines.values()),
            *self._branches.values(),
            *self._bests(),
        }

    def _is_held(self, uid: str, held: set[str | None]) -> bool:
        return uid in held or uid in self._tagged or uid in self._adopted

    def _bests(self) -> list[str]:
        return [uid for line in self._lines.values() for uid in _bests_of(line)]

    def _enter(self, uid: str, line: str, size: int | None = None) -> None:
        self._began += 1
        self._entries[uid] = _Entry(line, self._began, size)
        if self.memory_latest is not None:
            newest = self._newest.setdefault(line, {})
            newest[uid] = None
            if len(newest) > self.memory_latest:
                oldest = next(iter(newest))
                del newest[oldest]
                self._loosen(oldest)

    def _rank(self, uid: str) -> tuple[bool, int, str] | None:
        """The order in which states should leave memory: oldest first, and last those that lines
        keep. None: it has left."""
        entry = self._entries.get(uid)
        return (
            None if entry is None else (uid in self._newest.get(entry.line, ()), entry.number, uid)
        )

    def _loosen(self, *uids: str | None) -> None:
        """Note that something no longer keeps these states in memory."""
        for uid in uids:
            rank = None if uid is None else self._rank(uid)
            if rank is not None:
                heappush(self._loose, rank)

    def _free(self, held: set[str | None]) -> list[str]:
        """The first states that may leave memory, in the order in which they should."""
        if len(self._loose) > 2 * len(self._entries) + AT_A_TIME:  # most of it has left memory
            self._loose = []
            self._loosen(*self._entries)
        found: dict[str, tuple[bool, int, str]] = {}
        while self._loose and len(found) < AT_A_TIME:
            rank = heappop(self._loose)
            uid = rank[-1]
            if rank == self._rank(uid) and self._may_leave(uid, self._entries[uid], held):
                found[uid] = rank
        for rank in found.values():
            heappush(self._loose, rank)
        return list(found)

    def _drop_surplus(self) -> list[Action]:
        if self.memory_latest is None:
            return []
        surplus = tuple(
            uid
            for uid in self._free(self._held())
            if uid not in self._newest.get(self._entries[uid].line, ())
        )
        return [Evict(surplus, None)] if surplus else []

    def _make_room(self, event: RoomNeeded) -> list[Action]:
        held = self._held()
        free = self._free(held)
        actions: list[Action] = [Evict(tuple(free), event.lengths)] if free else []
        if not event.is_blocked:
            return actions
        line = self._lines.get(event.line or "")
        if line is not None and self._is_writing:
            line.pacing.most_waiting = math.inf
        if event.back_pressure is BackPressure.DROP_OLDEST:
            droppable = next((uid for uid in self._queue if not self._is_held(uid, held)), None)
            if droppable is not None and not free:
                del self._queue[droppable]
                self._loosen(droppable)
                actions += [GiveUp((droppable,)), Evict((droppable,), event.lengths)]
        if actions or event.in_flight:
            return actions
        is_to_be_tried = not (self._is_writing or self._is_resting)  # nothing else will try again
        if (
            self.is_in_trouble
            and not is_to_be_tried
            and event.back_pressure is not BackPressure.SKIP
        ):
            is_being_tried = bool(self._writing) and not self._is_stalled
            return [] if is_being_tried else self._give_way(event)
        return [] if self._is_writing_since(event.since) else self._squeeze(event)

    def _may_leave(self, uid: str, entry: _Entry, held: set[str | None]) -> bool:
        if uid in self._writing:
            return False
        if entry.is_durable:
            return True
        return uid not in self._queue and not self._is_held(uid, held)

    def _is_writing_since(self, since: float) -> bool:
        """Whether a write is wanted or under way that has not failed as far as a caller that has
        waited since then is concerned."""
        return any(not self._has_failed(uid, since) for uid in (*self._writing, *self._queue))

    def _has_failed(self, uid: str, since: float) -> bool:
        failed_at = self._failed.get(uid)
        return failed_at is not None and failed_at >= since - RETRY_S

    def _squeeze(self, event: RoomNeeded) -> list[Action]:
        """Free memory when no state may leave: write a clone, or else drop a head, or write a state
        that is not durable."""
        clone = next(
            (
                uid
                for uid in self._adopted
                if self._is_in_memory_only(uid) and not self._has_failed(uid, event.since)
            ),
            None,
        )
        if clone is not None:
            self._want(clone)
            return []
        line = None if event.line is None else self._lines.get(event.line)
        if (
            line is not None
            and line.head is not None
            and self._may_give_way(line, line.head, event.now)
        ):
            return [Evict((line.head,), event.lengths)]
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
        """Drop states unwritten when nothing can be written, if the capture is patient; else
        refuse it."""
        line = None if event.line is None else self._lines.get(event.line)
        heads, bests = {*self._heads(), *self._ended, *self._branches.values()}, set(self._bests())
        special = {*heads, *bests, *self._tagged, *self._awaited, *self._writing}
        plain = (
            uid
            for uid, entry in self._entries.items()
            if not entry.is_durable and uid not in special
        )
        first = tuple(islice(plain, AT_A_TIME))
        if event.is_patient and len(first) == AT_A_TIME:
            return [GiveWay(first, event.lengths)]
        kept = [
            uid
            for uid, entry in self._entries.items()
            if not entry.is_durable and uid not in self._writing
        ]
        older = [uid for uid in kept if uid not in heads]
        own = [
            uid
            for uid in kept
            if line is not None and uid == line.head and not self._is_named_beside(uid, line)
        ]
        named = [uid for uid in older if uid in self._tagged]
        best = [uid for uid in older if uid in bests and uid not in self._tagged]
        others = sorted(
            (uid for uid in older if uid not in self._tagged and uid not in bests),
            key=self._awaited.__contains__,
        )
        leaving = (*others, *own, *best, *named)
        if leaving and event.is_patient:
            return [GiveWay(leaving, event.lengths)]
        return [Refuse(tuple(kept))] if kept else []

    def _is_named_beside(self, head: str, line: _Line) -> bool:
        """Whether a tag, or a branch other than the line's own, names the head of a line."""
        return head in self._tagged or any(
            uid == head and branch != line.branch for branch, uid in self._branches.items()
        )

    def _may_give_way(self, line: _Line, head: str, now: float) -> bool:
        """Whether the capture that replaces a head may take its memory, because no more is lost
        than a crash would cost."""
        if (
            not self._is_in_memory_only(head)
            or not line.is_safe
            or head in self._queue
            or head in self._writing
        ):
            return False
        if head in _bests_of(line) or self._is_named_beside(head, line):
            return False
        due = self._next_due(line)
        return due is None or now < due
