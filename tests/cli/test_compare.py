"""``diff`` of three states or more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

import datastates
from datastates.cli.app import app
from datastates.maintenance.retention_pass import evict


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three branches that differ in a setting and a metric; ``b`` has an evicted state."""
    with datastates.open(tmp_path) as repo:
        for branch, rate in (("a", 0.1), ("b", 0.01), ("c", 0.001)):
            with repo.track(
                branch=branch,
                rng=False,
                w=torch.ones(3),
                durable_every=1,
                config={"lr": rate, "width": 8},
            ) as run:
                for step in range(2):
                    run.capture(
                        metrics={"loss": rate + step, "accuracy": 1 - rate}, attributes={"seed": 1}
                    ).wait("durable")
        evict(repo.core, repo.state("b~1").uid)
    return tmp_path


def call(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["--repo", str(folder), "diff", *words])


def rows(done: Result) -> dict[str, list[str]]:
    """The cells of each row by its name."""
    assert done.exit_code == 0, done.output
    return {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if not line.startswith(" ")
    }


def test_what_differs_stands_beside_each_other_with_configuration_first(folder: Path) -> None:
    done = call(folder, "a", "b", "c")
    found = rows(done)
    assert done.stdout.splitlines()[0].split() == ["a", "b", "c"]
    assert found["config.lr"] == ["0.1", "0.01", "0.001"]
    assert found["metrics.loss"] == ["1.1", "1.01", "1.001"]
    assert (
        list(found).index("config.lr")
        < list(found).index("metrics.loss")
        < list(found).index("bytes")
    )
    assert "config.width" not in found
    assert "attr.seed" not in found
    assert "the same in all of them" in done.stderr
    assert rows(call(folder, "a", "b", "c", "--all"))["config.width"] == ["8", "8", "8"]


def test_where_each_can_be_restored_is_said(folder: Path) -> None:
    found = rows(call(folder, "b~1", "a", "b"))
    assert found["restorable"][0] == "nothing"
    assert found["bytes"][0] == "evicted"
    assert found["stored"][0] == "local"


def test_json_has_what_the_api_has(folder: Path) -> None:
    found = json.loads(call(folder, "a", "b", "a", "--json").stdout)
    assert [each["rev"] for each in found["states"]] == ["a", "b", "a"]
    assert found["config"][0] == {
        "key": "lr",
        "values": [0.1, 0.01, 0.1],
        "differs": True,
        "direction": None,
    }
    assert {row["key"]: row["direction"] for row in found["metrics"]} == {
        "loss": "min",
        "accuracy": "max",
    }


def test_too_many_states_and_unknown_ones_are_refused_with_the_next_step(folder: Path) -> None:
    unknown = call(folder, "a", "b", "bb")
    assert unknown.exit_code == 3
    assert "bb" in unknown.output
    assert "at most 32" in call(folder, *["a"] * 33).output


def test_random_generators_are_shown_only_on_request(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)
    with datastates.open(tmp_path / "drawn") as repository:
        weight = torch.zeros(2)
        with repository.track(weight=weight) as run:
            for _ in run.epochs(2):
                for _ in run.steps(loader):
                    weight += 1
                    run.capture()
    shown = call(tmp_path / "drawn", "main~5", "main").stdout
    assert "weight" in shown
    assert "loops/epoch" in shown
    assert "rng" not in shown
    assert "loops/passes/0/begin/rng" in call(tmp_path / "drawn", "main~5", "main", "--rng").stdout
