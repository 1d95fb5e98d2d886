"""What a training, its agent and a process that takes over send each other, on Unix sockets of one
user.

A message is four bytes with its length, little-endian, and one MessagePack array. The messages of
a training on what its memory holds are also a *table*: a file of them describes a whole memory.
Descriptors come with ``Register`` and ``Attached`` only. Both ends read the user of the other end
from the kernel (SO_PEERCRED). A user's processes can read each other's files and memory anyway, so
there is no further key.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Final, TypeVar

import msgspec

from datastates import errors
from datastates.errors import Corrupt, DatastatesError, Unavailable
from datastates.state.manifest import Manifest

PROTOCOL: Final = 1
"""Both ends must have the same."""

FOLDER: Final = "DATASTATES_AGENT_DIR"
"""The environment variable with a folder for sockets. Processes that share it need no common
network namespace. Without it, sockets are abstract."""

MOST_BYTES: Final = 64 << 20
"""The most bytes of a message."""

MOST_FDS: Final = 16

EMPTY: Final = msgspec.Raw(b"\xc0")

_header = struct.Struct("<I")
_credentials = struct.Struct("3i")
_PATH_BYTES = 100


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """A request of a training to hold its memory, of ``size`` bytes. ``packs`` and ``database``
    are where its states belong.

    Descriptors: the memory for writing and for reading, the table, and the leases of ``runs``."""

    protocol: int
    version: str
    runs: tuple[str, ...]
    pid: int
    argv: tuple[str, ...]
    packs: str
    database: str
    bucket: str
    size: int
    pages: str


class Layout(msgspec.Struct, frozen=True, array_like=True, tag="layout"):
    """The parts of manifests that are equal for all states of a layout."""

    number: int
    skeleton: msgspec.Raw
    tensors: msgspec.Raw


class Holds(msgspec.Struct, frozen=True, array_like=True, tag="holds"):
    """Memory holds a state. ``state`` is a ``WireState``, which an agent does not look into."""

    uid: str
    layout: int
    state: msgspec.Raw


class WireState(msgspec.Struct, frozen=True, array_like=True):
    """A manifest without the parts in its ``Layout``, the slot of each chunk, and the parties of
    the slots that came from elsewhere."""

    manifest: Manifest
    slots: tuple[int, ...]
    parties: dict[int, tuple[str, ...]]
    parts: tuple[Manifest, ...]


class LetsGo(msgspec.Struct, frozen=True, array_like=True, tag="lets_go"):
    """A state leaves memory: its slots may be used again."""

    uid: str


class Wants(msgspec.Struct, frozen=True, array_like=True, tag="wants"):
    """A caller waits until a state is durable."""

    uid: str


class Tracks(msgspec.Struct, frozen=True, array_like=True, tag="tracks"):
    """The process tracks a branch, as one of ``ranks``."""

    branch: str
    rank: int
    ranks: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The training has closed its repository: nothing needs to be kept."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The memory is held from now on."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The other end does not do it."""

    reason: str


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """A request of a training for the memory that a dead one left, with the version as in
    ``Register``. The training sends ``Ended`` once the states are its own."""

    protocol: int
    version: str


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """The memory. Descriptors as with ``Register``."""

    size: int
    pages: str


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """Make durable what must be, now. The other end closes the connection when that is done."""


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="ask_status"):
    """A request for ``AgentStatus``."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the agent. Trainings start another one."""


class HeldMemory(msgspec.Struct, frozen=True, array_like=True):
    """One memory: the training that fills it, or filled it before it died.

    ``newest_at`` is when its newest state came, in seconds since the epoch; before the first, when
    the training came.
    ``trouble`` is why its states could not be made durable yet, or empty. ``until`` is when they
    are made durable if no training takes the memory over, or 0 while the training lives."""

    runs: tuple[str, ...]
    pid: int
    argv: tuple[str, ...]
    packs: str
    tracks: tuple[Tracks, ...]
    pages: str
    size: int
    states: int
    newest_at: float
    until: float = 0.0
    trouble: str = ""


class AgentStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """What an agent holds."""

    pid: int
    version: str
    memories: tuple[HeldMemory, ...]
    takeovers: tuple[str, ...]
    """The addresses of the processes that hold the memory of dead trainings."""


