"""Retention beside a training: now and then, on a separate thread, states that no policy keeps lose their bytes.

A pass runs after states became durable, at least ``LEAST_S`` after the one before, and seldom enough to take at most a fiftieth of the
time. If only a bound has to hold, no pass runs before states have come near it. A full disk starts a pass at once. The training
never waits for a pass, and no error of a pass reaches it: the error is logged, and the next pass tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from datastates.errors import DatastatesError
from datastates.opening.core import Core
from datastates.policy.decisions import Policies, decide
from datastates.policy.retention import Retention, retention_of
from datastates.policy.rules import All
from datastates.system.bell import Latch
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event
from datastates.system.seldom import Seldom

from .retention import Grounds, Pruned, carry_out, half_of_room, reckoned, survey, taking_turns, told_policies

__all__ = ["LEAST_S", "Keeper", "beside", "keep"]

_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())

LEAST_S = 10.0
"""The least time between two passes, in seconds."""

_SHARE = 50
"""A pass that took a second is followed by this many seconds without one."""

_ROOM = 20
"""States over the bound are thinned to a twentieth below it, so that not every new state makes another one go."""

_BESIDE = 16 << 10
"""The approximate size on disk of a small state beside its payload, until it is measured."""

_LAST_S = 5.0
"""The most seconds that the last pass takes when the repository is closed, apart from the batch that is under way then."""

_PATIENCE_S = 20.0
"""How many seconds the end waits for a pass."""


def keep(core: Core, branch: str, asked: Retention | None) -> None:
    """Apply what a training asked for its branch, or what is configured, until the repository is closed."""
    belongings = core.engage()
    if not isinstance(belongings.keeper, Keeper):
        belongings.keeper = keeper = Keeper(Grounds.of(core), retention_of(core.config.retention))
        belongings.host.when_durable(keeper.on_durable)
        belongings.host.when_full(keeper.on_full)
        if keeper.retention != Retention.all():
            _logger.info("states on disk are kept by %r%s", str(core.config.retention), keeper.said)
    belongings.keeper.follow(branch, asked)


def beside(told: Mapping[str, Retention], configured: Retention, asked: Mapping[str, Retention | None]) -> Policies:
    """What a process may apply by itself. Branches that it trains get what they ``asked`` for, or what is configured. States of other
    branches are dropped only for the bound on all states, in the order of the policies that their trainings recorded.
    """
    own = {branch: replace(each, rules=(All(), *each.rules), bound=None) for branch, each in told.items()}
    own |= {branch: each or configured.bounded(None) for branch, each in asked.items()}
    return Policies(replace(configured, rules=(All(), *configured.rules)), own)


class Keeper:
    """Applies retention for the trainings of one process. ``report`` is what the last pass did, ``error`` is why it failed."""

    def __init__(self, grounds: Grounds, configured: Retention) -> None:
        self._grounds = grounds
        stored = grounds.durable.bytes_stored
        self._half = max(stored, half_of_room(grounds.home.path, stored))
        self.retention = configured.bounded(self._half) if configured.bound == "half" else configured
        self.report: Pruned | None = None
        self.error: Exception | None = None
        self._asked: dict[str, Retention | None] = {}
        self._taken, self._added, self._is_choosing = stored, 0, False
        self._next_at = 0.0
        self._over, self._lock = Latch(), threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def said(self) -> str:
        """The bound in words, if it was computed."""
        bound = self.retention.bound
        return f"; when they take more than {bound} bytes, older ones are thinned" if isinstance(bound, int) else ""

    def follow(self, branch: str, asked: Retention | None) -> None:
        """Note that a training of this process begins on a branch, and what it asked for."""
        with self._lock:
            self._asked[branch] = asked
            self._is_choosing = any(_chooses(each or self.retention.bounded(None)) for each in self._asked.values())

    def on_durable(self, added: int) -> None:
        """Note that a state became durable; called on the thread that wrote it."""
        with self._lock:
            self._added += added + _BESIDE
            if self._is_due() and time.monotonic() >= self._next_at:
                self._begin()

    def on_full(self) -> None:
        """Begin a pass because the disk is full, so that the next attempt to write may find room; called on the thread that wrote."""
        with self._lock:
            if self._is_due():
                self._begin()

    def _begin(self) -> None:
        """Begin a pass; runs under the lock."""
        if self._thread is None and not self._over.is_set():
            self._start(self._run)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="datastates-retention", daemon=True)
        try:
            with undisturbed():  # a caller that ends this may wait only for a thread that was started
                thread.start()
                self._thread = thread
        except RuntimeError as exc:  # no more threads are allowed: the writer goes on
            self.error = exc
            _logger.warning("states that retention does not keep stay on disk for now: %s", exc)

    def stop(self) -> None:
        """Begin no further pass; one under way ends after its batch. Does not wait for a disk that stalls."""
        self._over.set()
        self._join()

    def finish(self) -> None:
        """Run the last pass, when nothing is captured any more. Does not wait for a disk that stalls."""
        if self._added and self._is_due() and self._thread is None:
            self._grounds = replace(self._grounds, host=None)
            since = time.monotonic()
            self._start(lambda: self._try(lambda: time.monotonic() - since > _LAST_S))
            self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                _logger.warning(
                    "retention is not over after %.0f s, and is not waited for: %s stalls", _PATIENCE_S, self._grounds.home.path
                )

    def _is_due(self) -> bool:
        bound = self.retention.bound
        return self._is_choosing or (isinstance(bound, int) and self._taken + self._added > bound)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._try(self._over.is_set)
        finally:
            now = time.monotonic()
            with self._lock:
                self._next_at, self._thread = now + max(LEAST_S, _SHARE * (now - began)), None

    def _try(self, is_over: Callable[[], bool]) -> None:
        try:
            report = self._pass(is_over)
            self.report, self.error = report or self.report, None
        except Exception as exc:  # whatever it is, the training goes on
            self.error = exc
            _logger.warning(
                "states that retention does not keep stay on disk for now: %s",
                exc,
                exc_info=not isinstance(exc, DatastatesError),
                extra=event("retention.failed", reason=str(exc)),
            )

    def _pass(self, is_over: Callable[[], bool]) -> Pruned | None:
        """Look, decide and drop; returns None while another process prunes the folder."""
        grounds = self._grounds
        with taking_turns(grounds.home.path, 0.0) as held:
            if held is None:
                return None
            with self._lock:
                added, asked = self._added, dict(self._asked)
            policies = reckoned(beside(told_policies(grounds), self.retention, asked), lambda: self._half)
            found = survey(grounds, policies)
            bound = policies.default.bound
            if isinstance(bound, int) and found.bytes > bound:
                policies = replace(policies, default=policies.default.bounded(bound - bound // _ROOM))
            report = carry_out(grounds, held, found, policies, decide(found.facts, policies, time.time()), is_over=is_over)
        with self._lock:
            self._taken = report.bytes_after
            if not is_over():  # else it may have been broken off, and the last pass makes up for it
                self._added = max(0, self._added - added)
        if report.dropped:
            kept = sum(report.kept.values())
            done = event(
                "retention.dropped", states=len(report.dropped), bytes=report.bytes_freed, kept=kept, bytes_kept=report.bytes_after
            )
            _logger.info("retention: %s", report, extra=done)
        return report


def _chooses(policy: Retention) -> bool:
    """Whether states may be dropped although no bound requires it."""
    return policy.bound is not None or not any(isinstance(rule, All) for rule in policy.effective)
