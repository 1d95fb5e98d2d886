"""The meaning of a search: its text as a tree of conditions, an order and a limit.

    metrics.val_loss < 0.2 and (step > 500 or tag = 'warm') order by metrics.val_loss limit 5
    not metrics."val/loss" >= 0.2 and config.optimizer.lr in (0.1, 0.01)
    metrics.loss is nan or metrics.loss is inf
    created > now-2h and descendant_of(warm~3)

Values are numbers, true and false, dates, and texts. The quotes of a text may be left out if it is
one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from lark import (
    Lark,
    Token,
    Transformer,
    UnexpectedCharacters,
    UnexpectedInput,
    UnexpectedToken,
    v_args,
)

from datastates.errors import SyntaxProblem
from datastates.lineage.states import Status
from datastates.system.logs import is_secret

_LENGTH = 10_000
_INT64 = 2**63 - 1
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class Problem(Exception):
    """A text that parses but has no meaning; ``parse`` turns it into a ``SyntaxProblem``."""

    def __init__(self, message: str, column: int, expected: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message, self.column, self.expected = message, column, expected


def load(name: str, transformer: Transformer[Token, Any]) -> Lark:
    """The parser of a grammar file in this folder.

    ``transformer`` works while it parses, so nesting costs no recursion."""
    grammar = Path(__file__).with_name(f"{name}.lark").read_text(encoding="utf-8")
    return Lark(
        grammar, parser="lalr", lexer="contextual", transformer=transformer, maybe_placeholders=True
    )


def parse(parser: Lark, text: str, names: dict[str, str]) -> Any:
    """What the transformer makes of the text. ``names`` has the names of its terminals in messages.

    :raises SyntaxProblem: it does not parse.
    """
    if len(text) > _LENGTH:
        raise SyntaxProblem(
            f"the text has {len(text)} characters, at most {_LENGTH} are read",
            text=text[:60] + "...",
            column=1,
        )
    unstorable = _UNSTORABLE.search(text)
    if unstorable:
        raise SyntaxProblem(
            "a character that no name can hold",
            text=_UNSTORABLE.sub("?", text),
            column=unstorable.start() + 1,
        )
    try:
        return parser.parse(text)
    except UnexpectedInput as error:
        raise _syntax_problem(error, text, names) from None
    except Problem as problem:
        raise SyntaxProblem(
            problem.message, text=text, column=problem.column, expected=problem.expected
        ) from None


def column_of(token: Token) -> int:
    """The position of a token in the text, from 1."""
    return (token.start_pos or 0) + 1


def problem_at(token: Token, message: str, expected: Iterable[str] = ()) -> Problem:
    """A problem with the text at a token."""
    return Problem(message, column_of(token), tuple(expected))


def unquote(token: Token) -> str:
    """The text of a token, without its quotes and escapes if it has them."""
    if token[:1] in ('"', "'"):
        return _ESCAPE.sub(r"\1", token[1:-1])
    return str(token)


def seconds(token: Token, text: str) -> int:
    """``90m`` as seconds; a count of more than 18 digits is a problem."""
    return whole(token, text[:-1].strip()) * _UNITS[text[-1].lower()]


def whole(token: Token, text: str | None = None) -> int:
    """An integer that fits 64 bits."""
    text = str(token) if text is None else text
    if len(text) > 18:
        raise problem_at(token, f"a number of {len(text)} digits is too large")
    return int(text)


def moment(token: Token) -> datetime:
    """An ISO date or time; without a zone it is local time."""
    try:
        return datetime.fromisoformat(unquote(token)).astimezone()
    except (ValueError, OverflowError, OSError) as error:
        raise problem_at(
            token,
            f"{unquote(token)!r} is no date ({error})",
            ("a date such as 2026-11-21 or 2026-11-21T10:00",),
        ) from None


def clamp(microseconds: int) -> int:
    """The nearest moment that a database can compare with."""
    return max(-_INT64, min(_INT64, microseconds))


def _syntax_problem(error: UnexpectedInput, text: str, names: dict[str, str]) -> SyntaxProblem:
    position = len(text)
    found = "the text ends too early"
    terminals: Iterable[str] = ()
    if isinstance(error, UnexpectedCharacters):
        position, terminals = getattr(error, "pos_in_stream", 0), error.allowed or ()
        found = f"{text[position]!r} cannot stand here" if position < len(text) else found
    elif isinstance(error, UnexpectedToken):
        terminals = error.accepts or error.expected
        if error.token.type != "$END":
            position = error.token.start_pos or 0
            found = f"{str(error.token)!r} cannot stand here"
    expected = sorted({names.get(terminal, "") for terminal in terminals} - {""})
    return SyntaxProblem(found, text=text, column=position + 1, expected=tuple(expected))


# The meaning of a search: its text as a tree of conditions, an order and a limit.


_DEPTH = 20
_VALUES = 500
_WALKS = 50
_KEYS = 20


class Kind(StrEnum):
    """The kind of value that a field holds and is compared with."""

    INTEGER = "numbers"
    METRIC = "numbers, like every metric"
    TEXT = "texts"
    UID = "the beginning of a uid: 4 to 24 hex digits"
    STATUS = "a status"
    TIME = "dates such as 2026-11-21 or now-2h"
    NAMES = "names"
    ANY = "numbers, texts, true and false"


_FIELDS = {
    "step": Kind.INTEGER,
    "micro_step": Kind.INTEGER,
    "created": Kind.TIME,
    "status": Kind.STATUS,
    "uid": Kind.UID,
    "message": Kind.TEXT,
    "branch": Kind.NAMES,
    "tag": Kind.NAMES,
    "run.uid": Kind.TEXT,
    "run.host": Kind.TEXT,
    "run.user": Kind.TEXT,
    "run.git_commit": Kind.TEXT,
}
_KEYED = {"metrics": Kind.METRIC, "attr": Kind.ANY, "config": Kind.ANY}
_KNOWN = (*_FIELDS, *(f"{prefix}.<name>" for prefix in _KEYED))
_EQUALITY = ("=", "!=")
_ORDERING = ("<", "<=", ">", ">=")
_OPERATORS = {
    Kind.INTEGER: _EQUALITY + _ORDERING,
    Kind.METRIC: _EQUALITY + _ORDERING,
    Kind.TIME: _EQUALITY + _ORDERING,
    Kind.TEXT: (*_EQUALITY, *_ORDERING, "~"),
    Kind.ANY: (*_EQUALITY, *_ORDERING, "~"),
    Kind.STATUS: _EQUALITY,
    Kind.UID: _EQUALITY,
    Kind.NAMES: (*_EQUALITY, "~"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """``name`` is one of the known ones; ``key`` is the name after ``metrics.``, ``attr.`` or
    ``config.``.

    A bare name such as ``val_loss`` has an empty ``name`` until ``fields.resolve_names`` finds
    what it names. ``column`` is the field's position in the text, from 1.
    """

    name: str
    kind: Kind
    key: str = ""
    column: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Ago:
    """A moment this long before now."""

    seconds: int


Value = int | float | str | bool | datetime | Ago


@dataclass(frozen=True, slots=True)
class Compare:
    """``operator`` is one of ``= != < <= > >= ~``."""

    field: Field
    operator: str
    value: Value


@dataclass(frozen=True, slots=True)
class Among:
    """The field equals one of the values."""

    field: Field
    values: tuple[Value, ...]


class NumberClass(StrEnum):
    """A class of floating-point numbers; ``inf`` has both infinities."""

    NAN = "nan"
    INF = "inf"
    FINITE = "finite"


@dataclass(frozen=True, slots=True)
class Classify:
    """The field is a number of the class, or with ``is_not`` a number of another class."""

    field: Field
    number_class: NumberClass
    is_not: bool


@dataclass(frozen=True, slots=True)
class Exists:
    """The state has the field at all."""

    field: Field


@dataclass(frozen=True, slots=True)
class Related:
    """An ancestor or a descendant of a revision; ``column`` is where the revision begins in the
    query."""

    is_ancestor: bool
    revision: str
    column: int


@dataclass(frozen=True, slots=True)
class Not:
    item: Node


@dataclass(frozen=True, slots=True)
class AllOf:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    items: tuple[Node, ...]


Node = Compare | Among | Classify | Exists | Related | Not | AllOf | AnyOf
Leaf = Compare | Among | Classify | Exists | Related
"""A single condition."""


@dataclass(frozen=True, slots=True)
class Order:
    field: Field
    is_descending: bool


@dataclass(frozen=True, slots=True)
class Query:
    """A whole query. Without a condition it means every state, without an order newest first."""

    condition: Node | None
    order: tuple[Order, ...]
    limit: int | None

    @property
    def conjuncts(self) -> tuple[Node, ...]:
        """The conditions that must all hold."""
        if isinstance(self.condition, AllOf):
            return self.condition.items
        return () if self.condition is None else (self.condition,)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields that it uses: first those that it orders by, then those that it filters by,
        each once."""
        leaves = () if self.condition is None else _leaves(self.condition)
        filtered = (one.field for one in leaves if not isinstance(one, Related))
        return tuple(dict.fromkeys((*(one.field for one in self.order), *filtered)))

    @property
    def presumed(self) -> tuple[Field, ...]:
        """The fields that it compares or orders by, and so expects to exist."""
        leaves = () if self.condition is None else _leaves(self.condition)
        compared = (one.field for one in leaves if isinstance(one, Compare | Among | Classify))
        return (*compared, *(one.field for one in self.order))


