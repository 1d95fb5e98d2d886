"""Opening, migrating and transactions."""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import TextClause, make_url, text

from datastates.errors import Closed, Conflict, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage import Database, NewState, lookup
from datastates.lineage import database as database_module
from datastates.lineage import database as deadline
from datastates.lineage.database import retry_conflicts
from datastates.lineage.migrations import HEAD
from datastates.lineage.query import walk
from datastates.lineage.schema import metadata
from datastates.lineage.write import record
from tests.support import warm
from tests.support.at_once import errors_of

if TYPE_CHECKING:
    from sqlalchemy.schema import SchemaItem


def count_states(database: Database) -> int:
    with database.read() as session:
        return int(session.execute(text("SELECT count(*) FROM state")).scalar_one())


@pytest.mark.filterwarnings(
    "ignore:autogenerate skipping metadata-specified expression-based index"
)
def test_a_new_lineage_has_the_schema_of_the_models(empty_url: str) -> None:
    database = Database(empty_url)

    def is_for_it(item: SchemaItem, *_: object) -> bool:
        return bool(item.info.get("dialect", dialect) == dialect)

    with database.read() as session:
        dialect = session.dialect.name
        context = MigrationContext.configure(
            session, opts={"compare_type": True, "include_object": is_for_it}
        )
        assert compare_metadata(context, metadata) == []
    database.close()


def test_a_lineage_is_there_when_it_is_opened_again(
    database: Database, new_state: Callable[..., NewState]
) -> None:
    with database.write() as session:
        state = record.record(session, new_state(branch="main"))
    again = Database(database.url, create=False)
    with again.read() as session:
        assert lookup.state(session, state.uid) == state
    again.close()


def test_opening_what_is_there_loads_neither_alembic_nor_torch(database: Database) -> None:
    code = f"""
import sys
from datastates.lineage import Database
Database({database.url!r}).close()
sys.exit(", ".join({{"alembic", "torch", "networkx"}} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_that_open_a_new_lineage_at_once_do_not_collide(empty_url: str) -> None:
    code = f"""
import sys
import alembic.command
from datastates.lineage import Database
print("ready", flush=True)
sys.stdin.readline()
Database({empty_url!r}).close()
"""
    pipe = subprocess.PIPE
    children = [
        warm.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(5)
    ]
    assert errors_of(children) == [("", 0)] * 5


def test_create_false_refuses_what_is_not_there(empty_url: str) -> None:
    with pytest.raises(NotFound, match="no lineage"):
        Database(empty_url, create=False)


def test_create_false_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"x\.db"):
        Database(f"sqlite:///{tmp_path}/x.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("revision", ["9999", "datastates_0012"])
def test_a_lineage_of_another_version_is_refused_and_left_alone(
    database: Database, revision: str
) -> None:
    with database.write() as session:
        session.execute(
            text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )
    with pytest.raises(
        Conflict,
        match=f"another version of datastates .schema {revision}, this one reads {HEAD}.: upgrade",
    ):
        Database(database.url)
    assert count_states(database) == 0


def test_the_database_of_another_program_is_refused_and_left_alone(empty_url: str) -> None:
    database = Database(empty_url)
    with database.write() as session:
        for table in reversed(metadata.sorted_tables):
            session.execute(text(f'DROP TABLE "{table.name}"'))
        session.execute(text("CREATE TABLE songs (title TEXT)"))
        # another program's own
        session.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    for _ in ("with an alembic_version", "without"):
        with pytest.raises(
            InvalidInput, match=r"not a datastates database: it holds the tables .*songs"
        ):
            Database(empty_url)
        with database.write() as session:
            session.execute(text("DROP TABLE IF EXISTS alembic_version"))
    with database.read() as session:
        assert session.execute(text("SELECT count(*) FROM songs")).scalar_one() == 0
    database.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///x.db?mode=ro", "names no file"),
        ("mysql://host/name", "cannot live in 'mysql'"),
        ("runs/", "not a database URL"),
    ],
)
def test_a_url_of_another_kind_is_refused(url: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Database(url)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100)
    with pytest.raises(InvalidInput, match=r"notes\.txt is not a datastates database"):
        Database(f"sqlite:///{path}")
    assert path.read_text() == "dear diary, " * 100
    with pytest.raises(InvalidInput, match="is a folder"):
        Database(f"sqlite:///{tmp_path}")


def test_a_server_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(Unavailable, match="does not answer") as caught:
        Database(f"postgresql+psycopg://me:secret@/x?host={tmp_path}")
    assert "secret" not in str(caught.value)


def test_a_database_that_the_server_lacks_is_not_found(postgresql_url: str) -> None:
    missing = make_url(postgresql_url).set(database="nowhere").render_as_string(hide_password=False)
    with pytest.raises(NotFound, match=r"does not exist.*create the database first"):
        Database(missing)


def test_a_relative_path_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database("sqlite:///x.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert count_states(database) == 0
    assert database.url == f"sqlite:///{tmp_path}/x.db"
    database.close()


def test_a_write_that_raises_changes_nothing(
    database: Database, new_state: Callable[..., NewState]
) -> None:
    def record_and_fail() -> None:
        with database.write() as session:
            record.record(session, new_state(branch="main"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_and_fail()
    assert count_states(database) == 0


def test_a_read_sees_one_snapshot(database: Database, new_state: Callable[..., NewState]) -> None:
    with database.read() as session:
        before = session.execute(text("SELECT count(*) FROM state")).scalar_one()
        with database.write() as other:
            record.record(other, new_state())
        assert session.execute(text("SELECT count(*) FROM state")).scalar_one() == before == 0
    assert count_states(database) == 1


def test_only_durable_writes_wait_for_the_disk(database: Database) -> None:
    asked = "PRAGMA synchronous" if database.is_sqlite else "SHOW synchronous_commit"
    sync, lazy = (2, 1) if database.is_sqlite else ("on", "off")
    for durable in (True, False, True, False, False):
        with database.write(durable=durable) as session:
            assert session.execute(text(asked)).scalar_one() == (sync if durable else lazy)


def test_sqlite_checks_references_and_logs_ahead(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    with database.read() as session:
        assert session.execute(text("PRAGMA foreign_keys")).scalar_one() == 1
        assert session.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert session.execute(text("PRAGMA busy_timeout")).scalar_one() == 60_000
    database.close()


def test_postgresql_compiles_no_query(postgresql_url: str) -> None:
    database = Database(postgresql_url)
    for transaction in (database.read, database.read, database.write):
        with transaction() as session:
            assert session.execute(text("SHOW jit")).scalar_one() == "off"
    database.close()


def test_a_lock_that_is_never_released_is_unavailable_and_then_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.05)
    database = Database(f"sqlite:///{tmp_path}/x.db")
    holder = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked by another process"), database.write():
        raise AssertionError
    holder.execute("ROLLBACK")
    with database.write() as session:
        session.execute(text("DELETE FROM ref"))
    holder.close()
    database.close()


def test_a_deadlock_is_a_conflict(postgresql_url: str, new_state: Callable[..., NewState]) -> None:
    database = Database(postgresql_url)
    with database.write() as session:
        states = [record.record(session, new_state()) for _ in range(2)]
    met = threading.Barrier(2, timeout=30)
    raised: list[DatastatesError] = []

    def cross(first: str, second: str) -> None:
        touch = text("UPDATE state SET step = step + 1 WHERE uid = :uid")
        try:
            with database.write() as session:
                session.execute(touch, {"uid": first})
                met.wait()
                session.execute(touch, {"uid": second})
        except DatastatesError as error:
            raised.append(error)

    uids = [state.uid for state in states]
    threads = [threading.Thread(target=cross, args=pair) for pair in (uids, uids[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in raised] == [Conflict]
    assert "do it again" in str(raised[0])
    database.close()


def fail_with(code: str) -> TextClause:
    """A statement that fails on PostgreSQL as the server's own would."""
    return text(f"DO $$ BEGIN RAISE EXCEPTION 'as it fails' USING ERRCODE = '{code}'; END $$")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *(
            (code, Unavailable)
            for code in ("25006", "25P03", "25P04", "26000", "42P05", "57014", "53100", "57P01")
        ),
        *((code, InvalidInput) for code in ("54000", "54001", "22001")),
        *((code, Conflict) for code in ("40001", "40P01", "23505")),
    ],
)
def test_errors_of_postgresql_say_what_to_do(
    postgresql_url: str, code: str, kind: type[DatastatesError]
) -> None:
    database = Database(postgresql_url)
    with pytest.raises(DatastatesError, match="as it fails") as raised, database.write() as session:
        session.execute(fail_with(code))
    assert type(raised.value) is kind
    database.close()


