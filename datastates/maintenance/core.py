"""``Core``, an open repository for every part of the package: its lineage, tiers, and the threads
behind captures.

``Repository`` is the public facade. Its helpers take a ``Core``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Protocol

from datastates import values
from datastates.agent.client import AgentClient
from datastates.agent.messages import PROTOCOL, Register
from datastates.agent.writer_process import WriterProcess
from datastates.config import Config
from datastates.engine.copies import CLOSING_S
from datastates.engine.in_flight import LineageContext
from datastates.engine.node_reports import NodeReports
from datastates.engine.processor_process import AgentProcessor
from datastates.engine.processors import switches
from datastates.engine.runner import Runner
from datastates.errors import Closed, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage import lookup
from datastates.lineage.database import Database
from datastates.lineage.query import revision, walk
from datastates.lineage.query.names import holder, replicas_of
from datastates.lineage.states import Run, State, Status
from datastates.lineage.views.text import plural
from datastates.lineage.write import attachments, replicas, runs
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.durable_files import Pace
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.shared_memory import SharedMemory, make_shared_memory
from datastates.storage.tier import Reader
from datastates.storage.tiers import CAPTURED, DURABLE, VOLATILE, Tiers
from datastates.system import logs
from datastates.system.at_exit import close_at_exit, closed
from datastates.system.files import FileLock
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.logs import event, say
from datastates.system.memory import available_memory_bytes

from .backup import Backups, back_up
from .environment import describe_run
from .further import Presence, check_tiers, tiers_of
from .lease import (
    FOLDER,
    LEASES,
    PACKS,
    TIERS,
    PackFolder,
    held_in,
    is_alive,
    is_dead,
    register_folder,
)
from .location import Location, check_whole

if TYPE_CHECKING:
    from datastates.lineage.session import Session

    from .attach import LeftMemory
    from .loading import RestorePlan

_logger = logging.getLogger(__name__)

_FREE_S = 2.0
"""How long we wait for a lease to end in a folder that does not answer, in seconds."""


class BackgroundRetention(Protocol):
    """Retention in the background of this process's trainings."""

    def stop(self) -> None:
        """Start no more work, and wait for the current pass."""

    def finish(self) -> None:
        """Apply retention one last time, once captures have ended; raises nothing."""


