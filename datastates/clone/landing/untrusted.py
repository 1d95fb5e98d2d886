"""A manifest from a peer, which may be anything: checked whole before memory is taken for it or addressed by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from math import prod
from typing import Any

from datastates.content.arrays import MAX_DEPTH
from datastates.content.check import tensors_of
from datastates.content.digest import Sound, decode_sound
from datastates.content.encoding import Packed
from datastates.content.envelope import body_of
from datastates.content.geometry import dtype_of
from datastates.content.manifest import Content, Manifest, TensorSpec
from datastates.content.parts import join
from datastates.content.skeleton import TENSOR, VALUE, path_lengths, paths
from datastates.content.tree import Skeleton, decode_skeleton, decode_values
from datastates.errors import Corrupt, DatastatesError, PeerFault
from datastates.transport.limits import weigh

__all__ = ["CheckedManifest", "check_manifest", "distrusting", "join_parts", "read_manifest", "read_part"]

_SOURCE = "the manifest that the peer sent"

_SPARE_BYTES = 1 << 30
_SPARE_TIMES = 64
"""How many times the stored bytes tied and expanded tensors may come to, because each is copied if nothing ties them."""

_SPARE_CHARACTERS = 16 << 20
_INDEX_CHARACTERS = 4

_DECODED_BYTES = 1 << 30

_FOREIGN = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedManifest:
    """A manifest from outside that can be relied on, and its decoded parts: every tensor lies inside the stream, apart from others, under
    one path. Only ``read_manifest``, ``check_manifest`` and ``join_parts`` make one, so that a function that is given one checks nothing
    again. ``parts`` are the manifests, by rank, from which a state of several ranks was joined.
    """

    manifest: Manifest
    specs: tuple[TensorSpec, ...]
    skeleton: Skeleton
    values: list[Any]
    parts: tuple[Manifest, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each chunk."""
        return tuple(chunk.length for chunk in self.manifest.content.chunks)


def read_manifest(raw: bytes | memoryview, *, source: str) -> CheckedManifest:
    """The manifest in what a peer sent; errors name its ``source``.

    :raises Corrupt: a byte is wrong or missing, or it contradicts itself.
    :raises PeerFault: as ``check_manifest``.
    :raises Unavailable: it has a dtype, or a version, that is not known here.
    """
    return check_manifest(_sound(raw, source))


def check_manifest(sound: Sound) -> CheckedManifest:
    """Check what a consistent manifest must also fulfil if others have made it.

    :raises Corrupt: its tensors overlap, or its tree has other tensors.
    :raises PeerFault: it asks for far more memory than it brings bytes, or is one part of a state of several ranks.
    """
    with distrusting():
        if sound.manifest.origin.world_size != 1:
            raise PeerFault(f"{_SOURCE} is one of {sound.manifest.origin.world_size} ranks' parts of a state where a whole one belongs")
        return _checked(sound.manifest, sound.specs)


def read_part(raw: bytes | memoryview, uid: str, rank: int, size: int, *, source: str) -> Manifest:
    """The manifest of one rank's part of a state of ``size`` parts, in what a peer sent.

    :raises Corrupt: as ``read_manifest``.
    :raises PeerFault: it is that of another part, or of another state.
    """
    manifest = _sound(raw, source).manifest
    origin = manifest.origin
    if (origin.uid, origin.rank, origin.world_size) != (uid, rank, size):
        found = f"rank {origin.rank} of {origin.world_size} of state {origin.uid[:10]}"
        raise PeerFault(f"{source} is of {found}, where rank {rank} of {size} of {uid[:10]} was asked for")
    return manifest


def _sound(raw: bytes | memoryview, source: str) -> Sound:
    if weigh(body_of(raw), _DECODED_BYTES) > _DECODED_BYTES:
        raise PeerFault(f"{source} takes more than {_DECODED_BYTES} bytes of memory once it is decoded: it is refused as a trap")
    return decode_sound(raw, source=source)


