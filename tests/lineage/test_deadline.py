"""Questions that take too long are ended, by the database itself; what has no deadline takes as
long as it takes."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from datastates.errors import InvalidInput, SyntaxProblem
from datastates.lineage import Database
from datastates.lineage.database import deadline
from datastates.lineage.query import revision
from datastates.lineage.query.grammar import parse_query
from tests.lineage.conftest import Grow

_LONG = """
WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < {count})
SELECT count(*) FROM counted
"""


def count_to(database: Database, count: int) -> int:
    with database.read() as session:
        return int(session.execute(text(_LONG.format(count=count))).scalar_one())


def ask_for(database: Database, seconds: float) -> None:
    began = time.monotonic()
    with database.read() as session:
        while time.monotonic() - began < seconds:
            session.execute(text("SELECT 1"))


def test_statement_that_takes_too_long_is_ended(database: Database) -> None:
    began = time.monotonic()
    with deadline(0.3), pytest.raises(InvalidInput, match=r"more than 0\.3 s.*ask for less"):
        count_to(database, 10**9)
    assert time.monotonic() - began < 20
    assert count_to(database, 300_000) == 300_000, "the next has no deadline"
    with deadline(60):
        assert count_to(database, 1000) == 1000


def test_many_short_statements_take_too_long_together(database: Database) -> None:
    began = time.monotonic()
    with deadline(0.3), pytest.raises(InvalidInput, match="ask for less"):
        ask_for(database, seconds=60)
    assert time.monotonic() - began < 20


def test_deadline_within_a_deadline_is_the_first(database: Database) -> None:
    with deadline(0.2), deadline(3600), pytest.raises(InvalidInput, match=r"0\.2 s"):
        count_to(database, 10**9)


def test_revision_and_query_look_at_few_histories(database: Database, grow: Grow) -> None:
    grow(branch="main", count=3, metrics={"loss": 1.0})
    with database.read() as session:
        assert revision.resolve(session, "main" + "@best:loss" * 4 + "~0" * 16).step == 2
        with pytest.raises(SyntaxProblem, match="at most 4 times '@best'"):
            revision.resolve(session, "main" + "@best:loss" * 5)
    parse_query(" or ".join(["branch = main"] * 50))
    parse_query("order by " + ", ".join(["step"] * 20))
    for asked in ("branch ~ m", "not descendant_of(main)", "branch in (a, b)"):
        with pytest.raises(SyntaxProblem, match="at most 50 times for branches"):
            parse_query(" or ".join([asked] * 51))
    with pytest.raises(SyntaxProblem, match="at most 20 fields"):
        parse_query("order by " + ", ".join(["step"] * 21))
