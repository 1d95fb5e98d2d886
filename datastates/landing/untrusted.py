"""A manifest from a peer, who may send anything: checked whole before memory is taken for it or addressed by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from datastates.check import check, tensors_of
from datastates.digest import state_digest
from datastates.errors import Corrupt, DatastatesError, PeerFault
from datastates.geometry import dtype_of
from datastates.manifest import VERSION, Manifest, TensorSpec
from datastates.tree import Skeleton, decode_skeleton, decode_values

__all__ = ["Parts", "check_manifest", "distrusting"]

_SOURCE = "the manifest that the peer sent"

_SPARE_BYTES = 1 << 30
_SPARE_TIMES = 64
"""Tied and expanded tensors may come to so much more than the bytes that are stored: a copy of each is made where nothing ties them."""

_FOREIGN = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a manifest says, decoded."""

    specs: tuple[TensorSpec, ...]
    skeleton: Skeleton
    values: list[Any]


def check_manifest(manifest: Manifest) -> Parts:
    """The parts of a manifest that can be relied on: every tensor lies inside the stream, apart from others, under one path.

    :raises Corrupt: it contradicts itself.
    :raises PeerFault: it asks for far more memory than it brings bytes, or is one part of a state of several ranks.
    :raises Unavailable: it has a dtype, or is of a version, that is not known here.
    """
    with distrusting():
        if manifest.version != VERSION:
            raise PeerFault(f"{_SOURCE} is of version {manifest.version}, this datastates reads version {VERSION}: upgrade it")
        if manifest.digest != state_digest(manifest.content, manifest.origin.parent_digests):
            raise Corrupt(f"{_SOURCE} claims the digest {manifest.digest[:64]!r}, and its content has another")
        check(manifest, _SOURCE)
        if manifest.origin.world_size != 1:
            raise PeerFault(f"{_SOURCE} is one of {manifest.origin.world_size} ranks' parts of a state: only whole states are cloned")
        specs = tensors_of(manifest.content, source=_SOURCE)
        skeleton = decode_skeleton(manifest.content.skeleton, source=_SOURCE)
        _check_paths(specs, skeleton)
        _check_shards(specs)
        _check_expansion(manifest, specs)
        return Parts(specs, skeleton, decode_values(manifest.content.values, source=_SOURCE))


@contextmanager
def distrusting() -> Iterator[None]:
    """What a peer's bytes make our own code raise is the peer's fault.

    :raises Corrupt: instead of anything that is no error of our tree.
    """
    try:
        yield
    except DatastatesError:
        raise
    except _FOREIGN as exc:
        raise Corrupt(f"{_SOURCE} does not make a state ({type(exc).__name__}: {str(exc)[:200]})") from exc


def _check_paths(specs: Sequence[TensorSpec], skeleton: Skeleton) -> None:
    if tuple(spec.path for spec in specs) != skeleton.paths:
        raise Corrupt(f"{_SOURCE} lists {len(specs)} tensors under other paths than the {len(skeleton.paths)} of its tree")


def _check_shards(specs: Sequence[TensorSpec]) -> None:
    """Each tensor is one stretch of the stream, and none lies over another."""
    stretches = []
    for spec in specs:
        if spec.alias is not None:
            continue
        if len(spec.shards) != 1 or any(spec.shards[0].offset) or spec.shards[0].shape != spec.shape:
            raise Corrupt(f"{_SOURCE} has {spec.path[:200]} in {len(spec.shards)} shards, which are not the whole tensor")
        if spec.shards[0].length:
            stretches.append((spec.shards[0].start, spec.shards[0].length))
    stretches.sort()
    for (start, length), (following, _) in pairwise(stretches):
        if start + length > following:
            raise Corrupt(f"{_SOURCE} has two tensors over the same bytes, at {following}")


def _check_expansion(manifest: Manifest, specs: Sequence[TensorSpec]) -> None:
    stored = sum(chunk.length for chunk in manifest.content.chunks)
    whole = sum(dtype_of(spec.dtype).itemsize * prod(spec.shape) for spec in specs)
    if whole > _SPARE_TIMES * stored + _SPARE_BYTES:
        raise PeerFault(f"{_SOURCE} makes tensors of {whole} bytes out of {stored}: it is refused as a trap")
