"""The entry points of studies given what they are not made for: refused at the call by our own
errors, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from datastates import DatastatesError, studies
from datastates.errors import InvalidInput
from datastates.studies import Choice, Plan, Uniform, Variant
from tests.studies.test_wrong_studies import CASES as STUDIED
from tests.test_wrong_types import WRONG, Hostile

SUBSETS = {"a": (0, 1), "b": (2, 3)}
PLAN = Plan((Variant("only", train=("a",), validation=("b",)),), SUBSETS)

Case = tuple[Callable[..., object], dict[str, Any]]
CASES: dict[str, Case] = {
    "Choice": (Choice, {"values": (1, 2)}),
    "LogUniform": (studies.LogUniform, {"low": 0.1, "high": 1.0}),
    "Uniform": (Uniform, {"low": 0.1, "high": 1.0}),
    "Variant": (
        lambda **given: Plan((Variant(**given),), SUBSETS).digest("only"),
        {
            "name": "only",
            "parent": None,
            "epochs": 1,
            "config": {"lr": 0.1},
            "train": ("a",),
            "validation": ("b",),
        },
    ),
    "Plan": (Plan, {"variants": (Variant("only"),), "subsets": SUBSETS, "seen": ("a",)}),
    "cut": (studies.cut, {"samples": 8, "count": 2, "seed": 0}),
    "describe": (studies.describe, {"plan": PLAN, "work": studies.work(PLAN), "limit": 3}),
    "ensemble": (
        studies.ensemble,
        {
            "seeds": 2,
            "epochs": 1,
            "subsets": SUBSETS,
            "train": ("a",),
            "validation": ("b",),
            "seen": (),
        },
    ),
    "epochs_at": (studies.epochs_at, {"schedule": "flat", "epochs": 2, "stage": 1, "stages": 2}),
    "grid": (studies.grid, {"config": {"lr": (0.1, 0.2)}, "epochs": 1}),
    "halving": (
        studies.halving,
        {
            "plan": studies.grid({"lr": (0.1, 0.2)}, epochs=4),
            "metric": "loss",
            "every": 2,
            "keep": 0.5,
            "mode": "min",
        },
    ),
    "kfold": (studies.kfold, {"folds": 2, "epochs": 1, "samples": 8, "seed": 0, "seen": ()}),
    "leave_out": (
        studies.leave_out,
        {
            "subsets": SUBSETS,
            "depth": 1,
            "epochs": 1,
            "fan_out": 2,
            "schedule": "flat",
            "seen": (),
            "always": (),
        },
    ),
    "repeat": (studies.repeat, {"plan": PLAN, "seeds": 2}),
    "sample": (
        studies.sample,
        {"distributions": {"lr": Uniform(0.1, 1.0)}, "count": 2, "seed": 0, "epochs": 1},
    ),
    "work": (studies.work, {"plan": PLAN, "prefix_epochs": 1.0}),
}
"""A right call for each; each of its arguments is replaced in turn."""

OTHERWISE = {
    "Distribution": "a protocol",
    "Exploration": "made by explore",
    "Job": (
        "made for a train function; what it is given goes to Tracker.capture and Repository.track"
    ),
    "OutlierReport": "made by outliers",
    "Processes": "starts processes",
    "Progress": "a choice",
    "RayExecutor": "needs Ray",
    "Result": "made by explore",
    "SampleScore": "made by outliers",
    "Schedule": "a choice",
    "SerialExecutor": "takes nothing",
    "Storage": "made by storage",
    "Work": "made by work",
    **dict.fromkeys(STUDIED, "takes a study: see test_wrong_studies"),
    "reconfigure": "takes a Job",
}


def test_every_entry_point_of_studies_is_tried() -> None:
    assert {*CASES, *OTHERWISE} == set(studies.__all__)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_an_error_of_ours(name: str) -> None:
    failures = []
    for parameter in CASES[name][1]:
        for value in WRONG:
            call, given = CASES[name]
            try:
                call(**{**given, parameter: value})
            except DatastatesError:
                continue
            except Exception as exc:
                said = "a hostile object" if isinstance(value, Hostile) else repr(value)[:60]
                failures.append(f"{parameter}={said}: {type(exc).__name__}: {str(exc)[:150]}")
    assert not failures, "\n".join([f"{len(failures)} of {name}:", *failures])


@pytest.mark.parametrize(
    "make",
    [
        lambda: studies.cut(2**63, 2),
        lambda: studies.cut(range(2**63), 2),
        lambda: studies.cut(4, 2**63),
        lambda: studies.ensemble(2**63, 1),
        lambda: studies.ensemble(range(2**70), 1),
        lambda: studies.sample({"lr": Uniform(0.1, 1.0)}, 2**40, 0, 1),
        lambda: studies.grid({"a": range(10**5), "b": range(10**5)}, epochs=1),
        lambda: studies.grid({"a": range(2**70)}, epochs=1),
        lambda: studies.leave_out(SUBSETS, depth=10**6, epochs=1),
        lambda: studies.leave_out(SUBSETS, depth=1, fan_out=2**63, epochs=1),
        lambda: studies.leave_out({"a": range(2**62), "b": range(2)}, depth=1, epochs=1),
        lambda: studies.kfold({"a": range(2**62), "b": range(2)}, epochs=1),
        # any integers will do
        lambda: Plan((Variant("only"),), {"a": range(2**70)}),  # type: ignore[dict-item]
        lambda: Plan(
            (Variant("only"),),
            {str(number): range(number * 10**6, 2**40) for number in range(10**4)},  # type: ignore[misc]
        ),
        lambda: studies.epochs_at("log", 1, 2**63, 2**63),
        lambda: studies.repeat(PLAN, 2**63),
        lambda: studies.repeat(studies.grid({"a": range(1000)}, epochs=1), 1001),
    ],
)
def test_counts_that_no_study_has_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_a_misspelt_part_of_the_data_is_refused() -> None:
    with pytest.raises(InvalidInput, match="takes no 'validaton'"):
        # so it is
        studies.ensemble(2, 1, subsets=SUBSETS, validaton=["a"])  # type: ignore[call-arg]


def test_numbers_of_numpy_are_taken_as_what_they_hold() -> None:
    four: Any = np.arange(4)
    # NumPy's number is as good
    assert studies.cut(four, np.int64(2)) == studies.cut(4, 2)  # type: ignore[arg-type]
    assert studies.ensemble(four[3:], 1) == studies.ensemble([3], 1)
    assert Choice(four[1:3]).values == (1, 2)
