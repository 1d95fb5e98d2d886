"""The messages of the control channel, version 2: their fields, their limits, and how they are
written.

Every field that a peer chooses is bounded by its type, so that nothing is believed, stored or
allocated before it is checked.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from datastates.errors import PeerFault
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.failures import Failure, Name, Text, Uid
from datastates.values import NAMES, RANKS

PROTOCOL_VERSION: Final = 2
MAGIC: Final = b"datastates"

FIRST_FRAME_BYTES: Final = 16 << 10
"""The most bytes of a frame before both sides have proved that they know the token."""

FRAME_BYTES: Final = 1 << 20
"""The most bytes of any frame."""

PART_BYTES: Final = 512 << 10
"""How many bytes of a longer body travel in one frame."""

BODY_BYTES: Final = 256 << 20
"""The most bytes that the parts of one body may have together; the side that asks may set a
lower limit."""

PIECES: Final = 64
"""The most pieces in which a chunk is sent."""

CHUNKS: Final = 32
"""The most chunks that one message asks for: 128 MiB."""

DIGESTS: Final = 512
"""The most chunks whose digests are asked for at once."""

ARGUMENTS: Final = 1000
"""The most words of a command line that travel with a run."""

PARTS: Final = 1024
"""The most parts of a state that is cloned part by part."""

_Digest = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]+\\Z")]
_Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Address = Annotated[bytes, Meta(max_length=8 << 10)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Tag = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# msgspec takes no bound above 63 bits, MessagePack has no number above 64
_Address64 = Annotated[int, Meta(ge=0)]
_ChunkLength = Annotated[int, Meta(ge=0, le=CHUNK_BYTES)]
_Limit = Annotated[int, Meta(ge=1, le=10_000)]
_Attribute = str | int | float | bool | None
_Config = Annotated[dict[Name, _Attribute], Meta(max_length=2_000)]


class Identity(Struct, frozen=True):
    """The server: the uid of its repository's lineage, its node and the version of datastates."""

    repository: Name
    node: Name
    version: Name


class RefRecord(Struct, frozen=True):
    """A branch or a tag."""

    name: Name
    kind: Annotated[str, Meta(pattern="^(branch|tag)\\Z")]
    state: Uid
    message: Text | None = None


class EdgeRecord(Struct, frozen=True):
    """A further parent."""

    parent: Uid
    kind: Name
    weight: float


class RunRecord(Struct, frozen=True):
    """A run as it travels: who made states, where, with which code and configuration.

    Secrets in it are masked."""

    uid: Uid
    host: Name
    user: Name
    argv: Annotated[tuple[Text, ...], Meta(max_length=ARGUMENTS)]
    git_commit: Name | None
    git_dirty: bool | None
    versions: Annotated[dict[Name, Name], Meta(max_length=NAMES)]
    started_at_us: int
    finished_at_us: int | None
    branch: Name | None
    config: _Config


_Runs = Annotated[tuple[RunRecord, ...], Meta(max_length=10_000)]


class StateRecord(Struct, frozen=True):
    """A node of the lineage as it travels. ``parents`` begin with the first parent; ``edges``
    describe the further ones.

    ``run`` names the run that captured it. ``run_record`` is the record of that run, unless the
    state comes in a list.
    """

    uid: Uid
    digest: _Digest
    step: int
    micro_step: int
    metrics: Annotated[dict[Name, float], Meta(max_length=NAMES)]
    attributes: Annotated[dict[Name, _Attribute], Meta(max_length=NAMES)]
    message: Text | None
    created_at_us: int
    status: Name
    parents: Annotated[tuple[Uid, ...], Meta(max_length=1000)]
    edges: Annotated[tuple[EdgeRecord, ...], Meta(max_length=1000)]
    run: Uid | None
    generation: _Count
    bytes_total: _Count
    bytes_new: _Count
    world_size: Annotated[int, Meta(ge=1, le=RANKS)] = 1
    run_record: RunRecord | None = None


class StatePage(Struct, frozen=True):
    """Some states in order, with their runs.

    ``next`` is what to pass as ``after`` to get those that follow, None at the end."""

    states: Annotated[tuple[StateRecord, ...], Meta(max_length=10_000)]
    next: Text | None = None
    runs: _Runs = ()


class Offer(Struct, frozen=True):
    """A state that a peer wants to push: its manifest, the state, its ancestry newest first, and
    refs that name any of them.

    ``runs`` captured the ancestry.
    """

    manifest: bytes
    state: StateRecord
    ancestry: tuple[StateRecord, ...] = ()
    refs: tuple[RefRecord, ...] = ()
    runs: _Runs = ()


# --- the handshake --------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag=True):
    """The client's first frame."""

    magic: Annotated[bytes, Meta(max_length=16)]
    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    nonce: _Nonce


class Challenge(Struct, frozen=True, tag=True):
    """The server's answer.

    The server reveals no more before the client has proved the token."""

    version: Annotated[int, Meta(ge=0, le=1 << 16)]
    nonce: _Nonce


