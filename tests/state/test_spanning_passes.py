"""Passes over data that go on from epoch to epoch, or end before an epoch does: they keep their
place too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import datastates
from datastates import Repository, Tracker
from datastates.state.data_position import Loops
from tests.state.test_loops import CONFIG, Seen, Stopped, never_stopped, resumed_everywhere, stopped


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


def _side_by_side(
    run: Tracker,
    seen: Seen,
    stop: int | None,
    unlabelled: Iterator[Any],
    restart: Callable[[], Iterator[Any]],
) -> None:
    # a range will do
    labelled: Any = DataLoader(range(3), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    for _ in run.epochs(4):
        for batch in run.steps(labelled):
            try:
                other = next(unlabelled)
            except StopIteration:
                unlabelled = restart()
                other = next(unlabelled)
            if stop is not None and len(seen) == stop:
                raise Stopped
            seen.append((run.epoch, (batch.item(), other.item(), run.batch)))
            run.capture()


@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_a_pass_that_goes_on_from_epoch_to_epoch_keeps_its_place(
    repo: Repository, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a range will do
        loader: Any = DataLoader(range(100, 100 + length), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        _side_by_side(run, seen, stop, iter(run.steps(loader)), lambda: iter(run.steps(loader)))

    resumed_everywhere(repo, body)
    assert {record.name for record in caplog.records} <= {"datastates.training.training"}, (
        "each training has another seed"
    )


def test_a_pass_that_each_epoch_takes_up_first_keeps_its_place_and_leaves_others_theirs(
    repo: Repository,
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a range will do
        shorter: Any = DataLoader(range(100, 102), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        going = iter(run.steps(shorter))
        for _ in run.epochs(3):
            labelled = iter(run.steps(range(3)))
            while True:
                other = next(going, None)
                if other is None:
                    going = iter(run.steps(shorter))
                    other = next(going)
                batch = next(labelled, None)
                if batch is None:
                    break
                if stop is not None and len(seen) == stop:
                    raise Stopped
                seen.append((run.epoch, (batch, other.item())))
                run.capture()

    resumed_everywhere(repo, body)


def test_each_of_two_passes_that_go_on_begins_again_by_itself(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a list will do
        sources: list[Any] = [
            DataLoader([at, at + 1], batch_size=1, shuffle=True)  # type: ignore[arg-type]
            for at in (100, 200)
        ]
        going = [iter(run.steps(source)) for source in sources]
        for _ in run.epochs(2):
            for batch in run.steps(range(5)):
                others = [next(each, None) for each in going]
                for number, other in enumerate(others):
                    if other is None:
                        going[number] = iter(run.steps(sources[number]))
                        others[number] = next(going[number])
                if stop is not None and len(seen) == stop:
                    raise Stopped
                seen.append(
                    (run.epoch, (batch, *(other.item() for other in others if other is not None)))
                )
                run.capture()

    resumed_everywhere(repo, body)


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_pass_after_the_one_that_takes_up_another_keeps_its_own_place(
    repo: Repository, comes_first: bool
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        def capture(*values: int) -> None:
            if stop is not None and len(seen) == stop:
                raise Stopped
            seen.append((run.epoch, values))
            run.capture()

        # a range will do
        loader: Any = DataLoader(range(100, 120), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        unlabelled = iter(run.steps(loader))
        for _ in run.epochs(3):
            for batch in run.steps(range(10, 13)) if comes_first else ():
                capture(batch)
            for batch in run.steps(range(4)):
                capture(batch, next(unlabelled).item())
            for batch in run.steps(range(20, 25)):  # validation
                capture(batch)

    resumed_everywhere(repo, body)


@pytest.mark.parametrize("length", [2, 40])
def test_a_pass_whose_first_batch_is_read_before_the_epochs_goes_on_in_them(
    repo: Repository, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a range will do
        loader: Any = DataLoader(range(100, 100 + length), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        unlabelled = iter(run.steps(loader))
        if run.resumed_from is None:
            next(unlabelled)
        _side_by_side(run, seen, stop, unlabelled, lambda: iter(run.steps(loader)))

    resumed_everywhere(repo, body)
    assert {record.name for record in caplog.records} <= {"datastates.training.training"}, (
        "each training has another seed"
    )


def test_sources_whose_passes_are_over_are_let_go() -> None:
    loops, made = Loops(list), []

    def endless() -> Iterator[Any]:
        while True:
            # a range will do
            loader: Any = DataLoader(range(3), batch_size=1)  # type: ignore[arg-type]
            made.append(weakref.ref(loader))
            yield from loops.batches(loader, is_resumed=False)

    batches = endless()
    for _ in loops.count(12, is_resumed=False):
        for _ in loops.batches(range(2), is_resumed=False):
            next(batches)
    gc.collect()
    assert len(made) == 8
    assert len([loader for loader in made if loader() is not None]) <= 2


def test_a_pass_that_is_begun_within_an_epoch_and_goes_on_is_told_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(run: Tracker, loader: Any) -> Iterator[Any]:
        while True:
            yield from run.steps(loader)

    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a range will do
        loader: Any = DataLoader(range(100, 105), batch_size=1, shuffle=True)  # type: ignore[arg-type]
        _side_by_side(run, seen, stop, endless(run, loader), lambda: endless(run, loader))

    never = never_stopped(repo, body)
    assert (
        caplog.text.count("a pass of run.steps that began within an epoch goes on in epoch 1") == 1
    )
    for stop in (1, 2, 4, 5, 6, 7, 9, 10):  # not 3, the end of the epoch in which it began
        seen, then = stopped(repo, body, stop)
        assert seen + then == never, f"stopped after {stop}"


def test_an_epoch_is_over_after_its_loop_though_another_pass_goes_on(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        other = iter(run.steps(range(100)))
        for epoch in run.epochs(4):
            for batch in run.steps(range(3)):
                seen.append((epoch, (batch, next(other))))
            seen.append((epoch, "validated"))
            run.capture()
            if stop == epoch:
                raise Stopped

    for stop in range(3):
        seen, then = stopped(repo, body, stop)
        assert [each for _, each in seen + then if each != "validated"] == [
            (number % 3, number) for number in range(12)
        ]
        assert [epoch for epoch, each in seen + then if each == "validated"] == [0, 1, 2, 3]


def test_the_shorter_of_two_loaders_ends_an_epoch_and_the_longer_begins_again(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        for _ in run.epochs(3):
            pairs = zip(run.steps(range(2)), run.steps(range(10, 15)), strict=False)
            for pair in pairs:
                if stop is not None and len(seen) == stop:
                    raise Stopped
                seen.append((run.epoch, pair))
                run.capture()

    resumed_everywhere(repo, body)
    assert {record.name for record in caplog.records} <= {"datastates.training.training"}, (
        "each training has another seed"
    )


def test_an_iterator_that_is_left_behind_in_an_epoch_is_not_taken_up_in_the_next(
    repo: Repository,
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        kept = []
        for _ in run.epochs(3):
            kept.append(batches := iter(run.steps(range(5))))
            for _ in range(2):
                batch = next(batches)
                if stop is not None and len(seen) == stop:
                    raise Stopped
                seen.append((run.epoch, batch))
                run.capture()

    never = never_stopped(repo, body)
    assert [batch for _, batch in never] == [0, 1] * 3
    _, then = stopped(repo, body, 3)
    assert then[0] == (1, 1)
    assert [batch for epoch, batch in then if epoch == 2] == [0, 1]


def test_an_endless_pass_that_is_cut_into_epochs_keeps_its_place(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        batches = iter(run.steps(range(100)))
        for epoch in run.epochs(3):
            for _ in range(4):
                seen.append((epoch, next(batches)))
                run.capture()
                if len(seen) == stop:
                    raise Stopped

    for stop in (2, 6, 8):
        seen, then = stopped(repo, body, stop)
        numbers = [batch for _, batch in seen + then]
        assert numbers == [*range(len(numbers))], (
            "in the epoch that goes on, its count of four begins anew"
        )
