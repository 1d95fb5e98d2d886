"""Random queries agree with a brute-force evaluator, on both databases and through every cursor;
errors point and list."""

from __future__ import annotations

import base64
import math
from datetime import datetime, timedelta
from functools import cmp_to_key
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, select

from datastates.errors import DatastatesError, InvalidInput, NotFound, SyntaxProblem
from datastates.lineage import Database, Run, State, Status
from datastates.lineage.query import pages
from datastates.lineage.query.grammar import (
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
    Order,
    Query,
    Related,
    Value,
    parse_query,
)
from datastates.lineage.query.pages import find, find_all
from datastates.lineage.query.revision import resolve
from tests.lineage.conftest import Grow, on_one_database
from tests.lineage.oracle import ATTRIBUTES, LARGE, METRICS, NOW, NUMBERS, START, TEXTS, Lineage
from tests.lineage.oracle import grow as grow_lineage
from tests.support.effort import examples, seeds

# Random queries

NUMERIC = ["=", "!=", "<", "<=", ">", ">="]
_numbers = st.sampled_from(NUMBERS)
_texts = st.sampled_from([*TEXTS, "b", "abc123"])
_metric = st.sampled_from(METRICS).map(lambda key: Field("metrics", Kind.METRIC, key))
_attribute = st.sampled_from(ATTRIBUTES).map(lambda key: Field("attr", Kind.ANY, key))
_config = st.sampled_from(["lr", "seed", "ü", "flag", "none", "absent"]).map(
    lambda key: Field("config", Kind.ANY, key)
)
_integer = st.sampled_from(["step", "micro_step"]).map(lambda name: Field(name, Kind.INTEGER))
_text = st.sampled_from(["message", "run.host", "run.user", "run.git_commit", "run.uid"]).map(
    lambda name: Field(name, Kind.TEXT)
)
_names = st.sampled_from(["branch", "tag"]).map(lambda name: Field(name, Kind.NAMES))
_status, _uid, _created = (
    Field("status", Kind.STATUS),
    Field("uid", Kind.UID),
    Field("created", Kind.TIME),
)
_times = st.one_of(
    st.integers(0, 40).map(lambda hours: START + timedelta(hours=hours)),
    st.integers(0, 260).map(lambda hours: Ago(hours * 3600)),
)
_ref_names = st.sampled_from(["main", "fork", "other", "warm", "x/y.z-1", "absent"])


def _compare(
    fields: st.SearchStrategy[Field], operators: list[str], values: st.SearchStrategy[Value]
) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.builds(Compare, fields, st.sampled_from(operators), values),
        st.builds(Among, fields, st.lists(values, min_size=1, max_size=3).map(tuple)),
    )


def _leaves(lineage: Lineage) -> st.SearchStrategy[Node]:
    uids = st.sampled_from([state.uid for state in lineage.states])
    revisions = st.one_of(st.sampled_from(sorted(lineage.branches)), uids, st.just("warm"))
    any_values: st.SearchStrategy[Value] = st.one_of(_numbers, _texts, st.sampled_from(LARGE))
    return st.one_of(
        _compare(_metric, NUMERIC, _numbers),
        st.builds(
            Classify,
            st.one_of(_metric, _attribute, _config),
            st.sampled_from(NumberClass),
            st.booleans(),
        ),
        _compare(_integer, NUMERIC, st.one_of(st.integers(-1, 12), _numbers, st.just(10**17))),
        _compare(_text, [*NUMERIC, "~"], _texts),
        _compare(st.one_of(_attribute, _config), NUMERIC, any_values),
        _compare(st.one_of(_attribute, _config), ["~"], _texts),
        _compare(st.one_of(_attribute, _config), ["=", "!="], st.booleans()),
        _compare(_names, ["=", "!=", "~"], _ref_names),
        _compare(st.just(_status), ["=", "!="], st.sampled_from(list(Status)).map(str)),
        _compare(
            st.just(_uid),
            ["=", "!="],
            st.builds(lambda uid, length: uid[:length], uids, st.integers(4, 24)),
        ),
        _compare(st.just(_created), NUMERIC, _times),
        st.builds(
            Exists,
            st.one_of(_metric, _attribute, _config, _text, _names, _integer, st.just(_created)),
        ),
        st.builds(Related, st.booleans(), revisions, st.just(0)),
    )


