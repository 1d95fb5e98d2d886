"""Segments: which states each branch has to itself, and the summaries of their metrics.

``record`` lets a segment grow by its newest states; everything else that happens to one is here. A new branch adopts those of its ancestors
that no branch has. A branch that goes back leaves the states after it to a segment without a branch; one that goes elsewhere begins a new
segment there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Connection, Integer, bindparam, case, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from datastates.lineage.batches import batches
from datastates.lineage.schema import MetricRow, SegmentRow, StateRow, StretchRow, table
from datastates.lineage.tally import PLACES, STATES, WHOLE, Tally, place_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["begin", "grow", "leave", "make", "move", "note_first"]

_BATCH = 1000  # rows written at once

_state, _metric, _segment, _stretch = table(StateRow), table(MetricRow), table(SegmentRow), table(StretchRow)
_next = _state.alias("next")


def begin(session: Session, name: str, head: int) -> None:
    """Begin the segment of a branch that was created at a state, by row id: it gets the ancestors that no branch ever had."""
    leave(session, name)  # an older branch of that name
    connection = session.connection()
    free = _path(connection, head, None)
    segment = make(connection, name, head if not free else free[0].parent_id, free[0].id if free else None, branch=name)
    if free and segment is not None:
        _take(connection, segment, [row.id for row in free])
        _summarise(connection, segment, free, _values(connection, head, segment))


def leave(session: Session, name: str) -> None:
    """Detach the segment of a branch that was deleted or goes elsewhere: its states stay together."""
    session.connection().execute(_LEAVE, {"of": name})


def move(session: Session, name: str, old: int, new: int) -> None:
    """Follow a branch that was moved from one state to another, by row ids, other than by a capture."""
    connection = session.connection()
    place: Any = connection.execute(_PLACE, {"name": name, "new": new}).first()
    if place is None or place.segment_id is None or place.segment_id != place.of_new:
        begin(session, name, new)
    elif old != new:
        _cut(connection, name, place.segment_id, old, new, place.generation)


# What record needs


def make(connection: Connection, name: str, fork: int | None, first: int | None, *, branch: str | None) -> int | None:
    """The id of a new segment; None if the branch got one from another writer meanwhile."""
    row = {"name": name, "branch": branch, "fork_id": fork, "first_id": first}
    made = connection.execute(_MAKE[connection.dialect.name], row).scalar()
    return None if made is None else int(made)


def note_first(connection: Connection, segment: int, first: int) -> None:
    """Note the first state of a segment."""
    connection.execute(_NOTE_FIRST, {"segment": segment, "first": first})


def grow(connection: Connection, tallies: Mapping[tuple[int, str], Tally], ends: Collection[int]) -> None:
    """Add new states to the summaries, by segment and metric, and write the stretches that are complete now.

    ``ends`` are the states, by row id, that end a stretch.
    """
    if tallies:  # always in the same order, so that two writers never wait for each other
        rows = [{"segment_id": key[0], "key": key[1], "place": WHOLE, **tallies[key].row()} for key in sorted(tallies)]
        connection.execute(_GROW[connection.dialect.name], rows)
    if ends:
        found: defaultdict[tuple[int, int, str], Tally] = defaultdict(Tally)
        for row in sorted(connection.execute(_ENDING, {"ends": list(ends)}), key=lambda row: int(row.id)):
            found[row.segment_id, place_of(row.low), row.key].add(row.id, row.value)
        _insert(connection, found)


# The rest


def _cut(connection: Connection, name: str, segment: int, old: int, new: int, generation: int) -> None:
    """Move the states after ``new`` in a segment to a segment that no branch has."""
    behind = _path(connection, old, segment, generation + 1)
    if not behind:
        return
    rest = make(connection, name, new, behind[0].id, branch=None)
    assert rest is not None
    whole_upto = place_of(generation + 1)
    connection.execute(_FORGET, {"segment": segment, "from_place": whole_upto})
    _take(connection, rest, [row.id for row in behind])
    _summarise(connection, rest, behind, _values(connection, old, rest))
    kept: defaultdict[str, Tally] = defaultdict(Tally)
    for row in connection.execute(_STRETCHES, {"segment": segment}):
        kept[row.key].extend(Tally(*(getattr(row, column) for column in PLACES)))
    for key, tally in _tallies(_values(connection, new, segment, whole_upto * STATES)).items():
        kept[key].extend(tally)
    _insert(connection, {(segment, WHOLE, key): tally for key, tally in kept.items()})


def _path(connection: Connection, head: int, segment: int | None, low: int = 0) -> list[Any]:
    """A state and its first parents, as long as they belong to the segment, or with None to no segment; the oldest first."""
    rows = connection.execute(_PATH, {"head": head, "segment": segment or 0, "low": low}).all()
    return sorted(rows, key=lambda row: int(row.id))


def _values(connection: Connection, head: int, segment: int, low: int = 0) -> list[Any]:
    """The metrics of a state and of its first parents in its segment, down to a generation; those of the oldest state first."""
    rows = connection.execute(_VALUES, {"head": head, "segment": segment, "low": low}).all()
    return sorted(rows, key=lambda row: int(row.id))


def _tallies(rows: Iterable[Any]) -> dict[str, Tally]:
    found: defaultdict[str, Tally] = defaultdict(Tally)
    for row in rows:
        found[row.key].add(row.id, row.value)
    return found


def _take(connection: Connection, segment: int, ids: list[int]) -> None:
    for some in batches(ids, _BATCH):
        connection.execute(_TAKE, {"segment": segment, "ids": some})


def _summarise(connection: Connection, segment: int, states: list[Any], values: Iterable[Any]) -> None:
    """Write every stretch of a segment that contains these states, given oldest first."""
    places = {row.id: place_of(row.generation) for row in states}
    by_place: defaultdict[int, list[Any]] = defaultdict(list)
    for row in values:
        by_place[places[row.id]].append(row)
    made: defaultdict[tuple[int, int, str], Tally] = defaultdict(Tally)
    incomplete = place_of(states[-1].generation + 1)
    for place, rows in sorted(by_place.items()):
        for key, tally in _tallies(rows).items():
            made[segment, WHOLE, key].extend(tally)
            if place < incomplete:
                made[segment, place, key] = tally
    _insert(connection, made)


def _insert(connection: Connection, made: Mapping[tuple[int, int, str], Tally]) -> None:
    """Write summaries by segment, place and metric."""
    rows = [{"segment_id": at[0], "place": at[1], "key": at[2], **tally.row()} for at, tally in made.items()]
    if rows:
        connection.execute(insert(_stretch), rows)


def _columns(state: Any) -> tuple[Any, ...]:
    return state.c.id, state.c.parent_id, state.c.generation, func.coalesce(state.c.segment_id, 0).label("segment")


def _walk() -> Any:
    """A state and its first parents down to ``low``, as long as they are in ``segment``, where 0 means none.

    The conditions that stop the walk are on the path: for a condition on the joined table SQLite would first read all of that table.
    """
    low, wanted = bindparam("low", type_=Integer), bindparam("segment", type_=BigInteger)
    start = select(*_columns(_state)).where(_state.c.id == bindparam("head", type_=BigInteger), _state.c.generation >= low)
    walk = start.cte("segment_path", recursive=True)
    step = select(*_columns(_next)).join_from(walk, _next, _next.c.id == walk.c.parent_id)
    walk = walk.union_all(step.where(walk.c.generation > low, walk.c.segment == wanted))
    return select(walk.c.id, walk.c.parent_id, walk.c.generation).where(walk.c.segment == wanted).cte("own")


def _ending() -> Any:
    """The walk back from the last state of each stretch to its first one, or to that of the segment."""
    fixed = (_state.c.generation - (STATES - 1)).label("low"), _state.c.segment_id.label("own")
    start = select(*_columns(_state), *fixed).where(_state.c.id.in_(bindparam("ends", type_=BigInteger, expanding=True)))
    walk = start.cte("ending", recursive=True)
    step = select(*_columns(_next), walk.c.low, walk.c.own).join_from(walk, _next, _next.c.id == walk.c.parent_id)
    walk = walk.union_all(step.where(walk.c.generation > walk.c.low, walk.c.segment == walk.c.own))
    values = select(walk.c.id, walk.c.own.label("segment_id"), walk.c.low, _metric.c.key, _metric.c.value)
    return _with_metrics(values, walk).where(walk.c.segment == walk.c.own)


def _with_metrics(chosen: Any, walk: Any) -> Any:
    """Join the metrics: an outer join, so that SQLite begins with the path, however short, and not with all metrics; states without any are
    dropped afterwards."""
    return chosen.outerjoin_from(walk, _metric, _metric.c.state_id == walk.c.id).where(func.coalesce(_metric.c.state_id, 0) > 0)


_ENDING, _own = _ending(), _walk()
_PATH = select(_own.c.id, _own.c.parent_id, _own.c.generation)
_VALUES = _with_metrics(select(_own.c.id, _metric.c.key, _metric.c.value), _own)
_LEAVE = update(_segment).where(_segment.c.branch == bindparam("of")).values(branch=None)
_PLACE = (
    select(_segment.c.id.label("segment_id"), _state.c.segment_id.label("of_new"), _state.c.generation)
    .select_from(_state.outerjoin(_segment, _segment.c.branch == bindparam("name")))
    .where(_state.c.id == bindparam("new", type_=BigInteger))
)
_MAKE = {
    name: made(_segment).on_conflict_do_nothing().returning(_segment.c.id)
    for name, made in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
_NOTE_FIRST = (
    update(_segment)
    .where(_segment.c.id == bindparam("segment"), _segment.c.first_id.is_(None))
    .values(first_id=bindparam("first", type_=BigInteger))
)
_TAKE = (
    update(_state)
    .where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .values(segment_id=bindparam("segment", type_=BigInteger))
)
_FORGET = delete(_stretch).where(
    _stretch.c.segment_id == bindparam("segment"), (_stretch.c.place == WHOLE) | (_stretch.c.place >= bindparam("from_place"))
)
_STRETCHES = select(_stretch).where(_stretch.c.segment_id == bindparam("segment"), _stretch.c.place >= 0).order_by(_stretch.c.place)


def _growing(made: Any) -> Any:
    """Merge new values into a summary. The existing ones are older: they keep the first state, and extremes that are equally good."""
    old, new = _stretch.c, made.excluded  # by name where a collection of columns has a method of that name
    is_less = (new.least.is_not(None)) & (old.least.is_(None) | (new.least < old.least))
    is_more = (new.most.is_not(None)) & (old.most.is_(None) | (new.most > old.most))
    return made.on_conflict_do_update(
        index_elements=[old.segment_id, old.key, old.place],
        set_={
            "count": old["count"] + new["count"],
            "gaps": old.gaps + new.gaps,
            "total": old.total + new.total,
            "least": case((is_less, new.least), else_=old.least),
            "least_id": case((is_less, new.least_id), else_=old.least_id),
            "most": case((is_more, new.most), else_=old.most),
            "most_id": case((is_more, new.most_id), else_=old.most_id),
            "last": new["last"],
            "last_id": new.last_id,
            "gap_id": func.coalesce(old.gap_id, new.gap_id),
        },
    )


_GROW = {"sqlite": _growing(sqlite.insert(_stretch)), "postgresql": _growing(postgresql.insert(_stretch))}
