"""The names in a lineage: metrics, attributes, and settings of runs. Also the error for an unknown
name.

A kind of names is called as in a query: ``metrics``, ``attr``, ``config``. To add a kind, add a
line to ``_KINDS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from sqlalchemy import String, Table, literal, select

from datastates.errors import SyntaxProblem
from datastates.lineage.lookup import keys_of
from datastates.lineage.schema import (
    ATTRIBUTE,
    METRIC,
    SETTING,
    STATE,
)
from datastates.system.logs import is_secret

from .grammar import (
    AllOf,
    AnyOf,
    Field,
    Kind,
    Node,
    Not,
    Query,
    Related,
    check_metric,
    no_field,
    parse_query,
)

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_LISTED = 12

_ANY_STATE = select(STATE.c.id).limit(1)


@dataclass(frozen=True, slots=True)
class _Names:
    """One kind of names; ``word`` is what people call one of them."""

    word: str
    kind: Kind
    table: Table


def check_names(session: Session, query: Query | str, text: str | None = None) -> None:
    """Check that the lineage has the names that a query compares and orders by. A lineage without
    states accepts every query.

    ``text`` is what messages point into: the query's text, unless another is given. The names in
    ``exists`` may be missing.

    :raises SyntaxProblem: no state has such a metric or attribute, or no run such a setting: names
        close ones, and points at the column.
    """
    text = query if isinstance(query, str) else text
    query = parse_query(query) if isinstance(query, str) else query
    for field in resolve_names(session, query, text or "").presumed:
        kind = _KINDS.get(field.name)
        if kind is not None and not _has(session, kind, field.key) and _has_states(session):
            raise unknown(session, field, written(field) if text is None else text)


def resolve_names(session: Session, query: Query, text: str) -> Query:
    """The query with each bare name as a metric, else a setting, else an attribute.

    :raises SyntaxProblem: a bare name names none of these, or is compared in a way that its kind
        does not allow; the error points into ``text``.
    """
    if all(field.name for field in query.fields):
        return query

    def named(field: Field) -> Field:
        if field.name:
            return field
        for name, names in _KINDS.items():
            is_hidden = names.table is SETTING and is_secret(field.key)
            if not is_hidden and _has(session, names, field.key):
                return Field(name, names.kind, field.key, field.column)
        raise no_field(field, text, known_names(session).values())

    def resolved(node: Node) -> Node:
        match node:
            case Related():
                return node
            case Not(item):
                return Not(resolved(item))
            case AllOf(items) | AnyOf(items):
                return type(node)(tuple(map(resolved, items)))
        found = replace(node, field=named(node.field))
        if found.field.kind is Kind.METRIC:
            check_metric(found, text)
        return found

    condition = None if query.condition is None else resolved(query.condition)
    order = tuple(replace(one, field=named(one.field)) for one in query.order)
    return Query(condition, order, query.limit)


def field_of(session: Session, text: str) -> Field:
    """The field that a column or a sort key names: as in a query, or a metric, an attribute or a
    setting by its bare name.

    :raises SyntaxProblem: nothing has this name; the error names close ones.
    """
    for name, kind in _KINDS.items():
        if _has(session, kind, text):
            return Field(name, kind.kind, text)
    try:
        (field,) = parse_query(f"exists {text}").fields
    except (SyntaxProblem, ValueError):
        field = Field("", Kind.ANY, text)
    if not field.name:
        raise unknown(session, Field("metrics", Kind.METRIC, text), text)
    known = _KINDS.get(field.name)
    if known is not None and not _has(session, known, field.key) and _has_states(session):
        raise unknown(session, Field(field.name, field.kind, field.key), text)
    return field


def unknown(session: Session, field: Field, text: str) -> SyntaxProblem:
    """The error for a name that nothing in the lineage has; ``text`` contains it, at the field's
    column."""
    kind, known = _KINDS[field.name], known_names(session)
    own = [name for name in known if name.startswith(f"{field.name}.")]
    close = _close(field, known)
    hint = (
        f", did you mean {' or '.join(close)}?"
        if close
        else ""
        if own
        else f": no state has any {kind.word}"
    )
    listed = own[:_LISTED] + ["…"] * (len(own) > _LISTED)
    return SyntaxProblem(
        f"there is no {kind.word} {field.key!r}{hint}",
        text=text,
        column=field.column,
        expected=tuple(listed),
    )


def known_names(session: Session) -> dict[str, str]:
    """The key of every metric, setting and attribute by its name in a query. Secrets are left
    out."""
    return {
        written(Field(name, each.kind, key)): key
        for name, each in _KINDS.items()
        for key in _every_key(session, each)
    }


def written(field: Field) -> str:
    """The field as it is written in a query."""
    return f"{field.name}.{_quoted(field.key)}" if field.key else field.name


def _quoted(key: str) -> str:
    parts = key.split(".")
    if all(part and all(letter.isalnum() or letter in "_-/" for letter in part) for part in parts):
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _close(field: Field, known: dict[str, str]) -> list[str]:
    """The same name in any kind, or else the most similar name, of its own kind if there is one."""
    same = [name for name, key in known.items() if key.casefold() == field.key.casefold()]
    own = [name for name in known if name.startswith(f"{field.name}.")]
    for names_ in () if same else (own, list(known)):
        for key in get_close_matches(field.key, [known[name] for name in names_], n=1):
            return [next(name for name in names_ if known[name] == key)]
    return same


def _has_states(session: Session) -> bool:
    return session.execute(_ANY_STATE).first() is not None


def _every_key(session: Session, names: _Names) -> list[str]:
    """All keys of a kind, without secrets. The cost depends on the number of keys, not of
    states."""
    keys = session.execute(select(keys_of(names.table).c.key)).scalars()
    hides = names.table is SETTING
    return sorted(key for key in keys if key is not None and not (hides and is_secret(key)))


def _has(session: Session, names: _Names, key: str) -> bool:
    of_key = select(names.table.c.key).where(names.table.c.key == literal(key, String))
    return session.execute(of_key.limit(1)).first() is not None


_KINDS = {
    "metrics": _Names("metric", Kind.METRIC, METRIC),
    "config": _Names("setting", Kind.ANY, SETTING),
    "attr": _Names("attribute", Kind.ANY, ATTRIBUTE),
}
"""The kinds, in the order in which bare names are looked up."""
