"""Epochs of training, read from records of every kind."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from datastates.lineage.states import State, Status
from datastates.studies.outlier_sources import OutlierCost, trained


def state(
    uid: str, step: int, *, metrics: dict[str, float] | None = None, **attributes: Any
) -> State:
    return State(
        uid=uid,
        digest="",
        step=step,
        micro_step=0,
        metrics=metrics or {},
        attributes=attributes,
        message=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        status=Status.DURABLE,
        parents=(),
        edges=(),
        run=None,
        generation=step,
        bytes_total=0,
        bytes_new=0,
    )


PREFIX = [state("p1", 10, epoch=1), state("p2", 20, epoch=2), state("p3", 25)]


def test_shared_prefix_is_counted_once_and_only_up_to_where_a_branch_left_it() -> None:
    known: dict[str, tuple[str | None, float]] = {}

    assert trained([*PREFIX, state("a", 30, epoch=3)], known, 100, None) == 3
    assert (
        trained([*PREFIX[:1], state("b", 20, epoch=2), state("c", 30, epoch=3)], known, 100, None)
        == 2
    )
    assert trained(PREFIX, known, 100, None) == 0


def test_variant_counts_from_its_fork_and_by_the_share_of_the_data_that_it_trains_on() -> None:
    known: dict[str, tuple[str | None, float]] = {}
    said: dict[str, Any] = {"study": "s", "variant": "v", "samples": 80, "samples_all": 100}
    child: dict[str, Any] = {**said, "variant": "w", "samples": 50}
    log = [*PREFIX, state("v1", 30, epoch=1, **said), state("v2", 40, epoch=2, **said)]

    assert trained(log, known, 1000, None) == pytest.approx(2 + 2 * 0.8)
    assert trained([*log, state("w1", 50, epoch=1, **child)], known, 1000, None) == pytest.approx(
        0.5
    )


def test_epoch_may_be_a_metric_and_need_not_be_whole() -> None:
    assert (
        trained(
            [state("a", 3, metrics={"epoch": 0.5}), state("b", 9, metrics={"epoch": 1.25})],
            {},
            100,
            None,
        )
        == 1.25
    )


def test_steps_stand_in_for_epochs_where_it_is_said_how_many_make_one() -> None:
    log = [state("a", 5), state("b", 20)]

    assert trained(log, {}, 100, 10) == 2
    assert trained(log, {}, 100, None) is None


def test_step_counts_go_on_across_a_fork() -> None:
    known: dict[str, tuple[str | None, float]] = {}
    trained([state("a", 20)], known, 100, 10)

    assert trained([state("a", 20), state("v", 30, study="s", variant="v")], known, 100, 10) == 1


def test_cost_says_what_is_missing_from_it() -> None:
    assert OutlierCost(20, 6).total == 22
    assert (
        str(OutlierCost(20, 6))
        == "22.0 epochs: 20.0 of training, and 6.0 forward passes at 1/3 epoch each"
    )
    assert str(OutlierCost(0, 3, ("main",))).startswith("at least 1.0 epochs")
    assert str(OutlierCost(0, 3, ("main",))).endswith("no epochs on record for main")
