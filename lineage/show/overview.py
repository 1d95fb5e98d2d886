"""``branches``: every branch of a lineage, chosen, sorted and grouped; see ``show/branches`` for what is told of each.

All branches are looked at for what they are sorted by, in a few queries whose cost is that of the branches. What else is told is read
for those of one page.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, bindparam, func, select

from datastates.errors import InvalidInput
from datastates.lineage.change import runs
from datastates.lineage.schema import MetricRow, RefRow, RunRow, SegmentRow, StateRow, StretchRow, from_us, table, to_us
from datastates.lineage.search.conditions import Scope, condition
from datastates.lineage.search.query import parse_query
from datastates.lineage.states import RefKind, Run, Status, Value
from datastates.lineage.tally import WHOLE

from .branches import Branch, Branches, Group, Life, Living, Origin, Point, Setting
from .goals import Direction, direction_of
from .grouping import attributes_of, configs_of, groups_of
from .relevance import by_relevance
from .sparkline import lines_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["POINTS", "SORTS", "Sort", "branches"]

POINTS = 60
"""Of a branch's curve for a glance."""

_SEAL_BYTES = 8
_GONE = [status.value for status in Status if not status.is_restorable]
_SAFE = [Status.DURABLE.value, Status.REPLICATED.value, Status.EXTERNAL.value]
_DONE = "done/"  # how the tags begin that studies put on what they have finished


class Sort(StrEnum):
    """What branches are sorted by."""

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
_FALLING = {Sort.CHANGED, Sort.BEGAN, Sort.STEP, Sort.STATES, Sort.RESTORABLE, Sort.DURABLE, Sort.BYTES, Sort.TOOK}
"""What is sorted by so that the most comes first, unless it is asked for the other way."""
_COUNTED = {Sort.RESTORABLE, Sort.DURABLE, Sort.BYTES}


def branches(
    session: Session,
    query: str = "",
    *,
    name: str = "",
    metric: str | None = None,
    direction: Direction | None = None,
    sort: str = "changed",
    group: str | None = None,
    after: str | None = None,
    limit: int | None = None,
    living: Living | None = None,
    now: datetime | None = None,
) -> Branches:
    """The branches that were asked for.

    :param query: a condition, as for states; it must hold of a branch's newest state.
    :param name: a part of the names that are wanted.
    :param metric: what ``last``, ``best`` and ``line`` are of; None: the most relevant one that branches have.
    :param direction: which of its values are better; None: by its name.
    :param sort: one of ``SORTS``, in the order in which people want it: the best, newest, longest first; ``-`` before it turns that.
    :param group: ``study``, ``config.KEY`` or ``attr.KEY``: branches with the same value stand together.
    :param after: ``next`` of the page before, with all else unchanged.
    :param limit: at most so many; None: all.
    :param living: tells whether the process of a run lives that did not finish.
    :raises SyntaxProblem: the query does not parse; points at the column.
    :raises InvalidInput: one of these is none that there is.
    """
    order, turned = _order(sort)
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}: a page has at least one branch")
    keys = _metrics(session)
    metric = metric if metric is not None else next(iter(keys), None)
    direction = direction or (Direction.MIN if metric is None else direction_of(metric))
    rows = _rows(session, metric, direction)
    total = len(rows)
    rows = [row for row in rows if name in row.name]
    if query.strip():
        wanted = _matching(session, query, now)
        rows = [row for row in rows if row.head_id in wanted]
    if order in _COUNTED:
        _count(session, rows)
    if group is not None:
        _group(session, rows, group)
    signed = -1 if (order in _FALLING) != turned else 1
    if order in (Sort.BEST, Sort.LAST) and direction is Direction.MAX:
        signed = -signed
    placed = sorted(((_key(row, order, signed), row) for row in rows), key=itemgetter(0))
    seal = _seal_of(query, name, metric, direction, sort, group)
    if after is not None:
        last = _unseal(after, seal)
        placed = [pair for pair in placed if pair[0] > last]
    shown = [row for _, row in placed[:limit]]
    return Branches(
        items=_Page(session, shown, metric, direction, living).branches(),
        next=_seal(placed[limit - 1][0], seal) if limit is not None and len(placed) > limit else None,
        total=total,
        matching=len(rows),
        metric=metric,
        direction=direction,
        metrics=tuple(keys),
        groups=() if group is None else _groups(rows, direction),
    )


