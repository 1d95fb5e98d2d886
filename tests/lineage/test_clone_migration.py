"""A lineage from before there were clones."""

from __future__ import annotations

from collections.abc import Callable

from alembic import command
from sqlalchemy import text

from datastates.lineage import Database, NewState
from datastates.lineage.change import clones, record, refs
from datastates.lineage.migrations import upgrade
from datastates.lineage.search import walk
from datastates.store.tiers import CAPTURED


def test_states_from_before_clones_stay_and_can_be_cloned(empty_url: str, new_state: Callable[..., NewState]) -> None:
    database = Database(empty_url)
    with database.write() as session:
        first = record.record(session, new_state(branch="main", metrics={"loss": 0.5}))
        second = record.record(session, new_state(first.uid, branch="main", step=1))
        uid = clones.repository_uid(session)
        command.downgrade(upgrade.config(session.connection()), "datastates_0001")
        session.execute(text("INSERT INTO pack (id, name, bytes) VALUES (1, 'p', 1)"))
        session.execute(text("INSERT INTO pack_ref (pack_id, state_id) SELECT 1, id FROM state"))
    database.close()

    for _ in range(2):
        opened = Database(empty_url)
        with opened.write() as session:
            assert walk.log(session, second.uid) == [second, first]
            assert refs.get(session, "main").state == second.uid
            now = clones.repository_uid(session)
            for state in (first, second):
                came = clones.Provenance("x", "y", bytes_moved=1)
                clones.arrive(session, state, run=None, tier=CAPTURED, node="here", bytes_new=0, came=came)
        with opened.read() as session:
            assert session.execute(text("SELECT count(*) FROM repository")).scalar_one() == 1
            assert {each.source_repository for each in clones.clones_of(session, first.uid)} == {"y"}
        opened.close()
        assert len(now) == 24
        assert now != uid, "it was made anew, once"
    opened = Database(empty_url)
    with opened.read() as session:
        assert clones.repository_uid(session) == now
        assert len(clones.clones_of(session, second.uid)) == 2
    opened.close()
