"""The shares of all ranks are each tensor exactly once, and even in bytes."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings

from datastates.state.geometry import (
    Box,
    Holding,
    covers,
    dense_strides,
    digest_of,
    divide,
    held_by,
)
from datastates.state.manifest import Shard, TensorSpec
from tests.support.effort import examples
from tests.support.meshes import Job, jobs


def held_by_all(
    shape: tuple[int, ...], size: int, strides: tuple[int, ...] | None = None
) -> list[Holding]:
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return [Holding(shape, strides, 4, (0,) * len(shape), shape, tuple(range(size)))]


def held_by_one(shape: tuple[int, ...], rank: int) -> list[Holding]:
    return [
        Holding(
            shape, torch.empty(shape, device="meta").stride(), 4, (0,) * len(shape), shape, (rank,)
        )
    ]


def bytes_by_rank(held: list[list[Holding]], size: int) -> list[int]:
    def stored(box: Box, strides: tuple[int, ...]) -> int:
        return 4 * prod(
            side if stride else 1 for side, stride in zip(box.shape, strides, strict=True)
        )

    return [
        sum(
            stored(box, held[index][0].strides)
            for index, boxes in enumerate(shares)
            for box in boxes
        )
        for shares in divide(held, size)
    ]


def part_of(tensor: torch.Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + side) for start, side in zip(at, shape, strict=True))]


@settings(max_examples=examples(1000), deadline=None)
@given(jobs())
def test_shares_of_all_ranks_are_every_element_of_every_tensor_once_and_lie_where_they_say(
    job: Job,
) -> None:
    shares = divide([list(spread.held) for spread in job.tensors], job.size)
    for index, spread in enumerate(job.tensors):
        if not spread.whole.numel():
            continue
        together, count, found = torch.full_like(spread.whole, -1), 0, []
        for rank in range(job.size):
            for box in shares[rank][index]:
                piece = part_of(spread.locals[rank], box.place, box.shape)
                part_of(together, box.offset, box.shape).copy_(piece)
                count += piece.numel()
                found.append(Shard(box.offset, box.shape, 0, piece.nbytes))
        assert count == spread.whole.numel()
        assert torch.equal(together, spread.whole)
        spec = TensorSpec(
            "x",
            "int64",
            tuple(spread.whole.shape),
            spread.held[0].strides,
            None,
            False,
            tuple(found),
        )
        assert covers(spec)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 1000, 1000)],
        [(50_000, 13)] * 2,
        [(16,)] * 3000,
        [(1000, 1000)] * 3 + [(7,)] * 50,
        [(64, 3, 7, 7), (2, 3, 100_000)],
    ],
    ids=["one", "long", "thousands", "mixed", "wide"],
)
def test_each_rank_stores_the_same_bytes_within_a_tenth(
    size: int, shapes: list[tuple[int, ...]]
) -> None:
    found = bytes_by_rank([held_by_all(shape, size) for shape in shapes], size)
    mean = sum(found) / size
    assert sum(found) == 4 * sum(map(prod, shapes))
    assert max(abs(each - mean) for each in found) < mean / 10


def test_what_all_ranks_hold_evens_out_what_some_hold_alone() -> None:
    held = [held_by_one((1000,), 0), held_by_one((300,), 2), held_by_all((2700,), 4)]
    assert bytes_by_rank(held, 4) == [4000, 4000, 4000, 4000]


def test_a_rank_that_has_more_of_its_own_than_its_share_gets_nothing_of_what_is_shared() -> None:
    held = [held_by_one((5000,), 1), held_by_all((200,), 2)]
    assert bytes_by_rank(held, 2) == [800, 20_000]


@pytest.mark.parametrize("shape", [(999, 7), (3, 100_000), (64, 3, 5, 5), (2, 3, 50_000)])
def test_every_box_of_a_dense_tensor_lies_in_one_piece(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    for laid in (
        (tensor, tensor.to(memory_format=torch.channels_last))
        if len(shape) == 4
        else (tensor, tensor.mT.contiguous().mT)
    ):
        strides = laid.stride()
        for shares in divide([held_by_all(shape, 5, strides)], 5):
            for box in shares[0]:
                view = part_of(laid, box.place, box.shape)
                sides = [
                    (side, stride)
                    for side, stride in zip(view.shape, view.stride(), strict=True)
                    if side > 1
                ]
                packed = dense_strides(tuple(view.shape), strides)
                assert sides == [
                    (side, stride)
                    for side, stride in zip(view.shape, packed, strict=True)
                    if side > 1
                ]


def test_an_expanded_dimension_is_not_cut_and_counts_once() -> None:
    held = [held_by_all((1000, 50), 4, (1, 0))]
    shares = divide(held, 4)
    assert [box.shape[1] for rank in shares for box in rank[0]] == [50] * 4
    assert bytes_by_rank(held, 4) == [1000] * 4


@pytest.mark.parametrize("size", [3, 7])
def test_no_tensor_is_cut_along_more_dimensions_than_a_manifest_may_say(size: int) -> None:
    shape = (2, 2, 2, 2, 2, 5000)
    (held,) = [held_by_all(shape, size)]
    found = [
        Shard(box.offset, box.shape, 0, 4 * prod(box.shape))
        for rank in divide([held], size)
        for box in rank[0]
    ]
    assert covers(TensorSpec("x", "float32", shape, held[0].strides, None, False, tuple(found)))


def test_small_tensors_are_not_cut() -> None:
    held = [held_by_all((16,), 4) for _ in range(3000)]
    assert all(box.shape == (16,) for rank in divide(held, 4) for boxes in rank for box in boxes)


def test_a_tensor_without_elements_and_a_number_are_one_ranks() -> None:
    shares = divide([held_by_all((0, 5), 3), held_by_all((), 3)], 3)
    assert [sum(len(rank[index]) for rank in shares) for index in (0, 1)] == [1, 1]


def test_ranks_that_would_divide_differently_differ_in_a_digest() -> None:
    one, other = [held_by_all((4, 4), 2)], [held_by_all((4, 4), 2, (1, 4))]
    assert digest_of(one) == digest_of([held_by_all((4, 4), 2)]) != digest_of(other)
    assert held_by(one[0], 1) == one[0]
    assert held_by(one[0], 2) == []
