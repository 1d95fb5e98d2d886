"""Branches at a glance, beside brute force over a random lineage."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from datastates.errors import Conflict, InvalidInput, SyntaxProblem
from datastates.lineage import Database, Run, State, Status
from datastates.lineage.query import names
from datastates.lineage.states import Life
from datastates.lineage.views.branch_rows import SORTS, Branch, Line, Lines, Setting, thinned
from datastates.lineage.views.branches import branches
from datastates.lineage.views.cards import DARK, LIGHT, colour_of, number_of
from datastates.lineage.views.comparison import parallels
from datastates.lineage.views.text import Direction, direction_of
from datastates.lineage.write import record, refs, runs
from tests.lineage.conftest import Grow, on_one_database
from tests.lineage.oracle import METRICS, START, Lineage, grow
from tests.support.effort import seeds
from tests.support.lineages import told

SAFE = (Status.DURABLE, Status.REPLICATED, Status.EXTERNAL)


@pytest.mark.parametrize("seed", seeds(15))
@pytest.mark.parametrize("direction", list(Direction))
def test_branches_are_told_as_brute_force_tells_them(
    database: Database, seed: int, direction: Direction
) -> None:
    lineage, drawn = grow(database, seed, 60), Lines(most=10)
    for metric in (*METRICS, METRICS[0]):
        with database.read() as session:
            found = branches(session, metric=metric, direction=direction, sort="name", drawn=drawn)
            assert (
                branches(session, metric=metric, direction=direction, sort="name", drawn=drawn)
                == found
            )
        assert [branch.name for branch in found] == sorted(lineage.branches)
        for branch in found:
            check(branch, lineage, metric, direction)


def test_the_lines_that_were_not_used_for_longest_go_first() -> None:
    keys = [(name, 1, "loss", 60) for name in "abc"]
    kept = Lines(most=2)
    for key in keys[:2]:
        kept.put(key, Line((1,), (0.5,)))
    kept.get(keys[0])
    kept.put(keys[2], Line())
    assert [kept.get(key) for key in keys] == [Line((1,), (0.5,)), None, Line()]


def check(branch: Branch, lineage: Lineage, metric: str, direction: Direction) -> None:
    own = [lineage.by_uid[uid] for uid in lineage.moves[branch.name]]
    fork = lineage.first_parent(own[0])
    owners = {
        uid: name
        for name, uids in lineage.moves.items()
        if name in lineage.branches
        for uid in uids
    }
    assert (branch.head, branch.step, branch.status) == (own[-1].uid, own[-1].step, own[-1].status)
    assert branch.states == len(own)
    if fork is None:
        assert branch.fork is None
    else:
        assert branch.fork is not None
        assert (branch.fork.state, branch.fork.step, branch.fork.branch) == (
            fork.uid,
            fork.step,
            owners[fork.uid],
        )
    assert branch.restorable == sum(state.status.is_restorable for state in own)
    assert branch.durable == sum(state.status in SAFE for state in own)
    assert branch.bytes == sum(state.bytes_new for state in own)
    assert (branch.began_at, branch.changed_at) == (own[0].created_at, own[-1].created_at)
    assert (branch.best and branch.best.value) == best(own, metric, direction)
    assert (branch.best_restorable and branch.best_restorable.value) == best(
        [s for s in own if s.status.is_restorable], metric, direction
    )
    for point in (branch.best, branch.best_restorable):
        if point is not None:
            state = lineage.by_uid[point.state]
            assert (state.metrics[metric], state.step, state.status) == (
                point.value,
                point.step,
                point.status,
            )
    having = [state for state in own if metric in state.metrics]
    assert (branch.last and branch.last.state) == (having[-1].uid if having else None)
    assert branch.line.steps == tuple(state.step for state in having)
    assert branch.line.values == tuple(
        None if math.isnan(state.metrics[metric]) else state.metrics[metric] for state in having
    )
    assert branch.run == own[-1].run
    ours, theirs = (config_of(lineage, state) for state in (own[-1], fork))
    assert branch.config == tuple(
        Setting(key, ours.get(key), theirs.get(key))
        for key in sorted(ours.keys() | theirs.keys())
        if (key in ours, ours.get(key), type(ours.get(key)) is bool)
        != (key in theirs, theirs.get(key), type(theirs.get(key)) is bool)
    )


def best(states: list[State], metric: str, direction: Direction) -> float | None:
    values = [
        state.metrics[metric]
        for state in states
        if math.isfinite(state.metrics.get(metric, math.nan))
    ]
    return (min if direction is Direction.MIN else max)(values, default=None)


def config_of(lineage: Lineage, state: State | None) -> dict[str, Any]:
    return {} if state is None or state.run is None else lineage.runs[state.run].config


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("sort", [*SORTS, *(f"-{sort}" for sort in SORTS)])
def test_pages_put_together_are_the_whole_in_order(
    database: Database, seed: int, sort: str
) -> None:
    grow(database, seed, 40)
    with database.read() as session:
        whole = list(branches(session, sort=sort, metric="loss"))
        paged: list[Branch] = []
        after: str | None = None
        while True:
            page = branches(session, sort=sort, metric="loss", limit=2, after=after)
            paged += page.items
            after = page.next
            if after is None:
                break
    # settings are those in which the branches of a page differ
    assert [replace(each, settings={}) for each in paged] == [
        replace(each, settings={}) for each in whole
    ]
    key = sort.removeprefix("-")
    if key in ("states", "step", "restorable", "durable", "bytes"):
        numbers = [getattr(branch, key) for branch in whole]
        assert numbers == sorted(numbers, reverse=not sort.startswith("-"))
    if key == "best":
        values = [
            branch.best.value
            for branch in whole
            if branch.best is not None and branch.best.value is not None
        ]
        assert values == sorted(values, reverse=sort.startswith("-"))
        assert all(branch.best is None for branch in whole[len(values) :]), (
            "what has no value comes last, whichever way"
        )


def test_a_condition_is_one_on_the_newest_state(database: Database, grow: Grow) -> None:
    shared = grow(branch="main", count=3, metrics={"loss": 1.0})
    grow(shared, branch="good", count=2, metrics={"loss": 0.1})
    grow(shared, branch="bad", count=2, metrics={"loss": 5.0})
    with database.read() as session:
        found = branches(session, "metrics.loss < 2", sort="name")
        assert ([branch.name for branch in found], found.matching, found.total) == (
            ["good", "main"],
            2,
            3,
        )
        assert [branch.name for branch in branches(session, "step >= 4", name="oo")] == ["good"]
        with pytest.raises(SyntaxProblem):
            branches(session, "metrics.loss <")
        for wrong in (
            {"sort": "x"},
            {"group": "step"},
            {"limit": 0},
        ):
            with pytest.raises(InvalidInput):
                branches(session, **wrong)


def test_a_search_orders_branches_by_their_newest_states(database: Database, grow: Grow) -> None:
    shared = grow(branch="main", count=3, metrics={"loss": 1.0})
    for name, count, loss in (("b", 2, 0.1), ("a", 1, 5.0), ("c", 3, math.nan)):
        grow(
            shared, branch=name, count=count, metrics={"loss": loss}, attributes={"of": name < "c"}
        )
    with database.read() as session:

        def found(query: str, **options: Any) -> list[str]:
            return [branch.name for branch in branches(session, query, **options)]

        assert found("order by metrics.loss", sort="name") == ["b", "main", "a", "c"]
        assert found("order by step desc") == ["c", "b", "a", "main"]
        assert found("step > 3 order by metrics.loss desc limit 2") == ["b", "c"]
        assert found("limit 2", sort="-name") == ["main", "c"]
        assert found("order by step", group="attr.of") == ["c", "a", "b", "main"]
        first = branches(session, "order by metrics.loss limit 3", limit=2)
        second = branches(session, "order by metrics.loss limit 3", limit=2, after=first.next)
        assert (first.matching, first.total, second.next) == (3, 4, None)
        assert [branch.name for branch in (*first, *second)] == ["b", "main", "a"]
        assert [
            one.branch for one in parallels(session, "order by metrics.loss limit 3").branches
        ] == ["b", "main", "a"]


def test_branches_have_the_settings_in_which_they_differ(database: Database, grow: Grow) -> None:
    configs: dict[str, dict[str, Any]] = {
        "main": {"lr": 0.1, "optimizer.lr": 0.1, "seed": 1, "a": 1, "datastates.x": 1},
        "fork": {"lr": 0.3, "optimizer.lr": 0.3, "seed": 1, "a": True, "datastates.x": 2},
        "other": {"lr": 0.3, "optimizer.lr": 0.3, "seed": 1, "a": 1, "extra": "yes"},
    }
    for number, (name, config) in enumerate(configs.items()):
        with database.write() as session:
            run = Run(f"{number:024x}", "h", "u", 1, (), None, None, config, {}, START, START)
            runs.start(session, run)
        grow(branch=name, count=1, run=run.uid)
    with database.read() as session:
        found = {branch.name: branch.settings for branch in branches(session)}
        assert found == {
            "main": {"a": 1, "lr": 0.1},
            "fork": {"a": True, "lr": 0.3},
            "other": {"a": 1, "extra": "yes", "lr": 0.3},
        }
        assert [branch.settings for branch in branches(session, names=["main"])] == [{}]


def test_a_branch_that_was_made_and_not_trained_has_no_states_of_its_own(
    database: Database, grow: Grow
) -> None:
    head = grow(branch="main", count=4, metrics={"loss": 1.0})
    with database.write() as session:
        refs.branch(session, "made", head.uid)
    with database.read() as session:
        (made,) = branches(session, name="made")
    assert made.fork is not None
    assert (made.states, made.fork.branch, made.fork.state, made.bytes) == (0, "main", head.uid, 0)


def test_a_fork_from_a_deleted_branch_names_it_as_gone(database: Database, grow: Grow) -> None:
    head = grow(branch="main", count=2)
    grow(head, branch="fork", count=2)
    with database.write() as session:
        refs.delete_ref(session, "main")
    with database.read() as session:
        (fork,) = branches(session)
    assert fork.fork is not None
    assert (fork.fork.branch, fork.fork.is_gone) == ("main", True)


def test_who_lives_is_asked_for_runs_that_did_not_finish(database: Database, grow: Grow) -> None:
    for number, finished in enumerate([None, START]):
        run = Run(f"{number}" * 24, "host", "me", 1, (), None, None, {}, {}, START, finished)
        with database.write() as session:
            runs.start(session, run)
            record.record(session, told(f"{number:024x}", "0" * 64, None, f"b{number}", run.uid, 0))
    with database.read() as session:
        assert [branch.life for branch in branches(session, sort="name")] == [
            Life.UNKNOWN,
            Life.ENDED,
        ]
        lives = [
            branch.life
            for branch in branches(session, sort="name", living=lambda run: Life.RUNNING)
        ]
    assert lives == [Life.RUNNING, Life.ENDED]


def test_a_rate_goes_over_the_latest_captures_of_the_newest_run(database: Database) -> None:
    parent = None
    with database.write() as session:
        for number in range(2):
            runs.start(
                session, Run(f"{number}" * 24, "host", "me", 1, (), None, None, {}, {}, START)
            )
        for step in range(60):
            # a second for each step, then a day's pause, then a tenth of a second for each
            run, at = (
                ("0" * 24, timedelta(seconds=step))
                if step < 30
                else ("1" * 24, timedelta(days=1, seconds=step / 10))
            )
            new = told(f"{step:024x}", "0" * 64, parent, "main", run, step, created_at=START + at)
            parent = record.record(session, new).uid
    with database.read() as session:
        (main,) = branches(session)
    assert main.steps_per_s == pytest.approx(10.0)


@on_one_database
def test_the_most_relevant_metric_is_chosen(database: Database, grow: Grow) -> None:
    grow(branch="main", metrics={"acc": 0.5, "grad_norm": 1.0, "val_loss": 2.0})
    other = grow(branch="other", metrics={"acc": 0.5, "a": 1.0})
    grow(other, metrics={"of_no_branch": 1.0})
    with database.read() as session:
        found = branches(session)
    assert (found.metric, found.direction) == ("val_loss", Direction.MIN)
    assert set(found.metrics) == {"acc", "grad_norm", "val_loss", "a"}


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        ("val_loss", "min"),
        ("acc", "max"),
        ("val/accuracy", "max"),
        ("evalF1", "max"),
        ("accuracy_error", "min"),
        ("grad_norm", "min"),
        ("mAP", "max"),
    ],
)
def test_which_way_a_metric_gets_better_is_told_by_its_name(key: str, direction: str) -> None:
    assert direction_of(key) == direction


def test_thinned_curves_keep_their_ends_and_extremes() -> None:
    points = [
        (number, math.sin(number / 7) if number != 500 else math.nan) for number in range(1000)
    ]
    points[333], points[777] = (333, 9.0), (777, -9.0)
    found = thinned(points, 60)
    assert len(found) <= 60
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {(333, 9.0), (777, -9.0)} <= set(found)
    assert [number for number, value in found if math.isnan(value)] == [500]
    assert thinned(points[:60], 60) == points[:60]


def test_the_colour_of_a_branch_is_what_the_design_says() -> None:
    expected = {
        "main": 0,
        "fork": 2,
        "lr-0.1/wd-0": 5,
        "study/variant-3": 3,
        "Größe": 2,
        "実験": 9,
        "a": 8,
        "feature/x": 6,
    }
    assert {name: number_of(name) for name in expected} == expected
    assert (colour_of("main"), colour_of("fork", is_dark=False)) == (DARK[0], LIGHT[2])


def test_renamed_branch_keeps_its_history(database: Database, grow: Grow) -> None:
    head = grow(branch="main", count=3, metrics={"loss": 0.5})
    with database.write() as session:
        before = branches(session)
        refs.write(session, "good", branch="main", author="me")
        refs.rename(session, "main", "exp")
        assert [note.text for note in names.notes(session, branch="exp")] == ["good"]
        assert [event.reason for event in names.reflog(session, "exp")] == ["rename from main"]
    with database.read() as session:
        (was,), (now,) = before.items, branches(session).items
    assert replace(was, name="exp") == now
    assert (now.head, now.states, now.best and now.best.value) == (head.uid, 3, 0.5)
    with database.write() as session:
        refs.branch(session, "other", head.uid)
    with pytest.raises(Conflict, match="'other' is taken"), database.write() as session:
        refs.rename(session, "exp", "other")


def test_branch_made_at_a_state_of_another_has_the_curve_of_its_path(
    database: Database, grow: Grow
) -> None:
    root = grow(branch="main", metrics={"loss": 0.25})
    head = grow(root, branch="main", count=3, metrics={"loss": 0.5})
    with database.write() as session:
        refs.branch(session, "second", head.uid)
        main, second = branches(session, metric="loss", sort="name")
    assert (second.states, second.best, second.last, second.line) == (
        0,
        main.best,
        main.last,
        main.line,
    )
    assert second.best is not None
    assert (second.best.value, second.line.values) == (0.25, (0.25, 0.5, 0.5, 0.5))
    grow(head, branch="second", metrics={"loss": 0.75})
    with database.read() as session:
        _, second = branches(session, metric="loss", sort="name")
    assert (second.states, second.line.values) == (1, (0.75,))


def test_branch_that_is_deleted_and_made_again_has_its_states(
    database: Database, grow: Grow
) -> None:
    first = grow(branch="main", count=3, metrics={"loss": 0.25})
    grow(first, branch="main", count=3, metrics={"loss": 0.5})
    with database.write() as session:
        refs.delete_ref(session, "main")
        refs.branch(session, "main", first.uid)
        (main,) = branches(session)
        assert (main.fork, main.states, main.best and main.best.value) == (None, 3, 0.25)


def test_branch_that_is_renamed_by_hand_has_the_states_of_the_old_one(
    database: Database, grow: Grow
) -> None:
    head = grow(branch="main", count=3, metrics={"loss": 0.5})
    with database.write() as session:
        refs.branch(session, "exp", head.uid)
        refs.delete_ref(session, "main")
        (exp,) = branches(session)
    assert (exp.fork, exp.states, exp.last and exp.last.value) == (None, 3, 0.5)


def test_branch_that_was_moved_back_and_forth_is_as_before(database: Database, grow: Grow) -> None:
    middle = grow(branch="main", count=3)
    head = grow(middle, branch="main", count=3)
    with database.write() as session:
        refs.move(session, "main", middle.uid, expected=head.uid)
        refs.move(session, "main", head.uid, expected=middle.uid)
        (main,) = branches(session)
    assert (main.fork, main.states) == (None, 6)


def test_branch_that_a_training_makes_again_after_its_deletion_has_its_states(
    database: Database, grow: Grow
) -> None:
    head = grow(branch="main", count=3)
    with database.write() as session:
        refs.delete_ref(session, "main")
    grow(head, branch="main")
    with database.read() as session:
        (main,) = branches(session)
    assert (main.fork, main.states) == (None, 4)