@dataclass(slots=True, eq=False)
class ProcessResources:
    """What a tracking process owns.

    It has no reference to the repository, whose ``close`` or collection releases all of it."""

    database: Database
    tiers: Tiers
    lease: FileLock
    run: Run
    arena: Arena
    runner: Runner
    backups: Backups
    keeper: BackgroundRetention | None = None
    presence: Presence | None = None
    agent: AgentClient | None = None
    writing: WriterProcess | None = None
    reports: NodeReports | None = None
    is_shut_down: bool = False
    watches: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By branch, what else is called once a second."""

    def abandon(self) -> None:
        """End the threads of a process that could not begin, and release its memory."""
        if self.agent is not None:
            self.agent.close()
        if self.writing is not None:
            self.writing.close()
        with suppress(Exception):  # the caller raises what went wrong
            self.runner.close()
        self.backups.close(_FREE_S)
        self.memory.close()
        self.arena.close()

    def watch(self, branch: str, look: Callable[[], None], rank: int, ranks: int) -> None:
        """Note that this process tracks a branch; ``look`` is called once a second."""
        self.watches[branch] = look
        if self.agent is not None:
            self.agent.track(branch, rank, ranks)
            if ranks > 1 and self.reports is None:
                self.reports = NodeReports(self.database)
                self.runner.outbox.report = self.reports.report

    def unwatch(self, branch: str, look: Callable[[], None]) -> None:
        """Call ``look`` no more."""
        if self.watches.get(branch) == look:
            del self.watches[branch]

    def beat(self) -> None:
        """Once a second, on a separate thread: show that this process is at work."""
        self.lease.touch()
        if self.agent is not None:
            self.agent.look()
        for look in [*self.watches.values()]:
            look()

    @property
    def memory(self) -> MemoryTier:
        assert self.tiers.captured is not None, "it was made before this"
        return self.tiers.captured

    def shut_down(self) -> None:
        """Make durable what must be, end the threads, finish the run. Idempotent: a call after an
        interrupt continues there."""
        if self.is_shut_down:
            return
        try:
            if self.keeper is not None:
                self.keeper.stop()
            with self.tiers.durable.unthrottled():
                self.runner.close()
            if self.keeper is not None and not self.runner.has_given_up:
                self.keeper.finish()
            with suppress(Unavailable):  # the next process that opens the repository finds out
                self._finish()
        except Exception:
            # background errors are raised again below; after an interrupt, the next call continues
            if self.runner.has_given_up and not self.runner.is_held_up:
                with suppress(Unavailable):
                    self._finish()
            self._free()
            raise
        finally:
            self.runner.recorder.write()  # also when Ctrl-C interrupted this
        self._free()

    def _finish(self) -> None:
        """Record that the run is over.

        If Ctrl-C gave up states that were to be written, branches move back to what can be
        restored."""
        if not self.runner.has_given_up:
            with self.database.write(durable=True) as session:
                lost = runs.finish(session, self.run.uid, volatile=VOLATILE)
            for waiting in lost:
                _logger.warning(
                    "%s; the part of this process ended with its memory, so the state is given up",
                    waiting,
                )
            return
        with self.database.write(durable=True) as session:
            moved = runs.recover(session, [self.run.uid], volatile=VOLATILE)
        for each in moved:
            _logger.warning(
                "branch %s: its newest states were given up before they were durable (%s)",
                each.branch,
                _where(each),
            )

    def _free(self) -> None:
        self.backups.close(_FREE_S if self.runner.is_held_up else None)
        if self.runner.is_held_up:
            # the folder does not answer: a system call there may never return
            ending = threading.Thread(target=self.lease.close, name="datastates-lease", daemon=True)
            ending.start()
            ending.join(_FREE_S)
        else:
            self.lease.close()
        if self.presence is not None:
            self.presence.close()
        for each in (self.writing, self.reports, self.agent):
            if each is not None:
                each.close()
        self.memory.close()
        self.arena.close()
        if self.arena.shared is not None:
            self.arena.shared.close()
        self.tiers.close()
        self.is_shut_down = True

    def end_unowned(self) -> None:
        """Release everything for a repository that was dropped without a close.

        Errors are logged, since no caller can get them."""
        if self.is_shut_down:
            return
        try:
            self.shut_down()
        finally:
            self.database.close()
        for error in self.runner.in_flight.errors():
            _logger.error(
                "a repository was dropped without close, and what was in flight failed: %s",
                error,
                exc_info=error,
            )


def _where(moved: runs.Recovered) -> str:
    """The new place of a branch whose newest states were lost, in words."""
    if moved.new is None:
        return "nothing of it is left, so the name is free"
    return f"it is back at {moved.new[:10]}"


# Which states of a lineage can be read here, from the tiers of the repository, and why other states
# cannot.


def nearest_here(core: Core, session: Session, uid: str) -> State | None:
    """The state itself, or the nearest ancestor along first parents, whose bytes are here; None
    if there is none."""
    found = walk.nearest_restorable(session, uid)
    while found is not None and not core.tiers.has(found.uid):
        found = walk.nearest_restorable(session, found.parents[0]) if found.parents else None
    return found


def nearest_kept(core: Core, session: Session, state: State, *, is_told: bool = True) -> State:
    """The state itself if its bytes are here, else the nearest one by steps whose bytes are here.
    If ``is_told``, a line in the log names it.

    :raises Unavailable: no ancestor of the state can be restored here, and no later state of its
        branch.
    """
    if state.status.is_restorable and core.tiers.has(state.uid):
        return state
    kept = _nearest(state, *_around(core, session, state))
    if kept is None:
        raise explain(core, session, state)
    if is_told:
        taken = event("nearest.taken", asked=state.uid, state=kept.uid, step=kept.step)
        say(
            f"state {state.uid[:10]} (step {state.step}) {_why(core, session, state)}: takes"
            f" {kept.uid[:10]} (step {kept.step})",
            taken,
        )
    return kept


def _around(core: Core, session: Session, state: State) -> tuple[State | None, State | None]:
    """The nearest ancestor along first parents, and the nearest later state of the same branch,
    whose bytes are here."""
    earlier = nearest_here(core, session, state.parents[0]) if state.parents else None
    later = next(filter(core.tiers.has, walk.later_restorable(session, state.uid)), None)
    return earlier, None if later is None else lookup.state(session, later)


def _nearest(state: State, *around: State | None) -> State | None:
    """The one with the nearest step; of two that are equally near the first."""
    return min(filter(None, around), key=lambda one: abs(one.step - state.step), default=None)


def is_elsewhere(core: Core, session: Session, state: State) -> bool:
    """Whether a state that is not here may be elsewhere: in a live process, in another folder of
    packs, or on a custom tier that was not given or does not answer."""
    if not state.status.is_restorable or core.tiers.has(state.uid):
        return False
    return bool(
        _living(core, session, state)
        or _other_folders(core, session, state)
        or _unasked(core, session, state)
    )


def explain(core: Core, session: Session, state: State) -> Unavailable:
    """An error to raise: why a state cannot be restored here, and the nearest states before and
    after it that can."""
    earlier, later = _around(core, session, state)
    nearest = _nearest(state, earlier, later)
    hint = (
        "nor can any ancestor"
        if earlier is None
        else f"the nearest ancestor that can is {earlier.uid[:10]} (step {earlier.step})"
    )
    if later is not None:
        hint += f"; the nearest later state that can is {later.uid[:10]} (step {later.step})"
    if nearest is not None:
        hint += f"; track, load and restore take step {nearest.step} with nearest=True"
    said = (
        f"state {state.uid[:10]} (step {state.step}) cannot be restored: it"
        f" {_why(core, session, state)}; {hint}"
    )
    return Unavailable(
        said,
        nearest=None if nearest is None else nearest.uid,
        is_gone=not state.status.is_restorable,
    )


def _why(core: Core, session: Session, state: State) -> str:
    if not state.status.is_restorable:
        return f"is {state.status}"
    if living := _living(core, session, state):
        return f"is only in the memory of another process, {living}"
    if others := _other_folders(core, session, state):
        return f"is not in {core.home.path}, but in another folder of packs: {others}"
    if unasked := _unasked(core, session, state):
        return f"is not in {core.home.path}, but on {unasked}"
    if state.status is Status.CAPTURED:
        holders = _holders(session, state)
        last = ", ".join(f"{run.pid} on {run.host}" for run in holders)
        return (
            f"was only in the memory of another process, {last or 'unknown'}, of which nothing is"
            " to be seen here"
        )
    return (
        f"is {state.status}, but its files are not in {core.home.path}: bring them back"
        " (`datastates repair --from FOLDER`), or clone the state from a machine that has it"
    )


def _living(core: Core, session: Session, state: State) -> str:
    """The processes that hold a state in memory and are seen to live."""
    return ", ".join(
        f"{run.pid} on {run.host}" for run in _holders(session, state) if is_alive(run, core.home)
    )


def _holders(session: Session, state: State) -> list[Run]:
    """The runs that reported having a state in memory."""
    uids = {one.run or state.run for one in replicas_of(session, state.uid) if one.tier in VOLATILE}
    found = []
    for uid in sorted(filter(None, uids)):
        try:
            found.append(runs.get(session, uid))
        except NotFound:
            continue
    return found


def _other_folders(core: Core, session: Session, state: State) -> str:
    """The other folders that have a state's bytes, from the lineage. A folder that had our path
    must have been deleted, and is left out."""
    home = core.home
    others = [
        folder for folder in attachments.of_state(session, state.uid) if folder.uid != home.uid
    ]
    there = [
        one
        for one in others
        if one.path != str(home.path) or not (home.is_beside or one.host == core.node)
    ]
    return ", ".join(f"{folder.path} on {folder.host}" for folder in there)


def _unasked(core: Core, session: Session, state: State) -> str:
    """The custom tiers that hold a state, from the lineage, but that are not available here."""
    said = sorted(
        {one.tier for one in replicas_of(session, state.uid)}.difference(VOLATILE, [DURABLE])
    )
    given = {tier.name: tier for tier in core.tiers.further}
    found = []
    for name in said:
        if name not in given:
            found.append(
                f"the {name} tier, with which it was not opened: give it by Config(tiers=[…])"
            )
            continue
        try:
            given[name].has(state.uid)
        except Unavailable:
            found.append(f"the {name} tier, which does not answer")
    return ", ".join(found)


# Settles what dead processes left behind: their bytes on disk, the states lost with their memory,
# their files.


def recover(database: Database, local: LocalTier, home: PackFolder) -> list[runs.Recovered]:
    """Settle the runs of this folder whose process died, whatever its host was called; returns
    which branches moved back, and to where.

    A state that its process had written completely, without recording it, becomes durable. All
    others that were only in memory become ``lost``, and branches move back to what can be restored.
    If nothing may be written, a copy of an SQLite lineage is settled and read instead; a lineage on
    a server stays as it is.
    """
    if home.uid is None or (home.read_only is not None and database.read_only is None):
        return []
    with database.read() as session:
        dead = [run for run in runs.unfinished(session) if is_dead(run, home)]
        digests: dict[tuple[str, int], str] = {}
        for run in dead:
            states = runs.in_memory(session, run.uid, volatile=VOLATILE)
            digests |= {(uid, 0): digest for uid, digest in states.items()}
            digests |= runs.parts_in_memory(session, run.uid, volatile=VOLATILE)
    if not dead:
        return []
    with database.write(durable=True, in_copy=True) as session:
        for (uid, rank), placed in local.whole_parts(digests).items():
            if placed.manifest.digest == digests[uid, rank]:
                replicas.mark(
                    session,
                    uid,
                    local.gives,
                    tier=local.name,
                    node=home.uid,
                    rank=rank,
                    bytes=placed.bytes_new,
                )
        recovered = runs.recover(session, [run.uid for run in dead], volatile=VOLATILE)
    if home.read_only is not None:
        return recovered
    local.sweep()
    for run in dead:
        with suppress(PermissionError):
            # another user owns the file, in a folder with the sticky bit
            (home.path / LEASES / run.uid).unlink(missing_ok=True)
    for item in recovered:
        back = event(
            "branch.moved_back", branch=item.branch, state=item.new, reason="the process died"
        )
        _logger.warning(
            "branch %s: its newest states died with their process (%s)",
            item.branch,
            _where(item),
            extra=back,
        )
    return recovered


_PATIENCE_S = 2.0


class Training(Protocol):
    """A training that a tracker of this repository follows."""

    @property
    def branch(self) -> str:
        """The branch that its captures move forward."""

    @property
    def objects(self) -> Mapping[str, object]:
        """What it tracks, by name."""

    @property
    def restore_plans(self) -> dict[frozenset[str], RestorePlan]:
        """The plans of restores into its objects, by the names of the objects."""

    def fence(self) -> None:
        """Wait until no copy reads its tensors any more."""

    def close(self, error: BaseException | None = None) -> None:
        """End it; idempotent. ``error`` is the one that ended it, if any."""


class Closable(Protocol):
    """A server of this repository, or a tracker to which only the core refers."""

    def close(self) -> None:
        """End it; idempotent."""


class Core:
    """An open repository. Safe from any thread, except ``close``, which only the thread that opened
    it may call.

    ``database`` and ``tiers`` exist from the start. ``engage`` makes everything else that captures
    and arrivals need. Until then ``engaged``, ``tiers.captured``, ``arena``, ``running`` and
    ``run_uid`` are None. ``savers`` has, by branch, the trackers of ``datastates.save``: only the
    core refers to them.
    """

    def __init__(self, location: Location, config: Config) -> None:
        self.location, self.config = location, config
        self.node = socket.gethostname()
        self._pid = os.getpid()
        self.argv = logs.arguments(sys.argv)
        check_whole(location)
        self.database = Database(location.database_url)
        try:
            rate = config.write_bytes_per_s
            packs = LocalTier(
                location.packs,
                direct=config.direct_io,
                pace=None if rate is None else Pace(rate),
                on_step=config.on_step,
            )
            self.home = register_folder(location, self.database)
            packs.node = self.home.uid or ""
            self.tiers = Tiers(packs, tiers_of(location, config, self.database))
            if self.home.read_only is None and (config.tiers is not None or location.bucket):
                check_tiers(self.database, self.tiers)
            self.recovered = recover(self.database, packs, self.home)
        except BaseException:
            self.database.close()
            raise
        self.processors = switches(config.processors)
        self.engaged: ProcessResources | None = None
        self.left: LeftMemory | None = None
        self.inherited_runs: frozenset[str] = frozenset()
        """The dead runs whose memory this process, and the other ranks, continue from, until they
        have begun runs of their own."""
        self.trainings: weakref.WeakSet[Training] = weakref.WeakSet()
        self.savers: dict[str, Closable] = {}
        self.servers: list[Closable] = []
        self._engaging, self._recovering = Mutex(), Mutex()
        self._is_closed = self._is_ended = self._has_written = False
        self.live_folders: frozenset[str] = frozenset()
        """Other folders whose processes are seen to live. Only filled with packs in a bucket."""

    # --- what captures and arrivals need ----------------------------------------------------------

    def engage(self, left: LeftMemory | None = None) -> ProcessResources:
        """The threads, memory, lease and run of this process, made on the first call, with the
        memory that a dead process ``left``, if any.

        :raises Unavailable: the repository can only be read.
        """
        with self._engaging:
            if self.engaged is None:
                self.engaged = self._engage(left)
                close_at_exit(self, self.engaged.end_unowned)
            return self.engaged

    def _engage(self, left: LeftMemory | None) -> ProcessResources:
        folder = self.home.check_writable()
        if self.config.tiers is None:
            check_tiers(self.database, self.tiers, raises=False)
        facts = {FOLDER: folder, PACKS: str(self.location.packs)}
        if self.tiers.further:
            facts[TIERS] = " ".join(tier.name for tier in self.tiers.further)
        run = describe_run(facts)
        lease = self.home.lease(run.uid)
        shared, made = None, list[ProcessResources]()

        def beat() -> None:
            for each in made:
                each.beat()

        try:
            with self.database.write() as session:
                runs.start(session, run)
            shared = self._shared_memory() if left is None else left.shared
            arena = Arena(self._budget_bytes, shared)
            memory = MemoryTier(arena, holder(self.node, run.uid))
            if left is not None:
                memory.take_over(left.states)
            books = LineageContext(self.database, run, folder, holder(self.node, run.uid))
            tiers = self.tiers
            runner = Runner(
                books,
                self.config,
                arena=arena,
                memory=memory,
                local=tiers.durable,
                further=tiers.further,
                processors=[*self.processors.values()],
                beat=beat,
            )
            self.tiers.captured = memory
            backups = Backups(self.database, self.location)
            process = ProcessResources(
                self.database, self.tiers, lease, run, arena, runner, backups
            )
            made.append(process)
            if shared is not None and left is None:
                self._connect_agent(process, shared, (), ())
            if shared is None:
                for switch in self.processors.values():
                    if switch.where == "agent":
                        _logger.warning("processor %r runs here: there is no agent", switch.name)
            if left is not None:
                self._forget_damaged(left, memory)
            self.left = left
        except BaseException:
            for each in made:
                each.abandon()
            self.tiers.captured = None
            lease.close()
            if shared is not None:
                shared.close()
            raise
        if self.location.bucket:
            process.presence = Presence(self.database, self.home)
        return process

    @property
    def _budget_bytes(self) -> int:
        return self.config.memory_bytes or max(2 * CHUNK_BYTES, available_memory_bytes() // 4)

    def _shared_memory(self) -> SharedMemory | None:
        """Memory for the arena that an agent can hold; None if none is wanted, or there is none."""
        if not self.config.uses_agent:
            return None
        try:
            return make_shared_memory(self._budget_bytes // CHUNK_BYTES * CHUNK_BYTES)
        except Unavailable as exc:
            _logger.warning("captured states are lost if this process dies: %s", exc)
            return None

    def _forget_damaged(self, left: LeftMemory, memory: MemoryTier) -> None:
        """Note that states are gone which a dead process had in memory, and which are not whole."""
        here = frozenset(memory.uids())
        with self.database.write(durable=True) as session:
            for run in runs.by_uids(session, left.runs):
                gone = runs.in_memory_of(session, [run.uid], volatile=VOLATILE) - here
                place = holder(run.host, run.uid)
                replicas.evict(session, sorted(gone), tier=CAPTURED, node=place)

    def _connect_agent(
        self,
        made: ProcessResources,
        shared: SharedMemory,
        inherited: tuple[str, ...],
        leases: tuple[int, ...],
    ) -> None:
        """Have the agent hold the memory, and the leases of this run and of inherited ones."""
        location = self.location
        told = Register(
            PROTOCOL,
            metadata.version("datastates"),
            (made.run.uid, *inherited),
            os.getpid(),
            self.argv,
            str(location.packs),
            location.database_url,
            location.bucket,
            shared.size,
            shared.pages.value,
        )
        made.agent = AgentClient(told, made.memory, shared, made.lease.fileno(), leases)
        made.agent.begin()
        made.runner.on_wanted = made.agent.want
        if self.config.on_step is None and self.config.write_bytes_per_s is None:
            # both concern calls in this process
            made.writing = WriterProcess(self.tiers.durable, made.arena)
            made.runner.writer.put_all = made.writing.put_all
        for switch in self.processors.values():
            if switch.where == "agent":
                switch.processor = AgentProcessor(switch.processor, made.arena)

    @contextmanager
    def inheriting(self) -> Iterator[Callable[[Session], None]]:
        """A block that begins a run. It calls what it gets, in its transaction: the states that a
        dead process left become this process's own with it.

        At every moment, either the process that took the memory over holds them, or the agent does
        for this process.
        """
        left, process = self.left, self.engage()
        if left is None:
            yield lambda session: None
            return
        if process.agent is None:
            leases, left.leases = left.leases, ()
            self._connect_agent(process, left.shared, left.runs, leases)
        memory, known = process.memory, dict[str, Status]()
        here = frozenset(memory.uids())

        def hand_over(session: Session) -> None:
            known.update(runs.hand_over(session, left.runs, process.run, volatile=VOLATILE))

        yield hand_over
        for uid in here.difference(known):
            memory.remove(uid)
        process.runner.inherit({uid: status for uid, status in known.items() if uid in here})
        self.left = None
        left.release()
        if process.agent is not None:
            process.agent.settle()
        for uid in left.runs:
            with suppress(OSError):
                (self.home.path / LEASES / uid).unlink()

    def runner(self) -> Runner:
        """The engine behind captures, merges and clones, made on the first call."""
        return self.engage().runner

    @property
    def running(self) -> Runner | None:
        """The engine, if anything was captured or has arrived; else None."""
        return None if self.engaged is None else self.engaged.runner

    @property
    def arena(self) -> Arena | None:
        """The arena of the engine; None if there is no engine."""
        return None if self.engaged is None else self.engaged.arena

    @property
    def run_uid(self) -> str | None:
        """The uid of the run that is this process in the lineage; None if nothing was captured
        or has arrived."""
        return None if self.engaged is None else self.engaged.run.uid

    # --- the lineage ------------------------------------------------------------------------------

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
        """A session that sees what is recorded.

        States that died with their process are lost by then: its lease is free."""
        with (
            self._recovering,
            suppress(Unavailable),
        ):
            # where nothing can be written now, what is recorded is shown as it is
            if held_in(self.home.path, is_held=False):
                recover(self.database, self.tiers.durable, self.home)
        with self.database.read() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction. Afterwards the engine of this process looks for changed refs.

        :raises Closed: the repository was closed, or belongs to the parent process.
        """
        self.check_open()
        with self.database.write(durable=True) as session:
            yield session
        self._has_written = True
        if self.running is not None:
            self.running.refs_changed()

    def state(self, rev: str | State, *, nearest: bool = False) -> State:
        """The state that a revision names; with ``nearest`` the nearest one that can be restored
        here, if that one cannot.

        :raises NotFound: it names none; lists close names.
        :raises SyntaxProblem: it does not parse; points at the column.
        :raises Unavailable: with ``nearest``, no state near it can be restored.
        """
        with self.reading() as session:
            found = revision.resolve(session, values.revision(rev))
            return nearest_kept(self, session, found) if nearest else found

    def seal(self, uid: str, seal: str) -> None:
        """Record the seal of a state's content, if the lineage may be written. Later seals are
        compared with it.

        :raises Corrupt: another seal was recorded before.
        """
        with self.database.read() as session:
            known = attachments.seals(session, [uid]).get(uid)
        attachments.check(known, seal, uid)
        if known is None and self.database.read_only is None:
            with self.database.write() as session:
                attachments.seal(session, uid, seal)
            self._has_written = True

    # --- the payload ------------------------------------------------------------------------------

    def open_payload(self, state: State, *, verify: bool | None = None, rank: int = 0) -> Reader:
        """A reader of the state on the nearest tier that holds it, once its content is seen to
        match the lineage. ``verify`` is as configured, unless it is given.

        If several ranks captured it, values of single ranks are read for ``rank``.

        :raises Corrupt: the manifest is another state's.
        :raises Unavailable: its bytes are not here; names the nearest ancestor that has them.
        """
        verify = self.config.verify if verify is None else verify
        try:
            return self.tiers.open(state, verify=verify, rank=rank)
        except NotFound:
            with self.database.read() as session:
                raise explain(self, session, lookup.state(session, state.uid)) from None

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it was closed and can no longer be used."""
        return self._is_closed

    def check_open(self) -> None:
        """Raise unless it may be used here and now.

        :raises Closed: it was closed, or belongs to the parent process.
        """
        if self._pid != os.getpid():
            raise Closed(
                "this repository was opened by the parent process: open it again in the child"
            )
        if self._is_closed:
            raise Closed("the repository is closed: open it again")

    def settle(self) -> None:
        """Wait until every capture so far is recorded (which is not yet durable) or has failed.

        Does nothing once it is closed."""
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
                is_copying = self.running is not None and pending == self.running.copies.pending
                with undisturbed():  # an interrupt could leave the locks of logging taken
                    _logger.warning(
                        (
                            "copying %s to further tiers before closing; Ctrl-C leaves the rest for"
                            " the next opening"
                            if is_copying
                            else "making %s durable before closing; Ctrl-C gives them up"
                        ),
                        plural(pending, "state"),
                        extra=event("closing.waits", states=pending),
                    )

        with self.tiers.durable.unthrottled():
            self.running.drain(say, copies_s=CLOSING_S)

    def close(self, error: BaseException | None = None) -> None:
        """End servers and trainings, make durable what must be, and release everything; idempotent.
        ``error`` is the one that ended the trainings, if any.

        :raises DatastatesError: (or another error) something failed in the background, and no
            handle or later capture has raised it yet.
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
            except Exception as exc:  # the other trainings must be closed too
                errors.append(exc)
        try:
            if self.engaged is not None:
                self.engaged.shut_down()
                if self.left is not None:
                    self.left.abandon()
                closed(self.engaged.end_unowned)
            else:
                if self._has_written:
                    with suppress(DatastatesError, OSError):  # the next backup has it
                        back_up(self.database, self.location)
                self.tiers.close()
        except Exception as exc:  # raised below, once everything is closed
            errors.append(exc)
        self._is_ended = True  # after an interrupt before this line, the next call continues
        self.database.close()
        if self.engaged is not None:
            # states may be written after their tracker ended: tags make them durable
            errors += self.engaged.runner.in_flight.errors()
        _raise_first(errors)


def _raise_first(errors: list[Exception]) -> None:
    """Raise the first error, if there is one.

    Further errors that do not repeat an earlier one are logged."""
    for index, error in enumerate(errors[1:], 1):
        if not any(
            error is said or (isinstance(error, DatastatesError) and error.repeats(said))
            for said in errors[:index]
        ):
            known = isinstance(error, DatastatesError)  # its message is enough
            _logger.error(
                "closing the repository failed in another way too: %s",
                error,
                exc_info=None if known else error,
            )
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
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give the repository that datastates.open returned"
        )
    return core


def _with_core(value: object, what: str) -> object:
    core_of(value, what)
    return value


AnyRepository = Annotated[Opened, _with_core]
