"""The handle that ``run.capture`` returns at once, and what can be waited for on it."""

from __future__ import annotations

from collections.abc import Callable

from datastates.errors import InvalidInput, Unavailable
from datastates.lineage.states import State, Status
from datastates.system.bell import Bell
from datastates.values import optional, seconds, string, takes

__all__ = ["Capture"]

_RANK = {Status.CAPTURED: 0, Status.DURABLE: 1, Status.REPLICATED: 2, Status.EXTERNAL: 3}


class Capture:
    """A capture under way. Any thread may read it and wait on it; the engine moves it on.

    ``uid`` names the state from the start, ``step`` is where the training stood. ``is_skipped`` is true when there was
    no room and the back-pressure said to skip: such a capture has no state.
    """

    def __init__(self, uid: str, step: int, *, want: Callable[[str], None], hurry: Callable[[], None]) -> None:
        self.uid, self.step = uid, step
        self.is_skipped = False
        self._want, self._hurry = want, hurry
        self._changed = Bell()
        self._state: State | None = None
        self._error: BaseException | None = None
        self._given_up: str | None = None
        self._held_up: Unavailable | None = None

    @property
    def status(self) -> Status | None:
        """The status that the state has reached; None while it is being copied and digested, or after the capture failed."""
        state = self._state
        return None if state is None else state.status

    @property
    def state(self) -> State | None:
        """The recorded state; None until it is recorded."""
        return self._state

    @property
    def error(self) -> BaseException | None:
        """The error of the background, as itself; None if there is none."""
        return self._error

    @takes(status=string, timeout_s=optional(seconds))
    def wait(self, status: str = "captured", timeout_s: float | None = None) -> State:
        """Block until the state has reached ``status`` (or a later one), and return it.

        Waiting for ``durable`` asks for it: the state is written even if no policy wanted it.

            with repo.track(branch="waited-for", model=model, optimizer=optimizer) as run:
                train_step(next(iter(loader)))
                state = run.capture().wait("durable", timeout_s=60)

        :raises Torn: and any other error of the background, as itself.
        :raises Unavailable: the capture was skipped, or its bytes were given up before they reached the status; or the lineage has been
            away for a minute (the state is in memory: wait again when it is back).
        :raises TimeoutError: ``timeout_s`` seconds went by.
        :raises InvalidInput: no such status.
        :raises Closed: this is a forked child, where nothing is captured.
        """
        goal = _goal(status)
        if goal is not Status.CAPTURED:
            self._want(self.uid)
        self._hurry()
        if not self._changed.wait_for(lambda: self._has_reached(goal), timeout_s):
            raise TimeoutError(
                f"state {self.uid} (step {self.step}) is not {goal} after {timeout_s} s; it is {self.status or 'being copied'}"
            )
        assert self._state is not None
        return self._state

    def _has_reached(self, goal: Status) -> bool:
        state = self._state
        if state is not None and state.status in _RANK and _RANK[state.status] >= _RANK[goal]:
            return True
        if self._error is not None:
            raise self._error
        if self.is_skipped:
            raise Unavailable(f"the capture of step {self.step} was skipped: the arena had no room (back_pressure='skip')")
        if self._given_up is not None:
            raise Unavailable(self._given_up)
        if self._held_up is not None:
            raise self._held_up
        return False

    def _advance(self, state: State) -> None:
        self._state, self._held_up = state, None
        self._changed.ring()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._changed.ring()

    def _hold_up(self, why: Unavailable) -> None:
        self._held_up = why
        self._changed.ring()

    def _skip(self) -> None:
        self.is_skipped = True
        self._changed.ring()

    def _give_up(self, why: str) -> None:
        self._given_up = self._given_up or why  # the first reason is the one that helps
        self._changed.ring()

    def __repr__(self) -> str:
        what = "skipped" if self.is_skipped else type(self._error).__name__ if self._error else self.status or "in flight"
        return f"<Capture {self.uid[:10]} step {self.step}: {what}>"


def _goal(status: str) -> Status:
    try:
        goal = Status(status)
    except ValueError:
        goal = Status.LOST
    if goal not in _RANK:
        raise InvalidInput(f"cannot wait for {status!r}: wait for one of {', '.join(_RANK)}")
    return goal
