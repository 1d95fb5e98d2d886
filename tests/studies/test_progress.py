"""What a person sees of a study while it runs."""

from __future__ import annotations

import io
import logging
from datetime import UTC, datetime

import pytest
from rich.console import Console

from datastates import State, Status
from datastates.studies import Plan, Variant
from datastates.studies.results import Lines, Quiet, Screen, display_for
from datastates.values import Value

PLAN = Plan((Variant("a", None, 4), Variant("b", "a", 1)))


def state(epoch: int, **metrics: float) -> State:
    """What a job reports."""
    attributes: dict[str, Value] = {"study": "s", "variant": "a", "epoch": epoch}
    now = datetime.now(UTC)
    return State(
        "0" * 24,
        "",
        epoch,
        0,
        metrics,
        attributes,
        None,
        now,
        Status.CAPTURED,
        (),
        (),
        None,
        epoch,
        0,
        0,
    )


def test_without_a_terminal_each_event_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    display = display_for("s", PLAN, progress=True, console=Console(file=io.StringIO()))
    assert isinstance(display, Lines)
    with caplog.at_level(logging.INFO, "datastates"), display:
        display.begun("a", 1)
        display.reported("a", state(1, loss=0.25))
        display.ended("a", "tried again: ValueError")
        display.begun("a", 2)
    assert [record.getMessage() for record in caplog.records] == [
        "study s: a begins",
        "study s: a epoch 1/4: loss=0.25",
        "study s: a tried again: ValueError",
        "study s: a begins, attempt 2",
    ]


def test_a_terminal_shows_epochs_metrics_and_the_time_that_is_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert isinstance(display_for("s", PLAN, progress=True, console=console), Screen)
    display = Screen("s", PLAN, console, iter([100.0, 110.0, 120.0]).__next__)
    display.begun("a", 1)
    display.reported("a", state(1, loss=0.25))
    display.reported("a", state(2, loss=0.125))
    with console.capture() as shown:
        console.print(display._table())
    row = next(line for line in shown.get().splitlines() if " a " in line)
    assert [part.strip() for part in row.strip("│").split("│")] == [
        "a",
        "training",
        "2/4",
        "loss=0.125",
        "20 s",
    ]
    display.ended("a", "done")
    with console.capture() as shown:
        console.print(display._table())
    assert "study s: 1 of 2 done" in shown.get()
    assert "20 s" not in shown.get()


def test_what_was_done_before_does_not_count_for_the_pace() -> None:
    display = Screen(
        "s",
        PLAN,
        Console(file=io.StringIO(), force_terminal=True),
        iter([0.0, 1.0, 100.0, 110.0]).__next__,
    )
    display.begun("a", 1)
    display.reported("a", state(2))
    display.begun("a", 2)
    display.reported("a", state(3))
    assert display._rows["a"].left_s() == 10.0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_said_when_nothing_is_to_be(is_terminal: bool) -> None:
    out = io.StringIO()
    with display_for(
        "s", PLAN, progress=False, console=Console(file=out, force_terminal=is_terminal)
    ) as display:
        assert isinstance(display, Quiet)
        display.begun("a", 1)
    assert out.getvalue() == ""


def test_the_screen_is_drawn_and_left() -> None:
    out = io.StringIO()
    with display_for(
        "s", PLAN, progress=True, console=Console(file=out, force_terminal=True, width=100)
    ) as display:
        display.begun("a", 1)
        display.reported("a", state(4, loss=1.0))
        display.ended("a", "done")
    assert "4/4" in out.getvalue()
    assert "waiting" in out.getvalue()
