"""A summary of each branch: where it forked, how its metric went, what can be restored, what was
changed for it.

A few queries read what is common to all branches. Everything else is read for the branches of one
page. Summaries of metrics (``lineage/write/segments``) are read instead of states, so the cost does
not depend on the number of states.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Select, bindparam, func, select

from datastates.errors import InvalidInput
from datastates.lineage.lookup import keys_of, rows_in_batches, states
from datastates.lineage.query.curves import outline, own_points
from datastates.lineage.query.names import REFS, to_ref
from datastates.lineage.schema import (
    EVENT,
    METRIC,
    REF,
    REPLICA,
    RUN,
    SEGMENT,
    STATE,
    STRETCH,
)
from datastates.lineage.states import (
    GONE,
    WHOLE,
    Ending,
    Life,
    Ref,
    RefKind,
    Run,
    State,
    Status,
    Tally,
)
from datastates.values import Value

from .text import Direction

if TYPE_CHECKING:
    from datastates.lineage.session import Session


Living = Callable[[Run], Life]
"""Tells whether the process of a run that did not finish is alive."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the metric, and the state that has it. ``value`` is None where it is NaN."""

    state: str
    step: int
    value: float | None
    status: Status


@dataclass(frozen=True, slots=True)
class Origin:
    """The state after which a branch begins. ``branch`` captured it, by its present name; None if
    no branch did.

    ``is_gone``: that branch no longer exists, and ``branch`` is the name that it had.
    """

    state: str
    step: int
    branch: str | None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One difference between the configurations of a branch and of its parent: None where one of
    them lacks the setting."""

    key: str
    value: Value
    parent: Value


@dataclass(frozen=True, slots=True)
class Line:
    """A small curve: some points of the branch's own part, with its extremes. None is NaN."""

    steps: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch. Counts are of the states that it has to itself: those after ``fork``, or all
    states of a branch that did not fork.

    ``restorable`` of these can be restored, ``durable`` survive their process. ``bytes`` are those
    that they added, or those in a folder of packs if one was named. ``last``, ``best`` and
    ``best_restorable`` are of the chosen metric; None if the branch has no state with a number.
    A branch without own states has ``last``, ``best`` and ``line`` of its whole path of first
    parents. ``config`` is the difference between the configuration of its newest run and that
    of the run that captured its fork; for a root it is all of the configuration. ``began_at``
    is when its first own state was captured, ``changed_at`` when its newest one was;
    ``steps_per_s`` is measured over the latest captures of its newest run. ``settings``
    has its values of those settings in which the listed branches differ. ``ending`` is how
    that run ended; None if it is running, as far as is known. ``lost_step`` is the newest step
    that was lost with a process that died: the branch went back from there.
    """

    name: str
    head: str
    step: int
    status: Status
    fork: Origin | None
    states: int
    restorable: int
    durable: int
    bytes: int
    last: Point | None
    best: Point | None
    best_restorable: Point | None
    line: Line
    config: tuple[Setting, ...]
    run: str | None
    host: str | None
    life: Life
    began_at: datetime | None
    changed_at: datetime
    took_s: float
    steps_per_s: float | None
    study: str | None = None
    variant: str | None = None
    group: Value = None
    ending: Ending | None = None
    lost_step: int | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Branches with the same value of what they are grouped by; ``best`` is the best value among
    them, with its branch."""

    value: Value
    branches: int
    best: float | None
    branch: str | None


@dataclass(frozen=True, slots=True)
class Branches:
    """Some of the branches, in order. ``matching`` out of ``total`` match the request; ``next`` is
    the cursor for those that follow.

    ``metrics`` are those that branches have, the most relevant first; ``metric`` is the chosen one,
    which gets better in ``direction``. ``groups`` are set when branches are grouped, in their
    order.
    """

    items: tuple[Branch, ...]
    next: str | None
    total: int
    matching: int
    metric: str | None
    direction: Direction
    metrics: tuple[str, ...]
    groups: tuple[Group, ...] = field(default=())

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Branch:
        return self.items[place]

    @property
    def best(self) -> Branch | None:
        """The branch among these with the best value."""
        sign = 1 if self.direction is Direction.MIN else -1
        have = [
            (sign * item.best.value, item)
            for item in self.items
            if item.best is not None and item.best.value is not None
        ]
        return min(have, key=itemgetter(0), default=(0.0, None))[1]


