"""By what names things can be tracked."""

from __future__ import annotations

from collections.abc import Iterator
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