def _queries(lineage: Lineage) -> st.SearchStrategy[Query]:
    nodes = st.recursive(
        _leaves(lineage),
        lambda inner: st.one_of(
            inner.map(Not),
            st.lists(inner, min_size=2, max_size=3).map(lambda items: AllOf(tuple(items))),
            st.lists(inner, min_size=2, max_size=3).map(lambda items: AnyOf(tuple(items))),
        ),
        max_leaves=6,
    )
    orderable = st.one_of(
        _metric, _attribute, _config, _integer, _text, st.sampled_from([_status, _uid, _created])
    )
    orders = st.lists(st.builds(Order, orderable, st.booleans()), max_size=3).map(tuple)
    return st.builds(
        Query, st.one_of(st.none(), nodes), orders, st.one_of(st.none(), st.integers(0, 40))
    )


# A query as text


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _field(field: Field) -> str:
    return f"{field.name}.{_quoted(field.key)}" if field.key else field.name


def _value(value: Value) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Ago(seconds):
            return f"now-{seconds // 3600}h"
        case datetime():
            return value.isoformat()
        case str():
            return _quoted(value)
    return str(value)


def _written(node: Node) -> str:
    match node:
        case Compare(field, operator, value):
            return f"{_field(field)} {operator} {_value(value)}"
        case Among(field, values):
            return f"{_field(field)} in ({', '.join(_value(value) for value in values)})"
        case Classify(field, number_class, is_not):
            return f"{_field(field)} is {'not ' * is_not}{number_class}"
        case Exists(field):
            return f"exists {_field(field)}"
        case Related(is_ancestor, revision):
            return f"{'ancestor' if is_ancestor else 'descendant'}_of({revision})"
        case Not(item):
            return f"not ({_written(item)})"
        case AllOf(items):
            return "(" + " and ".join(_written(item) for item in items) + ")"
        case AnyOf(items):
            return "(" + " or ".join(_written(item) for item in items) + ")"


def _text_of(query: Query) -> str:
    parts = [] if query.condition is None else [_written(query.condition)]
    if query.order:
        parts.append(
            "order by "
            + ", ".join(
                f"{_field(one.field)} {'desc' if one.is_descending else 'asc'}"
                for one in query.order
            )
        )
    return " ".join(parts if query.limit is None else [*parts, f"limit {query.limit}"])


# Brute force


def _holds(node: Node, state: State, lineage: Lineage) -> bool:
    match node:
        case Not(item):
            return not _holds(item, state, lineage)
        case AllOf(items):
            return all(_holds(item, state, lineage) for item in items)
        case AnyOf(items):
            return any(_holds(item, state, lineage) for item in items)
        case Classify(field, number_class, is_not):
            return any(
                (_class_of(held) is number_class) != is_not
                for held in _held(field, state, lineage)
                if isinstance(held, int | float) and not isinstance(held, bool)
            )
        case Exists(field):
            return bool(_held(field, state, lineage))
        case Related(is_ancestor, revision):
            other = lineage.by_uid[
                lineage.branches.get(revision) or lineage.tags.get(revision) or revision
            ]
            older, newer = (state, other) if is_ancestor else (other, state)
            return older.uid != newer.uid and older.uid in lineage.reach(newer)
        case Among(field, values):
            return any(_holds(Compare(field, "=", value), state, lineage) for value in values)
        case Compare(Field(kind=Kind.NAMES) as field, "!=", value):
            return not _holds(Compare(field, "=", value), state, lineage)
        case Compare(field, operator, value):
            return any(
                _compares(field, held, operator, value) for held in _held(field, state, lineage)
            )


def _class_of(number: float) -> NumberClass:
    return (
        NumberClass.NAN
        if math.isnan(number)
        else NumberClass.INF
        if math.isinf(number)
        else NumberClass.FINITE
    )


