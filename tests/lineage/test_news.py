"""What a chronicle still has to be told, and whether it knows more than the lineage."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import text

from datastates.lineage import Database, NewState
from datastates.lineage.change import record
from datastates.lineage.chronicle import Mark
from datastates.lineage.search.news import is_behind, news


def told(database: Database, mark: Mark) -> Mark:
    """The mark after all that is new."""
    with database.read() as session:
        assert not is_behind(session, mark)
        entry = news(session, mark, most=1000)
        return mark if entry is None else entry.mark


def forget(database: Database, uid: str) -> None:
    """Lose the newest state and the move of its branch, as a server that is killed does."""
    with database.write() as session:
        session.execute(text("UPDATE ref SET state_id = (SELECT parent_id FROM state WHERE uid = :uid)"), {"uid": uid})
        for name, column in (("ref_event", "new_id"), ("replica", "state_id"), ("state", "id")):
            session.execute(text(f"DELETE FROM {name} WHERE {column} = (SELECT id FROM state WHERE uid = :uid)"), {"uid": uid})


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


def test_a_lineage_that_numbers_its_rows_far_below_is_behind(postgresql_url: str, new_state: Callable[..., NewState]) -> None:
    database, state = Database(postgresql_url), new_state(branch="main")
    with database.write() as session:
        record.record(session, state)
    with database.read() as session:
        assert is_behind(session, Mark(state=10_000, state_uid=state.uid))
    database.close()
