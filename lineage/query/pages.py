"""Search: the states that a query finds, a page at a time.

Pages follow each other by keyset: a cursor holds the sort keys of the last state, never an offset.
The thousandth page costs as much as the first, and states recorded meanwhile shift nothing. Equal
states come oldest first when the last key rises, and newest first when it falls. Without an order
the newest come first. States that lack a sort key come last in either direction, and also those
where it is NaN or infinite.

This module decides how a page is read, since SQLite has no statistics of the values of one key. It
counts the matches of conditions that an index serves, up to ``SELECTIVE``. If one of them matches
few states, those are read and sorted. Otherwise the index of the first key is read in order, and
each state is checked, until the page is full.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Double,
    Select,
    String,
    and_,
    any_,
    case,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    true,
)

from datastates.errors import InvalidInput
from datastates.lineage.lookup import states
from datastates.lineage.schema import (
    ATTRIBUTE,
    METRIC,
    RUN,
    SETTING,
    STATE,
    is_finite,
    to_us,
)
from datastates.lineage.states import State

from .conditions import (
    Scope,
    by_code_point,
    condition,
    ids,
    metric_is,
    run_column,
)
from .fields import resolve_names
from .grammar import Among, Compare, Field, Kind, Node, Order, Query, parse_query

if TYPE_CHECKING:
    from datastates.lineage.session import Session


SELECTIVE = 5_000
_PAGE = 100
_PAGE_MAX = 1000
_SEAL_BYTES = 8

_Scalar = int | float | str | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the states found, and the cursor for those that follow; None after the last."""

    states: list[State]
    next: str | None


def find(
    session: Session,
    text: str,
    *,
    after: str | None = None,
    limit: int | None = None,
    now: datetime | None = None,
) -> Page:
    """The states that a query finds, in its order.

    ``limit`` bounds the page. Without it a page has as many states as the query's own limit, at
    most 1000, or 100 if the query has none. The query's own limit bounds all pages together.
    ``after`` is ``Page.next`` of the same query. ``now``, from which ages count, stays what it was
    on the first page.

    :raises SyntaxProblem: the query does not parse; the error points at the column.
    :raises NotFound: a revision in it names nothing.
    :raises InvalidInput: ``after`` is no cursor of this query, or ``limit`` is below 1.
    """
    query = resolve_names(session, parse_query(text), text)
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}: a page has at least one state")
    place = _Place(to_us(now), query.limit, None) if after is None else _unseal(after, text, query)
    found, following = _turn(
        session,
        query,
        text,
        place,
        limit or (_PAGE if query.limit is None else min(query.limit, _PAGE_MAX)),
    )
    return Page(found, None if following is None else _seal(following, text))


def find_all(session: Session, text: str, *, now: datetime | None = None) -> Iterator[State]:
    """Every state that a query finds, in its order, read a page at a time; the query's own limit
    bounds them.

    :raises SyntaxProblem: the query does not parse; the error points at the column.
    :raises NotFound: a revision in it names nothing.
    """
    yield from find_each(session, parse_query(text), text, now=now)


def find_each(
    session: Session, query: Query, text: str = "", *, now: datetime | None = None
) -> Iterator[State]:
    """``find_all`` for a query that is already parsed; ``text`` is what messages show.

    :raises NotFound: a revision in it names nothing.
    """
    query = resolve_names(session, query, text)
    place: _Place | None = _Place(to_us(now), query.limit, None)
    while place is not None:
        states, place = _turn(session, query, text, place, _PAGE_MAX)
        yield from states


def _turn(
    session: Session, query: Query, text: str, place: _Place, size: int
) -> tuple[list[State], _Place | None]:
    """At most ``size`` states after a place, and the place after them; None after the last."""
    size = size if place.left is None else min(size, place.left)
    rows = _rows(Scope(session, place.now_us, text), query, place.last, size + 1) if size else []
    found = states(session, [int(row[0] or 0) for row in rows[:size]])
    left = None if place.left is None else place.left - len(found)
    is_last = len(rows) <= size or left == 0
    return found, None if is_last else _Place(place.now_us, left, tuple(rows[size - 1]))