@lru_cache(maxsize=256)
def parse_query(text: str) -> Query:
    """The query that a text means.

    :raises SyntaxProblem: it does not parse, names an unknown field (the error lists the known
        ones), or compares what cannot be compared.
    """
    query: Query = parse(_parser(), text, _TERMINALS)
    return query


@v_args(inline=True)
class _Build(Transformer[Token, Any]):
    """Builds the query bottom-up, while the text is parsed."""

    @v_args(inline=False)
    def start(self, parts: list[Any]) -> Query:
        condition, order, limit = parts
        leaves = () if condition is None else tuple(_leaves(condition))
        if sum(len(one.values) if isinstance(one, Among) else 1 for one in leaves) > _VALUES:
            raise Problem(f"a query compares with at most {_VALUES} values: ask in several", 1)
        if sum(map(_reads_history, leaves)) > _WALKS:
            raise Problem(
                f"a query asks at most {_WALKS} times for branches, ancestors and descendants: ask"
                " in several",
                1,
            )
        if len(order or ()) > _KEYS:
            raise Problem(f"states are ordered by at most {_KEYS} fields, not by {len(order)}", 1)
        return Query(condition, order or (), limit)

    @v_args(inline=False)
    def either(self, items: list[Node]) -> Node:
        flat = (item.items if isinstance(item, AnyOf) else (item,) for item in items)
        return _shallow(AnyOf(tuple(chain.from_iterable(flat))))

    @v_args(inline=False)
    def both(self, items: list[Node]) -> Node:
        flat = (item.items if isinstance(item, AllOf) else (item,) for item in items)
        return _shallow(AllOf(tuple(chain.from_iterable(flat))))

    def negate(self, word: Token, item: Node) -> Node:
        return _shallow(Not(item), column_of(word))

    def group(self, item: Node) -> Node:
        return item

    def compare(self, field: _Named, operator: Token, value: Token) -> Node:
        sign = "=" if operator == "==" else str(operator)
        if sign not in _OPERATORS[field.field.kind]:
            raise problem_at(
                operator,
                f"{field.text} cannot be compared by '{sign}'",
                (*_OPERATORS[field.field.kind], "in", "exists"),
            )
        meant = _value(field, value)
        if (isinstance(meant, bool) and sign not in _EQUALITY) or (
            sign == "~" and not isinstance(meant, str)
        ):
            raise problem_at(
                operator,
                f"{value} cannot be compared by '{sign}'",
                _EQUALITY if sign != "~" else ("a text after '~'",),
            )
        return Compare(field.field, sign, meant)

    def among(self, field: _Named, word: Token, *values: Token) -> Node:
        return Among(field.field, tuple(_value(field, value) for value in values))

    def classify(self, field: _Named, word: Token, negation: Token | None, name: Token) -> Classify:
        if field.field.kind not in (Kind.METRIC, Kind.ANY):
            raise problem_at(
                word, f"{field.text} is never NaN or infinite", _OPERATORS[field.field.kind]
            )
        return Classify(field.field, NumberClass(name.lower()), negation is not None)

    def exists_before(self, word: Token, field: _Named) -> Node:
        return Exists(field.field)

    def exists_after(self, field: _Named, word: Token) -> Node:
        return Exists(field.field)

    def related(self, relation: Token, revision: Token) -> Node:
        is_quoted = revision[:1] in ("'", '"')
        return Related(
            relation.lower() == "ancestor_of", unquote(revision), column_of(revision) + is_quoted
        )

    def field(self, name: Token) -> _Named:
        return _Named(_field(name), str(name), column_of(name))

    @v_args(inline=False)
    def order(self, keys: list[Order]) -> tuple[Order, ...]:
        return tuple(keys)

    def key(self, field: _Named, direction: Token | None) -> Order:
        if field.field.kind is Kind.NAMES:
            raise Problem(f"states cannot be ordered by {field.text}", field.column)
        return Order(field.field, direction is not None and direction.lower() == "desc")

    def limit(self, number: Token) -> int:
        if not number.isdecimal():
            raise problem_at(number, f"{number} is no limit", ("a whole number",))
        return whole(number)


