"""What people say of a state later."""

from __future__ import annotations

import math

import pytest

from datastates.errors import InvalidInput, NotFound
from datastates.lineage import Database, Value
from datastates.lineage.change.annotate import ATTRIBUTES, annotate
from datastates.lineage.search.walk import state
from tests.lineage.conftest import Grow

VALUES: dict[str, Value] = {"text": "größe", "yes": True, "one": 1, "half": 0.5, "huge": 2**64 - 1, "infinite": math.inf}


def test_attributes_come_back_as_they_were_set(database: Database, grow: Grow) -> None:
    before = grow(attributes={"old": 1, "gone": "x"})
    with database.write() as session:
        annotated = annotate(session, before.uid, {**VALUES, "old": False, "gone": None, "never": None})
    with database.read() as session:
        after = state(session, before.uid)

    assert after == annotated
    assert after.attributes == {**VALUES, "old": False}
    assert [type(after.attributes[key]) for key in ("yes", "one", "half", "old")] == [bool, int, float, bool]
    assert (after.digest, after.status) == (before.digest, before.status)


@pytest.mark.parametrize("attributes", [{"": 1}, {"k" * 256: 1}, {"a\x00": None}, {"a": "\x00"}, {"a": 2**64}])
def test_what_cannot_be_stored_changes_nothing(database: Database, grow: Grow, attributes: dict[str, Value]) -> None:
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
