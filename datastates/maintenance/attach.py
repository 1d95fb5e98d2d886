"""Continuing from the memory that a dead training left with the agent of this node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from datastates.agent.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Ended,
    Settle,
    Table,
    ask,
    connect,
    receive,
    send,
)
from datastates.errors import Closed, Unavailable
from datastates.lineage.states import Run
from datastates.lineage.write import runs
from datastates.storage.memory import StateInSlots
from datastates.storage.shared_memory import Pages, SharedMemory
from datastates.system.logs import event, say

from .environment import is_running
from .lease import HeldByAgent, LeaseState, held_by_agent, look

if TYPE_CHECKING:
    from datastates.lineage.session import Session

    from .core import Core

_ARRIVES_S = 20.0
"""How long after a death the process that takes the memory over may take to begin, in seconds."""

_SETTLES_S = 600.0


@dataclass(slots=True, eq=False)
class LeftMemory:
    """The memory of a dead training: its states, its leases, and the process that holds it until
    ``release``."""

    shared: SharedMemory
    states: list[StateInSlots]
    runs: tuple[str, ...]
    leases: tuple[int, ...]
    connection: socket.socket

    def release(self) -> None:
        """Let the process that held the memory end: the states belong to this process now."""
        with self.connection, suppress(OSError):
            send(self.connection, Ended())

    def abandon(self) -> None:
        """Leave the memory to the process that holds it, with the leases unless the agent has them
        for this process."""
        self.connection.close()
        leases, self.leases = self.leases, ()
        for fd in leases:
            os.close(fd)


def left_behind(core: Core, session: Session, branch: str) -> list[tuple[Run, HeldByAgent]]:
    """The trainings of a branch that died and whose memory an agent holds."""
    found = []
    for run in runs.unfinished(session, branch):
        uid = run.process or run.uid
        note = None if uid in core.inherited_runs else held_by_agent(core.home.path, uid)
        if note is not None:
            found.append((run, note))
    return found


def attach(core: Core, branch: str, rank: int, ranks: int, *, takeover: bool) -> None:
    """Before a process tracks a branch: take over what a dead training of the branch left in memory
    on this node, so that it can be restored. Does nothing if there is nothing.

    A memory that does not fit becomes durable instead: the training has another number of ranks,
    or this process has its own memory already. ``takeover`` without an agent does the same.

    :raises Unavailable: the states can neither be taken over nor be made durable.
    """
    uses_agent = core.config.uses_agent
    settled = set[str]()
    for run, note in _awaited(core, branch):
        if not note.is_here or note.address in settled:
            continue
        of_rank = run.config.get(runs.RANK, 0)
        is_alike = run.config.get(runs.RANKS, 1) == ranks
        if is_alike and of_rank != rank:
            continue  # another process of this training takes that
        if uses_agent and is_alike and core.engaged is None and (left := _fetch(note)) is not None:
            try:
                core.engage(left)
            except BaseException:
                left.abandon()
                raise
            taken = event("agent.attached", branch=branch, states=len(left.states))
            say(
                f"continuing from {len(left.states)} states in memory that process {run.pid} left",
                taken,
            )
        elif (uses_agent or takeover) and (is_alike or rank == 0):
            with suppress(Closed):
                ask(note.address, Settle(), Ended, _SETTLES_S)
            settled.add(note.address)


def _awaited(core: Core, branch: str) -> Iterator[tuple[Run, HeldByAgent]]:
    """``left_behind``, once the agent has noticed the deaths on this node."""
    deadline = time.monotonic() + _ARRIVES_S
    while True:
        with core.database.read() as session:
            found = left_behind(core, session, branch)
            noted = {run.uid for run, _ in found}
            dying = [
                run
                for run in runs.unfinished(session, branch)
                if run.uid not in noted
                and (run.process or run.uid) not in core.inherited_runs
                and is_running(run) is False
                and look(core.home.path, run.process or run.uid) is LeaseState.HELD
            ]
        if not dying or time.monotonic() > deadline:
            return iter(found)
        time.sleep(0.02)  # nothing reports that another process writes to the lease


def _fetch(note: HeldByAgent) -> LeftMemory | None:
    """The memory of a dead training; None if it is being settled.

    :raises Unavailable: the process that holds it refuses.
    """
    try:
        connection = connect(note.address)
    except Unavailable:
        return None
    try:
        send(connection, Attach(PROTOCOL, metadata.version("datastates")))
        attached, fds = receive(connection, Attached, _SETTLES_S)
        memory, reading, table, *leases = fds
        try:
            found = Table.read(table)
        finally:
            os.close(table)
    except OSError as exc:
        connection.close()
        raise Unavailable(f"the agent that holds the states has ended ({exc})") from exc
    except BaseException:
        connection.close()
        raise
    states = [
        StateInSlots(state.manifest, state.slots, state.parties, state.parts)
        for state in found.states.values()
    ]
    shared = SharedMemory(memory, reading, attached.size, Pages(attached.pages))
    return LeftMemory(shared, states, found.register.runs, tuple(leases), connection)
