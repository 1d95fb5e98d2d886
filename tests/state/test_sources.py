"""Wrappers of loaders are refused, and a place is found in streams and in batches of another
size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler, Repository
from datastates.errors import InvalidInput
from datastates.state.loaders import parts_of

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
LENGTH, SIZE, EPOCHS = 12, 2, 2
DATA: Any = range(LENGTH)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


class Prefetch:
    """As many scripts have one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class Bar:
    """A progress bar, such as tqdm."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


class Several:
    """Loaders one after the other."""

    def __init__(self, *loaders: Any) -> None:
        self.parts = loaders

    def __iter__(self) -> Iterator[Any]:
        for loader in self.parts:
            yield from loader


class Hiding:
    """A wrapper that does not show what it draws from."""

    def __init__(self, source: Any) -> None:
        self.begin: Callable[[], Iterator[Any]] = lambda: iter(source)

    def __iter__(self) -> Iterator[Any]:
        yield from self.begin()


Made = tuple[Any, dict[str, Any]]


def plain(workers: int = 0) -> Made:
    return DataLoader(DATA, SIZE, shuffle=True, num_workers=workers), {}


def generated(workers: int = 0) -> Made:
    return (
        DataLoader(
            DATA,
            SIZE,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
            num_workers=workers,
        ),
        {},
    )


def permuted(workers: int = 0) -> Made:
    sampler = PermutationSampler(LENGTH, seed=3)
    return DataLoader(DATA, SIZE, sampler=sampler, num_workers=workers), {"sampler": sampler}


def kept(workers: int = 0) -> Made:
    torch.manual_seed(0)  # of which this loader makes its order now, not when it is first read
    loader = StatefulDataLoader(DATA, SIZE, shuffle=True, num_workers=workers)
    return loader, {"loader": loader}


def distributed(workers: int = 0) -> Made:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=1, rank=0, seed=2)
    return DataLoader(DATA, SIZE, sampler=sampler, num_workers=workers), {}


class Stopped(Exception):
    """The training was stopped."""


def train(
    repo: Repository,
    branch: str,
    source: Any,
    tracked: dict[str, Any],
    *,
    seed: int = 0,
    stop: int | None = None,
) -> list[Any]:
    """The batches, and a random number for each, from where the branch stands until the training
    is stopped after so many steps."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    with suppress(Stopped), repo.track(branch=branch, weight=torch.zeros(1), **tracked) as run:
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps(source):
                if run.step - 1 == stop:
                    raise Stopped
                seen.append((epoch, torch.as_tensor(batch).tolist(), torch.rand(()).item()))
                run.capture()
    return seen


def assert_goes_on(repo: Repository, make: Callable[[], Made], stops: Iterable[int]) -> None:
    never = train(repo, "never", *make())
    assert [
        sorted(index for at, batch, _ in never if at == epoch for index in batch)
        for epoch in range(EPOCHS)
    ] == [[*DATA]] * EPOCHS
    assert [batch for at, batch, _ in never if at] != [batch for at, batch, _ in never if not at], (
        "each epoch has its own order"
    )
    for stop in stops:
        seen = train(repo, f"stopped-{stop}", *make(), stop=stop)
        assert seen + train(repo, f"stopped-{stop}", *make(), seed=99) == never, (
            f"stopped after {stop}"
        )


@pytest.mark.parametrize("make", [plain, generated, permuted, kept, distributed])
def test_a_loader_goes_on_from_its_place(repo: Repository, make: Callable[[], Made]) -> None:
    assert_goes_on(repo, make, (2, 6, 8))


def test_parts_are_the_source_its_samplers_and_its_stream() -> None:
    loader, _ = plain()
    assert parts_of(loader) == [loader, loader.sampler, loader.batch_sampler]
    stream = DataLoader(Lines(), 2)
    assert parts_of(stream)[-1] is stream.dataset
    assert parts_of([loader] * 1000)[1:] == []


@pytest.mark.parametrize("wrap", [Prefetch, Bar, Several, lambda loader: Bar({"train": loader})])
@pytest.mark.parametrize(
    ("make", "name"),
    [(plain, "DataLoader"), (kept, "StatefulDataLoader"), (permuted, "DataLoader")],
)
def test_a_wrapper_is_refused_with_what_to_pass_instead(
    repo: Repository, wrap: Callable[[Any], Any], make: Callable[[], Made], name: str
) -> None:
    loader, tracked = make()
    with pytest.raises(
        InvalidInput,
        match=(
            rf" wraps a {name}, .*pass the {name} itself to run\.steps,"
            r" .*tqdm\(run\.steps\(loader\)\)"
        ),
    ):
        train(repo, "main", wrap(loader), tracked)