# What is known of all


@dataclass(slots=True)
class _Row:
    """One branch, as far as the few queries for all of them say."""

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
        return self.generation + 1 if self.fork_generation is None else self.generation - self.fork_generation

    @property
    def took_us(self) -> int:
        return 0 if self.began_us is None else max(0, self.changed_us - self.began_us)


def _rows(session: Session, metric: str | None, direction: Direction) -> list[_Row]:
    rows = [_Row(*row) for row in session.execute(_ALL)]
    if metric is None:
        return rows
    tallies = {row.segment_id: row for row in session.execute(_TALLIES, {"of": metric})}
    is_least = direction is Direction.MIN
    for row in rows:
        tally = row.tally = tallies.get(row.segment_id)
        if tally is not None:
            row.best, row.best_id = (tally.least, tally.least_id) if is_least else (tally.most, tally.most_id)
    return rows


def _metrics(session: Session) -> list[str]:
    """The metrics of all branches, by relevance."""
    return by_relevance(session.execute(_METRICS).scalars())


def _matching(session: Session, query: str, now: datetime | None) -> set[int]:
    parsed = parse_query(query)
    if parsed.order or parsed.limit is not None:
        raise InvalidInput(f"{query!r} orders or limits: branches are chosen by a condition alone, and sorted by 'sort'")
    if parsed.condition is None:
        return set(session.execute(_HEADS).scalars())
    scope = Scope(session, to_us(now), query)
    return set(session.execute(select(_state.c.id).where(_state.c.id.in_(_HEADS), condition(parsed.condition, scope))).scalars())


def _count(session: Session, rows: Sequence[_Row]) -> None:
    """How many states of each status, and bytes, these branches have to themselves; many at once are read along the index."""
    ids = [row.segment_id for row in rows if row.segment_id is not None]
    found: dict[int, list[int]] = {}
    counts = [session.execute(_COUNTS_OF, {"ids": ids[start : start + _BATCH]}) for start in range(0, len(ids), _BATCH)]
    for each in counts:
        for segment_id, status, count, size in each:
            numbers = found.setdefault(segment_id, [0, 0, 0])
            numbers[0] += 0 if status in _GONE else count
            numbers[1] += count if status in _SAFE else 0
            numbers[2] += int(size or 0)
    for row in rows:
        row.restorable, row.durable, row.bytes = found.get(row.segment_id or 0, (0, 0, 0))


def _group(session: Session, rows: Sequence[_Row], group: str) -> None:
    values = groups_of(session, group, {row.head_id: row.run_id for row in rows})
    for row in rows:
        row.group = values.get(row.head_id)


def _groups(rows: Sequence[_Row], direction: Direction) -> tuple[Group, ...]:
    found: dict[tuple[int, float, str], list[_Row]] = {}
    for row in rows:
        found.setdefault(_group_key(row.group), []).append(row)
    sign = 1 if direction is Direction.MIN else -1
    made = []
    for _, members in sorted(found.items()):
        best = min((row for row in members if row.best is not None), key=lambda row: sign * (row.best or 0.0), default=None)
        made.append(Group(members[0].group, len(members), None if best is None else best.best, None if best is None else best.name))
    return tuple(made)


# Order, and places in it


_Key = tuple[tuple[int, float, str], int, float, tuple[int, ...]]


def _order(sort: str) -> tuple[Sort, bool]:
    turned = sort.startswith("-")
    try:
        return Sort(sort.removeprefix("-")), turned
    except ValueError:
        raise InvalidInput(f"branches cannot be sorted by {sort!r}: choose among {', '.join(SORTS)}, with '-' for the other way") from None


