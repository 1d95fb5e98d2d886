"""Secrets of a run's command line, configuration and URLs are neither recorded nor shown."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from datastates.errors import DatastatesError, SyntaxProblem
from datastates.lineage import Database, Run
from datastates.lineage.query import pages
from datastates.lineage.write import runs
from datastates.values import Value

SECRET = "hunter22hunter22"
ARGV = (
    "train.py",
    "--token",
    SECRET,
    f"--password={SECRET}",
    f"WANDB_API_KEY={SECRET}",
    f"postgresql://me:{SECRET}@db/x",
    "--lr",
    "0.1",
)
SHOWN = (
    "train.py",
    "--token",
    "***",
    "--password=***",
    "WANDB_API_KEY=***",
    "postgresql://me:***@db/x",
    "--lr",
    "0.1",
)
CONFIG: dict[str, Value] = {
    "lr": 0.1,
    "db.password": SECRET,
    "url": f"https://h/?token={SECRET}",
    "datastates.folder": "/data/x?token=kept",
    "max_tokens": 5,
}


def run_of(uid: str = "a" * 24) -> Run:
    return Run(
        uid=uid,
        host="here",
        user="me",
        pid=1,
        argv=ARGV,
        git_commit=None,
        git_dirty=None,
        config=CONFIG,
        versions={},
        started_at=datetime.now(UTC),
    )


def raw(database: Database) -> str:
    with database.read() as session:
        return "".join(
            str(session.execute(text(f"SELECT * FROM {name}")).all()) for name in ("run", "setting")
        )


def test_secrets_are_not_recorded(database: Database) -> None:
    with database.write() as session:
        runs.start(session, run_of())
    assert SECRET not in raw(database)
    with database.read() as session:
        found = runs.get(session, "a" * 24)
    assert found.argv == SHOWN
    assert found.config == CONFIG | {"db.password": "***", "url": "https://h/?token=***"}


@pytest.mark.parametrize(
    "asked", ["config.db.password ~ 'h'", "config.hf_token = 'x'", "order by config.hf_token"]
)
def test_a_search_does_not_ask_for_secrets(database: Database, asked: str) -> None:
    with database.read() as session, pytest.raises(SyntaxProblem, match="names a secret"):
        pages.find(session, asked)


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://me:{SECRET}@127.0.0.1/x",
        f"sqlite:///x?password={SECRET}",
        f"postgresql://me:{SECRET}@127.0.0.1:1/x?connect_timeout=1",
        f"postgresql://127.0.0.1:1/x?connect_timeout=1&user=me&password={SECRET}",
        f"postgresql://me:{SECRET}@127.0.0.1:port/x",
    ],
)
def test_errors_show_no_password(url: str) -> None:
    with pytest.raises(DatastatesError) as failed:
        Database(url)
    assert SECRET not in str(failed.value)