@pytest.mark.parametrize(
    ("make", "name"), [(permuted, "PermutationSampler"), (kept, "StatefulDataLoader")]
)
def test_what_is_tracked_and_drawn_from_unseen_is_refused_before_a_batch_is_lost(
    repo: Repository, make: Callable[[], Made], name: str
) -> None:
    loader, tracked = make()
    with pytest.raises(
        InvalidInput,
        match=rf"Hiding, which draws from the tracked {name} unseen.* pass the loader itself",
    ):
        train(repo, "main", Hiding(loader), tracked)
    loader, _ = make()
    if name == "StatefulDataLoader":
        loader = DataLoader(DATA, SIZE, shuffle=True)
    assert_goes_on(repo, lambda: (Hiding(DataLoader(DATA, SIZE, shuffle=True)), {}), (3,))


def test_what_is_tracked_and_not_drawn_from_may_move_between_batches(repo: Repository) -> None:
    source, (other, tracked) = plain()[0], kept()
    with repo.track(weight=torch.zeros(1), **tracked) as run:
        drawn = iter(other)
        for _ in run.steps(Hiding(source)):
            next(drawn)


def test_a_tracked_sampler_whose_state_moves_by_itself_refuses_no_other_loader(
    repo: Repository,
) -> None:
    class Random(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(LENGTH).tolist()

        def state_dict(self) -> dict[str, Any]:
            return {"rng": torch.get_rng_state().tolist()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))

    assert len(train(repo, "main", plain()[0], {"sampler": Random()})) == EPOCHS * LENGTH // SIZE


def test_an_iterator_in_a_wrapper_is_told_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    class Begun(DataLoader[Any]):
        """As timm's loader for several epochs: one iterator for all."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.iterator = super().__iter__()

        def __iter__(self) -> Any:
            return self.iterator

    with repo.track(weight=torch.zeros(1)) as run:
        for source in (Bar([*DATA]), DataLoader(DATA), PermutationSampler(4).batches(2)):
            list(run.steps(source))
        assert not caplog.text
        for _ in run.epochs(2):
            list(run.steps(Bar(enumerate(DATA))))
    assert (
        caplog.text.count(
            "run.steps is given Bar around an iterator, whose place in the data is not known"
        )
        == 1
    )
    with repo.track(branch="other", weight=torch.zeros(1)) as run:
        list(run.steps(Begun(DATA)))
    assert "run.steps is given Begun around an iterator" in caplog.text


def test_a_wrapper_with_a_state_of_its_own_keeps_its_place(repo: Repository) -> None:
    class Own(Prefetch):
        used = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in [*self.loader][self.used :]:
                self.used += 1
                yield batch
            self.used = 0

        def state_dict(self) -> dict[str, int]:
            return {"used": self.used}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.used = state["used"]

    def made() -> Made:
        source = Own(DataLoader(DATA, SIZE, num_workers=1))
        return source, {"source": source}

    never = train(repo, "never", *made())
    seen = train(repo, "stopped", *made(), stop=4) + train(repo, "stopped", *made(), seed=9)
    assert [batch for _, batch, _ in seen] == [batch for _, batch, _ in never]


class Stream(IterableDataset[int]):
    """Yields from a buffer in an order that it draws on the way."""

    def __init__(self, *, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        waiting: list[int] = []
        for index in DATA:
            waiting.append(index)
            if len(waiting) > 4:
                yield waiting.pop(int(torch.randint(len(waiting), (), generator=self.generator)))
        while waiting:
            yield waiting.pop(int(torch.randint(len(waiting), (), generator=self.generator)))


def test_a_shuffle_buffer_that_draws_in_turns_with_the_training_is_told_and_has_two_exact_ways(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_goes_on(repo, lambda: (DataLoader(Stream(), SIZE, num_workers=1), {}), (3,))
    with datastates.open(tmp_path / "own", config=CONFIG) as other:
        assert_goes_on(
            other,
            lambda: (DataLoader(Stream(generator=torch.Generator().manual_seed(1)), SIZE), {}),
            (3, 8),
        )
    with repo.track(branch="alone", weight=torch.zeros(1)) as run:
        list(run.steps(DataLoader(Stream(), SIZE)))
    assert "draws random numbers in this process" not in caplog.text
    train(repo, "shared", DataLoader(Stream(), SIZE), {})
    assert (
        caplog.text.count(
            "the dataset draws random numbers in this process, and so does the training"
        )
        == 1
    )


# --- another batch size ---------------------------------------------------------------------------


class Buckets(Sampler[list[int]]):
    """Batches of a sampler's own."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(DATA, self.batch_size, drop_last=False))


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def sized(
    repo: Repository, make: Callable[[int], Made], sizes: tuple[int, int], stop: int
) -> tuple[list[int], list[int]]:
    """The indices of an epoch before and after the batch size is changed."""
    branch = f"sized-{sizes[0]}-{sizes[1]}-{stop}"
    before = train(repo, branch, *make(sizes[0]), stop=stop)
    after = train(repo, branch, *make(sizes[1]), seed=9)
    first, then = (
        [index for at, batch, _ in seen if at == 0 for index in batch] for seen in (before, after)
    )
    assert sorted(index for at, batch, _ in after if at == 1 for index in batch) == [*DATA]
    return first, then


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tracked_sampler_goes_on_from_its_place_with_any_batch_size(
    repo: Repository, workers: int
) -> None:
    def make(size: int) -> Made:
        sampler = PermutationSampler(LENGTH, seed=3)
        return DataLoader(DATA, size, sampler=sampler, num_workers=workers), {"sampler": sampler}

    for sizes, stop in (
        (((2, 3), 2), ((2, 4), 2), ((4, 2), 1)) if not workers else (((2, 3), 2), ((2, 4), 3))
    ):
        first, then = sized(repo, make, sizes, stop)
        assert sorted(first + then) == [*DATA], sizes


