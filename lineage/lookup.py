"""States by uid, by the beginning of a uid, and in bulk: a handful of queries however many there
are."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Executable,
    Integer,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
)

from datastates.errors import Ambiguous, InvalidInput, NotFound
from datastates.system import logs
from datastates.values import Value

from .schema import (
    ATTRIBUTE,
    EDGE,
    METRIC,
    RUN,
    SETTING,
    STATE,
    from_us,
)
from .states import OURS, Edge, EdgeKind, State, Status, columns_of, value_of

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_T = TypeVar("_T")


def batches(values: Sequence[_T], most: int) -> Iterator[list[_T]]:
    """The values in their order, at most ``most`` at a time; no batch if there are none."""
    for start in range(0, len(values), most):
        yield list(values[start : start + most])


_BATCH = 1000  # values in one IN list


def rows_in_batches(
    session: Session,
    statement: Executable,
    values: Iterable[int] | Iterable[str],
    name: str = "ids",
    **bound: object,
) -> Iterator[Any]:
    """The rows of a statement with an IN list called ``name``, for any number of ``values``."""
    for some in batches(list(values), _BATCH):
        yield from session.execute(statement, {**bound, name: some})


def keys_of(belongs: Table) -> CTE:
    """The distinct keys of a table of metrics, attributes or settings, each by a look-up beyond the
    one before (a loose index scan).

    The last row is NULL."""
    key = belongs.c.key
    walk = select(func.min(key).label("key")).cte("keys", recursive=True)
    following = select(func.min(key)).where(key > walk.c.key).scalar_subquery()
    return walk.union_all(select(following).where(walk.c.key.is_not(None)))


def path_columns(state: Any) -> tuple[Any, ...]:
    """The columns of a walk along first parents; ``segment`` is 0 outside all segments."""
    segment = func.coalesce(state.c.segment_id, 0).label("segment")
    return (state.c.id, state.c.parent_id, state.c.generation, segment)


def segment_path(name: str) -> CTE:
    """The state ``head`` and its first parents down to the generation ``low``, as long as they are
    in ``segment``, where 0 means none; and the first one outside it.

    The conditions that stop the walk are on the path: for a condition on the joined table SQLite
    would first read all of that table.
    """
    low, segment = bindparam("low", type_=Integer), bindparam("segment", type_=BigInteger)
    following = STATE.alias("next")
    walk = (
        select(*path_columns(STATE))
        .where(STATE.c.id == bindparam("head", type_=BigInteger), STATE.c.generation >= low)
        .cte(name, recursive=True)
    )
    step = select(*path_columns(following)).join_from(
        walk, following, following.c.id == walk.c.parent_id
    )
    return walk.union_all(step.where(walk.c.generation > low, walk.c.segment == segment))


# The settings of runs: the part of their configuration that a user chose, one row for each value.


def keep(
    session: Session, run_id: int, config: Mapping[str, Value], *, replaces: bool = False
) -> None:
    """Record the settings of a run, secrets masked. ``replaces``: in place of those that it has."""
    if replaces:
        session.execute(delete(SETTING).where(SETTING.c.run_id == run_id))
    rows = [
        {"run_id": run_id, **columns_of(key, value, "setting")}
        for key, value in shown(config).items()
    ]
    if rows:
        session.execute(_KEEP, rows)


def shown(config: Mapping[str, Value]) -> dict[str, Value]:
    """The part of a configuration that is stored: the settings that a user chose, with secrets
    masked."""
    return logs.named({key: value for key, value in config.items() if not key.startswith(OURS)})


def of_runs(session: Session, ids: Iterable[int]) -> dict[int, dict[str, Value]]:
    """The settings of runs by row id, each in alphabetical order; runs without any are left out."""
    found: defaultdict[int, dict[str, Value]] = defaultdict(dict)
    for id_, key, type_, number, text in rows_in_batches(session, _OF_RUNS, sorted(set(ids))):
        found[id_][key] = value_of(type_, number, text)
    return {id_: logs.named(chosen) for id_, chosen in found.items()}


_KEEP = insert(SETTING)
_OF_RUNS = (
    select(SETTING.c.run_id, SETTING.c.key, SETTING.c.type, SETTING.c.number, SETTING.c.text)
    .where(SETTING.c.run_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .order_by(SETTING.c.run_id, SETTING.c.key)
)


# States by uid, by the beginning of a uid, and in bulk.


_PREFIX = re.compile(r"[0-9a-f]{4,24}")
_LISTED = 5  # candidates listed in a message

_parent = STATE.alias("parent")
_COLUMNS = (
    "id",
    "uid",
    "digest",
    "step",
    "micro_step",
    "message",
    "created_at",
    "status",
    "generation",
    "bytes_total",
    "bytes_new",
    "world_size",
)
_ID_OF = select(STATE.c.id).where(STATE.c.uid == bindparam("uid"))
_IDS_OF = select(STATE.c.uid, STATE.c.id).where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
_UIDS_OF = select(STATE.c.id, STATE.c.uid).where(
    STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True))
)
_BY_PREFIX = (
    select(STATE.c.id)
    .where(STATE.c.uid >= bindparam("low"), STATE.c.uid < bindparam("high"))
    .limit(_LISTED + 1)
)


@dataclass(frozen=True, slots=True)
class _Load:
    """Loads what is known of some states.

    ``is_them`` is the condition on a column that names them."""

    states: Select[Any]
    metrics: Select[Any]
    attributes: Select[Any]
    edges: Select[Any]

    @classmethod
    def of(cls, is_them: Callable[[ColumnElement[int]], ColumnElement[bool]]) -> _Load:
        return cls(
            states=select(*(STATE.c[name] for name in _COLUMNS), _parent.c.uid, RUN.c.uid, RUN.c.id)
            .outerjoin_from(STATE, _parent, _parent.c.id == STATE.c.parent_id)
            .outerjoin(RUN, RUN.c.id == STATE.c.run_id)
            .where(is_them(STATE.c.id)),
            metrics=select(METRIC.c.state_id, METRIC.c.key, METRIC.c.value).where(
                is_them(METRIC.c.state_id)
            ),
            attributes=select(
                ATTRIBUTE.c.state_id,
                ATTRIBUTE.c.key,
                ATTRIBUTE.c.type,
                ATTRIBUTE.c.number,
                ATTRIBUTE.c.text,
            ).where(is_them(ATTRIBUTE.c.state_id)),
            edges=select(EDGE.c.child_id, STATE.c.uid, EDGE.c.kind, EDGE.c.weight)
            .join_from(EDGE, STATE, STATE.c.id == EDGE.c.parent_id)
            .where(is_them(EDGE.c.child_id))
            .order_by(EDGE.c.child_id, EDGE.c.position),
        )


# A list parameter is expanded at every execution: for one state, the commonest case, that would be
# half the time.
_LOAD_ONE = _Load.of(lambda column: column == bindparam("id", type_=BigInteger))
_LOAD_MANY = _Load.of(lambda column: column.in_(bindparam("ids", type_=BigInteger, expanding=True)))


def id_of(session: Session, uid: str) -> int:
    """The row id of a state, for queries in this folder.

    :raises NotFound: no state has this uid.
    """
    found = session.execute(_ID_OF, {"uid": uid}).scalar()
    if found is None:
        raise unknown(uid)
    return int(found)


def unknown(uid: str) -> NotFound:
    """The error for a uid that no state has."""
    return NotFound(f"there is no state {uid!r}: a uid has 24 hex digits, the log lists them")


def ids_of(session: Session, uids: Sequence[str]) -> list[int]:
    """The row ids of many states, in the order of ``uids``.

    :raises NotFound: one of them is unknown; the error names it.
    """
    found = {row.uid: row.id for row in rows_in_batches(session, _IDS_OF, uids, "uids")}
    try:
        return [found[uid] for uid in uids]
    except KeyError as error:
        raise unknown(error.args[0]) from error


def uids_of(session: Session, ids: Sequence[int]) -> list[str]:
    """The uids of states by row id, in the order of ``ids``."""
    found = {row.id: row.uid for row in rows_in_batches(session, _UIDS_OF, ids)}
    return [found[id_] for id_ in ids]


def state(session: Session, uid: str) -> State:
    """The state with exactly this uid.

    :raises NotFound: there is no such state.
    """
    return states(session, [id_of(session, uid)])[0]


def states(session: Session, keys: Sequence[int] | Sequence[str]) -> list[State]:
    """States by row id or by uid, in the order of ``keys``; five queries for each thousand.

    :raises NotFound: one of them is unknown; the error names it.
    """
    ids = (
        ids_of(session, [str(key) for key in keys])
        if keys and isinstance(keys[0], str)
        else [int(key) for key in keys]
    )
    found: dict[int, State] = {}
    for batch in batches(list(dict.fromkeys(ids)), _BATCH):
        found.update(_load(session, batch))
    try:
        return [found[id_] for id_ in ids]
    except KeyError as error:
        raise NotFound(f"there is no state with row id {error.args[0]}") from error


def id_by_prefix(session: Session, prefix: str) -> int:
    """The row id of the one state whose uid begins with this prefix.

    :raises InvalidInput: it is not 4 to 24 hex digits.
    :raises Ambiguous: several uids do; the error lists some.
    :raises NotFound: none does.
    """
    low = prefix.lower()
    if not _PREFIX.fullmatch(low):
        raise InvalidInput(f"{prefix!r} cannot begin a uid: give 4 to 24 hex digits")
    ids = session.execute(_BY_PREFIX, {"low": low, "high": low + "g"}).scalars().all()
    if not ids:
        raise NotFound(f"no state's uid begins with {prefix!r}")
    if len(ids) > 1:
        found = states(session, ids)
        listed = ", ".join(f"{one.uid} (step {one.step})" for one in found[:_LISTED]) + (
            ", ..." if len(found) > _LISTED else ""
        )
        raise Ambiguous(f"{prefix!r} begins several uids: {listed}: give more digits")
    return int(ids[0])


def _load(session: Session, ids: list[int]) -> dict[int, State]:
    bound: Mapping[str, object]
    load, bound = (_LOAD_ONE, {"id": ids[0]}) if len(ids) == 1 else (_LOAD_MANY, {"ids": ids})
    metrics: defaultdict[int, dict[str, float]] = defaultdict(dict)
    attributes: defaultdict[int, dict[str, Value]] = defaultdict(dict)
    edges: defaultdict[int, list[Edge]] = defaultdict(list)
    for id_, key, value in session.execute(load.metrics, bound).all():
        metrics[id_][key] = math.nan if value is None else value
    for id_, key, type_, number, text in session.execute(load.attributes, bound).all():
        attributes[id_][key] = value_of(type_, number, text)
    for id_, parent, kind, weight in session.execute(load.edges, bound).all():
        edges[id_].append(Edge(parent, EdgeKind(kind), weight))
    rows = session.execute(load.states, bound).all()
    configs = of_runs(session, {row[-1] for row in rows if row[-1] is not None})
    found = {}
    for (
        id_,
        uid,
        digest,
        step,
        micro_step,
        message,
        created_at,
        status,
        generation,
        bytes_total,
        bytes_new,
        world_size,
        parent,
        run,
        run_id,
    ) in rows:
        further = tuple(edges.get(id_, ()))
        first = () if parent is None else (parent,)
        found[id_] = State(
            uid=uid,
            digest=digest,
            step=step,
            micro_step=micro_step,
            metrics=metrics.get(id_, {}),
            attributes=attributes.get(id_, {}),
            message=message,
            created_at=from_us(created_at),
            status=Status(status),
            parents=first + tuple([edge.parent for edge in further]),
            edges=further,
            run=run,
            generation=generation,
            bytes_total=bytes_total,
            bytes_new=bytes_new,
            world_size=world_size,
            config=configs.get(run_id, {}),
        )
    return found
