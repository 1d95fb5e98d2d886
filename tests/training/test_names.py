"""By what names things can be tracked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


def test_an_object_may_have_the_name_of_an_argument(repo: Repository) -> None:
    weight, start = torch.ones(3), torch.arange(3.0)
    run = repo.track(
        rng=False, objects={"start": start, "only": [torch.zeros(2)], "defer": 7}, weight=weight
    )
    uid = run.capture().wait().uid
    assert sorted(repo.load(uid)) == ["defer", "only", "start", "weight"]
    assert run.values == {"defer": 7}
    start.zero_()
    run.restore(uid)
    assert start.tolist() == [0, 1, 2]


def test_a_value_in_objects_is_not_taken_for_a_misspelt_argument(repo: Repository) -> None:
    assert repo.track(rng=False, objects={"starts": 3}).values == {"starts": 3}


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"weight": torch.ones(1)}, "weight: given by keyword and in objects="),
        ({"rng": torch.ones(1)}, "'rng' is taken"),
        ({"loops": torch.ones(1)}, "'loops' is taken"),
        ({3: torch.ones(1)}, "objects is"),
        ([torch.ones(1)], "objects is"),
    ],
)
def test_names_that_cannot_be_given_are_refused(repo: Repository, objects: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        repo.track(rng=False, objects=objects, weight=torch.ones(3))
    assert repo.refs() == []


@pytest.mark.parametrize("objects", [None, {}])
def test_a_training_of_nothing_is_refused(repo: Repository, objects: dict[str, Any] | None) -> None:
    with pytest.raises(InvalidInput, match=r"nothing to capture: .*track\(model=model"):
        repo.track(objects=objects)
    assert repo.refs() == []


@pytest.fixture(params=["restore", "clone"])
def bring(repo: Repository, request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """``Repository.restore``, or ``Peer.clone``."""
    if request.param == "restore":
        yield repo.restore
    else:
        with repo.serve("memory://") as server, datastates.connect(server.url) as peer:
            yield peer.clone


def test_a_state_goes_into_objects_by_name(repo: Repository, bring: Callable[..., object]) -> None:
    repo.track(rng=False, objects={"only": torch.ones(3)}, weight=torch.ones(2)).capture().wait()
    weight, only = torch.zeros(2), torch.zeros(3)
    bring("main", weight=weight)
    bring("main", objects={"only": only})
    assert (weight.tolist(), only.tolist()) == ([1, 1], [1, 1, 1])
    bring("main", weight=weight.zero_(), objects={"only": only.zero_()})
    assert (weight.tolist(), only.tolist()) == ([1, 1], [1, 1, 1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name the objects|give one of them"),
        ({"wieght": torch.zeros(2)}, "wieght"),
        ({"weight": torch.zeros(2), "strcit": False}, "strcit is no option .* mean strict"),
        ({"weight": torch.zeros(2), "objects": {"weight": torch.zeros(2)}}, "weight: given by"),
        ({"objects": [torch.zeros(2)]}, "objects is a list"),
    ],
    ids=str,
)
def test_objects_that_a_state_does_not_fit_are_refused(
    repo: Repository, bring: Callable[..., object], given: dict[str, Any], said: str
) -> None:
    repo.track(rng=False, weight=torch.ones(2)).capture().wait()
    with pytest.raises(InvalidInput, match=said):
        bring("main", **given)
