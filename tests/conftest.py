"""A PostgreSQL server of the tests' own, and what helps to see a hang: ``kill -USR1`` prints the
stack of every thread."""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import make_url

from datastates.lineage import Database
from datastates.lineage.migrations import HEAD, new, upgrade
from datastates.lineage.schema import metadata
from datastates.maintenance import environment
from datastates.values import Value
from tests.support import effort
from tests.support.stores import _redis, _s3, redis, s3  # noqa: F401  # fixtures

try:
    import psycopg
except ImportError:
    # an optional package: without it, what needs a server is skipped
    psycopg = None  # type: ignore[assignment]

# A shared machine is no stop-watch.
for _profile, _count in (("all", 100), ("gate", 100 // effort.SHARE)):
    settings.register_profile(
        _profile, max_examples=_count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("all" if effort.IS_THOROUGH else "gate")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let a person look into a test run that hangs.

    What is imported is there to stay: no garbage is looked for meanwhile."""
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = effort.SEED
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, all_threads=True)
    for number, default in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            # by nohup or a job in the background; processes of tests would inherit it
            signal.signal(number, default)
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out of the gate, and run files with long tests first.

    Several processes take a file each: a long one at the end would leave the others idle. A test
    that is named (``path::test``) is not left out."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)
    if not effort.IS_THOROUGH and not any("::" in word for word in config.args):
        chosen = effort.in_gate([item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say what is tried and how to try it again, before anything can hang."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # processes that run tests for another one have none
        reporter.write_line(effort.said())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Say it again below what failed."""
    if exitstatus:
        terminalreporter.write_line(effort.said())


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what the tests make.

    RateLimitFilter: as often as Python does it, it is a sixth of all work."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def known_commit() -> Iterator[None]:
    """Git is asked once about this very checkout, not by each of some thousand runs: another
    process each time."""
    ask, known = environment._git, functools.cache(environment._git)

    def answer() -> tuple[str | None, bool | None, dict[str, Value]]:
        with suppress(FileNotFoundError):  # the working directory is gone
            if Path.cwd() == effort.ROOT:
                return known()
        return ask()

    with pytest.MonkeyPatch.context() as patch:
        if not effort.IS_THOROUGH:
            patch.setattr(environment, "_git", answer)
        yield


@pytest.fixture
def real_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is said of the migrations themselves: new lineages are migrated, too."""
    monkeypatch.setattr(new, "write", upgrade.upgrade)


class Postgresql:
    """A running server that listens on a socket in ``folder`` only.

    Databases are made from a migrated template."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder, binaries
        self._serial = itertools.count()
        self._template: str | None = None
        self._free: list[str] = []

    def start(self) -> None:
        self._run(
            "initdb",
            "-D",
            str(self.folder / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "--no-sync",
        )
        self.start_again()

    def start_again(self, *, name: str = "") -> None:
        """On the data that is there.

        With a ``name`` only those find it who look for ``host(name)``."""
        options = f"-k {self.host(name)} -c listen_addresses='' -c max_connections=200"
        options += (
            " -c fsync=off -c full_page_writes=off -c wal_level=minimal -c max_wal_senders=0 -c"
            " autovacuum=off"
        )
        self._run(
            "pg_ctl",
            "start",
            "-w",
            "-D",
            str(self.folder / "data"),
            "-l",
            str(self.folder / "log"),
            "-o",
            options,
        )

    def host(self, name: str = "") -> Path:
        """Where its socket lies."""
        folder = self.folder / name
        if not folder.is_dir():
            folder.mkdir()
            shutil.chown(folder, self.folder.owner())
        return folder

    def kill(self) -> None:
        """The server first, then all that it had started."""
        server = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        own = [
            server,
            *(
                int(pid)
                for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()
            ),
        ]
        for pid in own:
            with suppress(ProcessLookupError):  # a worker that had done what it was started for
                os.kill(pid, signal.SIGKILL)
        for pid in own:
            while is_there(pid):
                os.sched_yield()
        for lock in (
            self.folder / "data" / "postmaster.pid",
            *self.folder.rglob(".s.PGSQL.*.lock"),
        ):
            # the server asks whether the process is there, and a zombie is
            lock.unlink(missing_ok=True)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self.folder / "data"))

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}"

    def empty(self) -> str:
        """The URL of a new database without a table."""
        return self._create("template1")

    def migrated(self) -> str:
        """The URL of a database that holds an empty lineage."""
        if self._template is None:
            url = self.empty()
            Database(url).close()
            self._template = str(make_url(url).database)
        if self._free:
            return self._free.pop()
        url = self._create(self._template)
        with self._connect(str(make_url(url).database)) as connection:
            connection.execute(_OF_ITS_OWN, [secrets.token_hex(12)])
        return url

    def give_back(self, url: str) -> None:
        """Take back what ``migrated`` gave: emptied it serves another test, at a fraction of the
        price of a new one."""
        names = [
            f'"{table.name}"'
            for table in reversed(metadata.sorted_tables)
            if table.name != "repository"
        ]
        try:
            with self._connect(str(make_url(url).database)) as connection, connection.transaction():
                connection.execute("SET lock_timeout = '5s'")
                # nobody is at work in it any more
                connection.execute(f"LOCK TABLE {', '.join(names)} IN ACCESS EXCLUSIVE MODE")
                _clear(connection, names)
                connection.execute(_OF_ITS_OWN, [secrets.token_hex(12)])
                version = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except psycopg.Error:
            return  # a test changed its tables: nobody else shall have it
        if version == [(HEAD,)]:
            self._free.append(url)

    def _create(self, template: str) -> str:
        name = f"test_{next(self._serial)}"
        with self._connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def _connect(self, database: str, name: str = "") -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=str(self.host(name)), user="postgres", dbname=database, autocommit=True
        )

    def _run(self, program: str, *arguments: str) -> None:
        """As the package's own user when we are root: the server refuses to run as root."""
        command = [str(self.binaries / program), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        with (self.folder / "out").open("ab") as out:
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=False,
            )
        if done.returncode:
            texts = [
                path.read_text(errors="replace")
                for path in (self.folder / "out", self.folder / "log")
                if path.exists()
            ]
            raise RuntimeError(f"{program} failed with {done.returncode}:\n" + "\n".join(texts))


