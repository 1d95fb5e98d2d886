"""The surroundings of one state: names, children, and the first parents before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import networkx as nx
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    Table,
    bindparam,
    func,
    literal,
    or_,
    select,
    text,
    union,
)

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, keys_of, states
from datastates.lineage.query import names as names_query
from datastates.lineage.query import walk
from datastates.lineage.query.names import last_event, node_of
from datastates.lineage.query.walk import first_parent_at
from datastates.lineage.schema import (
    ATTRIBUTE,
    EDGE,
    EVENT,
    FOLDER,
    METRIC,
    REF,
    REPLICA,
    RUN,
    SETTING,
    STATE,
    from_us,
)
from datastates.lineage.states import DIED, Ref, RefEvent, RefKind, State, Status
from datastates.lineage.write import runs
from datastates.lineage.write.runs import counted

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_next = STATE.alias("next")
_below = union(
    select(STATE.c.id).where(STATE.c.parent_id == bindparam("state", type_=BigInteger)),
    select(EDGE.c.child_id).where(EDGE.c.parent_id == bindparam("state", type_=BigInteger)),
).subquery()
_CHILDREN = (
    select(STATE.c.uid).join_from(_below, STATE, STATE.c.id == _below.c.id).order_by(STATE.c.id)
)
_walk = select(STATE.c.id, STATE.c.parent_id, literal(1).label("place")).where(
    STATE.c.id == bindparam("start", type_=BigInteger)
)
_chain = _walk.cte("chain", recursive=True)
_chain = _chain.union_all(
    select(_next.c.id, _next.c.parent_id, _chain.c.place + 1)
    .join_from(_chain, _next, _next.c.id == _chain.c.parent_id)
    .where(_chain.c.place < bindparam("count", type_=Integer))
)
_FIRST_PARENTS = select(_chain.c.id).order_by(_chain.c.place)


def refs_at(session: Session, uid: str) -> list[Ref]:
    """The branches and tags that name a state, by name.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(names_query.REFS.where(REF.c.state_id == id_of(session, uid)))
    return sorted(map(names_query.to_ref, rows), key=lambda ref: ref.name)


def child_uids(session: Session, uid: str) -> list[str]:
    """The uids of ``walk.children``, oldest first."""
    return list(session.execute(_CHILDREN, {"state": id_of(session, uid)}).scalars())


def first_parents(
    session: Session, uid: str, *, limit: int, after: str | None = None
) -> tuple[list[State], str | None]:
    """A state and its first parents, newest first; and the uid to continue ``after``, None when the
    root is among them.

    :raises NotFound: there is no such state.
    :raises InvalidInput: ``after`` is not one of them.
    """
    start, skipped = id_of(session, uid), 0
    if after is not None:
        last = id_of(session, after)
        try:
            is_first_parent = first_parent_at(session, start, last) == last
        except NotFound:
            is_first_parent = False
        if not is_first_parent:
            raise InvalidInput(
                f"{after} is not among the first parents of {uid}: pass the uid of the last state"
                " that came"
            )
        start, skipped = last, 1
    ids = list(
        session.execute(_FIRST_PARENTS, {"start": start, "count": limit + skipped + 1}).scalars()
    )[skipped:]
    found = states(session, ids[:limit])
    return found, found[-1].uid if len(ids) > limit else None


# The lineage as a graph, for people's own analyses.


FIRST_PARENT = "parent"
"""The kind of the edge from a state's first parent; further parents have the kinds of
``EdgeKind``."""


def graph(
    session: Session,
    *,
    of: Iterable[str] | None = None,
    ancestors: int | None = None,
    descendants: int | None = 0,
) -> nx.DiGraph[str]:
    """The states ``of`` (uids) with the given numbers of ancestors and descendants of each.

    ``of`` is None for all states that a ref names. A number is None for all. Nodes are uids
    with ``state`` (a ``State``) and ``refs`` (names). Edges go from parent to child, with ``kind``
    and ``weight``, where both ends are in the graph.

    :raises NotFound: one of ``of`` is no state.
    """
    names: dict[str, list[str]] = {}
    for ref in names_query.refs(session):
        names.setdefault(ref.state, []).append(ref.name)
    found: dict[str, State] = {}
    for uid in names if of is None else of:
        limit = None if ancestors is None else ancestors + 1
        near = [
            *walk.log(session, uid, limit=limit),
            *(walk.descendants(session, uid, limit=descendants) if descendants != 0 else ()),
        ]
        found.update((state.uid, state) for state in near)
    result: nx.DiGraph[str] = nx.DiGraph()
    for uid, state in found.items():
        result.add_node(uid, state=state, refs=sorted(names.get(uid, ())))
    for uid, state in found.items():
        edges = {edge.parent: (str(edge.kind), edge.weight) for edge in state.edges}
        for index, parent in enumerate(state.parents):
            if parent in result:
                kind, weight = edges[parent] if index else (FIRST_PARENT, 1.0)
                result.add_edge(parent, uid, kind=kind, weight=weight)
    return result