# Cursors


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# every such moment fits a datetime in every zone
_Moment = Annotated[int, msgspec.Meta(ge=0, le=250_000_000_000_000_000)]


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``last`` is the id of the last state and its sort keys; ``left`` is what remains of the
    query's own limit."""

    now_us: _Moment
    left: _Count | None
    last: tuple[_Scalar, ...] | None


def _seal(place: _Place, text: str) -> str:
    body = msgspec.msgpack.encode(place)
    return base64.urlsafe_b64encode(_digest(body, text) + body).decode().rstrip("=")


def _unseal(token: str, text: str, query: Query) -> _Place:
    """The place in a cursor. Its digest is no secret: it only detects a damaged cursor, or a cursor
    of another query. A client that forges a cursor gets a place that the query could have led to
    (``_check_last`` checks the keys), and so no more than the query finds."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        place = msgspec.msgpack.decode(raw[_SEAL_BYTES:], type=_Place)
        is_sound = (
            raw[:_SEAL_BYTES] == _digest(raw[_SEAL_BYTES:], text) and _seal(place, text) == token
        )
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{token[:40]!r} is no cursor: pass what Page.next of the same query gave"
        ) from error
    if (place.left is None) != (query.limit is None) or (
        place.left is not None and not 0 < place.left < (query.limit or 0)
    ):
        is_sound = False
    if not is_sound or place.last is None:
        raise InvalidInput(
            f"the cursor {token[:40]!r} is damaged or of another query: pass what Page.next of this"
            " query gave"
        )
    return place


def _check_last(last: tuple[_Scalar, ...], keys: Sequence[_Key]) -> None:
    """Check that a cursor's last state has an id and as many sort keys as the query, each a
    value that the key may have."""
    id_, *values = last or (None,)
    is_id = isinstance(id_, int) and 0 < id_ < 2**63
    if (
        not is_id
        or len(values) != len(keys)
        or not all(key.may_be(value) for key, value in zip(keys, values, strict=True))
    ):
        raise InvalidInput("the cursor is of another query: pass what Page.next of this query gave")


def _digest(body: bytes, text: str) -> bytes:
    return hashlib.blake2b(
        body + text.encode(), digest_size=_SEAL_BYTES, person=b"datastates.find"
    ).digest()


# Sort keys


@dataclass(frozen=True, slots=True)
class _Key:
    """One thing to sort by; ``type_`` is the type that its values are bound as."""

    column: ColumnElement[Any]
    is_descending: bool
    is_nullable: bool
    type_: Any

    def may_be(self, value: _Scalar) -> bool:
        """Whether a state can have this value."""
        match value:
            case None:
                return self.is_nullable
            case int():
                return self.type_ is BigInteger and -(2**63) <= value < 2**63
            case float():
                return self.type_ is Double and math.isfinite(value)
        return self.type_ is String and "\x00" not in value

    def sort(self) -> list[ColumnElement[Any]]:
        column = self.column.desc() if self.is_descending else self.column.asc()
        return [case((self.column.is_(None), 1), else_=0), column] if self.is_nullable else [column]

    def same(self, value: _Scalar) -> ColumnElement[bool]:
        return self.column.is_(None) if value is None else self.column == literal(value, self.type_)

    def later(self, value: _Scalar, *, or_same: bool = False) -> ColumnElement[bool]:
        """The condition for states after a value; missing values come last."""
        if value is None:
            return self.column.is_(None) if or_same else false()
        bound = literal(value, self.type_)
        if self.is_descending:
            beyond = self.column <= bound if or_same else self.column < bound
        else:
            beyond = self.column >= bound if or_same else self.column > bound
        return or_(beyond, self.column.is_(None)) if self.is_nullable else beyond


def _keys(order: Iterable[Order], dialect: str) -> list[_Key]:
    return [key for one in order for key in _keys_of(one.field, one.is_descending, dialect)]


def _keys_of(at: Field, falls: bool, dialect: str) -> list[_Key]:
    match at.name:
        case "metrics":
            return [_Key(_value_of(METRIC, at.key, _finite(METRIC.c.value)), falls, True, Double)]
        case "attr":  # numbers before texts, here and below
            return _typed_keys(
                ATTRIBUTE, at.key, falls, dialect, ATTRIBUTE.c.state_id == STATE.c.id
            )
        case "config":
            return _typed_keys(SETTING, at.key, falls, dialect, SETTING.c.run_id == STATE.c.run_id)
        case "step" | "micro_step":
            return [_Key(STATE.c[at.name], falls, False, BigInteger)]
        case "created":
            return [_Key(STATE.c.created_at, falls, False, BigInteger)]
        case "uid" | "status" | "message":
            return [
                _Key(by_code_point(STATE.c[at.name], dialect), falls, at.name == "message", String)
            ]
    column = select(run_column(at.name)).where(RUN.c.id == STATE.c.run_id).scalar_subquery()
    return [_Key(by_code_point(column, dialect), falls, True, String)]


def _typed_keys(
    belongs: Any, key: str, falls: bool, dialect: str, is_its: ColumnElement[bool]
) -> list[_Key]:
    """The keys for an attribute or a setting of a state."""
    of = select(_finite(belongs.c.number)).where(is_its, belongs.c.key == literal(key, String))
    number = of.scalar_subquery()
    text = of.with_only_columns(belongs.c.text).where(belongs.c.type == "str").scalar_subquery()
    return [
        _Key(number, falls, True, Double),
        _Key(by_code_point(text, dialect), falls, True, String),
    ]


def _finite(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The number, or NULL if it is infinite."""
    return case((is_finite(column), column))