# Every branch of a lineage, with the facts that a few queries read for all branches. Their cost
# grows with the number of branches.


_SAFE = [Status.DURABLE.value, Status.REPLICATED.value, Status.EXTERNAL.value]


Counts = Mapping[int, tuple[int, int, int]]
"""How many states of a segment can be restored and how many are durable, and the bytes of all,
by the segment's row id."""


@dataclass(slots=True)
class Row:
    """One branch.

    ``count_states`` sets the last three numbers; the code that groups branches sets ``group``."""

    name: str
    head_id: int
    head: str
    step: int
    generation: int
    status: str
    changed_us: int
    run_id: int | None
    segment_id: int | None
    fork_id: int | None
    fork: str | None
    fork_step: int | None
    fork_generation: int | None
    fork_run_id: int | None
    parent: str | None
    parent_name: str | None
    first_id: int | None
    began_us: int | None
    tally: Any = None
    best: float | None = None
    best_id: int | None = None
    restorable: int = 0
    durable: int = 0
    bytes: int = 0
    group: Value = None

    @property
    def states(self) -> int:
        """How many states it has to itself."""
        return (
            self.generation + 1
            if self.fork_generation is None
            else self.generation - self.fork_generation
        )

    @property
    def last(self) -> float | None:
        """The newest value of the metric; None if it has none, or it is NaN."""
        return None if self.tally is None else self.tally.last

    @property
    def took_us(self) -> int:
        """The time from its first own state to its newest."""
        return 0 if self.began_us is None else max(0, self.changed_us - self.began_us)


def metrics_of(session: Session) -> list[str]:
    """The metrics that branches have, in no order."""
    return list(session.execute(_METRICS).scalars())


def rows_of(session: Session, metric: str | None, direction: Direction) -> list[Row]:
    """Every branch, with the summary of a metric over its own states, or over its path of first
    parents if it has no own states."""
    rows = [Row(*row) for row in session.execute(_ALL)]
    if metric is None:
        return rows
    tallies = {row.segment_id: row for row in session.execute(_TALLIES, {"of": metric})}
    paths: dict[int, Tally | None] = {}
    for head in {row.head_id for row in rows if row.first_id is None}:
        points, path = outline(session, head, metric), Tally()
        for id_, value in zip(points.ids, points.values, strict=True):
            path.add(id_, value)
        paths[head] = path if path.count else None
    is_least = direction is Direction.MIN
    for row in rows:
        tally = row.tally = (
            paths[row.head_id] if row.first_id is None else tallies.get(row.segment_id)
        )
        if tally is not None:
            row.best, row.best_id = (
                (tally.least, tally.least_id) if is_least else (tally.most, tally.most_id)
            )
    return rows


def count_states(
    session: Session,
    rows: Sequence[Row],
    known: Counts | None = None,
    *,
    folder: str | None = None,
) -> None:
    """Count the own states of these branches, and their bytes: those in a ``folder`` of packs, or
    those that they added. Branches with ``known`` counts are not counted."""
    known = known or {}
    ids = [
        row.segment_id for row in rows if row.segment_id is not None and row.segment_id not in known
    ]
    found = _counted(session, ids, folder)
    for row in rows:
        segment = row.segment_id or 0
        row.restorable, row.durable, row.bytes = known.get(segment) or found.get(segment, (0, 0, 0))


def bytes_of_runs(session: Session, uids: Sequence[str], folder: str) -> dict[str, int]:
    """The bytes that the states of each of some runs take in a folder of packs, by uid."""
    rows = rows_in_batches(session, _ON_DISK_OF_RUNS, uids, "uids", folder=folder)
    return {row.uid: int(row.size) for row in rows}


def bytes_of_segments(session: Session, ids: Sequence[int], folder: str) -> dict[int, int]:
    """The bytes that the states of each of some segments take in a folder of packs, by row id."""
    rows = rows_in_batches(session, _ON_DISK, ids, folder=folder)
    return {row.segment_id: int(row.size) for row in rows}


