"""Streams, and datasets that are told the epoch, go on from their place in any epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.set_vital. is deprecated",  # torchdata 0.11 on torch 2.13
    "ignore::DeprecationWarning:multiprocessing",  # workers are forked
)
CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
Made = tuple[Callable[[], Any], dict[str, Any]]


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


def stream(first: int = 0, *, length: int = 20, is_shuffled: bool = False) -> Any:
    found = datasets.Dataset.from_dict({"x": [*range(first, first + length)]}).to_iterable_dataset(
        num_shards=2
    )
    return found.shuffle(seed=3, buffer_size=6) if is_shuffled else found


class Mixed(IterableDataset[Any]):
    """Takes from each of its streams in turn."""

    def __init__(self, *parts: Any) -> None:
        self.parts = {"all": [*parts]}

    def __iter__(self) -> Iterator[Any]:
        waiting = [iter(part) for part in self.parts["all"]]
        while waiting:
            for each in [*waiting]:
                if (found := next(each, None)) is None:
                    waiting.remove(each)
                else:
                    yield found


class Staged(Dataset[Any]):
    """What a sample is depends on the epoch."""

    epoch_now = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch_now = epoch

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"x": index + 100 * self.epoch_now}


class Nested(Dataset[Any]):
    """A dataset inside a dataset."""

    def __init__(self) -> None:
        self.inner = [Staged()]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.inner[0][index]


def tracked(workers: int) -> Made:
    data = stream()
    return lambda: DataLoader(data, 4), {"data": data}


def tracked_within(workers: int) -> Made:
    parts = stream(length=12), stream(100, length=8)
    return lambda: DataLoader(Mixed(*parts), 4, num_workers=workers), {"parts": [*parts]}


def interleaved(workers: int) -> Made:
    data = datasets.interleave_datasets([stream(length=10), stream(100, length=10)])
    return lambda: DataLoader(data, 4), {"data": data}


def untracked(workers: int) -> Made:
    data = Mixed(stream(length=10, is_shuffled=True), stream(100, length=10))
    return lambda: DataLoader(data, 4, num_workers=workers), {}


def kept(workers: int) -> Made:
    loader = StatefulDataLoader(stream(), batch_size=4, num_workers=workers)
    return lambda: loader, {"loader": loader}


def nested(workers: int) -> Made:
    data = Nested()
    return lambda: DataLoader(data, 4, shuffle=True, num_workers=workers), {}


def nested_kept(workers: int) -> Made:
    torch.manual_seed(0)  # of which this loader makes its order now
    loader = StatefulDataLoader(Nested(), batch_size=4, shuffle=True, num_workers=workers)
    return lambda: loader, {"loader": loader}


def train(
    repo: Repository,
    branch: str,
    made: Made,
    *,
    stop: int | None = None,
    is_between: bool = False,
    seed: int = 0,
) -> list[Any]:
    """The batches until the training is stopped: after a batch's capture, or after the one
    between two epochs."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    loader, objects = made
    with repo.track(branch=branch, weight=torch.zeros(1), **objects) as run:
        for epoch in run.epochs(3):
            for batch in run.steps(loader()):
                seen.append((epoch, batch["x"].tolist()))
                run.capture()
                if run.step == stop and not is_between:
                    return seen
            if is_between:
                run.capture()
                if run.step == stop:
                    return seen
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [tracked, tracked_within, interleaved, untracked, kept, nested, nested_kept]
)
def test_data_that_is_told_the_epoch_goes_on_in_every_epoch(
    repo: Repository, make: Callable[[int], Made], workers: int
) -> None:
    if workers and make in (tracked, interleaved):
        pytest.skip("a stream that is tracked by itself has no workers")
    never = train(repo, "never", make(workers))
    assert {epoch for epoch, _ in never} == {0, 1, 2}
    length = len(never) // 3
    for stop, is_between in ((length + 2, False), (2 * length, False), (2 * length, True)):
        branch = f"stopped-{stop}-{is_between}"
        seen = train(repo, branch, make(workers), stop=stop, is_between=is_between)
        assert seen + train(repo, branch, make(workers), seed=9) == never, branch


def test_a_tracked_stream_begins_again_after_a_pass_that_was_resumed_without_epochs(
    repo: Repository,
) -> None:
    def passes(branch: str, *, stop: int | None = None) -> list[Any]:
        data, seen = stream(), list[Any]()
        with repo.track(branch=branch, data=data) as run:
            while run.step < 15:
                for batch in run.steps(DataLoader(data, 4)):
                    seen.append(batch["x"].tolist())
                    run.capture()
                    if run.step == stop:
                        return seen
        return seen

    never = passes("never")
    for stop in (2, 5, 7):
        assert passes(f"stopped-{stop}", stop=stop) + passes(f"stopped-{stop}") == never


def test_every_tracked_object_is_told_the_epoch_before_it_gets_its_state_and_as_an_epoch_begins(
    repo: Repository,
) -> None:
    class Curriculum:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def set_epoch(self, epoch: int) -> None:
            self.calls.append(epoch)

        def state_dict(self) -> dict[str, int]:
            return {"seen": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.calls.append("loaded")

    def told(stop: int) -> list[Any]:
        curriculum = Curriculum()
        with repo.track(curriculum=curriculum) as run:
            for _ in run.epochs(3):
                for _ in run.steps(range(2)):
                    run.capture()
                    if run.step == stop:
                        return curriculum.calls
        return curriculum.calls

    assert told(3) == [0, 1]
    assert told(99) == [1, "loaded", 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_loses_its_shuffle_buffer_is_refused_and_the_recipe_is_exact(
    repo: Repository, workers: int
) -> None:
    def pipe() -> Any:
        return IterableWrapper([{"x": index} for index in range(20)]).shuffle(buffer_size=6)

    makes: tuple[Callable[[], Any], ...] = (lambda: stream(is_shuffled=True), pipe)
    for make in makes:
        loader = StatefulDataLoader(make(), batch_size=4, num_workers=workers)
        with pytest.raises(
            InvalidInput,
            match=(
                r"loader is a StatefulDataLoader over a shuffle buffer.*leave it out and loop over"
                r" run\.steps"
            ),
        ):
            repo.track(loader=loader)
    with pytest.raises(InvalidInput, match="data is a IterableDataset over a shuffle buffer"):
        repo.track(data=stream(is_shuffled=True))

    def made() -> Made:
        loader = StatefulDataLoader(stream(is_shuffled=True), batch_size=4, num_workers=workers)
        return lambda: loader, {}

    never = train(repo, "never", made())
    assert train(repo, "stopped", made(), stop=7) + train(repo, "stopped", made(), seed=9) == never


def test_a_tracked_loader_of_a_stream_that_draws_in_this_process_is_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    class Drawing(IterableDataset[Any]):
        def __init__(self, seed: int | None) -> None:
            self.seed = seed

        def __iter__(self) -> Iterator[Any]:
            generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
            yield from ({"x": int(torch.randint(9, (), generator=generator))} for _ in range(20))

    def made(seed: int | None) -> Made:
        loader = StatefulDataLoader(Drawing(seed), batch_size=4)
        return lambda: loader, {"loader": loader}

    for seed, count in ((3, 0), (None, 1)):
        train(repo, f"seed-{seed}", made(seed))
        assert caplog.text.count("the dataset draws random numbers in this process") == count
