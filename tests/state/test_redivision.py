"""What one rank had of its own, put back in a job of another size: random numbers of each rank's
own, and the rest of the data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import datastates
from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.data_position import Redivision
from datastates.state.generators import RngState
from datastates.state.restore import restore_into
from datastates.state.sampler import PermutationSampler


def everything(path: str) -> bool:
    return True


def generators() -> dict[str, Any]:
    own = {
        "torch": torch.Generator(),
        "python": random.Random(1),
        "numpy": np.random.default_rng(1),
        "old": np.random.RandomState(1),
    }
    return {"rng": RngState(), "own": own, "bits": np.random.Philox(1)}


def drawn(objects: dict[str, Any]) -> list[float]:
    own = objects["own"]
    found = [
        torch.rand(1).item(),
        random.random(),
        float(np.random.rand()),
        torch.rand(1, generator=own["torch"]).item(),
    ]
    return [
        *found,
        own["python"].random(),
        own["numpy"].random(),
        own["old"].rand(),
        np.random.Generator(objects["bits"]).random(),
    ]


def test_each_rank_draws_numbers_of_its_own_the_same_ones_every_time() -> None:
    objects = generators()
    tree = Adapted(objects).tree()
    seen: list[list[float]] = []
    for _ in range(2):
        for rank in range(3):
            own = Redivision(2, rank, 3)
            restore_into(objects, own(tree, objects, everything))
            seen.append(drawn(objects))
            assert len(own.notes) == (6 if rank else 0)
    assert seen[:3] == seen[3:]
    assert all(len({row[index] for row in seen}) == 3 for index in range(8)), (
        "no two ranks draw the same number"
    )
    restore_into(objects, tree)
    assert drawn(objects) == seen[0], "rank 0 goes on with the numbers that it had"


def test_with_as_many_ranks_all_is_as_it_was() -> None:
    tree = Adapted(generators()).tree()
    own = Redivision(3, 2, 3)
    assert own.source == 2
    assert own(tree, generators(), everything) == tree
    assert not own.notes


def test_what_a_sampler_has_left_is_for_all_and_said() -> None:
    sampler = PermutationSampler(12, rank=1, num_replicas=3)
    next(sampler.batches(2))
    tree = {"data": [sampler.state_dict()]}
    own = Redivision(3, 0, 1)
    mine = {"data": [PermutationSampler(12)]}
    restore_into(mine, own(tree, mine, everything))
    assert (mine["data"][0].position, len(list(mine["data"][0]))) == (6, 6)
    assert own.notes == ["data/0: what 3 ranks had left of the epoch is divided among 1"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
def test_a_loader_that_knows_one_ranks_place_only_is_refused_unless_it_is_left_alone() -> None:
    loader = StatefulDataLoader(list(range(8)), batch_size=2)
    tree = {"loader": loader.state_dict()}
    with pytest.raises(
        InvalidInput,
        match=(
            r"loader \(StatefulDataLoader\) knows the place of one of 2 ranks.*PermutationSampler"
        ),
    ):
        Redivision(2, 0, 3)(tree, {"loader": loader}, everything)
    assert Redivision(2, 0, 3)(tree, {"loader": loader}, lambda path: False) == tree
    assert Redivision(2, 0, 2)(tree, {"loader": loader}, everything) == tree


def test_a_report_says_what_is_begun_anew() -> None:
    assert (
        str(datastates.RestoreReport(restored=("a",), notes=("rng: drawn anew",)))
        == "restored 1 leaves\nrng: drawn anew"
    )