def counts_of(session: Session, folder: str | None = None) -> Counts:
    """The counts of every branch, as ``count_states`` finds them."""
    return _counted(session, session.execute(_BRANCHES).scalars().all(), folder)


def kept_of(session: Session, run: str) -> tuple[int, int, int]:
    """How many states a run captured, how many of them can be restored, and how many bytes those
    on disk added there."""
    rows = session.execute(_OF_RUN, {"run": run}).all()
    return (
        sum(row.states for row in rows),
        sum(row.states for row in rows if row.status not in GONE),
        sum(int(row.size) for row in rows if row.status in _SAFE),
    )


def _counted(session: Session, ids: Sequence[int], folder: str | None) -> Counts:
    """The counts of some segments; many are read along the index at once."""
    found = dict.fromkeys(ids, (0, 0, 0))
    for segment_id, status, count, size in rows_in_batches(session, _COUNTS_OF, ids):
        restorable, durable, total = found[segment_id]
        found[segment_id] = (
            restorable + (0 if status in GONE else count),
            durable + (count if status in _SAFE else 0),
            total + (int(size or 0) if folder is None else 0),
        )
    if folder is not None:
        for segment_id, size in bytes_of_segments(session, ids, folder).items():
            found[segment_id] = (*found[segment_id][:2], size)
    return found


_OF_RUN = (
    select(STATE.c.status, func.count().label("states"), func.sum(STATE.c.bytes_new).label("size"))
    .where(
        STATE.c.run_id == select(RUN.c.id).where(RUN.c.uid == bindparam("run")).scalar_subquery()
    )
    .group_by(STATE.c.status)
)
_fork = STATE.alias("fork")
_first = STATE.alias("first")
_parent = SEGMENT.alias("parent")
_is_branch = REF.c.kind == RefKind.BRANCH.value
_ALL = (
    select(
        REF.c.name,
        STATE.c.id,
        STATE.c.uid,
        STATE.c.step,
        STATE.c.generation,
        STATE.c.status,
        STATE.c.created_at,
    )
    .add_columns(STATE.c.run_id, SEGMENT.c.id, SEGMENT.c.fork_id)
    .add_columns(
        _fork.c.uid,
        _fork.c.step,
        _fork.c.generation,
        _fork.c.run_id,
        _parent.c.branch,
        _parent.c.name,
    )
    .add_columns(SEGMENT.c.first_id, _first.c.created_at)
    .join_from(REF, STATE, STATE.c.id == REF.c.state_id)
    .outerjoin(SEGMENT, SEGMENT.c.branch == REF.c.name)
    .outerjoin(_fork, _fork.c.id == SEGMENT.c.fork_id)
    .outerjoin(_parent, _parent.c.id == _fork.c.segment_id)
    .outerjoin(_first, _first.c.id == SEGMENT.c.first_id)
    .where(_is_branch)
)
_BRANCHES = select(SEGMENT.c.id).where(SEGMENT.c.branch.is_not(None))
# By segments, so that SQLite looks each up: in a join it would read all stretches.
_TALLIES = select(STRETCH).where(
    STRETCH.c.segment_id.in_(_BRANCHES),
    STRETCH.c.key == bindparam("of"),
    STRETCH.c.place == WHOLE,
)


def _metrics() -> Any:
    """Those metrics of states of which a branch has a stretch."""
    keys = keys_of(METRIC)
    own = select(STRETCH.c.key).where(
        STRETCH.c.segment_id.in_(_BRANCHES),
        STRETCH.c.key == keys.c.key,
        STRETCH.c.place == WHOLE,
    )
    return select(keys.c.key).where(own.correlate(keys).exists())