# The places where bytes are: how many states each tier of each node holds.


_HELD = (
    select(
        REPLICA.c.tier,
        REPLICA.c.node,
        func.max(FOLDER.c.host),
        func.count(),
        func.sum(REPLICA.c.bytes),
    )
    .outerjoin_from(REPLICA, FOLDER, FOLDER.c.uid == REPLICA.c.node)
    .where(REPLICA.c.status == "ok")
    .group_by(REPLICA.c.tier, REPLICA.c.node)
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier of a node holds: ``replicas`` of states, or of ranks' parts of them, which
    added ``bytes`` there."""

    tier: str
    node: str
    replicas: int
    bytes: int


def held(session: Session) -> tuple[Held, ...]:
    """The content of each tier of each node, as reported. The processes of a node are added up.

    One scan of all replicas."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for tier, place, host, count, size in session.execute(_HELD):
        key = tier, host or node_of(place)
        replicas, bytes_ = found.get(key, (0, 0))
        found[key] = replicas + count, bytes_ + int(size or 0)
    return tuple(Held(*key, *numbers) for key, numbers in sorted(found.items()))


# The events of all refs, in the order of their ids, for readers that must miss nothing.


_PAGE = 500


@dataclass(frozen=True, slots=True)
class Horizon:
    """An id, and the transactions that may yet commit an event below it.

    Once it is settled, a transaction that begins afterwards sees all events up to the id that there
    will ever be.
    """

    id: int
    writers: frozenset[str]

    @property
    def is_settled(self) -> bool:
        """Whether all of these transactions have ended."""
        return not self.writers


@dataclass(frozen=True, slots=True)
class Events:
    """Events by rising ids, with none missing. If ``horizon`` is set there are more, after a gap:
    pass it to the next ``read``.

    Call that at once, in a new transaction, if the horizon is settled; else after a while.
    """

    items: tuple[RefEvent, ...]
    horizon: Horizon | None


def newest_events(session: Session) -> Horizon:
    """The newest event's id, 0 when there is none, and the transactions that may yet commit an
    older one."""
    return Horizon(last_event(session), _writers(session))


def settle(session: Session, horizon: Horizon) -> Horizon:
    """The horizon without the transactions that have ended since."""
    return (
        horizon
        if horizon.is_settled
        else replace(horizon, writers=horizon.writers & _writers(session))
    )


def read(
    session: Session, after: int, *, horizon: Horizon | None = None, limit: int = _PAGE
) -> Events:
    """The events after the id ``after``, up to where more may still come in between; ``horizon`` is
    the one that the last call returned.

    ``after`` is 0 or an id up to which nothing was missing: the id of an event read here, or of a
    settled horizon.
    """
    rows = session.execute(_AFTER, {"after": after, "limit": limit}).all()
    settled = horizon.id if horizon is not None and horizon.is_settled else 0
    items: list[RefEvent] = []
    for row in rows:
        missing = row.id - 1
        if missing > max(after, settled):
            return Events(tuple(items), _wait_for(session, missing, rows[-1].id, horizon))
        items.append(names_query.to_event(row))
        after = row.id
    return Events(tuple(items), None)


def _wait_for(session: Session, missing: int, seen: int, horizon: Horizon | None) -> Horizon:
    """The transactions that may still write the event ``missing``, given that ``seen`` exists. They
    are read after the events, in the same transaction.
    """
    if horizon is not None and missing <= horizon.id:
        return settle(session, horizon)
    return Horizon(seen, _writers(session))


def _writers(session: Session) -> frozenset[str]:
    """The transactions that may commit lines of reflogs whose ids they have drawn already; none on
    SQLite, which has one writer at a time."""
    if session.dialect.name != "postgresql":
        return frozenset()
    return frozenset(session.execute(_WRITERS).scalars())


_WRITERS = text(
    "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode ="
    " 'RowExclusiveLock' AND granted AND relation = CAST('ref_event' AS regclass) AND database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
)


_AFTER = (
    names_query.EVENTS.where(EVENT.c.id > bindparam("after"))
    .order_by(EVENT.c.id)
    .limit(bindparam("limit"))
)


# How often processes of a repository died: how long they ran, and how many ended without saying
# so.


@dataclass(frozen=True, slots=True)
class Failures:
    """``processes`` trained for ``ran_s`` seconds in total; ``died`` of them were found dead by
    a process that opened the repository later."""

    processes: int
    died: int
    ran_s: float


def failures(session: Session) -> Failures:
    """The failures among all processes that captured here.

    A process that died, or is running, counts until its newest state."""
    found = list(runs.by_ids(session, session.execute(_PROCESSES).scalars().all()).values())
    died = [run for run in found if run.config.get(DIED) is True]
    ran_s = 0.0
    for run in found:
        ended = run.finished_at if run.config.get(DIED) is not True else None
        newest_us = session.execute(_FAILURES_NEWEST, {"uid": run.uid}).scalar()
        newest = run.started_at if newest_us is None else from_us(newest_us)
        last = ended or newest
        ran_s += max(0.0, (last - run.started_at).total_seconds())
    return Failures(len(found), len(died), ran_s)


_training = RUN.alias("training")
_PROCESSES = (
    select(RUN.c.id).where(RUN.c.process.is_(None), RUN.c.is_carried.is_(None)).order_by(RUN.c.id)
)
_OF_PROCESS = select(_training.c.id).where(
    or_(_training.c.uid == bindparam("uid"), _training.c.process == bindparam("uid"))
)
_FAILURES_NEWEST = select(STATE.c.created_at).where(
    STATE.c.id
    == select(func.max(STATE.c.id)).where(STATE.c.run_id.in_(_OF_PROCESS)).scalar_subquery()
)


# The content of a lineage in numbers. Most are counted on every call, which takes some tens of
# milliseconds for 100,000 states.


# One scan of the table, without sorting.
_STATUSES = select(
    *(func.count().filter(STATE.c.status == status.value).label(status.value) for status in Status)
).select_from(STATE)
_REFS = select(REF.c.kind, func.count()).group_by(REF.c.kind)
_STATS_NEWEST = select(STATE.c.id).order_by(STATE.c.id.desc()).limit(1)


@dataclass(frozen=True, slots=True)
class KeyStats:
    """One metric: the number of states that have it, and its least and greatest value. They are
    None if all values are NaN."""

    key: str
    count: int
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """What a lineage holds. ``statuses`` counts the states of each; keys are those that a query or
    a column may name.

    ``config`` has the keys of the configurations of runs; ``tiers`` are the places of the bytes.
    """

    states: int
    statuses: dict[str, int]
    branches: int
    tags: int
    runs: int
    metrics: tuple[KeyStats, ...]
    attributes: tuple[str, ...]
    config: tuple[str, ...]
    tiers: tuple[Held, ...]


def count(session: Session) -> Counts:
    """Count everything, in about ten queries."""
    statuses = {
        str(status): int(number)
        for status, number in session.execute(_STATUSES).one()._mapping.items()
        if number
    }
    refs = {str(kind): int(number) for kind, number in session.execute(_REFS)}
    return Counts(
        states=sum(statuses.values()),
        statuses=dict(sorted(statuses.items())),
        branches=refs.get(RefKind.BRANCH.value, 0),
        tags=refs.get(RefKind.TAG.value, 0),
        runs=session.execute(select(func.count()).select_from(RUN).where(counted())).scalar_one(),
        metrics=tuple(
            sorted((KeyStats(*row) for row in session.execute(_ranges())), key=lambda one: one.key)
        ),
        attributes=_keys(session, ATTRIBUTE),
        config=_keys(session, SETTING),
        tiers=held(session),
    )


def _keys(session: Session, table: Table) -> tuple[str, ...]:
    keys = session.execute(select(keys_of(table).c.key)).scalars()
    return tuple(sorted(key for key in keys if key is not None))


def newest_stats(session: Session) -> State | None:
    """The state that was recorded last."""
    found = session.execute(_STATS_NEWEST).scalar()
    return None if found is None else states(session, [found])[0]


def _ranges() -> Select[Any]:
    """The range and count of each key, along the index of keys and values: least and most cost a
    look-up each, the count reads the key's part."""
    keys = keys_of(METRIC)

    def of(number: ColumnElement[Any]) -> ColumnElement[Any]:
        return select(number).where(METRIC.c.key == keys.c.key).correlate(keys).scalar_subquery()

    wanted = of(func.count()), of(func.min(METRIC.c.value)), of(func.max(METRIC.c.value))
    return select(keys.c.key, *wanted).where(keys.c.key.is_not(None))
