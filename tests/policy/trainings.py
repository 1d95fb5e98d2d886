"""A training on a clock that nobody waits for: the real engine, captures and writes as events,
each when it would happen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from datastates.engine.cadence_stats import CaptureFacts
from datastates.engine.scheduler import (
    Action,
    CadenceChanged,
    Engine,
    LineOpened,
    Recorded,
    Tick,
    Write,
    Written,
)
from datastates.policy.contract import CadenceChoice, Costs, Policy


@dataclass
class Training:
    """Captures come every ``interval_s`` of work; a second of writing costs ``slowdown`` seconds of
    work, and a write takes ``write_s``.

    What it came to is in ``writes`` (when each began and ended), ``choices``, ``costs``, ``now``
    and ``most_pending``: so many states were being written, or waited, at once.
    """

    policy: Policy
    interval_s: float
    write_s: float
    slowdown: float = 0.0
    noise: float = 0.0
    seed: int = 0
    now: float = 100.0
    captures: int = 0
    writes: list[tuple[float, float]] = field(default_factory=list)
    choices: list[CadenceChoice] = field(default_factory=list)
    most_pending: int = 0
    costs: Costs | None = None

    def __post_init__(self) -> None:
        self._engine, self._random = Engine(), random.Random(self.seed)
        self._writing: tuple[str, float, float] | None = None
        self._act(self._engine.handle(LineOpened("main", self.policy, "main")))

    @property
    def choice(self) -> CadenceChoice | None:
        """What the policy chose last."""
        return self.choices[-1] if self.choices else None

    def run(self, captures: int) -> None:
        """Train on, for so many captures."""
        for _ in range(captures):
            self._work(self.interval_s * max(0.1, self._random.gauss(1, self.noise)))
            uid = f"s{self.captures}"
            self.captures += 1
            self._act(
                self._engine.handle(
                    Recorded(uid, "main", self.now, CaptureFacts(self.now, 0.001, self.captures))
                )
            )

    def _work(self, left: float) -> None:
        """So much work, slower beside a write; what is due by time is ticked."""
        while left > 0:
            if self._writing is None:
                due = self._engine.next_tick()
                if due is not None and due <= self.now + left:
                    left -= max(0.0, due - self.now)
                    self.now = max(self.now, due)
                    self._act(self._engine.handle(Tick(self.now)))
                    if self._writing is not None:
                        continue
                self.now, left = self.now + left, 0.0
                return
            uid, began, ends = self._writing
            pace = 1 + self.slowdown
            if self.now + left * pace < ends:
                self.now, left = self.now + left * pace, 0.0
                return
            left -= (ends - self.now) / pace
            self.now = ends
            self._writing = None
            self.writes.append((began, ends))
            self._act(self._engine.handle(Written((uid,), began, ends)))

    def _act(self, actions: list[Action]) -> None:
        self.most_pending = max(self.most_pending, self._engine.pending_writes)
        for action in actions:
            match action:
                case Write((uid,)):
                    assert self._writing is None, "one at a time"
                    self._writing = (
                        uid,
                        self.now,
                        self.now + self.write_s * max(0.1, self._random.gauss(1, self.noise / 3)),
                    )
                case CadenceChanged(_, costs, choice, has_changed):
                    self.costs = costs
                    if has_changed and choice is not None:
                        self.choices.append(choice)
