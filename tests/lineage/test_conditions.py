"""Texts of any length are compared to their ends, with an index of their beginnings on
PostgreSQL."""

from __future__ import annotations

import secrets
from operator import eq, ge, gt, le, lt, ne

import pytest

from datastates.lineage import Database
from datastates.lineage.query.conditions import ids
from datastates.lineage.query.grammar import Compare, Field, Kind
from datastates.lineage.query.pages import find
from tests.lineage.conftest import Grow


@pytest.mark.parametrize("start", ["", "ü" * 255])
def test_texts_of_any_length_are_recorded_and_compared_to_their_ends(
    database: Database, grow: Grow, start: str
) -> None:
    tails = ["", "a", *(f"b{secrets.token_urlsafe(size)}" for size in (1, 6000)), "c", "ß"]
    states = {start + tail: grow(attributes={"prompt": start + tail}).uid for tail in tails}
    with database.read() as session:
        for operator, compare in {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}.items():
            for asked in (told for told in states if len(told) < 1000):
                wanted = {uid for told, uid in states.items() if compare(told, asked)}
                assert {
                    state.uid for state in find(session, f'attr.prompt {operator} "{asked}"').states
                } == wanted


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("asked", ["=", "<="])
def test_postgresql_reads_the_index_of_beginnings_for_a_text(
    database: Database, asked: str
) -> None:
    rows = "select g, 'name', 'str', md5(g::text) from generate_series(1000, 31000) g"
    with database.write() as session:
        run = session.exec_driver_sql
        run("set local session_replication_role = replica")  # without the states themselves
        run(f"insert into attribute (state_id, key, type, text) {rows}")
        run(f"insert into setting (run_id, key, type, text) {rows}")
        run("analyze attribute")
        run("analyze setting")
    with database.read() as session:
        for name, owner in (("attr", "attribute"), ("config", "setting")):
            found = ids(Compare(Field(name, Kind.ANY, "name"), asked, "000"), "postgresql")
            assert found is not None
            compiled = found.compile(session)
            plan = [
                str(row[0])
                for row in session.exec_driver_sql(f"EXPLAIN {compiled}", dict(compiled.params))
            ]
            assert any(f"ix_{owner}_key_beginning" in line for line in plan), plan
            assert any("Index Cond" in line and "left" in line for line in plan), plan
