"""Numbers about a repository over the web."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates import Repository
from datastates.api import cache
from datastates.api.cache import Kept
from datastates.api.models import stats_of
from datastates.lineage.views.detail import count
from tests.api.conftest import BASE, train

if TYPE_CHECKING:
    import pytest
    from fastapi.testclient import TestClient


def test_the_repository_in_numbers(client: TestClient, repo: Repository) -> None:
    found = client.get(f"{BASE}/stats").json()
    states = repo.find("")

    assert (found["states"], found["branches"], found["tags"], found["runs"]) == (
        len(states),
        4,
        2,
        3,
    )
    assert found["statuses"] == {"durable": len(states)}
    losses = [state.metrics["loss"] for state in states if "loss" in state.metrics]
    assert found["metrics"][0] == {
        "key": "loss",
        "count": len(losses),
        "least": min(losses),
        "most": max(losses),
    }
    assert found["metrics"][1]["key"] == "val/loss"
    assert {"branch", "rate"} <= set(found["attributes"])
    assert found["bytes_stored"] == sum(
        path.stat().st_size for path in repo.location.packs.glob("*.safetensors")
    )
    assert found["newest"]["uid"] == states[0].uid


def test_small_repositories_are_counted_each_time(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_AT_ONCE_S", 60.0)  # on a busy machine too
    before = client.get(f"{BASE}/stats")
    assert (
        client.get(f"{BASE}/stats", headers={"If-None-Match": before.headers["etag"]}).status_code
        == 304
    )
    train(repo, "main", 2)
    assert client.get(f"{BASE}/stats").json()["states"] == before.json()["states"] + 2


def test_large_ones_are_counted_in_the_background(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_AT_ONCE_S", 0.0)
    monkeypatch.setattr(cache, "SHARE", 1e9)
    numbers = Kept("statistics", repo.core.reading, count)
    with repo.core.reading() as session:
        before = numbers.of(session)
    train(repo, "main", 2)

    with repo.core.reading() as session:
        during = numbers.of(session)
        assert during.states == before.states
        assert stats_of(session, during, 0).newest == repo.state("main")
        numbers._background.join()
        assert numbers.of(session).states == before.states + 2
    train(repo, "main", 1)
    monkeypatch.setattr(cache, "_OLD_S", 0.0)
    with repo.core.reading() as session:
        assert numbers.of(session).states == before.states + 3, "nobody asked meanwhile"
    train(repo, "main", 1)
    monkeypatch.setattr(cache, "_WAIT_S", 0.0)
    with repo.core.reading() as session:
        assert numbers.of(session).states == before.states + 3, (
            "a request does not wait for what takes long"
        )
    numbers.close()
