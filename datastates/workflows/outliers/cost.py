"""The cost of a report on outliers, in epochs over the whole data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datastates.lineage.states import State

__all__ = ["FORWARD", "OutlierCost", "trained"]

FORWARD = 1 / 3
"""The cost of a forward pass, in epochs: a step also goes backward, which costs about twice as much as going forward."""


@dataclass(frozen=True, slots=True)
class OutlierCost:
    """The cost of a report. ``training`` is the epochs that the lineage records, and ``unrecorded`` names the branches that record none.
    ``passes`` counts the forward passes over the whole data that scoring took.
    """

    training: float
    passes: float
    unrecorded: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The total in epochs; a lower bound if something is unrecorded."""
        return self.training + FORWARD * self.passes

    def __str__(self) -> str:
        least = "at least " if self.unrecorded else ""
        text = f"{least}{self.total:.1f} epochs: {self.training:.1f} of training, and {self.passes:.1f} forward passes at 1/3 epoch each"
        return text + (f"; no epochs on record for {', '.join(self.unrecorded)}" if self.unrecorded else "")


def trained(log: Sequence[State], known: dict[str, tuple[str | None, float]], count: int, steps_per_epoch: int | None) -> float | None:
    """The epochs over the whole data that one branch adds to those in ``known``; None if its own states record none.

    ``log`` is oldest first. ``known`` maps each state that was counted before to its variant and that variant's epochs at the state; the
    states of this log are added to it. A state records its epochs as the attribute or metric ``epoch``; in a study they count from the
    variant's fork. ``samples`` of ``samples_all`` says how much of the data an epoch was. A state without a record counts its steps over
    ``steps_per_epoch``.
    """
    total, variant, before = 0.0, None, 0.0
    is_new = is_recorded = False
    for state in log:
        if state.uid in known:
            variant, before = known[state.uid]
            continue
        is_new = True
        epoch, own = _epoch(state, steps_per_epoch), _variant(state)
        if own != variant:
            variant, before = own, before if _recorded(state) is None else 0.0  # a variant counts its epochs from its fork
        if epoch is not None:
            is_recorded = True
            total += max(0.0, epoch - before) * _share(state, count)
            before = max(before, epoch)
        known[state.uid] = (variant, before)
    return total if is_recorded or not is_new else None


def _variant(state: State) -> str | None:
    study, variant = state.attributes.get("study"), state.attributes.get("variant")
    return None if study is None and variant is None else f"{study}/{variant}"


def _epoch(state: State, steps_per_epoch: int | None) -> float | None:
    recorded = _recorded(state)
    return recorded if recorded is not None or steps_per_epoch is None else state.step / steps_per_epoch


def _recorded(state: State) -> float | None:
    for value in (state.attributes.get("epoch"), state.metrics.get("epoch")):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _share(state: State, count: int) -> float:
    samples, of = state.attributes.get("samples"), state.attributes.get("samples_all") or count
    return samples / of if isinstance(samples, int) and isinstance(of, int) and samples > 0 else 1.0
