"""Shows that a process is at work, on a separate thread, because a folder that does not answer must not stop the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from datastates.system.bell import Bell

__all__ = ["Pulse"]

_logger = logging.getLogger(__name__)


class Pulse:
    """Calls ``beat`` whenever the engine reports that it works. Safe from any thread."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._bell = beat, Bell()
        self._is_due = self._is_closed = False
        threading.Thread(target=self._run, name="datastates-beat", daemon=True).start()

    def beat(self) -> None:
        """Report that the engine works; never waits."""
        self._is_due = True
        self._bell.ring()

    def close(self) -> None:
        """End the thread, without waiting for it, as it may be held up."""
        self._is_closed = True
        self._bell.ring()

    def _run(self) -> None:
        while True:
            self._bell.wait_for(lambda: self._is_due or self._is_closed)
            if self._is_closed:
                return
            self._is_due = False
            try:
                self._beat()
            except Exception:  # the only effect is that other processes see no sign of life
                _logger.debug("the process could not say that it is at work", exc_info=True)
