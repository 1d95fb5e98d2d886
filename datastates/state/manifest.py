"""What a state consists of: every leaf of its tree, each tensor's geometry, and the digest of every
chunk.

A state's tensor bytes are one *stream* of chunks. Each chunk holds ``CHUNK_BYTES`` except the last
of its group (tensors that stay the same are grouped apart from those that change, so that an
unchanged chunk keeps its digest). A tensor lies at ``start``: chunk ``start // CHUNK_BYTES``,
offset ``start % CHUNK_BYTES``, and continues in the chunks that follow. Within a group tensors are
ordered by falling item size, so each is aligned to its item size without padding. Tensors of
``LARGE_BYTES`` and more begin at a multiple of ``ALIGNED_BYTES``, so that a device can digest their
chunks in place; the gaps between them are zeros. Readers need no rule for gaps: a shard says where
it lies.

``Content`` says what a state is, and nothing about where its bytes lie, so a state has the same
digest in memory, on disk and on another node. ``Manifest`` adds where this tier holds each chunk,
and the state's place in the lineage, so that the lineage database can be rebuilt from the manifests
alone.
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


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A hyper-rectangle of a tensor held by one rank; its bytes lie at ``start`` of that rank's
    stream.

    They are laid out as those of a dense tensor of ``shape`` whose dimensions are in the order of
    the whole tensor's strides. A dimension of stride 0 is not cut.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor leaf.

    ``dtype`` is torch's name without the prefix (``float32``). The bytes lie in memory order:
    sorting the dimensions of ``shape`` by ``strides`` gives their order. Dimensions with stride 0
    are stored once. ``alias`` is the index of the earlier tensor whose memory this one shares
    exactly (tied weights); its shards are then empty. ``shape`` and ``strides`` are those of the
    whole tensor, whose elements the shards of all parts hold once each (see ``content/shards.py``).
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
    """What a state is.

    ``skeleton`` and ``values`` are those that ``tree.flatten`` made, as MessagePack."""

    skeleton: msgspec.Raw
    values: msgspec.Raw
    tensors: msgspec.Raw
    chunks: tuple[Chunk, ...]


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a tier holds a chunk: index into ``Manifest.packs``, and ``length`` bytes from
    ``offset`` of that file, in a ``form``."""

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


# The digest of a state from those of its parts (see ``digest``), for the lineage, which does not
# use torch.


_PARTS = b"datastates parts 1\0"


def root_digest(digests: Sequence[str], parent_digests: Sequence[str] = ()) -> str:
    """The digest of a state from those of its parts, by rank, and of its parents; of a single
    part its own, which covers the parents."""
    if len(digests) == 1:
        return digests[0]
    hasher = blake3(_PARTS + len(digests).to_bytes(8, "little"))
    for digest in (*digests, *parent_digests):
        hasher.update(digest.encode())
    return hasher.hexdigest()
