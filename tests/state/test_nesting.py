"""Containers that hold others more than once: a state stores each as often as it is used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.errors import InvalidInput


def nested(kind: type[Any], levels: int) -> Any:
    """A container whose parts are 2 ** levels, if each is counted as often as it is used."""
    found: Any = {"w": torch.ones(1)}
    for _ in range(levels):
        found = {"a": found, "b": found} if kind is dict else kind((found, found))
    return found


class Own:
    """An object whose state is such a container."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("where", ["track", "state_dict", "save"])
def test_containers_that_are_used_too_often_are_refused_at_once(
    kind: type[Any], where: str, tmp_path: Path
) -> None:
    found = nested(kind, 40)
    with datastates.open(tmp_path / "runs") as repo:
        box = {"it": found if where == "track" else Own(found), "w": torch.ones(1)}
        act = (
            partial(datastates.save, found, tmp_path)
            if where == "save"
            else partial(repo.track, box=box, rng=False)
        )
        with pytest.raises(
            InvalidInput, match="more than 10000000 parts, counted as often as they are used"
        ):
            act()


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_containers_that_are_used_twice_come_back_twice(kind: type[Any], tmp_path: Path) -> None:
    with (
        datastates.open(tmp_path) as repo,
        repo.track(box={"it": nested(kind, 5)}, rng=False) as run,
    ):
        found = repo.load(run.capture().wait())["box"]["it"]
    for _ in range(5):
        first, second = found.values() if kind is dict else found
        assert first is not second
        found = second
    assert found["w"].item() == 1
