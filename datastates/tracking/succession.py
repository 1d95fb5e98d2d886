"""One tracker a branch in each process: a script's cell that is run again takes over from what it made the time before.

Only a tracker of this process gives way, of the same lineage and the same branch. Trainings of two processes on one branch are a conflict.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from datastates.opening.location import DATABASE

if TYPE_CHECKING:
    from datastates.opening.location import Location
    from datastates.repository import Repository

    from .tracker import Tracker

__all__ = ["enter", "take_over"]

_living: weakref.WeakSet[Tracker] = weakref.WeakSet()


def enter(tracker: Tracker) -> None:
    """Register a tracker, which gives way to the next one from now on."""
    _living.add(tracker)


def take_over(repository: Repository, branch: str, check: Callable[[], object]) -> None:
    """End the trackers of this process that are on the branch; ``check`` raises before, where the new one would be refused anyway."""
    earlier = [tracker for tracker in list(_living) if tracker.branch == branch and not tracker._is_ended]
    earlier = [tracker for tracker in earlier if tracker._pid == os.getpid() and _is_same(tracker._repository, repository)]
    if earlier:
        check()
    for tracker in earlier:
        tracker._give_way()


def _is_same(one: Repository, other: Repository) -> bool:
    return one is other or _file(one.location) == _file(other.location)


def _file(location: Location) -> object:
    """The key of a lineage, however its path is written: a copy has another key."""
    if location.root is None:
        return location.database_url
    found = os.stat(location.root / DATABASE)
    return found.st_dev, found.st_ino
