"""The agent of a user on a node: it holds the memory of trainings, so that what they captured
survives them.

it holds and does not train: it maps no memory, imports no torch, and keeps the messages as they
came. When a training dies, a new process takes its memory over (``maintenance.takeover``). That
process survives the agent.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata

from datastates.errors import Conflict, Corrupt

from .messages import (
    MOST_FDS,
    PROTOCOL,
    AgentStatus,
    AskStatus,
    Ended,
    Frames,
    HeldMemory,
    Holds,
    Layout,
    LetsGo,
    Message,
    Refused,
    Register,
    Stop,
    Tracks,
    Wants,
    Welcome,
    agent_address,
    frame,
    listen,
    make_table,
    new_address,
    read_table,
    who,
)

_logger = logging.getLogger(__name__)

IDLE_S = 10.0
"""How long an agent that holds nothing waits for the next training, in seconds."""

_POLL_S = 0.2
"""How often processes are looked at on a kernel that does not report their end, in seconds."""

_PIECE = 1 << 20

MOST_BYTES_HELD = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""The most bytes of all memories together."""


@dataclass(slots=True, eq=False)
class _Memory:
    """One memory. ``fds`` are those of ``Register`` without the table: the memory for writing and
    for reading, and the leases. ``pidfd`` is None on a kernel without such."""

    register: Register
    fds: list[int]
    pidfd: int | None
    layouts: dict[int, bytes] = field(default_factory=dict)
    states: dict[str, bytes] = field(default_factory=dict)
    wants: dict[str, bytes] = field(default_factory=dict)
    tracks: dict[str, tuple[Tracks, bytes]] = field(default_factory=dict)
    newest_at: float = field(default_factory=time.time)

    def note(self, message: Message, whole: bytes) -> None:
        """Keep what a message says about the memory.

        :raises Corrupt: it says nothing about a memory.
        """
        match message:
            case Layout(number):
                self.layouts[number] = whole
            case Holds(uid):
                self.states.pop(uid, None)
                self.states[uid] = whole
                self.newest_at = time.time()
            case LetsGo(uid):
                self.states.pop(uid, None)
                self.wants.pop(uid, None)
            case Wants(uid):
                self.wants[uid] = whole
            case Tracks(branch):
                self.tracks[branch] = message, whole
            case _:
                raise Corrupt(f"a training sent {type(message).__name__}")

    def table(self) -> int:
        """A descriptor of a file that describes the memory."""
        tracks = [whole for _, whole in self.tracks.values()]
        frames = [*self.layouts.values(), *tracks, *self.wants.values(), *self.states.values()]
        return make_table([frame(self.register), *frames])

    def status(self) -> HeldMemory:
        register = self.register
        return HeldMemory(
            register.runs,
            register.pid,
            register.argv,
            register.packs,
            tuple(tracks for tracks, _ in self.tracks.values()),
            register.pages,
            register.size,
            len(self.states),
            self.newest_at,
        )

    @property
    def key(self) -> tuple[int, int]:
        return _key(self.fds[0])

    def close(self) -> None:
        for fd in (*self.fds, *(() if self.pidfd is None else (self.pidfd,))):
            os.close(fd)
        self.fds, self.pidfd = [], None


@dataclass(frozen=True, slots=True)
class _Takeover:
    """A process that holds the memory of a dead training."""

    process: subprocess.Popen[bytes]
    key: tuple[int, int]
    size: int


@dataclass(slots=True, eq=False)
class _Client:
    connection: socket.socket
    pid: int
    frames: Frames = field(default_factory=Frames)
    fds: list[int] = field(default_factory=list)
    memory: _Memory | None = None