Message = (
    Register
    | Layout
    | Holds
    | LetsGo
    | Wants
    | Tracks
    | Ended
    | Welcome
    | Refused
    | Attach
    | Attached
    | Settle
    | AskStatus
    | AgentStatus
    | Stop
)
_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_held_state = msgspec.msgpack.Decoder(WireState)


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    body = _encoder.encode(message)
    return _header.pack(len(body)) + body


class Frames:
    """Splits a stream into messages; belongs to one thread."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """The messages that are whole now, each with the bytes that it came in.

        :raises Corrupt: the stream holds something else.
        """
        self._waiting += data
        at, end = 0, len(self._waiting)
        try:
            while at + _header.size <= end:
                (length,) = _header.unpack_from(self._waiting, at)
                if length > MOST_BYTES:
                    raise Corrupt(f"a message of {length} bytes came, {MOST_BYTES} are the most")
                if at + _header.size + length > end:
                    break
                whole = bytes(self._waiting[at : at + _header.size + length])
                at += len(whole)
                try:
                    message = _decoder.decode(memoryview(whole)[_header.size :])
                except msgspec.MsgspecError as exc:
                    raise Corrupt(f"what came is no message of an agent: {exc}") from exc
                yield message, whole
        finally:
            del self._waiting[:at]


def read_table(fd: int, *, is_whole: bool = True) -> Iterator[tuple[Message, bytes]]:
    """The messages in a file. Without ``is_whole``, a last one that is cut off is left out.

    :raises Corrupt: it holds something else.
    """
    data, at = bytearray(), 0
    while piece := os.pread(fd, 16 << 20, at):
        data += piece
        at += len(piece)
    frames = Frames()
    yield from frames.feed(bytes(data))
    if is_whole and frames._waiting:
        raise Corrupt("the table of a memory is cut off")


def make_table(frames: Iterable[bytes]) -> int:
    """A descriptor of a file in memory with these messages; the caller closes it."""
    fd = os.memfd_create("datastates-table", os.MFD_CLOEXEC)
    try:
        data, done = memoryview(b"".join(frames)), 0
        while done < len(data):
            done += os.write(fd, data[done:])
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True, slots=True)
class Table:
    """What a table of messages describes: the states in a memory by uid, oldest first. ``frames``
    has the messages that describe each state, as they came; ``shared`` those of all layouts."""

    register: Register
    states: dict[str, WireState]
    wants: frozenset[str]
    tracks: tuple[Tracks, ...]
    frames: dict[str, bytes]
    shared: tuple[bytes, ...]

    @classmethod
    def read(cls, fd: int) -> Table:
        """The table in a file.

        :raises Corrupt: it is none.
        """
        register, layouts, shared = None, dict[int, Layout](), list[bytes]()
        states, frames = dict[str, WireState](), dict[str, bytes]()
        wants, tracks = set[str](), list[Tracks]()
        for message, whole in read_table(fd):
            match message:
                case Register():
                    register = message
                case Layout(number):
                    layouts[number] = message
                    shared.append(whole)
                case Holds(uid, layout, state):
                    try:
                        states[uid] = _whole(_held_state.decode(state), layouts[layout])
                    except (msgspec.MsgspecError, KeyError) as exc:
                        raise Corrupt(f"state {uid} is described wrongly ({exc})") from exc
                    frames[uid] = whole
                case Wants(uid):
                    wants.add(uid)
                case Tracks():
                    tracks.append(message)
                case _:
                    raise Corrupt(f"{type(message).__name__} does not describe a memory")
        if register is None:
            raise Corrupt("the table of a memory has no owner")
        return cls(register, states, frozenset(wants), tuple(tracks), frames, tuple(shared))


def _whole(state: WireState, layout: Layout) -> WireState:
    content = msgspec.structs.replace(
        state.manifest.content, skeleton=layout.skeleton, tensors=layout.tensors
    )
    manifest = msgspec.structs.replace(state.manifest, content=content)
    return msgspec.structs.replace(state, manifest=manifest)


def error_of(kind: str, text: str, trouble: str | None, cause: int = 0) -> DatastatesError:
    """The error that another process raised: the name of its class, its text and ``trouble``, and
    the number of the system's error that caused it, or 0."""
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, DatastatesError)):
        found = DatastatesError
    try:
        error: DatastatesError = found(text)
    except TypeError:  # it takes more than a text
        error = DatastatesError(text)
    error.trouble = trouble
    if cause:
        error.__cause__ = OSError(cause, os.strerror(cause))
    return error


