"""Segments: which states each branch has to itself, and the summaries of their metrics.

``record`` lets a segment grow by its newest states; everything else that happens to one is here. A
new branch takes the states on its path of first parents that no branch has, also the states of a
deleted branch. When a branch is deleted or moved, a branch that was made at one of its states, and
has no states yet, takes the states up to there. The other states stay in a segment without a
branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from datastates.lineage.lookup import batches, path_columns, segment_path
from datastates.lineage.schema import METRIC, SEGMENT, STATE, STRETCH
from datastates.lineage.states import PLACES, STATES, WHOLE, Tally, place_of

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_BATCH = 1000  # rows written at once
_LAST = 2**31 - 1  # the last stretch that there can be
# any number that others are unlikely to choose
_TAKE_TURN = select(func.pg_advisory_xact_lock(0x6461_7461_7365))

_next = STATE.alias("next")


def begin(session: Session, name: str, head: int) -> tuple[int | None, int | None]:
    """Begin the segment of a branch that was created at a state, by row id, with those first
    parents that no branch has.

    Returns the row ids of the segment and of its first state; None where another writer made the
    segment meanwhile.
    """
    detach(session, name)  # an older branch of that name
    segment = make(session, name, head, None, branch=name)
    return (None, None) if segment is None else (segment, _inherit(session, segment, head))


def detach(session: Session, name: str) -> None:
    """Detach the segment of a branch that was deleted or goes elsewhere.

    Its states stay together, or a branch that was made at one of them takes them.
    """
    segment = session.execute(_LEAVE, {"of": name}).scalar()
    if segment is not None:
        _give_to_fork(session, segment)


def rename(session: Session, old: str, new: str) -> None:
    """Give the segment of a branch that was renamed, and those that it lost, to that branch's
    new name."""
    session.execute(_RENAME, {"of": old, "to": new})


def lock(
    session: Session, names: Collection[str] = (), *, of_state: str = "", takes_turns: bool = True
) -> None:
    """Let no other transaction change the segments of these branches, or the segment of a state by
    uid, until this one ends.

    Transactions that change more than they add also take turns. SQLite has one writer anyway. A
    transaction locks segments before refs and states, so that two of them do not wait for each
    other.
    """
    if session.dialect.name == "postgresql":
        if takes_turns:
            session.execute(_TAKE_TURN)
        session.execute(_LOCK, {"names": list(names), "uid": of_state})


def remeasure(session: Session, state: int) -> None:
    """Compute the summaries again, in the segment of a state, by row id, whose metrics changed."""
    row: Any = session.execute(_HOME, {"state": state}).one()
    if row.segment_id is not None:
        place = place_of(row.generation)
        _summarise(session, row.segment_id, place, place)


def move(session: Session, name: str, old: int, new: int) -> None:
    """Follow a branch that was moved from one state to another, by row ids, other than by a
    capture."""
    row: Any = session.execute(_HOME, {"state": new}).one()
    if row.branch != name:
        begin(session, name, new)
    elif old != new:
        _cut(session, row.segment_id, new, row.generation)
        _summarise(session, row.segment_id, place_of(row.generation + 1))


# What record needs


def make(
    session: Session, name: str, fork: int | None, first: int | None, *, branch: str | None
) -> int | None:
    """The id of a new segment; None if the branch got one from another writer meanwhile."""
    row = {"name": name, "branch": branch, "fork_id": fork, "first_id": first}
    made = session.execute(_MAKE[session.dialect.name], row).scalar()
    return None if made is None else int(made)


def note_first(session: Session, segment: int, first: int) -> None:
    """Note the first state of a segment."""
    session.execute(_NOTE_FIRST, {"segment": segment, "first": first})


def grow(session: Session, tallies: Mapping[tuple[int, str], Tally], ends: Collection[int]) -> None:
    """Add new states to the summaries, by segment and metric, and write the stretches that are
    complete now.

    ``ends`` are the states, by row id, that end a stretch.
    """
    if tallies:  # always in the same order, so that two writers never wait for each other
        rows = [
            {"segment_id": key[0], "key": key[1], "place": WHOLE, **tallies[key].row()}
            for key in sorted(tallies)
        ]
        session.execute(_GROW[session.dialect.name], rows)
    if ends:
        found: defaultdict[tuple[int, int, str], Tally] = defaultdict(Tally)
        for row in sorted(
            session.execute(_ENDING, {"ends": list(ends)}), key=lambda row: int(row.id)
        ):
            found[row.segment_id, place_of(row.low), row.key].add(row.id, row.value)
        _insert(session, found)


# States that move to another segment


def _give_to_fork(session: Session, segment: int) -> None:
    """Give the states of a segment without a branch to a branch that was made at one of them and
    has no states yet.

    If there are several such branches, the one at the newest state gets them.
    """
    fork: Any = session.execute(_HEIR, {"segment": segment}).first()
    if fork is not None:
        _inherit(session, fork.id, fork.fork_id)


def _inherit(session: Session, segment: int, head: int) -> int | None:
    """Give an empty segment a state and its first parents, as long as no branch has them.

    Returns the first of them, by row id."""
    lock(session)
    at = head
    free, emptied = list[Any](), list[int]()
    while at is not None:
        row: Any = session.execute(_HOME, {"state": at}).one()
        if row.branch is not None:
            break
        if row.segment_id is not None:
            _cut(session, row.segment_id, at, row.generation)
            emptied.append(row.segment_id)
        free = _path(session, at, row.segment_id) + free
        at = free[0].parent_id
    if not free:
        return None
    _take(session, segment, [row.id for row in free])
    session.execute(_BEGIN, {"segment": segment, "fork": free[0].parent_id, "first": free[0].id})
    _summarise(session, segment)
    for statement in (_FORGET_ALL, _FORGET_SEGMENTS):
        session.execute(statement, {"ids": emptied})
    return int(free[0].id)


def _cut(session: Session, segment: int, new: int, generation: int) -> None:
    """Move the states after ``new`` in a segment to a segment that no branch has, or to a branch
    that was made there."""
    tip: Any = session.execute(_TIP, {"segment": segment}).one()
    behind = _path(session, tip.id, segment, generation + 1)
    if behind:
        rest = make(session, tip.name, new, behind[0].id, branch=None)
        assert rest is not None
        _take(session, rest, [row.id for row in behind])
        _summarise(session, rest)
        _give_to_fork(session, rest)


def _path(session: Session, head: int, segment: int | None, low: int = 0) -> list[Any]:
    """A state and its first parents, as long as they belong to the segment, or with None to no
    segment; the oldest first."""
    rows = session.execute(_PATH, {"head": head, "segment": segment or 0, "low": low}).all()
    return sorted(rows, key=lambda row: int(row.id))


def _take(session: Session, segment: int, ids: list[int]) -> None:
    for some in batches(ids, _BATCH):
        session.execute(_TAKE, {"segment": segment, "ids": some})


def _summarise(session: Session, segment: int, first: int = 0, last: int = _LAST) -> None:
    """Write the stretches of a segment from ``first`` to ``last`` again, and its whole summary.

    The other stretches are right."""
    tip: Any = session.execute(_TIP, {"segment": segment}).one()
    tail, asked = place_of(tip.generation + 1), {"segment": segment, "first": first, "last": last}
    session.execute(_FORGET, asked)
    found: defaultdict[tuple[int, int, str], Tally] = defaultdict(Tally)
    for row in session.execute(_VALUES, {**asked, "tail": tail}):
        found[segment, place_of(row.generation), row.key].add(row.id, row.value)
    _insert(session, {at: tally for at, tally in found.items() if at[1] < tail})
    whole: defaultdict[tuple[int, int, str], Tally] = defaultdict(Tally)
    for row in session.execute(_STRETCHES, {"segment": segment}):
        whole[segment, WHOLE, row.key].extend(Tally(*(getattr(row, column) for column in PLACES)))
    for (_, place, key), tally in found.items():
        if place >= tail:
            whole[segment, WHOLE, key].extend(tally)
    _insert(session, whole)


def _insert(session: Session, made: Mapping[tuple[int, int, str], Tally]) -> None:
    """Write summaries by segment, place and metric."""
    rows = [
        {"segment_id": at[0], "place": at[1], "key": at[2], **tally.row()}
        for at, tally in made.items()
    ]
    if rows:
        session.execute(insert(STRETCH), rows)


def _ending() -> Any:
    """The walk back from the last state of each stretch to its first state, or to the first state
    of the segment."""
    fixed = (STATE.c.generation - (STATES - 1)).label("low"), STATE.c.segment_id.label("own")
    start = select(*path_columns(STATE), *fixed).where(
        STATE.c.id.in_(bindparam("ends", type_=BigInteger, expanding=True))
    )
    walk = start.cte("ending", recursive=True)
    step = select(*path_columns(_next), walk.c.low, walk.c.own).join_from(
        walk, _next, _next.c.id == walk.c.parent_id
    )
    walk = walk.union_all(step.where(walk.c.generation > walk.c.low, walk.c.segment == walk.c.own))
    values = select(
        walk.c.id, walk.c.own.label("segment_id"), walk.c.low, METRIC.c.key, METRIC.c.value
    )
    return _with_metrics(values, walk).where(walk.c.segment == walk.c.own)


def _with_metrics(chosen: Any, walk: Any) -> Any:
    """Join the metrics. It is an outer join, so that SQLite begins with the path, however short,
    and not with all metrics. States without metrics are dropped afterwards."""
    return chosen.outerjoin_from(walk, METRIC, METRIC.c.state_id == walk.c.id).where(
        func.coalesce(METRIC.c.state_id, 0) > 0
    )


_ENDING = _ending()
_own = segment_path("segment_path")
_PATH = select(_own.c.id, _own.c.parent_id, _own.c.generation).where(
    _own.c.segment == bindparam("segment", type_=BigInteger)
)
_place = STATE.c.generation // STATES
_is_asked = _place.between(bindparam("first"), bindparam("last")) | (_place >= bindparam("tail"))
_VALUES = (
    _with_metrics(select(STATE.c.id, STATE.c.generation, METRIC.c.key, METRIC.c.value), STATE)
    .where(STATE.c.segment_id == bindparam("segment", type_=BigInteger), _is_asked)
    .order_by(STATE.c.id)
)
_at_segment = bindparam("segment", type_=BigInteger)
_of_state = select(STATE.c.segment_id).where(STATE.c.uid == bindparam("uid"))
_LOCK = (
    select(SEGMENT.c.id)
    .where(SEGMENT.c.branch.in_(bindparam("names", expanding=True)) | SEGMENT.c.id.in_(_of_state))
    .order_by(SEGMENT.c.id)
    .with_for_update()
)
_HOME = (
    select(STATE.c.segment_id, STATE.c.generation, SEGMENT.c.branch)
    .outerjoin_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
    .where(STATE.c.id == bindparam("state", type_=BigInteger))
)
_newest = select(func.max(_next.c.id)).where(_next.c.segment_id == _at_segment).scalar_subquery()
_TIP = (
    select(STATE.c.id, STATE.c.generation, SEGMENT.c.name)
    .join_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
    .where(STATE.c.id == _newest)
)
_RENAME = (
    update(SEGMENT)
    .where(SEGMENT.c.name == bindparam("of"))
    .values(
        branch=case((SEGMENT.c.branch == bindparam("of"), bindparam("to")), else_=SEGMENT.c.branch),
        name=bindparam("to"),
    )
)
# A subquery of one value, so that SQLite looks up the fork of each branch and does not read all
# states of the segment.
_forked_from = select(STATE.c.segment_id).where(STATE.c.id == SEGMENT.c.fork_id).scalar_subquery()
_HEIR = (
    select(SEGMENT.c.id, SEGMENT.c.fork_id)
    .where(SEGMENT.c.branch.is_not(None), SEGMENT.c.first_id.is_(None), _forked_from == _at_segment)
    .order_by(SEGMENT.c.fork_id.desc(), SEGMENT.c.id)
    .limit(1)
)
_BEGIN = (
    update(SEGMENT)
    .where(SEGMENT.c.id == _at_segment)
    .values(
        fork_id=bindparam("fork", type_=BigInteger), first_id=bindparam("first", type_=BigInteger)
    )
)
_FORGET_ALL, _FORGET_SEGMENTS = (
    delete(column.table).where(column.in_(bindparam("ids", expanding=True)))
    for column in (STRETCH.c.segment_id, SEGMENT.c.id)
)
_LEAVE = (
    update(SEGMENT)
    .where(SEGMENT.c.branch == bindparam("of"))
    .values(branch=None)
    .returning(SEGMENT.c.id)
)
_MAKE = {
    name: made(SEGMENT).on_conflict_do_nothing().returning(SEGMENT.c.id)
    for name, made in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
_NOTE_FIRST = (
    update(SEGMENT)
    .where(SEGMENT.c.id == bindparam("segment"), SEGMENT.c.first_id.is_(None))
    .values(first_id=bindparam("first", type_=BigInteger))
)
_TAKE = (
    update(STATE)
    .where(STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .values(segment_id=bindparam("segment", type_=BigInteger))
)
_FORGET = delete(STRETCH).where(
    STRETCH.c.segment_id == bindparam("segment"),
    (STRETCH.c.place == WHOLE) | STRETCH.c.place.between(bindparam("first"), bindparam("last")),
)
_STRETCHES = (
    select(STRETCH)
    .where(STRETCH.c.segment_id == bindparam("segment"), STRETCH.c.place >= 0)
    .order_by(STRETCH.c.place)
)


def _growing(made: Any) -> Any:
    """Merge new values into a summary.

    The existing ones are older: they keep the first state, and extremes that are equally good."""
    # by name where a collection of columns has a method of that name
    old, new = (
        STRETCH.c,
        made.excluded,
    )
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


_GROW = {
    "sqlite": _growing(sqlite.insert(STRETCH)),
    "postgresql": _growing(postgresql.insert(STRETCH)),
}
