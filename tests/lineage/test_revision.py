"""Random revisions agree with brute force on both databases; errors point at the column and name
what is near."""

from __future__ import annotations

import math
import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from datastates.errors import Ambiguous, DatastatesError, NotFound, SyntaxProblem
from datastates.lineage import Database, State
from datastates.lineage.query.revision import resolve, resolve_range
from datastates.lineage.write import record, refs
from tests.lineage.conftest import Grow, on_one_database
from tests.lineage.looking import nth_ancestor
from tests.lineage.oracle import METRICS, NOW, START, Lineage
from tests.lineage.oracle import grow as grow_lineage
from tests.support.effort import examples, seeds
from tests.support.lineages import told

Suffix = tuple[str, object]

# Brute force


def _follow(lineage: Lineage, state: State, suffix: Suffix) -> State | None:
    kind, value = suffix
    chain = list(lineage.chain(state))
    match kind, value:
        case "~", int(count):
            return chain[count] if count < len(chain) else None
        case "^", int(number):
            if number == 0:
                return state
            return (
                lineage.by_uid[state.parents[number - 1]] if number <= len(state.parents) else None
            )
        case "step", int(step):
            return next((one for one in chain if one.step <= step), None)
    assert isinstance(value, tuple)
    key, is_max = value
    reached = lineage.reach(state)
    values = [
        (one.metrics[key], index)
        for index, one in enumerate(lineage.states)
        if one.uid in reached and key in one.metrics
    ]
    values = [
        (-value if is_max else value, -index) for value, index in values if math.isfinite(value)
    ]
    return lineage.states[-min(values)[1]] if values else None


def _written(suffix: Suffix) -> str:
    kind, value = suffix
    match kind, value:
        case "~" | "^", _:
            return f"{kind}{value}" if value != 1 else kind
        case "step", _:
            return f"@step:{value}"
    assert isinstance(value, tuple)
    key, is_max = value
    quoted = f"'{key}'" if is_max else key
    return f"@best:{quoted}{':max' if is_max else ':min'}"


_suffixes = st.lists(
    st.one_of(
        st.tuples(st.just("~"), st.integers(0, 6)),
        st.tuples(st.just("^"), st.integers(0, 4)),
        st.tuples(st.just("step"), st.integers(-1, 12)),
        st.tuples(st.just("best"), st.tuples(st.sampled_from(METRICS), st.booleans())),
    ),
    max_size=3,
)


@pytest.mark.parametrize("seed", seeds(5))
def test_random_revisions_name_what_brute_force_finds(database: Database, seed: int) -> None:
    lineage = grow_lineage(database, seed, 40)
    names = {
        **lineage.branches,
        **lineage.tags,
        **{state.uid[:12]: state.uid for state in lineage.states},
    }

    @settings(max_examples=examples(200))
    @given(name=st.sampled_from(sorted(names)), suffixes=_suffixes)
    def check(name: str, suffixes: list[Suffix]) -> None:
        expected: State | None = lineage.by_uid[names[name]]
        for suffix in suffixes:
            expected = expected and _follow(lineage, expected, suffix)
        text = name + "".join(_written(suffix) for suffix in suffixes)
        with database.read() as session:
            if expected is not None:
                assert resolve(session, text).uid == expected.uid
                return
            with pytest.raises(NotFound):
                resolve(session, text)

    check()


@pytest.mark.parametrize("seed", seeds(5))
def test_random_ranges_hold_what_brute_force_finds(database: Database, seed: int) -> None:
    lineage = grow_lineage(database, seed, 40)
    uids = st.sampled_from([state.uid for state in lineage.states])
    newest_first = [state.uid for state in reversed(lineage.states)]

    @settings(max_examples=examples(150))
    @given(left=uids, right=uids, is_symmetric=st.booleans())
    def check(left: str, right: str, is_symmetric: bool) -> None:
        ours, theirs = lineage.reach(lineage.by_uid[right]), lineage.reach(lineage.by_uid[left])
        expected = ours ^ theirs if is_symmetric else ours - theirs
        with database.read() as session:
            found = resolve_range(session, f"{left}{'...' if is_symmetric else '..'}{right}")
            assert list(found.uids) == [uid for uid in newest_first if uid in expected]
            assert [state.uid for state in found.states(session, 3)] == list(found.uids[:3])

    check()


