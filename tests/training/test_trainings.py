"""Each training is a run of its own, with the configuration that it was given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository, Status
from datastates.errors import InvalidInput
from datastates.lineage.states import Run
from datastates.lineage.views import detail
from datastates.lineage.write import runs
from tests.support import warm

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


def listed(repo: Repository) -> list[Run]:
    with repo.core.reading() as session:
        return runs.listing(session, limit=100)[0]


def test_each_state_has_the_configuration_of_its_training(repo: Repository) -> None:
    given = argparse.Namespace(optimizer={"lr": 0.1, "betas": (0.9, 0.99)}, name="first")
    flat = {
        "optimizer.lr": 0.1,
        "optimizer.betas.0": 0.9,
        "optimizer.betas.1": 0.99,
        "name": "first",
    }
    with repo.track(weight=torch.zeros(3), config=given) as run:
        assert run.config == flat
        captured = run.capture().wait()
        run.capture()
    assert captured.config == flat
    assert [state.config for state in repo.log("main")] == [flat, flat]
    assert repo.state("main") == repo.find("config.optimizer.lr = 0.1")[0]


def test_a_fork_and_a_resumed_training_have_configurations_of_their_own(repo: Repository) -> None:
    for branch, start, config in (
        ("main", None, {"lr": 0.1}),
        ("fork", "main", {"lr": 0.01}),
        ("main", None, {"lr": 0.2}),
        ("main", None, None),
    ):
        with repo.track(branch=branch, start=start, weight=torch.zeros(3), config=config) as run:
            run.capture()
    assert [state.config for state in repo.log("main")] == [{}, {"lr": 0.2}, {"lr": 0.1}]
    assert repo.state("fork").config == {"lr": 0.01}
    assert [(run.branch, run.chosen) for run in reversed(listed(repo))] == [
        ("main", {"lr": 0.1}),
        ("fork", {"lr": 0.01}),
        ("main", {"lr": 0.2}),
        ("main", {}),
    ]
    assert all(run.finished_at is not None for run in listed(repo))
    assert repo.diff("main~2", "fork").config == {"lr": (0.1, 0.01)}


def test_states_are_found_and_sorted_by_their_configuration(repo: Repository) -> None:
    for lr in (0.01, 0.1, 0.001):
        with repo.track(
            branch=f"b{lr}",
            weight=torch.zeros(3),
            config={"lr": lr, "net": {"act": "relu" if lr > 0.005 else "gelu"}},
        ) as run:
            run.capture()
    with repo.track(branch="bare", weight=torch.zeros(3)) as run:
        run.capture()

    def branches(query: str) -> list[object]:
        return [state.config.get("lr") for state in repo.find(query)]

    assert branches("config.lr > 1e-3 order by config.lr desc") == [0.1, 0.01]
    assert branches("order by config.net.act, config.lr") == [0.001, 0.01, 0.1, None]
    assert branches("config.net.act = gelu or not config.lr exists order by config.lr") == [
        0.001,
        None,
    ]


def test_a_training_that_is_refused_leaves_no_run(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match=r"config\.net is"):
        repo.track(weight=torch.zeros(3), config={"net": nn.Linear(1, 1)})
    with repo.track(weight=torch.zeros(3)) as run:
        run.capture()
    with pytest.raises(InvalidInput, match="does not fit"):
        repo.track(branch="fork", start="main", weight=torch.zeros(4), config={"lr": 0.1})
    assert [each.branch for each in listed(repo)] == ["main"]


def test_an_object_may_be_called_config(repo: Repository) -> None:
    with repo.track(
        weight=torch.zeros(3), objects={"config": {"seen": 5}}, config={"lr": 0.1}
    ) as run:
        run.capture()
    assert repo.load("main")["config"] == {"seen": 5}
    with pytest.raises(InvalidInput, match=r"objects=\{'config'"):
        repo.track(config=nn.Linear(1, 1))


def test_a_process_without_a_training_counts_as_a_run(repo: Repository) -> None:
    for branch in ("one", "two"):
        with repo.track(branch=branch, weight=torch.ones(3), rng=False) as run:
            run.capture().wait("durable")
    merged = repo.merge(["one", "two"], only="weight")
    assert merged.config == {}
    assert merged.run is not None
    with repo.core.reading() as session:
        process = runs.get(session, merged.run)
        assert {run.process for run in listed(repo)} == {process.uid}
        assert detail.count(session).runs == 2
        assert [run.uid for run in runs.unfinished(session)] == [process.uid]


def test_what_a_training_of_a_killed_process_had_in_memory_is_lost(tmp_path: Path) -> None:
    code = f"""
import os, torch, datastates
repo = datastates.open({str(tmp_path)!r}, config=datastates.Config(durable_interval_s=None, memory_bytes=64 << 20))
run = repo.track(weight=torch.zeros(3), config={{"lr": 0.1}})
run.capture().wait("durable")
run.capture().wait()
other = repo.track(branch="other", weight=torch.zeros(3), config={{"lr": 0.2}})
other.capture().wait()
os._exit(9)
"""
    done = warm.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 9
    with datastates.open(tmp_path, config=QUIET) as repo:
        assert [item.branch for item in repo.recovered] == ["main", "other"]
        found = {state.config["lr"]: state.status for state in repo.find("order by created")}
        assert found == {0.1: Status.LOST, 0.2: Status.LOST}
        assert repo.state("main").status is Status.DURABLE
        assert all(run.finished_at is not None for run in listed(repo))