def _key(row: _Row, order: Sort, sign: int) -> _Key:
    """The place of a branch: its group, then what it has before what it lacks, then its value, then its name."""
    name = tuple(map(ord, row.name))
    group = _group_key(row.group)
    if order is Sort.NAME:
        return group, 0, 0.0, name if sign > 0 else (*(-each for each in name), 1)
    value = _value(row, order)
    lacks = value is None or math.isnan(value)
    return group, int(lacks), 0.0 if lacks or value is None else sign * float(value), name


def _group_key(value: Value) -> tuple[int, float, str]:
    match value:
        case None:
            return 2, 0.0, ""
        case str():
            return 1, 0.0, value
    return 0, float(value) if value == value else math.inf, ""


def _value(row: _Row, order: Sort) -> float | None:
    match order:
        case Sort.CHANGED:
            return row.changed_us
        case Sort.BEGAN:
            return row.began_us
        case Sort.BEST:
            return row.best
        case Sort.LAST:
            return None if row.tally is None else row.tally.last
        case Sort.STEP:
            return row.step
        case Sort.STATES:
            return row.states
        case Sort.RESTORABLE:
            return row.restorable
        case Sort.DURABLE:
            return row.durable
        case Sort.BYTES:
            return row.bytes
    return row.took_us


def _seal_of(*asked: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=_SEAL_BYTES, person=b"ds.branches").digest()


def _seal(key: _Key, seal: bytes) -> str:
    return base64.urlsafe_b64encode(seal + msgspec.msgpack.encode(key)).decode().rstrip("=")


def _unseal(token: str, seal: bytes) -> _Key:
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        key: _Key = msgspec.msgpack.decode(raw[_SEAL_BYTES:], type=_Key)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidInput(f"{token[:40]!r} is no cursor of branches: pass what 'next' of the same question gave") from error
    if raw[:_SEAL_BYTES] != seal:
        raise InvalidInput(f"the cursor {token[:40]!r} is of another question: pass what 'next' of this one gave")
    return key


# What is told of those of one page


@dataclass(slots=True)
class _Page:
    """Some branches, and what else is read for them."""

    session: Session
    rows: Sequence[_Row]
    metric: str | None
    direction: Direction
    living: Living | None
    points: dict[int, Any] = field(default_factory=dict)

    def branches(self) -> tuple[Branch, ...]:
        session, rows = self.session, self.rows
        _count(session, rows)
        best = self._restorable()
        ids = [id_ for row in rows for id_ in (row.best_id, None if row.tally is None else row.tally.last_id)]
        self.points = _states(session, [id_ for id_ in (*ids, *(id_ for id_, _ in best.values())) if id_ is not None])
        run_ids = {id_ for row in rows for id_ in (row.run_id, row.fork_run_id) if id_ is not None}
        known = _runs(session, run_ids)
        configs = configs_of(session, list(run_ids))
        studies, variants = (attributes_of(session, [row.head_id for row in rows], key) for key in ("study", "variant"))
        lines = lines_of(session, [(row.head_id, row.segment_id, row.states) for row in rows], self.metric, POINTS)
        rates = _rates(session, rows)
        done = set(session.execute(_FINISHED).all())
        made = []
        for row in rows:
            run = known.get(row.run_id or 0)
            tally, restorable = row.tally, best.get(row.name)
            made.append(
                Branch(
                    name=row.name,
                    head=row.head,
                    step=row.step,
                    status=Status(row.status),
                    fork=_origin(row),
                    states=row.states,
                    restorable=row.restorable,
                    durable=row.durable,
                    bytes=row.bytes,
                    last=None if tally is None else self._point(tally.last_id, tally.last),
                    best=self._point(row.best_id, row.best) if row.best_id else None,
                    best_restorable=None if restorable is None else self._point(*restorable),
                    line=lines[row.head_id, row.segment_id],
                    config=_differences(configs, row),
                    run=None if run is None else run.uid,
                    host=None if run is None else run.host,
                    life=Life.ENDED if (_DONE + row.name, row.head_id) in done else _life(run, self.living),
                    began_at=None if row.began_us is None else from_us(row.began_us),
                    changed_at=from_us(row.changed_us),
                    took_s=row.took_us / 1e6,
                    steps_per_s=rates.get(row.name),
                    study=_text(studies.get(row.head_id)),
                    variant=_text(variants.get(row.head_id)),
                    group=row.group,
                )
            )
        return tuple(made)

    def _point(self, id_: int, value: float | None) -> Point:
        state = self.points[id_]
        return Point(state.uid, state.step, value, Status(state.status))

    def _restorable(self) -> dict[str, tuple[int, float]]:
        """The best value that can be restored of each branch, and the row id of its state."""
        found: dict[str, tuple[int, float]] = {}
        at_best = _states(self.session, [row.best_id for row in self.rows if row.best_id is not None])
        statement = _BEST[self.direction]
        for row in self.rows:
            if row.best_id is None or row.best is None:
                continue
            if Status(at_best[row.best_id].status).is_restorable:
                found[row.name] = row.best_id, row.best
            elif row.restorable:
                best = self.session.execute(statement, {"segment": row.segment_id, "of": self.metric}).first()
                if best is not None:
                    found[row.name] = best.id, best.value
        return found


