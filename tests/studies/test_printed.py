"""What a study shows is readable wherever it is shown."""

from __future__ import annotations

from dataclasses import replace

from datastates.studies import Exploration, Plan, Progress, Result, Storage, Variant, describe, work
from tests.notebook.test_html import state

PLAN = Plan((Variant("first", epochs=2), Variant("second", parent="first")))


def exploration() -> Exploration:
    done = replace(state(3), metrics={"val_loss": 0.25})
    results = {
        "first": Result("first", Progress.DONE, done, 2),
        "second": Result("second", Progress.WAITING, None, 0),
    }
    return Exploration("tree", state(3), PLAN, results, storage=Storage(2, 50 << 20, 100 << 20))


def test_a_table_is_printed_as_text() -> None:
    text = str(exploration().table())
    assert text == repr(exploration().table())
    assert "study tree" in text
    assert any(
        "first" in line and "done" in line and "2/2" in line and "0.25" in line
        for line in text.splitlines()
    )
    assert "\x1b" not in text


def test_a_plan_is_printed_as_text() -> None:
    assert "2 variants in 2 stages" in str(describe(PLAN, work(PLAN)))


def test_a_notebook_shows_both_as_html() -> None:
    for shown in (exploration().table(), describe(PLAN, work(PLAN))):
        assert "second" in shown._repr_mimebundle_([], [])["text/html"]


def test_storage_boasts_of_nothing() -> None:
    assert (
        str(Storage(2, 50 << 20, 100 << 20))
        == "2 states in 50.0 MiB on disk; full copies would take 100.0 MiB (50%)"
    )
    assert (
        str(Storage(2, 107 << 20, 100 << 20))
        == "2 states in 107.0 MiB on disk, as full copies would take"
    )
    assert str(Storage(0, 0, 0)) == "0 states in 0.0 MiB on disk"