_METRICS = _metrics()
_size = func.sum(REPLICA.c.bytes).label("size")
_in_folder = REPLICA.c.node == bindparam("folder"), REPLICA.c.status == "ok"
_ON_DISK = (
    select(STATE.c.segment_id, _size)
    .join_from(STATE, REPLICA, REPLICA.c.state_id == STATE.c.id)
    .where(STATE.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)), *_in_folder)
    .group_by(STATE.c.segment_id)
)
_ON_DISK_OF_RUNS = (
    select(RUN.c.uid, _size)
    .join_from(RUN, STATE, STATE.c.run_id == RUN.c.id)
    .join(REPLICA, REPLICA.c.state_id == STATE.c.id)
    .where(RUN.c.uid.in_(bindparam("uids", expanding=True)), *_in_folder)
    .group_by(RUN.c.uid)
)
_COUNTS_OF = (
    select(STATE.c.segment_id, STATE.c.status, func.count(), func.sum(STATE.c.bytes_new))
    .where(STATE.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .group_by(STATE.c.segment_id, STATE.c.status)
)


# The order in which branches are listed, and cursors: a place in that order, sealed with the
# request to which it belongs.


Place = tuple[tuple[int, float, str], int, float, tuple[int, ...]]
"""A branch's group, whether it lacks the value, the value, its name."""

_DIGEST_BYTES = 8


class Sort(StrEnum):
    """The value by which branches are sorted."""

    CHANGED = "changed"
    NAME = "name"
    BEGAN = "began"
    BEST = "best"
    LAST = "last"
    STEP = "step"
    STATES = "states"
    RESTORABLE = "restorable"
    DURABLE = "durable"
    BYTES = "bytes"
    TOOK = "took"


SORTS = tuple(sort.value for sort in Sort)
_FALLING = {
    Sort.CHANGED,
    Sort.BEGAN,
    Sort.STEP,
    Sort.STATES,
    Sort.RESTORABLE,
    Sort.DURABLE,
    Sort.BYTES,
    Sort.TOOK,
}
"""The sorts that put the largest first, unless they are reversed."""
COUNTED = {Sort.RESTORABLE, Sort.DURABLE, Sort.BYTES}
"""The sorts for which ``rows.count_states`` must run first."""
_ATTRIBUTES = {Sort.CHANGED: "changed_us", Sort.BEGAN: "began_us", Sort.TOOK: "took_us"}
"""The attribute of a ``Row`` for a sort, where the names differ."""


def sort_of(text: str) -> tuple[Sort, bool]:
    """The sort in a text, and whether it is reversed."""
    try:
        return Sort(text.removeprefix("-")), text.startswith("-")
    except ValueError:
        raise InvalidInput(
            f"branches cannot be sorted by {text!r}: choose among {', '.join(SORTS)}, with '-' for"
            " the other way"
        ) from None


def place_of(row: Row, sort: Sort, direction: Direction, *, is_reversed: bool) -> Place:
    """The place of a branch: by group, then whether it has the value at all, then by value, then
    by name. The best, newest or longest comes first, unless ``is_reversed``.

    ``direction`` is the direction in which the metric gets better.
    """
    is_falling = sort in _FALLING or (sort in (Sort.BEST, Sort.LAST) and direction is Direction.MAX)
    sign = -1 if is_falling != is_reversed else 1
    name, group = tuple(map(ord, row.name)), place_of_group(row.group)
    if sort is Sort.NAME:
        return group, 0, 0.0, name if sign > 0 else (*(-each for each in name), 1)
    value: float | None = getattr(row, _ATTRIBUTES.get(sort, sort.value))
    lacks = value is None or math.isnan(value)
    return group, int(lacks), 0.0 if lacks or value is None else sign * float(value), name


def place_of_group(value: Value) -> tuple[int, float, str]:
    """The place of a group's value: numbers before texts, and a missing value last."""
    match value:
        case None:
            return 2, 0.0, ""
        case str():
            return 1, 0.0, value
    return 0, float(value) if value == value else math.inf, ""


def request_digest(*parameters: object) -> bytes:
    """The digest of a request, without its page. A cursor of another request is refused."""
    body = msgspec.msgpack.encode(parameters)
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, person=b"ds.branches").digest()


def write_cursor(request: bytes, place: Place) -> str:
    """A cursor for the branches after a place."""
    return base64.urlsafe_b64encode(request + msgspec.msgpack.encode(place)).decode().rstrip("=")


