"""The digest of a state from those of its parts (see ``digest``), for the lineage, which does not use torch."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

__all__ = ["root_digest"]

_PARTS = b"datastates parts 1\0"


def root_digest(digests: Sequence[str], parent_digests: Sequence[str] = ()) -> str:
    """The digest of a state from those of its parts, by rank, and of its parents; of a single part its own, which covers the parents."""
    if len(digests) == 1:
        return digests[0]
    hasher = blake3(_PARTS + len(digests).to_bytes(8, "little"))
    for digest in (*digests, *parent_digests):
        hasher.update(digest.encode())
    return hasher.hexdigest()
