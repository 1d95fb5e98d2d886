"""What people say of a state later."""

from __future__ import annotations

import math

import pytest

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import Database, Value
from datastates.lineage.lookup import state
from datastates.lineage.query.names import reflog
from datastates.lineage.query.pages import find_all
from datastates.lineage.query.revision import resolve
from datastates.lineage.views.branch_rows import Point
from datastates.lineage.views.branches import branches
from datastates.lineage.write.refs import ATTRIBUTES, annotate, measure
from datastates.values import NAMES
from tests.lineage.conftest import Grow

VALUES: dict[str, Value] = {
    "text": "größe",
    "yes": True,
    "one": 1,
    "half": 0.5,
    "huge": 2**64 - 1,
    "infinite": math.inf,
}


def test_attributes_come_back_as_they_were_set(database: Database, grow: Grow) -> None:
    before = grow(attributes={"old": 1, "gone": "x"})
    with database.write() as session:
        annotated = annotate(
            session, before.uid, {**VALUES, "old": False, "gone": None, "never": None}
        )
    with database.read() as session:
        after = state(session, before.uid)

    assert after == annotated
    assert after.attributes == {**VALUES, "old": False}
    assert [type(after.attributes[key]) for key in ("yes", "one", "half", "old")] == [
        bool,
        int,
        float,
        bool,
    ]
    assert (after.digest, after.status) == (before.digest, before.status)


@pytest.mark.parametrize(
    "attributes", [{"": 1}, {"k" * 256: 1}, {"a\x00": None}, {"a": "\x00"}, {"a": 2**64}]
)
def test_what_cannot_be_stored_changes_nothing(
    database: Database, grow: Grow, attributes: dict[str, Value]
) -> None:
    before = grow(attributes={"old": 1})
    with pytest.raises(InvalidInput), database.write() as session:
        annotate(session, before.uid, {"fine": 1, **attributes})
    with database.read() as session:
        assert state(session, before.uid) == before


def test_attributes_do_not_pile_up_for_ever(database: Database, grow: Grow) -> None:
    uid = grow().uid
    with database.write() as session:
        annotate(session, uid, {f"k{number}": number for number in range(ATTRIBUTES)})
    with pytest.raises(InvalidInput, match=str(ATTRIBUTES)), database.write() as session:
        annotate(session, uid, {"one more": 1})
    with database.write() as session:
        assert annotate(session, uid, {"k0": None, "one more": 1}).attributes["one more"] == 1


def test_state_that_is_not_there_is_not_annotated(database: Database) -> None:
    with pytest.raises(NotFound), database.write() as session:
        annotate(session, "0" * 24, {"a": 1})


def test_metrics_that_are_added_are_found_and_logged(database: Database, grow: Grow) -> None:
    old = grow(branch="main", metrics={"loss": 0.5})
    grow(old, branch="main", count=100, metrics={"loss": 0.75})
    with database.write() as session:
        measured = measure(session, old.uid, {"test": 0.25, "nan": math.nan}, author="ann@host")
    assert (measured.metrics["test"], measured.digest) == (0.25, old.digest)
    with database.read() as session:
        assert resolve(session, "main@best:test").uid == old.uid
        assert branches(session, metric="test")[0].best == Point(
            old.uid, old.step, 0.25, old.status
        )
        assert [state.uid for state in find_all(session, "metrics.test < 0.3")] == [old.uid]
        assert [event.reason for event in reflog(session, old.uid)] == [
            "metrics by ann@host: test=0.25, nan=nan"
        ]
    with pytest.raises(Conflict, match=r"'loss' = 0\.5"), database.write() as session:
        measure(session, old.uid, {"loss": 1, "more": 1}, author="ann")
    with database.write() as session:
        # nothing that is new
        measure(session, old.uid, {"loss": 0.5, "test": 0.25, "nan": math.nan}, author="ann")
        measure(session, old.uid, {"loss": 1}, author="ann", is_replacing=True)
        (main,) = branches(session, metric="loss")
        assert (main.states, main.best and main.best.value) == (101, 0.75)
        assert len(reflog(session, old.uid)) == 2
        assert reflog(session, old.uid)[0].reason == "metrics by ann: loss=1.0 (was 0.5)"


def test_metrics_of_a_state_that_is_not_there_or_that_are_no_numbers_are_refused(
    database: Database, grow: Grow
) -> None:
    uid = grow().uid
    with pytest.raises(NotFound), database.write() as session:
        measure(session, "0" * 24, {"a": 1}, author="me")
    for metrics in (
        {"a": "1"},
        {"": 1},
        {"a" * 256: 1},
        {f"k{number}": 0.5 for number in range(NAMES + 1)},
    ):
        with pytest.raises(InvalidInput), database.write() as session:
            measure(session, uid, metrics, author="me")
