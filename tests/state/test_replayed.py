"""Batches that a resumed pass reads again are compared with those that were used, and a pass
counts all of its batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates import Config, PermutationSampler, Repository
from datastates.errors import InvalidInput
from datastates.state.passes import fingerprint

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
DATA: Any = range(32)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


class Noisy(Dataset[Any]):
    """Draws random numbers for each sample; ``generator``: from which, for a tracked one."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self.generator_of_mine = generator

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        noise = (
            torch.rand(()) if self.generator_of_mine is None else self.generator_of_mine.random()
        )
        return {"index": index, "noise": noise}


def weighted(
    repo: Repository,
    branch: str,
    *,
    stop: int | None = None,
    change: float = 0.2,
    noisy: bool = False,
) -> list[Any]:
    """The indices from a sampler whose tracked weights follow the training, as ``change`` says."""
    torch.manual_seed(0 if stop else 5)
    # it takes tensors
    sampler = WeightedRandomSampler(torch.ones(32, dtype=torch.double), 32, replacement=False)  # type: ignore[arg-type]
    weights: Any = sampler.weights
    loader: Any = DataLoader(Noisy() if noisy else DATA, batch_size=4, sampler=sampler)
    seen: list[Any] = []
    with repo.track(branch=branch, weights=weights) as run:
        for _ in run.epochs(2):
            for batch in run.steps(loader):
                rows = batch["index"] if noisy else batch
                seen += rows.tolist()
                torch.rand(())
                weights[rows] *= change
                run.capture()
                if run.step == stop:
                    return seen
    return seen


@pytest.mark.parametrize("noisy", [False, True])
def test_an_order_that_follows_the_training_is_refused_where_it_would_repeat_samples(
    repo: Repository, noisy: bool
) -> None:
    for stop in (4, 11):
        weighted(repo, f"main-{stop}", stop=stop, noisy=noisy)
        with pytest.raises(
            InvalidInput, match=rf"batch {(stop - 1) % 8} of DataLoader is another.*verify=False"
        ):
            weighted(repo, f"main-{stop}", noisy=noisy)


@pytest.mark.parametrize("noisy", [False, True])
def test_weights_that_stay_the_same_and_samples_with_noise_go_on(
    repo: Repository, noisy: bool
) -> None:
    for stop in (4, 8, 11):
        seen = weighted(repo, f"main-{stop}", stop=stop, change=1.0, noisy=noisy)
        seen += weighted(repo, f"main-{stop}", change=1.0, noisy=noisy)
        assert sorted(seen[:32]) == sorted(seen[32:]) == [*DATA]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_changed_are_refused_and_the_recipe_of_the_message_goes_on(
    repo: Repository, workers: int
) -> None:
    def train(data: Any, *, stop: int | None = None, **options: Any) -> list[Any]:
        seen = []
        with repo.track(weight=torch.zeros(1)) as run:
            for _ in run.epochs(1):
                for batch in run.steps(
                    DataLoader(data, batch_size=4, num_workers=workers), **options
                ):
                    seen.append(batch[0].item())
                    batch.zero_()  # in place: what was used is what came
                    run.capture()
                    if run.step == stop:
                        return seen
        return seen

    data, other = torch.arange(1.0, 25.0), torch.arange(101.0, 125.0)
    assert train(data, stop=2) == [1, 5]
    with pytest.raises(
        InvalidInput,
        match=(
            "batch 1 of DataLoader is another than the one that the training used: its data changed"
        ),
    ):
        train(other)
    assert train(other, verify=False, stop=4) == [109, 113]
    assert train(other) == [117, 121]


def test_a_tracked_generator_that_samples_and_the_training_draw_from_raises_no_alarm(
    repo: Repository,
) -> None:
    def train(*, stop: int | None = None) -> list[Any]:
        generator, seen = np.random.default_rng(0), []
        loader: Any = DataLoader(Noisy(generator), batch_size=4, shuffle=True)
        torch.manual_seed(0)
        with repo.track(
            branch=f"main-{stop is None}" if is_whole else "main", generator=generator
        ) as run:
            for _ in run.epochs(1):
                for batch in run.steps(loader):
                    seen.append((batch["index"].tolist(), generator.random()))
                    run.capture()
                    if run.step == stop:
                        return seen
        return seen

    is_whole = True
    never = train()
    is_whole = False
    assert train(stop=3) + train() == never


@dataclass
class Pair:
    x: Any
    y: Any


def test_a_fingerprint_follows_what_is_in_a_batch_of_any_structure() -> None:
    big, wide = (
        torch.arange(1_000_000.0),
        torch.rand(16, 3, 64, 64).to(memory_format=torch.channels_last),
    )
    makes: list[Callable[[Any], Any]] = [
        lambda x: x,
        lambda x: [x],
        lambda x: (1, {"a": {"b": [x]}}),
        lambda x: Pair(x, None),
        lambda x: SimpleNamespace(a=[x], made_at=id(object())),
        lambda x: {"kept": object(), "x": x},
    ]
    for make in makes:
        for one, other in (
            (big, big + 1),
            (wide, wide * 2),
            (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
        ):
            assert fingerprint(make(one)) == fingerprint(make(one.clone())) is not None
            assert fingerprint(make(one)) != fingerprint(make(other))
    pairs: list[tuple[Any, Any]] = [
        ("a" * 999, "a" * 998 + "b"),
        (np.arange(3), np.arange(1, 4)),
        (3, 4),
        (b"x", b"y"),
    ]
    for value, changed in pairs:
        assert fingerprint([value, "-"]) == fingerprint([value, "-"]) is not None
        assert fingerprint([value, "-"]) != fingerprint([changed, "-"])
    for nothing in (
        None,
        object(),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        np.array([object()]),
        {1, 2},
    ):
        assert fingerprint(nothing) is None
    held: list[Any] = [torch.ones(1)]
    held.append(held)
    assert fingerprint(held) is not None


# --- limits and numbers ---------------------------------------------------------------------------


def plain() -> tuple[Any, dict[str, Any]]:
    return DataLoader(DATA, batch_size=4, shuffle=True), {}


def own_order() -> tuple[Any, dict[str, Any]]:
    return (
        DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)),
        {},
    )