@dataclass(frozen=True, slots=True)
class _Named:
    """A field as it was written."""

    field: Field
    text: str
    column: int


def _field(token: Token) -> Field:
    """The field of a name whose parts may be quoted."""
    text, column = str(token), column_of(token)
    if text in _FIELDS:
        return Field(text, _FIELDS[text], column=column)
    for prefix, kind in _KEYED.items():
        if text.startswith(f"{prefix}."):
            key = ".".join(_parts(text[len(prefix) + 1 :]))
            if prefix == "config" and is_secret(key):
                raise problem_at(token, f"{key!r} names a secret: none is searched for")
            return Field(prefix, kind, key, column)
    return Field("", Kind.ANY, ".".join(_parts(text)), column)


def no_field(field: Field, text: str, others: Iterable[str] = ()) -> SyntaxProblem:
    """The error for a bare name that names nothing; ``others`` are further names to suggest."""
    close = get_close_matches(field.key, [*_FIELDS, *others], n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return SyntaxProblem(
        f"there is no field {field.key!r}{hint}", text=text, column=field.column, expected=_KNOWN
    )


def check_metric(leaf: Compare | Among | Classify | Exists, text: str) -> None:
    """Check a condition on a bare name that turned out to be a metric.

    :raises SyntaxProblem: metrics are not compared like this.
    """
    given = leaf.values if isinstance(leaf, Among) else ()
    if isinstance(leaf, Compare):
        given = ("",) if leaf.operator == "~" else (leaf.value,)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in given):
        raise SyntaxProblem(
            f"{leaf.field.key!r} is a metric, and is compared with numbers",
            text=text,
            column=leaf.field.column,
            expected=_OPERATORS[Kind.METRIC],
        )


