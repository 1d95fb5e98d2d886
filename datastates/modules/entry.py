"""A state to be recorded, as the journal keeps it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from datastates.content.digest import root_digest
from datastates.content.manifest import Manifest
from datastates.lineage.change.reduction import FIRST, Reduce
from datastates.lineage.chronicle import StateLine
from datastates.lineage.states import EdgeKind, NewState, Status

__all__ = ["Entry", "lines_of"]

_UID = re.compile("[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A state to be recorded, and the tip of its line before it: its uid and digest.

    ``rank`` says whose part of several it is, ``reduce`` how the metrics of all parts are combined, ``form`` what all parts have in common;
    None: it is the whole state.
    """

    new: NewState
    before: tuple[str, str] | None
    rank: int | None = None
    reduce: Reduce = FIRST
    form: str = ""


def lines_of(manifests: Mapping[tuple[str, int], Manifest]) -> Iterable[tuple[StateLine, str | None]]:
    """Every state of which all parts are here, and its branch."""
    for (uid, rank), first in manifests.items():
        size = first.origin.world_size
        parts = [manifests[uid, each] for each in range(size) if (uid, each) in manifests] if rank == 0 else []
        if len(parts) != size or not _UID.fullmatch(uid):
            continue
        origin = first.origin
        total = sum(chunk.length for part in parts for chunk in part.content.chunks)
        line = StateLine(
            uid=uid,
            digest=root_digest([part.digest for part in parts], origin.parent_digests),
            parent=origin.parents[0] if origin.parents else None,
            edges=tuple((parent, EdgeKind.MERGE.value, 1.0) for parent in origin.parents[1:]),
            run=origin.run,
            step=origin.step,
            micro_step=origin.micro_step,
            created_at=origin.created_at_us,
            message=origin.message,
            metrics=origin.metrics,
            attributes=origin.attributes,
            status=Status.EVICTED.value,
            bytes_total=total,
            bytes_new=0,
            world_size=size,
        )
        yield line, origin.branch
