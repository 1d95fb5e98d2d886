"""Every rank works out alone what all ranks hold."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from datastates.errors import Unsupported
from datastates.state.geometry import give, is_spread, local_of, owners_of, stand_in
from datastates.state.per_rank import holdings_of


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process as rank 5 of 8, the others of which are nobody: DTensors can be made, and
    nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_plain_tensor_lies_whole_with_every_rank() -> None:
    (held,) = holdings_of(torch.zeros(3, 4).t(), 3)
    assert (held.shape, held.strides, held.offset, held.local_shape, held.owners) == (
        (4, 3),
        (1, 4),
        (0, 0),
        (4, 3),
        (0, 1, 2),
    )


def test_a_tensor_given_to_some_ranks_lies_with_these_and_on_others_something_stands_for_it() -> (
    None
):
    mine = give(torch.zeros(3, 4), [1])
    theirs = stand_in(mine, [1])
    assert holdings_of(mine, 4) == holdings_of(theirs, 4)
    assert holdings_of(mine, 4)[0].owners == (1,)
    assert local_of(mine) is mine
    assert local_of(theirs) is None
    assert owners_of(torch.zeros(1)) is None


@pytest.mark.usefixtures("eight_ranks")
def test_a_dtensor_says_the_box_of_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    tensor = DTensor.from_local(
        torch.zeros(5, 2),
        mesh,
        [Replicate(), Shard(1)],
        run_check=False,
        shape=torch.Size((5, 7)),
        stride=(7, 1),
    )
    assert is_spread(tensor)
    assert (local := local_of(tensor)) is not None
    assert local.shape == (5, 2)
    assert [(held.offset, held.local_shape, held.owners) for held in holdings_of(tensor, 8)] == [
        ((0, 0), (5, 2), (0, 4)),
        ((0, 2), (5, 2), (1, 5)),
        ((0, 4), (5, 2), (2, 6)),
        ((0, 6), (5, 1), (3, 7)),
    ]


@pytest.mark.usefixtures("eight_ranks")
def test_a_rank_without_an_element_holds_nothing() -> None:
    mesh = init_device_mesh("cpu", (8,))
    tensor = DTensor.from_local(
        torch.zeros(0, 3),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((4, 3)),
        stride=(3, 1),
    )
    assert [held.owners for held in holdings_of(tensor, 8)] == [(0,), (1,), (2,), (3,)]


@pytest.mark.usefixtures("eight_ranks")
def test_the_ranks_of_a_mesh_that_was_sliced_from_a_larger_one_hold_what_their_siblings_hold() -> (
    None
):
    slices = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
    assert slices.mesh.tolist() == [4, 5, 6, 7]
    tensor = DTensor.from_local(torch.zeros(2), slices, [Shard(0)], run_check=False)
    assert [held.owners for held in holdings_of(tensor, 8)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.usefixtures("eight_ranks")
def test_what_no_rank_has_the_value_of_is_refused() -> None:
    tensor = DTensor.from_local(
        torch.zeros(2), init_device_mesh("cpu", (8,)), [Partial()], run_check=False
    )
    with pytest.raises(Unsupported, match=r"Partial.*redistribute it to Replicate"):
        holdings_of(tensor, 8)


def test_nobody_imports_dtensor_for_nothing() -> None:
    script = (
        "import sys, datastates, torch; from datastates.state import per_rank;"
        " per_rank.holdings_of(torch.ones(2), 2); "
    )
    script += "sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.usefixtures("eight_ranks")
def test_a_group_of_some_ranks_counts_its_own_and_knows_nothing_of_other_stages() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "replicas", "shards"))

    def spread(*names: str) -> DTensor:
        part = mesh[names]
        return DTensor.from_local(
            torch.zeros(2, 3), part, [Shard(0) if name == "shards" else Replicate() for name in names], run_check=False,
            shape=torch.Size((4, 3)), stride=(3, 1),
        )  # fmt: skip

    stage = (4, 5, 6, 7)
    for tensor in (spread("shards"), spread("replicas", "shards")):
        assert [held.owners for held in holdings_of(tensor, 4, stage)] == [(0, 2), (1, 3)]
    assert [held.owners for held in holdings_of(spread("shards"), 2, (4, 5))] == [(0,), (1,)]
    with pytest.raises(Unsupported, match=r"lies with the ranks \[4, 5, 6, 7\].*\[4, 5\] track it"):
        holdings_of(spread("replicas", "shards"), 2, (4, 5))
    with pytest.raises(Unsupported, match="lies with the ranks"):
        holdings_of(spread("shards"), 2, (0, 4))
