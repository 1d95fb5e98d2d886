"""Every test of the lineage runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from datastates.lineage import Database, NewState, State
from datastates.lineage.write import record
from tests.support.lineages import told

BACKENDS = ["sqlite", "postgresql"]

on_one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For what is refused before any database is asked."""


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new, empty lineage lies."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path / 'lineage.db'}"


@pytest.fixture(params=BACKENDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path, real_migrations: None) -> str:
    """Where a lineage may be made, by the migrations themselves: a file that is not there, a
    database without tables."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql").empty())
    return f"sqlite:///{tmp_path / 'new' / 'lineage.db'}"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An open lineage without states."""
    opened = Database(database_url)
    yield opened
    opened.close()


class Grow(Protocol):
    """``grow(parent, branch=…, count=…)`` records states one upon the other and returns the
    last."""

    def __call__(
        self,
        parent: State | None = None,
        *,
        branch: str | None = None,
        count: int = 1,
        **fields: Any,
    ) -> State: ...


@pytest.fixture
def new_state() -> Callable[..., NewState]:
    """Makes a state to record, with a uid of its own."""

    def make(parent: str | None = None, **fields: Any) -> NewState:
        values = {
            "uid": secrets.token_hex(12),
            "digest": secrets.token_hex(32),
            "branch": None,
            "run": None,
            "step": 0,
        } | fields
        return told(parent=parent, **values)

    return make


@pytest.fixture
def grow(database: Database, new_state: Callable[..., NewState]) -> Grow:
    """Records states in ``database``."""

    def grow(
        parent: State | None = None, *, branch: str | None = None, count: int = 1, **fields: Any
    ) -> State:
        with database.write() as session:
            for _ in range(count):
                step = parent.step + 1 if parent else 0
                values = {"step": step, "branch": branch} | fields
                parent = record.record(session, new_state(parent.uid if parent else None, **values))
        assert parent is not None
        return parent

    return grow