def _held(field: Field, state: State, lineage: Lineage) -> list[object]:
    """All that a state has of a field."""
    run: Run | None = lineage.runs.get(state.run or "")
    match field.name:
        case "metrics" | "attr":
            values = state.metrics if field.name == "metrics" else state.attributes
            return [values[field.key]] if field.key in values else []
        case "config":
            return [run.config[field.key]] if run and field.key in run.config else []
        case "tag":
            return [name for name, uid in lineage.tags.items() if uid == state.uid]
        case "branch":
            return [
                name
                for name, uid in lineage.branches.items()
                if state in lineage.chain(lineage.by_uid[uid])
            ]
        case "created":
            return [state.created_at]
        case "status":
            return [str(state.status)]
    found = (
        getattr(run, field.name[4:])
        if run and "." in field.name
        else getattr(state, field.name, None)
    )
    return [] if found is None else [found]


def _compares(field: Field, held: object, operator: str, value: object) -> bool:
    if isinstance(value, Ago):
        value = NOW - timedelta(seconds=value.seconds)
    if field.kind is Kind.UID:
        return str(held).startswith(str(value)) == (operator == "=")
    kinds = (bool, str, datetime)
    if (
        any(isinstance(held, kind) != isinstance(value, kind) for kind in kinds)
        or held is None
        or held != held
    ):
        return False
    ours: Any = held  # both are of one kind by now
    theirs: Any = value
    match operator:
        case "=":
            return bool(ours == theirs)
        case "!=":
            return bool(ours != theirs)
        case "<":
            return bool(ours < theirs)
        case "<=":
            return bool(ours <= theirs)
        case ">":
            return bool(ours > theirs)
        case ">=":
            return bool(ours >= theirs)
    return str(theirs) in str(ours)


def _expected(query: Query, lineage: Lineage) -> list[str]:
    found = [
        (index, state)
        for index, state in enumerate(lineage.states)
        if query.condition is None or _holds(query.condition, state, lineage)
    ]

    def before(one: tuple[int, State], other: tuple[int, State]) -> int:
        for order in query.order:
            for a, b in zip(
                _sort_keys(order.field, one[1], lineage),
                _sort_keys(order.field, other[1], lineage),
                strict=True,
            ):
                if a != b and (a is None or b is None):
                    return 1 if a is None else -1
                if a != b:
                    # of one kind
                    return -1 if (a < b) != order.is_descending else 1  # type: ignore[operator]
        falls = query.order[-1].is_descending if query.order else True
        return other[0] - one[0] if falls else one[0] - other[0]

    ordered = [state.uid for _, state in sorted(found, key=cmp_to_key(before))]
    return ordered[: query.limit]


def _sort_keys(field: Field, state: State, lineage: Lineage) -> list[object]:
    held = next(iter(_held(field, state, lineage)), None)
    if isinstance(held, float) and not math.isfinite(held):
        held = None
    if field.name not in ("attr", "config"):
        return [held]
    # a number
    return [None, held] if isinstance(held, str) else [held if held is None else float(held), None]  # type: ignore[arg-type]


def _pages(database: Database, text: str, limit: int | None) -> list[str]:
    found: list[str] = []
    after = None
    with database.read() as session:
        while True:
            page = find(session, text, after=after, limit=limit, now=NOW if after is None else None)
            found += [state.uid for state in page.states]
            assert page.next is None or page.states
            if page.next is None:
                return found
            after = page.next


@pytest.mark.parametrize("seed", seeds(5))
def test_random_queries_find_what_brute_force_finds_through_every_cursor(
    database: Database, seed: int
) -> None:
    lineage = grow_lineage(database, seed)

    @settings(max_examples=examples(40))
    @given(query=_queries(lineage), page=st.sampled_from([1, 3, 7, None]))
    def check(query: Query, page: int | None) -> None:
        assert _pages(database, _text_of(query), page) == _expected(query, lineage)

    check()


@pytest.mark.parametrize("selective", [0, 2])
def test_every_plan_finds_the_same(
    database: Database, monkeypatch: pytest.MonkeyPatch, selective: int
) -> None:
    # so few that indexes are read in order
    monkeypatch.setattr("datastates.lineage.query.pages.SELECTIVE", selective)
    lineage = grow_lineage(database, 99)

    @settings(max_examples=examples(40))
    @given(query=_queries(lineage), page=st.sampled_from([1, 3, None]))
    def check(query: Query, page: int | None) -> None:
        assert _pages(database, _text_of(query), page) == _expected(query, lineage)

    check()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("around", [2**53, 10**16, 2**63 - 2])
