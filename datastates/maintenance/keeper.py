"""Retention during a training: a separate thread regularly removes the bytes of states that no
policy keeps.

A pass runs after states became durable, at least ``LEAST_S`` after the previous pass. Passes take
at most a fiftieth of the time. If only a bound has to hold, no pass runs before states exceed it. A
full disk starts a pass at once. The training never waits for a pass, and no error of a pass reaches
it: the error is logged, and the next pass tries again.

A clock that is wrong must not delete states. A pass drops at most a tenth of the states because of
their age alone. It drops none within an hour after the wall clock was set, or after a start at
which the newest state was far from the present.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from datastates.errors import DatastatesError
from datastates.lineage.query import retained
from datastates.lineage.views.text import size_text
from datastates.policy.retention import (
    DEFAULT,
    All,
    Decision,
    Policies,
    Retention,
    decide_gradually,
    retention_of,
)
from datastates.system.interrupts import undisturbed
from datastates.system.logs import RateLimitFilter, event
from datastates.system.threads import Latch

from .core import Core
from .retention_pass import (
    PruneContext,
    Pruned,
    Survey,
    budget,
    carry_out,
    half_of_room,
    prune_lock,
    recorded_policies,
    survey,
    with_budget,
)

_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())

LEAST_S = 10.0
"""The least time between two passes, in seconds."""

_SHARE = 50
"""A pass that took a second is followed by this many seconds without one."""

_ROOM = 20
"""States over the bound are thinned to a twentieth below it, so that not every new state makes
another one go."""

_BESIDE = 16 << 10
"""The approximate size on disk of a small state beside its payload, until it is measured."""

_LAST_S = 5.0
"""The most seconds that the last pass takes when the repository is closed, apart from the batch
that is under way then."""

_AGED = (
    10  # a pass drops at most a tenth of the states because of their age alone, and at least one
)
# the wall clock was set if it gained or lost more than this against the clock since boot between
# two passes
_SET_S = 60.0
# the clock is doubted if the newest state is older than this when a process starts
_AWAY_S = 30 * 86_400.0
_STEADY_S = 3600.0  # for how long a clock in doubt must run steadily before it counts

_PATIENCE_S = 20.0
"""How many seconds the end waits for a pass."""


def keep(core: Core, branch: str, asked: Retention | None, state_bytes: int) -> str:
    """Apply the training's policy for its branch, or the configured policy, until the repository is
    closed. Returns the bound in words.

    ``state_bytes`` is the approximate size of the training's states.
    """
    resources = core.engage()
    if not isinstance(resources.keeper, Keeper):
        resources.keeper = keeper = Keeper(
            PruneContext.of(core), retention_of(core.config.retention)
        )
        resources.runner.on_durable = keeper.on_durable
        resources.runner.writer.on_full = keeper.on_full
        if core.config.retention not in (DEFAULT, Retention.all()):
            _logger.info("states on disk are kept by %r%s", str(core.config.retention), keeper.said)
    resources.keeper.follow(branch, asked, state_bytes)
    return resources.keeper.said


def beside(
    told: Mapping[str, Retention], configured: Retention, asked: Mapping[str, Retention | None]
) -> Policies:
    """The policies that a process applies without a command. Branches that it trains get the
    policy that their training passed (``asked``), or the ``configured`` one. States of other
    branches are dropped only for the bound on all states, in the order of the policies that their
    trainings recorded.
    """
    own = {
        branch: replace(each, rules=(All(), *each.rules), bound=None)
        for branch, each in told.items()
    }
    own |= {branch: each or configured.bounded(None) for branch, each in asked.items()}
    return Policies(replace(configured, rules=(All(), *configured.rules)), own)


class Keeper:
    """Applies retention for the trainings of one process.

    ``report`` is what the last pass did, ``error`` is why it failed."""

    def __init__(self, context: PruneContext, configured: Retention) -> None:
        self._context = context
        stored = context.durable.bytes_stored
        self._half = max(stored, half_of_room(context.home.path, stored))
        self._state_bytes = 0
        self._configured = Policies(configured)
        self.retention = self._with_budget(self._configured).default
        self.report: Pruned | None = None
        self.error: Exception | None = None
        self._asked: dict[str, Retention | None] = {}
        self._taken, self._added, self._is_choosing = stored, 0, False
        self._next_at = 0.0
        with context.database.read() as session:
            newest = (retained.newest_at(session) or 0) / 1e6
        is_near = not newest or -_SET_S < time.time() - newest < _AWAY_S
        self._offset, self._doubted_until = (
            (time.time() if is_near else newest) - _since_boot_s(),
            0.0,
        )
        self._over, self._lock = Latch(), threading.Lock()
        self._thread: threading.Thread | None = None

    def _with_budget(self, policies: Policies) -> Policies:
        return with_budget(policies, budget(self._half, self._state_bytes))

    @property
    def said(self) -> str:
        """The bound in words."""
        bound = self.retention.bound
        return (
            f"; the oldest are thinned beyond {size_text(bound).replace('.0 ', ' ')}"
            if isinstance(bound, int)
            else ""
        )

    def follow(self, branch: str, asked: Retention | None, state_bytes: int = 0) -> None:
        """Note that a training of this process begins on a branch, with its policy and the
        approximate size of its states."""
        with self._lock:
            self._asked[branch], self._state_bytes = asked, max(self._state_bytes, state_bytes)
            self.retention = self._with_budget(self._configured).default
            policies = [each or self.retention.bounded(None) for each in self._asked.values()]
            # whether states may be dropped although no bound requires it
            self._is_choosing = any(
                policy.bound is not None
                or not any(isinstance(rule, All) for rule in policy.effective)
                for policy in policies
            )

    def on_durable(self, added: int) -> None:
        """Note that a state became durable; called on the thread that wrote it."""
        with self._lock:
            self._added += added + _BESIDE
            if self._is_due() and time.monotonic() >= self._next_at:
                self._begin()

    def on_full(self) -> None:
        """Begin a pass because the disk is full, so that the next write may find free space; called
        on the thread that wrote."""
        with self._lock:
            if self._is_due() and self._thread is None:
                self._context = replace(self._context, is_full=True)
                self._begin()

    def _begin(self) -> None:
        """Begin a pass; runs under the lock."""
        if self._thread is None and not self._over.is_set():
            self._start(self._run)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="datastates-retention", daemon=True)
        try:
            with undisturbed():
                # a caller that ends this may wait only for a thread that was started
                thread.start()
                self._thread = thread
        except RuntimeError as exc:  # no more threads are allowed: the writer continues
            self.error = exc
            _logger.warning("states that retention does not keep stay on disk for now: %s", exc)

    def stop(self) -> None:
        """Begin no further pass; one under way ends after its batch.

        Does not wait for a disk that stalls."""
        self._over.set()
        self._join()

    def finish(self) -> None:
        """Run the last pass, when nothing is captured any more.

        Does not wait for a disk that stalls."""
        if self._added and self._is_due() and self._thread is None:
            self._context = replace(self._context, runner=None, is_full=False)
            since = time.monotonic()
            self._start(lambda: self._try(lambda: time.monotonic() - since > _LAST_S))
            self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                _logger.warning(
                    "retention is not over after %.0f s, and is not waited for: %s stalls",
                    _PATIENCE_S,
                    self._context.home.path,
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
            # until the folder is within its bound, or nothing more can go: packs keep bytes of
            # dropped states up to a point
            while (report := self._pass(is_over)) is not None:
                self.report, bound = report, self.retention.bound
                is_beyond = isinstance(bound, int) and self._taken > bound
                if not (report.dropped and is_beyond) or is_over():
                    break
            self.error = None
        except Exception as exc:  # the training continues after any error
            self.error = exc
            _logger.warning(
                "states that retention does not keep stay on disk for now: %s",
                exc,
                exc_info=not isinstance(exc, DatastatesError),
                extra=event("retention.failed", reason=str(exc)),
            )

    def _pass(self, is_over: Callable[[], bool]) -> Pruned | None:
        """Look, decide and drop; returns None while another process prunes the folder."""
        with self._lock:  # only this pass may drop states that wait for their copies
            context, self._context = self._context, replace(self._context, is_full=False)
        with prune_lock(context.home.path, 0.0) as held:
            if held is None:
                return None
            with self._lock:
                added, asked = self._added, dict(self._asked)
            policies = self._with_budget(beside(recorded_policies(context), self.retention, asked))
            found = survey(context, policies)
            bound = policies.default.bound
            if isinstance(bound, int) and found.bytes > bound:
                policies = replace(
                    policies, default=policies.default.bounded(bound - bound // _ROOM)
                )
            report = carry_out(
                context, held, found, policies, self._decided(found, policies), is_over=is_over
            )
        with self._lock:
            self._taken = sum(
                {
                    name: size for files in context.durable.files().values() for name, size in files
                }.values()
            )
            # after a stop, this pass may be incomplete, and the last pass completes it
            if not is_over():
                self._added = max(0, self._added - added)
        if report.dropped:
            kept = sum(report.kept.values())
            done = event(
                "retention.dropped",
                states=len(report.dropped),
                bytes=report.bytes_freed,
                kept=kept,
                bytes_kept=report.bytes_after,
            )
            _logger.info("retention: %s", report, extra=done)
        return report

    def _decided(self, found: Survey, policies: Policies) -> list[Decision]:
        """Decide on each state.

        While the clock is in doubt, no state is dropped because of its age."""
        ticks, was_doubted = _since_boot_s(), self._doubted_until
        gained, self._offset = time.time() - ticks - self._offset, time.time() - ticks
        if abs(gained) > _SET_S:
            self._doubted_until = ticks + _STEADY_S
        most = 0 if ticks < self._doubted_until else max(1, len(found.facts) // _AGED)
        decisions, stay = decide_gradually(found.facts, policies, time.time(), most)
        if stay and self._doubted_until != was_doubted:
            _logger.warning(
                "retention keeps %d states that are too old for it: the clock moved by %+.1f days"
                " since the last pass or the newest state. They are dropped after an hour in which"
                " the clock is steady: check the date of this machine",
                *(stay, gained / 86_400),
            )
        return decisions


def _since_boot_s() -> float:
    """The monotonic clock, if possible that one which also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
