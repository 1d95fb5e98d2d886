"""What a repository that tracks owns beside itself: threads, memory, a lease, a run in the lineage; and how it is let go of."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from .capture.runner import Runner
from .errors import Unavailable
from .lease import Lease
from .lineage import runs
from .lineage.database import Database
from .store.arena import Arena
from .store.local import LocalTier
from .store.memory import MemoryTier

__all__ = ["Belongings"]

_log = logging.getLogger("datastates")


@dataclass(slots=True, eq=False)
class Belongings:
    """None of this knows the repository: it is let go of by its ``close``, or when nobody has the repository any more."""

    database: Database
    local: LocalTier
    lease: Lease
    run_uid: str
    arena: Arena
    memory: MemoryTier
    runner: Runner
    is_let_go: bool = False

    def let_go(self) -> None:
        """Make durable what is to be, end the threads, finish the run; idempotent, and goes on where it was interrupted."""
        if self.is_let_go:
            return
        try:
            self.runner.close()
            with suppress(Unavailable), self.database.write(durable=True) as session:  # else whoever opens it next finds out
                runs.finish(session, self.run_uid)
        except Exception:
            self._free()
            raise
        self._free()

    def _free(self) -> None:
        self.lease.close()
        self.memory.close()
        self.arena.close()
        self.local.close()
        self.is_let_go = True

    def end_unowned(self) -> None:
        """The repository is gone and was not closed: whoever dropped it cannot be told of an error, so the log is."""
        if self.is_let_go:
            return
        try:
            self.let_go()
        finally:
            self.database.close()
        for error in self.runner.errors():
            _log.error("a repository was dropped without close, and what was in flight failed: %s", error, exc_info=error)
