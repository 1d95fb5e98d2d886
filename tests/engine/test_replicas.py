"""Copies of a tensor that should be equal and are not are named, with the ranks that have them
otherwise."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from datastates.engine.plan import Copy, Difference, copies_of, differences
from datastates.state.geometry import give
from datastates.state.tree import flatten
from tests.support.meshes import dtensor


def copies(trees: list[object], apart: frozenset[int] = frozenset()) -> list[list[Copy]]:
    return [
        copies_of(flatten(tree).tensors, rank, len(trees), apart=apart)
        for rank, tree in enumerate(trees)
    ]


def test_equal_replicas_do_not_differ_whatever_their_form() -> None:
    base = torch.randn(6, 8)
    tree = {
        "a": base,
        "turned": base.t(),
        "holes": base[:, ::2],
        "number": torch.tensor(1.0),
        "empty": torch.empty(0),
    }
    assert differences(copies([tree, tree, tree])) == []


def test_a_replica_that_differs_in_one_bit_is_named_by_path_and_rank() -> None:
    trees = [{"same": torch.ones(5), "model": {"weight": torch.zeros(100)}} for _ in range(4)]
    trees[2]["model"]["weight"][37] = -0.0  # type: ignore[index]  # a dict of tensors
    assert differences(copies(list(trees))) == [Difference("model/weight", (2,))]


def test_of_two_that_differ_the_second_is_named() -> None:
    assert differences(copies([[torch.zeros(3)], [torch.ones(3)]])) == [Difference("0", (1,))]


def test_shards_are_compared_with_the_replicas_of_the_same_shard_only() -> None:
    whole = torch.arange(8.0)

    def tree_of(rank: int) -> object:
        local = whole[:4] if rank < 2 else whole[4:]
        return [dtensor(local + (rank == 3), whole, (2, 2), [Shard(0), Replicate()], rank)]

    assert differences(copies([tree_of(rank) for rank in range(4)])) == [Difference("0", (3,))]


def test_what_one_rank_has_alone_or_may_differ_is_not_compared() -> None:
    buffer = torch.zeros(3)
    trees: list[object] = [[give(torch.zeros(2), [0]), buffer], [give(torch.ones(2), [0]), buffer]]
    assert copies(trees, frozenset({id(buffer)})) == [[], []]