class Proof(Struct, frozen=True, tag=True):
    """The client's proof of the token: its code over both first frames."""

    mac: _Mac


class Welcome(Struct, frozen=True, tag=True):
    """The server's proof of the token."""

    mac: _Mac


class Denied(Struct, frozen=True, tag=True):
    """The client does not know the token."""


class Ready(Struct, frozen=True, tag=True):
    """The description of each side in its first authenticated frame.

    ``planes`` are the data planes that it can use. ``wish`` is the one that its user chose, if any
    (see ``handshake.offer``). ``near`` is the socket where processes of its host prove that they
    are on it (see ``same_host``). ``address`` is its end of the data plane. It is empty until the
    end is needed; ``Moved`` sends it then. A peer that is silent for ``timeout_ms`` is treated as
    dead. A client has no ``identity``.
    """

    planes: Annotated[tuple[Name, ...], Meta(max_length=8)]
    address: _Address
    timeout_ms: Annotated[int, Meta(ge=100, le=86_400_000)]
    identity: Identity | None = None
    wish: Name = ""
    near: Name = ""


class Refused(Struct, frozen=True, tag=True):
    """Sent instead of ``Ready``: the peer has proved the token, but is not admitted now."""

    failure: Failure


# --- requests and answers -------------------------------------------------------------------------


class Refs(Struct, frozen=True, tag=True):
    """-> list[RefRecord]"""


class Find(Struct, frozen=True, tag=True):
    """-> StatePage"""

    query: Text
    limit: _Limit
    after: Text | None = None


class Log(Struct, frozen=True, tag=True):
    """-> StatePage"""

    rev: Text
    limit: _Limit
    after: Text | None = None


class Resolve(Struct, frozen=True, tag=True):
    """-> StateRecord"""

    rev: Text


class Open(Struct, frozen=True, tag=True):
    """Pin a state -> Opened.

    ``relay`` is the url at which the asking side will itself serve this state, if it joins a chain;
    ``failed`` are urls of the chain that did not answer it. With ``here``, the server sends its
    own copy, whatever the chain. With ``near``, the client is a process of this host and user (see
    ``same_host``), and the answer has the addresses of the chunks in memory. ``part``: of a state
    of several parts, open only the part of this rank.
    """

    uid: Uid
    relay: Name | None = None
    failed: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    here: bool = True
    near: bool = False
    part: Annotated[int, Meta(ge=0, lt=PARTS)] | None = None


class Opened(Struct, frozen=True):
    """A state that is pinned under ``handle``, with the bytes of each of its chunks. In a chain,
    ``upstream`` is the url of the peer to ask for the chunks instead. Their digests still come
    from this server (``Digests``), so the state is pinned in any case.

    ``addresses`` are the chunks' places in the memory of the answering process, or empty.
    """

    handle: _Id
    manifest: bytes
    lengths: Annotated[tuple[_ChunkLength, ...], Meta(max_length=1 << 24)]
    upstream: Name | None = None
    addresses: Annotated[tuple[_Address64, ...], Meta(max_length=1 << 24)] = ()


class Reach(Struct, frozen=True, tag=True):
    """Ask where the parts of a state are -> Reached."""

    uid: Uid


class Reached(Struct, frozen=True):
    """How far away each part of a state is from the answering process, by rank: 0 its memory, 255
    not there.

    ``others`` are the urls at which further processes of its job serve.
    """

    places: Annotated[bytes, Meta(min_length=1, max_length=PARTS)]
    others: Annotated[tuple[Name, ...], Meta(max_length=PARTS)] = ()


class Release(Struct, frozen=True, tag=True):
    """Release a pinned state -> nothing. ``generation`` as in ``Want``."""

    handle: _Id
    generation: _Count = 0


class Digests(Struct, frozen=True, tag=True):
    """The BLAKE3 of chunks of a state that is held open under ``handle`` -> bytes, 32 for each.
    Either side may ask for it.

    For a chunk that is damaged on its side, the peer sends 32 zeros."""

    handle: _Id
    indexes: Annotated[tuple[_Id, ...], Meta(min_length=1, max_length=DIGESTS)]


class Push(Struct, frozen=True, tag=True):
    """Take a state from the asking side, which holds it open under ``handle`` -> StateRecord.
    The encoded ``Offer`` has ``bytes`` bytes and comes as ``Part`` frames of the same id."""

    handle: _Id
    bytes: Annotated[int, Meta(ge=1, le=BODY_BYTES)]


Question = Refs | Find | Log | Resolve | Open | Reach | Release | Push | Digests


class Ask(Struct, frozen=True, tag=True):
    """A question; its answer has the same ``id``."""

    id: _Id
    question: Question


class Part(Struct, frozen=True, tag=True):
    """A part of the body that belongs to a question."""

    id: _Id
    data: bytes


class Answer(Struct, frozen=True, tag=True):
    """A part of an answer's body: MessagePack of the type that the question names."""

    id: _Id
    data: bytes
    is_last: bool


class Failed(Struct, frozen=True, tag=True):
    """An answer that is an error."""

    id: _Id
    failure: Failure


