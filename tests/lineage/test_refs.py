"""Branches, tags and their log."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import Database, Ref, RefKind, State
from datastates.lineage.query import names
from datastates.lineage.write import refs

Grow = Callable[..., State]


def events(database: Database, name: str) -> list[tuple[str | None, str | None, str]]:
    with database.read() as session:
        return [(event.old, event.new, event.reason) for event in names.reflog(session, name)]


def test_a_tag_and_a_branch_name_states(database: Database, grow: Grow) -> None:
    first, second = grow(), grow()
    with database.write() as session:
        assert refs.tag(session, "v1", first.uid, message="warm") == Ref(
            "v1", RefKind.TAG, first.uid, 1, "warm"
        )
        assert refs.branch(session, "fork", second.uid) == Ref(
            "fork", RefKind.BRANCH, second.uid, 1
        )
    with database.read() as session:
        tag, fork = names.get(session, "v1"), names.get(session, "fork")
        assert (tag.state, tag.kind, tag.message, fork.state, fork.kind) == (
            first.uid,
            RefKind.TAG,
            "warm",
            second.uid,
            RefKind.BRANCH,
        )
        assert names.refs(session) == [fork, tag]
        assert (names.refs(session, RefKind.TAG), names.refs(session, RefKind.BRANCH)) == (
            [tag],
            [fork],
        )


@pytest.mark.parametrize("make", [refs.tag, refs.branch])
@pytest.mark.parametrize("taken_by", [refs.tag, refs.branch])
def test_a_name_is_taken_once(
    database: Database, grow: Grow, make: Callable[..., Ref], taken_by: Callable[..., Ref]
) -> None:
    first, second = grow(), grow()
    with database.write() as session:
        taken_by(session, "v1", first.uid)
    for state in (first, second):
        problem = rf"'v1' already names {first.uid}.*datastates \w+ v1 {state.uid[:10]} --move"
        with pytest.raises(Conflict, match=problem), database.write() as session:
            make(session, "v1", state.uid)
    assert len(events(database, "v1")) == 1


def test_a_ref_moves_from_where_it_is_expected(database: Database, grow: Grow) -> None:
    first, second = grow(), grow()
    with database.write() as session:
        refs.tag(session, "v1", first.uid, message="kept")
        assert refs.move(session, "v1", second.uid, expected=first.uid) == Ref(
            "v1", RefKind.TAG, second.uid, 2, "kept"
        )
    assert events(database, "v1") == [(first.uid, second.uid, "move"), (None, first.uid, "tag")]


def test_a_ref_that_moved_since_is_a_conflict(database: Database, grow: Grow) -> None:
    first, second, third = grow(), grow(), grow()
    with database.write() as session:
        refs.branch(session, "main", second.uid)
    with (
        pytest.raises(Conflict, match=f"branch 'main' is at {second.uid}, not at {first.uid}"),
        database.write() as session,
    ):
        refs.move(session, "main", third.uid, expected=first.uid)
    assert events(database, "main") == [(None, second.uid, "branch")]


def test_a_deleted_ref_leaves_its_log_and_frees_its_name(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.tag(session, "v1", state.uid)
        assert refs.delete_ref(session, "v1").state == state.uid
    with pytest.raises(NotFound), database.read() as session:
        names.get(session, "v1")
    with database.write() as session:
        refs.branch(session, "v1", state.uid)
    assert events(database, "v1") == [
        (None, state.uid, "branch"),
        (state.uid, None, "delete"),
        (None, state.uid, "tag"),
    ]


def test_the_reflog_is_newest_first_dated_and_limited(database: Database, grow: Grow) -> None:
    states = [grow() for _ in range(5)]
    with database.write() as session:
        refs.branch(session, "main", states[0].uid)
        for old, new in itertools.pairwise(states):
            refs.move(session, "main", new.uid, expected=old.uid)
    with database.read() as session:
        log = names.reflog(session, "main", limit=2)
    assert [event.new for event in log] == [states[4].uid, states[3].uid]
    assert log[0].id > log[1].id
    assert datetime.now(UTC) - log[0].created_at < timedelta(minutes=5)


def test_every_change_of_a_ref_grows_the_last_event(database: Database, grow: Grow) -> None:
    seen = []

    def look() -> None:
        with database.read() as session:
            seen.append(names.last_event(session))

    look()
    first = grow(branch="main")
    look()
    with database.write() as session:
        refs.tag(session, "v1", first.uid)
    look()
    grow(first)
    look()
    assert seen[0] == 0
    assert seen[0] < seen[1] < seen[2] == seen[3]


@pytest.mark.parametrize("look", [names.get, refs.delete_ref, names.reflog])
def test_an_unknown_name_lists_close_ones(
    database: Database, grow: Grow, look: Callable[..., object]
) -> None:
    state = grow(branch="without-3")
    with database.write() as session:
        refs.branch(session, "other", state.uid)
    with (
        pytest.raises(NotFound, match=r"'without3'.*did you mean 'without-3'"),
        database.write() as session,
    ):
        look(session, "without3")


def test_moving_an_unknown_name_or_to_an_unknown_state_is_not_found(
    database: Database, grow: Grow
) -> None:
    state = grow(branch="main")
    with (
        pytest.raises(NotFound, match=r"no branch or tag 'mian'.*'main'"),
        database.write() as session,
    ):
        refs.move(session, "mian", state.uid, expected=state.uid)
    with pytest.raises(NotFound, match=r"no state '0{24}'"), database.write() as session:
        refs.move(session, "main", "0" * 24, expected=state.uid)
    with pytest.raises(NotFound, match=r"no state '0{24}'"), database.write() as session:
        refs.tag(session, "v1", "0" * 24)


@pytest.mark.parametrize(
    "name",
    [
        "main",
        "a",
        "lr=0.1",
        "sweep/lr-3e-4",
        "v1.0",
        "größe",
        "best_yet+1",
        "abc",
        "a/.b",
        "deadbeef0" * 3,
        "f" * 25,
        "DEAD",
    ],
)
def test_these_names_are_allowed(name: str) -> None:
    assert refs.check_name(name) == name


@pytest.mark.parametrize(
    ("name", "problem", "proposed"),
    [
        ("", "it is empty", "branch"),
        ("a b", "' ' has a meaning", "a-b"),
        ("main~3", "'~' has a meaning", "main-3"),
        ("x^", r"'\^' has", "x"),
        ("a..b", r"'\.\.' has", "a-b"),
        ("main@{2}", "'@' has", "main-2"),
        ("a:b", "':' has", "a-b"),
        ("-x", "begins with '-'", "x"),
        ("/x/", "begins with", "x"),
        ("a//b", "'//'", "a/b"),
        ("a/./b", "'/./'", "a/b"),
        ("a/././/b", "'/./'", "a/b"),
        ("a/../b", r"'\.\.' has", "a/-/b"),
        ("x.", "ends with", "x"),
        ("beef", "like the beginning of a uid", "branch-beef"),
        ("0" * 24, "like the beginning of a uid", "branch-" + "0" * 24),
        ("x" * 201, "201 characters", "x" * 190),
        ("tab\t", r"'\\t' has", "tab"),
        ("a\u200bb", "cannot be printed", "a-b"),
        ("cafe\u0301", "decomposed form", "caf\u00e9"),
    ],
)
def test_a_bad_name_is_refused_with_a_good_one(name: str, problem: str, proposed: str) -> None:
    with pytest.raises(InvalidInput, match=f"{problem}.*; '{proposed}' would do"):
        refs.check_name(name)


@given(st.text() | st.text(alphabet=string.hexdigits.lower() + "-./~"))
@example("~" * 300)
@example("a" * 195 + "/" * 10)
@example("a" * 188 + "/./b" * 5)
def test_a_proposed_name_is_allowed(name: str) -> None:
    try:
        refs.check_name(name)
    except InvalidInput as error:
        proposed = str(error).rpartition("; ")[2].removesuffix(" would do")
        refs.check_name(proposed[1:-1])


@pytest.mark.parametrize("make", [refs.tag, refs.branch])
def test_a_bad_name_makes_no_ref(database: Database, grow: Grow, make: Callable[..., Ref]) -> None:
    state = grow()
    with pytest.raises(InvalidInput), database.write() as session:
        make(session, "a b", state.uid)
    with database.read() as session:
        assert names.refs(session) == []


def test_a_close_name_is_found_among_many_and_few_are_compared(
    database: Database, grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = grow(branch="main")
    newest = grow(state, branch="main")
    with database.write() as session:
        for number in range(40):
            refs.tag(session, f"tag-{number:02}", state.uid)
        refs.branch(session, "zulu", newest.uid)
    monkeypatch.setattr("datastates.lineage.query.names._NEAR", 3)
    with database.read() as session:
        with pytest.raises(NotFound, match=r"did you mean 'tag-2[01]'"):
            names.get(session, "tag-20x")
        with pytest.raises(NotFound, match="did you mean 'main'"):
            names.get(session, "maim")
        assert len(names.near(session, "tag-20x")) <= 9
        assert names.near(session, "zul", RefKind.BRANCH) == ["main", "zulu"]
        assert names.find(session, "tag-20x") is None


def test_refs_that_moved_after_a_line_of_the_reflog(database: Database, grow: Grow) -> None:
    first, second = grow(), grow()
    with database.write() as session:
        refs.tag(session, "stays", first.uid)
        refs.tag(session, "goes", first.uid)
    with database.write() as session:
        before = names.last_event(session)
        refs.delete_ref(session, "goes")
        made = refs.branch(session, "made", second.uid)
    with database.read() as session:
        assert names.moved(session, before) == {"goes": None, "made": made}
        assert names.moved(session, -1).keys() == {"stays", "made"}