_OF_ITS_OWN = (
    "INSERT INTO repository (id, uid) VALUES (1, %s) ON CONFLICT (id) DO UPDATE SET uid ="
    " excluded.uid"
)
"""A lineage of its own, whatever it was copied from."""

_LARGE = (
    "SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind ="
    " 'r' AND pg_relation_size(oid) > 65536)"
)


def _clear(connection: psycopg.Connection[Any], names: list[str]) -> None:
    """Leave no row of these tables, and every number to be given anew.

    Truncating makes files, some forty: only where rows fill them."""
    if connection.execute(_LARGE).fetchall() == [(True,)]:
        connection.execute(f"TRUNCATE {', '.join(names)} RESTART IDENTITY")
        return
    # they refer to each other, and all of them go
    connection.execute("SET LOCAL session_replication_role = replica")
    connection.execute("; ".join(f"DELETE FROM {name}" for name in names))
    connection.execute("SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'")


def is_there(pid: int) -> bool:
    """Whether a process runs: not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """The server, one for each test process."""
    with _server() as server:
        yield server


@pytest.fixture(scope="module")
def mortal_postgresql() -> Iterator[Postgresql]:
    """A server that a module may kill and start again."""
    with _server() as server:
        yield server


@contextmanager
def _server() -> Iterator[Postgresql]:
    binaries = _binaries()
    missing = _missing(binaries)
    if missing or binaries is None:
        if os.environ.get("DATASTATES_REQUIRE_POSTGRESQL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    # Not under tmp_path: the server's user must reach it, and the path of a socket is at most 107
    # bytes.
    with tempfile.TemporaryDirectory(
        prefix="datastates-pg-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        if os.geteuid() == 0:
            shutil.chown(name, "postgres")
        server = Postgresql(Path(name), binaries)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgresql_url(postgresql: Postgresql) -> Iterator[str]:
    """A database on the server that holds an empty lineage."""
    url = postgresql.migrated()
    yield url
    postgresql.give_back(url)


def _missing(binaries: Path | None) -> str:
    """What keeps the server from running here; empty when nothing does."""
    if binaries is None:
        return "no PostgreSQL server on this machine: apt-get install postgresql"
    if psycopg is None:
        return "no PostgreSQL driver in this environment: pip install 'datastates[postgresql]'"
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        return (
            "PostgreSQL refuses to run as root, and there is no user 'postgres': apt-get install"
            " postgresql"
        )
    return ""


def _binaries() -> Path | None:
    """Where ``initdb`` lies: as pg_config says, on the PATH, or where Debian puts it (the
    newest)."""
    folders: list[Path] = []
    if config := shutil.which("pg_config"):
        folders.append(
            Path(
                subprocess.run(
                    [config, "--bindir"], capture_output=True, text=True, check=True
                ).stdout.strip()
            )
        )
    if found := shutil.which("initdb"):
        folders.append(Path(found).parent)
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    folders += sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    return next(
        (
            folder
            for folder in folders
            if (folder / "initdb").exists() and (folder / "postgres").exists()
        ),
        None,
    )
