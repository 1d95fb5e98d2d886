"""Taking over the memory of a dead training.

The agent starts this program when a training died. It checks every chunk, and holds the lease of
the training, so that other processes see a living run. Then one of two things happens. A training
that tracks one of the branches attaches within ``PATIENCE_S``, and continues from that memory. Or
heads, tagged states, and states that a caller waited for are written to the folder of packs, and
the dead run is settled as always (``core.recover``).

torch is imported only to write, so that a training that is started again need not wait for it.
"""

from __future__ import annotations

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
    Settle,
    Table,
    WireState,
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

_logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a training may take to come back, in seconds."""

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0
_GROUP = 8  # states that are written together


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
        self._is_hurried = False
        self._trouble = ""

    def run(self) -> None:
        """Return once the states are another training's, or settled."""
        retry_s, next_at = _FIRST_RETRY_S, self._until
        while True:
            while not self._is_hurried and (left_s := next_at - time.time()) > 0:
                with suppress(InterruptedError):
                    if select([self._listener], [], [], min(left_s, 1.0))[0]:
                        if self._serve():
                            return
                        next_at = max(next_at, self._until)
            if self._settle():
                return
            self._is_hurried = False
            next_at, retry_s = time.time() + retry_s, min(2 * retry_s, _LAST_RETRY_S)

    def hurry(self) -> None:
        """Settle now; callable by a signal handler."""
        self._is_hurried = True

    def _settle(self) -> bool:
        """Settle; returns whether that succeeded. Otherwise the memory stays, and ``_trouble`` is
        the reason."""
        try:
            settle(self._table, self._states, self._view, self._release)
        except (DatastatesError, OSError) as exc:
            self._trouble = str(exc)
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
                        return self._attach(connection, protocol, version)
                    case _:
                        raise Unavailable("this process only hands a memory over")
            except (DatastatesError, OSError) as exc:
                with suppress(OSError):
                    send(connection, Refused(str(exc)))
        return False

    def _attach(self, connection: socket.socket, protocol: int, version: str) -> bool:
        register = self._register
        if (protocol, version) != (PROTOCOL, register.version):
            raise Unavailable(f"the states were captured by datastates {register.version}")
        if not self._leases:
            raise Unavailable("the run of the dead training is being settled")
        frames = [self._table.frames[uid] for uid in self._states]
        table = make_table([frame(register), *self._table.shared, *frames])
        try:
            fds = (self._memory, self._reading, table, *self._leases)
            send(connection, Attached(register.size, register.pages), fds)
        finally:
            os.close(table)
        try:
            receive(connection, Ended, PATIENCE_S)
        except DatastatesError:
            # it died before the states were its own: the next one has as long as this one had
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


def settle(
    table: Table,
    states: Mapping[str, WireState],
    memory: memoryview,
    release: Callable[[], None],
) -> None:
    """Write the states of a dead training that must not be lost, newest first, ``release`` its
    leases, and settle its run. Does nothing if the run is settled already.

    :raises DatastatesError: that is not possible for now.
    """
    # each of these imports torch
    from datastates.lineage.database import Database
    from datastates.lineage.query.names import refs
    from datastates.lineage.write import runs
    from datastates.storage.local import LocalTier

    from .core import recover
    from .location import Location

    register = table.register
    location = Location(register.database, Path(register.packs), register.bucket)
    if not location.is_present:
        raise Unavailable(f"there is no repository in {location} any more")
    database = Database(location.database_url)
    try:
        home = register_folder(location, database)
        home.check_writable()
        with database.read() as session:
            found = runs.by_uids(session, register.runs)
            if all(run.finished_at is not None for run in found):
                return
            named = {ref.state for ref in refs(session)} | table.wants
        local = LocalTier(location.packs)
        try:
            chosen = [states[uid] for uid in reversed([*states]) if uid in named]
            for start in range(0, len(chosen), _GROUP):
                puts = [
                    put for state in chosen[start : start + _GROUP] for put in _puts(state, memory)
                ]
                local.put_all(puts)
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


def main(arguments: Sequence[str]) -> None:
    """Hold the memory in these descriptors; see ``Takeover``."""
    takeover = Takeover(arguments[0], *map(int, arguments[1:]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: takeover.hurry())
    takeover.run()


if __name__ == "__main__":
    main(sys.argv[1:])
