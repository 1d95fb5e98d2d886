"""An epoch that one number of processes began and another number goes on with: no index is left
out, and none comes twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from datastates.errors import InvalidInput
from datastates.state.data_position import Loops, divided_again
from datastates.state.encoding import decode_values, encode_values
from datastates.state.sampler import PermutationSampler, Tail
from datastates.state.tree import flatten, unflatten

torch.set_num_threads(1)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from where states lie."""
    flat = flatten(state)
    found: dict[str, Any] = unflatten(flat.skeleton, decode_values(encode_values(flat.values)), [])
    return found


@given(
    length=st.integers(1, 60),
    turns=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4)), min_size=1, max_size=4
    ),
    tail=st.sampled_from(get_args(Tail)),
    drop_last=st.booleans(),
    by_index=st.booleans(),
    salt=st.none() | st.integers(0, 3),
)
@example(
    length=7, turns=[(1, 2, 3), (2, 1, 0)], tail="drop", drop_last=False, by_index=False, salt=None
)
def test_replicas_that_become_more_or_fewer_within_an_epoch_get_every_index_once(
    length: int,
    turns: list[tuple[int, int, int]],
    tail: Tail,
    drop_last: bool,
    by_index: bool,
    salt: int | None,
) -> None:
    """``turns``: how many replicas, the batch size of each, and after how many steps they are
    stopped; the last are not."""
    counts = Counter[int]()
    state: dict[str, Any] | None = None
    left = 0  # what those that ended the epoch may leave out
    for number, (replicas, size, steps) in enumerate(turns):
        is_last = number == len(turns) - 1
        samplers = [
            PermutationSampler(length, seed=7, rank=rank, num_replicas=replicas, tail=tail)
            for rank in range(replicas)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(stored(state))
        if state is not None and samplers[0].is_at_end:
            # fewer were left than go round these
            left = max(left, replicas - 1 if tail == "drop" else 0)
            break
        if drop_last and not by_index and size > length // replicas:
            return
        left = (replicas * size if drop_last and not by_index else 0) + (
            replicas - 1 if tail == "drop" else 0
        )
        sources = [
            iter(sampler) if by_index else sampler.batches(size, drop_last=drop_last)
            for sampler in samplers
        ]
        taken = [
            _take(cast("Iterator[Any]", source), None if is_last else steps) for source in sources
        ]
        for rows in taken:
            counts.update(index for row in rows for index in ([row] if by_index else row))
        if tail != "share" or (drop_last and not by_index):
            assert len({len(rows) for rows in taken}) == 1, "all replicas take equally many steps"
        places = [sampler.state_dict() for sampler in samplers]
        if tail != "share" or not samplers[0].is_at_end:
            assert all(place == places[0] for place in places)
        state = min(places, key=lambda place: int(place["position"]))
        if salt is not None and not is_last and not samplers[0].is_at_end:
            samplers[0].reshuffle(salt)
            state = samplers[0].state_dict()
    seen, extra = len(counts), counts.total() - len(counts)
    assert seen >= length - left
    assert extra <= (max(each for each, _, _ in turns) - 1 if tail == "repeat" else 0), (
        "only what makes the replicas even comes again"
    )


def _take(source: Iterator[Any], steps: int | None) -> list[Any]:
    found: list[Any] = []
    while steps is None or len(found) < steps:
        row = next(source, None)
        if row is None:
            break
        found.append(row)
    return found


class Rank:
    """One process of a job that loops over ``run.epochs`` and ``run.steps``, without the rest of
    a training."""

    def __init__(self, loader: DataLoader[Any], sampler: PermutationSampler | None) -> None:
        self.loader, self.sampler = loader, sampler
        self.tracked = [] if sampler is None else [sampler]
        self.loops = Loops(lambda: self.tracked)
        self.seen: list[int] = []

    def train(self, epochs: int, steps: int | None, *, is_resumed: bool = False) -> None:
        taken = 0
        for _ in self.loops.count(epochs, is_resumed=is_resumed):
            for (rows,) in self.loops.batches(self.loader, is_resumed=is_resumed):
                self.seen += rows.tolist()
                taken += 1
                if taken == steps:
                    self.state = stored(
                        {
                            "loops": self.loops.state_dict(),
                            "sampler": self.sampler and self.sampler.state_dict(),
                        }
                    )
                    return

    def go_on_from(self, state: dict[str, Any], replicas: int) -> None:
        self.loops.load_state_dict(divided_again(state["loops"], replicas))
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])