def test_whole_numbers_with_the_same_nearest_float_are_told_apart(
    database: Database, grow: Grow, around: int, sign: int
) -> None:
    numbers = [sign * (around + more) for more in (-1, 0, 1)]
    states = {number: grow(attributes={"seed": number}).uid for number in numbers}
    for operator, holds in [("=", eq), ("!=", ne), ("<", lt), ("<=", le), (">", gt), (">=", ge)]:
        for asked in numbers:
            with database.read() as session:
                found = {
                    state.uid for state in find(session, f"attr.seed {operator} {asked}").states
                }
            assert found == {uid for number, uid in states.items() if holds(number, asked)}, (
                operator,
                asked,
            )


def test_what_a_state_lacks_compares_as_false_and_not_of_it_is_true(
    database: Database, grow: Grow
) -> None:
    lacks = grow(branch="main")
    nan = grow(lacks, branch="main", metrics={"loss": math.nan})
    has = grow(nan, branch="main", metrics={"loss": 0.5})
    with database.read() as session:
        for text, expected in [
            ("metrics.loss < 1", [has]),
            ("metrics.loss != 1", [has]),
            ("not metrics.loss < 1", [nan, lacks]),
            ("not metrics.loss >= 1", [has, nan, lacks]),
            ("exists metrics.loss", [has, nan]),
            ("order by metrics.loss", [has, lacks, nan]),
            ("order by metrics.loss desc", [has, nan, lacks]),
        ]:
            assert [state.uid for state in find(session, text).states] == [
                state.uid for state in expected
            ], text


def test_nan_and_infinities_are_found_and_come_last(database: Database, grow: Grow) -> None:
    lacks = grow(branch="main", attributes={"x": True})
    nan = grow(lacks, branch="main", metrics={"loss": math.nan}, attributes={"x": math.nan})
    low = grow(nan, branch="main", metrics={"loss": -math.inf}, attributes={"x": -math.inf})
    high = grow(low, branch="main", metrics={"loss": math.inf}, attributes={"x": math.inf})
    one = grow(high, branch="main", metrics={"loss": 1.0}, attributes={"x": "nan"})
    two = grow(one, branch="main", metrics={"loss": 2.0}, attributes={"x": 2})
    with database.read() as session:
        for text, expected in [
            ("metrics.loss is nan", [nan]),
            ("metrics.loss is inf", [high, low]),
            ("metrics.loss = -inf", [low]),
            ("metrics.loss is finite", [two, one]),
            ("metrics.loss is not finite", [high, low, nan]),
            ("metrics.loss is not NaN", [two, one, high, low]),
            ("not metrics.loss is nan", [two, one, high, low, lacks]),
            ("attr.x is nan or attr.x is inf", [high, low, nan]),
            ("order by metrics.loss", [one, two, lacks, nan, low, high]),
            ("order by metrics.loss desc", [two, one, high, low, nan, lacks]),
            ("metrics.loss > 0 order by metrics.loss", [one, two, high]),
            ("metrics.loss < 2 order by metrics.loss desc", [one, low]),
        ]:
            found = [state.uid for state in find(session, text).states]
            assert found == [state.uid for state in expected], text
        best = [resolve(session, f"main@best:loss:{goal}").uid for goal in ("min", "max")]
        assert best == [one.uid, two.uid]
        with pytest.raises(SyntaxProblem, match="step is never NaN"):
            find(session, "step is nan")
        with pytest.raises(NotFound, match="NaN or infinite in"):
            resolve(session, f"{high.uid}@best:loss")


def test_the_limit_of_the_query_bounds_all_pages_and_the_limit_of_the_call_each(
    database: Database, grow: Grow
) -> None:
    grow(branch="main", count=150)
    with database.read() as session:
        sizes, after = [], None
        while True:
            page = find(session, "step >= 0 limit 7", after=after, limit=3)
            sizes.append(len(page.states))
            after = page.next
            if after is None:
                break
        assert sizes == [3, 3, 1]
        assert len(find(session, "limit 120").states) == 120
        assert len(find(session, "").states) == 100
        assert find(session, "limit 0").states == []
        with pytest.raises(InvalidInput, match="limit is 0"):
            find(session, "", limit=0)


