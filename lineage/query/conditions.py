"""The conditions of a query as SQL over ``state``, with every value bound.

Logic is two-valued: each condition is true or false and never NULL. A comparison with a field that
a state lacks is false, and ``not`` of it is true. Texts compare by code point on both databases.
"""

from __future__ import annotations

import math
import operator as operators
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Select,
    String,
    and_,
    case,
    collate,
    exists,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    union_all,
)

from datastates.errors import SyntaxProblem
from datastates.lineage.lookup import id_of
from datastates.lineage.schema import (
    ATTRIBUTE,
    METRIC,
    REF,
    RUN,
    SETTING,
    STATE,
    beginning,
    from_us,
    is_finite,
    to_us,
)
from datastates.lineage.states import EXACT_INT, RefKind

from .grammar import (
    Ago,
    AllOf,
    Among,
    AnyOf,
    Classify,
    Compare,
    Exists,
    Field,
    Kind,
    Node,
    Not,
    NumberClass,
    Related,
    Value,
    clamp,
)
from .revision import resolve
from .walk import above, below, first_parents_of

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_NUMBERS = ("int", "float")
_EQUALITY = ("=", "!=")
_COLUMNS = {
    "step": STATE.c.step,
    "micro_step": STATE.c.micro_step,
    "created": STATE.c.created_at,
    "status": STATE.c.status,
    "uid": STATE.c.uid,
    "message": STATE.c.message,
}


@dataclass(frozen=True, slots=True)
class Scope:
    """The context in which conditions are compiled: a session, the time that ``now`` means, and
    the whole text for messages."""

    session: Session
    now_us: int
    text: str
    serial: count[int] = field(default_factory=count)

    @property
    def dialect(self) -> str:
        return str(self.session.dialect.name)

    def name(self) -> str:
        """A name for one more recursive query."""
        return f"reach_{next(self.serial)}"


def condition(node: Node, scope: Scope) -> ColumnElement[bool]:
    """A condition on the row of ``state``.

    :raises NotFound: a revision in it names nothing.
    :raises SyntaxProblem: a revision in it does not parse; the error points into the query.
    """
    match node:
        case AllOf(items):
            return and_(*(condition(item, scope) for item in items))
        case AnyOf(items):
            return or_(*(condition(item, scope) for item in items))
        case Not(item):
            return not_(condition(item, scope))
        case Related():
            return _related(node, scope)
        case Exists(at):
            return _exists(at, scope)
        case Classify(at):
            return _classify(at, node)
        case Compare(at, operator, value):
            return _compare(at, operator, (value,), scope)
        case Among(at, values):
            return _compare(at, "=", values, scope)


def ids(node: Node, dialect: str) -> Select[Any] | None:
    """The ids of the states for which a condition holds, read from an index; None where no index
    gives them."""
    match node:
        case Compare(Field(kind=Kind.METRIC) as at, operator, value):
            found = select(METRIC.c.state_id).where(
                METRIC.c.key == at.key, metric_is(METRIC.c.value, operator, value)
            )
            return _along(found, METRIC.c.value, dialect)
        case Among(Field(kind=Kind.METRIC) as at, values):
            return select(METRIC.c.state_id).where(
                METRIC.c.key == at.key,
                _any(metric_is(METRIC.c.value, "=", value) for value in values),
            )
        case Classify(Field(kind=Kind.METRIC) as at):
            return select(METRIC.c.state_id).where(METRIC.c.key == at.key, _is_of(METRIC, node))
        case Compare(Field(name="attr") as at, operator, value) if operator != "~":
            found = select(ATTRIBUTE.c.state_id).where(
                ATTRIBUTE.c.key == at.key, _typed_is(ATTRIBUTE, operator, value, dialect)
            )
            return _along(
                found,
                beginning(ATTRIBUTE.c.text) if isinstance(value, str) else ATTRIBUTE.c.number,
                dialect,
            )
        case Compare(Field(name="config") as at, operator, value) if operator != "~":
            return select(STATE.c.id).where(
                _of_setting(at.key, _typed_is(SETTING, operator, value, dialect))
            )
        case Compare(Field(name="uid"), "=", str(prefix)):
            return select(STATE.c.id).where(_begins(STATE.c.uid, prefix))
        case Compare(Field(name="tag"), "=", str(name)):
            return select(REF.c.state_id).where(
                REF.c.kind == RefKind.TAG.value, REF.c.name == literal(name)
            )
        case AnyOf(items):
            parts = [ids(item, dialect) for item in items]
            whole = [part for part in parts if part is not None]
            return select(union_all(*whole).subquery().c[0]) if len(whole) == len(parts) else None
    return None


def _along(found: Select[Any], column: ColumnElement[Any], dialect: str) -> Select[Any]:
    """The query in the order of the index that it reads. PostgreSQL has statistics of all values,
    but not of the values of one key. If it expects many matches, it reads the whole table. The
    order prevents that.
    """
    return found.order_by(column) if dialect == "postgresql" else found


