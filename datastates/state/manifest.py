"""The description of a state: every leaf of its tree, each tensor's geometry, and the digest of
every chunk.

A state's tensor bytes are one *stream* of chunks. Tensors that stay the same are grouped apart from
tensors that change, so that an unchanged chunk keeps its digest. Each chunk holds ``CHUNK_BYTES``
except the last of its group. A tensor begins at ``start``: chunk ``start // CHUNK_BYTES``, offset
``start % CHUNK_BYTES``. It continues in the next chunks. Within a group tensors are ordered by
falling item size, so each is aligned to its item size without padding. Tensors of ``LARGE_BYTES``
and more begin at a multiple of ``ALIGNED_BYTES``. A device can then digest their chunks in place.
The gaps between them are zeros. Readers need no rule for gaps, because a shard has its own start.

``Content`` describes a state without the places of its bytes. A state therefore has the same digest
in memory, on disk and on another node. ``Manifest`` adds where this tier holds each chunk, and the
state's place in the lineage. The lineage database can be rebuilt from the manifests alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from blake3 import blake3

CHUNK_BYTES = 4 << 20
"""The size of a chunk, and of a slot of the arena."""

LARGE_BYTES = 64 << 10
"""Tensors of at least this many bytes are laid out apart from smaller ones, and aligned."""

ALIGNED_BYTES = 1 << 10
"""The size of a block of xxh3, to which large tensors are aligned in the stream."""

VERSION = 2
"""The version of manifest that this code writes and reads."""

STORED = 0
"""The form of a chunk that is stored as it is."""

Attribute = str | int | float | bool | None
"""The types that an attribute may have."""

_PARTS = b"datastates parts 1\0"


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A hyper-rectangle of a tensor held by one rank. Its bytes are at ``start`` of that rank's
    stream.

    They have the layout of a dense tensor of ``shape`` whose dimensions are in the order of the
    whole tensor's strides. A dimension of stride 0 is not cut.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor leaf.

    ``dtype`` is torch's name without the prefix (``float32``). The bytes are in memory order:
    sorting the dimensions of ``shape`` by ``strides`` gives their order. Dimensions with stride 0
    are stored once. ``alias`` is the index of the earlier tensor whose memory this one shares
    exactly (tied weights). Its shards are then empty. ``shape`` and ``strides`` describe the whole
    tensor. The shards of all parts hold each of its elements once (see ``geometry.covers``).
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alias: int | None
    requires_grad: bool
    shards: tuple[Shard, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of the stream: xxh3_128 of its ``length`` bytes."""

    digest: bytes
    length: int


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a state, without the places of its bytes.

    ``skeleton`` and ``values`` come from ``tree.flatten``, as MessagePack.
    """

    skeleton: msgspec.Raw
    values: msgspec.Raw
    tensors: msgspec.Raw
    chunks: tuple[Chunk, ...]


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """The place of a chunk in a tier. ``pack`` is an index into ``Manifest.packs``. The chunk is
    ``length`` bytes from ``offset`` of that file, in a ``form``."""

    pack: int
    offset: int
    length: int
    form: int = STORED


class PackInfo(msgspec.Struct, frozen=True, array_like=True):
    """A pack that a manifest needs: its file name, its whole size, and the length and digest of
    its header."""

    name: str
    size: int
    header_length: int
    header_digest: bytes


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The state's place in the lineage: everything that is needed to record it again."""

    uid: str
    parents: tuple[str, ...]
    parent_digests: tuple[str, ...]
    run: str | None
    branch: str | None
    step: int
    micro_step: int
    created_at_us: int
    message: str | None
    metrics: dict[str, float]
    attributes: dict[str, Attribute]
    rank: int = 0
    world_size: int = 1


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A state's part on one rank, or all of it if there is only one. ``digest`` is
    ``digest.digest_of(content, origin)``, hex.

    For a part of several, ``origin`` names the parents once the state is whole, and no sooner.
    ``bytes_new`` are the payload bytes that its put added to the tier.
    """

    version: int
    digest: str
    origin: Origin
    content: Content
    packs: tuple[PackInfo, ...] = ()
    refs: tuple[ChunkRef, ...] = ()
    bytes_new: int = 0


# --- Digest of a state of several parts, here because the lineage does not use torch ---


def root_digest(digests: Sequence[str], parent_digests: Sequence[str] = ()) -> str:
    """The digest of a state from the digests of its parts, by rank, and of its parents. The digest
    of a single part is returned unchanged, because it covers the parents."""
    if len(digests) == 1:
        return digests[0]
    hasher = blake3(_PARTS + len(digests).to_bytes(8, "little"))
    for digest in (*digests, *parent_digests):
        hasher.update(digest.encode())
    return hasher.hexdigest()
