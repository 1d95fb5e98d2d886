"""One tracker a branch in each process: a script's cell that is run again takes over from what it made the time before.

Only a tracker of this process gives way, of the same lineage and the same branch. Trainings of two processes on one branch are a conflict.
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
    """Register a training, which gives way to the next one from now on."""
    _living.add(training)


def take_over(core: Core, branch: str, check: Callable[[], object]) -> None:
    """End the trainings of this process that are on the branch; ``check`` raises before, where the new one would be refused anyway."""
    earlier = [training for training in list(_living) if training.branch == branch and training.is_living]
    earlier = [training for training in earlier if _is_same(training.core, core)]
    if earlier:
        check()
    for training in earlier:
        training.give_way()


def _is_same(one: Core, other: Core) -> bool:
    return one is other or _file(one.location) == _file(other.location) is not None


def _file(location: Location) -> object:
    """The key of a lineage, however its path is written: a copy has another key. None: somebody deleted it."""
    if location.root is None:
        return location.database_url
    try:
        found = os.stat(location.root / DATABASE)
    except OSError:
        return None
    return found.st_dev, found.st_ino