# --- chunks ---------------------------------------------------------------------------------------


class Want(Struct, frozen=True, tag=True):
    """Send chunks of a pinned state, in this order, as messages of ``pieces`` bytes on ``tag``,
    ``tag + 1``, …: the receives are already posted. A piece belongs to one chunk.

    ``generation`` counts the resets of the data plane: an end that sees a later one than its own
    resets itself first.
    """

    handle: _Id
    indexes: Annotated[tuple[_Id, ...], Meta(min_length=1, max_length=CHUNKS)]
    tag: _Tag
    pieces: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=CHUNK_BYTES)], ...],
        Meta(min_length=1, max_length=CHUNKS * PIECES),
    ]
    generation: _Count = 0


class Gone(Struct, frozen=True, tag=True):
    """The chunks that were wanted on ``tag`` will not come, or not all of them. Both sides then
    reset the data plane, so that nothing is left in transit.

    With ``is_link``, only the link broke: the chunks may be requested again."""

    tag: _Tag
    failure: Failure
    generation: _Count = 0
    is_link: bool = False


class Moved(Struct, frozen=True, tag=True):
    """The sender's end of the data plane has moved; what was under way to the old one is lost.

    An empty ``address`` means that there is no end, because it stopped or (``failure``) cannot be
    made. With ``asks``, the receiver answers with its own address."""

    address: _Address
    asks: bool = False
    failure: Failure | None = None


class Took(Struct, frozen=True, tag=True):
    """The chunks and bytes that the receiver has read directly from memory (see ``same_host``),
    since its last message of this kind."""

    handle: _Id
    chunks: Annotated[int, Meta(ge=1, le=1 << 24)]
    bytes: _Count


class Land(Struct, frozen=True, tag=True):
    """Memory on a device of the sender's, with the handle by which the driver opens it; the
    other side copies what it sends to this memory (see ``ipc``)."""

    region: _Id
    handle: Annotated[bytes, Meta(min_length=1, max_length=512)]


class Room(Struct, frozen=True, tag=True):
    """Put part ``number`` of the message of ``tag``, which has ``total`` bytes, into ``region``:
    ``length`` bytes from ``start`` on. Behind it, put the whole messages of the tags that follow,
    as many as ``more`` has lengths."""

    tag: _Tag
    number: _Id
    total: _Count
    region: _Id
    start: _Count
    length: _ChunkLength
    more: Annotated[tuple[_ChunkLength, ...], Meta(max_length=CHUNKS)] = ()
    generation: _Count = 0


class Laid(Struct, frozen=True, tag=True):
    """Everything that was announced with that part is there, ``length`` bytes in all.

    With ``is_other``, a message has ``length`` bytes, which is not the announced length, and no
    byte of it was copied."""

    tag: _Tag
    number: _Id
    length: _Count
    is_other: bool = False
    generation: _Count = 0


class Ping(Struct, frozen=True, tag=True):
    """A sign of life; the sender has handed ``sent`` bytes to the data plane so far."""

    sent: _Count


class Bye(Struct, frozen=True, tag=True):
    """The sender closes this connection, for the reason in ``failure``."""

    failure: Failure


Message = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Denied
    | Ready
    | Refused
    | Ask
    | Part
    | Answer
    | Failed
    | Want
    | Gone
    | Moved
    | Took
    | Land
    | Room
    | Laid
    | Ping
    | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_parts = msgspec.msgpack.Decoder(Annotated[dict[str, Raw], Meta(max_length=5)])
_items = msgspec.msgpack.Decoder(Annotated[tuple[Raw, ...], Meta(max_length=200_000)])
_of_items: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "ancestry": msgspec.msgpack.Decoder(StateRecord),
    "refs": msgspec.msgpack.Decoder(RefRecord),
    "runs": msgspec.msgpack.Decoder(RunRecord),
}


def encode(message: Message) -> bytes:
    """A message as the body of a frame."""
    return _encoder.encode(message)


def decode(body: bytes | memoryview, *, peer: str) -> Message:
    """The message in a frame's body.

    :raises PeerFault: it is not a message, or a field is out of bounds.
    """
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise PeerFault(
            f"{peer} sent no message of protocol {PROTOCOL_VERSION} ({exc}): is it datastates that"
            " serves there?"
        ) from exc
    return message


def decode_offer(body: bytes | bytearray, *, peer: str) -> Offer:
    """The offer in the body of a push. Its items are decoded one by one, so that other threads can
    run in between.

    :raises PeerFault: it is none, or a field is out of bounds.
    """
    try:
        parts = _parts.decode(body)
        lists = {
            name: tuple([each.decode(item) for item in _items.decode(parts.get(name, b"\x90"))])
            for name, each in _of_items.items()
        }
        return Offer(
            msgspec.msgpack.decode(parts["manifest"], type=bytes),
            _of_items["ancestry"].decode(parts["state"]),
            **lists,
        )
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError) as exc:
        raise PeerFault(f"{peer} pushed an invalid offer ({exc})") from exc