def _value_of(belongs: Any, key: str, column: ColumnElement[Any]) -> ColumnElement[Any]:
    return (
        select(column)
        .where(belongs.c.state_id == STATE.c.id, belongs.c.key == literal(key, String))
        .scalar_subquery()
    )


def _after(keys: Sequence[_Key], last: Sequence[_Scalar]) -> ColumnElement[bool]:
    """The condition for what follows the last state: later in some key, and equal in those before
    it.

    The bound on the first key is redundant, but an index can seek to it.
    """
    later = []
    for index, key in enumerate(keys):
        same = [before.same(value) for before, value in zip(keys[:index], last, strict=False)]
        later.append(and_(*same, key.later(last[index])))
    return and_(keys[0].later(last[0], or_same=True), or_(*later))


def sorting(query: Query, dialect: str) -> list[ColumnElement[Any]]:
    """What to sort states by, for all that a query finds at once: its order, and then the id."""
    keys = [*_keys(query.order, dialect), _Key(STATE.c.id, _tie(query), False, BigInteger)]
    return [part for key in keys for part in key.sort()]


# Plans


def _rows(
    scope: Scope, query: Query, last: tuple[_Scalar, ...] | None, count: int
) -> list[tuple[_Scalar, ...]]:
    """Up to ``count`` states that follow ``last``, as id and sort keys."""
    where = true() if query.condition is None else condition(query.condition, scope)
    keys = _keys(query.order, scope.dialect)
    if last is not None:
        _check_last(last, keys)
    few = _few(scope, query.conjuncts)
    if few is not None:
        where = and_(few, where)
    elif query.order and query.order[0].field.kind is Kind.METRIC:
        return _rows_by_metric(scope, query, keys, where, last, count)
    return _rows_by_state(scope, query, keys, where, last, count)


def _rows_by_state(
    scope: Scope,
    query: Query,
    keys: list[_Key],
    where: ColumnElement[bool],
    last: tuple[_Scalar, ...] | None,
    count: int,
) -> list[tuple[_Scalar, ...]]:
    """Read rows from the table of states; the database sorts, or reads the index of the first
    key."""
    keys = [*keys, _Key(STATE.c.id, _tie(query), False, BigInteger)]
    statement = select(STATE.c.id, *(key.column for key in keys[:-1])).where(where)
    return _run_page(scope, statement, keys, last, count)


