"""What a training that captures a part of each state takes of what it tracks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Repository, Tracker
from datastates.engine.handle import Part
from datastates.errors import Unsupported
from datastates.state.tree import flatten
from datastates.training.training import Training


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository."""
    with datastates.open(tmp_path / "runs") as opened:
        yield opened


def as_rank(tracker: Tracker, rank: int, size: int) -> Training:
    """Its training, as one of several; nothing is captured."""
    training = tracker._training
    training.line.part = Part(rank, size, "job")
    return training


def stored(training: Training) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of what this rank stores of each tensor."""
    return {
        spec.path: [shard.shape for shard in spec.shards]
        for spec in training.plan_for(flatten(training.tree({}))).specs
    }


def test_buffers_are_the_first_ranks_and_all_else_is_divided(repo: Repository) -> None:
    model = nn.Sequential(nn.Linear(100, 64, bias=False), nn.BatchNorm1d(64))
    tracker = repo.track(model=model)
    first = stored(as_rank(tracker, 0, 2))
    tracker._training.forget_layout()
    second = stored(as_rank(tracker, 1, 2))
    assert first["model/1.running_mean"] == [(64,)]
    assert second["model/1.running_mean"] == []
    assert (
        sum(map(prod, first["model/0.weight"])) + sum(map(prod, second["model/0.weight"])) == 6400
    )
    assert sum(map(prod, first["model/0.weight"])) < 3200


def test_what_is_named_and_what_draws_or_counts_is_each_ranks_own(repo: Repository) -> None:
    training = as_rank(repo.track(model=nn.Linear(2, 2), seen=[torch.ones(3)]), 1, 2)
    training.own = frozenset({"seen"})
    assert [*stored(training)] == ["model/weight", "model/bias"]


def test_gradients_of_replicas_are_refused_by_name(repo: Repository) -> None:
    model = nn.Linear(2, 2)
    training = as_rank(repo.track(model=model, gradients=True), 0, 2)
    model(torch.ones(2)).sum().backward()
    with pytest.raises(
        Unsupported,
        match=r"^gradients/model/weight is tracked by several ranks.*without gradients=True",
    ):
        stored(training)
