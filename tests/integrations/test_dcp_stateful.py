"""Objects given to torch.distributed.checkpoint whole: states of theirs are made, checked and
put back by ours."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from datastates import Repository
from datastates.errors import InvalidInput
from datastates.integrations.dcp import Reader, Stateful, Writer
from tests.integrations.checkpoints import assert_same, build, saved

dcp: Any = torch.distributed.checkpoint  # type checkers are told that it exports nothing
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def test_stateful_makes_the_state_of_an_optimizer_that_has_not_stepped(repo: Repository) -> None:
    model, optimizer = build()
    dcp.save({"app": Stateful(model=model, optimizer=optimizer)}, storage_writer=Writer(repo))
    expected = torch.rand(3)
    other, fresh = build(1, is_stepped=False)
    app = Stateful(model=other, optimizer=fresh)
    dcp.load({"app": app}, storage_reader=Reader(repo))

    assert torch.equal(torch.rand(3), expected), "random numbers go on too"
    assert app.report is not None
    assert_same(get_state_dict(other, fresh), get_state_dict(model, optimizer))
    assert list(repo.load("main")["app"]["optimizer"]["state"]) == [
        name for name, _ in model.named_parameters()
    ]


def test_stateful_changes_nothing_unless_everything_fits(repo: Repository) -> None:
    model, optimizer = build()
    dcp.save(
        {"app": Stateful(model=model, optimizer=optimizer, rng=False)}, storage_writer=Writer(repo)
    )
    smaller = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in smaller.state_dict().items()}
    with pytest.raises(InvalidInput, match="does not fit"):
        dcp.load({"app": Stateful(model=smaller, rng=False)}, storage_reader=Reader(repo))

    assert_same(dict(smaller.state_dict()), before)


class Order:
    """An object whose tensor has another size each time."""

    def __init__(self, count: int) -> None:
        self.order = torch.arange(count)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


def test_stateful_takes_what_has_another_size_or_another_state_now(repo: Repository) -> None:
    model, fresh = build(is_stepped=False)
    dcp.save(
        {"app": Stateful(model=model, optimizer=fresh, order=Order(7)), "n": 1},
        storage_writer=Writer(repo),
    )
    other, stepped = build(1)
    order = Order(3)
    found: dict[str, Any] = {"app": Stateful(model=other, optimizer=stepped, order=order), "n": 0}
    dcp.load(found, storage_reader=Reader(repo))

    assert torch.equal(order.order, torch.arange(7))
    assert not stepped.state
    assert found["n"] == 1
    dcp.save(found, storage_writer=Writer(repo))
    assert torch.equal(saved(repo)["app"]["order"]["order"], torch.arange(7)), (
        "it shows what it holds again"
    )


def test_stateful_that_another_thread_saves_is_whole_whatever_is_loaded_meanwhile(
    repo: Repository,
) -> None:
    model, optimizer = build()
    app = Stateful(model=model, optimizer=optimizer, rng=False)
    dcp.save({"app": app}, storage_writer=Writer(repo))
    tree = app.state_dict()
    seen: list[bool] = []

    def load() -> None:
        reader = Reader(repo)
        reader.read_metadata()  # from here on it has a load planned
        seen.append(bool(tree.items()))
        reader.reset()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [True]


def test_stateful_that_the_state_lacks_is_refused(repo: Repository) -> None:
    model, _ = build()
    dcp.save({"other": Stateful(model=model), "n": 1}, storage_writer=Writer(repo))
    app = Stateful(model=model)
    with pytest.raises(CheckpointException, match="the state has no 'app': it has other, n"):
        dcp.load({"app": app}, storage_reader=Reader(repo))

    dcp.load(
        {"app": app},
        storage_reader=Reader(repo),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert list(app.state_dict()) == ["model", "rng"]


def test_stateful_is_saved_and_loaded_by_torchs_own_storage_too(tmp_path: Path) -> None:
    model, optimizer = build()
    dcp.save({"app": Stateful(model=model, optimizer=optimizer)}, checkpoint_id=tmp_path / "folder")
    other, stepped = build(1)
    dcp.load({"app": Stateful(model=other, optimizer=stepped)}, checkpoint_id=tmp_path / "folder")

    assert_same(get_state_dict(other, stepped), get_state_dict(model, optimizer))
    third, fresh = build(2, is_stepped=False)
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: app\.optimizer\.state"
    ):
        dcp.load({"app": Stateful(model=third, optimizer=fresh)}, checkpoint_id=tmp_path / "folder")