def permuted() -> tuple[Any, dict[str, Any]]:
    sampler = PermutationSampler(32, seed=3)
    return DataLoader(DATA, batch_size=4, sampler=sampler), {"sampler": sampler}


def permuted_workers() -> tuple[Any, dict[str, Any]]:
    sampler = PermutationSampler(32, seed=3)
    return DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=1), {"sampler": sampler}


def kept() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    loader = StatefulDataLoader(DATA, batch_size=4, shuffle=True)
    return loader, {"loader": loader}


def limited(
    repo: Repository,
    branch: str,
    made: Any,
    *,
    stop: int | None = None,
    is_counting: bool = True,
    is_between: bool = False,
) -> list[Any]:
    loader, tracked = made
    torch.manual_seed(0)
    seen: list[Any] = []
    with repo.track(branch=branch, weight=torch.zeros(1), **tracked) as run:
        for epoch in (
            run.epochs(3)
            if is_counting
            else itertools.takewhile(lambda _: run.step < 15, itertools.repeat(0))
        ):
            for number, batch in run.enumerate(loader, limit=5):
                assert number == run.batch
                seen.append((epoch, number, batch.tolist()))
                run.capture()
                if run.step == stop and not is_between:
                    return seen
            if is_between:
                run.capture()
                if run.step == stop:
                    return seen
    return seen


@pytest.mark.parametrize("is_counting", [True, False], ids=["epochs", "passes"])
@pytest.mark.parametrize("make", [plain, own_order, permuted, permuted_workers, kept])
def test_a_limited_pass_ends_after_as_many_batches_wherever_it_was_resumed(
    repo: Repository, make: Callable[[], Any], is_counting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    never = limited(repo, "never", make(), is_counting=is_counting)
    assert len(never) == 15 or not is_counting
    assert not is_counting or [number for _, number, _ in never] == [0, 1, 2, 3, 4] * 3
    for stop in (1, 3, 5, 7, 10):
        seen = limited(repo, f"stopped-{stop}", make(), stop=stop, is_counting=is_counting)
        assert seen + limited(repo, f"stopped-{stop}", make(), is_counting=is_counting) == never, (
            stop
        )
    if is_counting:
        seen = limited(repo, "between", make(), stop=5, is_between=True)
        assert seen + limited(repo, "between", make()) == never
    assert "limit=" not in caplog.text


def test_steps_have_the_length_of_a_whole_pass_and_stay_an_iterator(repo: Repository) -> None:
    loader: Any = DataLoader(DATA, batch_size=4)
    for resumed in (False, True):
        with repo.track(weight=torch.zeros(1)) as run:
            steps = run.steps(loader)
            assert (
                len(steps),
                len(run.steps(loader, limit=5)),
                len(run.enumerate(loader, limit=99)),
            ) == (8, 5, 8)
            assert next(steps)[0] == (12 if resumed else 0)
            assert next(iter(steps))[0] == (16 if resumed else 4)
            assert next(steps)[0] == (20 if resumed else 8)
            run.capture()
            steps.close()
            assert next(steps, None) is None
            with pytest.raises(TypeError, match=r"has no len\(\)"):
                len(run.steps(iter([1])))
            for limit in (0, -1, True, "5"):
                with pytest.raises(InvalidInput, match="limit"):
                    run.steps(loader, limit=limit)  # type: ignore[arg-type]  # that is the point


def _islice(steps: Any) -> Iterator[Any]:
    return itertools.islice(steps, 5)


def _zip(steps: Any) -> Iterator[Any]:
    return zip(range(5), steps, strict=False)


def _enumerate(steps: Any) -> Iterator[Any]:
    for number, batch in enumerate(steps):
        yield batch
        if number == 4:
            break


@pytest.mark.parametrize("count", [_islice, _zip, _enumerate])
@pytest.mark.parametrize("stop", [3, 8])
def test_a_count_that_begins_with_0_in_a_resumed_pass_is_told_once(
    repo: Repository, count: Callable[[Any], Any], stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    for until in (stop, 99):
        assert "limit" not in caplog.text
        with repo.track(weight=torch.zeros(1)) as run:
            for _ in run.epochs(4):
                for _ in count(run.steps(DataLoader(DATA, batch_size=4))):
                    run.capture()
                    if run.step == until:
                        break
                if run.step == until:
                    break
    assert caplog.text.count("use run.steps(loader, limit=5)") == 1


def test_passes_that_are_left_at_other_places_or_by_the_step_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    for until in (3, 9, 17, 99):
        with repo.track(weight=torch.zeros(1)) as run:
            for epoch in run.epochs(5):
                for _ in run.steps(DataLoader(DATA, batch_size=4)):
                    run.capture()
                    if run.step == until or (epoch, run.batch) in {(1, 5), (3, 2)}:
                        break
                if run.step == until:
                    break
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
