"""``AgentClient``: reports to the agent of this node what the memory of a training holds, so that
it survives the training.

The agent reads what the kernel accepted before the training died. Therefore the order of messages
on one socket is enough: ``lets_go`` is sent before any slot of the state is used again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from select import select
from typing import IO

import msgspec

from datastates.errors import Closed, DatastatesError, Unavailable
from datastates.storage.memory import MemoryTier, StateInSlots
from datastates.storage.shared_memory import SharedMemory
from datastates.system.interrupts import Mutex
from datastates.system.logs import event

from .messages import (
    EMPTY,
    Ended,
    Holds,
    Layout,
    LetsGo,
    Message,
    Register,
    Tracks,
    Wants,
    Welcome,
    WireState,
    agent_address,
    connect,
    frame,
    make_table,
    receive,
    send,
)

_logger = logging.getLogger(__name__)

PATIENCE_S = 0.05
"""How long a training waits in all, in seconds, for an agent that does not read."""

_START_S = 5.0
"""How long a new agent may take until it listens."""

_AGAIN_S = 5.0
"""How long after a failure the agent is tried again."""

STACKS = "DATASTATES_STACKS"
"""The environment variable with the folder to which a process of a job writes the stacks of its
threads on SIGUSR2; see ``datastates agent run``."""

_encoder = msgspec.msgpack.Encoder()
_stack_files: list[IO[str]] = []  # open as long as the process
_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def start(module: str, environ: Mapping[str, str] | None = None) -> None:
    """Start ``python -m module``, with ``environ`` in addition. It outlives this process."""
    starting = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal of the training does not end it
    )
    threading.Thread(target=starting.wait, name="datastates-exit", daemon=True).start()


def connect_or_start() -> socket.socket:
    """A connection to the agent of this user, which is started if there is none.

    :raises Unavailable: none responds.
    """
    address = agent_address()
    with suppress(Unavailable):
        return connect(address)
    start("datastates.agent.server")
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return connect(address)
        except Unavailable as exc:
            if time.monotonic() > deadline:
                raise Unavailable(f"no agent could be started on this node: {exc}") from exc
            time.sleep(0.02)  # nothing reports that a process listens


class AgentClient:
    """Has the agent hold the memory of one repository of this process. Safe from any thread.

    ``register`` describes this process. ``lease`` is the descriptor of its lease, which the agent
    holds as well. ``inherited`` are the descriptors of leases of dead runs, until ``settle``.
    If the agent goes away, another one is started, and everything is reported to it.
    """

    def __init__(
        self,
        register: Register,
        memory: MemoryTier,
        shared: SharedMemory,
        lease: int,
        inherited: tuple[int, ...] = (),
    ) -> None:
        self._register, self._memory, self._shared = register, memory, shared
        self._leases, self._inherited = (lease, *inherited), inherited
        self._inodes = [os.fstat(fd).st_ino for fd in self._fds()]
        self._socket: socket.socket | None = None
        self._inode = 0
        self._layouts: dict[tuple[int, int], tuple[int, msgspec.Raw, msgspec.Raw]] = {}
        self._tracks: dict[str, Tracks] = {}
        self._wants: dict[str, None] = {}
        self._patience_s = PATIENCE_S
        self._tried_at = 0.0
        self._why: str | None = None
        self._is_trying = self._is_closed = False
        self._lock = Mutex()
        """Taken under the lock of the tier, never the other way round."""
        _clients.add(self)

    @property
    def trouble(self) -> str | None:
        """Why nothing is held by an agent; None while it is."""
        return None if self._socket is not None else self._why or "no agent was reached yet"

    def begin(self) -> None:
        """Have the memory held from now on, if an agent can be reached."""
        self._connect()
        if folder := os.environ.get(STACKS):
            _write_stacks(Path(folder) / str(os.getpid()))

    def look(self) -> None:
        """Once a second, on any thread: reach an agent again if it is gone. Does not wait for
        it."""
        with self._lock:
            if self._socket is not None and _has_ended(self._socket):
                self._lose("the agent has ended")
            if self._socket is not None or self._is_trying or self._is_closed:
                return
            if time.monotonic() - self._tried_at < _AGAIN_S and self._tried_at:
                return
            self._is_trying = True
        threading.Thread(target=self._connect, name="datastates-agent", daemon=True).start()

    def track(self, branch: str, rank: int, ranks: int) -> None:
        """Report that this process tracks a branch."""
        self._tracks[branch] = tracks = Tracks(branch, rank, ranks)
        self._send(tracks)

    def want(self, uid: str) -> None:
        """Report that a caller waits until a state is durable."""
        self._wants[uid] = None
        self._send(Wants(uid))

    def holds(self, state: StateInSlots) -> None:
        """See ``MemoryListener``."""
        if self._socket is not None:
            self._send(*self._messages(state))

    def lets_go(self, uid: str) -> None:
        """See ``MemoryListener``."""
        self._wants.pop(uid, None)
        if self._socket is not None:
            self._send(LetsGo(uid))

    def close(self) -> None:
        """Release the agent: what memory holds is not needed any more. Idempotent."""
        self._is_closed = True
        _clients.discard(self)
        self._send(Ended())
        self._lose("")
        self._close_inherited()

    def settle(self) -> None:
        """Let the agent hold this process's own lease alone: the dead runs are settled."""
        if self._inherited:
            own = self._register.runs[:1]
            self._register = msgspec.structs.replace(self._register, runs=own)
            self._leases = self._leases[:1]
            self._inodes = self._inodes[:3]
            self._lose("")
            self._connect()
            self._close_inherited()

    def _close_inherited(self) -> None:
        inherited, self._inherited = self._inherited, ()
        for fd in inherited:
            os.close(fd)

    # --- below: the connection ---

    def _fds(self) -> tuple[int, ...]:
        return (self._shared.fd, self._shared.read_fd, *self._leases)

    def _connect(self) -> None:
        connection = None
        try:
            if [_inode_of(fd) for fd in self._fds()] != self._inodes:
                raise Unavailable("something in this process has closed the memory's descriptors")
            connection = connect_or_start()
            inode = _inode_of(connection.fileno())

            def report(states: list[StateInSlots]) -> None:
                with self._lock:
                    if self._is_closed:
                        raise Closed("the repository was closed meanwhile")
                    self._layouts.clear()
                    frames = [frame(each) for state in states for each in self._messages(state)]
                    frames += [frame(each) for each in self._tracks.values()]
                    frames += [frame(Wants(uid)) for uid in self._wants]
                    table = make_table(frames)
                    try:
                        first = self._fds()
                        send(connection, self._register, (*first[:2], table, *first[2:]))
                    finally:
                        os.close(table)
                    connection.setblocking(False)
                    self._socket, self._inode = connection, inode
                    self._patience_s = PATIENCE_S

            self._memory.set_listener(self, report)
            receive(connection, Welcome)
        except (DatastatesError, OSError) as exc:
            self._lose(str(exc))
            if connection is not None:
                connection.close()
        else:
            if self._why is not None:
                _logger.warning("captured states survive this process again")
            self._why = None
        finally:
            self._tried_at, self._is_trying = time.monotonic(), False

    def _messages(self, state: StateInSlots) -> list[Message]:
        """The messages about a state; the first one of its layout comes with the layout."""
        manifest, found = state.manifest, list[Message]()
        content = manifest.content
        key = id(content.skeleton), id(content.tensors)
        if key not in self._layouts:
            number = len(self._layouts)
            self._layouts[key] = number, content.skeleton, content.tensors  # keeps both ids
            found.append(Layout(number, content.skeleton, content.tensors))
        bare = msgspec.structs.replace(
            manifest,
            content=msgspec.structs.replace(content, skeleton=EMPTY, tensors=EMPTY),
        )
        held = WireState(bare, state.slots, state.parties, state.parts)
        uid = manifest.origin.uid
        found.append(Holds(uid, self._layouts[key][0], msgspec.Raw(_encoder.encode(held))))
        return found

    def _send(self, *messages: Message) -> None:
        """Send, or give the agent up; raises nothing. If the script closed the socket, its number
        may be another file, which gets nothing."""
        with self._lock:
            connection = self._socket
            if connection is None:
                return
            if _inode_of(connection.fileno()) != self._inode:
                self._lose("")
                return
            data = memoryview(b"".join(map(frame, messages)))
            try:
                while data:
                    try:
                        data = data[connection.send(data) :]
                    except BlockingIOError:
                        began = time.monotonic()
                        if (
                            self._patience_s <= 0
                            or not select([], [connection], [], self._patience_s)[1]
                        ):
                            self._lose("the agent does not read")
                            return
                        self._patience_s -= time.monotonic() - began
            except OSError as exc:
                self._lose(f"the agent has ended ({exc.strerror})")

    def _lose(self, why: str) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
            if connection is not None and _inode_of(connection.fileno()) != self._inode:
                connection.detach()  # the number may be another file by now
                why = "something in this process has closed the socket of the agent"
            elif connection is not None:
                connection.close()
        if why and why != self._why and not self._is_closed:
            lost = event("agent.lost", reason=why)
            _logger.warning(
                "captured states are lost if this process dies, for now: %s",
                why,
                extra=lost,
            )
            self._why = why


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other end, which sends nothing, has closed a connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _write_stacks(path: Path) -> None:
    """Write the stacks of all threads there on SIGUSR2, unless the script uses that signal."""
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        with suppress(OSError):
            file = path.open("w")
            faulthandler.register(signal.SIGUSR2, file, all_threads=True)
            _stack_files.append(file)


def _inode_of(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return -1


def _after_fork() -> None:
    for agent in list(_clients):
        connection, agent._socket = agent._socket, None
        agent._is_closed = True
        with suppress(OSError):
            if connection is not None and _inode_of(connection.fileno()) == agent._inode:
                connection.close()
        agent._shared.close()


os.register_at_fork(after_in_child=_after_fork)
