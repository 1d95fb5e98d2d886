"""Revisions: short names of states, and of ranges of them.

    main, warm, 3f2a           a branch, a tag, the beginning of a uid (4 hex digits or more); a ref
                               goes before a uid
    "main"                     the same, quoted
    main~3, main~              the third, the first of its first parents
    x^2, x^                    the second, the first of its parents (``^1`` is the first parent)
    main@{2}                   where the ref was two moves ago, also if it is deleted
    main@{2h}, main@{2026-11-21T10:00}
                               where it was then; s m h d w; a time without a zone is local
    main@step:5000             the first state along first parents whose step is at most 5000
    main@best:val_loss         the least val_loss of the state and all its ancestors, ``:max`` the
                               greatest; the newest of equals
    a..b, a...b                reached from b but not from a; reached from one of them but not both

Suffixes chain from left to right; those on the reflog come right after the name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from lark import Lark, Token, Transformer, v_args
from sqlalchemy import BigInteger, Select, bindparam, case, select

from datastates.errors import Ambiguous, NotFound, SyntaxProblem
from datastates.lineage import lookup
from datastates.lineage.lookup import id_by_prefix, id_of, uids_of
from datastates.lineage.schema import (
    EVENT,
    METRIC,
    REF,
    STATE,
    from_us,
    is_finite,
    to_us,
)
from datastates.lineage.states import State

from . import walk
from .grammar import Problem, clamp, column_of, load, moment, parse, seconds, unquote, whole
from .incomplete import why_none
from .names import nearest
from .walk import above, first_parents

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_LEFT = 1
_RIGHT = 2


def difference(session: Session, left: int, right: int) -> tuple[list[int], list[int]]:
    """The ids that only ``left`` reaches, and those that only ``right`` reaches, falling; through
    every parent.

    This works as git paints its commits: ids fall along every path, so once both reach all that is
    still to be visited, they reach everything above it too. The cost is proportional to the result.
    """
    only: dict[int, list[int]] = {_LEFT: [], _RIGHT: []}
    heap: list[tuple[int, int, int, list[int], Iterator[tuple[int, list[int]]]]] = []
    serial = count()

    def push(steps: Iterator[tuple[int, list[int]]], side: int) -> None:
        for id_, further in steps:
            heapq.heappush(heap, (-id_, next(serial), side, further, steps))
            return

    push(first_parents(session, left, 0), _LEFT)
    push(first_parents(session, right, 0), _RIGHT)
    while any(entry[2] != _LEFT | _RIGHT for entry in heap):
        id_ = -heap[0][0]
        same = []
        while heap and -heap[0][0] == id_:
            same.append(heapq.heappop(heap))
        side = 0
        for entry in same:
            side |= entry[2]
        if side in only:
            only[side].append(id_)
        _, _, _, further, steps = same[0]
        push(steps, side)
        for parent in further:
            push(first_parents(session, parent, 0), side)
    return only[_LEFT], only[_RIGHT]


# Revisions: short names of states, and of ranges of them.


_SUFFIXES = 20
_WALKS = 4


@dataclass(frozen=True, slots=True)
class Range:
    """The states between two revisions, newest first.

    ``is_symmetric``: the states of both sides (``a...b``)."""

    left: State
    right: State
    is_symmetric: bool
    uids: tuple[str, ...]

    def states(self, session: Session, limit: int | None = None) -> list[State]:
        """The states themselves, newest first."""
        return lookup.states(session, list(self.uids[:limit]))


def resolve(session: Session, text: str, *, now: datetime | None = None) -> State:
    """The state that a revision names; ages (``@{2h}``) count from ``now``.

    :raises SyntaxProblem: it does not parse, or is a range; the error points at the column.
    :raises NotFound: nothing has this name (the error lists the nearest), or it goes beyond the
        root or the reflog.
    :raises Ambiguous: several uids begin like this; the error lists them.
    """
    return _state_of(session, resolve_id(session, text, now=now))


def resolve_id(session: Session, text: str, *, now: datetime | None = None) -> int:
    """The row id of ``resolve``, for queries in this folder and for caches of them."""
    parsed = _parse(text)
    if isinstance(parsed, _Span):
        raise SyntaxProblem(
            "one state is wanted here, not a range", text=text, column=parsed.column
        )
    return _resolve(session, parsed, now)


def resolve_range(session: Session, text: str, *, now: datetime | None = None) -> Range:
    """The states of ``a..b`` or ``a...b``. The cost is proportional to the result.

    :raises SyntaxProblem: it does not parse, or is no range.
    :raises NotFound: as ``resolve``.
    """
    parsed = _parse(text)
    if not isinstance(parsed, _Span):
        raise SyntaxProblem(
            "a range is wanted here", text=text, column=len(text) + 1, expected=("'..'", "'...'")
        )
    left, right = (
        _state_of(session, _resolve(session, side, now)) for side in (parsed.left, parsed.right)
    )
    only_left, only_right = difference(session, id_of(session, left.uid), id_of(session, right.uid))
    between = sorted(only_left + only_right, reverse=True) if parsed.is_symmetric else only_right
    return Range(left, right, parsed.is_symmetric, tuple(uids_of(session, between)))


# What a text means


@dataclass(frozen=True, slots=True)
class _FirstParents:
    count: int


@dataclass(frozen=True, slots=True)
class _Parent:
    number: int


@dataclass(frozen=True, slots=True)
class _AtStep:
    step: int


@dataclass(frozen=True, slots=True)
class _Best:
    key: str
    is_max: bool


@dataclass(frozen=True, slots=True)
class _Moves:
    """The ref as it was a number of moves ago."""

    count: int
    column: int


@dataclass(frozen=True, slots=True)
class _When:
    """The ref as it was at a moment, or so many seconds ago."""

    moment: datetime | None
    age_s: int
    column: int


_Then = _Moves | _When
_Suffix = _FirstParents | _Parent | _AtStep | _Best


@dataclass(frozen=True, slots=True)
class _Revision:
    name: str
    then: _Then | None
    suffixes: tuple[_Suffix, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    left: _Revision
    right: _Revision
    is_symmetric: bool
    column: int


@v_args(inline=True)
class _Build(Transformer[Token, Any]):
    def range(self, left: _Revision, span: Token, right: _Revision) -> _Span:
        return _Span(left, right, span == "...", column_of(span))

    def name(self, token: Token) -> str:
        return unquote(token)

    def revision(self, name: str, *suffixes: _Suffix | _Then) -> _Revision:
        if len(suffixes) > _SUFFIXES:  # each is a query, and any reader may send one
            raise Problem(
                f"a revision has at most {_SUFFIXES} suffixes, this one {len(suffixes)}: write ~~~~"
                " as ~4",
                1,
            )
        walks = sum(isinstance(suffix, _Best) for suffix in suffixes)
        if walks > _WALKS:
            raise Problem(
                f"a revision has at most {_WALKS} times '@best', this one {walks}: each looks at a"
                " whole history",
                1,
            )
        then = suffixes[0] if suffixes and isinstance(suffixes[0], _Then) else None
        rest: list[_Suffix] = []
        for suffix in suffixes[1:] if then else suffixes:
            if isinstance(suffix, _Then):
                raise Problem(
                    "the reflog is a ref's, so '@{' comes right after the name", suffix.column
                )
            rest.append(suffix)
        return _Revision(name, then, tuple(rest))

    def first_parents(self, count: Token | None) -> _Suffix:
        return _FirstParents(1 if count is None else whole(count))

    def parent(self, number: Token | None) -> _Suffix:
        return _Parent(1 if number is None else whole(number))

    def at_step(self, step: Token) -> _Suffix:
        return _AtStep(whole(step))

    def best(self, key: Token, direction: Token | None) -> _Suffix:
        return _Best(unquote(key), direction == "max")

    def moves_ago(self, begin: Token, count: Token) -> _Then:
        return _Moves(whole(count), column_of(begin))

    def time_ago(self, begin: Token, age: Token) -> _Then:
        return _When(None, seconds(age, age), column_of(begin))

    def at_time(self, begin: Token, then: Token) -> _Then:
        return _When(moment(then), 0, column_of(begin))


_NAMES = {
    "NAME": "a ref or a uid",
    "QUOTED": "a quoted name",
    "KEY": "a metric",
    "DIRECTION": "'min' or 'max'",
    "COLON": "':max'",
    "STEP": "a step",
    "INT": "a number",
    "AGE": "an age such as 2h",
    "MOMENT": "a date",
    "THEN": "'@{'",
    "RBRACE": "'}'",
    "SPAN": "'..'",
    "TILDE": "'~'",
    "CIRCUMFLEX": "'^'",
    "__ANON_0": "'@step:'",
    "__ANON_1": "'@best:'",
    "$END": "the end",
}


@cache
def _parser() -> Lark:
    """Made for the first text that comes: it takes 25 ms, and a training that starts from
    nothing names no state."""
    return load("revision", _Build())


@lru_cache(maxsize=1024)
def _parse(text: str) -> _Revision | _Span:
    parsed: _Revision | _Span = parse(_parser(), text, _NAMES)
    return parsed


# From names to states: row ids on the way, the state itself only at the end


def _resolve(session: Session, revision: _Revision, now: datetime | None) -> int:
    id_ = (
        _base(session, revision.name)
        if revision.then is None
        else _stood(session, revision.name, revision.then, now)
    )
    for suffix in revision.suffixes:
        id_ = _follow(session, id_, suffix)
    return id_


def _state_of(session: Session, id_: int) -> State:
    return lookup.states(session, [id_])[0]


def _base(session: Session, name: str) -> int:
    """The state of a ref, or of the only uid that begins like this."""
    id_ = session.execute(_REF, {"ref": name}).scalar()
    if id_ is not None:
        return int(id_)
    if _is_uid_like(name):
        try:
            return id_by_prefix(session, name)
        except Ambiguous:
            raise
        except NotFound as error:
            raise NotFound(why_none(session, name) or str(error)) from error
    raise NotFound(f"there is no branch, tag or uid {name!r}{nearest(session, name)}")


def _stood(session: Session, name: str, then: _Then, now: datetime | None) -> int:
    """The state at which a ref stood, by its reflog."""
    if isinstance(then, _Moves):
        event = session.execute(_MOVED, {"ref": name, "skip": then.count}).first()
        when = f"{then.count} moves ago"
    else:
        us = to_us(then.moment) if then.moment else clamp(to_us(now) - then.age_s * 1_000_000)
        event = session.execute(_STOOD, {"ref": name, "us": us}).first()
        when = f"{then.age_s} s ago" if then.moment is None else f"at {then.moment.isoformat()}"
    if event is None:
        first = session.execute(_FIRST_EVENT, {"ref": name}).first()
        if first is None:
            raise NotFound(f"there never was a branch or tag {name!r}{nearest(session, name)}")
        raise NotFound(
            f"{name!r} did not exist {when}: its reflog begins at"
            f" {from_us(first.created_at).isoformat()}"
        )
    if event.new_id is None:
        raise NotFound(
            f"{name!r} did not exist {when}: it was deleted at"
            f" {from_us(event.created_at).isoformat()}"
        )
    return int(event.new_id)


def _follow(session: Session, id_: int, suffix: _Suffix) -> int:
    match suffix:
        case _FirstParents(count):
            return walk.nth_ancestor_id(session, id_, count) if count else id_
        case _Parent(number):
            return _parent(session, id_, number)
        case _AtStep(step):
            return _at_step(session, id_, step)
        case _Best(key, is_max):
            return _best(session, id_, key, is_max)


def _parent(session: Session, id_: int, number: int) -> int:
    if number == 0:
        return id_
    state = _state_of(session, id_)
    if number > len(state.parents):
        raise NotFound(f"{state.uid} has {len(state.parents)} parents: there is no ^{number}")
    return id_of(session, state.parents[number - 1])


def _at_step(session: Session, id_: int, step: int) -> int:
    found = session.execute(_AT_STEP, {"start": id_, "step": step}).scalar()
    if found is None:
        state = _state_of(session, id_)
        raise NotFound(
            f"neither {state.uid} (step {state.step}) nor any of its first parents is at or before"
            f" step {step}"
        )
    return int(found)


def best_id(session: Session, id_: int, key: str, *, is_max: bool) -> int | None:
    """The state that ``@best`` names, by row id: the best in a metric among a state and all its
    ancestors. None if none has a number."""
    query = _best_query(session.dialect.name, is_max)
    found = session.execute(query, {"start": id_, "metric": key}).scalar()
    return None if found is None else int(found)


def _best(session: Session, id_: int, key: str, is_max: bool) -> int:
    found = best_id(session, id_, key, is_max=is_max)
    if found is None:
        uid = _state_of(session, id_).uid
        known = [each for each in session.execute(_KEYS, {"state": id_}).scalars() if each != key]
        hint = f" ({uid} has {', '.join(known[:10])})" if known else ""
        if (
            session.execute(
                _any_query(session.dialect.name), {"start": id_, "metric": key}
            ).scalar()
            is not None
        ):
            raise NotFound(
                f"{key!r} is NaN or infinite in {uid} and its ancestors, so none is the best:"
                f" name a state, or another metric{hint}"
            )
        raise NotFound(f"neither {uid} nor any of its ancestors has a metric {key!r}{hint}")
    return found


def _is_uid_like(name: str) -> bool:
    return 4 <= len(name) <= 24 and all(letter in "0123456789abcdefABCDEF" for letter in name)


_REF = select(REF.c.state_id).where(REF.c.name == bindparam("ref"))
_EVENTS = select(EVENT.c.new_id, EVENT.c.created_at).where(EVENT.c.name == bindparam("ref"))
_MOVED = _EVENTS.order_by(EVENT.c.id.desc()).limit(1).offset(bindparam("skip", type_=BigInteger))
_STOOD = (
    _EVENTS.where(EVENT.c.created_at <= bindparam("us", type_=BigInteger))
    .order_by(EVENT.c.id.desc())
    .limit(1)
)
_FIRST_EVENT = _EVENTS.order_by(EVENT.c.id).limit(1)
_KEYS = select(METRIC.c.key).where(METRIC.c.state_id == bindparam("state")).order_by(METRIC.c.key)


def _at_step_query() -> Select[Any]:
    """Walk up from ``start`` to the first state whose step is at most ``step``; jump where every
    state jumped over is later."""
    step, next_ = bindparam("step", type_=BigInteger), STATE.alias()
    columns = ("id", "parent_id", "jump_id", "jump_step", "step")
    walk = (
        select(*(STATE.c[name] for name in columns))
        .where(STATE.c.id == bindparam("start"))
        .cte("seek", recursive=True)
    )
    up = case((walk.c.jump_step > step, walk.c.jump_id), else_=walk.c.parent_id)
    walk = walk.union_all(
        select(*(next_.c[name] for name in columns))
        .join_from(walk, next_, next_.c.id == up)
        .where(walk.c.step > step)
    )
    return select(walk.c.id).where(walk.c.step <= step)


@lru_cache(maxsize=8)
def _best_query(dialect: str, is_max: bool) -> Select[Any]:
    value = METRIC.c.value.desc() if is_max else METRIC.c.value.asc()
    return (
        _measured(dialect)
        .where(is_finite(METRIC.c.value))
        .order_by(value, METRIC.c.state_id.desc())
        .limit(1)
    )


@lru_cache(maxsize=8)
def _any_query(dialect: str) -> Select[Any]:
    return _measured(dialect).limit(1)


def _measured(dialect: str) -> Select[Any]:
    """The states among ``start`` and all its ancestors that have a ``metric``."""
    start = select(STATE.c.id).where(STATE.c.id == bindparam("start"))
    reached = above(start, "reached", dialect)
    query = select(METRIC.c.state_id).join_from(reached, METRIC, METRIC.c.state_id == reached.c.id)
    return query.where(METRIC.c.key == bindparam("metric"))


_AT_STEP = _at_step_query()
