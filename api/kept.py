"""What is costly to read of a lineage, and may be some seconds old: it is kept, and renewed in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

from .background import SHARE, Background

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Kept"]

Found = TypeVar("Found")

_AT_ONCE_S = 0.05  # what takes no longer is read anew for each request
_OLD_S = 30.0  # nobody asked for so long: a request reads it, if that takes at most
_WAIT_S = 1.0


class Kept(Generic[Found]):
    """What ``read`` found; for ``fresh_s`` seconds it is not read again. Safe from any thread.

    What takes long takes at most ``SHARE`` of the time: a million states are counted every quarter of a minute, while somebody asks.
    """

    def __init__(
        self, name: str, reading: Callable[[], AbstractContextManager[Session]], read: Callable[[Session], Found], *, fresh_s: float = 0.0
    ) -> None:
        self._reading, self._read, self._fresh_s = reading, read, fresh_s
        self._background = Background(name)
        self._lock = threading.Lock()
        self._found: Found | None = None
        self._read_at = self._took_s = 0.0

    def of(self, session: Session) -> Found:
        """What was last found; the first caller reads it."""
        found, age_s = self._found, time.monotonic() - self._read_at
        is_old = age_s > _OLD_S and self._took_s <= _WAIT_S
        if found is None or is_old or (self._took_s <= _AT_ONCE_S and age_s >= self._fresh_s):
            with self._lock:  # callers that arrive meanwhile need not read it again
                if self._found is found:
                    self._renew(session)
                found = self._found
        elif age_s > max(self._fresh_s, self._took_s / SHARE):
            self.warm()
        assert found is not None
        return found

    def warm(self) -> None:
        """Begin to read, so that the first request waits less."""
        self._background.start("read", self._read_again)

    def close(self) -> None:
        """End the reading; idempotent."""
        self._background.close()

    def _renew(self, session: Session) -> None:
        began = time.monotonic()
        self._found = self._read(session)
        self._read_at = time.monotonic()
        self._took_s = self._read_at - began

    def _read_again(self) -> None:
        """Read again, on a thread of its own."""
        with self._lock, self._reading() as session:
            self._renew(session)
