"""Each process has one tracker for each branch: a notebook cell that is run again takes over from the tracker that it made before.

Only a tracker of the same process, lineage and branch gives way. Trainings of two processes on one branch are a conflict.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from datastates.opening.core import Core
from datastates.opening.location import DATABASE, Location

from .training import Training

__all__ = ["enter", "take_over"]

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
