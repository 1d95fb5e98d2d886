"""What docs/deployment.md shows of PostgreSQL: a pooler between a training and its server, the
rights of a second user."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pytest
import torch
from sqlalchemy import make_url

import datastates
from datastates.errors import InvalidInput, Unavailable
from datastates.lineage import Database

if TYPE_CHECKING:
    from tests.conftest import Postgresql

_T = TypeVar("_T")
DOCUMENT = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def shown(language: str, word: str) -> str:
    """The block of the document that holds a word."""
    return next(
        str(text)
        for text in re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
        if word in text
    )


@contextmanager
def pooled(postgresql: Postgresql, url: str) -> Iterator[str]:
    """The URL of a database through PgBouncer, with the document's settings.

    It gives transactions its connections in turn."""
    if PGBOUNCER is None:
        pytest.skip("no PgBouncer on this machine: apt-get install pgbouncer")
    folder, name = postgresql.host(f"pooler-{secrets.token_hex(4)}"), make_url(url).database
    settings = (
        shown("ini", "[pgbouncer]")
        .replace("lineage =", f"{name} =")
        .replace("db.example.org", f"{postgresql.host()} user=postgres")
    )
    own = (
        f"unix_socket_dir = {folder}\nlisten_port = 6432\nauth_type = any\nserver_round_robin ="
        " 1\ndefault_pool_size = 4\n"
    )
    (folder / "pgbouncer.ini").write_text(settings + own)
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [*as_user, PGBOUNCER, str(folder / "pgbouncer.ini")], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("process up" in line for line in process.stderr), "PgBouncer does not start"
            yield f"postgresql+psycopg://postgres@/{name}?host={folder}&port=6432"
        finally:
            process.terminate()
            process.communicate()


def train(url: str, packs: Path, count: int = 60) -> list[str]:
    """Capture states, every third durable, and read between them."""
    weight, uids = torch.zeros(4), []
    with datastates.open(url, packs=packs) as repo:
        run = repo.track(branch=packs.name, weight=weight)
        for number in range(count):
            weight += 1
            made = run.capture(metrics={"loss": 1.0})
            uids.append(made.uid)
            if number % 3 == 0:
                made.wait("durable")
                assert repo.log(packs.name, limit=1)[0].uid == made.uid
    return uids


@pytest.mark.parametrize("option", ["", "&prepare_threshold=0"])
def test_trainings_record_everything_through_a_pooler_of_transactions(
    postgresql: Postgresql,
    postgresql_url: str,
    tmp_path: Path,
    option: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pooled(postgresql, postgresql_url) as url, ThreadPoolExecutor(4) as pool:
        uids = {
            uid
            for made in pool.map(
                lambda number: train(url + option, tmp_path / f"b{number}"), range(4)
            )
            for uid in made
        }
    with datastates.open(postgresql_url, packs=tmp_path / "b0") as repo:
        assert {
            state.uid for number in range(4) for state in repo.log(f"b{number}", limit=100)
        } == uids
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []


def test_statements_that_a_pooler_mixes_up_end_no_training(
    postgresql: Postgresql, postgresql_url: str, tmp_path: Path
) -> None:
    with pooled(postgresql, postgresql_url) as url:
        mixed = f"{url}&prepare_threshold=1"
        with ThreadPoolExecutor(2) as pool:
            uids = {
                uid
                for made in pool.map(
                    lambda number: capture(mixed, tmp_path / f"b{number}"), range(2)
                )
                for uid in made
            }
    with datastates.open(postgresql_url, packs=tmp_path / "b0") as repo:
        assert {
            state.uid for number in range(2) for state in repo.log(f"b{number}", limit=100)
        } == uids


def capture(url: str, packs: Path) -> list[str]:
    """Capture states over connections that may fail; what asks the lineage at once is asked
    again."""
    weight, made = torch.zeros(4), []
    with patient(lambda: datastates.open(url, packs=packs)) as repo:
        run = patient(lambda: repo.track(branch=packs.name, weight=weight))
        for _ in range(20):
            weight += 1
            made.append(run.capture().uid)
    return made


def patient(ask: Callable[[], _T]) -> _T:
    for _ in range(50):
        with suppress(Unavailable):
            return ask()
    raise AssertionError("it is refused each time")


def test_only_connections_through_a_pooler_prepare_nothing(
    postgresql: Postgresql, postgresql_url: str
) -> None:
    def settings(url: str) -> tuple[int | None, str]:
        database = Database(url)
        try:
            with database.read() as session:
                raw: Any = session.connection.driver_connection
                return raw.prepare_threshold, raw.execute("SHOW jit").fetchone()[0]
        finally:
            database.close()

    with pooled(postgresql, postgresql_url) as url:
        assert [settings(each) for each in (url, f"{url}&prepare_threshold=7")] == [
            (None, "off"),
            (7, "off"),
        ]
    assert settings(postgresql_url) == (5, "off")
    assert settings(f"{postgresql_url}&prepare_threshold=0") == (None, "off")
    with pytest.raises(InvalidInput, match="prepare_threshold in the URL is no number: use 0"):
        Database(f"{postgresql_url}&prepare_threshold=never")


def test_an_error_that_passes_by_sqlalchemy_is_ours(postgresql_url: str) -> None:
    database = Database(postgresql_url)
    with pytest.raises(Unavailable, match="does not answer"), database.write() as session:
        broken(session.connection.driver_connection)
    with database.write():
        pass
    database.close()


def broken(raw: Any) -> None:
    """Cut a connection off, and use it."""
    with socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    raw.execute("SELECT 1")


def test_a_second_user_trains_with_the_rights_of_the_document_and_is_told_of_one_that_is_missing(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    url = postgresql.empty()
    name, user, owner = (
        str(make_url(url).database),
        f"trainer_{secrets.token_hex(4)}",
        f"owner_{secrets.token_hex(4)}",
    )
    with postgresql._connect(name) as connection:
        connection.execute(
            f"CREATE ROLE {user} LOGIN; CREATE ROLE {owner} LOGIN; GRANT ALL ON SCHEMA public TO"
            f" {owner}"
        )
    Database(url.replace("postgres@", f"{owner}@")).close()
    theirs = url.replace("postgres@", f"{user}@")
    with pytest.raises(
        Unavailable, match=r"lacks a right, GRANT it.*permission denied for table alembic_version"
    ):
        datastates.open(theirs, packs=tmp_path / "b0")
    with psycopg.connect(
        host=str(postgresql.host()), user=owner, dbname=name, autocommit=True
    ) as connection:
        connection.execute(
            shown("sql", "GRANT").replace("trainer", user).replace("datastates", owner)
        )
        connection.execute("CREATE TABLE later (id serial)")
    assert len(train(theirs, tmp_path / "b0", 10)) == 10
    with datastates.open(theirs, packs=tmp_path / "b0") as repo:
        repo.tag("v1", "b0", message="kept")
        repo.prune("latest:1")
        repo.delete_ref("v1")
    with psycopg.connect(host=str(postgresql.host()), user=user, dbname=name) as connection:
        connection.execute("INSERT INTO later DEFAULT VALUES")


def test_a_right_that_is_taken_away_and_given_back_costs_no_state(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    url = postgresql.migrated()
    name, user = str(make_url(url).database), f"trainer_{secrets.token_hex(4)}"
    rights = shown("sql", "GRANT").replace("trainer", user).replace("datastates", "postgres")
    with postgresql._connect(name) as connection:
        connection.execute(f"CREATE ROLE {user} LOGIN; {rights}")
        weight = torch.zeros(4)
        with datastates.open(url.replace("postgres@", f"{user}@"), packs=tmp_path) as repo:
            run = repo.track(weight=weight)
            run.capture().wait()
            connection.execute(f"REVOKE INSERT ON state FROM {user}")
            weight += 1
            made = run.capture()
            connection.execute(rights)
            assert made.wait().uid == repo.state("main").uid
        connection.execute(f"DROP OWNED BY {user}")