def test_ages_count_from_the_first_page(database: Database) -> None:
    lineage = grow_lineage(database, 3)
    text = "created > now-240h order by created"
    with database.read() as session:
        first = find(session, text, limit=5, now=NOW)
        rest = find(session, text, after=first.next, limit=100, now=NOW + timedelta(days=99))
        assert [state.uid for state in first.states + rest.states] == [
            state.uid for state in lineage.states[1:]
        ]


def test_states_recorded_between_pages_shift_nothing(database: Database, grow: Grow) -> None:
    head = grow(branch="main", count=6)
    with database.read() as session:
        first = find(session, "order by step desc", limit=3)
    grow(head, branch="main", count=3)
    with database.read() as session:
        rest = find(session, "order by step desc", after=first.next)
    assert [state.step for state in first.states + rest.states] == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("limit", [None, 1, 2, 7, 8, 9])
def test_all_are_found_though_pages_are_short(
    database: Database, grow: Grow, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(pages, "_PAGE_MAX", 3)
    grow(branch="main", count=8)
    text = "order by step desc" + (f" limit {limit}" if limit else "")
    with database.read() as session:
        assert [state.step for state in find_all(session, text)] == list(range(8))[::-1][:limit]


@on_one_database
@pytest.mark.parametrize(
    "place",
    [
        [0, -2, [5, 1.0]],
        [0, 0, [5, 1.0]],
        [0, 4, [5, 1.0]],
        [0, None, [5, 1.0]],
        [0, 2, None],
        [0, 2, []],
        [0, 2, [5]],
        [0, 2, [5, 1.0, 1.0]],
        [0, 2, [0, 1.0]],
        [0, 2, [2**63, 1.0]],
        [0, 2, [-(2**63), 1.0]],
        [0, 2, ["5", 1.0]],
        [0, 2, [5.0, 1.0]],
        [0, 2, [None, 1.0]],
        [0, 2, [5, 2**64 - 1]],
        [0, 2, [5, math.nan]],
        [0, 2, [5, "x"]],
        [2**63, 2, [5, 1.0]],
        [0, 2, [5, 1.0], 1],
        [True, 2, [5, 1.0]],
        [0, 2, [True, 1.0]],
        [0, 2],
        {},
    ],
)
def test_a_cursor_that_was_made_up_is_refused(
    database: Database, grow: Grow, place: object
) -> None:
    grow(branch="main", count=5, metrics={"loss": 1.0})
    text = "order by metrics.loss limit 4"
    with database.read() as session, pytest.raises(InvalidInput, match="cursor"):
        find(session, text, after=_made_up(place, text))


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", [3]),
        ("order by step", [3, 1]),
        ("order by message", [3, None]),
        ("order by attr.x", [3, None, "ü"]),
        ("order by uid", [3, ""]),
    ],
)
def test_a_cursor_that_was_made_up_leads_no_further_than_the_query(
    database: Database, grow: Grow, text: str, last: list[object]
) -> None:
    grow(branch="main", count=5)
    with database.read() as session:
        assert len(find(session, text, after=_made_up([0, None, last], text)).states) <= 5
        for wrong in (None, "\x00", 1.5, 2**63, -1.0):
            with pytest.raises(InvalidInput, match="cursor"):
                find(session, text, after=_made_up([0, None, [wrong, *last[1:]]], text))


def _made_up(place: object, text: str) -> str:
    """What anybody can make who reads the source."""
    body = msgspec.msgpack.encode(place)
    return base64.urlsafe_b64encode(pages._digest(body, text) + body).decode().rstrip("=")


