"""``cadence``: what a repository's own history says of how often to write."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from datastates.lineage import Database, Run
from datastates.lineage.states import DIED
from datastates.lineage.write import runs
from datastates.policy.computed import CheckFreq
from datastates.policy.contract import Costs, noted
from tests.cli.conftest import RUN, Invoke

BEGAN = datetime(2026, 3, 4, tzinfo=UTC)
COSTS = Costs(interval_s=0.2, write_s=1.5, overhead_s=0.07, held_s=0.002, captures=900, writes=40)


@pytest.fixture
def measured(root: Path) -> Path:
    """The repository, in which three more processes ran for a day each, one of which died; the
    newest trained ``main`` and measured."""
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        runs.finish(session, RUN.uid, RUN.started_at)
        for index in range(3):
            process = replace(
                RUN, uid=f"{index}".ljust(24, "b"), started_at=BEGAN + timedelta(days=index)
            )
            runs.start(session, process)
            training = f"{index}".ljust(24, "c")
            runs.start(
                session,
                replace(
                    process, uid=training, process=process.uid, branch="main" if index else "old"
                ),
            )
            runs.finish(session, process.uid, process.started_at + timedelta(days=1))
        runs.note(session, "0".ljust(24, "b"), {DIED: True})
        runs.note(session, training, noted(COSTS, CheckFreq().choose(COSTS, None)))
    database.close()
    return root


@pytest.mark.usefixtures("measured")
def test_it_says_what_was_chosen_what_it_cost_and_what_each_policy_would_choose(
    invoke: Invoke,
) -> None:
    done = invoke("cadence", "main")
    assert done.code == 0, done
    assert "branch main, training 2ccccccccc of 2026-03-06" in done.out
    assert "it went by checkfreq:3.5%: every 10 captures" in done.out
    assert "a write took 1.5 s and delayed by 70 ms (900 captures, 40 writes)" in done.out
    assert (
        "1 of 4 processes died in 2 d: reckoned with is a failure every 36 h, with one in 24 h"
        " added" in done.out
    )
    rows = {line.split()[0]: line for line in done.out.splitlines()[5:]}
    assert list(rows) == [
        "cadence",
        "auto",
        "seconds:30",
        "checkfreq:3.5%",
        "young",
        "daly::first",
        "daly",
        "two-level",
    ]
    assert "2.25 min" in rows["young"], "the root of 2 * 0.07 s * 36 h"
    assert "waste is what writes and failures are expected to cost" in done.err


@pytest.mark.usefixtures("measured")
def test_what_one_is_told_wins_over_what_was_observed(invoke: Invoke) -> None:
    found = invoke("cadence", "main", "--mtbf", "1h", "--overhead", "1%", "--json").json
    assert (found["mtbf_s"], found["is_given"], found["costs"]["write_s"]) == (3600.0, True, 1.5)
    by_name = {each["choice"]["cadence"]: each for each in found["alternatives"]}
    assert by_name["checkfreq:1%"]["choice"]["every"] == 35
    assert by_name["young:1h"]["interval_s"] == pytest.approx((2 * 0.07 * 3600) ** 0.5 + 0.07)
    assert min(by_name.values(), key=lambda each: each["waste"])["choice"]["cadence"] in (
        "daly:1h",
        "young:1h",
        "daly:1h:first",
        "two-level:1h",
    )


@pytest.mark.usefixtures("measured")
def test_without_measures_it_says_so_and_a_branch_that_nobody_trained_is_none(
    invoke: Invoke,
) -> None:
    old = invoke("cadence", "old")
    assert (old.code, "measured what writing costs" in old.err) == (0, True)
    assert "1 of 4 processes died" in old.out
    none = invoke("cadence", "nowhere")
    assert (none.code, "no training was ever on a branch 'nowhere'" in none.err) == (3, True)
    wrong = invoke("cadence", "main", "--mtbf", "soon")
    assert (wrong.code, "'soon' is no time span" in wrong.err) == (5, True)


def test_what_is_noted_of_a_run_is_added_to_what_it_says(root: Path) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        before: Run = runs.get(session, RUN.uid)
        runs.note(session, RUN.uid, {"datastates.x": 1})
        runs.note(session, RUN.uid, {"datastates.y": None})
        runs.note(session, "f" * 24, {"datastates.x": 1})
        after = runs.get(session, RUN.uid)
    database.close()
    assert after.config == {**before.config, "datastates.x": 1, "datastates.y": None}
    assert after.chosen == before.chosen
