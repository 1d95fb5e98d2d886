"""The durable states that retention looks at: pages of the states in a folder of packs, and the
states that must stay.

A function that looks at a whole lineage visits each state at most once, however many names lead
there. It reads each page in its own transaction, so that no transaction is long. States and parents
never change, so the pages fit together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Integer,
    Select,
    bindparam,
    exists,
    func,
    or_,
    select,
    union,
)

from datastates.lineage.lookup import rows_in_batches
from datastates.lineage.schema import (
    EDGE,
    METRIC,
    PART,
    REF,
    REPLICA,
    RUN,
    SEGMENT,
    STATE,
    STRETCH,
)
from datastates.lineage.states import GONE, WHOLE

from .incomplete import WHYS
from .walk import above, first_parents_of

if TYPE_CHECKING:
    from datastates.lineage.database import Database
    from datastates.lineage.session import Session


_PAGE_MIN = 32
_PAGE = 5000
_NEWEST_PROCESSES = 20
_NOWHERE = 2**63 - 1  # above each row id
_WORST = (-math.inf, 0)


@dataclass(frozen=True, slots=True)
class DurableState:
    """A state that a folder of packs holds, as the lineage records it.

    ``created_us`` is in microseconds since the epoch."""

    id: int
    uid: str
    segment: int
    generation: int
    step: int
    created_us: int
    world_size: int
    metrics: Mapping[str, float]


def durable(
    database: Database, *, tier: str, node: str, keys: Collection[str] = ()
) -> Iterator[list[DurableState]]:
    """The states that a tier of a node holds, in the order of their row ids, in pages of ``_PAGE``.
    They have the values of the metrics ``keys`` that are numbers. A separate transaction reads each
    page.
    """
    after, place = 0, {"on_tier": tier, "on_node": node}
    while True:
        metrics: defaultdict[int, dict[str, float]] = defaultdict(dict)
        with database.read() as session:
            rows = session.execute(_PAGES, {**place, "after": after}).all()
            ids = [row.id for row in rows] if keys else []
            for state_id, key, value in rows_in_batches(session, _METRICS, ids, keys=list(keys)):
                if value is not None:
                    metrics[state_id][key] = value
        yield [DurableState(*row, metrics.get(row.id, _NONE)) for row in rows]
        if len(rows) < _PAGE:
            return
        after = rows[-1].id


def needed_states(database: Database, held: Set[int]) -> dict[int, str]:
    """The states of a folder that must stay, by row id, with the reason. The folder holds ``held``.

    These are the states that names lead to, or their nearest first parent that is held; and the
    states where branches forked.
    """
    with database.read() as session:
        found = {fork: f"branch {branch!r} forks here" for branch, fork in session.execute(_FORKS)}
        named = session.execute(_NAMED).all()
    nearest = _nearest(database, {row.state_id for row in named}, held)
    for name, kind, state_id in named:
        at = nearest.get(state_id)
        if at:
            what = "the head of" if kind == "branch" else "what"
            leads = f"{kind} {name!r}" + ("" if kind == "branch" else " names")
            found[at] = (
                f"{what} {leads}"
                if at == state_id
                else f"the newest durable state of {kind} {name!r}"
            )
    return found


def leading(session: Session, ids: Collection[int], *, tier: str, node: str) -> set[int]:
    """The states among ``ids`` that must stay (see ``needed_states``). A tier of a node holds all
    of ``ids``.

    The cost grows with the number of states below them that are not held. It does not depend on the
    number of names.
    """
    asked = {"ids": list(ids), "on_tier": tier, "on_node": node}
    return {row.start for query in (_LEADING, _FORKED) for row in session.execute(query, asked)}


def best_on_the_way(
    database: Database, heads: Collection[int], key: str, *, is_max: bool
) -> dict[int, int]:
    """The state that ``@best`` names from each of these heads, by row ids (see
    ``revision.best_id``), in one pass over the lineage. A head without one is left out.
    """
    sign, best = 1 if is_max else -1, dict[int, tuple[float, int]]()
    for after in range(0, max(heads, default=0), _PAGE):
        with database.read() as session:
            rows = session.execute(
                _VALUES, {"metric": key, "after": after, "last": after + _PAGE}
            ).all()
        for id_, parent, other, value in rows:  # one for each further parent
            is_rated = value is not None and math.isfinite(value)
            own = (sign * value, id_) if is_rated else _WORST
            best[id_] = max(own, *(best.get(each, _WORST) for each in (id_, parent, other)))
    return {head: best[head][1] for head in heads if best[head] != _WORST}


def held_by_others(
    session: Session, ids: Collection[int], *, volatile: Collection[str], holder: str
) -> set[int]:
    """The row ids, among ``ids``, of states that other processes than ``holder`` have in their
    ``volatile`` tiers."""
    rows = rows_in_batches(session, _ELSEWHERE, sorted(ids), volatile=list(volatile), own=holder)
    return {row.state_id for row in rows}


def outstanding(
    session: Session, *, tier: str, node: str, further: str
) -> Iterator[tuple[str, int]]:
    """The parts that a tier of a node holds and a further tier lacks, oldest states first: the uid
    of the state, and the rank.

    A state that a policy keeps near is left out, unless a tag names it.
    """
    asked = {"on_tier": tier, "on_node": node, "further": further}
    return ((row.uid, row.rank) for row in session.execute(_OUTSTANDING, asked))


def awaiting_copy(
    session: Session, ids: Collection[int], *, tier: str, node: str, keys: tuple[str, str]
) -> dict[int, str]:
    """The states among ``ids`` that a further tier still lacks (see ``outstanding``), by row id,
    with the name of that tier.

    The tiers are those of the newest processes of the folder. ``keys`` are the settings of a run
    that name its folder and its tiers.
    """
    folder, tiers = keys
    newest = session.execute(
        select(RUN.c.config[tiers].as_string())
        .where(RUN.c.config[folder].as_string() == node)
        .order_by(RUN.c.id.desc())
        .limit(_NEWEST_PROCESSES)
    ).scalars()
    found: dict[int, str] = {}
    for name in {name for names in newest for name in (names or "").split()}:
        places = {"on_tier": tier, "on_node": node, "further": name}
        rows = rows_in_batches(session, _AWAITING_COPY, sorted(ids), **places)
        found |= dict.fromkeys((row.id for row in rows), name)
    return found


def only_of(session: Session, name: str) -> frozenset[int]:
    """The states on a name's path of first parents that no other branch or tag leads to through
    any parents, by row id."""
    own = select(REF.c.state_id).where(REF.c.name == name)
    others = above(
        select(REF.c.state_id).where(REF.c.name != name),
        "others",
        session.dialect.name,
    )
    path = first_parents_of(own, "own")
    return frozenset(
        session.execute(select(path.c.id).where(path.c.id.not_in(select(others.c.id)))).scalars()
    )


def newest_at(session: Session) -> int | None:
    """When the newest state was made, in microseconds since the epoch; None if there is none."""
    return session.execute(_NEWEST_AT).scalar()


def segments_of(session: Session) -> dict[int, tuple[str, int | None]]:
    """For each segment that a branch has: the branch, and the state that it forked from, by row
    id."""
    return {row.id: (row.branch, row.fork_id) for row in session.execute(_SEGMENTS)}


def extremes(
    session: Session, branch: str
) -> Iterator[tuple[str, tuple[float, str] | None, tuple[float, str] | None]]:
    """Each metric of a branch's own states, which come after its fork, with the least and the
    greatest value and their states' uids."""
    for key, least, least_uid, most, most_uid in session.execute(_EXTREMES, {"of": branch}):
        yield (
            key,
            None if least_uid is None else (least, least_uid),
            None if most_uid is None else (most, most_uid),
        )


