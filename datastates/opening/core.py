"""``Core``, with which every part of the package works once a repository is open: its lineage, tiers, and the threads behind captures.

Users come in through ``Repository``, the door; its helpers take a ``Core``.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from datastates import values
from datastates.capture.host import Host
from datastates.capture.register import Books
from datastates.capture.runner import Runner
from datastates.capture.shutdown import close_at_exit, closed
from datastates.config import Config
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Closed, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage.change import runs, seals
from datastates.lineage.database import Database
from datastates.lineage.search import revision, walk
from datastates.lineage.search.holders import holder
from datastates.lineage.states import State
from datastates.store.arena import Arena
from datastates.store.tier import Reader
from datastates.store.tiers import Tiers, captures_in, packs_in
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.logs import event
from datastates.system.memory import available_memory_bytes

from .belongings import Belongings
from .chronicler import Chronicler, tell_now
from .environment import describe_run, node_name
from .home import FOLDER, PACKS, settle_in
from .lease import held_in
from .location import Location, check_whole
from .missing import explain, nearest_kept
from .recovery import recover

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Core", "Opened", "Training", "core_of"]

_logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0


class Training(Protocol):
    """A training that a tracker of this repository follows."""

    @property
    def branch(self) -> str:
        """The branch that its captures move forward."""

    def fence(self) -> None:
        """Wait until no copy reads its tensors any more."""

    def close(self, error: BaseException | None = None) -> None:
        """End it; idempotent. ``error`` is the one that ended it, if any."""


class Saver(Protocol):
    """A tracker to which only the core refers."""

    def close(self) -> None:
        """End it; idempotent."""


class Server(Protocol):
    """A server of this repository."""

    def close(self) -> None:
        """End it; idempotent."""


class Core:
    """An open repository without its door. Safe from any thread, except ``close``, which only the thread that opened it may call.

    ``database`` and ``tiers`` exist from the start. ``engage`` makes what captures and arrivals need besides; until then ``engaged``,
    ``tiers.captured``, ``arena``, ``running`` and ``run_uid`` are None. ``savers`` has, by branch, the trackers that ``tracking/saving``
    uses: only the core refers to them.
    """

    def __init__(self, location: Location, config: Config) -> None:
        self.location, self.config = location, config
        self.node = node_name()
        self._pid = os.getpid()
        check_whole(location)
        self.database = Database(location.database_url)
        try:
            packs = packs_in(location.packs, direct=config.direct_io, bytes_per_s=config.write_bytes_per_s, on_step=config.on_step)
            self.tiers = Tiers(packs, config.tiers)
            self.home = settle_in(location, self.database)
            self.tiers.durable.node = self.home.uid or ""
            self.recovered = recover(self.database, self.tiers.durable, self.home)
        except BaseException:
            self.database.close()
            raise
        self.engaged: Belongings | None = None
        self.trainings: weakref.WeakSet[Training] = weakref.WeakSet()
        self.savers: dict[str, Saver] = {}
        self.servers: list[Server] = []
        self._engaging, self._recovering = Mutex(), Mutex()
        self._is_closed = self._is_ended = self._has_written = False

    # --- what captures and arrivals need -----------------------------------------------------------------------------------

    def engage(self) -> Belongings:
        """The threads, memory, lease and run of this process, made on the first call.

        :raises Unavailable: the repository can only be read.
        """
        with self._engaging:
            if self.engaged is None:
                self.engaged = self._engage()
                close_at_exit(self, self.engaged.end_unowned)
            return self.engaged

    def _engage(self) -> Belongings:
        budget = self.config.memory_bytes or max(2 * CHUNK_BYTES, available_memory_bytes() // 4)
        folder = self.home.check_writable()
        run = describe_run({FOLDER: folder, PACKS: str(self.location.packs)})
        lease = self.home.lease(run.uid)
        try:
            with self.database.write() as session:
                runs.start(session, run)
            arena = Arena(budget)
            memory = captures_in(arena, holder(self.node, run.uid))
            books = Books(self.database, run, folder, holder(self.node, run.uid))
            tiers = self.tiers
            runner = Runner(books, self.config, arena=arena, memory=memory, local=tiers.durable, further=tiers.further, beat=lease.beat)
        except BaseException:
            lease.close()
            raise
        self.tiers.captured = memory
        chronicler = Chronicler(self.database, self.location.packs)
        return Belongings(self.database, self.tiers, lease, run, arena, runner, chronicler)

    def host(self) -> Host:
        """The engine behind captures, merges and clones, made on the first call."""
        return self.engage().host

    @property
    def running(self) -> Host | None:
        """The engine, if anything was captured or has arrived; else None."""
        return None if self.engaged is None else self.engaged.host

    @property
    def arena(self) -> Arena | None:
        """The arena of the engine; None if there is no engine."""
        return None if self.engaged is None else self.engaged.arena

    @property
    def run_uid(self) -> str | None:
        """The uid of the run that is this process in the lineage; None if nothing was captured or has arrived."""
        return None if self.engaged is None else self.engaged.run_uid

    # --- the lineage ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that sees every capture made so far by this process.

        :raises Closed: the repository was closed, or belongs to the parent process.
        """
        self.check_open()
        self.settle()
        with self.looking() as session:
            yield session

    @contextmanager
    def looking(self) -> Iterator[Session]:
        """A session that sees what is recorded. States that died with their process are lost by then: its lease is free."""
        with self._recovering, suppress(Unavailable):  # where nothing can be written now, what is recorded is shown as it is
            if held_in(self.home.path, is_held=False):
                recover(self.database, self.tiers.durable, self.home)
        with self.database.read() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction; the engine of this process is told which refs it made, moved or deleted.

        :raises Closed: the repository was closed, or belongs to the parent process.
        """
        self.check_open()
        with self.database.write(durable=True) as session:
            yield session
        self._has_written = True
        if self.running is not None:
            self.running.refs_changed()

    def state(self, rev: str | State, *, nearest: bool = False) -> State:
        """The state that a revision names; with ``nearest`` the nearest one that can be restored here, if that one cannot.

        :raises NotFound: it names none; lists close names.
        :raises SyntaxProblem: it does not parse; points at the column.
        :raises Unavailable: with ``nearest``, no state near it can be restored.
        """
        with self.reading() as session:
            found = revision.resolve(session, values.revision(rev))
            return nearest_kept(self, session, found) if nearest else found

    def seal(self, uid: str, seal: str) -> None:
        """Record the seal of a state's content for good, if the lineage may be written; later seals are compared with it.

        :raises Corrupt: another seal was recorded before.
        """
        with self.database.read() as session:
            known = seals.seals(session, [uid]).get(uid)
        seals.check(known, seal, uid)
        if known is None and self.database.read_only is None:
            with self.database.write() as session:
                seals.seal(session, uid, seal)
            self._has_written = True

    # --- the payload ---------------------------------------------------------------------------------------------------------

    def open_payload(self, state: State, *, verify: bool | None = None, rank: int = 0) -> Reader:
        """A reader of the state on the nearest tier that holds it, once its content is seen to match the lineage. ``verify`` is as
        configured, unless it is given.

        If several ranks captured it, what each had of its own is read for ``rank``.

        :raises Corrupt: the manifest is another state's.
        :raises Unavailable: its bytes are not here; names the nearest ancestor that has them.
        """
        verify = self.config.verify if verify is None else verify
        try:
            return self.tiers.open(state, verify=verify, rank=rank)
        except NotFound:
            with self.database.read() as session:
                raise explain(self, session, walk.state(session, state.uid)) from None

    def holds(self, uid: str) -> bool:
        """Whether a state's bytes are on one of the tiers."""
        return self.tiers.has(uid)

    # --- the end -------------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it was closed and can no longer be used."""
        return self._is_closed

    def check_open(self) -> None:
        """Raise unless it may be used here and now.

        :raises Closed: it was closed, or belongs to the parent process.
        """
        if self._pid != os.getpid():
            raise Closed("this repository was opened by the parent process: open it again in the child")
        if self._is_closed:
            raise Closed("the repository is closed: open it again")

    def settle(self) -> None:
        """Wait until every capture so far is recorded (which is not yet durable) or has failed. Does nothing once it is closed."""
        if self.running is not None and not self._is_closed:
            self.running.flush()

    def drain(self) -> None:
        """Wait until every state that must become durable is; logs a warning if that takes long."""
        if self.running is None:
            return
        began, has_said = time.monotonic(), False

        def say(pending: int) -> None:
            nonlocal has_said
            if not has_said and time.monotonic() - began > _PATIENCE_S:
                has_said = True
                with undisturbed():  # an interrupt could leave the locks of logging taken
                    _logger.warning(
                        "making %d states durable before closing; Ctrl-C gives them up",
                        pending,
                        extra=event("closing.waits", states=pending),
                    )

        with self.tiers.durable.hurrying():
            self.running.drain(say)

    def close(self, error: BaseException | None = None) -> None:
        """End servers and trainings, make durable what must be, and release everything; idempotent. ``error`` is the one that ended the
        trainings, if any.

        :raises DatastatesError: (or another error) something failed in the background, and no handle or later capture has raised it yet.
        """
        if self._is_ended or self._pid != os.getpid():
            return
        self._is_closed = True
        for server in self.servers:
            server.close()
        errors: list[Exception] = []
        for training in list(self.trainings):
            try:
                training.close(error)
            except Exception as exc:  # the others must be closed too
                errors.append(exc)
        try:
            self._let_go()
        except Exception as exc:  # raised below, once everything is closed
            errors.append(exc)
        self._end()
        if self.engaged is not None:
            errors += self.engaged.runner.errors()  # states may be written after their tracker ended: tags make them durable
        _raise_first(errors)

    def _let_go(self) -> None:
        if self.engaged is None:
            if self._has_written:
                tell_now(self.database, self.location.packs)
            return self.tiers.close()
        self.engaged.let_go()
        return closed(self.engaged.end_unowned)

    def _end(self) -> None:
        self._is_ended = True  # an interrupt before this: the next call goes on
        self.database.close()


def _raise_first(errors: list[Exception]) -> None:
    """Raise the first error, if there is one. Further errors that do not repeat an earlier one are logged."""
    for index, error in enumerate(errors[1:], 1):
        if not any(error is said or (isinstance(error, DatastatesError) and error.repeats(said)) for said in errors[:index]):
            known = isinstance(error, DatastatesError)  # its message says enough
            _logger.error("closing the repository failed in another way too: %s", error, exc_info=None if known else error)
    if errors:
        raise errors[0]


class Opened(Protocol):
    """A repository, as ``datastates.open`` returns it."""

    @property
    def core(self) -> Core:
        """The core behind it."""


def core_of(value: object, what: str = "repo") -> Core:
    """The core behind a repository that a user gave.

    :raises InvalidInput: it is not a repository.
    """
    core = values.attribute(value, "core")
    if not isinstance(core, Core):
        raise InvalidInput(f"{what} is {values.shown(value)}: give the repository that datastates.open returned")
    return core
