"""The permutation sampler: the same order everywhere, and a place that is what was handed out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.generators import RngState
from datastates.state.restore import restore_into
from datastates.state.sampler import PermutationSampler

torch.set_num_threads(1)

Drawn = tuple[list[int], float]


@given(st.integers(1, 60), st.integers(-5, 1 << 65), st.integers(0, 9), st.booleans())
def test_an_epoch_is_a_permutation_that_seed_and_epoch_alone_decide(
    length: int, seed: int, epoch: int, shuffle: bool
) -> None:
    sampler = PermutationSampler(length, seed=seed, shuffle=shuffle)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(length))
    assert (sampler.epoch, sampler.position) == (epoch, length)
    next(iter(sampler))
    assert (sampler.epoch, sampler.position) == (epoch + 1, 1)
    torch.rand(3)
    again = PermutationSampler(length, seed=seed, shuffle=shuffle)
    again.set_epoch(epoch)
    assert list(again) == order
    assert shuffle or order == list(range(length))


def test_seeds_and_epochs_give_different_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = PermutationSampler(1000, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    assert len({order(seed, epoch) for seed in range(6) for epoch in range(6)}) == 36


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 30))
def test_batches_go_on_where_they_were_left(
    length: int, size: int, drop_last: bool, taken: int
) -> None:
    if drop_last and size > length:
        with pytest.raises(InvalidInput, match="none is ever full"):
            next(PermutationSampler(length).batches(size, drop_last=True))
        return
    sampler = PermutationSampler(length, seed=3)
    stream = sampler.batches(size, drop_last=drop_last, epochs=None)
    for _ in range(taken):
        next(stream)
    state = sampler.state_dict()
    expected = list(islice(stream, 20))
    other = PermutationSampler(length)
    other.load_state_dict(state)
    assert list(islice(other.batches(size, drop_last=drop_last, epochs=None), 20)) == expected
    assert not drop_last or all(len(rows) == size for rows in expected)


def test_one_epoch_of_batches_is_the_default() -> None:
    assert [len(rows) for rows in PermutationSampler(10).batches(4)] == [4, 4, 2]
    assert [len(rows) for rows in PermutationSampler(10).batches(4, drop_last=True, epochs=2)] == [
        4
    ] * 4


def test_set_epoch_keeps_the_place_within_that_epoch() -> None:
    sampler = PermutationSampler(10)
    first = list(islice(sampler, 4))
    sampler.set_epoch(0)
    assert sorted(first + list(sampler)) == list(range(10))
    sampler.set_epoch(1)
    list(islice(sampler, 3))
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.position) == (5, 0)


def test_a_sampler_that_is_sent_elsewhere_ends_its_loop_and_starts_there() -> None:
    sampler = PermutationSampler(10, seed=1)
    running = iter(sampler)
    next(running)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 4, "position": 6})
    assert list(running) == []
    assert (sampler.epoch, sampler.position) == (4, 6)
    assert len(list(sampler)) == 4


def test_a_state_of_other_data_is_refused() -> None:
    state = PermutationSampler(10).state_dict()
    sampler = PermutationSampler(11)
    with pytest.raises(InvalidInput, match="of 10 indices and this sampler has 11"):
        sampler.load_state_dict(state)
    with pytest.raises(InvalidInput, match="position 12"):
        PermutationSampler(10).load_state_dict({**state, "position": 12})
    with pytest.raises(InvalidInput, match="not a state of a PermutationSampler"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(InvalidInput, match="length is 0"):
        PermutationSampler(0)
    with pytest.raises(InvalidInput, match="batch_size is 0"):
        next(PermutationSampler(3).batches(0))


LENGTH, BATCH = 23, 4  # 6 batches an epoch, the last one short


def make_loader(workers: int) -> Any:
    data = TensorDataset(torch.arange(LENGTH))
    return StatefulDataLoader(
        data, batch_size=BATCH, sampler=PermutationSampler(LENGTH, seed=7), num_workers=workers
    )


def stream(loader: Any) -> Iterator[Drawn]:
    """The batches of epoch after epoch, each with a random number that a training step would
    draw (dropout)."""
    while True:
        for (batch,) in loader:
            noise = float(torch.rand(()))
            yield batch.tolist(), noise


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(
    ("workers", "stops"), [(0, range(14)), (2, (0, 1, 5, 6, 7, 12))], ids=["0 workers", "2 workers"]
)
def test_a_stateful_loader_goes_on_bit_for_bit_from_any_place(workers: int, stops: Any) -> None:
    """Its state is what was yielded, and going on draws no random number that the first run did
    not draw."""
    torch.manual_seed(5)
    loader = make_loader(workers)
    objects: dict[str, object] = {"rng": RngState(), "loader": loader}
    adapted, batches = Adapted(objects), stream(loader)
    drawn: list[Drawn] = []
    trees = {}
    for count in range(max(stops) + 1):
        if count in stops:
            trees[count] = adapted.tree()
        drawn.append(next(batches))
    drawn += islice(batches, 10)
    for count, tree in trees.items():
        other = make_loader(workers)
        torch.manual_seed(99)
        restore_into({"rng": RngState(), "loader": other}, tree)
        assert list(islice(stream(other), 8)) == drawn[count : count + 8], f"after {count} batches"


@pytest.mark.parametrize("stop", range(14))
def test_a_plain_loader_without_workers_goes_on_from_any_place(stop: int) -> None:
    def make() -> tuple[PermutationSampler, DataLoader[tuple[Tensor, ...]]]:
        sampler = PermutationSampler(LENGTH, seed=7)
        data = TensorDataset(torch.arange(LENGTH))
        return sampler, DataLoader(
            data, batch_size=BATCH, sampler=sampler, generator=torch.Generator()
        )

    torch.manual_seed(5)
    sampler, loader = make()
    batches = stream(loader)
    for _ in range(stop):
        next(batches)
    tree = Adapted({"sampler": sampler, "rng": RngState()}).tree()
    expected = list(islice(batches, 10))
    other, fresh = make()
    restore_into({"sampler": other, "rng": RngState()}, tree)
    assert list(islice(stream(fresh), 10)) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_from_between_two_epochs(workers: int) -> None:
    def epoch(loader: Any) -> list[Drawn]:
        return [(batch.tolist(), float(torch.rand(()))) for (batch,) in loader]

    loader = make_loader(workers)
    adapted = Adapted({"loader": loader, "rng": RngState()})
    trees, drawn = [], []
    for _ in range(3):
        drawn.append(epoch(loader))
        trees.append(adapted.tree())
    for number, tree in enumerate(trees[:-1]):
        other = make_loader(workers)
        restore_into({"loader": other, "rng": RngState()}, tree)
        assert epoch(other) == drawn[number + 1]
