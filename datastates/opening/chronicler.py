"""The thread that keeps the chronicle of a lineage while a process captures: at most ten seconds late, and captures never wait for it."""

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
"""The pause between two pages of a lineage that has no chronicle yet, in seconds: a million states take a quarter of an hour, and no
training notices."""

_LAST_PAGES = 5
_MOST_S = 10.0


def tell_now(database: Database, packs: Path) -> None:
    """Bring the chronicle up to date after changes without captures, if the folder has chronicles. Errors are ignored: it can wait."""
    if (packs / CHRONICLES).is_dir():
        with suppress(DatastatesError, OSError):
            catch_up(database, packs, pages=_LAST_PAGES)


class Chronicler:
    """Keeps the chronicle from now on; ``close`` writes what is left, up to five pages. It has no reference to a repository."""

    def __init__(self, database: Database, packs: Path) -> None:
        self._database, self._packs = database, packs
        self._ends = Latch()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="datastates-chronicle", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread once it has written what is new. If the folder stalls, wait for ``timeout_s`` (None: ten seconds) at most."""
        self._ends.set()
        self._thread.join(_MOST_S if timeout_s is None else timeout_s)

    def _run(self) -> None:
        while not self._ends.is_set():
            is_all = self._tell(1)
            self._ends.wait(_EVERY_S if is_all else _PAUSE_S)
        self._tell(_LAST_PAGES)

    def _tell(self, pages: int) -> bool:
        """Write up to ``pages`` frames; returns whether nothing is left that could be written now."""
        try:
            return catch_up(self._database, self._packs, pages=pages)
        except (DatastatesError, OSError) as exc:
            if str(exc) != self._said:  # log each trouble once
                self._said = str(exc)
                _logger.log(logging.WARNING if isinstance(exc, Conflict) else logging.INFO, "the chronicle waits: %s", exc)
            return True
        except Exception:  # a defect of ours here must not end a training
            _logger.exception("the chronicle is not kept")
            return True
