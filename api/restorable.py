"""How many states of each stretch can be restored. Nothing signals when that changes, so it is read again from time to time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.lineage.schema import StateRow, table
from datastates.lineage.show.skeleton import Skeleton
from datastates.lineage.states import Status

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Restorable"]

_SHARE = 0.05
_LEAST_S = 1.0
_MOST = 200_000  # states; finding the stretches of so many takes a tenth of a second
_state = table(StateRow)
_STATUSES = [status.value for status in Status if status.is_restorable]
_IDS = select(_state.c.id).where(_state.c.status.in_(_STATUSES)).limit(_MOST + 1)


class Restorable:
    """The counts of one repository. Reading takes at most ``_SHARE`` of the time. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._read_at = self._took_s = 0.0
        self._counted: tuple[Skeleton, list[int], Mapping[int, int]] | None = None

    def by_node(self, session: Session, skeleton: Skeleton) -> Mapping[int, int] | None:
        """The count for each node of a skeleton; None if there are too many states to count within a request."""
        with self._lock:
            now = time.monotonic()
            if not self._read_at or now - self._read_at > max(_LEAST_S, self._took_s / _SHARE):
                self._ids = list(session.execute(_IDS).scalars())
                self._read_at = time.monotonic()
                self._took_s = self._read_at - now
            ids = self._ids
            if len(ids) > _MOST:
                return None
            if self._counted is None or self._counted[0] is not skeleton or self._counted[1] is not ids:
                self._counted = skeleton, ids, Counter(map(skeleton.node, ids))
            return self._counted[2]