def test_a_cursor_that_was_changed_is_refused(database: Database, grow: Grow) -> None:
    grow(branch="main", count=4)
    with database.read() as session:
        token = find(session, "order by step", limit=2).next
        assert token is not None
        for index in range(len(token)):
            other = "A" if token[index] != "A" else "B"
            with pytest.raises(InvalidInput, match="cursor"):
                find(session, "order by step", after=token[:index] + other + token[index + 1 :])
        for damaged in ("", "x", token[:-1], token + "A", "ü", "%"):
            with pytest.raises(InvalidInput, match="cursor"):
                find(session, "order by step", after=damaged)
        with pytest.raises(InvalidInput, match="cursor"):
            find(session, "order by step desc", after=token)


@on_one_database
@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("stepp = 3", 1, "metrics.<name>"),
        ("step = 1 and metric.loss < 2", 14, "step"),
        ("step = abc", 8, "numbers"),
        ("step ~ 3", 6, "<="),
        ("branch < 'a'", 8, "~"),
        ("metrics.loss = 'low'", 16, "numbers"),
        ("created > 2026-13-01", 11, "a date"),
        ("status = finished", 10, "durable"),
        ("uid = xyz", 7, "hex digits"),
        ("attr.flag < true", 11, "!="),
        ("(step = 3", 10, "')'"),
        ("step = 3)", 9, "the end"),
        ("step = 3 or", 12, "a field"),
        ("order by tag", 10, ""),
        ("limit -1", 7, "a whole number"),
        ("message = 'a", 11, "a quoted text"),
        ("not " * 30 + "step = 1", 41, ""),
        (" or ".join(["step = 1"] * 501), 1, ""),
        ("step = 1 and ancestor_of(main~~x)", 32, ""),
        ("ancestor_of('main@')", 18, "'~'"),
        ("step = 1\0", 9, ""),
        ("x" * 20_000, 1, ""),
    ],
)
def test_errors_point_at_the_column_and_say_what_may_stand_there(
    database: Database, text: str, column: int, expected: str
) -> None:
    with database.read() as session, pytest.raises(SyntaxProblem) as caught:
        find(session, text)
    assert caught.value.column == column
    assert expected in ", ".join(caught.value.expected)


def test_an_unknown_revision_in_a_query_is_not_found(database: Database, grow: Grow) -> None:
    grow(branch="main")
    with database.read() as session, pytest.raises(NotFound, match="did you mean 'main'"):
        find(session, "ancestor_of(mian)")


def test_random_queries_parse_to_what_was_written(database: Database) -> None:
    lineage = grow_lineage(database, 0, 5)

    @settings(max_examples=examples(200))
    @given(query=_queries(lineage))
    def check(query: Query) -> None:
        again = parse_query(_text_of(query))
        assert _text_of(again) == _text_of(parse_query(_text_of(again)))
        assert (again.order, again.limit) == (query.order, query.limit)

    check()


def test_any_text_finds_or_fails_as_ours(database: Database, grow: Grow) -> None:
    grow(branch="main", count=3, metrics={"loss": 1.0})
    fields = "step metrics.loss attr.x config.y created uid branch ancestor_of(main) ancestor_of( exists is"
    signs = "( ) and or not = != < ~ in , order by desc limit"
    values = (
        "3 -1.5e400 1e5 inf nan finite ' \" now now-2h now-99999999999999999d 2026-11-21 0001-01-01"
        " 9999-12-31T23:59:59 true abcd ü \0 \ud800"
    )
    words = f"{fields} {signs} {values} {'9' * 30}"
    texts = st.one_of(
        st.text(max_size=40), st.lists(st.sampled_from(words.split(" ")), max_size=12).map(" ".join)
    )
    whole = st.sampled_from(
        ["step", "metrics.loss", "micro_step", "created", "attr.x", "config.y", "message"]
    )
    extremes = st.sampled_from(
        [
            "9" * 30,
            "-" + "9" * 30,
            "1e999",
            "now-99999999999999999d",
            "0001-01-01",
            "9999-12-31T23:59:59",
            "-1e-400",
        ]
    )
    comparisons = st.builds("{} {} {}".format, whole, st.sampled_from(NUMERIC), extremes)

    @settings(max_examples=examples(500))
    @given(st.one_of(texts, comparisons), st.one_of(st.none(), st.text(max_size=20)))
    def check(text: str, after: str | None) -> None:
        with database.read() as session:
            try:
                find(session, text, after=after)
            except DatastatesError:
                session.execute(select(1))  # still usable

    check()


