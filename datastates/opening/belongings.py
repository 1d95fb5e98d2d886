"""What a tracking process owns in a repository (threads, memory, a lease, a run in the lineage), and how it is released."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from datastates.capture.host import Host
from datastates.capture.runner import Runner
from datastates.errors import Unavailable
from datastates.lineage.change import runs
from datastates.lineage.database import Database
from datastates.lineage.states import Run
from datastates.store.arena import Arena
from datastates.store.roles import CaptureTier
from datastates.store.tiers import VOLATILE, Tiers

from .chronicler import Chronicler
from .lease import Lease

__all__ = ["Belongings"]

_logger = logging.getLogger(__name__)

_FREE_S = 2.0
"""How long we wait for a lease to end in a folder that does not answer, in seconds."""


class Keeping(Protocol):
    """What applies retention in the background of this process's trainings."""

    def stop(self) -> None:
        """Start no more work, and wait for what is under way."""

    def finish(self) -> None:
        """Apply retention one last time, once captures have ended; raises nothing."""


@dataclass(slots=True, eq=False)
class Belongings:
    """What a tracking process owns. Nothing in here refers to the repository, whose ``close`` or collection releases all of it."""

    database: Database
    tiers: Tiers
    lease: Lease
    run: Run
    arena: Arena
    runner: Runner
    chronicler: Chronicler
    keeper: Keeping | None = None
    is_let_go: bool = False

    @property
    def host(self) -> Host:
        """The engine, for code that captures, merges or clones; only ``let_go`` may end it."""
        return self.runner

    @property
    def run_uid(self) -> str:
        """The uid of the run that is this process in the lineage."""
        return self.run.uid

    @property
    def memory(self) -> CaptureTier:
        """The memory tier of this process."""
        assert self.tiers.captured is not None, "it was made before this"
        return self.tiers.captured

    def let_go(self) -> None:
        """Make durable what must be, end the threads, finish the run; idempotent, and a call after an interrupt goes on where it was."""
        if self.is_let_go:
            return
        try:
            if self.keeper is not None:
                self.keeper.stop()
            with self.tiers.durable.hurrying():
                self.runner.close()
            if self.keeper is not None and not self.runner.has_given_up:
                self.keeper.finish()
            with suppress(Unavailable):  # the next process that opens the repository finds out
                self._finish()
        except Exception:  # errors of the background are raised again below; an interrupt leaves the rest for the next call
            if self.runner.has_given_up and not self.runner.is_held_up:
                with suppress(Unavailable):
                    self._finish()
            self._free()
            raise
        finally:
            self.runner.recorder.write()  # also when Ctrl-C interrupted this
        self._free()

    def _finish(self) -> None:
        """Record that the run is over. If Ctrl-C gave up states that were to be written, branches move back to what can be restored."""
        if not self.runner.has_given_up:
            with self.database.write(durable=True) as session:
                lost = runs.finish(session, self.run_uid, volatile=VOLATILE)
            for waiting in lost:
                _logger.warning("%s; the part of this process ended with its memory, so the state is given up", waiting)
            return
        with self.database.write(durable=True) as session:
            moved = runs.recover(session, [self.run_uid], volatile=VOLATILE)
        for each in moved:
            where = "nothing of it is left, so the name is free" if each.new is None else f"it is back at {each.new[:10]}"
            _logger.warning("branch %s: its newest states were given up before they were durable; %s", each.branch, where)

    def _free(self) -> None:
        self.chronicler.close(_FREE_S if self.runner.is_held_up else None)
        if self.runner.is_held_up:  # the folder does not answer: a system call there may never return
            ending = threading.Thread(target=self.lease.close, name="datastates-lease", daemon=True)
            ending.start()
            ending.join(_FREE_S)
        else:
            self.lease.close()
        self.memory.close()
        self.arena.close()
        self.tiers.close()
        self.is_let_go = True

    def end_unowned(self) -> None:
        """Release everything for a repository that was dropped without a close. Errors are logged, since no caller can get them."""
        if self.is_let_go:
            return
        try:
            self.let_go()
        finally:
            self.database.close()
        for error in self.runner.errors():
            _logger.error("a repository was dropped without close, and what was in flight failed: %s", error, exc_info=error)