def test_a_statement_is_overdue_only_where_a_deadline_was_set(postgresql_url: str) -> None:
    database = Database(postgresql_url)
    with (
        pytest.raises(InvalidInput, match="takes more than 60 s"),
        deadline.deadline(60),
        database.read() as session,
    ):
        session.execute(fail_with("57014"))
    database.close()


def test_a_server_that_takes_no_writes_for_a_while_is_asked_over_new_connections(
    postgresql_url: str,
) -> None:
    database = Database(postgresql_url)

    def backend() -> int:
        with database.write() as session:
            return int(session.execute(text("SELECT pg_backend_pid()")).scalar_one())

    before = backend()
    assert backend() == before
    with pytest.raises(Unavailable, match="takes no writes now"), database.write() as session:
        session.execute(fail_with("25006"))
    assert backend() != before
    database.close()


def test_a_transaction_that_others_were_in_the_way_of_is_done_again_a_few_times(
    postgresql_url: str,
) -> None:
    database, failures = Database(postgresql_url), iter(["40P01", "40001"])

    @retry_conflicts
    def transact(codes: Iterator[str]) -> int:
        with database.write() as session:
            if code := next(codes, None):
                session.execute(fail_with(code))
            return int(session.execute(text("SELECT 7")).scalar_one())

    assert transact(failures) == 7
    with pytest.raises(Unavailable, match="after 3 attempts"):
        transact(itertools.repeat("40P01"))
    with pytest.raises(Conflict, match="collides"):
        transact(iter(["23505"]))
    database.close()


def test_threads_write_and_read_at_once(
    database: Database, new_state: Callable[..., NewState]
) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            head: str | None = None
            for step in range(25):
                with database.write(durable=step % 5 == 0) as session:
                    head = record.record(session, new_state(head, branch=name, step=step)).uid
                with database.read() as session:
                    assert len(walk.log(session, head)) == step + 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"thread-{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert count_states(database) == 150


def test_a_closed_lineage_says_so(database: Database) -> None:
    database.close()
    database.close()
    with pytest.raises(Closed, match="was closed"), database.read():
        raise AssertionError


def test_a_forked_child_must_open_its_own(database: Database) -> None:
    code = f"""
import os, sys
from datastates.errors import Closed
from datastates.lineage import Database
from sqlalchemy import text
database = Database({database.url!r})
child = os.fork()
if not child:
    try:
        with database.read():
            os._exit(1)
    except Closed:
        database.close()
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
with database.read() as session:
    session.execute(text("SELECT count(*) FROM state")).scalar_one()
"""
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], check=True)
