"""Captures whole trees that other code makes: what the checkpoint functions of other libraries save
becomes the next state of a branch.

A save restores no object, and copies everything before it returns. If another process or a user
moved the branch meanwhile, it is tracked again: the parent of the next state is the branch's head
at that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from datastates.engine.handle import Capture
from datastates.errors import Conflict, DatastatesError, NotFound
from datastates.lineage.query import names
from datastates.lineage.states import SAVES, State
from datastates.maintenance.core import Core
from datastates.system.interrupts import Mutex
from datastates.values import Value

from .start import Terms, begin_tracking, check_origin
from .tracker import Tracker

_TRIES = 50
"""How many times another process may move the branch first before we give up."""

_saving = Mutex()


@dataclass(frozen=True, slots=True)
class About:
    """The facts recorded with a state; see ``Tracker.capture``.

    ``step`` None: one more than the step of the branch."""

    step: int | None = None
    metrics: Mapping[str, float] | None = None
    message: str | None = None
    attributes: Mapping[str, Value] | None = None


def save_tree(
    core: Core,
    tree: Mapping[str, object],
    about: About,
    *,
    branch: str,
    start: str | None,
    until: str = "durable",
) -> State:
    """Make ``tree`` the next state of a branch, and wait until it has reached the status ``until``.
    Callable from any thread.

    ``start`` is the state from which a new branch forks.

    :raises Unsupported: the tree holds something that no state can; names its path.
    """
    tries = 0
    while True:
        tries += 1
        with _saving:
            tracker = _tracker(core, branch, start)
            try:
                taken = _capture(tracker, tree, about)
                taken.wait()  # recorded: the next save starts from the new head
                break
            except Conflict:  # another process was first
                _forget(core, branch)
                if tries == _TRIES:
                    raise
    return taken.wait(until)


def _capture(tracker: Tracker, tree: Mapping[str, object], about: About) -> Capture:
    training = tracker.training
    tracker.values, before = dict(tree), training.step
    try:
        return tracker.capture(
            step=about.step,
            metrics=about.metrics,
            message=about.message,
            attributes=about.attributes,
        )
    except BaseException:
        training.step = before  # nothing was saved
        raise
    finally:
        tracker.values = {}
        training.forget_layout()  # the layout would keep the captured tensors alive


def _tracker(core: Core, branch: str, start: str | None) -> Tracker:
    """The tracker of this branch through which trees are saved."""
    found = core.savers.get(branch)
    if start is not None:
        check_origin(core, branch, start, resume=True)
    if isinstance(found, Tracker) and found.training.is_living and _stands(core, found):
        return found
    terms = Terms(
        branch=branch,
        start=start,
        resume=True,
        only=None,
        strict=True,
        gradients=False,
        defer=False,
        cadence=core.config.cadence_with(None),
        back_pressure=core.config.back_pressure,
        on_failure=core.config.on_failure,
        config={SAVES: True},
        restores=False,
    )
    _forget(core, branch)
    tracker = core.savers[branch] = begin_tracking(core, {}, {}, terms)
    return tracker


def _stands(core: Core, tracker: Tracker) -> bool:
    """Whether the head of the branch is still the tracker's last state."""
    tip = tracker.training.line.tip
    try:
        with core.reading() as session:
            return names.get(session, tracker.branch).state == (tip and tip[0])
    except NotFound:
        return tip is None


def _forget(core: Core, branch: str) -> None:
    found = core.savers.pop(branch, None)
    if found is not None:
        with suppress(DatastatesError):  # the caller that saved got the error
            found.close()