def test_deep_and_long_queries_run(database: Database, grow: Grow) -> None:
    grow(branch="main")
    nested = "step = 0"
    for _ in range(6):
        nested = f"not (({nested} or metrics.x = 1) and exists metrics.y)"
    with database.read() as session:
        find(session, nested)
        find(session, " or ".join(["metrics.loss < 1"] * 500))
        find(session, " and ".join(["not attr.x = 1"] * 500))
        find(session, f"uid in ({', '.join(['abcd'] * 500)})")
        find(session, " and ".join(["descendant_of(main)"] * 40))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_rare_metric_and_an_order_by_metric_read_its_index(
    database: Database, grow: Grow
) -> None:
    grow(branch="main", count=50, metrics={"loss": 0.5, "acc": 0.5})
    index = "ix_metric_key_metric_value_metric_state_id"
    for text, selective, driver in [
        (
            "metrics.loss > 0.9",
            10,
            f"SEARCH metric USING COVERING INDEX {index} (key=? AND value>?)",
        ),
        (
            "metrics.acc > 0.1 order by metrics.loss limit 5",
            10,
            f"SEARCH sorted USING COVERING INDEX {index} (key=? AND value>? AND value<?)",
        ),
        (
            "metrics.acc > 0.1 order by metrics.loss desc limit 5",
            10,
            f"SEARCH sorted USING COVERING INDEX {index} (key=? AND value>? AND value<?)",
        ),
    ]:
        plan = _plan(database, text, selective)
        assert any(driver in line for line in plan), plan
        assert not any(
            "SCAN state" in line or ("sorted" in driver and "TEMP B-TREE" in line) for line in plan
        ), plan


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_rare_value_of_a_metric_that_every_state_has_reads_its_index(
    database: Database, grow: Grow
) -> None:
    grow(branch="main")
    others = (
        "g, lpad(g::text, 24, '0'), lpad(g::text, 64, '0'), g, g, 0, g, 'captured', 0, 0, 1 from"
        " generate_series(1000, 31000) g"
    )
    columns = (
        "id, uid, digest, generation, step, micro_step, created_at, status, bytes_total, bytes_new,"
        " world_size"
    )
    with database.write() as session:
        run = session.exec_driver_sql
        run(f"insert into state ({columns}) select {others}")
        run("insert into metric (state_id, key, value) select id, 'loss', random() from state")
        run(
            "insert into metric (state_id, key, value) select id, 'rare', (mod(id, 3000) = 0)::int"
            " from state"
        )
        run("analyze")
    asked: list[tuple[str, Any]] = []

    def listen(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        asked.append((statement, parameters))

    with database.read() as session:
        event.listen(session.engine, "before_cursor_execute", listen)
        try:
            found = [
                len(find(session, query).states)
                for query in ("metrics.rare > 0.5", "metrics.rare > 0.5 order by step")
            ]
        finally:
            event.remove(session.engine, "before_cursor_execute", listen)
        plans = [
            str(row[0])
            for one in asked
            for row in session.exec_driver_sql(f"EXPLAIN {one[0]}", one[1])
        ]
    assert found == [10, 10]
    assert any("Index" in line for line in plans)
    assert not any(
        f"Seq Scan on {name}" in line or f"Index Scan Backward using pk_{name}" in line
        for name in ("state", "metric")
        for line in plans
    )


def _plan(database: Database, text: str, selective: int) -> list[str]:
    """What SQLite does for the last statement that a query runs on ``state``."""
    asked: list[tuple[str, Any]] = []

    def listen(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        asked.append((statement, parameters))

    with pytest.MonkeyPatch.context() as patch, database.read() as session:
        patch.setattr("datastates.lineage.query.pages.SELECTIVE", selective)
        event.listen(session.engine, "before_cursor_execute", listen)
        try:
            find(session, text)
        finally:
            event.remove(session.engine, "before_cursor_execute", listen)
        statement, parameters = next(one for one in asked if "ORDER BY" in one[0])
        raw = session.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        return [str(row[3]) for row in raw]