def read_cursor(request: bytes, token: str) -> Place:
    """The place that a cursor names.

    :raises InvalidInput: it is not a cursor, or one of another request.
    """
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        place: Place = msgspec.msgpack.decode(raw[_DIGEST_BYTES:], type=Place)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{token[:40]!r} is no cursor of branches: pass what 'next' of the same question gave"
        ) from error
    if raw[:_DIGEST_BYTES] != request:
        raise InvalidInput(
            f"the cursor {token[:40]!r} is of another question: pass what 'next' of this one gave"
        )
    return place


# The branch of each state, and the newest states.


_NEWEST = select(func.max(STATE.c.id))
_AFTER = (
    select(STATE.c.id).where(STATE.c.id > bindparam("last", type_=BigInteger)).order_by(STATE.c.id)
)
_SEGMENTS = (
    select(STATE.c.uid, func.coalesce(SEGMENT.c.branch, SEGMENT.c.name).label("name"))
    .join_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
)


def branches_of(session: Session, uids: Sequence[str]) -> dict[str, str]:
    """The branch to which each of some states belongs, by uid: the one that captured it.

    States that no branch ever had are left out."""
    return {row.uid: row.name for row in rows_in_batches(session, _SEGMENTS, uids, "uids")}


def newest_id(session: Session) -> int:
    """The row id of the state that was recorded last; 0 when there is none."""
    return int(session.execute(_NEWEST).scalar() or 0)


def states_after(session: Session, last: int) -> list[State]:
    """The states with higher row ids, parents before children."""
    return states(session, list(session.execute(_AFTER, {"last": last}).scalars()))


# The names of all states at once, and which branch came first and so owns the states that several
# have in common.


TRUNKS = ("main", "master")
"""The names that make a branch the trunk of a history; the first of them that exists is it."""

_STAMP = select(
    select(func.coalesce(func.max(EVENT.c.id), 0)).scalar_subquery(),
    select(func.count()).select_from(REF).scalar_subquery(),
    select(func.coalesce(func.sum(REF.c.version), 0)).scalar_subquery(),
)
_REFS = REFS.add_columns(REF.c.state_id)
_SOME_REFS = _REFS.where(REF.c.name.in_(bindparam("names", expanding=True)))
_FEW = 100
_CHANGED = (
    select(EVENT.c.name)
    .distinct()
    .where(EVENT.c.id > bindparam("last", type_=BigInteger))
    .limit(_FEW + 1)
)
_BIRTHS = (
    select(EVENT.c.name, func.min(EVENT.c.id))
    .where(EVENT.c.name.in_(bindparam("names", expanding=True)))
    .group_by(EVENT.c.name)
)


@dataclass(frozen=True, slots=True)
class Names:
    """Branches and tags as they stand. ``stamp`` changes when one of them is created, moved or
    deleted.

    ``at`` has the names of each state, by its row id, in order of name. ``branches`` are in order
    of their rank: the trunk, then the ones created first. ``ranks`` has the lowest rank among those
    that name a state. ``trunk`` is the row id of the trunk's state.
    """

    stamp: tuple[int, ...]
    at: Mapping[int, tuple[Ref, ...]]
    branches: tuple[str, ...]
    ranks: Mapping[int, int]
    trunk: int | None
    births: Mapping[str, int]


def names(session: Session, old: Names | None = None) -> Names:
    """The present names; ``old`` itself if nothing has changed since."""
    stamp = tuple(int(number) for number in session.execute(_STAMP).one())
    if old is not None and old.stamp == stamp:
        return old
    found = None if old is None else _moved(session, old, stamp)
    if found is None:
        found = _read(session, _REFS, {})
    states = {name: id_ for name, (id_, ref) in found.items() if ref.kind is RefKind.BRANCH}
    births = _births(session, states, {} if old is None else old.births)
    branches = sorted(
        states,
        key=lambda name: (
            TRUNKS.index(name) if name in TRUNKS else len(TRUNKS),
            births.get(name, 0),
            name,
        ),
    )
    ranks: dict[int, int] = {}
    for rank, name in enumerate(branches):
        ranks.setdefault(states[name], rank)
    trunk = states[branches[0]] if branches and branches[0] in TRUNKS else None
    at: dict[int, list[Ref]] = {}
    for _, (id_, ref) in sorted(found.items()):
        at.setdefault(id_, []).append(ref)
    return Names(
        stamp, {id_: tuple(refs) for id_, refs in at.items()}, tuple(branches), ranks, trunk, births
    )


