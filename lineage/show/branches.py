"""A summary of each branch: where it forked, how its metric went, what can be restored, what was changed for it.

What is the same for all of them costs a few queries, whatever is asked; the rest is read for the branches of one page. The summaries that
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
    """What is known of a branch's training: its process runs, or has ended; or it cannot be told here."""

    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


Living = Callable[[Run], Life]
"""Tells whether the process of a run that did not finish is alive."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the metric, and the state that has it. ``value`` is None where it is NaN."""

    state: str
    step: int
    value: float | None
    status: Status


@dataclass(frozen=True, slots=True)
class Origin:
    """The state after which a branch begins. ``branch`` captured it, by its present name; None if no branch did.

    ``is_gone``: that branch no longer exists, and ``branch`` is the name that it had.
    """

    state: str
    step: int
    branch: str | None
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One difference between the configurations of a branch and of its parent: None where one of them lacks the setting."""

    key: str
    value: Value
    parent: Value


@dataclass(frozen=True, slots=True)
class Line:
    """A small curve: some points of the branch's own part, the extremes among them; None is NaN."""

    steps: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch. Counts are of the states that it has to itself: those after ``fork``, or all states of a branch that did not fork.

    ``restorable`` of these can be restored, ``durable`` survive their process. ``bytes`` are those that they added. ``last``, ``best`` and
    ``best_restorable`` are of the chosen metric; None if none of its own states has a number. A branch without own states has ``last``,
    ``best`` and ``line`` of its whole path of first parents. ``config`` is the difference between the
    configuration of its newest run and that of the run that captured its fork; for a root it is all of the configuration. ``began_at`` is
    when its first own state was captured, ``changed_at`` when its newest one was; ``steps_per_s`` is measured over the latest captures of
    its newest run. ``ending`` says how that run ended; None while it goes on, as far as is known.
    ``lost_step`` is the newest step that was lost with a process that died: the branch went back from there.
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
    lost_step: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Branches with the same value of what they are grouped by; ``best`` is the best value among them, with its branch."""

    value: Value
    branches: int
    best: float | None
    branch: str | None


@dataclass(frozen=True, slots=True)
class Branches:
    """Some of the branches, in order. ``matching`` out of ``total`` match the request; ``next`` is the cursor for those that follow.

    ``metrics`` are those that branches have, the most relevant first; ``metric`` is the chosen one, which gets better in ``direction``.
    ``groups`` are set when branches are grouped, in their order.
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
        """The branch among these with the best value."""
        sign = 1 if self.direction is Direction.MIN else -1
        have = [(sign * item.best.value, item) for item in self.items if item.best is not None and item.best.value is not None]
        return min(have, key=itemgetter(0), default=(0.0, None))[1]
