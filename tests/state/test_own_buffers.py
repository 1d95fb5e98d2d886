"""Buffers that each rank has of its own: gathered in one tensor a rank, and put back into the
tree that one of them reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from datastates.state.adapters import Adapted
from datastates.state.data_position import Redivision
from datastates.state.geometry import local_of, owners_of
from datastates.state.per_rank import MOST_BYTES, OWN_BUFFERS, OwnBuffers, part_of

if TYPE_CHECKING:
    import pytest


class Net(nn.Module):
    """Two statistics, a mask, a table that is too large, one that no state has, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(MOST_BYTES // 4 + 1))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.turned: torch.Tensor
        self.register_buffer("turned", torch.zeros(2, 3).t())


def captured(rank: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects of a rank, and their tree."""
    objects = {"nets": [Net()]}
    adapted = Adapted(objects)
    adapted.own_buffers = OwnBuffers(rank, size)
    for number, buffer in enumerate(objects["nets"][0].buffers()):
        if buffer.dtype is not torch.bool:
            buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape) + 100 * rank + number)
    return objects, adapted.tree(is_shared=True)


def test_each_rank_gathers_its_own_and_something_stands_for_those_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, tree = captured(1, 3)
    kept = tree[OWN_BUFFERS]
    assert [name for _, name, _ in kept["places"]] == [
        "turned",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert [owners_of(each) for each in kept["bytes"]] == [(0,), (1,), (2,)]
    assert [local_of(each) is None for each in kept["bytes"]] == [True, False, True]
    assert len({each.shape for each in kept["bytes"]}) == 1


def test_a_capture_sees_them_as_they_are_then_and_makes_nothing_anew() -> None:
    net = Net()
    adapted = Adapted({"net": net})
    adapted.own_buffers = OwnBuffers(0, 2)
    first: Any = adapted.tree(is_shared=True)[OWN_BUFFERS]
    before = first["bytes"][0].clone()
    net.turned.add_(1)
    again: Any = adapted.tree(is_shared=True)
    assert again[OWN_BUFFERS] is first
    assert any(part is first for part in adapted.lasting)
    assert not torch.equal(first["bytes"][0], before)


def test_as_many_ranks_get_their_own_and_any_others_those_of_the_model() -> None:
    trees = [captured(rank, 2) for rank in range(2)]
    own = {name: buffer.clone() for name, buffer in trees[1][0]["nets"][0].named_buffers()}
    for was_one, read in ((False, Redivision(2, 1, 2)), (True, Redivision(2, 0, 1))):
        stored: dict[str, Any] = {
            "nets": [dict(trees[0][1]["nets"][0])],
            OWN_BUFFERS: trees[1][1][OWN_BUFFERS],
        }
        found = read(stored, {"nets": [Net()]}, lambda path: True)
        assert OWN_BUFFERS not in found
        for name in ("turned", "norm.running_mean", "norm.num_batches_tracked"):
            expected = trees[0][0]["nets"][0].state_dict()[name] if was_one else own[name]
            assert torch.equal(found["nets"][0][name], expected), name
        assert found["nets"][0]["table"] is stored["nets"][0]["table"]


def test_a_rank_reads_its_own_bytes_only() -> None:
    paths = [f"{OWN_BUFFERS}/bytes/{rank}" for rank in range(12)]
    assert [part_of(path) for path in paths] == list(range(12))
    assert [
        number
        for number, path in enumerate(paths)
        if Redivision(12, 3, 12).reads(lambda path: False)(path)
    ] == [3]
    assert not any(map(Redivision(12, 3, 4).reads(lambda path: True), paths))
    assert Redivision(12, 3, 4).reads(lambda path: path == "model/x")("model/x")


def test_a_model_without_small_buffers_has_none() -> None:
    adapted = Adapted({"model": nn.Linear(2, 2)})
    adapted.own_buffers = OwnBuffers(0, 2)
    assert OWN_BUFFERS not in adapted.tree(is_shared=True)