_Found = dict[str, tuple[int, Ref]]
"""Refs, with the row ids of their states, by name."""


def _moved(session: Session, old: Names, stamp: tuple[int, ...]) -> _Found | None:
    """``old`` with the names of later events read again; None if the result does not match
    ``stamp``, for example because an event was late."""
    changed = session.execute(_CHANGED, {"last": old.stamp[0]}).scalars().all()
    if len(changed) > _FEW:
        return None
    found = {ref.name: (id_, ref) for id_, refs in old.at.items() for ref in refs}
    for name in changed:
        found.pop(name, None)
    found.update(_read(session, _SOME_REFS, {"names": changed}))
    return (
        found if stamp[1:] == (len(found), sum(ref.version for _, ref in found.values())) else None
    )


def _read(session: Session, statement: Select[Any], values: Mapping[str, object]) -> _Found:
    rows = session.execute(statement, values)
    return {row.name: (int(row.state_id), to_ref(row)) for row in rows}


def _births(
    session: Session, wanted: Mapping[str, int], known: Mapping[str, int]
) -> dict[str, int]:
    """The first event of each branch; for known branches it is not read again."""
    missing = [name for name in wanted if name not in known]
    return {name: known[name] for name in wanted if name in known} | {
        name: int(id_) for name, id_ in rows_in_batches(session, _BIRTHS, missing, "names")
    }


# Small curves: a few points of what a branch has to itself, or of its path if it has nothing, its
# extremes among them.


_STEPS = select(STATE.c.id, STATE.c.step).where(
    STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True))
)


class Lines:
    """Lines that were drawn, the ``most`` latest. Any thread may use it."""

    def __init__(self, most: int = 10_000) -> None:
        self._most, self._lock = most, threading.Lock()
        self._drawn: OrderedDict[tuple[object, ...], Line] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Line | None:
        """The line for a branch as it was: its head's uid, its segment and how many states that
        has, the metric and its summary, and the number of points."""
        with self._lock:
            found = self._drawn.get(key)
            if found is not None:
                self._drawn.move_to_end(key)
            return found

    def put(self, key: tuple[object, ...], line: Line) -> None:
        """Keep it; the one that was longest unused may go."""
        with self._lock:
            self._drawn[key] = line
            if len(self._drawn) > self._most:
                self._drawn.popitem(last=False)


def line_of(session: Session, row: Row, metric: str | None, points: int, drawn: Lines) -> Line:
    """The line of a branch; one that was ``drawn`` is not read again."""
    if metric is None or row.segment_id is None:
        return Line()
    key = row.head, row.segment_id, row.states, metric, repr(row.tally), points
    line = drawn.get(key)
    if line is None:
        if row.first_id is None:
            path = outline(session, row.head_id, metric)
            own = thinned(list(zip(path.ids, path.values, strict=True)), points)
        else:
            own = thinned(
                own_points(
                    session, row.head_id, row.generation, row.segment_id, metric, row.states
                ),
                points,
            )
        rows = rows_in_batches(session, _STEPS, [id_ for id_, _ in own])
        steps = {found.id: found.step for found in rows}
        line = Line(
            tuple([steps[id_] for id_, _ in own]),
            tuple([None if math.isnan(value) else value for _, value in own]),
        )
        drawn.put(key, line)
    return line


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most ``most`` (at least 5) of some points: the ends, and the least and the greatest of
    each of equally large stretches. The first point of a stretch that is not finite is kept too."""
    if len(points) <= most:
        return list(points)
    is_finite = [math.isfinite(value) for _, value in points]
    stretches = (most - 2) // (2 if all(is_finite) else 3)
    kept = {0, len(points) - 1}
    for number in range(stretches):
        places = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        finite = [place for place in places if is_finite[place]]
        if finite:
            kept.add(min(finite, key=lambda place: points[place][1]))
            kept.add(max(finite, key=lambda place: points[place][1]))
        kept.update(next(([place] for place in places if not is_finite[place]), []))
    return [points[place] for place in sorted(kept)]