def test_reflog_says_where_a_ref_stood(database: Database) -> None:
    lineage = grow_lineage(database, 5)
    moves = lineage.moves["main"]
    with database.read() as session:
        for ago, uid in enumerate(reversed(moves)):
            assert resolve(session, f"main@{{{ago}}}").uid == uid
        with pytest.raises(NotFound, match=r"did not exist .* its reflog begins at"):
            resolve(session, f"main@{{{len(moves)}}}")
        for hour in range(30):
            before = [
                one.uid
                for one in lineage.states
                if one.uid in moves and one.created_at <= START + timedelta(hours=hour)
            ]
            age = int((NOW - START - timedelta(hours=hour)).total_seconds() // 3600)
            moment = (START + timedelta(hours=hour)).isoformat()
            if before:
                assert resolve(session, f"main@{{{age}h}}", now=NOW).uid == before[-1]
                assert resolve(session, f"main@{{{moment}}}").uid == before[-1]
            else:
                with pytest.raises(NotFound, match="did not exist"):
                    resolve(session, f"main@{{{moment}}}")


def test_reflog_outlives_its_ref(database: Database, grow: Grow) -> None:
    head = grow(branch="gone", count=2)
    with database.write() as session:
        refs.delete_ref(session, "gone")
    with database.read() as session:
        with pytest.raises(NotFound, match="was deleted at"):
            resolve(session, "gone@{0}")
        assert resolve(session, "gone@{1}").uid == head.uid
        with pytest.raises(NotFound, match="no branch, tag or uid 'gone'"):
            resolve(session, "gone")


def test_step_is_exact_where_steps_fall_back(database: Database) -> None:
    rng = random.Random(1)
    steps, uids, parent = [0], [], None
    for _ in range(600):
        steps.append(
            max(0, steps[-1] - rng.randint(1, 200))
            if rng.random() < 0.02
            else steps[-1] + rng.randint(0, 3)
        )
    with database.write() as session:
        for step in steps:
            new = told(
                uid=f"{rng.getrandbits(96):024x}",
                digest="0" * 64,
                parent=parent,
                branch="main",
                run=None,
                step=step,
            )
            parent = record.record(session, new).uid
            uids.append(parent)
    with database.read() as session:
        for wanted in range(-1, max(steps) + 2, 7):
            index = next(
                (index for index in reversed(range(len(steps))) if steps[index] <= wanted), None
            )
            if index is None:
                with pytest.raises(NotFound, match=f"at or before step {wanted}"):
                    resolve(session, f"main@step:{wanted}")
            else:
                assert resolve(session, f"main@step:{wanted}").uid == uids[index]


def test_a_ref_goes_before_a_uid_that_begins_so(database: Database, grow: Grow) -> None:
    first = grow()
    prefix = f"{first.uid[:4]}-x"
    other = grow(branch=prefix)
    with database.read() as session:
        assert resolve(session, prefix).uid == other.uid
        assert resolve(session, first.uid[:6].upper()).uid == first.uid


def test_beyond_the_root_says_how_long_the_chain_is(database: Database, grow: Grow) -> None:
    grow(branch="main", count=4)
    with (
        database.read() as session,
        pytest.raises(NotFound, match="has 3 first parents up to its root: ~9 goes beyond"),
    ):
        resolve(session, "main~9")


def test_an_unknown_name_lists_the_nearest(database: Database, grow: Grow) -> None:
    grow(branch="main")
    with database.read() as session:
        for text in ("mian", "mian@{1}", "mian~2"):
            with pytest.raises(NotFound, match="did you mean 'main'"):
                resolve(session, text)
        with pytest.raises(NotFound, match="has a metric 'los'"):
            resolve(session, "main@best:los")


def test_the_best_of_values_that_are_all_nan_is_said_to_be_nan(
    database: Database, grow: Grow
) -> None:
    broken = grow(grow(branch="main"), branch="main", metrics={"loss": math.nan, "lr": 0.1})
    with database.read() as session:
        for direction in ("", ":max"):
            with pytest.raises(
                NotFound,
                match=(
                    rf"'loss' is NaN or infinite in {broken.uid} .* name a state, or another metric"
                    rf" \({broken.uid} has lr\)"
                ),
            ):
                resolve(session, f"main@best:loss{direction}")
    well = grow(broken, branch="main", metrics={"loss": 1.0})
    grow(well, branch="main", metrics={"loss": math.nan})
    with database.read() as session:
        assert resolve(session, "main@best:loss").uid == well.uid


def test_an_ambiguous_uid_lists_the_candidates(database: Database) -> None:
    with database.write() as session:
        for last in "01":
            record.record(
                session,
                told(
                    uid="abcd" + "0" * 19 + last,
                    digest="0" * 64,
                    parent=None,
                    branch=None,
                    run=None,
                    step=7,
                ),
            )
    with (
        database.read() as session,
        pytest.raises(Ambiguous, match=r"abcd0+ \(step 7\), abcd0+1 \(step 7\)"),
    ):
        resolve(session, "abcd")


@on_one_database
@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("", 1, "a ref or a uid"),
        ("main@", 5, "'@step:'"),
        ("main@{2x}", 8, "'}'"),
        ("main~1@{2}", 7, ""),
        ("main@{2026-13-01}", 7, "a date such as"),
        ("main@best:loss:foo", 16, "'min' or 'max'"),
        ("main 3", 5, "'~'"),
        ("a..", 4, "a ref or a uid"),
        ("main~" + "9" * 40, 6, ""),
        ("a\0b", 2, ""),
        ("a..b", 2, ""),
    ],
)
def test_errors_point_at_the_column_and_say_what_may_stand_there(
    database: Database, text: str, column: int, expected: str
) -> None:
    with database.read() as session, pytest.raises(SyntaxProblem) as caught:
        resolve(session, text)
    assert caught.value.column == column
    assert expected in ", ".join(caught.value.expected)