def ranks(
    kind: Literal["ours", "torch", "own"], count: int, length: int, size: int, workers: int
) -> list[Rank]:
    found = []
    for rank in range(count):
        data = TensorDataset(torch.arange(length))
        if kind == "ours":
            sampler: Any = PermutationSampler(length, seed=5, rank=rank, num_replicas=count)
        elif kind == "torch":
            sampler = DistributedSampler(data, count, rank, seed=5)
        else:
            sampler = None
        loader = DataLoader(
            data,
            batch_size=size,
            sampler=sampler,
            shuffle=None if sampler else True,
            num_workers=workers,
        )
        found.append(Rank(loader, sampler if kind == "ours" else None))
    return found


@pytest.mark.parametrize(
    ("kind", "was", "now", "size", "then", "workers"),
    [
        ("ours", 2, 3, 2, 2, 0),
        ("ours", 3, 1, 2, 5, 0),
        ("ours", 2, 1, 3, 3, 1),
        ("torch", 2, 1, 2, 4, 0),
        ("torch", 2, 4, 4, 2, 0),
        ("torch", 4, 2, 1, 1, 0),
    ],
)
def test_loaders_hand_out_the_rest_of_an_epoch_to_another_number_of_processes(
    kind: Literal["ours", "torch"], was: int, now: int, size: int, then: int, workers: int
) -> None:
    length, steps = 48, 3
    before = ranks(kind, was, length, size, workers)
    for rank in before:
        rank.train(2, steps)
    after = ranks(kind, now, length, then, workers)
    for rank in after:
        rank.go_on_from(before[0].state, was)
        rank.train(1, None, is_resumed=True)
    counts = Counter(index for rank in (*before, *after) for index in rank.seen)
    assert counts == Counter(range(length))
    for rank in after:
        rank.seen = []
        rank.train(2, None)
    assert Counter(index for rank in after for index in rank.seen) == Counter(range(length)), (
        "the next epoch is whole"
    )


def test_a_pass_that_cannot_be_divided_anew_is_refused_with_the_recipe() -> None:
    for kind, was, now, size, then in (("torch", 3, 2, 1, 2), ("own", 2, 3, 2, 2)):
        before = ranks(cast("Any", kind), was, 48, size, 0)
        before[0].train(1, 3)
        after = ranks(cast("Any", kind), now, 48, then, 0)[0]
        after.go_on_from(before[0].state, was)
        with pytest.raises(
            InvalidInput,
            match=r"state is of \d processes.*PermutationSampler\(len\(data\), rank=rank",
        ):
            after.train(1, None)


def test_an_epoch_that_was_over_needs_no_division() -> None:
    before = ranks("own", 2, 6, 2, 0)
    before[0].train(1, 3)
    after = ranks("own", 3, 6, 2, 0)[0]
    after.go_on_from(before[0].state, 2)
    after.train(1, None)
    assert not after.seen
    assert after.loops.epoch == 1


def test_a_share_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidInput, match="rank is 2, and there are 2 replicas"):
        PermutationSampler(5, rank=2, num_replicas=2)
    with pytest.raises(InvalidInput, match="tail is 'pad': choose 'repeat' or 'drop' or 'share'"):
        PermutationSampler(5, tail=cast("Any", "pad"))
    with pytest.raises(InvalidInput, match="5 indices for 2 replicas: none is ever full"):
        PermutationSampler(5, rank=0, num_replicas=2).batches(3, drop_last=True)
