"""What a chronicle still has to be told, and whether it knows more than the lineage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from datastates import Unavailable
from datastates.lineage import Database, NewState
from datastates.lineage.chronicle import Mark
from datastates.lineage.query.news import EVERYTHING, is_behind, news, settled
from datastates.lineage.write import record
from datastates.maintenance import chronicle


def told(database: Database, mark: Mark) -> Mark:
    """The mark after all that is new."""
    with database.read() as session:
        assert not is_behind(session, mark)
        entry = news(session, mark, most=1000, until=EVERYTHING)
        return mark if entry is None else entry.mark


def forget(database: Database, uid: str) -> None:
    """Lose the newest state and the move of its branch, as a server that is killed does."""
    with database.write() as session:
        session.execute(
            text("UPDATE ref SET state_id = (SELECT parent_id FROM state WHERE uid = :uid)"),
            {"uid": uid},
        )
        for name, column in (("ref_event", "new_id"), ("replica", "state_id"), ("state", "id")):
            session.execute(
                text(
                    f"DELETE FROM {name} WHERE {column} = (SELECT id FROM state WHERE uid = :uid)"
                ),
                {"uid": uid},
            )


def test_a_lineage_that_was_told_again_what_its_server_forgot_is_not_behind(
    postgresql_url: str, new_state: Callable[..., NewState]
) -> None:
    database = Database(postgresql_url)
    first = new_state(branch="main")
    second = new_state(first.uid, branch="main", step=1)
    with database.write() as session:
        record.record_all(session, [first, second])
    mark = told(database, Mark())
    forget(database, second.uid)
    with database.read() as session:
        assert is_behind(session, mark)
    with database.write() as session:
        record.record(session, second)
    assert told(database, mark).state > mark.state
    database.close()


def test_a_lineage_that_numbers_its_rows_far_below_is_behind(
    postgresql_url: str, new_state: Callable[..., NewState]
) -> None:
    database, state = Database(postgresql_url), new_state(branch="main")
    with database.write() as session:
        record.record(session, state)
    with database.read() as session:
        assert is_behind(session, Mark(state=10_000, state_uid=state.uid))
    database.close()


def test_rows_that_are_committed_after_many_younger_ones_are_told(
    postgresql_url: str,
    new_state: Callable[..., NewState],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chronicle, "_PATIENCE_S", 0.0)
    database, early = Database(postgresql_url), new_state(branch="early")
    younger = [new_state(step=step) for step in range(300)]
    with database.write() as slow:
        record.record(slow, early)
        with database.write() as fast:
            record.record_all(fast, younger)
        with pytest.raises(Unavailable, match="is told later"):
            chronicle.catch_up(database, tmp_path)
    assert chronicle.catch_up(database, tmp_path)
    (found,) = chronicle.chronicles(tmp_path)
    assert {state.uid for entry in found.entries for state in entry.states} == {
        new.uid for new in (early, *younger)
    }
    assert {event.new for entry in found.entries for event in entry.events} == {early.uid}
    database.close()


def test_a_reader_waits_for_no_writer_that_began_after_the_newest_rows(
    postgresql_url: str, new_state: Callable[..., NewState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers follow each other without a pause, and each of them is gone when the next is
    there."""
    database = Database(postgresql_url)
    with database.write() as session:
        record.record(session, first := new_state())
    with database.write() as next_:

        def begin() -> None:
            record.record(next_, new_state())
            now.rollback()

        monkeypatch.setattr("datastates.lineage.query.news.checkpoint", begin)
        with database.write() as now:
            record.record(now, new_state())
            until = settled(database, timeout_s=2.0)
    with database.read() as session:
        assert [until.state] == list(
            session.execute(
                text("SELECT id FROM state WHERE uid = :uid"), {"uid": first.uid}
            ).scalars()
        )
    database.close()
