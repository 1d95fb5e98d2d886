"""The lineage database: SQLite in a file, or PostgreSQL. Opening migrates; transactions come as
context managers.

A read transaction sees one consistent snapshot. A write transaction is ``BEGIN IMMEDIATE`` on
SQLite, so writers queue instead of failing half-way. On PostgreSQL it is READ COMMITTED. Every
change of shared rows is a compare-and-swap there, or takes its row locks in id order.
"""

from __future__ import annotations

import logging
import operator
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url, text
from sqlalchemy.pool import QueuePool

from datastates.errors import (
    Closed,
    Conflict,
    Corrupt,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from datastates.lineage.migrations import new
from datastates.system import logs
from datastates.system.files import FILE_MODE, make_folders, share
from datastates.system.interrupts import Mutex, checkpoint, undisturbed
from datastates.system.threads import thread_work

from . import sqlite_files
from .migrations import HEAD, KNOWN
from .session import Session
from .sqlite_files import ReadOnlyFile, why_read_only

if TYPE_CHECKING:
    from sqlalchemy import ExceptionContext

_STEPS = 10_000  # of SQLite's virtual machine between two checks of the clock: some 100 us
_until: ContextVar[tuple[float, float] | None] = ContextVar("datastates_deadline", default=None)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Give everything that this thread or task reads in the block one common deadline; a deadline
    set before still holds.

    :raises InvalidInput: (raised by the reads) it took longer.
    """
    token = _until.set(_until.get() or (time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _until.reset(token)


def _check_deadline(*_: object) -> None:
    until = _until.get()
    if until is not None and time.monotonic() > until[0]:
        raise deadline_error()


@contextmanager
def enforce_deadline(session: Session) -> Iterator[None]:
    """Have the database end reads in a session when the deadline passes, if there is one."""
    until = _until.get()
    if until is None:
        yield
        return
    at = until[0]
    # of this connection alone, which ends with the session
    event.listen(session, "before_cursor_execute", _check_deadline)
    if session.dialect.name != "sqlite":
        milliseconds = max(1, int((at - time.monotonic()) * 1000))
        session.execute(text(f"SET LOCAL statement_timeout = {milliseconds}"))
        yield
        return
    raw: Any = session.connection.dbapi_connection
    raw.set_progress_handler(lambda: time.monotonic() > at, _STEPS)
    try:
        yield
    finally:
        raw.set_progress_handler(None, 0)


def deadline_error() -> InvalidInput:
    """The error for a query that takes too long."""
    until = _until.get()
    given = "" if until is None else f" more than {until[1]:g} s"
    return InvalidInput(
        f"the answer takes{given}, and was given up: ask for less (fewer heads, fewer '@best', a"
        " narrower search)"
    )


_logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 60.0
_MARKER_TABLES = ("state", "ref_event", "replica")
# the advisory lock of PostgreSQL; any number that others are unlikely to choose
_MIGRATION_LOCK = 0x6461_7461_7374
_BEGIN = "datastates_begin"
_IMMEDIATE = "BEGIN IMMEDIATE"
_ASK_AGAIN_MS = (
    3  # SQLite retries after 1 ms and after 2 ms more; after that it would wait longer and longer
)
_DURABLE = "datastates_durable"
_FILE = "datastates_file"
_POOLED = "datastates_pooled"
_CANCELLED = "57014"  # PostgreSQL's code for a statement that was cancelled
_OVERTAKEN = ("40001", "40P01")  # a conflict of transactions, a deadlock
_PASSING = {
    "25006": "it takes no writes now",
    "25P03": "it ended a transaction that paused",
    "25P04": "it ended a transaction that took long",
    "26000": (
        "a pooler mixed up prepared statements, which prepare_threshold=0 in the URL turns off"
    ),
    "42P05": (
        "a pooler mixed up prepared statements, which prepare_threshold=0 in the URL turns off"
    ),
    "42501": "its user lacks a right, GRANT it as docs/deployment.md shows",
}
"""PostgreSQL's codes for what says nothing about a statement, and passes; a connection made
later may not see it at all."""
_WHOLE = {
    "sqlite": text("SELECT uid, 0 FROM repository"),
    "postgresql": text(
        "SELECT uid, (SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND connamespace ="
        " current_schema()::regnamespace) FROM repository"
    ),
}
"""Which lineage a database holds.

Foreign keys are what pg_restore makes last: while some are missing, a restore goes on."""
_ATTEMPTS = 3
_BEYOND_LIMITS = "54"  # PostgreSQL's class of errors for exceeded limits
_DISK_FULL = "53100"  # PostgreSQL's code for a full disk
_UNWRITTEN = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE),
    *(
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_DIR_FSYNC,
        sqlite3.SQLITE_IOERR_SHMOPEN,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    ),
}
"""SQLite's codes for it."""
_PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
"""A server that was cut off is found dead within half a minute, not only when the kernel gives up.

The URL may set other values."""
_PREPARE = "prepare_threshold"
_P = ParamSpec("_P")
_T = TypeVar("_T")
_migrating = threading.Lock()  # Alembic's context is a global of the process


class Database:
    """An open lineage. Any thread may use it, each transaction in its own thread; it does not
    survive ``fork``.

    A database that is missing, or that was replaced by something else, is unavailable until that
    lineage is back. If a copy of it takes its place, transactions use the copy.

    ``read_only`` is the reason why nothing can be written, or None.

    :raises NotFound: ``create`` is False and there is no lineage at ``url``.
    :raises InvalidInput: the URL is of another kind, the database holds something else, or its file
        has another hard link.
    :raises Conflict: another version of datastates wrote it, or it was replaced meanwhile.
    :raises Unavailable: the server does not answer.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        parsed = _parse(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.url = parsed.render_as_string(hide_password=False)
        self._shown = logs.text(parsed.render_as_string(hide_password=True))
        self._pid = os.getpid()
        self._turn = Mutex()
        self._closed = False
        self._sessions = 0
        self.read_only: str | None = None
        self._read_only_file: ReadOnlyFile | None = None
        self._lineage: list[object] = []
        self._path = path = Path(parsed.database or "")
        # the inode numbers of the file and of the index of its log
        self._held: tuple[int | None, int | None] = (
            None,
            None,
        )
        if self.is_sqlite:
            _prepare_file(path, create=create)
            number = _number(path)
            self.read_only = why_read_only(path)
            _check_links(path)
            self._read_only_file = None if self.read_only is None else ReadOnlyFile(path)
        if self.is_sqlite:
            self._engine = _sqlite_engine(
                parsed, self._lineage, read_only_file=self._read_only_file
            )
        else:
            self._engine = _postgresql_engine(parsed, self._lineage)
        read: dict[str, Any] = {_BEGIN: "BEGIN"}
        if not self.is_sqlite:
            read |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = self._engine.execution_options(**read)
        self._writer = self._engine.execution_options(**{_BEGIN: _IMMEDIATE, _DURABLE: False})
        self._durable_writer = self._engine.execution_options(
            **{_BEGIN: _IMMEDIATE, _DURABLE: True}
        )
        self._end = self._ended_by(operator.call)
        try:
            self._open(create=create)
            if self.is_sqlite and self._read_only_file is None:
                self._hold(number)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that sees one snapshot; changes made in it are discarded."""
        with self._session(self._reader) as session:
            yield session

    @contextmanager
    def write(self, durable: bool = False, *, in_copy: bool = False) -> Iterator[Session]:
        """A transaction that commits when the block ends well, and rolls back when it raises.

        With ``durable`` it returns only once the commit survives a power loss. Without it, a crash
        of this process loses nothing; a crash of the machine may lose the last moments, but never
        leaves the database inconsistent. With ``in_copy``, if the file may not be written, a
        private copy is changed instead. The copy is read until the file changes.

        :raises Unavailable: another process held the write lock for a minute, the file was replaced
            during the transaction, or nothing may be written here (see ``read_only``).
        """
        if self._read_only_file is not None and in_copy:
            self._read_only_file.take_copy(follows=True)
            self._engine.dispose()
        elif self.read_only is not None:
            raise Unavailable(
                f"{self._shown} can only be read: {self.read_only}; get the right to write there,"
                " or copy the repository"
            )
        with self._writing(self._durable_writer if durable else self._writer) as session:
            yield session

    @property
    def engine(self) -> Engine:
        """The engine that its connections come from, for tests that interfere with them."""
        return self._engine

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and takes no more transactions."""
        return self._closed

    def close(self) -> None:
        """Take no more transactions, and close every connection: now, or when the last
        transaction under way ends. Idempotent."""
        with self._turn:
            self._closed = True
            if not self._sessions:
                self._end()

    def _ended_by(
        self, close: Callable[[Callable[[], None]], None]
    ) -> weakref.finalize[..., Database]:
        """The finalizer that closes the connections: when it is called, or when this object is
        collected without a close."""
        end = weakref.finalize(
            self, _close_engine, os.getpid(), self._engine, self._read_only_file, close
        )
        end.atexit = False  # the kernel closes them
        return end

    @contextmanager
    def _writing(self, engine: Engine) -> Iterator[Session]:
        with self._session(engine) as session:
            yield session
            session.commit()
            if self._held[0] is not None and session.info[_FILE] != _number(self._path):
                raise Unavailable(
                    f"{self._shown} was replaced during a transaction, which changed the earlier"
                    " file only: do it again"
                )

    @contextmanager
    def _session(self, engine: Engine) -> Iterator[Session]:
        if self._pid != os.getpid():
            raise Closed(
                f"the lineage {self._shown} was opened by process {self._pid}: open it again in"
                " this one"
            )
        try:
            with (
                undisturbed(),
                self._used(),
                thread_work(f"asking the lineage {self._shown}"),
                engine.connect() as session,
            ):
                session.begin()  # a writer takes the write lock now, before anything is read
                with enforce_deadline(session):
                    yield session
        except (exc.SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            raise translate(error, self._shown, was_there=bool(self._lineage)) from error

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Keep the connections and the anchor for the block: to close any descriptor of the file
        releases the locks of a transaction."""
        with self._turn:
            if self._closed:
                raise Closed(f"the lineage {self._shown} was closed: open it again")
            if self._read_only_file is not None and self._read_only_file.has_changed():
                self._engine.dispose()
            if self._held[0] not in (None, number := _number(self._path)):
                self._use_replacement(number)
            self._sessions += 1
        try:
            yield
        finally:
            with self._turn:
                self._sessions -= 1
                if self._closed and not self._sessions:
                    self._end()

    def _open(self, *, create: bool) -> None:
        with self._session(self._reader) as session:
            version = _version(session)
            if version == HEAD and not self._lineage:
                self._lineage += session.execute(_WHOLE[session.dialect.name]).one()
        if version == HEAD:
            return
        if version is None and not create:
            raise NotFound(f"{self._shown} holds no lineage: create it, or check the URL")
        if self._read_only_file is not None:
            self._read_only_file.take_copy()
            self._engine.dispose()
        if self.is_sqlite:
            self._use_wal()
        with _migrating, self._writing(self._durable_writer) as session:
            if not self.is_sqlite:
                session.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK}
                )
            version = _check_database(session, self._shown)
            if version is None and self.is_sqlite:
                new.write(session)
            elif version != HEAD:
                # Alembic takes 100 ms to import
                from datastates.lineage.migrations.upgrade import (
                    upgrade,
                )

                upgrade(session)
        self._open(create=False)

    def _hold(self, opened: int | None) -> None:
        """Hold the anchor of the file at the path. From now on our locks keep others from putting
        another file there, as a rebuild does.

        :raises Conflict: it is not the file that was ``opened``.
        """
        self._end.detach()
        self._end = self._ended_by(sqlite_files.hold(self._path))
        self._held = _number(self._path), _number(f"{self._path}-shm")
        if self._held[0] != opened:
            raise Conflict(f"{self._shown} was replaced while it was opened: open it again")

    def _use_replacement(self, file: int | None) -> None:
        """Use the file that was put in the place of the one that was opened, as a restored backup
        is. Runs in turn.

        :raises Unavailable: there is no file, or it does not hold this lineage.
        """
        if file is None:
            raise Unavailable(f"{self._shown} is gone: put the file back, or a copy of it")
        with sqlite_files.exclusive(self._path) as is_exclusive:
            if is_exclusive and _number(f"{self._path}-shm") == self._held[1]:
                # SQLite would apply the log of the earlier file to this one
                rest = [0, 1, 0]
                # QueuePool has it; else it would connect to the new file
                if self._engine.pool.checkedin():  # type: ignore[attr-defined]
                    with closing(self._engine.raw_connection()) as raw:
                        rest = raw.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if rest[1] != rest[2]:
                    # the earlier file may be put back, so it gets everything first
                    raise Unavailable(
                        f"{self._shown} was replaced, and the earlier file still has open"
                        " transactions: try again"
                    )
                for suffix in ("-wal", "-shm"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        self._end()
        self._held = file, None
        try:
            _check_links(self._path)
            self._open(create=False)
            self._hold(file)
        except DatastatesError as error:
            self._engine.dispose()
            self._held = 0, 0  # no file has this number: the next transaction tries again
            raise Unavailable(
                f"{self._shown} was replaced by a file that cannot be used: put a copy of this"
                f" lineage there ({error})"
            ) from error
        _logger.warning(
            "%s was replaced: transactions use the new file, and what it lacks of this process is"
            " recorded again",
            self._shown,
        )

    def _use_wal(self) -> None:
        """Switch to WAL, where readers never block the writer.

        The mode stays with the file. Changing it ignores the busy timeout."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            with closing(self._engine.raw_connection()) as raw:
                try:
                    raw.cursor().execute("PRAGMA journal_mode=WAL")
                except sqlite3.Error as error:
                    if "locked" not in str(error) or time.monotonic() > deadline:
                        raise translate(error, self._shown) from error
                else:
                    return
            time.sleep(0.01)


def translate(error: Exception, where: str, *, was_there: bool = False) -> DatastatesError:
    """Our error for a driver's error. All of them are mapped here. ``where`` is shown in the
    message. With ``was_there``, a database that is missing was open before, so it may be restored
    soon."""
    if not isinstance(error, exc.SQLAlchemyError):  # it was raised by the driver itself
        error = exc.DBAPIError.instance(None, None, error, Exception)
    origin = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    # never the SQL
    said, _, _ = (
        (str(origin.args[0] if origin.args else "") if origin is error else str(origin))
        .strip()
        .partition("\n")
    )
    said = logs.text(said)
    code = getattr(origin, "sqlstate", None)
    lower = said.lower()
    if _until.get() is not None and (
        code == _CANCELLED or getattr(origin, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
    ):
        return deadline_error()
    if code == _CANCELLED:
        return Unavailable(
            f"{where} gave up what it was asked ({said}): see who cancels there, and its"
            " statement_timeout"
        )
    if code in _PASSING:
        return Unavailable(f"{where} does not answer as it should: {_PASSING[code]} ({said})")
    if was_there and "does not exist" in lower:
        return Unavailable(
            f"{where} is not there for now ({said}): restore the database under this name"
        )
    if code in _OVERTAKEN:
        return Conflict(
            f"{where}: another transaction was first, nothing was changed: do it again ({said})"
        )
    if isinstance(error, exc.TimeoutError):
        return Unavailable(f"{where}: every connection of this process is in use ({said})")
    if code == _DISK_FULL or getattr(origin, "sqlite_errorcode", None) in _UNWRITTEN:
        return Unavailable(
            f"{where} cannot be written ({said}): see that its disk is well and has room, then try"
            " again"
        )
    if "is locked" in lower:
        return Unavailable(
            f"{where} was locked by another process for {BUSY_TIMEOUT_S:.0f} s: see which one"
            " writes, then try again"
        )
    if "not a database" in lower:
        return InvalidInput(
            f"{where} is not a datastates database: the file holds something else;"
            " `datastates repair --lineage --replace` rebuilds one"
        )
    if "malformed" in lower:
        return Corrupt(
            f"{where} is damaged ({said}): restore the file from a copy, or rebuild it from the"
            " packs by `datastates repair --lineage --replace`"
        )
    if isinstance(error, exc.IntegrityError):
        return Conflict(f"{where}: what is written collides with what is there ({said})")
    if isinstance(error, exc.DataError) or (code or "").startswith(_BEYOND_LIMITS):
        return InvalidInput(f"{where} cannot hold a value ({said})")
    if isinstance(origin, sqlite3.OperationalError) or isinstance(
        error, exc.OperationalError | exc.InterfaceError
    ):
        if not isinstance(origin, sqlite3.Error) and "does not exist" in lower:
            return NotFound(f"{where} does not exist ({said}): create the database first")
        return Unavailable(f"{where} does not answer ({said})")
    return DatastatesError(f"{where}: {said}")


def retry_conflicts(transact: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that is one transaction, done again where another transaction was in its way.

    :raises Unavailable: (the returned function) one was in its way each time.
    """

    @wraps(transact)
    def retry(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(_ATTEMPTS):
            try:
                return transact(*args, **kwargs)
            except Conflict as error:
                if (
                    getattr(getattr(error.__cause__, "orig", None), "sqlstate", None)
                    not in _OVERTAKEN
                ):
                    raise
                last = error
        raise Unavailable(f"after {_ATTEMPTS} attempts: {last}") from last

    return retry


def _close_engine(
    pid: int,
    engine: Engine,
    read_only_file: ReadOnlyFile | None,
    close: Callable[[Callable[[], None]], None],
) -> None:
    """Close the connections of process ``pid``, by ``close``; a forked child leaves them alone."""
    if pid != os.getpid():
        return
    close(engine.dispose)
    if read_only_file is not None:
        read_only_file.close()


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise InvalidInput(
            f"{logs.text(url)!r} is not a database URL: use sqlite:///path or"
            " postgresql+psycopg://host/name"
        ) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite+pysqlite":
        parsed = parsed.set(drivername="sqlite")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise InvalidInput(
            f"a lineage cannot live in {parsed.drivername!r}: use sqlite:///path or"
            " postgresql+psycopg://host/name"
        )
    if parsed.drivername == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.query:
            raise InvalidInput(
                f"{logs.text(url)!r} names no file: use sqlite:///path, without options"
            )
        parsed = parsed.set(database=str(Path(parsed.database).absolute()))
    return parsed


def _prepare_file(path: Path, *, create: bool) -> None:
    """Create an empty file if there is none. The files that SQLite later creates next to it get the
    same owner and mode."""
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder: name the file of the database")
    if path.exists():
        return
    if not create:
        raise NotFound(f"there is no lineage at {path}: create it, or check the path")
    try:
        make_folders(path.parent)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        try:
            share(path.parent, fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be made ({error.strerror}): get the right to write there, or name"
            " another folder"
        ) from error


def _check_links(path: Path) -> None:
    """Raise if another name leads to a file of the database, as after ``cp -al``.

    SQLite finds a log by the name of its database. It would apply the log of one name to the file
    of both.
    """
    for suffix in ("", "-wal", "-shm"):
        name = Path(f"{path}{suffix}")
        if name.exists() and name.stat().st_nlink > 1:
            raise InvalidInput(
                f"{name} has another hard link, as after `cp -al`, and SQLite would damage the"
                " file of both names: delete the other name, or open a separate copy (`cp -a"
                " --no-preserve=links`)"
            )


def _number(path: Path | str) -> int | None:
    """The inode number of the file at this path."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _sqlite_engine(
    url: URL, lineage: list[object], *, read_only_file: ReadOnlyFile | None
) -> Engine:
    options: dict[str, Any] = {
        "isolation_level": None,
        "timeout": BUSY_TIMEOUT_S,
        "check_same_thread": False,
    }
    pool: dict[str, Any] = {"pool_size": 8, "max_overflow": -1}
    if read_only_file is None:
        engine = create_engine(url, connect_args=options, **pool)
    else:
        engine = create_engine(
            "sqlite://",
            creator=lambda: read_only_file.connect(BUSY_TIMEOUT_S),
            poolclass=QueuePool,
            **pool,
        )
    event.listen(engine, "connect", partial(_on_sqlite_connect, str(url.database), lineage))
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _on_sqlite_connect(
    path: str, lineage: list[object], raw: sqlite3.Connection, record: Any
) -> None:
    record.info[_FILE] = _number(path)
    _recognize(raw, "sqlite", lineage)
    raw.execute("PRAGMA foreign_keys=ON")
    raw.execute("PRAGMA cache_size=-16384")
    raw.execute("PRAGMA synchronous=FULL")
    record.info[_DURABLE] = True


def _on_sqlite_begin(connection: Connection) -> None:
    """Begin explicitly: the driver's own BEGIN comes late and is never IMMEDIATE.
    ``synchronous`` can be changed only outside a transaction."""
    options = connection.get_execution_options()
    raw: Any = connection.connection.dbapi_connection
    durable = options.get(_DURABLE)
    if durable is not None and connection.info.get(_DURABLE) != durable:
        raw.execute("PRAGMA synchronous=FULL" if durable else "PRAGMA synchronous=NORMAL")
        connection.info[_DURABLE] = durable
    if options.get(_BEGIN) == _IMMEDIATE:
        _begin_immediate(raw)
    else:
        raw.execute("BEGIN")


def _begin_immediate(raw: sqlite3.Connection) -> None:
    """Take the write lock.

    SQLite's own waiting sleeps longer and longer and lets newcomers pass; this retries every few
    milliseconds."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    raw.execute(f"PRAGMA busy_timeout={_ASK_AGAIN_MS}")
    try:
        while True:
            try:
                raw.execute(_IMMEDIATE)
            except sqlite3.OperationalError as error:
                if (
                    error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
                    or time.monotonic() > deadline
                ):
                    raise
                checkpoint()
            else:
                return
    finally:
        raw.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000:.0f}")


def _postgresql_engine(url: URL, lineage: list[object]) -> Engine:
    try:
        options: dict[str, str | int | None] = {
            key: value for key, value in _PATIENCE.items() if key not in url.query
        }
        if _PREPARE in url.query:
            if not url.normalized_query[_PREPARE][-1].isdecimal():
                raise InvalidInput(
                    f"{_PREPARE} in the URL is no number: use 0 for no prepared statements, as a"
                    " pooler may need"
                )
            options[_PREPARE] = int(url.normalized_query[_PREPARE][-1]) or None
        engine = create_engine(
            url, pool_size=8, max_overflow=24, pool_pre_ping=True, connect_args=options
        )
    except ModuleNotFoundError as error:
        raise Unavailable(
            "PostgreSQL needs its driver: pip install 'datastates[postgresql]'"
        ) from error
    event.listen(
        engine,
        "connect",
        partial(_on_postgresql_connect, lineage, finds_poolers=_PREPARE not in url.query),
    )
    event.listen(engine, "begin", _on_postgresql_begin)
    event.listen(engine, "handle_error", _on_postgresql_error)
    return engine


def _recognize(raw: Any, dialect: str, lineage: list[Any]) -> None:
    """Close a new connection unless it leads to the lineage that was opened.

    :raises Unavailable: that is not there, or still being restored.
    """
    with ExitStack() as stack:
        stack.callback(raw.close)
        found = raw.execute(_WHOLE[dialect].text).fetchone() if lineage else None
        if lineage and (found is None or found[0] != lineage[0] or found[1] < lineage[1]):
            raise Unavailable(
                f"the database does not hold lineage {lineage[0]} for now: finish restoring it, or"
                " restore the right one"
            )
        stack.pop_all()


def _on_postgresql_connect(
    lineage: list[object], raw: Any, record: Any, *, finds_poolers: bool
) -> None:
    """Turn off PostgreSQL's JIT compiler: its cost estimate turns it on for filters of hundreds of
    terms, where it took 16 s and the rows 0.7 s. Turn off prepared statements behind a pooler,
    which has each transaction made by another process of the server than the one that it named.
    """
    _recognize(raw, "postgresql", lineage)
    _, pid = raw.execute("SELECT set_config('jit', 'off', false), pg_backend_pid()").fetchone()
    raw.commit()
    record.info[_POOLED] = pid != raw.info.backend_pid
    if finds_poolers and record.info[_POOLED]:
        raw.prepare_threshold = None


def _on_postgresql_begin(connection: Connection) -> None:
    settings = ["SET LOCAL jit = off"] if connection.info.get(_POOLED) else []
    if connection.get_execution_options().get(_DURABLE) is False:
        settings.append("SET LOCAL synchronous_commit = off")
    if settings:
        raw: Any = connection.connection.dbapi_connection
        # not by SQLAlchemy, which takes 80 us for it
        raw.execute("; ".join(settings), prepare=False)


def _on_postgresql_error(context: ExceptionContext) -> None:
    """Drop the connections that a passing trouble concerns: those to a server that another one
    has replaced would stay there."""
    if getattr(context.original_exception, "sqlstate", None) in _PASSING:
        context.is_disconnect = True


def _version(connection: Connection) -> str | None:
    """The revision of the schema; None when there is no schema at all, "" when it is not ours."""
    try:
        return str(
            connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
            or ""
        )
    except (exc.OperationalError, exc.ProgrammingError) as error:
        message = str(error.orig).lower()
        if "no such table" in message or getattr(error.orig, "sqlstate", None) == "42P01":
            return None
        raise


def _check_database(connection: Connection, where: str) -> str | None:
    """The schema's revision, if we can migrate from it.

    The caller holds the lock that migrations take."""
    if connection.dialect.name == "sqlite":
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    else:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    tables = set(connection.execute(text(query)).scalars())
    if not tables:
        return None
    version = _version(connection) if "alembic_version" in tables else None
    if not version or not tables.issuperset(_MARKER_TABLES):
        raise InvalidInput(
            f"{where} is not a datastates database: it holds the tables"
            f" {', '.join(sorted(tables)[:5])}"
        )
    if version not in KNOWN:
        raise Conflict(
            f"{where} was written by another version of datastates (schema {version}, this one"
            f" reads {HEAD}): upgrade datastates, or make a new repository"
        )
    return version