def test_a_range_needs_two_states(database: Database, grow: Grow) -> None:
    grow(branch="main")
    with database.read() as session:
        with pytest.raises(SyntaxProblem, match="a range is wanted"):
            resolve_range(session, "main")
        with pytest.raises(NotFound):
            resolve_range(session, "main..absent")


def test_any_text_resolves_or_fails_as_ours(database: Database, grow: Grow) -> None:
    grow(branch="main", count=3, metrics={"loss": 1.0})
    pieces = st.sampled_from(
        [
            "main",
            "~",
            "^",
            "@{",
            "}",
            "@step:",
            "@best:",
            "loss",
            ":max",
            "..",
            "...",
            "2",
            "9" * 30,
            "2h",
            "'",
            '"',
            "\\",
            " ",
        ]
    )
    texts = st.one_of(st.text(max_size=30), st.lists(pieces, max_size=8).map("".join))

    @settings(max_examples=examples(400))
    @given(texts)
    def check(text: str) -> None:
        with database.read() as session:
            for ask in (resolve, resolve_range):
                try:
                    ask(session, text)
                except DatastatesError:
                    session.execute(select(1))  # still usable

    check()


def test_walks_and_revisions_agree_on_a_long_chain(database: Database, grow: Grow) -> None:
    head = grow(branch="main", count=300)
    with database.read() as session:
        assert resolve(session, "main~299").parents == ()
        assert resolve(session, "main@step:17").uid == nth_ancestor(session, head.uid, 282).uid
