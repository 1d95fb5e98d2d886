"""What is tracked may have any name that a keyword or a dict can have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput

NAMES = [
    ("a/b",),
    ("a%b",),
    ("a%2Fb", "a/b"),
    ("",),
    ("%", ""),
    ("a/b", "a"),
    ("a.b", "a b", "ü*[0]"),
]


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=64 << 20, durable_interval_s=None)
    ) as opened:
        yield opened


def make(names: tuple[str, ...], seed: int) -> dict[str, Any]:
    """A module, its optimizer after a step, a tensor, a list and a value for each name."""
    torch.manual_seed(seed)
    made: dict[str, Any] = {}
    for name in names:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        made |= {
            name: model,
            f"{name}/optimizer": optimizer,
            f"{name}%t": torch.full((2,), seed),
            f"{name}/v": seed,
        }
        made[f"{name}/l"] = [torch.full((1,), seed), {"x/y": seed}]
    return made


def weights(made: dict[str, Any], names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {
        name: (
            [value.tolist() for value in made[name].state_dict().values()]
            + [made[f"{name}%t"].tolist()]
        )
        for name in names
    }


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("names", NAMES, ids=repr)
def test_a_training_with_odd_names_goes_on_where_it_stopped(
    repo: Repository, names: tuple[str, ...], gradients: bool
) -> None:
    first, fresh = make(names, 1), make(names, 2)
    with repo.track(gradients=gradients, **first) as run:
        run.capture().wait("durable")
    with repo.track(gradients=gradients, **fresh) as run:
        assert run.report
        assert not run.report.skipped
    assert weights(fresh, names) == weights(first, names)
    assert all(
        fresh[f"{name}/l"] == [torch.ones(1), {"x/y": 1}] and run.values[f"{name}/v"] == 1
        for name in names
    )
    for name in names:
        momenta = [
            made[f"{name}/optimizer"].state[made[name].weight]["exp_avg"].tolist()
            for made in (first, fresh)
        ]
        assert momenta[0] == momenta[1]


def test_what_has_an_odd_name_is_asked_for_by_it(repo: Repository) -> None:
    nets: dict[str, Any] = {"net/1": nn.Linear(2, 2), "net": nn.Linear(2, 2)}
    with repo.track(**nets) as run:
        run.capture().wait()
    fresh = {"net/1": nn.Linear(2, 2), "net": nn.Linear(2, 2)}
    report = repo.restore("main", objects=fresh, only="net/1")
    assert set(report.restored) == {"net%2F1/weight", "net%2F1/bias"}
    assert repo.load("main", only="net/1")["net"]["weight"] is None
    assert repo.restore("main", objects=fresh, only="net%2F1/*").restored == report.restored
    assert repo.ensemble(["main"], nn.Linear(2, 2), only="net/1")(torch.ones(2)).mean.shape == (2,)


def test_a_name_that_selects_nothing_is_refused_by_load(repo: Repository) -> None:
    net = nn.Linear(2, 2)
    with repo.track(
        net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), objects={"best/loss": 3.0}
    ) as run:
        run.capture().wait()
    misspelt: list[str | list[str]] = ["nte", ["net", "net/wieght"], "net/weight/*"]
    for wrong in misspelt:
        with pytest.raises(InvalidInput, match="selects nothing: try "):
            repo.load("main", only=wrong)
    named: list[str | list[str]] = ["optimizer", "optimizer/param_groups/*", "best/loss", []]
    for values in named:
        tree = repo.load("main", only=values)
        assert tree["net"]["weight"] is None
        assert tree["optimizer"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_cannot_be_stored_is_refused_by_track(repo: Repository, name: str) -> None:
    objects: dict[str, Any] = {name: torch.zeros(2)}
    with pytest.raises(InvalidInput, match="the name of what is tracked is"):
        repo.track(**objects)
    assert repo.refs() == []
