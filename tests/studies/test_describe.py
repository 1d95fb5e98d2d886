"""What is said of a plan before anything of it runs."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

from rich.console import Console

from datastates.studies import Plan, cut, describe, grid, leave_out, work
from datastates.studies.results import announce

if TYPE_CHECKING:
    import pytest


def lines(plan: Plan, *, prefix: float = 0.0, limit: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(describe(plan, work(plan, prefix_epochs=prefix), limit=limit))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_tree_is_shown_with_its_data_its_cost_and_its_saving() -> None:
    assert lines(leave_out(cut(8000, 4), depth=2, epochs=6, schedule="log"), prefix=5) == [
        "6 variants in 2 stages, 8,000 samples in 4 subsets",
        "variant changes trained on validated on epochs full epochs",
        "1 4,000 (50%) 4,000 6 3.0",
        "1.1 6,000 (75%) 2,000 3 2.2",
        "1.2 6,000 (75%) 2,000 3 2.2",
        "2 4,000 (50%) 4,000 6 3.0",
        "2.1 6,000 (75%) 2,000 3 2.2",
        "2.2 6,000 (75%) 2,000 3 2.2",
        (
            "costs 20.0 epochs over the full data, the prefix's 5 in it; each variant from scratch"
            " would cost 53.0: W_N/W_D = 2.65"
        ),
    ]


def test_what_is_written_like_markup_is_shown_as_it_is_and_long_plans_are_cut() -> None:
    assert lines(grid({"[red]x": ["[bold]", "c", "d"]}, epochs=2), limit=1) == [
        "3 variants in 1 stage",
        "variant changes trained on validated on epochs full epochs",
        "grid-1 [red]x=[bold] as it chooses - 2 2.0",
        "and 2 variants more",
        (
            "costs 6.0 epochs over the full data; each variant from scratch would cost 6.0: W_N/W_D"
            " = 1.00"
        ),
    ]


def test_validation_that_the_start_has_seen_is_warned_of() -> None:
    assert (
        lines(leave_out(cut(80, 2), depth=1, epochs=1, seen=["1"]))[-1]
        == "the start was trained on what 1 variant of 2 is validated on (1): their validation"
        " shows what they forgot, not what they never saw"
    )


def test_plan_is_shown_on_a_terminal_and_logged_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    plan = leave_out(cut(80, 2), depth=1, epochs=1, seen=["1"])
    with caplog.at_level(logging.INFO, "datastates"):
        screen = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
        announce("s", plan, work(plan), screen)
        assert isinstance(screen.file, io.StringIO)
        assert screen.file.getvalue().startswith(
            "study s: 2 variants in 1 stage, 80 samples in 2 subsets\nvariant"
        )
        assert not caplog.records

        announce("s", plan, work(plan), Console(file=io.StringIO()))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.records[0].message.startswith(
        "study s: 2 variants in 1 stage, 80 samples in 2 subsets; costs 1.0 epochs"
    )
