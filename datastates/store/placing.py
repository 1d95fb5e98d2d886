"""Decides, before any file is touched, which chunks a put of one or several states writes, and to which it refers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from datastates.content.digest import chunk_digest, decode_sound, encode_all
from datastates.content.manifest import LARGE_BYTES, ChunkRef, Manifest, PackInfo
from datastates.errors import Corrupt, Unsupported

from .naming import MAX_MANIFEST
from .pack import PackLayout, lay_out

__all__ = ["Places", "PutPlan", "places_of", "plan_put", "readable"]

_Key = tuple[bytes, int]
"""A chunk's digest and length."""

Places = Mapping[_Key, tuple[PackInfo, int]]
"""The pack and the offset of each chunk, by its digest and length."""


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A put of the chunks ``new`` into the pack ``name``; ``layout`` is None if nothing is new, so that there is no pack.

    ``new`` are in the order of the pack: the index of the state, and of the chunk in it. ``manifests`` are those to write, with the place
    of every chunk; ``borrowed`` are the older packs to which they refer.
    """

    manifests: tuple[Manifest, ...]
    name: str
    new: tuple[tuple[int, int], ...]
    layout: PackLayout | None
    borrowed: tuple[PackInfo, ...]


def plan_put(
    manifests: Sequence[Manifest],
    places: Sequence[Places],
    name: str,
    are_equal: Callable[[tuple[int, int], tuple[int, int]], bool] = lambda one, other: True,
) -> PutPlan:
    """The plan of a put. Each state refers to its chunks that have one of ``places``, and to equal ones that came earlier in this put.

    ``are_equal`` compares the bytes of two chunks of two states whose digests are equal.
    """
    first: dict[_Key, list[tuple[int, int]]] = {}
    twin: dict[tuple[int, int], tuple[int, int]] = {}
    for state, manifest in enumerate(manifests):
        for index, chunk in enumerate(manifest.content.chunks):
            key, mine = (chunk.digest, chunk.length), (state, index)
            if key in places[state]:
                continue
            others = first.setdefault(key, [])
            twin[mine] = next((each for each in others if each[0] == state or are_equal(each, mine)), mine)
            if twin[mine] == mine:
                others.append(mine)
    new = [mine for mine, other in twin.items() if mine == other]
    new.sort(key=lambda mine: _length(manifests, mine) < LARGE_BYTES)
    layout = lay_out(manifests, new) if new else None
    own: dict[tuple[int, int], tuple[PackInfo, int]] = {}
    if layout is not None:
        info = PackInfo(name, layout.size, len(layout.header), chunk_digest(layout.header))
        own = {mine: (info, offset) for mine, offset in zip(new, layout.offsets, strict=True)}
    placed, borrowed = list[Manifest](), dict[PackInfo, None]()
    for state, manifest in enumerate(manifests):
        added = sum(_length(manifests, mine) for mine, other in twin.items() if mine == other and mine[0] == state)
        packs: dict[PackInfo, int] = {own[new[0]][0]: 0} if added else {}
        refs = []
        for index, chunk in enumerate(manifest.content.chunks):
            mine = state, index
            pack, offset = own[twin[mine]] if mine in twin else places[state][chunk.digest, chunk.length]
            if mine not in twin:
                borrowed[pack] = None
            refs.append(ChunkRef(packs.setdefault(pack, len(packs)), offset, chunk.length))
        placed.append(msgspec.structs.replace(manifest, packs=tuple(packs), refs=tuple(refs), bytes_new=added))
    return PutPlan(tuple(placed), name, tuple(new), layout, tuple(borrowed))


def _length(manifests: Sequence[Manifest], mine: tuple[int, int]) -> int:
    return manifests[mine[0]].content.chunks[mine[1]].length


def places_of(base: Manifest | None) -> Places:
    """The places of a manifest's chunks; empty for a manifest that no folder placed."""
    if base is None:
        return {}
    placed = zip(base.content.chunks, base.refs, strict=False)
    return {(chunk.digest, chunk.length): (base.packs[ref.pack], ref.offset) for chunk, ref in placed}


def readable(manifests: Sequence[Manifest]) -> list[bytes]:
    """The frames of a file with these manifests, once they were decoded again: a state that cannot be read must not count as durable.

    :raises Unsupported: one could not be read again.
    """
    uid = manifests[0].origin.uid
    try:
        encoded = encode_all(manifests)
        size = sum(map(len, encoded))
        for manifest, frame in zip(manifests, encoded if size <= MAX_MANIFEST else (), strict=False):
            uid = manifest.origin.uid
            decode_sound(frame, source=f"the manifest of state {uid}", first=encoded[0])
    except (Corrupt, TypeError, ValueError, OverflowError) as exc:
        raise Unsupported(f"state {uid} was not written, because it could not be read again: {exc}") from exc
    if size > MAX_MANIFEST:
        raise Unsupported(
            f"state {uid} was not written: what it holds besides tensors and arrays takes {size} bytes, and {MAX_MANIFEST} are the "
            "most that can be read again: keep large values as tensors or arrays"
        )
    return encoded
