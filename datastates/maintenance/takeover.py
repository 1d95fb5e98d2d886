"""Taking over the memory of a dead training.

The agent starts this program when a training died. It checks every chunk, and holds the lease of
the training, so that other processes see a living run. Then one of two things happens. A training
that tracks one of the branches attaches within ``PATIENCE_S``, and continues from that memory. Or
heads, tagged states, and states that a caller waited for are written to the folder of packs, and
the dead run is settled as always (``core.recover``).

torch is imported only to write, so that a training that is started again need not wait for it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import TYPE_CHECKING

import xxhash

from datastates.agent.messages import (
    PROTOCOL,
    AgentStatus,
    AskStatus,
    Attach,
    Attached,
    Ended,
    HeldMemory,
    Refused,
    Register,
    Settle,
    Table,
    WireState,
    connect,
    frame,
    listen,
    make_table,
    receive,
    send,
    who,
)
from datastates.errors import DatastatesError, Unavailable

from .lease import agent_note, register_folder

if TYPE_CHECKING:
    from datastates.storage.local import Put

    from .location import Location

_logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a training may take to come back, in seconds."""

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0
_GROUP = 8  # states that are written together
_ANSWERS_S = 60.0
_DELETED_S = 600.0
"""How long a repository may be missing, in seconds, before it counts as deleted."""

_NOTE_BYTES = 4096

_hurried: list[int] = []
"""Signals that ask to settle at once."""


def whole_states(memory: memoryview, states: Mapping[str, WireState]) -> dict[str, WireState]:
    """The states whose every chunk in memory has its digest."""
    known: dict[tuple[int, bytes, int], bool] = {}

    def is_whole(state: WireState) -> bool:
        chunks = state.manifest.content.chunks
        if len(chunks) != len(state.slots):
            return False
        for slot, chunk in zip(state.slots, chunks, strict=True):
            key = slot, chunk.digest, chunk.length
            if key not in known:
                view = memory[slot : slot + chunk.length]
                known[key] = (
                    slot >= 0
                    and view.nbytes == chunk.length
                    and xxhash.xxh3_128_digest(view) == chunk.digest
                )
            if not known[key]:
                return False
        return True

    return {uid: state for uid, state in states.items() if is_whole(state)}


