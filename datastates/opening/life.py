"""Tells whether the process of a run lives, as far as that can be known from here. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates.errors import Conflict
from datastates.lineage.change.runs import unfinished
from datastates.lineage.show.branches import Life
from datastates.lineage.states import Run

from .home import FOLDER, Home
from .lease import Seen, look
from .whereabouts import is_running

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["check_idle", "is_alive", "is_dead", "life_of"]


def is_dead(run: Run, home: Home) -> bool:
    """Whether the process of a run that did not finish has certainly ended, as far as this folder is concerned.

    A free lease proves it, whatever host wrote it, unless the kernel sees the process running. A copy of a lease proves it if the lineage
    was copied with it: that process writes to the original. A missing lease proves nothing; then only the kernel can tell, if the process
    ran where this one can see it.
    """
    folder = run.config.get(FOLDER)
    if folder is not None and folder != home.uid:
        return False
    seen = look(home.path, run.process or run.uid)
    if seen is Seen.HELD:
        return False
    if seen is Seen.COPY and home.is_beside:
        return True
    running = is_running(run)
    if seen is Seen.FREE:
        return running is not True
    return running is False and folder is not None


def is_alive(run: Run, home: Home) -> bool:
    """Whether the process of a run is seen to live. A process that is neither alive nor dead is unknown."""
    if run.finished_at is not None or is_dead(run, home):
        return False
    return look(home.path, run.process or run.uid) is Seen.HELD or is_running(run) is True


def life_of(run: Run, home: Home) -> Life:
    """What is known of a run's process."""
    if run.is_imported and run.finished_at is None:
        return Life.UNKNOWN
    if run.finished_at is not None or is_dead(run, home):
        return Life.ENDED
    return Life.RUNNING if is_alive(run, home) else Life.UNKNOWN


def check_idle(session: Session, branch: str, home: Home) -> None:
    """Raise if a training may still move a branch.

    :raises Conflict: the process of one is alive, or nothing can be found out about it; the error names the process.
    """
    for run in unfinished(session, branch):
        if life_of(run, home) is not Life.ENDED:
            raise Conflict(f"branch {branch!r} has a training: process {run.pid} on {run.host}, as far as known; end it, then try again")