def _origin(row: _Row) -> Origin | None:
    if row.fork is None or row.fork_step is None:
        return None
    return Origin(row.fork, row.fork_step, row.parent or row.parent_name, row.parent is None and row.parent_name is not None)


def _differences(configs: Mapping[int, Mapping[str, Value]], row: _Row) -> tuple[Setting, ...]:
    ours, theirs = configs.get(row.run_id or 0, {}), configs.get(row.fork_run_id or 0, {})
    keys = sorted(ours.keys() | theirs.keys())
    return tuple(
        Setting(key, ours.get(key), theirs.get(key))
        for key in keys
        if (key in ours) != (key in theirs) or not _is_same(ours[key], theirs[key])
    )


def _is_same(one: Value, other: Value) -> bool:
    return (one == other and isinstance(one, bool) == isinstance(other, bool)) or (one != one and other != other)


def _life(run: Run | None, living: Living | None) -> Life:
    if run is None:
        return Life.UNKNOWN
    if run.finished_at is not None:
        return Life.ENDED
    return Life.UNKNOWN if living is None else living(run)


def _text(value: Value) -> str | None:
    return None if value is None else str(value)


def _states(session: Session, ids: Sequence[int]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    wanted = sorted(set(ids))
    for start in range(0, len(wanted), _BATCH):
        found.update((row.id, row) for row in session.execute(_SOME, {"ids": wanted[start : start + _BATCH]}))
    return found


def _runs(session: Session, ids: set[int]) -> dict[int, Run]:
    wanted = sorted(ids)
    found: dict[int, Run] = {}
    for start in range(0, len(wanted), _BATCH):
        found.update(runs.by_ids(session, wanted[start : start + _BATCH]))
    return found


def _rates(session: Session, rows: Sequence[_Row]) -> dict[str, float]:
    """Steps a second over the latest captures of each branch's newest run: back to what its jumps lead to (see ``search/walk``)."""
    found: dict[str, float] = {}
    ends: defaultdict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        if row.states > 1:
            ends[row.head_id].append(row)
    wanted = sorted(ends)
    for start in range(0, len(wanted), _BATCH):
        for head, *before in session.execute(_BACK, {"ids": wanted[start : start + _BATCH]}):
            back = list(zip(*[iter(before)] * 4, strict=True))  # the farthest first
            for row in ends[head]:
                rate = _rate(row, back)
                if rate is not None:
                    found[row.name] = rate
    return found


def _rate(row: _Row, back: Sequence[Any]) -> float | None:
    for id_, run_id, step, created_us in back:
        if id_ is not None and id_ >= (row.first_id or 0) and run_id == row.run_id and row.changed_us > created_us:
            return float(max(0.0, (row.step - step) * 1e6 / (row.changed_us - created_us)))
    return None


# The statements

_BATCH = 500

_state, _run, _ref, _segment, _stretch = (table(row) for row in (StateRow, RunRow, RefRow, SegmentRow, StretchRow))
_metric = table(MetricRow)
_fork, _first, _parent = _state.alias("fork"), _state.alias("first"), _segment.alias("parent")
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_is_branch = _ref.c.kind == RefKind.BRANCH.value
_HEADS = select(_ref.c.state_id).where(_is_branch)
_ALL = (
    select(_ref.c.name, _state.c.id, _state.c.uid, _state.c.step, _state.c.generation, _state.c.status, _state.c.created_at)
    .add_columns(_state.c.run_id, _segment.c.id, _segment.c.fork_id)
    .add_columns(_fork.c.uid, _fork.c.step, _fork.c.generation, _fork.c.run_id, _parent.c.branch, _parent.c.name)
    .add_columns(_segment.c.first_id, _first.c.created_at)
    .join_from(_ref, _state, _state.c.id == _ref.c.state_id)
    .outerjoin(_segment, _segment.c.branch == _ref.c.name)
    .outerjoin(_fork, _fork.c.id == _segment.c.fork_id)
    .outerjoin(_parent, _parent.c.id == _fork.c.segment_id)
    .outerjoin(_first, _first.c.id == _segment.c.first_id)
    .where(_is_branch)
)
_own = (_segment.c.id == _stretch.c.segment_id) & _segment.c.branch.is_not(None)
_TALLIES = select(_stretch).join_from(_segment, _stretch, _own).where(_stretch.c.key == bindparam("of"), _stretch.c.place == WHOLE)
_METRICS = select(_stretch.c.key).distinct().join_from(_segment, _stretch, _own).where(_stretch.c.place == WHOLE)
_COUNTS_OF = (
    select(_state.c.segment_id, _state.c.status, func.count(), func.sum(_state.c.bytes_new))
    .where(_state.c.segment_id.in_(_ids))
    .group_by(_state.c.segment_id, _state.c.status)
)
_SOME = select(_state.c.id, _state.c.uid, _state.c.step, _state.c.status).where(_state.c.id.in_(_ids))
_FINISHED = select(_ref.c.name, _ref.c.state_id).where(_ref.c.kind == RefKind.TAG.value, _ref.c.name.like(_DONE + "%"))


def _best(direction: Direction) -> Any:
    value = _metric.c.value
    held = _state.c.status.not_in(_GONE)
    finite = value.is_not(None) & (value > -math.inf) & (value < math.inf)
    found = select(_state.c.id, value).join_from(_state, _metric, (_metric.c.state_id == _state.c.id) & (_metric.c.key == bindparam("of")))
    found = found.where(_state.c.segment_id == bindparam("segment", type_=BigInteger), held, finite)
    return found.order_by(value.asc() if direction is Direction.MIN else value.desc(), _state.c.id).limit(1)


def _back() -> Any:
    """Each state with what it leads to by its jump, by the jump of that, and so on, the farthest first; its parent comes last."""
    steps = [_state.alias(f"back_{number}") for number in range(5)]
    before: Any = _state
    joined: Any = _state
    for number, step in enumerate(steps[:-1]):
        joined = joined.outerjoin(step, step.c.id == before.c.jump_id)
        before = steps[number]
    joined = joined.outerjoin(steps[-1], steps[-1].c.id == _state.c.parent_id)
    farthest = [*reversed(steps[:-1]), steps[-1]]
    columns = [step.c[name] for step in farthest for name in ("id", "run_id", "step", "created_at")]
    return select(_state.c.id, *columns).select_from(joined).where(_state.c.id.in_(_ids))


_BEST = {direction: _best(direction) for direction in Direction}
_BACK = _back()
