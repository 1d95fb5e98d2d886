"""How trainings ended: what is recorded of it, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from datastates.lineage import Database, Run, State
from datastates.lineage.states import Ending, How, Life, ending_of, facts_of
from datastates.lineage.views.branches import branches
from datastates.lineage.write import runs

from .test_runs import new_run

Grow = Callable[..., State]


class Rude(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, None),
        (SystemExit(), None),
        (SystemExit(0), None),
        (ValueError("lr is -1\nand more"), Ending(How.FAILED, "ValueError: lr is -1", 7)),
        (RuntimeError(), Ending(How.FAILED, "RuntimeError", 7)),
        (RuntimeError("a\0b\ud800"), Ending(How.FAILED, "RuntimeError: a b ", 7)),
        (RuntimeError("x" * 500), Ending(How.FAILED, "RuntimeError: " + "x" * 185 + "…", 7)),
        (
            RuntimeError("postgresql://me:hidden@host/db is away"),
            Ending(How.FAILED, "RuntimeError: postgresql://me:***@host/db is away", 7),
        ),
        (Rude(), Ending(How.FAILED, "Rude", 7)),
        (SystemExit(3), Ending(How.FAILED, "SystemExit: 3", 7)),
        (SystemExit(143), Ending(How.INTERRUPTED, None, 7)),
        (KeyboardInterrupt(), Ending(How.INTERRUPTED, None, 7)),
        (asyncio.CancelledError(), Ending(How.INTERRUPTED, None, 7)),
    ],
)
def test_what_is_recorded_of_an_end_is_told_later(
    database: Database, error: BaseException | None, told: Ending | None
) -> None:
    run = new_run()
    with database.write() as session:
        runs.start(session, run)
        runs.note(session, run.uid, facts_of(error, 7))
        runs.finish(session, run.uid)
    with database.read() as session:
        found = runs.get(session, run.uid)
    assert ending_of(found, {}, is_over=True) == (told or Ending(How.ENDED))


def test_a_training_whose_process_died_was_killed_unless_it_was_over_before(
    database: Database, grow: Grow
) -> None:
    process = new_run()
    over, failed, going = (
        new_run(process=process.uid, branch=name) for name in ("over", "failed", "going")
    )
    with database.write() as session:
        for run in (process, over, failed, going):
            runs.start(session, run)
    for run in (over, failed, going):
        grow(branch=run.branch, run=run.uid, step=4)
    with database.write() as session:
        runs.finish(session, over.uid, datetime(2026, 5, 4, 4, tzinfo=UTC))
        runs.note(session, failed.uid, facts_of(OSError("gone"), 4))
        runs.finish(session, failed.uid, datetime(2026, 5, 4, 5, tzinfo=UTC))
    assert endings(database, Life.RUNNING) == {
        "going": None,
        "over": Ending(How.ENDED),
        "failed": Ending(How.FAILED, "OSError: gone", 4),
    }
    assert endings(database, Life.UNKNOWN)["going"] is None
    assert endings(database, Life.ENDED)["going"] == Ending(How.KILLED)
    with database.write() as session:
        # of a repository whose states are all on disk
        runs.recover(session, [process.uid], volatile=())
    assert endings(database, Life.UNKNOWN) == {
        "going": Ending(How.KILLED),
        "over": Ending(How.ENDED),
        "failed": Ending(How.FAILED, "OSError: gone", 4),
    }


def test_what_an_earlier_version_recorded_of_an_end_it_did_not_know_is_no_failure(
    database: Database,
) -> None:
    strange: Run = new_run(
        config={"datastates.ended": 3, "datastates.error": ["x"], "datastates.ended_at_step": "y"}
    )
    with database.write() as session:
        runs.start(session, strange)
        runs.finish(session, strange.uid)
    with database.read() as session:
        assert ending_of(runs.get(session, strange.uid), {}, is_over=True) == Ending(How.ENDED)


def endings(database: Database, life: Life) -> dict[str, Ending | None]:
    with database.read() as session:
        return {branch.name: branch.ending for branch in branches(session, living=lambda run: life)}
