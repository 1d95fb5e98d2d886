"""The progress of a study while it runs: a table on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from datastates.lineage.states import State
from datastates.workflows.plans.plan import Plan

from . import record

__all__ = ["Display", "Lines", "Quiet", "Screen", "display_for"]

_logger = logging.getLogger(__name__)


class Display(Protocol):
    """A display that is told of a study's progress; called on the explorer's thread."""

    def begun(self, variant: str, attempt: int) -> None:
        """A variant was given to the executor."""

    def reported(self, variant: str, state: State) -> None:
        """A state of the variant is in the lineage."""

    def ended(self, variant: str, how: str) -> None:
        """The variant is done, reused, failed, or to be tried again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Quiet:
    """A display that shows nothing."""

    def begun(self, variant: str, attempt: int) -> None:
        """Do nothing."""

    def reported(self, variant: str, state: State) -> None:
        """Do nothing."""

    def ended(self, variant: str, how: str) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class Lines(Quiet):
    """A display that writes one line of the log for each event."""

    def __init__(self, study: str, plan: Plan) -> None:
        self._study, self._plan = study, plan

    def begun(self, variant: str, attempt: int) -> None:
        """Log that the variant begins."""
        _logger.info("study %s: %s begins%s", self._study, variant, f", attempt {attempt}" if attempt > 1 else "")

    def reported(self, variant: str, state: State) -> None:
        """Log the epoch and the metrics."""
        epoch, epochs = state.attributes.get(record.EPOCH), self._plan[variant].epochs
        _logger.info("study %s: %s epoch %s/%s: %s", self._study, variant, epoch, epochs, _metrics(state))

    def ended(self, variant: str, how: str) -> None:
        """Log how the variant ended."""
        _logger.info("study %s: %s %s", self._study, variant, how)


@dataclass(slots=True)
class _Row:
    epochs: int
    how: str = "waiting"
    epoch: int = 0
    metrics: str = ""
    began: float | None = None
    began_at: int | None = None
    seen: dict[int, float] = field(default_factory=dict)

    def left_s(self) -> float | None:
        """The seconds that are left, by the pace of the epochs seen since this run began."""
        if self.began is None or len(self.seen) < 1 or self.how != "training":
            return None
        newest = max(self.seen)
        done = newest - (self.began_at or 0)
        return (self.epochs - newest) * (self.seen[newest] - self.began) / done if done > 0 else None


class Screen:
    """A table that is kept up to date; ``clock`` counts seconds."""

    def __init__(self, study: str, plan: Plan, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._study, self._rows = study, {variant.name: _Row(variant.epochs) for variant in plan.variants}
        self._live = Live(self._table(), console=console, refresh_per_second=4)

    def begun(self, variant: str, attempt: int) -> None:
        """Start the variant's clock."""
        row = self._rows[variant]
        row.how, row.began, row.began_at = "training", self._clock(), row.epoch
        row.seen.clear()
        self._live.update(self._table())

    def reported(self, variant: str, state: State) -> None:
        """Show the epoch and metrics, and so what is left."""
        row = self._rows[variant]
        row.epoch, row.metrics = int(state.attributes.get(record.EPOCH) or 0), _metrics(state)
        row.seen[row.epoch] = self._clock()
        self._live.update(self._table())

    def ended(self, variant: str, how: str) -> None:
        """Stop the variant's clock."""
        self._rows[variant].how = how
        self._live.update(self._table())

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()

    def _table(self) -> Table:
        done = sum(row.how in ("done", "reused") for row in self._rows.values())
        table = Table("variant", "", "epoch", "metrics", "left", title=f"study {self._study}: {done} of {len(self._rows)} done")
        for name, row in self._rows.items():
            left = row.left_s()
            table.add_row(name, row.how, f"{row.epoch}/{row.epochs}", row.metrics, "" if left is None else f"{left:.0f} s")
        return table


def display_for(study: str, plan: Plan, *, progress: bool, console: Console | None = None) -> Display:
    """The display that suits where standard error goes."""
    if not progress:
        return Quiet()
    console = console or Console(stderr=True)
    return Screen(study, plan, console) if console.is_terminal else Lines(study, plan)


def _metrics(state: State) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in sorted(state.metrics.items()))
