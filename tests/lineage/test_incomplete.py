"""What is said of states of several ranks that are not whole, and of the parts of those that
are."""

from __future__ import annotations

import math

import pytest

from datastates.errors import NotFound
from datastates.lineage import Database
from datastates.lineage.query import revision
from datastates.lineage.query.incomplete import incomplete, parts_of, ranks_text
from datastates.lineage.states import Why
from datastates.lineage.views.text import by_rank, spread_text
from tests.support.parts import BRANCH, run_job


def test_what_waits_and_what_was_given_up_is_told_with_ranks_and_reasons(
    database: Database,
) -> None:
    job = run_job(database, size=3)
    with database.read() as session:
        found = incomplete(session, limit=10)
    (waits,), (dropped,) = found.waiting, found.given_up
    assert (waits.uid, waits.branch, waits.step, waits.missing, waits.ranks, waits.has_ended) == (
        job.waits,
        BRANCH,
        6,
        (2,),
        (0, 1),
        False,
    )
    assert (dropped.uid, dropped.branch, dropped.step, dropped.rank, dropped.world_size) == (
        job.given_up,
        BRANCH,
        5,
        1,
        3,
    )
    assert (dropped.why, dropped.reason, found.total_given_up) == (
        Why.SKIPPED,
        "there was no room in memory",
        1,
    )
    assert str(dropped).endswith(
        "was given up because of rank 1 (skipped): there was no room in memory"
    )
    with database.read() as session:
        assert (
            incomplete(session, limit=0).given_up,
            incomplete(session, limit=0).total_given_up,
        ) == ((), 1)


def test_a_state_whose_runs_ended_says_so(database: Database) -> None:
    run_job(database, ended=True, steps=1)
    with database.read() as session:
        (waits,) = incomplete(session, limit=0).waiting
    assert waits.has_ended
    assert "run all its ranks again" in str(waits)


def test_the_parts_of_a_state_say_whose_they_are(database: Database) -> None:
    job = run_job(database, size=3)
    with database.read() as session:
        parts = parts_of(session, job.whole[0])
        assert parts_of(session, job.given_up) == []
        assert [part.rank for part in parts_of(session, job.waits)] == [0, 1]
    assert [(part.rank, part.run, part.node, part.bytes_total) for part in parts] == [
        (rank, job.runs[rank], f"host{rank // 2}", (rank + 1) << 20) for rank in range(3)
    ]


def test_whoever_asks_for_a_state_that_is_not_whole_hears_why(database: Database) -> None:
    job = run_job(database, size=3)
    with database.read() as session:
        with pytest.raises(NotFound, match="waits for the parts of rank 2 of 3"):
            revision.resolve(session, job.waits)
        with pytest.raises(NotFound, match=r"given up because of rank 1 \(skipped\)"):
            revision.resolve(session, job.given_up[:8])
        with pytest.raises(NotFound, match="no state's uid begins with"):
            revision.resolve(session, "ffff0000ffff")


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8")]
)
def test_ranks_are_written_as_spans(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_what_ranks_measured_is_told_apart_from_names_that_only_look_so() -> None:
    metrics = {
        "loss": 1.0,
        "loss@0": 1.0,
        "loss@1": 3.0,
        "loss@7": 9.0,
        "acc": 0.5,
        "acc@1": 0.6,
        "acc@5": 0.9,
    }
    whole, ranks = by_rank(metrics, 2)
    assert ranks == {"loss": {0: 1.0, 1: 3.0}}
    assert set(whole) == {"loss", "loss@7", "acc", "acc@1", "acc@5"}
    assert spread_text({0: 1.0, 1: math.nan, 2: 3.0}, 6) == "1 to 3, mean 2"
    assert by_rank(metrics, 1) == (metrics, {})
