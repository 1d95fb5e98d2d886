"""Each branch has one tracker: a notebook cell that is run again takes over from the tracker that it made before.

Only a tracker of the same process, lineage and branch gives way. While a tracker of another living process holds the branch, ``track``
raises Conflict, or takes the branch over with ``takeover=True``. A training holds its branch from ``track`` until its tracker is closed or
collected, or its process ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from datastates.errors import Conflict
from datastates.lineage.change import refs, runs, segments
from datastates.lineage.states import SAVES, TAKEN, Run, State
from datastates.opening.core import Core
from datastates.opening.life import is_alive
from datastates.opening.location import DATABASE, Location
from datastates.opening.whereabouts import PROCESS, whereabouts

from .training import Training

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["claim", "enter", "holders", "take_over"]

_living: weakref.WeakSet[Training] = weakref.WeakSet()


def enter(training: Training) -> None:
    """Register a training; from now on it gives way to the next one on its branch."""
    _living.add(training)


def take_over(core: Core, branch: str, check: Callable[[], object]) -> None:
    """End the trainings of this process on the branch. ``check`` is called first, and raises if the new training would be refused."""
    earlier = [training for training in list(_living) if training.branch == branch and training.is_living]
    earlier = [training for training in earlier if _is_same(training.core, core)]
    if earlier:
        check()
    for training in earlier:
        training.give_way()


def claim(session: Session, training: Training, begin: State | None, *, takeover: bool, is_taken: bool) -> None:
    """Take the branch, in the transaction that begins a training. The trainings of other processes that hold it end there, and with
    ``is_taken`` the branch goes back to the state ``begin``.

    :raises Conflict: one holds it, and ``takeover`` is False.
    """
    branch, by = training.branch, f"process {training.run.pid} on {training.run.host}"
    segments.lock(session)  # of two that begin at once, the later one sees the other
    for other in holders(training.core, session, branch, takeover=takeover):
        runs.note(session, other.uid, {TAKEN: by})  # ``record`` refuses what it captures on the branch from now on
        runs.finish(session, other.uid)
    if is_taken and begin is None:
        refs.delete(session, branch, reason=f"takeover: by {by}, none of its states can be restored there")
    elif is_taken and begin is not None:
        refs.move(session, branch, begin.uid, expected=refs.get(session, branch).state, reason=f"takeover: by {by}")


def holders(core: Core, session: Session, branch: str, *, takeover: bool) -> list[Run]:
    """The trainings of other living processes that hold a branch, each by its rank 0.

    A process on another host that has another folder of packs is left out: its lease cannot be seen from here.

    :raises Conflict: there is one, and ``takeover`` is False.
    """
    here = core.node, os.getpid(), whereabouts().get(PROCESS)
    others = [run for run in runs.unfinished(session, branch) if (run.host, run.pid, run.config.get(PROCESS)) != here]
    firsts = [run for run in others if not run.config.get(runs.RANK) and SAVES not in run.config]
    held = [run for run in firsts if is_alive(run, core.home)]
    if held and not takeover:
        raise Conflict(
            f"branch {branch!r} is held by process {held[0].pid} on {held[0].host} since {held[0].started_at:%Y-%m-%d %H:%M:%S} UTC:"
            " end that process, track a branch of another name, or take this one over with track(..., takeover=True)"
        )
    return held


def _is_same(one: Core, other: Core) -> bool:
    return one is other or _file(one.location) == _file(other.location) is not None


def _file(location: Location) -> object:
    """The key of a lineage, however its path is written; a copy has another key. None if the lineage's file was deleted."""
    if location.root is None:
        return location.database_url
    try:
        found = os.stat(location.root / DATABASE)
    except OSError:
        return None
    return found.st_dev, found.st_ino