class Agent:
    """Holds the memory of trainings. All of it runs on one thread, in ``run``."""

    def __init__(self, address: str, *, is_lasting: bool = False) -> None:
        self._is_lasting = is_lasting
        self._version = metadata.version("datastates")
        self._selector = selectors.DefaultSelector()
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._clients: dict[_Memory, _Client | None] = {}
        self._open: set[_Client] = set()
        self._takeovers: dict[str, _Takeover] = {}
        self._is_ending = False

    def run(self) -> None:
        """Hold memory until no process needs it, or until ``stop``."""
        idle_at = time.monotonic()
        while not self._is_over(idle_at):
            for key, _ in self._selector.select(_POLL_S if self._polled() else 1.0):
                key.data()
            for memory in self._polled():
                if not _exists(memory.register.pid):
                    self._died(memory)
            self._takeovers = {
                address: takeover
                for address, takeover in self._takeovers.items()
                if takeover.process.poll() is None
            }
            if self._clients or self._open or self._takeovers:
                idle_at = time.monotonic()
        self._listener.close()
        for memory in list(self._clients):
            if not _exists(memory.register.pid):
                self._died(memory)
        for takeover in self._takeovers.values():
            takeover.process.send_signal(signal.SIGTERM)  # it makes durable what must be, now
        for client in list(self._open):
            self._leave(client)
        for takeover in self._takeovers.values():
            takeover.process.wait()

    def _is_over(self, idle_at: float) -> bool:
        is_idle = not self._is_lasting and time.monotonic() - idle_at > IDLE_S
        return self._is_ending or is_idle

    def stop(self) -> None:
        """End soon; callable by a signal handler."""
        self._is_ending = True

    def _polled(self) -> list[_Memory]:
        return [memory for memory in self._clients if memory.pidfd is None]

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            pid, user, _ = who(connection)
            connection.setblocking(False)
            client = _Client(connection, pid)
            if user != os.geteuid():
                self._refuse(client, f"this agent belongs to user {os.geteuid()}, not to {user}")
                connection.close()
                return
            self._open.add(client)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, client))

    def _read(self, client: _Client) -> None:
        """Take in what the client has sent, until there is no more."""
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(client.connection, _PIECE, MOST_FDS)
                client.fds += fds
                if not data:
                    break
                for message, whole in client.frames.feed(data):
                    self._take(client, message, whole)
                    if client not in self._open:
                        return
        except BlockingIOError:
            return
        except OSError:
            pass
        except Corrupt as exc:
            self._refuse(client, str(exc))
        self._leave(client)

    def _take(self, client: _Client, message: Message, whole: bytes) -> None:
        match message:
            case Register():
                self._register(client, message)
            case Ended():
                if client.memory is not None:
                    self._drop(client.memory)
                self._leave(client)
            case AskStatus():
                memory = tuple(each.status() for each in self._clients)
                self._answer(
                    client, AgentStatus(os.getpid(), self._version, memory, (*self._takeovers,))
                )
            case Stop():
                self.stop()
            case _ if client.memory is not None:
                client.memory.note(message, whole)
            case _:
                raise Corrupt(f"{type(message).__name__} came before Register")

    def _register(self, client: _Client, register: Register) -> None:
        fds, client.fds = client.fds, []
        try:
            self._check(client, register, fds)
            memory = _Memory(register, [], _pidfd(client.pid))
            for message, whole in read_table(fds[2]):
                memory.note(message, whole)
        except (Corrupt, OSError) as exc:
            for fd in fds:
                os.close(fd)
            self._refuse(client, str(exc))
            self._leave(client)
            return
        os.close(fds.pop(2))
        memory.fds = fds
        for earlier in [each for each in self._clients if each.register.pid == register.pid]:
            if set(earlier.register.runs) & set(register.runs):
                self._drop(earlier)  # it has come back, and reported everything again
        client.memory = memory
        self._clients[memory] = client
        if memory.pidfd is not None:
            self._selector.register(memory.pidfd, selectors.EVENT_READ, partial(self._died, memory))
        self._answer(client, Welcome())

    def _check(self, client: _Client, register: Register, fds: list[int]) -> None:
        """Raise unless a process may be held.

        :raises Corrupt: why not.
        """
        if (register.protocol, register.version) != (PROTOCOL, self._version):
            raise Corrupt(
                f"the agent runs datastates {self._version}, and this process {register.version}:"
                " `datastates agent stop` lets the next training start another one"
            )
        if client.memory is not None or len(fds) != 3 + len(register.runs):
            raise Corrupt("Register comes once, with the descriptors of a memory")
        if client.pid != register.pid:
            seen = f"process {client.pid}" if client.pid else "no process"
            raise Corrupt(
                f"process {register.pid} is in another PID namespace: the agent sees {seen} there;"
                " share the namespace, or use Config(agent='inline')"
            )
        sizes = {each.key: each.register.size for each in self._clients}
        sizes |= {takeover.key: takeover.size for takeover in self._takeovers.values()}
        sizes[_key(fds[0])] = register.size  # a training that attached has the memory of a dead one
        if (total := sum(sizes.values())) > MOST_BYTES_HELD:
            raise Corrupt(
                f"the memories of {len(sizes)} trainings would have {total} bytes together, and"
                f" this node has {MOST_BYTES_HELD}: give each a smaller memory_bytes"
            )

    def _died(self, memory: _Memory) -> None:
        """The process of a training is gone, and everything that it sent can be read."""
        client = self._clients.get(memory)
        if client is not None:
            self._read(client)
        if memory not in self._clients:
            return  # it had ended in order
        try:
            self._hand_over(memory)
        except OSError as exc:
            _logger.warning("memory of a dead training cannot be taken over for now: %s", exc)
            time.sleep(_POLL_S)  # its descriptor still reports the end, so this comes again
            return
        self._drop(memory)

    def _hand_over(self, memory: _Memory) -> None:
        if not memory.states:
            return
        address, table = new_address("takeover"), memory.table()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "datastates.maintenance.takeover", address),
                    *map(str, (table, *memory.fds)),
                ],
                pass_fds=[table, *memory.fds],
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            self._takeovers[address] = _Takeover(process, memory.key, memory.register.size)
        finally:
            os.close(table)

    def _drop(self, memory: _Memory) -> None:
        client = self._clients.pop(memory, None)
        if client is not None:
            client.memory = None
        if memory.pidfd is not None:
            self._selector.unregister(memory.pidfd)
        memory.close()

    def _leave(self, client: _Client) -> None:
        """Close a connection. The memory of a training that left without an end stays until its
        process is gone; its digests show what is still whole then."""
        if client not in self._open:
            return
        self._open.discard(client)
        if client.memory is not None:
            self._clients[client.memory] = None
        self._selector.unregister(client.connection)
        client.connection.close()
        for fd in client.fds:
            os.close(fd)

    def _refuse(self, client: _Client, reason: str) -> None:
        self._answer(client, Refused(reason))

    def _answer(self, client: _Client, message: Message) -> None:
        with suppress(OSError):  # it has gone, or does not read
            client.connection.send(frame(message))


def _key(fd: int) -> tuple[int, int]:
    """A file: its device and its number there."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process has ended.

    :raises Corrupt: there is no such process.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as exc:
        raise Corrupt(f"process {pid} has ended") from exc
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(*, is_lasting: bool = False) -> None:
    """Run the agent of this user, until no training needs it, or for ever.

    :raises Conflict: there is one, and this one was to last.
    """
    try:
        agent = Agent(agent_address(), is_lasting=is_lasting)
    except OSError as exc:
        if is_lasting:
            raise Conflict("an agent runs on this node already: `datastates agent stop`") from exc
        return  # another process was first
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()


if __name__ == "__main__":
    main()
