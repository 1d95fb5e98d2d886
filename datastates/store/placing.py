"""Decides, before any file is touched, which chunks a put writes and to which it refers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from datastates.content.digest import chunk_digest, decode, encode
from datastates.content.manifest import ChunkRef, Manifest, PackInfo
from datastates.errors import Corrupt, Unsupported

from .naming import MAX_MANIFEST, uid_of
from .pack import PackLayout, lay_out

__all__ = ["Places", "PutPlan", "own_bytes", "places_of", "plan_put", "readable"]

Places = Mapping[tuple[bytes, int], tuple[PackInfo, int]]
"""The pack and the offset of each chunk, by its digest and length."""


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A put of the chunks ``new`` into the pack ``name``; ``layout`` is None if nothing is new, so that there is no pack.

    ``manifest`` is the one to write, with the place of every chunk; ``borrowed`` are the older packs to which it refers.
    """

    manifest: Manifest
    name: str
    new: tuple[int, ...]
    layout: PackLayout | None
    borrowed: tuple[PackInfo, ...]
    bytes_new: int


def plan_put(manifest: Manifest, places: Places, name: str) -> PutPlan:
    """The plan of a put. It refers to chunks that have one of ``places``, and to those that came earlier in this state; others are new."""
    known = dict(places)
    chunks = manifest.content.chunks
    first: dict[tuple[bytes, int], int] = {}
    for index, chunk in enumerate(chunks):
        if (chunk.digest, chunk.length) not in known:
            first.setdefault((chunk.digest, chunk.length), index)
    new = tuple(first.values())
    layout = lay_out(manifest, new) if new else None
    packs: dict[PackInfo, int] = {}
    if layout is not None:
        own = PackInfo(name, layout.size, len(layout.header), chunk_digest(layout.header))
        packs[own] = 0
        known.update((key, (own, offset)) for key, offset in zip(first, layout.offsets, strict=True))
    refs = []
    for chunk in chunks:
        pack, offset = known[chunk.digest, chunk.length]
        refs.append(ChunkRef(packs.setdefault(pack, len(packs)), offset))
    placed = msgspec.structs.replace(manifest, packs=tuple(packs), refs=tuple(refs))
    borrowed = tuple(packs)[1 if new else 0 :]
    return PutPlan(placed, name, new, layout, borrowed, sum(chunks[index].length for index in new))


def own_bytes(placed: Manifest) -> int:
    """The number of payload bytes in a state's own pack, from the manifest that its put wrote."""
    own = {index for index, pack in enumerate(placed.packs) if (uid_of(pack.name, "safetensors") or ("", 0))[0] == placed.origin.uid}
    lengths = {ref: chunk.length for ref, chunk in zip(placed.refs, placed.content.chunks, strict=True) if ref.pack in own}
    return sum(lengths.values())


def places_of(base: Manifest | None) -> Places:
    """The places of a manifest's chunks; empty for a manifest that no folder placed."""
    if base is None:
        return {}
    placed = zip(base.content.chunks, base.refs, strict=False)
    return {(chunk.digest, chunk.length): (base.packs[ref.pack], ref.offset) for chunk, ref in placed}


def readable(manifest: Manifest) -> bytes:
    """The manifest as bytes, once they were decoded again as a check: a state that cannot be read must not count as durable.

    :raises Unsupported: they could not be read again.
    """
    uid = manifest.origin.uid
    try:
        encoded = encode(manifest)
        if len(encoded) <= MAX_MANIFEST:
            decode(encoded, source=f"the manifest of state {uid}")
    except (Corrupt, TypeError, ValueError, OverflowError) as exc:
        raise Unsupported(f"state {uid} was not written, because it could not be read again: {exc}") from exc
    if len(encoded) > MAX_MANIFEST:
        raise Unsupported(
            f"state {uid} was not written: what it holds besides tensors and arrays takes {len(encoded)} bytes, and {MAX_MANIFEST} are the "
            "most that can be read again: keep large values as tensors or arrays"
        )
    return encoded
