"""The goals of captures, restores and clones on a GPU, and whether a run met them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .case import Outcome, Status


class Verdict(StrEnum):
    """The result of a run for a goal."""

    MET = "met"
    MISSED = "missed"
    NOT_MEASURED = "not measured"
    NOT_JUDGED = "not judged"
    """It was not measured on an accelerator."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the median of a figure, identified by part, case and name."""

    text: str
    part: str
    case: str
    figure: str
    bound: float
    is_most: bool = True


GOALS = (
    Goal("a capture blocks for at most 2 ms", "capture", "blocked and copied", "blocked_ms", 2.0),
    Goal(
        "a capture synchronises with the device never",
        "capture",
        "synchronisations",
        "of_the_training",
        0,
    ),
    Goal(
        "a capture behind a busy device blocks for at most 5 ms",
        "capture",
        "behind a busy device",
        "blocked_ms",
        5.0,
    ),
    Goal(
        "copies to the host run at 0.9 of the floor or faster",
        "capture",
        "blocked and copied",
        "share_of_floor",
        0.9,
        is_most=False,
    ),
    Goal(
        "captures at every step cost at most 2.5 % of the time",
        "capture",
        "every step of a training",
        "overhead_percent",
        2.5,
    ),
    Goal(
        "of a state whose parameters are four fifths frozen at most 22 % cross",
        "capture",
        "four fifths frozen",
        "crossed_percent",
        22.0,
    ),
    Goal(
        "restores run at 0.85 of the floor or faster",
        "restore",
        "restored from memory",
        "share_of_floor",
        0.85,
        is_most=False,
    ),
    Goal(
        "digests are computed at 2.5 TB/s or faster",
        "restore",
        "digests on the device",
        "TB_per_s",
        2.5,
        is_most=False,
    ),
    Goal(
        "a clone on one GPU runs at 1 TB/s or faster",
        "clone",
        "from device to device",
        "TB_per_s",
        1.0,
        is_most=False,
    ),
    Goal(
        "a clone by the host runs at 20 GB/s or faster",
        "clone",
        "by the host",
        "GB_per_s",
        20.0,
        is_most=False,
    ),
    Goal("no state of ours is torn", "dcp", "torn states", "torn_of_ours", 0),
)
"""For an H200, a state of 1.25 GB in 592 tensors, and fused AdamW."""


def judged(
    goals: Sequence[Goal], outcomes: Mapping[str, Sequence[Outcome]], *, is_accelerator: bool
) -> list[tuple[Goal, float | None, Verdict]]:
    """Each goal with its figure, from the outcomes of each part."""
    return [
        (goal, found, _verdict(goal, found, is_accelerator))
        for goal in goals
        for found in [_found(goal, outcomes.get(goal.part, ()))]
    ]


def _found(goal: Goal, outcomes: Sequence[Outcome]) -> float | None:
    values = [
        outcome.found.get(goal.figure)
        for outcome in outcomes
        if outcome.case == goal.case and outcome.status is Status.PASSED
    ]
    if not values or values[0] is None:
        return None
    value = values[0]
    return float(statistics.median(value) if isinstance(value, list) else value)


def _verdict(goal: Goal, found: float | None, is_accelerator: bool) -> Verdict:
    if found is None:
        return Verdict.NOT_MEASURED
    if not is_accelerator:
        return Verdict.NOT_JUDGED
    return (
        Verdict.MET
        if (found <= goal.bound if goal.is_most else found >= goal.bound)
        else Verdict.MISSED
    )
