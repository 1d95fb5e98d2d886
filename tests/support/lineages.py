"""States for a lineage of which nobody has the bytes."""

from __future__ import annotations

from typing import Any

from datastates.lineage import NewState, StateFacts, Status


def told(
    uid: str,
    digest: str,
    parent: str | None = None,
    branch: str | None = None,
    run: str | None = None,
    step: int = 0,
    *,
    status: Status = Status.CAPTURED,
    bytes_total: int = 0,
    bytes_new: int = 0,
    tier: str = "memory",
    node: str = "",
    **facts: Any,
) -> NewState:
    """What ``record`` takes, flat."""
    return NewState(
        StateFacts(uid, parent, branch, run, step, **facts),
        digest,
        status,
        bytes_total,
        bytes_new,
        tier,
        node,
    )
