"""The handle that ``run.capture`` returns at once, with which a caller waits for a status of its state, and how the engine advances it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

from datastates.errors import InvalidInput, ModuleFailed, Unavailable
from datastates.lineage.states import State, Status
from datastates.system.bell import Bell
from datastates.values import optional, seconds, string, takes

__all__ = ["Capture", "Progress"]

_RANK = {Status.CAPTURED: 0, Status.DURABLE: 1, Status.REPLICATED: 2, Status.EXTERNAL: 3}

SAY_AGAIN_S = 1.0
"""How often a waiting caller repeats that it waits, in seconds."""


class Progress:
    """How far a capture has come. The engine updates it, from any thread, and wakes callers that wait on the ``Capture``."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.is_skipped = False
        self.why_skipped: str | None = None
        self.state: State | None = None
        self.error: BaseException | None = None
        self.module_error: ModuleFailed | None = None
        self.given_up: str | None = None
        self.held_up: Unavailable | None = None
        self.changed = Bell()
        self.asked: weakref.ref[Capture] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a caller waited for the state to become durable, and still has the handle."""
        return self.asked is not None and self.asked() is not None

    def advance(self, state: State) -> None:
        """Note that the state is recorded, or has reached a later status."""
        self.state, self.held_up = state, None
        self.changed.ring()

    def fail(self, error: BaseException) -> None:
        """Note that the background failed: callers that wait for a later status get this error."""
        self.error = error
        self.changed.ring()

    def note(self, error: ModuleFailed) -> None:
        """Note that a user's module failed, which does not hold the state up. The first such error is kept."""
        self.module_error = self.module_error or error

    def hold_up(self, why: Unavailable) -> None:
        """Note that the capture cannot go on for now: waiting callers get this error, and may wait again."""
        self.held_up = why
        self.changed.ring()

    def skip(self, why: str | None = None) -> None:
        """Note that there was no room, so the capture will have no state. ``why`` says why, unless the back-pressure was ``skip``."""
        self.is_skipped, self.why_skipped = True, why
        self.changed.ring()

    def give_up(self, why: str) -> None:
        """Note that the state's bytes left memory before they were on disk. The first reason is kept, since it is the one that helps."""
        self.given_up = self.given_up or why
        self.changed.ring()


class Capture:
    """A capture under way. Any thread may read it and wait on it; the engine advances it.

    ``uid`` names the state from the start, and ``step`` is the step of the training. ``is_skipped`` is true when there was no
    room and the back-pressure was ``skip``, or nothing could be written to make room: such a capture has no state.
    """

    def __init__(
        self,
        progress: Progress,
        step: int,
        *,
        want: Callable[[str], None],
        hurry: Callable[[], None],
        trouble: Callable[[], str | None] = lambda: None,
        missing: Callable[[str], str | None] = lambda uid: None,
        check: Callable[[Status], None] = lambda goal: None,
    ) -> None:
        self.uid, self.step = progress.uid, step
        self._progress, self._want, self._hurry, self._trouble, self._missing = progress, want, hurry, trouble, missing
        self._check = check

    @property
    def is_skipped(self) -> bool:
        """Whether the capture was skipped: there was no room (by ``skip``, or because nothing could be written), or a rank has no part."""
        return self._progress.is_skipped

    @property
    def status(self) -> Status | None:
        """The status that the state has reached; None while it is being copied and digested, or after the capture failed."""
        state = self._progress.state
        return None if state is None else state.status

    @property
    def state(self) -> State | None:
        """The recorded state; None until it is recorded."""
        return self._progress.state

    @property
    def error(self) -> BaseException | None:
        """The error of the background, as it was raised; else the ``ModuleFailed`` of a module of yours, which ``wait`` does not raise."""
        return self._progress.error or self._progress.module_error

    @takes(status=string, timeout_s=optional(seconds))
    def wait(self, status: str = "captured", timeout_s: float | None = None) -> State:
        """Block until the state has reached ``status`` (or a later one), and return it.

        Waiting for ``durable`` requests it: the state is written even if no policy chose it. While the disk is full or away, the write is
        retried for as long as you wait (unless ``on_failure="raise"``).

            with repo.track(branch="waited-for", model=model, optimizer=optimizer) as run:
                train_step(next(iter(loader)))
                state = run.capture().wait("durable", timeout_s=60)

        :raises Torn: or any other error of the background, as it was raised.
        :raises Unavailable: the capture was skipped, or its bytes were given up before they reached the status; or the lineage has been
            away for a minute (the state is in memory: wait again when the lineage is back).
        :raises TimeoutError: ``timeout_s`` seconds have passed; says why, if nothing can be written or parts of other ranks are missing.
        :raises InvalidInput: there is no such status, or no tier of the repository that gives it.
        :raises Closed: this is a forked child, where nothing is captured.
        """
        goal = _goal(status)
        if goal is not Status.CAPTURED:
            self._progress.asked = weakref.ref(self)
            self._check(goal)
            self._want(self.uid)
        if not self._wait_for(goal, timeout_s):
            why = self._missing(self.uid) or (None if goal is Status.CAPTURED else self._trouble())
            raise TimeoutError(
                f"state {self.uid} (step {self.step}) is not {goal} after {timeout_s} s; it is {self.status or 'being copied'}"
                + ("" if why is None else f"; {why}")
            )
        state = self._progress.state
        assert state is not None
        return state

    def _wait_for(self, goal: Status, timeout_s: float | None) -> bool:
        """Wait until the state has reached ``goal``, repeating every second that a caller waits; False if ``timeout_s`` passes first."""
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._hurry()
            left = ends_at - time.monotonic()
            if self._progress.changed.wait_for(lambda: self._has_reached(goal), min(left, SAY_AGAIN_S)):
                return True
            if left <= SAY_AGAIN_S:
                return False

    def _has_reached(self, goal: Status) -> bool:
        now = self._progress
        state = now.state
        if state is not None and state.status in _RANK and _RANK[state.status] >= _RANK[goal]:
            return True
        if now.error is not None:
            raise now.error
        if now.is_skipped:
            why = now.why_skipped or "the arena had no room (back_pressure='skip')"
            raise Unavailable(f"the capture of step {self.step} was skipped: {why}")
        if now.given_up is not None:
            raise Unavailable(now.given_up)
        if now.held_up is not None:
            raise now.held_up
        return False

    def __repr__(self) -> str:
        what = "skipped" if self.is_skipped else type(self._progress.error).__name__ if self._progress.error else self.status or "in flight"
        return f"<Capture {self.uid[:10]} step {self.step}: {what}>"


def _goal(status: str) -> Status:
    try:
        goal = Status(status)
    except ValueError:
        goal = Status.LOST
    if goal not in _RANK:
        raise InvalidInput(f"cannot wait for {status!r}: wait for one of {', '.join(_RANK)}")
    return goal
