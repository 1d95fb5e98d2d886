"""The thread that keeps the chronicle of a lineage while a process captures: late by ten seconds at most, and never waited for."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from datastates.errors import Conflict, DatastatesError
from datastates.lineage.database import Database
from datastates.system.bell import Latch

from .chronicle import CHRONICLES, catch_up

__all__ = ["Chronicler", "tell_now"]

_logger = logging.getLogger(__name__)

_EVERY_S = 10.0
_PAUSE_S = 1.0
"""Between two pages of a lineage that was never told: a million states take a quarter of an hour, and no training notices."""

_LAST_PAGES = 5
_MOST_S = 10.0


def tell_now(database: Database, packs: Path) -> None:
    """Tell a folder that is told anything at all what is new, where nothing was captured; what hinders that can wait."""
    if (packs / CHRONICLES).is_dir():
        with suppress(DatastatesError, OSError):
            catch_up(database, packs, pages=_LAST_PAGES)


class Chronicler:
    """Begins at once; ``close`` tells what is left, as far as that is little. It knows no repository."""

    def __init__(self, database: Database, packs: Path) -> None:
        self._database, self._packs = database, packs
        self._ends = Latch()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="datastates-chronicle", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread once it has told what is new; a folder that stalls is waited for as long (None: ten seconds), and no longer."""
        self._ends.set()
        self._thread.join(_MOST_S if timeout_s is None else timeout_s)

    def _run(self) -> None:
        while not self._ends.is_set():
            is_all = self._tell(1)
            self._ends.wait(_EVERY_S if is_all else _PAUSE_S)
        self._tell(_LAST_PAGES)

    def _tell(self, pages: int) -> bool:
        """Whether there is nothing left that could be told now."""
        try:
            return catch_up(self._database, self._packs, pages=pages)
        except (DatastatesError, OSError) as exc:
            if str(exc) != self._said:  # once for each trouble
                self._said = str(exc)
                _logger.log(logging.WARNING if isinstance(exc, Conflict) else logging.INFO, "the chronicle waits: %s", exc)
            return True
        except Exception:  # a defect of ours here is no reason to end a training
            _logger.exception("the chronicle is not kept")
            return True
