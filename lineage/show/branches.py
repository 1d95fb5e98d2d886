"""The branches of a lineage at a glance: where each forked, how its metric went, what can be restored, what was changed for it.

What is the same for all of them costs a few queries, whatever is asked; the rest is read for the branches of one page. Summaries that
``record`` keeps (``change/segments``) stand for the states, so that none of this depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from operator import itemgetter

from datastates.lineage.endings import Ending
from datastates.lineage.states import Run, Status, Value

from .goals import Direction

__all__ = ["Branch", "Branches", "Group", "Life", "Line", "Origin", "Point", "Setting"]


class Life(StrEnum):
    """What is known of a branch's training: its process runs, or has ended; or nobody here can tell."""

    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


Living = Callable[[Run], Life]
"""Tells of a run that did not finish whether its process lives."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the metric, and the state that has it. ``value`` is None where it is NaN."""

    state: str
    step: int
    value: float | None
    status: Status


@dataclass(frozen=True, slots=True)
class Origin:
    """The state behind which a branch begins. ``branch`` is the one that captured it, as it is called now; None where none did.

    ``is_gone``: there is no such branch any more, and ``branch`` is what it was called.
    """

    state: str
    step: int
    branch: str | None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One difference of a branch's configuration from its parent's: None where one of them has no such setting."""

    key: str
    value: Value
    parent: Value


@dataclass(frozen=True, slots=True)
class Line:
    """A curve for a glance: some points of the branch's own part, the extremes among them; None is NaN."""

    steps: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch. What is counted are the states that it has to itself: those behind ``fork``, or all of a branch that did not fork.

    ``restorable`` of these can be restored, ``durable`` survive their process. ``bytes`` are those that they added. ``last``, ``best`` and
    ``best_restorable`` are of the metric that was chosen; None where no own state has a number. ``config`` is what differs between the
    configuration of its newest run and that of the run that captured its fork: of a root all of it. ``began_at`` is when its first
    own state was captured, ``changed_at`` when its newest one was; ``steps_per_s`` goes over the latest captures of its newest run.
    ``ending`` is how that run ended; None while it goes on, as far as is known.
    """

    name: str
    head: str
    step: int
    status: Status
    fork: Origin | None
    states: int
    restorable: int
    durable: int
    bytes: int
    last: Point | None
    best: Point | None
    best_restorable: Point | None
    line: Line
    config: tuple[Setting, ...]
    run: str | None
    host: str | None
    life: Life
    began_at: datetime | None
    changed_at: datetime
    took_s: float
    steps_per_s: float | None
    study: str | None = None
    variant: str | None = None
    group: Value = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Branches with one value of what they are grouped by; ``best`` is the best value that one of them reached, and its branch."""

    value: Value
    branches: int
    best: float | None
    branch: str | None


@dataclass(frozen=True, slots=True)
class Branches:
    """Some of the branches, in order. ``matching`` of ``total`` were asked for; ``next`` is the cursor of those that follow.

    ``metrics`` are those that branches have, the most relevant first; ``metric`` is the one that was chosen, and gets better in
    ``direction``. ``groups`` are there when branches are grouped, in their order.
    """

    items: tuple[Branch, ...]
    next: str | None
    total: int
    matching: int
    metric: str | None
    direction: Direction
    metrics: tuple[str, ...]
    groups: tuple[Group, ...] = field(default=())

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Branch:
        return self.items[place]

    @property
    def best(self) -> Branch | None:
        """Of these, the branch with the best value."""
        sign = 1 if self.direction is Direction.MIN else -1
        have = [(sign * item.best.value, item) for item in self.items if item.best is not None and item.best.value is not None]
        return min(have, key=itemgetter(0), default=(0.0, None))[1]
