"""How many states of each stretch can be restored. Nothing signals when that changes, so it is read again from time to time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.lineage.schema import StateRow, table
from datastates.lineage.show.skeleton import Skeleton
from datastates.lineage.states import Status

from .kept import Kept

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Restorable"]

_FRESH_S = 1.0
_MOST = 200_000  # states; finding the stretches of so many takes a tenth of a second
_state = table(StateRow)
_STATUSES = [status.value for status in Status if status.is_restorable]
_IDS = select(_state.c.id).where(_state.c.status.in_(_STATUSES)).limit(_MOST + 1)


class Restorable:
    """The counts of one repository. Any thread may use it."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]]) -> None:
        self._kept = Kept("restorable", reading, lambda session: list(session.execute(_IDS).scalars()), fresh_s=_FRESH_S)
        self._lock = threading.Lock()
        self._counted: tuple[Skeleton, list[int], Mapping[int, int]] | None = None

    def by_node(self, session: Session, skeleton: Skeleton) -> Mapping[int, int] | None:
        """The count for each node of a skeleton; None if there are too many states to count within a request."""
        ids = self._kept.of(session)
        if len(ids) > _MOST:
            return None
        with self._lock:
            if self._counted is None or self._counted[0] is not skeleton or self._counted[1] is not ids:
                self._counted = skeleton, ids, Counter(map(skeleton.node, ids))
            return self._counted[2]

    def warm(self) -> None:
        """Begin to read, so that the first request waits less."""
        self._kept.warm()

    def close(self) -> None:
        """End the reading; idempotent."""
        self._kept.close()