class Takeover:
    """Holds the memory of a dead training until it is attached, or settled. One thread."""

    def __init__(self, address: str, table: int, memory: int, reading: int, *leases: int) -> None:
        self._table = Table.read(table)
        os.close(table)
        self._register = self._table.register
        self._memory, self._reading, self._leases = memory, reading, list(leases)
        mapped = mmap.mmap(reading, self._register.size, prot=mmap.PROT_READ)
        self._view = memoryview(mapped)
        self._address = address
        self._until = time.time() + PATIENCE_S
        self._listener = listen(address)
        self._note()
        self._states = whole_states(self._view, self._table.states)
        self._attached: socket.socket | None = None
        self._trouble = ""

    def run(self) -> None:
        """Return once the states are another training's, or settled."""
        retry_s, next_at = _FIRST_RETRY_S, self._until
        while True:
            while self._attached or not (_hurried or time.time() >= next_at):
                waiting = [self._listener, *([self._attached] if self._attached else [])]
                wait_s = 1.0 if self._attached else min(1.0, max(0.0, next_at - time.time()))
                ready = select(waiting, [], [], wait_s)[0]
                if self._attached in ready and self._has_ended():
                    return
                if self._listener in ready and self._serve():
                    return
                if not self._attached and (other := self._other_holder()) is not None:
                    if _listens(other):
                        return
                    break  # it has ended, so this only has to see that all is settled
            _hurried.clear()
            if self._settle():
                return
            is_missing = not location_of(self._register).is_present
            if is_missing and time.time() > self._until + _DELETED_S:
                return  # somebody deleted the repository
            next_at, retry_s = time.time() + retry_s, min(2 * retry_s, _LAST_RETRY_S)

    def _settle(self) -> bool:
        """Settle; returns whether that succeeded. Otherwise the memory stays, and ``_trouble`` is
        the reason."""
        try:
            settle(self._table, self._states, self._view, self._release)
        except Exception as exc:  # whatever it is, the memory must stay
            self._trouble = str(exc) or repr(exc)
            _logger.warning("states of a dead training cannot be settled for now: %s", exc)
            return False
        return True

    def _note(self) -> None:
        """Have the lease say who holds it, for those who want the branch."""
        for fd in self._leases:
            with suppress(OSError):  # the disk is full: then no training can attach
                note = agent_note(os.fstat(fd).st_ino, self._address, self._until)
                os.ftruncate(fd, 0)
                os.pwrite(fd, note, 0)

    def _other_holder(self) -> str | None:
        """The address of a process that took the same memory over later: after a training that
        attached, and died before the states were its own. None if there is none."""
        for fd in self._leases:
            with suppress(OSError, ValueError, LookupError, TypeError):
                address = json.loads(os.pread(fd, _NOTE_BYTES, 0))["agent"]
                if address != self._address:
                    return str(address)
        return None

    def _release(self) -> None:
        for fd in self._leases:
            os.close(fd)
        self._leases.clear()

    def _serve(self) -> bool:
        """Answer one process; returns whether nothing is left to hold."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        with connection:
            try:
                connection.settimeout(_ANSWERS_S)
                if who(connection)[1] != os.geteuid():
                    raise Unavailable(f"this memory is of user {os.geteuid()}")
                match receive(connection, object)[0]:
                    case AskStatus():
                        send(connection, AgentStatus(os.getpid(), "", (self._status(),), ()))
                    case Settle():
                        if self._settle():
                            send(connection, Ended())
                            return True
                        raise Unavailable(self._trouble)
                    case Attach(protocol, version):
                        self._attach(connection, protocol, version)
                    case _:
                        raise Unavailable("this process only hands a memory over")
            except (DatastatesError, OSError) as exc:
                with suppress(OSError):
                    send(connection, Refused(str(exc)))
        return False

    def _attach(self, connection: socket.socket, protocol: int, version: str) -> None:
        """Send the memory to a training, which then holds its connection until the states are its
        own."""
        register = self._register
        if (protocol, version) != (PROTOCOL, register.version):
            raise Unavailable(f"the states were captured by datastates {register.version}")
        if not self._leases or self._attached:
            raise Unavailable("another process is taking this memory over: try again in a moment")
        frames = [self._table.frames[uid] for uid in self._states]
        table = make_table([frame(register), *self._table.shared, *frames])
        try:
            fds = (self._memory, self._reading, table, *self._leases)
            send(connection, Attached(register.size, register.pages), fds)
        finally:
            os.close(table)
        self._attached = connection.dup()

    def _has_ended(self) -> bool:
        """Whether the training that attached has the states now. If it died before, the next one
        has as long as it had."""
        attached, self._attached = self._attached, None
        assert attached is not None, "the caller has seen it"
        with attached:
            try:
                receive(attached, Ended)
            except DatastatesError:
                self._until = time.time() + PATIENCE_S
                self._note()
                return False
        return True

    def _status(self) -> HeldMemory:
        register, created = (
            self._register,
            [state.manifest.origin.created_at_us for state in self._states.values()],
        )
        return HeldMemory(
            register.runs,
            register.pid,
            register.argv,
            register.packs,
            self._table.tracks,
            register.pages,
            register.size,
            len(self._states),
            max(created, default=0) / 1e6,
            self._until,
            self._trouble,
        )


# --- settling ---


def location_of(register: Register) -> Location:
    """Where the states of a memory belong."""
    from .location import Location  # imports SQLAlchemy

    return Location(register.database, Path(register.packs), register.bucket)


def settle(
    table: Table,
    states: Mapping[str, WireState],
    memory: memoryview,
    release: Callable[[], None],
) -> None:
    """Write the states of a dead training that must not be lost, newest first, ``release`` its
    leases, and settle its run. States that another process has taken over are left to it.

    :raises DatastatesError: that is not possible for now.
    """
    # each of these imports torch
    from datastates.lineage.database import Database
    from datastates.lineage.lookup import batches
    from datastates.lineage.query.names import refs
    from datastates.lineage.write import runs
    from datastates.storage.local import LocalTier
    from datastates.storage.tiers import VOLATILE

    from .core import recover

    register = table.register
    location = location_of(register)
    if not location.is_present:
        raise Unavailable(f"there is no repository in {location} any more")
    database = Database(location.database_url)
    try:
        home = register_folder(location, database)
        home.check_writable()
        with database.read() as session:
            named = {ref.state for ref in refs(session)} | table.wants
            held = runs.in_memory_of(session, register.runs, volatile=VOLATILE)
        chosen = {uid: states[uid] for uid in reversed([*states]) if uid in named & held}
        if len(whole := whole_states(memory, chosen)) < len(chosen):
            _logger.warning("%d states were damaged in memory", len(chosen) - len(whole))
        local = LocalTier(location.packs)
        try:
            for some in batches([*whole.values()], _GROUP):
                local.put_all([put for state in some for put in _puts(state, memory)])
            release()
            recover(database, local, home)
        finally:
            local.close()
    finally:
        database.close()


def _puts(state: WireState, memory: memoryview) -> Iterator[Put]:
    from datastates.state.digest import first_chunks
    from datastates.storage.local import Put
    from datastates.storage.tier import Payload

    parts = state.parts or (state.manifest,)
    first = first_chunks(parts)
    for number, part in enumerate(parts):
        slots = state.slots[first[number] : first[number + 1]]
        chunks = [
            memory[slot : slot + chunk.length]
            for slot, chunk in zip(slots, part.content.chunks, strict=True)
        ]
        yield Put(Payload(part, chunks))


def _listens(address: str) -> bool:
    try:
        connect(address).close()
    except Unavailable:
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Hold the memory in these descriptors; see ``Takeover``."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _hurried.append(number))
    Takeover(arguments[0], *map(int, arguments[1:])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
