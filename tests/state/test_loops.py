"""Where a training goes on in its epochs, whatever a loop does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler, Repository, Tracker
from datastates.errors import InvalidInput

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
Seen = list[tuple[int, Any]]
Body = Callable[[Tracker, Seen, int | None], None]


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


class Stopped(Exception):
    """The training was stopped."""


def use(run: Tracker, seen: Seen, batch: Any, stop: int | None = None) -> None:
    """What a step does with a batch; stopped before the one after ``stop``."""
    if stop is not None and run.step > stop:
        raise Stopped
    seen.append((run.epoch, batch))
    run.capture()


def stopped_everywhere(
    repo: Repository, body: Body, steps: int, make: Callable[[], dict[str, Any]] = dict
) -> Seen:
    """What the training that never stops sees; those that are stopped after each step see the
    same."""
    never = never_stopped(repo, body, make)
    for stop in range(1, steps + 1):
        seen: Seen = []
        for until in (stop, None):
            torch.manual_seed(99 if until is None else 0)
            with (
                repo.track(branch=f"stopped-{stop}", weight=torch.zeros(1), **make()) as run,
                suppress(Stopped),
            ):
                body(run, seen, until)
        assert seen == never, f"stopped after {stop}"
    return never


def never_stopped(repo: Repository, body: Body, make: Callable[[], dict[str, Any]] = dict) -> Seen:
    """What the training that is never stopped sees."""
    seen: Seen = []
    torch.manual_seed(0)
    with repo.track(branch="never", weight=torch.zeros(1), **make()) as run:
        body(run, seen, None)
    return seen


def stopped(repo: Repository, body: Body, stop: int) -> tuple[Seen, Seen]:
    """What a training sees until it is stopped, and once it is started again."""
    seen: Seen = []
    then: Seen = []
    for found, until in ((seen, stop), (then, None)):
        torch.manual_seed(99 if until is None else 0)
        with repo.track(branch=f"stopped-{stop}", weight=torch.zeros(1)) as run, suppress(Stopped):
            body(run, found, until)
    return seen, then


def resumed_everywhere(repo: Repository, body: Body) -> Seen:
    """What the training that is never stopped sees.

    What one sees before and after it is stopped, anywhere, is the same."""
    never = never_stopped(repo, body)
    for stop in range(1, len(never)):
        seen, then = stopped(repo, body, stop)
        assert seen + then == never, f"stopped after {stop}"
    return never


def test_epochs_end_where_they_would_have(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        for epoch in run.epochs(3):
            assert epoch == run.epoch
            for batch in run.steps(range(4)):
                use(run, seen, batch, stop)
        assert (run.epoch, run.step) == (3, 12)

    seen = stopped_everywhere(repo, body, 12)
    assert seen == [(epoch, batch) for epoch in range(3) for batch in range(4)]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
def test_batches_have_the_numbers_that_they_would_have_had(repo: Repository) -> None:
    kinds: dict[str, tuple[Callable[[], Any], bool]] = {
        "a list": (lambda: [*range(4)], False),
        # a range will do
        "a loader": (lambda: DataLoader(range(8), batch_size=2, shuffle=True), False),  # type: ignore[arg-type]
        "a tracked loader": (
            lambda: StatefulDataLoader([*range(8)], batch_size=2, shuffle=True),
            True,
        ),
        "a tracked sampler": (lambda: PermutationSampler(4), True),
    }
    for kind, (make, is_tracked) in kinds.items():
        numbers: list[list[int]] = []
        for stops in ([], [1], [3], [4], [6]):
            numbers.append([])
            for stop in [*stops, 99]:
                source = make()
                tracked = {"source": source} if is_tracked else {}
                with (
                    repo.track(
                        branch=f"{kind}-{len(numbers)}".replace(" ", "-"),
                        weight=torch.zeros(1),
                        **tracked,
                    ) as run,
                    suppress(Stopped),
                ):
                    assert run.batch == 0
                    for _ in run.epochs(2):
                        for _ in run.steps(source):
                            if run.step > stop:
                                raise Stopped
                            numbers[-1].append(run.batch)
                            run.capture()
        assert numbers == [[0, 1, 2, 3] * 2] * 5, kind


def test_what_follows_the_loop_in_an_epoch_is_done_once_for_each_of_them(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        for epoch in run.epochs(3):
            for batch in run.steps(range(4)):
                use(run, seen, batch, stop)
            seen.append((epoch, "validated"))
            run.capture(metrics={"val_loss": 1.0})

    seen = stopped_everywhere(repo, body, 12)
    assert seen.count((1, "validated")) == 1
    assert [state.step for state in repo.log("never", limit=3)] == [
        12,
        12,
        11,
    ], "the capture after the loop counts no step"


def test_an_epoch_that_is_left_goes_on_with_the_next(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        sampler: Any = run.training.objects["sampler"]
        for _ in run.epochs(3):
            for rows in run.steps(sampler.batches(2)):
                use(run, seen, rows, stop)
                if run.step % 3 == 0:
                    break
            run.capture()

    seen = stopped_everywhere(repo, body, 9, lambda: {"sampler": PermutationSampler(10, seed=2)})
    sampler, order = PermutationSampler(10, seed=2), []
    for epoch in range(3):
        sampler.epoch, sampler.position = epoch, 0
        order += [(epoch, rows) for rows in list(sampler.batches(2))[:3]]
    assert seen == order, "each epoch begins with its own order"


def test_several_loaders_in_an_epoch_each_keep_their_place(repo: Repository) -> None:
    def one_after_the_other(run: Tracker, seen: Seen, stop: int | None) -> None:
        for _ in run.epochs(2):
            for source in (range(2), "abc"):
                for batch in run.steps(source):
                    use(run, seen, batch, stop)

    assert [batch for _, batch in stopped_everywhere(repo, one_after_the_other, 10)] == [
        0,
        1,
        "a",
        "b",
        "c",
    ] * 2


def test_loaders_side_by_side_go_on_together(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        for _ in run.epochs(2):
            for pair in zip(run.steps(range(4)), run.steps(list("abcd")), strict=False):
                if stop is not None and run.step > 2 * stop:
                    raise Stopped
                seen.append((run.epoch, pair))
                run.capture()

    assert [pair for _, pair in stopped_everywhere(repo, body, 8)] == list(
        zip(range(4), "abcd", strict=True)
    ) * 2


def test_more_epochs_go_on_and_none_are_said_to_be_left(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def train(count: int) -> list[int]:
        with repo.track(weight=torch.zeros(1)) as run:
            epochs = []
            for epoch in run.epochs(count):
                for _ in run.steps(range(2)):
                    pass
                run.capture()
                epochs.append(epoch)
            return epochs

    assert train(2) == [0, 1]
    with caplog.at_level(logging.INFO, "datastates"):
        assert train(2) == []
    assert "nothing is left to do: 2 of 2 epochs are done; raise run.epochs(2)" in caplog.text
    assert train(4) == [2, 3]


def test_one_capture_an_epoch_without_steps_counts_it_as_done(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with repo.track(weight=torch.zeros(1)) as run:
        for epoch in run.epochs(5):
            run.capture()
            if epoch == 1:
                break
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(epochs := run.epochs(5)) == 2
        assert not caplog.records
        run.capture()
        run.capture()
        assert "two captures in epoch 2 without run.steps" in caplog.text
        assert next(epochs) == 3


def test_going_back_inside_a_loop_goes_on_from_there(repo: Repository) -> None:
    seen: Seen = []
    with repo.track(weight=torch.zeros(1)) as run:
        for _ in run.epochs(2):
            for batch in run.steps(range(4)):
                seen.append((run.epoch, batch))
                run.capture()
                if len(seen) == 6:
                    run.restore("main~3")
                    assert (run.step, run.epoch) == (3, 0)
        assert run.step == 8
    assert seen == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
        (1, 1),
        (0, 3),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]


def test_going_back_after_the_loop_has_the_epochs_go_on_from_there(repo: Repository) -> None:
    epochs, has_gone_back = [], False
    with repo.track(weight=torch.zeros(1)) as run:
        for epoch in run.epochs(3):
            batches = list(run.steps(range(2)))
            epochs.append((epoch, len(batches)))
            run.capture()
            if epoch == 2 and not has_gone_back:
                has_gone_back = True
                run.restore("main~1")
    assert epochs == [(0, 2), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("data", ["skip", "reshuffle"])
def test_a_guard_rewinds_inside_epochs(repo: Repository, data: Any) -> None:
    model, sampler = nn.Linear(1, 1), PermutationSampler(12, seed=1)
    seen: list[tuple[int, list[int]]] = []
    with repo.track(model=model, sampler=sampler) as run:
        guard = run.guard(data=data, back=1 if data == "skip" else 3)
        for _ in run.epochs(2):
            for rows in run.steps(sampler.batches(2)):
                seen.append((run.epoch, rows))
                if guard.rewound(float("nan") if len(seen) == 8 else 1.0):
                    continue
                run.capture()
    epochs = [
        [row for epoch, rows in seen if epoch == number for row in rows] for number in range(2)
    ]
    if data == "skip":
        assert [sorted(rows) for rows in epochs] == [list(range(12))] * 2
        assert run.step == 10
    else:
        assert run.step == 12, "it goes back over the beginning of the epoch, and on"
        assert seen[8][0] == 0
        assert [epoch for epoch, _ in seen[-6:]] == [1] * 6


class Distributed(Sampler[int]):
    """Shuffles by its epoch, which it is told, as torch's DistributedSampler."""

    epoch = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_that_asks_for_the_epoch_is_told(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        # a range will do
        loader: Any = DataLoader(range(6), sampler=Distributed(), batch_size=2)  # type: ignore[arg-type]
        for _ in run.epochs(3):
            for batch in run.steps(loader):
                use(run, seen, batch.tolist(), stop)

    seen = stopped_everywhere(repo, body, 9)
    assert (
        len({tuple(map(tuple, (batch for at, batch in seen if at == epoch))) for epoch in range(3)})
        == 3
    )


def test_a_loop_by_hand_that_was_resumed_is_told_of_epochs_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def train(stop: int) -> None:
        with repo.track(weight=torch.zeros(1)) as run:
            for _ in range(3):
                for _ in run.steps(range(10)):
                    run.capture()
                    if run.step == stop:
                        return

    train(20)
    assert "run.epochs" not in caplog.text
    train(100)
    assert caplog.text.count("loop over run.epochs(n), which goes on in the right epoch") == 1


def test_a_state_without_its_place_begins_with_epoch_0_and_says_so(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with repo.track(weight=torch.zeros(1)) as run:
        run.capture()
    assert "loops" not in repo.load("main")
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(run.epochs(1)) == 0
    assert "does not say which epoch it is of" in caplog.text


def test_iterators_and_other_loaders_than_before_are_told_apart(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(run.steps(enumerate("abc"))) == (0, "a")
        assert "enumerate, whose place in the data is not known" in caplog.text
        next(iterator := run.steps(range(3)))
        run.capture()
        iterator.close()
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(run.steps(range(5))) == 0
    assert "taken after 1 batches of a loader of 3, and run.steps is given one of 5" in caplog.text
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(run.steps(batch for batch in range(5))) == 0
    assert "a generator, whose place is not known" in caplog.text


def test_what_makes_no_sense_is_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="the name 'loops' is taken"):
        repo.track(loops=1)
    with repo.track(weight=torch.zeros(1)) as run:
        for count in (-1, True, 2.5, "3"):
            with pytest.raises(InvalidInput, match="the number of epochs is"):
                run.epochs(count)  # type: ignore[arg-type]  # that is the point
        outer = run.epochs(2)
        next(outer)
        inner = run.epochs(3)
        next(inner)
        with pytest.raises(InvalidInput, match=r"another run\.epochs was begun"):
            next(outer)


def test_a_sampler_that_is_resumed_at_the_end_of_an_epoch_has_the_next_one_to_give(
    repo: Repository,
) -> None:
    sampler = PermutationSampler(6)
    with repo.track(sampler=sampler) as run:
        list(sampler)
        run.capture()
    again = PermutationSampler(6)
    with repo.track(sampler=again):
        # a range will do
        assert len(list(DataLoader(range(6), sampler=again, batch_size=2))) == 3  # type: ignore[arg-type]
        assert again.epoch == 1


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@pytest.mark.parametrize(
    "make",
    [
        # a range will do
        lambda: DataLoader(range(6), 2, shuffle=True, generator=_seeded()),  # type: ignore[arg-type]
        lambda: DataLoader(
            range(6),  # type: ignore[arg-type]
            2,
            sampler=RandomSampler(range(6), replacement=True, generator=_seeded()),
        ),
        lambda: DataLoader(range(6), 2, sampler=PermutationSampler(6, seed=3)),  # type: ignore[arg-type]
        lambda: PermutationSampler(6, seed=3).batches(2),
        lambda: [torch.zeros(1), torch.ones(1)],
    ],
    ids=["generator", "replacement", "sampler", "batches", "list"],
)
def test_what_nobody_tracks_goes_on_from_within_an_epoch_and_from_between_two(
    repo: Repository, make: Callable[[], Any]
) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        loader = make()
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                use(run, seen, torch.as_tensor(batch).tolist(), stop)
            seen.append((epoch, torch.rand(()).item()))
            run.capture()

    stopped_everywhere(repo, body, 9)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("is_own", [True, False], ids=["permutation", "shuffle"])
def test_a_tracked_loader_whose_epoch_was_left_begins_the_next(
    repo: Repository, is_own: bool
) -> None:
    def make() -> dict[str, Any]:
        order = {"sampler": PermutationSampler(10, seed=2)} if is_own else {"shuffle": True}
        return {"loader": StatefulDataLoader(range(10), batch_size=2, **order)}

    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        loader: Any = run.training.objects["loader"]
        for _ in run.epochs(3):
            for number, batch in enumerate(run.steps(loader)):
                seen.append((run.epoch, batch.tolist()))
                if number == 2:
                    break
            if run.epoch + 1 == stop:
                run.capture()
                raise Stopped
            run.capture()

    never = stopped_everywhere(repo, body, 2, make)
    assert [epoch for epoch, _ in never] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# --- epochs that are left -------------------------------------------------------------------------


Made = tuple[Any, dict[str, Any]]


def _plain() -> Made:
    # a range will do
    return DataLoader(range(8), batch_size=2, shuffle=True), {}  # type: ignore[arg-type]


def _own_order() -> Made:
    # likewise
    return DataLoader(range(8), batch_size=2, shuffle=True, generator=_seeded()), {}  # type: ignore[arg-type]


def _permuted() -> Made:
    sampler = PermutationSampler(8, seed=3)
    # likewise
    return DataLoader(range(8), batch_size=2, sampler=sampler), {"sampler": sampler}  # type: ignore[arg-type]


def _kept() -> Made:
    loader = StatefulDataLoader(range(8), batch_size=2, shuffle=True)
    return loader, {"loader": loader}


def _train(repo: Repository, branch: str, made: Made, *, epochs: int = 3, **leaving: Any) -> Seen:
    with repo.track(branch=branch, weight=torch.zeros(1), **made[1]) as run:
        return _epochs(run, made[0], epochs, **leaving)


def _epochs(
    run: Tracker,
    loader: Any,
    epochs: int,
    *,
    stop: int | None = None,
    after: int | None = None,
    is_raised: bool = False,
) -> Seen:
    """Left in the middle once so many steps are done, or after an epoch; captured everywhere,
    and once they are left."""
    seen: Seen = []
    try:
        for epoch in run.epochs(epochs):
            for batch in run.steps(loader):
                seen.append((epoch, batch.tolist()))
                run.capture()
                if run.step == stop:
                    if is_raised:
                        raise KeyboardInterrupt  # noqa: TRY301  # as the terminal does
                    break
            if run.step == stop or epoch == after:
                break
    except KeyboardInterrupt:
        pass
    run.capture(message="left")
    return seen


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("make", [_plain, _own_order, _permuted, _kept])
def test_a_capture_after_epochs_that_were_left_in_the_middle_goes_on_there(
    repo: Repository, make: Callable[[], Made]
) -> None:
    torch.manual_seed(0)
    never = _train(repo, "never", make())
    for is_raised in (True, False):
        for stop in (1, 6):
            torch.manual_seed(0)
            branch = f"stopped-{stop}-{is_raised}"
            seen = _train(repo, branch, make(), stop=stop, is_raised=is_raised)
            assert seen + _train(repo, branch, make()) == never, branch


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("make", [_plain, _own_order, _permuted, _kept])
def test_a_capture_after_epochs_that_were_left_at_the_end_of_one_goes_on_with_the_next(
    repo: Repository, make: Callable[[], Made]
) -> None:
    torch.manual_seed(0)
    never = _train(repo, "never", make())
    torch.manual_seed(0)
    seen = _train(repo, "stopped", make(), after=1)
    assert repo.load("stopped")["loops"]["epoch"] == 2
    assert seen + _train(repo, "stopped", make()) == never


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("make", [_plain, _own_order, _permuted, _kept])
def test_epochs_that_were_left_go_on_in_the_same_process_too(
    repo: Repository, make: Callable[[], Made]
) -> None:
    torch.manual_seed(0)
    never = _train(repo, "never", make())
    ways: tuple[dict[str, Any], ...] = ({"stop": 6}, {"after": 0})
    for leaving in ways:
        torch.manual_seed(0)
        loader, tracked = make()
        with repo.track(
            branch=f"left-{next(iter(leaving))}", weight=torch.zeros(1), **tracked
        ) as run:
            assert _epochs(run, loader, 3, **leaving) + _epochs(run, loader, 3) == never
            assert run.epoch == 3


def test_epochs_without_steps_that_were_left_after_a_capture_go_on_with_the_next(
    repo: Repository,
) -> None:
    with repo.track(weight=torch.zeros(1)) as run:
        for epoch in run.epochs(5):
            run.capture()
            if epoch == 1:
                break
        run.capture(message="stopped early")
    with repo.track(weight=torch.zeros(1)) as run:
        assert next(run.epochs(5)) == 2


def test_a_pass_after_epochs_that_were_left_is_another(repo: Repository) -> None:
    for _ in range(2):
        with repo.track(weight=torch.zeros(1)) as run:
            for _ in run.epochs(2):
                next(batches := run.steps(range(4)))
                break
            batches.close()
            assert list(run.steps("abcd")) == [*"abcd"]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("make", [_plain, _own_order, _permuted, _kept])
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "not captured"])
def test_an_epoch_that_was_cut_short_is_over_once_a_capture_says_so(
    repo: Repository, make: Callable[[], Made], is_captured: bool
) -> None:
    def train(branch: str, after: int | None) -> Seen:
        seen: Seen = []
        loader, tracked = make()
        with repo.track(branch=branch, weight=torch.zeros(1), **tracked) as run:
            for epoch in run.epochs(3):
                for batch in run.steps(loader):
                    seen.append((epoch, batch.tolist()))
                    if len(seen) % 2 == 0:
                        break
                run.capture()
                if epoch == after:
                    break
            if is_captured:
                run.capture(message="stopped early")
        return seen

    torch.manual_seed(0)
    never = train("never", None)
    for after in (0, 1):
        torch.manual_seed(0)
        assert train(f"stopped-{after}", after) + train(f"stopped-{after}", None) == never


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("make", [_plain, _own_order, _permuted, _kept])
@pytest.mark.parametrize("limit", [2, 99], ids=["cut short", "whole"])
def test_captures_before_the_first_batch_of_an_epoch_and_after_the_last_epoch_go_on_in_the_order_of_never_stopping(
    repo: Repository, make: Callable[[], Made], limit: int
) -> None:
    def train(branch: str, epochs: int, *, stop: int | None = None) -> Seen:
        seen: Seen = []
        loader, tracked = make()
        with suppress(Stopped), repo.track(branch=branch, weight=torch.zeros(1), **tracked) as run:
            for epoch in run.epochs(epochs):
                if epoch:
                    run.capture(message="begins")
                if epoch == stop:
                    raise Stopped
                for count, batch in enumerate(run.steps(loader), 1):
                    seen.append((epoch, batch.tolist()))
                    if count == limit:
                        break
            run.capture(message="done")
        return seen

    torch.manual_seed(0)
    never = train("never", 3)
    torch.manual_seed(0)
    assert train("stopped", 3, stop=1) + train("stopped", 3) == never
    torch.manual_seed(0)
    assert train("raised", 1) + train("raised", 2) + train("raised", 3) == never


def test_each_of_several_loaders_goes_on_in_its_own_order(repo: Repository) -> None:
    def body(run: Tracker, seen: Seen, stop: int | None) -> None:
        data: Any = range(4)
        loaders = [
            DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))
            for seed in (1, 2)
        ]
        for epoch in run.epochs(3):
            for number, loader in enumerate(loaders):
                for batch in run.steps(loader):
                    if stop is not None and len(seen) == stop:
                        raise Stopped
                    seen.append((epoch, (number, batch.tolist())))
                    run.capture()

    never = resumed_everywhere(repo, body)
    seen: Seen = []
    for stop in range(1, len(never)):
        then: Seen = []
        with repo.track(branch="again-and-again", weight=torch.zeros(1)) as run, suppress(Stopped):
            body(run, then, 1 if stop < len(never) - 1 else None)
        seen += then
    assert seen == never
