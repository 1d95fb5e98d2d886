"""The upgrade that gives old lineages segments and summaries: broken off anywhere, it leaves nothing half done."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text

from datastates.lineage import Database, Status
from datastates.lineage.change import record
from datastates.lineage.migrations import HEAD, upgrade
from datastates.lineage.show.overview import branches
from tests.support import warm
from tests.support.lineages import told

BRANCHES, EACH = 5, 150
OPEN = """
import sys
from itertools import pairwise
from sqlalchemy import Engine, event
from datastates.lineage import Database
seen = 0
@event.listens_for(Engine, "before_cursor_execute")
def executed(connection, cursor, statement, *rest):
    global seen
    seen += statement.startswith("INSERT INTO stretch")
    if seen == 3 and statement.startswith("INSERT INTO stretch"):
        print("half", flush=True)
        sys.stdin.readline()
Database("sqlite:///" + sys.argv[1]).close()
print("done", flush=True)
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A lineage of the version before, with branches of their own states."""
    path = tmp_path / "lineage.db"
    database = Database(f"sqlite:///{path}")
    with database.write() as session:
        for number in range(BRANCHES):
            uids = [None, *(secrets.token_hex(12) for _ in range(EACH))]
            rows = [
                told(
                    str(uid),
                    secrets.token_hex(32),
                    parent,
                    f"branch-{number}",
                    None,
                    step,
                    metrics={"loss": 1 / (1 + step)},
                    status=Status.EVICTED,
                )
                for step, (parent, uid) in enumerate(pairwise(uids))
            ]
            record.record_all(session, rows)
        command.downgrade(upgrade.config(session.connection()), "datastates_0006")
    database.close()
    return path


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_an_upgrade_that_is_broken_off_leaves_the_lineage_as_it_was(old: Path, by: signal.Signals) -> None:
    with warm.Popen([sys.executable, "-c", OPEN, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(by)
        if by is signal.SIGINT:
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.wait(60) != 0
        assert process.stdout.read() == ""
    assert version_of(old) == ("datastates_0006", False)

    opened = Database(f"sqlite:///{old}")
    with opened.read() as session:
        found = branches(session)
    opened.close()
    assert version_of(old) == (HEAD, True)
    assert [(one.states, one.best and one.best.value) for one in found] == [(EACH, 1 / EACH)] * BRANCHES


def version_of(path: Path) -> tuple[str, bool]:
    """The schema's, and whether there are segments."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        version = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
        has_segments = inspect(connection).has_table("segment")
    engine.dispose()
    return version, has_segments