def _parts(text: str) -> Iterator[str]:
    """``a."b.c".d`` as three parts."""
    while text:
        if text[0] in "\"'":
            end = 1
            while text[end] != text[0]:
                end += 2 if text[end] == "\\" else 1
            yield unquote(Token("STRING", text[: end + 1]))
            text = text[end + 2 :]
        else:
            part, _, text = text.partition(".")
            yield part


def _value(field: _Named, token: Token) -> Value:
    """The meaning of a value that is compared with a field."""
    match field.field.kind:
        case Kind.INTEGER | Kind.METRIC:
            if token.type in ("NUMBER", "INFINITY"):
                return _number(token)
        case Kind.TIME:
            if token.type == "NOW":
                _, _, age = token.partition("-")
                return Ago(seconds(token, age.strip()) if age else 0)
            if token.type in ("DATE", "STRING"):
                return moment(token)
        case Kind.UID:
            text = unquote(token).lower()
            if 4 <= len(text) <= 24 and all(letter in "0123456789abcdef" for letter in text):
                return text
        case Kind.STATUS:
            if unquote(token) in list(Status):
                return unquote(token)
            raise problem_at(token, f"there is no status {unquote(token)!r}", tuple(Status))
        case Kind.TEXT | Kind.NAMES:
            return unquote(token)
        case Kind.ANY:
            if token.type in ("NUMBER", "INFINITY"):
                return _number(token)
            return token.lower() == "true" if token.type == "BOOLEAN" else unquote(token)
    raise problem_at(
        token, f"{token} cannot be compared with {field.text}", (str(field.field.kind),)
    )


def _number(token: Token) -> int | float:
    """An int if 64 bits hold it, otherwise the nearest float."""
    digits = token.lstrip("+-")
    whole = int(token) if digits.isdecimal() and len(digits) <= 20 else None
    return float(token) if whole is None or not -(2**63) <= whole < 2**64 else whole


def _shallow(node: Node, column: int = 1) -> Node:
    """The node itself, unless its conditions are nested too deeply for a database."""
    if _depth(node) > _DEPTH:
        raise Problem(
            f"conditions are nested more than {_DEPTH} deep: ask in several queries", column
        )
    return node


def _depth(node: Node) -> int:
    match node:
        case Not(item):
            return 1 + _depth(item)
        case AllOf(items) | AnyOf(items):
            return 1 + max(_depth(item) for item in items)
    return 1


def _leaves(node: Node) -> Iterator[Leaf]:
    """The single conditions of which a condition is made."""
    match node:
        case Not(item):
            yield from _leaves(item)
        case AllOf(items) | AnyOf(items):
            for item in items:
                yield from _leaves(item)
        case _:
            yield node


def _reads_history(leaf: Leaf) -> bool:
    return isinstance(leaf, Related) or leaf.field.name == "branch"


_TERMINALS = {
    "NAME": "a field",
    "OPERATOR": "= != < <= > >= ~",
    "IN": "'in'",
    "NOT": "'not'",
    "IS": "'is'",
    "CLASS": "'nan', 'inf', 'finite'",
    "EXISTS": "'exists'",
    "RELATION": "'ancestor_of(', 'descendant_of('",
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "_AND": "'and'",
    "_OR": "'or'",
    "_ORDER": "'order by'",
    "_BY": "'by'",
    "_LIMIT": "'limit'",
    "DIRECTION": "'asc', 'desc'",
    "STRING": "a quoted text",
    "NUMBER": "a number",
    "DATE": "a date",
    "NOW": "'now-2h'",
    "BOOLEAN": "'true', 'false'",
    "BARE": "a word",
    "REVISION": "a revision",
    "$END": "the end",
}


@cache
def _parser() -> Lark:
    """Made for the first text that comes: it takes 25 ms, and most trainings search for nothing."""
    return load("search", _Build())