def join_parts(parts: Sequence[Manifest], *, rank: int = 0) -> CheckedManifest:
    """The whole state, from the manifests of all its parts by rank, as ``read_part`` returned them. Values are those of ``rank``.

    :raises Corrupt: they are not the parts of one state, or do not make a state together.
    :raises PeerFault: as ``check_manifest``.
    """
    with distrusting():
        joined = join(parts, rank=rank)
        specs = tuple(tensors_of(joined.content))
        return replace(_checked(joined, specs), parts=tuple(parts))


def _checked(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> CheckedManifest:
    skeleton = decode_skeleton(manifest.content.skeleton, source=_SOURCE)
    values = decode_values(manifest.content.values, source=_SOURCE)
    _check_spread(manifest.content, skeleton, values)
    _check_paths(specs, skeleton)
    _check_shards(specs)
    _check_expansion(manifest, specs)
    return CheckedManifest(manifest, specs, skeleton, values)


@contextmanager
def distrusting() -> Iterator[None]:
    """Blame the peer for errors that its bytes cause in our own code.

    :raises Corrupt: instead of any error that is not one of our own classes.
    """
    try:
        yield
    except DatastatesError:
        raise
    except _FOREIGN as exc:
        raise Corrupt(f"{_SOURCE} does not make a state ({type(exc).__name__}: {str(exc)[:200]})") from exc


def _check_paths(specs: Sequence[TensorSpec], skeleton: Skeleton) -> None:
    """Check one path at a time: all of them may take a thousand times the bytes of the manifest, of which the specs are part."""
    tensors = (path for path, node in zip(paths(skeleton.nodes), skeleton.nodes, strict=False) if node == TENSOR)
    for number, (spec, path) in enumerate(zip_longest(specs, tensors)):
        if spec is None or spec.path != path:
            raise Corrupt(f"{_SOURCE} lists {len(specs)} tensors under other paths than its tree, which has another one at {number}")


def _check_spread(content: Content, skeleton: Skeleton, values: Sequence[Packed]) -> None:
    """Bound the work for paths: each leaf names its path, and a key of a dict is in the path of everything below it."""
    most = _SPARE_CHARACTERS + _SPARE_TIMES * (len(bytes(content.skeleton)) + len(bytes(content.values)))
    total, following = 0, iter(values)
    for node, length in zip(skeleton.nodes, path_lengths(skeleton.nodes), strict=False):
        total += _spread(next(following, None), length) if node == VALUE else length
        if total > most:
            raise PeerFault(f"{_SOURCE} has leaves whose names take more than {most} characters: it is refused as a trap")


def _spread(packed: Packed, length: int, depth: int = 0) -> int:
    """The approximate number of characters in the paths of everything that a value holds."""
    match packed:
        case list() if depth > MAX_DEPTH:
            raise Corrupt(f"{_SOURCE} has a value that is nested more than {MAX_DEPTH} deep")
        case ["list" | "tuple", [*items]] | ["deque", _, [*items]]:
            return length + sum(_spread(item, length + 1 + _INDEX_CHARACTERS, depth + 1) for item in items)
        case ["dict" | "odict" | "counter", [*keys], [*items]]:
            pairs = zip(keys, items, strict=False)
            return length + sum(_spread(item, length + 1 + _width(key), depth + 1) for key, item in pairs)
        case _:
            return length


def _width(key: Packed) -> int:
    """At least the number of characters that a key takes in a path."""
    return len(key) if isinstance(key, str) else len(str(key))


def _check_shards(specs: Sequence[TensorSpec]) -> None:
    """Check that no shard overlaps another in the stream. ``check`` has already found that the shards of a tensor make it up."""
    stretches = [(shard.start, shard.length) for spec in specs for shard in spec.shards if shard.length]
    stretches.sort()
    for (start, length), (following, _) in pairwise(stretches):
        if start + length > following:
            raise Corrupt(f"{_SOURCE} has two tensors, or shards of one, over the same bytes, at {following}")


def _check_expansion(manifest: Manifest, specs: Sequence[TensorSpec]) -> None:
    stored = sum(chunk.length for chunk in manifest.content.chunks)
    whole = sum(dtype_of(spec.dtype).itemsize * prod(spec.shape) for spec in specs)
    if whole > _SPARE_TIMES * stored + _SPARE_BYTES:
        raise PeerFault(f"{_SOURCE} makes tensors of {whole} bytes out of {stored}: it is refused as a trap")