def newest_settings(session: Session, key: str) -> dict[str, str]:
    """The value of a setting of ours in the newest training of each branch, by branch. Branches
    without a value are left out."""
    found = ((branch, config.get(key)) for branch, config in session.execute(_NEWEST_RUNS))
    return {branch: str(value) for branch, value in found if value is not None}


_NONE: Mapping[str, float] = {}
_here = (
    REPLICA.c.tier == bindparam("on_tier"),
    REPLICA.c.node == bindparam("on_node"),
    REPLICA.c.status == "ok",
    REPLICA.c.rank == 0,
)
_PAGES = (
    select(
        *(
            STATE.c.id,
            STATE.c.uid,
            func.coalesce(STATE.c.segment_id, 0),
            STATE.c.generation,
            STATE.c.step,
        ),
        *(STATE.c.created_at, STATE.c.world_size),
    )
    .join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    .where(*_here, REPLICA.c.state_id > bindparam("after", type_=BigInteger))
    .order_by(REPLICA.c.state_id)
    .limit(_PAGE)
)
_copied = REPLICA.alias()
_here_and_not_there = (
    REPLICA.c.tier == bindparam("on_tier"),
    REPLICA.c.node == bindparam("on_node"),
    REPLICA.c.status == "ok",
    or_(
        REPLICA.c.is_near.is_not(True),
        exists().where(REF.c.state_id == REPLICA.c.state_id, REF.c.kind == "tag"),
    ),
    ~exists().where(
        _copied.c.state_id == REPLICA.c.state_id,
        _copied.c.rank == REPLICA.c.rank,
        _copied.c.tier == bindparam("further"),
    ),
)
_OUTSTANDING = (
    select(STATE.c.uid, REPLICA.c.rank)
    .join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    .where(*_here_and_not_there)
    .order_by(STATE.c.id, REPLICA.c.rank)
)
_AWAITING_COPY = (
    select(REPLICA.c.state_id.label("id"))
    .where(*_here_and_not_there)
    .where(REPLICA.c.state_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
)
_METRICS = select(
    METRIC.c.state_id, METRIC.c.key, METRIC.c.value
).where(  # with a condition on values SQLite may walk all of a metric
    METRIC.c.state_id.in_(bindparam("ids", type_=BigInteger, expanding=True)),
    METRIC.c.key.in_(bindparam("keys", expanding=True)),
)
_FORKS = select(SEGMENT.c.branch, SEGMENT.c.fork_id).where(
    SEGMENT.c.branch.is_not(None), SEGMENT.c.fork_id.is_not(None)
)
_NAMED = select(REF.c.name, REF.c.kind, REF.c.state_id).order_by(REF.c.kind.desc(), REF.c.name)
_FORKED = (  # a branch that has no state yet is at its fork
    select(STATE.c.parent_id.label("start"))
    .join_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
    .where(STATE.c.parent_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .where(SEGMENT.c.fork_id == STATE.c.parent_id, SEGMENT.c.branch.is_not(None))
)
_FALLING = (
    select(STATE.c.id, STATE.c.parent_id)
    .where(
        STATE.c.id <= bindparam("top", type_=BigInteger),
        STATE.c.id > bindparam("oldest", type_=BigInteger),
    )
    .order_by(STATE.c.id.desc())
    .limit(bindparam("count", type_=Integer))
)
_NEWEST_AT = select(func.max(STATE.c.created_at))
_VALUES = (
    select(STATE.c.id, STATE.c.parent_id, EDGE.c.parent_id, METRIC.c.value)
    .outerjoin_from(STATE, EDGE, EDGE.c.child_id == STATE.c.id)
    .outerjoin(METRIC, (METRIC.c.state_id == STATE.c.id) & (METRIC.c.key == bindparam("metric")))
    .where(
        STATE.c.id > bindparam("after", type_=BigInteger),
        STATE.c.id <= bindparam("last", type_=BigInteger),
    )
    .order_by(STATE.c.id)
)
_low = STATE.alias()
_high = STATE.alias()
_EXTREMES = (
    select(STRETCH.c.key, STRETCH.c.least, _low.c.uid, STRETCH.c.most, _high.c.uid)
    .join_from(
        SEGMENT, STRETCH, (STRETCH.c.segment_id == SEGMENT.c.id) & (STRETCH.c.place == WHOLE)
    )
    .outerjoin(_low, _low.c.id == STRETCH.c.least_id)
    .outerjoin(_high, _high.c.id == STRETCH.c.most_id)
    .where(SEGMENT.c.branch == bindparam("of"))
)
_SEGMENTS = select(SEGMENT.c.id, SEGMENT.c.branch, SEGMENT.c.fork_id).where(
    SEGMENT.c.branch.is_not(None)
)
_ELSEWHERE = (
    select(REPLICA.c.state_id)
    .where(REPLICA.c.state_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .where(
        REPLICA.c.tier.in_(bindparam("volatile", expanding=True)),
        REPLICA.c.node != bindparam("own"),
    )
)
_newest = (
    select(func.max(RUN.c.id).label("id"))
    .where(RUN.c.branch.is_not(None), RUN.c.is_carried.is_(None))
    .group_by(RUN.c.branch)
)
_NEWEST_RUNS = select(RUN.c.branch, RUN.c.config).where(RUN.c.id.in_(_newest))


def _nearest(database: Database, starts: Set[int], held: Set[int]) -> dict[int, int]:
    """For each start the nearest first parent that is held, or itself, or 0; all are row ids.

    Ids fall along every path, so all walks visit the states in one order. Walks that meet continue
    as one.
    """
    nearest, oldest, path = (
        {id_: id_ for id_ in starts & held},
        min(held, default=_NOWHERE),
        list[int](),
    )
    due = {id_ for id_ in starts - held if id_ > oldest}
    top, count = max(due, default=0), _PAGE_MIN
    while due:
        with database.read() as session:
            rows = session.execute(_FALLING, {"top": top, "oldest": oldest, "count": count}).all()
        for id_, parent in rows:
            if id_ in due:
                due.remove(id_)
                # not as pairs: millions of them would keep the garbage collector busy
                path += (
                    id_,
                    parent or 0,
                )
                if parent and parent > oldest and parent not in held:
                    due.add(parent)
        # where some states were due, the next are likely to be due too
        top, count = rows[-1].id - 1 if path[-2] >= rows[-1].id else max(due), min(4 * count, _PAGE)
    for parent, id_ in zip(path[::-2], path[-2::-2], strict=True):
        nearest[id_] = parent if parent in held else nearest.get(parent, 0)
    return nearest


def refs_leading_to(is_passed: Callable[[Any], ColumnElement[bool]]) -> Select[Any]:
    """The names that lead to each of some states along first parents; ``is_passed`` is true of the
    states that the walk passes.

    The walk goes down from the states, so its cost does not depend on the number of names.
    """
    next_, ids = STATE.alias("next"), bindparam("ids", type_=BigInteger, expanding=True)
    walk = (
        select(STATE.c.id.label("start"), STATE.c.id)
        .where(STATE.c.id.in_(ids))
        .cte("led_here", recursive=True)
    )
    step = (
        select(walk.c.start, next_.c.id)
        .join_from(walk, next_, next_.c.parent_id == walk.c.id)
        .where(is_passed(next_))
    )
    walk = walk.union_all(step)
    return select(REF.c.name, REF.c.kind, walk.c.start).join_from(
        walk, REF, REF.c.state_id == walk.c.id
    )


_LEADING = refs_leading_to(
    lambda passed: ~exists().where(*_here, REPLICA.c.state_id == passed.c.id)
)


# States whose files are in a folder: the lineage has given them up, or does not have them.


def given_up(session: Session, uids: Sequence[str], *, tier: str, node: str) -> list[str]:
    """The states that were evicted or lost and have no recorded replica on a tier of a node; and
    the states of several parts that never became complete.
    """
    gone = rows_in_batches(session, _GIVEN_UP, uids, "uids", on_tier=tier, on_node=node)
    never_complete = rows_in_batches(session, _NEVER_WHOLE, uids, "uids")
    return [row[0] for row in (*gone, *never_complete)]


def unknown_uids(session: Session, uids: Iterable[str]) -> list[str]:
    """The uids that neither are states here nor wait for their parts."""
    wanted = list(uids)
    known = {row[0] for row in rows_in_batches(session, _KNOWN, wanted, "uids")}
    return [uid for uid in wanted if uid not in known]


def held_on(session: Session, *, tier: str, node: str) -> list[tuple[str, int]]:
    """Every state, with its rank, that has a recorded replica on a tier of a node."""
    return [
        (row.uid, row.rank) for row in session.execute(_HELD_ON, {"on_tier": tier, "on_node": node})
    ]


_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_held = exists().where(
    REPLICA.c.state_id == STATE.c.id,
    REPLICA.c.tier == bindparam("on_tier"),
    REPLICA.c.node == bindparam("on_node"),
)
_GIVEN_UP = select(STATE.c.uid).where(STATE.c.uid.in_(_uids), STATE.c.status.in_(GONE), ~_held)
_NEVER_WHOLE = select(PART.c.state_uid).where(PART.c.state_uid.in_(_uids), PART.c.status.in_(WHYS))
_KNOWN = union(
    select(STATE.c.uid).where(STATE.c.uid.in_(_uids)),
    select(PART.c.state_uid).where(PART.c.state_uid.in_(_uids)),
)
_HELD_ON = (
    select(STATE.c.uid, REPLICA.c.rank)
    .join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    .where(REPLICA.c.tier == bindparam("on_tier"), REPLICA.c.node == bindparam("on_node"))
)
