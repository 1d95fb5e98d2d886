"""What makes no sense is refused by each integration at the call, by our own errors, and nothing
is begun."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import datastates
from datastates import Config, Repository, Tracker
from datastates.errors import InvalidInput

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
Call = Callable[[Any, Repository, Tracker], object]
"""The integration, a repository, and what tracks a training there."""


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


def accelerator() -> Any:
    return importlib.import_module("accelerate").Accelerator(cpu=True)


CASES: dict[str, list[tuple[Call, str]]] = {
    "accelerate": [
        (lambda found, repo, run: found.track(3, repo), "accelerator is 3"),
        (lambda found, repo, run: found.track(repo, accelerator()), "accelerator is .*Repository"),
        (lambda found, repo, run: found.track(accelerator(), "runs"), "repo is 'runs'"),
        (
            lambda found, repo, run: found.track(accelerator(), repo, objects=[3]),
            "objects is a list",
        ),
    ],
    "transformers": [
        (lambda found, repo, run: found.DatastatesCallback(3), "3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, 3), "branch is 3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, start=3), "start is 3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, every="2"), "every is '2'"),
        (lambda found, repo, run: found.DatastatesCallback(repo, folders=2), "folders is 2"),
        (lambda found, repo, run: found.DatastatesCallback(repo, resume="no"), "resume is 'no'"),
        (lambda found, repo, run: found.DatastatesCallback(repo, objects=[3]), "objects is a list"),
        (lambda found, repo, run: found.DatastatesCallback(repo).attach(3), "trainer is 3"),
    ],
    "lightning": [
        (lambda found, repo, run: found.DatastatesCallback(3), "repo is 3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, branch=3), "branch is 3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, start=3), "start is 3"),
        (lambda found, repo, run: found.DatastatesCallback(repo, every=1.5), "every is 1.5"),
        (lambda found, repo, run: found.DatastatesCheckpointIO(3), "repo is 3"),
        (lambda found, repo, run: found.DatastatesCheckpointIO(repo, branch=3), "branch is 3"),
    ],
    "dcp": [
        (lambda found, repo, run: found.Writer(3), "3"),
        (lambda found, repo, run: found.Writer(repo, 3), "branch is 3"),
        (lambda found, repo, run: found.Writer(repo, start=3), "3"),
        (lambda found, repo, run: found.Writer(repo, step="2"), "step is '2'"),
        (lambda found, repo, run: found.Writer(repo, metrics=3), "metrics"),
        (lambda found, repo, run: found.Writer(repo, attributes=3), "attributes"),
        (lambda found, repo, run: found.Writer(repo, until="soon"), "until is 'soon'"),
        (lambda found, repo, run: found.Reader(3), "3"),
        (lambda found, repo, run: found.Reader(repo, 3), "3"),
        (lambda found, repo, run: found.Stateful(rng=3), "rng"),
        (lambda found, repo, run: found.Stateful(model=open), "model"),
    ],
    "saved": [
        (lambda found, repo, run: found.save({}, 3), "3"),
        (lambda found, repo, run: found.save({}, "main", repo=3), "3"),
        (lambda found, repo, run: found.save({}, "main", repo=repo, start=3), "3"),
        (lambda found, repo, run: found.save({}, "main", repo=repo, metrics=3), "metrics"),
        (lambda found, repo, run: found.save({}, "main", repo=repo, step="2"), "step is '2'"),
        (lambda found, repo, run: found.save({}, "main", repo=repo, message=2), "message is 2"),
        (lambda found, repo, run: found.load(3), "3"),
        (lambda found, repo, run: found.load("main", repo=3), "3"),
        (
            lambda found, repo, run: found.load("main", repo=repo, map_location="somewhere"),
            "map_location is 'somewhere'",
        ),
    ],
    "ray": [
        (lambda found, repo, run: found.report(3, {}), "run is 3"),
        (lambda found, repo, run: found.report(run, 3), "metrics is 3"),
        (lambda found, repo, run: found.report(run, {}, capture=3), "capture is 3"),
        (lambda found, repo, run: found.checkpoint(run, 3).__enter__(), "capture is 3"),
        (lambda found, repo, run: found.named(3), "checkpoint is 3"),
    ],
    "mlflow": [
        (lambda found, repo, run: found.MlflowLog(repo), "tracker is .*Repository"),
        (lambda found, repo, run: found.MlflowLog(run, experiment=3), "experiment is 3"),
        (lambda found, repo, run: found.MlflowLog(run, into=3), "into is 3"),
    ],
    "tensorboard": [
        (lambda found, repo, run: found.TensorboardLog(3), "tracker is 3"),
        (lambda found, repo, run: found.TensorboardLog(run, 3), "folder is 3"),
        (lambda found, repo, run: found.TensorboardLog(run, into=3), "into is 3"),
    ],
    "wandb": [
        (lambda found, repo, run: found.WandbLog(3), "tracker is 3"),
        (lambda found, repo, run: found.WandbLog(run, into=3), "into is 3"),
    ],
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_argument_is_refused_by_its_name(
    name: str, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow's client makes a file where it is made
    for package in {"lightning": ["lightning"], "ray": ["ray.train", "ray.tune"]}.get(name, []):
        pytest.importorskip(package)
    found = importlib.import_module(f"datastates.integrations.{name}")
    with repo.track(branch="tracked", model=nn.Linear(1, 1)) as run:
        for number, (call, said) in enumerate(CASES[name]):
            with pytest.raises(InvalidInput, match=said):
                pytest.fail(f"case {number} of {name} gave {call(found, repo, run)!r}")
    assert [ref.name for ref in repo.refs()] == [], "nothing was captured"


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_an_option_that_there_is_not_is_refused_by_its_name(name: str, repo: Repository) -> None:
    if name == "lightning":
        pytest.importorskip("lightning")
    found = importlib.import_module(f"datastates.integrations.{name}")
    with pytest.raises(TypeError, match="durable_evry"):
        found.DatastatesCallback(repo, durable_evry=1)


@pytest.mark.long
def test_which_run_of_wandb_goes_on_is_not_asked(repo: Repository) -> None:
    found = importlib.import_module("datastates.integrations.wandb")
    with (
        repo.track(branch="tracked", model=nn.Linear(1, 1)) as run,
        pytest.raises(TypeError, match="id, resume: the lineage says which run"),
    ):
        found.WandbLog(run, id="mine", resume="allow")