def metric_is(column: ColumnElement[Any], operator: str, value: Value) -> ColumnElement[bool]:
    """Compares a metric with a number; NULL where the column is."""
    assert isinstance(value, int | float)
    return _operate(column, operator, literal(float(value), Double))


def by_code_point(column: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    """A text column that compares by code point, as SQLite's and Python's do."""
    return collate(column, "C") if dialect == "postgresql" else column


def run_column(name: str) -> ColumnElement[Any]:
    """A column of ``run`` by the name of its field."""
    return RUN.c[name.removeprefix("run.")]


# One kind of field after the other


def _compare(
    at: Field, operator: str, values: tuple[Value, ...], scope: Scope
) -> ColumnElement[bool]:
    """Compares the field with any of the values."""
    if at.kind is Kind.NAMES and operator == "!=":
        # a state has several names: none of them may be this one
        return not_(_compare(at, "=", values, scope))
    match at.name:
        case "metrics":
            return _of_state(
                METRIC,
                at.key,
                _any(metric_is(METRIC.c.value, operator, value) for value in values),
            )
        case "attr":
            return _of_state(
                ATTRIBUTE,
                at.key,
                _any(_typed_is(ATTRIBUTE, operator, value, scope.dialect) for value in values),
            )
        case "tag":
            return STATE.c.id.in_(_named(RefKind.TAG, operator, values, scope))
        case "branch":
            reached = first_parents_of(
                _named(RefKind.BRANCH, operator, values, scope), scope.name()
            )
            return STATE.c.id.in_(select(reached.c.id))
        case "config":
            return _of_setting(
                at.key,
                _any(_typed_is(SETTING, operator, value, scope.dialect) for value in values),
            )
        case "uid":
            found = _any(_begins(STATE.c.uid, str(value)) for value in values)
            return found if operator == "=" else not_(found)
        case "created":
            return _any(
                _operate(STATE.c.created_at, operator, literal(_us(value, scope), BigInteger))
                for value in values
            )
        case "step" | "micro_step":
            return _any(_operate(_COLUMNS[at.name], operator, _number(value)) for value in values)
        case "status" | "message":
            text = _COLUMNS[at.name]
            return and_(
                text.is_not(None),
                _any(_text_is(text, operator, value, scope.dialect) for value in values),
            )
    column = run_column(at.name)
    return _of_run(
        column.is_not(None),
        _any(_text_is(column, operator, value, scope.dialect) for value in values),
    )


def _classify(at: Field, node: Classify) -> ColumnElement[bool]:
    if at.name == "metrics":
        return _of_state(METRIC, at.key, _is_of(METRIC, node))
    if at.name == "attr":
        return _of_state(ATTRIBUTE, at.key, ATTRIBUTE.c.type.in_(_NUMBERS), _is_of(ATTRIBUTE, node))
    return _of_setting(at.key, SETTING.c.type.in_(_NUMBERS), _is_of(SETTING, node))


def _is_of(belongs: Any, node: Classify) -> ColumnElement[bool]:
    """Whether a number is of the class."""
    column = belongs.c.value if belongs is METRIC else belongs.c.number
    classes = {
        NumberClass.NAN: column.is_(None),
        NumberClass.INF: and_(column.is_not(None), column.in_((math.inf, -math.inf))),
        NumberClass.FINITE: is_finite(column),
    }
    found = classes[node.number_class]
    return not_(found) if node.is_not else found


def _exists(at: Field, scope: Scope) -> ColumnElement[bool]:
    match at.name:
        case "metrics":
            return _of_state(METRIC, at.key)
        case "attr":
            return _of_state(ATTRIBUTE, at.key)
        case "tag":
            return STATE.c.id.in_(select(REF.c.state_id).where(REF.c.kind == RefKind.TAG.value))
        case "branch":
            heads = select(REF.c.state_id).where(REF.c.kind == RefKind.BRANCH.value)
            return STATE.c.id.in_(select(first_parents_of(heads, scope.name()).c.id))
        case "message":
            return STATE.c.message.is_not(None)
        case "config":
            return _of_setting(at.key)
        case "run.uid" | "run.host" | "run.user" | "run.git_commit":
            return _of_run(run_column(at.name).is_not(None))
    return true()


def _related(node: Related, scope: Scope) -> ColumnElement[bool]:
    try:
        found = resolve(scope.session, node.revision, now=from_us(scope.now_us))
    except SyntaxProblem as problem:
        message = str(problem).split(" at column ")[0]
        raise SyntaxProblem(
            message,
            text=scope.text,
            column=node.column - 1 + problem.column,
            expected=problem.expected,
        ) from None
    start = id_of(scope.session, found.uid)
    head = select(STATE.c.id).where(STATE.c.id == literal(start, BigInteger))
    reach = (above if node.is_ancestor else below)(head, scope.name(), scope.dialect)
    return and_(STATE.c.id != literal(start, BigInteger), STATE.c.id.in_(select(reach.c.id)))


def _of_state(belongs: Any, key: str, *where: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition that the state has a metric or an attribute like this."""
    return exists(
        select(literal(1))
        .select_from(belongs)
        .where(belongs.c.state_id == STATE.c.id, belongs.c.key == key, *where)
    )


def _of_run(*where: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition that the state's run is like this."""
    return and_(STATE.c.run_id.is_not(None), STATE.c.run_id.in_(select(RUN.c.id).where(*where)))


def _named(kind: RefKind, operator: str, values: tuple[Value, ...], scope: Scope) -> Select[Any]:
    """The states to which refs of these names point."""
    names = _any(_text_is(REF.c.name, operator, value, scope.dialect) for value in values)
    return select(REF.c.state_id).where(REF.c.kind == kind.value, names)


def _of_setting(key: str, *where: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition that the state's run has a setting like this."""
    return and_(
        STATE.c.run_id.is_not(None),
        STATE.c.run_id.in_(select(SETTING.c.run_id).where(SETTING.c.key == key, *where)),
    )


def _typed_is(belongs: Any, operator: str, value: Value, dialect: str) -> ColumnElement[bool]:
    """Compares an attribute or a setting.

    Kinds do not mix: a number is compared with numbers, a text with texts."""
    match value:
        case bool():
            return and_(belongs.c.type == "bool", metric_is(belongs.c.number, operator, value))
        case int() | float():
            return and_(belongs.c.type.in_(_NUMBERS), _number_is(belongs, operator, value, dialect))
    return and_(
        belongs.c.type == "str",
        *_beginnings_are(belongs.c.text, operator, value, dialect),
        _text_is(belongs.c.text, operator, value, dialect),
    )


def _number_is(belongs: Any, operator: str, value: float, dialect: str) -> ColumnElement[bool]:
    """Compares numbers exactly, as Python does: where the nearest floats are equal the digits
    decide, which ints beyond 2**53 have."""
    number, digits, near = belongs.c.number, belongs.c.text, float(value)
    if not EXACT_INT <= abs(near) < math.inf:
        return metric_is(number, operator, near)
    whole = int(value)
    is_so = literal(bool(_OPERATORS[operator](int(near), whole)), Boolean)
    tied = case(
        (digits.is_(None), is_so),
        else_=_digits_are(by_code_point(digits, dialect), operator, whole),
    )
    return case((number == literal(near, Double), tied), else_=metric_is(number, operator, near))


def _digits_are(digits: ColumnElement[Any], operator: str, whole: int) -> ColumnElement[bool]:
    """Compares an int in a text column with one of the same sign: the longer is larger in
    magnitude, else the alphabetically later."""
    text = str(whole)
    length, longer = func.length(digits), literal(len(text), BigInteger)
    same = digits == literal(text, String)
    if operator in _EQUALITY:
        return same if operator == "=" else not_(same)
    is_beyond = _OPERATORS["<" if (operator[0] == "<") == (whole > 0) else ">"]
    beyond = or_(
        is_beyond(length, longer), and_(length == longer, is_beyond(digits, literal(text, String)))
    )
    return or_(beyond, same) if operator.endswith("=") else beyond


# Operators


def _text_is(
    column: ColumnElement[Any], operator: str, value: Value, dialect: str
) -> ColumnElement[bool]:
    text = literal(value, String)
    if operator == "~":
        return column.is_not(None) if value == "" else func.replace(column, text, "") != column
    if operator in ("=", "!="):
        return _operate(column, operator, text)
    return _operate(by_code_point(column, dialect), operator, text)


def _beginnings_are(
    column: ColumnElement[Any], operator: str, value: Value, dialect: str
) -> list[ColumnElement[bool]]:
    """The comparison of the beginnings of both texts that follows from a comparison. An index of
    PostgreSQL holds only the beginning of a text."""
    if dialect != "postgresql" or operator in ("~", "!="):
        return []
    implied = operator if operator == "=" else f"{operator[0]}="
    return [_operate(beginning(column), implied, beginning(literal(value, String)))]


def _begins(column: ColumnElement[Any], prefix: str) -> ColumnElement[bool]:
    """The condition that a uid begins with this prefix, as a range that its index serves."""
    return and_(column >= literal(prefix, String), column < literal(prefix + "g", String))


def _operate(
    column: ColumnElement[Any], operator: str, value: ColumnElement[Any]
) -> ColumnElement[bool]:
    compared: ColumnElement[bool] = _OPERATORS[operator](column, value)
    return compared


def _number(value: Value) -> ColumnElement[Any]:
    """A number as a database holds it, so that an integer column is compared exactly."""
    is_whole = isinstance(value, int) and -(2**63) <= value < 2**63
    return literal(value, BigInteger) if is_whole else literal(value, Double)


def _us(value: Value, scope: Scope) -> int:
    if isinstance(value, Ago):
        return clamp(scope.now_us - value.seconds * 1_000_000)
    assert isinstance(value, datetime)
    return to_us(value)


def _any(conditions: Iterable[ColumnElement[bool]]) -> ColumnElement[bool]:
    return or_(false(), *conditions)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}
