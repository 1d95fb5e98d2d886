"""A small real repository, served: forks, a merge, tags, a metric that is not a number, several
runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from fastapi.testclient import TestClient
from torch import nn

import datastates
from datastates import Repository
from datastates.api.app import create_app
from datastates.api.routing import Scope

NAME = "repo"
READ, WRITE, ADMIN = "read-" + "r" * 20, "write-" + "w" * 20, "admin-" + "a" * 20
TOKENS = {READ: Scope.READ, WRITE: Scope.WRITE, ADMIN: Scope.ADMIN}
BASE = f"/api/v1/repositories/{NAME}"


def train(
    repo: Repository,
    branch: str,
    count: int,
    *,
    start: str | None = None,
    rate: float = 0.1,
    seed: int = 0,
) -> None:
    """Capture ``count`` steps of a small model on a branch; each has a loss, every second one a
    val_loss, the third's is NaN."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    inputs, targets = torch.randn(16, 6), torch.randint(0, 2, (16,))
    with repo.track(
        model=model, optimizer=optimizer, branch=branch, start=start, durable_every=1, rate=rate
    ) as run:
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step = run.step + 1
            metrics = {"loss": float(loss.detach())}
            if step % 2 == 1:
                metrics["val/loss"] = float("nan") if step == 3 else 1 / step
            run.capture(
                metrics=metrics,
                attributes={"branch": branch, "rate": rate},
                message=f"{branch} at {step}",
            ).wait("durable")


def build(folder: Path) -> None:
    """What the tests browse, by three processes' worth of runs.

    ``main`` has 8 steps, the third tagged ``warm``; ``fork`` goes on from it for 3; ``soup`` is the
    mean of both, tagged ``best``; ``lone`` is a root of its own with 2.
    """
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        train(repo, "main", 8)
        repo.tag("warm", "main@step:3", message="end of shared prefix")
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        train(repo, "fork", 3, start="warm", rate=0.3)
        repo.merge(["main", "fork"], into="soup", tag="best", message="both")
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        train(repo, "lone", 2, seed=1)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's folder, made once: to be copied, not changed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("built") / "runs"
    build(folder)
    return folder


@pytest.fixture
def repo(built: Path, tmp_path: Path) -> Iterator[Repository]:
    """A copy of it, open: the test's own."""
    shutil.copytree(built, tmp_path / "runs")
    with datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as opened:
        yield opened


class Serve(Protocol):
    """``serve({"repo": repo}, …)``: a client of an application; what else is given goes to
    ``create_app``."""

    def __call__(
        self, repositories: dict[str, Repository], *, token: str | None = None, **options: Any
    ) -> TestClient: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes clients; they end with the test."""
    with ExitStack() as stack:

        def serve(
            repositories: dict[str, Repository], *, token: str | None = None, **options: Any
        ) -> TestClient:
            app = create_app(repositories, **options)
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            return stack.enter_context(
                TestClient(
                    app,
                    base_url="http://127.0.0.1:8642",
                    headers=headers,
                    raise_server_exceptions=False,
                )
            )

        yield serve


@pytest.fixture
def client(repo: Repository, serve: Serve) -> TestClient:
    """Who reads the repository without a token; none is configured."""
    return serve({NAME: repo})