@pytest.mark.parametrize(
    "make",
    [
        lambda size: (DataLoader(DATA, size, shuffle=True), {}),
        lambda size: (DataLoader(Lines(), size), {}),
        lambda size: (DataLoader(DATA, size, sampler=PermutationSampler(LENGTH, seed=3)), {}),
        lambda size: (PermutationSampler(LENGTH, seed=3).batches(size), {}),
    ],
    ids=["map", "stream", "sampler", "batches"],
)
def test_a_place_is_counted_in_batches_of_another_size(
    repo: Repository, make: Callable[[int], Made], caplog: pytest.LogCaptureFixture
) -> None:
    for sizes, stop in (((2, 4), 2), ((4, 2), 2), ((2, 3), 3), ((5, 2), 2), ((10, 5), 1)):
        first, then = sized(repo, make, sizes, stop)
        assert sorted(first + then) == [*DATA], (sizes, stop)
    if isinstance(make(2)[0], DataLoader) and not isinstance(make(2)[0].dataset, IterableDataset):
        assert sized(repo, make, (5, 2), 3)[1] == [], "all were used"
    assert {record.name for record in caplog.records} <= {"datastates.training.training"}, (
        "each training has another seed"
    )
    first, then = sized(repo, make, (3, 2), 1)
    assert len(first + then) == LENGTH + 1, "the batch of 2 that has the third sample comes again"
    assert set(first + then) == {*DATA}
    assert (
        "after 1 batches of 3, and a batch has 2 now, which does not divide what was used: the last"
        " 1 samples of it come" in caplog.text
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda size: (DataLoader(DATA, batch_sampler=Buckets(size)), {}),
            r"of a loader of 5 \(batches of 2\), .* 5 \(batches of 3\)",
        ),
        (
            lambda size: (DataLoader(DATA if size == 2 else DATA[:9], size), {}),
            r"of a loader of 6 .* 3 \(batches of 3\)",
        ),
    ],
    ids=["buckets", "other data"],
)
def test_a_place_that_another_size_does_not_have_begins_again_and_says_so(
    repo: Repository, make: Callable[[int], Made], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "main", *make(2), stop=3)
    again = train(repo, "main", *make(3))
    assert [batch for at, batch, _ in again if at == 0] == [
        batch for at, batch, _ in again if at == 1
    ]
    assert any(re.search(told, record.getMessage()) for record in caplog.records)


def test_a_stream_whose_workers_are_others_begins_again_and_says_so(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "main", DataLoader(Lines(), 2, num_workers=2), {}, stop=3)
    again = train(repo, "main", DataLoader(Lines(), 2, num_workers=1), {})
    assert len([batch for at, batch, _ in again if at == 0]) == LENGTH // 2
    assert (
        "3 batches of a loader of None (batches of 2, 2 workers), and run.steps is given one of"
        " None (batches of 2, 1" in caplog.text
    )


def test_a_state_without_a_batch_size_is_read(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    never = train(repo, "never", *plain())
    train(repo, "begun", *plain(), stop=1)
    begin = repo.load("begun")["loops"]["passes"][0]["begin"]
    with repo.track(weight=torch.zeros(1)) as run:
        run.training.loops.load_state_dict(
            {"epoch": 0, "passes": [{"batches": 2, "is_over": False, "length": 6, "begin": begin}]}
        )
        for _ in run.epochs(1):
            assert [batch.tolist() for batch in run.steps(plain()[0])] == [
                batch for at, batch, _ in never if at == 0
            ][2:]
    assert not caplog.text