# --- sockets ---


def who(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, user and group of a Unix socket's other end, from the kernel. For a listener, they
    belong to the process that made it listen. On other systems than Linux: 0, -1, -1."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, -1, -1
    pid, user, group = _credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    )
    return pid, user, group


def agent_address() -> str:
    """The address of this user's agent: a path, or an abstract name that begins with ``@``."""
    return named_address(f"agent-{os.geteuid()}")


def new_address(role: str) -> str:
    """An address that nothing listens on yet."""
    return named_address(f"{role}-{secrets.token_hex(8)}")


def named_address(role: str) -> str:
    """The address of a process with this role; the name has to be unique on the node."""
    name = f"datastates-{role}"
    folder = os.environ.get(FOLDER)
    return f"@{name}" if not folder else str(_checked(Path(folder)) / f"{name}.sock")


def _checked(folder: Path) -> Path:
    """The folder for sockets: made if it is missing, and refused if other users may write there.

    :raises Unavailable: it cannot be used.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as exc:
        raise Unavailable(f"{FOLDER}={folder} cannot be used for sockets: {exc.strerror}") from exc
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid != os.geteuid():
        raise Unavailable(
            f"{FOLDER}={folder} belongs to another user, or others may write there: chmod 700, or"
            " name another folder"
        )
    if len(os.fsencode(folder)) + 48 > _PATH_BYTES:
        raise Unavailable(f"{FOLDER}={folder} is too long for the path of a socket")
    return folder


def _bindable(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def listen(address: str) -> socket.socket:
    """A socket that listens at an address, readable by this user alone.

    :raises OSError: another process listens there.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not address.startswith("@") and os.path.exists(address):
            try:
                connect(address).close()
            except Unavailable:
                os.unlink(address)  # its process is gone
        before = os.umask(0o177)
        try:
            found.bind(_bindable(address))
        finally:
            os.umask(before)
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found


def connect(address: str, timeout_s: float = 5.0) -> socket.socket:
    """A connection to a process of this user that listens there.

    :raises Unavailable: none does, or it belongs to another user.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout_s)
    try:
        made.connect(_bindable(address))
        user = who(made)[1]
    except OSError as exc:
        made.close()
        raise Unavailable(f"nothing listens at {address} ({exc.strerror or exc})") from exc
    if user != os.geteuid():
        made.close()
        raise Unavailable(
            f"{address} belongs to user {user}, not to user {os.geteuid()}: set {FOLDER} to a"
            " folder of your own"
        )
    return made


def receive(
    connection: socket.socket, kind: type[_M], timeout_s: float = 5.0
) -> tuple[_M, list[int]]:
    """The next message, which must be of this kind, with its descriptors.

    :raises Unavailable: the other end refuses, ends, or does not answer in time.
    :raises Corrupt: something else came.
    """
    fds = list[int]()
    try:
        message = _next(connection, fds, timeout_s)
    except BaseException as exc:
        for fd in fds:
            os.close(fd)
        if isinstance(exc, OSError):
            raise Unavailable(f"the other end does not answer ({exc})") from exc
        raise
    if isinstance(message, kind):
        return message, fds
    for fd in fds:
        os.close(fd)
    if isinstance(message, Refused):
        raise Unavailable(message.reason)
    raise Corrupt(f"a message {type(message).__name__} came instead of {kind.__name__}")


def _next(connection: socket.socket, fds: list[int], timeout_s: float) -> Message:
    frames = Frames()
    while True:
        if not select([connection], [], [], timeout_s)[0]:
            raise Unavailable(f"the other end has not answered for {timeout_s:.0f} s")
        data, some, _, _ = socket.recv_fds(connection, 1 << 20, MOST_FDS)
        fds += some
        if not data:
            raise Unavailable("the other end has closed the connection")
        for message, _ in frames.feed(data):
            return message


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message, with descriptors, on a blocking socket.

    :raises OSError: the other end does not read, or has ended.
    """
    data = frame(message)
    sent = socket.send_fds(connection, [data], list(fds)) if fds else 0
    connection.sendall(data[sent:])


def ask(address: str, message: Message, kind: type[_M], timeout_s: float = 5.0) -> _M:
    """Send one message and return the answer.

    :raises Unavailable: nothing listens there, or it refuses.
    """
    with connect(address, timeout_s) as connection:
        send(connection, message)
        return receive(connection, kind, timeout_s)[0]