def _rows_by_metric(
    scope: Scope,
    query: Query,
    keys: list[_Key],
    where: ColumnElement[bool],
    last: tuple[_Scalar, ...] | None,
    count: int,
) -> list[tuple[_Scalar, ...]]:
    """Read along the index of the metric that is the first sort key; then the states without a
    finite value."""
    metric = METRIC.alias("sorted")
    key, falls = query.order[0].field.key, query.order[0].is_descending
    rows: list[tuple[_Scalar, ...]] = []
    if last is None or last[1] is not None:
        first = _Key(metric.c.value, falls, False, Double)
        along = [first, *keys[1:], _Key(metric.c.state_id, _tie(query), False, BigInteger)]
        bounds = [
            metric_is(metric.c.value, item.operator, item.value) for item in _compared(query, key)
        ]
        statement = select(metric.c.state_id, *(each.column for each in along[:-1])).select_from(
            metric
        )
        statement = statement.join(STATE, STATE.c.id == metric.c.state_id)
        statement = statement.where(
            metric.c.key == literal(key, String), is_finite(metric.c.value), *bounds, where
        )
        rows = _run_page(scope, statement, along, last, count)
        last = None
    if len(rows) == count:
        return rows
    lacking = (
        STATE.c.id.in_(
            select(METRIC.c.state_id).where(
                METRIC.c.key == key, METRIC.c.value.in_((math.inf, -math.inf))
            )
        )
        if _excludes_missing(query, key)
        else ~exists(
            select(literal(1)).where(
                METRIC.c.state_id == STATE.c.id, METRIC.c.key == key, is_finite(METRIC.c.value)
            )
        )
    )
    rest = None if last is None else (last[0], *last[2:])
    found = _rows_by_state(scope, query, keys[1:], and_(where, lacking), rest, count - len(rows))
    return rows + [(row[0], None, *row[1:]) for row in found]


def _run_page(
    scope: Scope,
    statement: Select[Any],
    keys: list[_Key],
    last: tuple[_Scalar, ...] | None,
    count: int,
) -> list[tuple[_Scalar, ...]]:
    """Run one page's query. ``keys`` ends with the id, ``last`` begins with it."""
    if last is not None:
        statement = statement.where(_after(keys, (*last[1:], last[0])))
    ordered = statement.order_by(*(part for key in keys for part in key.sort())).limit(count)
    return [tuple(row) for row in scope.session.execute(ordered)]


def _tie(query: Query) -> bool:
    """Whether ids fall among equals: as the last key does, since then one index serves both."""
    return query.order[-1].is_descending if query.order else True


def _few(scope: Scope, conjuncts: Iterable[Node]) -> ColumnElement[bool] | None:
    """A quickly checked form of the rarest of some conditions, if it matches few states."""
    best, few = SELECTIVE + 1, None
    for node in conjuncts:
        found = ids(node, scope.dialect)
        if found is not None and (rows := _count(scope, found, best)) < best:
            best, few = rows, found
    if few is None or scope.dialect != "postgresql":
        return None if few is None else STATE.c.id.in_(few)
    # its planner would take them for many, and look for them among all states
    return STATE.c.id == any_(
        literal(list(scope.session.execute(few).scalars()), ARRAY(BigInteger))
    )


def _count(scope: Scope, found: Select[Any], most: int) -> int:
    limited = found.limit(most).subquery()
    return int(scope.session.execute(select(func.count()).select_from(limited)).scalar_one())


def _compared(query: Query, key: str) -> list[Compare]:
    """The conditions on the metric that is sorted by: they bound how much of its index is read."""
    return [
        item
        for item in query.conjuncts
        if isinstance(item, Compare) and item.field.kind is Kind.METRIC and item.field.key == key
    ]


def _excludes_missing(query: Query, key: str) -> bool:
    """Whether the query cannot find a state without the metric, because a comparison with it
    would be false."""
    among = (
        item
        for item in query.conjuncts
        if isinstance(item, Among) and item.field.kind is Kind.METRIC and item.field.key == key
    )
    return bool(_compared(query, key)) or any(True for _ in among)
