"""A state restored into objects of other shapes: whole parameters with whole optimizer state,
and one line for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import datastates
from datastates import Repository
from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.restore import restore_into

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")
)


class Own(torch.optim.Adam):
    """Has a ``state_dict`` of its own, so that its state is loaded as a whole."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs") as opened:
        yield opened


def made(name: str, width: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(width)
    has_bias = name != "Muon"
    model = nn.Sequential(nn.Linear(3, 4, bias=has_bias), nn.Linear(4, width, bias=has_bias))
    kind: Any = Own if name == "Own" else getattr(torch.optim, name)
    return model, kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        found.backward()
        return found

    # torch's own optimizers take a closure that returns a tensor
    optimizer.step(loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Own"])
def test_an_optimizer_steps_after_a_parameter_was_not_restored(
    name: str, *, is_reversed: bool
) -> None:
    old, optimizer = made(name, 2)
    for _ in range(3):
        step(old, optimizer)
    tree = Adapted({"model": old, "optimizer": optimizer}).tree()
    model, optimizer = made(name, 5)
    objects: dict[str, object] = {"model": model, "optimizer": optimizer}
    report = restore_into(
        dict(reversed(objects.items())) if is_reversed else objects, tree, strict=False
    )
    left = [note.path for note in report.mismatched]
    assert "model/1.weight" in left
    assert "optimizer" in left if name in ("LBFGS", "Own") else "optimizer/state/1.weight" in left
    assert not any(path.startswith("optimizer/state/1.weight/") for path in report.restored)
    for _ in range(2):
        step(model, optimizer)


def test_a_new_layer_leaves_the_state_of_the_others_whole() -> None:
    old, optimizer = made("Adam", 2)
    step(old, optimizer)
    tree = Adapted({"model": old, "optimizer": optimizer}).tree()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    new = torch.optim.Adam(model.parameters())
    report = restore_into({"model": model, "optimizer": new}, tree, strict=False)
    assert "model/2.weight" in report.missing
    assert [len(new.state[parameter]) for parameter in model.parameters()] == [3, 3, 3, 3, 0, 0]
    step(model, new)


def test_moments_take_the_dtype_of_a_parameter_that_was_converted() -> None:
    old, optimizer = made("Adam", 2)
    step(old, optimizer)
    tree = Adapted({"model": old, "optimizer": optimizer}).tree()
    model = made("Adam", 2)[0].double()
    new = torch.optim.Adam(model.parameters())
    assert restore_into({"model": model, "optimizer": new}, tree, strict=False).converted
    model(torch.ones(2, 3).double()).sum().backward()
    new.step()


def test_a_part_of_a_parameters_state_goes_only_where_the_rest_is() -> None:
    old, optimizer = made("Adam", 2)
    step(old, optimizer)
    tree = Adapted({"model": old, "optimizer": optimizer}).tree()
    model, new = made("Adam", 2)
    with pytest.raises(
        InvalidInput,
        match=(
            r"optimizer/state/0\.weight, and the rest is not there: ask for"
            r" 'optimizer/state/0\.weight'"
        ),
    ):
        restore_into({"model": model, "optimizer": new}, tree, only="optimizer/state/*/exp_avg")
    step(model, new)
    restore_into({"model": model, "optimizer": new}, tree, only="optimizer/state/*/exp_avg")
    assert torch.equal(
        *(
            each.state[next(net.parameters())]["exp_avg"]
            for net, each in ((model, new), (old, optimizer))
        )
    )


def train(repo: Repository, name: str, width: int, **options: Any) -> int:
    """Three steps on branch main; returns the step at which they began."""
    model, optimizer = made(name, width)
    scheduler = StepLR(optimizer, 2)
    torch.manual_seed(0)
    with repo.track(model=model, optimizer=optimizer, scheduler=scheduler, **options) as run:
        began = run.step
        for _ in range(3):
            step(model, optimizer)
            scheduler.step()
            run.capture()
    return began


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_the_advice_of_the_error_works_as_it_is_written(
    repo: Repository, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, name, 2)
    with pytest.raises(InvalidInput, match="write strict=False to restore the rest"):
        train(repo, name, 5)
    assert not caplog.records
    assert train(repo, name, 5, strict=False) == 3
    assert len(caplog.records) == 1
    assert "branch main: model/1.weight, model/1.bias, optimizer" in caplog.text
    assert (
        "what is here stays as the script initialized it, while the step counts on from 3"
        in caplog.text
    )
    new = re.search(r"write branch='(.*)' and no start=", caplog.text)
    assert new
    assert train(repo, name, 5, branch=new[1]) == 0
    assert train(repo, name, 5) == 6
    assert len(caplog.records) == 1


def test_going_back_without_strict_lists_what_stays(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "Adam", 2)
    model, optimizer = made("Adam", 5)
    with repo.track(branch="other", model=model, optimizer=optimizer) as run:
        step(model, optimizer)
        run.capture()
        report = run.restore("main", strict=False)
        assert (
            "branch other: model/1.weight, model/1.bias, optimizer/state/1.weight,"
            " optimizer/state/1.bias did not fit" in caplog.text
        )
        assert "what is here stays as the script has it" in caplog.text
        assert [note.path for note in report.mismatched][2:] == [
            "optimizer/state/1.weight",
            "optimizer/state/1.bias",
        ]
        assert "optimizer/state/1.weight" in str(report)
        step(model, optimizer)
