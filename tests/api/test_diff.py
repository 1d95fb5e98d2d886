"""Diffs over the web."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from datastates import Repository
from datastates.api.payload import ConcurrencyLimit
from datastates.api.routes import reading as routes
from datastates.cli.app import app as terminal
from datastates.maintenance.retention_pass import evict
from datastates.storage.pack_reader import MappedReader
from tests.api.conftest import BASE
from tests.api.endless import Endless

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def diff(client: TestClient, **query: Any) -> Any:
    answer = client.get(f"{BASE}/diff", params={"old": "warm", "new": "fork", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("only", [[], ["model"], ["model/*.weight", "rate"]])
def test_a_diff_is_that_of_the_terminal(
    client: TestClient, repo: Repository, only: list[str]
) -> None:
    options = [part for pattern in only for part in ("--only", pattern)]
    done = CliRunner().invoke(
        terminal, ["--repo", str(repo.location.root), "diff", "warm", "fork", *options, "--json"]
    )
    assert done.exit_code == 0, done.output
    assert diff(client, only=only) == json.loads(done.stdout)


def test_without_tensors_no_payload_is_touched(client: TestClient, repo: Repository) -> None:
    whole = diff(client)
    for file in repo.location.packs.iterdir():
        if file.is_file():
            file.unlink()
    found = diff(client, tensors=False)

    assert found == {**whole, "tensors": [], "values": {}}
    assert found["base"]["uid"] == repo.state("warm").uid
    assert found["attributes"]["rate"] == [0.1, 0.3]
    answer = client.get(f"{BASE}/diff", params={"old": "warm", "new": "fork"})
    lacking = answer.json()["lacking"]
    assert [each["state"] for each in lacking] == [repo.state("warm").uid, repo.state("fork").uid]
    assert {**answer.json(), "lacking": []} == found, "all else is told"
    assert str(repo.location.packs) not in answer.text, (
        "where it lies on the server's disk is nobody else's business"
    )
    assert "etag" not in answer.headers, "what is not here now may come"


def test_a_diff_of_an_evicted_state_names_the_nearest_that_can_be_restored(
    client: TestClient, repo: Repository
) -> None:
    evict(repo.core, repo.state("main~1").uid)
    found = diff(client, old="main~1", new="main")
    (lacking,) = found["lacking"]
    assert lacking["nearest"]["uid"] == repo.state("main~2").uid
    assert set(found["metrics"]) >= {"loss"}
    assert diff(client, old=lacking["nearest"]["uid"], new="main")["tensors"]


def test_stat_reads_manifests_alone(
    client: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = diff(client)
    with monkeypatch.context() as patch:
        for name in ("chunk", "span", "loan", "gather"):
            patch.setattr(MappedReader, name, None)
        found = diff(client, stat=True)
    assert [tensor["path"] for tensor in found["tensors"]] == [
        tensor["path"] for tensor in whole["tensors"]
    ]
    for quick, sure in zip(found["tensors"], whole["tensors"], strict=True):
        assert quick["change"] in ("unread", sure["change"])
        assert quick["distance"] is None


def test_who_has_a_diff_gets_304_and_nothing_is_read(client: TestClient, repo: Repository) -> None:
    query = {"old": "warm", "new": "main"}
    etag = client.get(f"{BASE}/diff", params=query).headers["etag"]
    repo.core.tiers.durable.remove(repo.state("main").uid)
    assert (
        client.get(f"{BASE}/diff", params=query, headers={"If-None-Match": etag}).status_code == 304
    )
    assert (
        client.get(
            f"{BASE}/diff", params={**query, "only": "model"}, headers={"If-None-Match": etag}
        ).status_code
        != 304
    )


def test_a_diff_names_what_it_does_not_find(client: TestClient) -> None:
    assert (
        client.get(f"{BASE}/diff", params={"old": "warm", "new": "mian"}).json()["kind"]
        == "not-found"
    )
    assert client.get(f"{BASE}/diff", params={"old": "warm", "new": "x" * 501}).status_code == 400
    assert client.get(f"{BASE}/diff", params={"old": "warm"}).status_code == 400


def test_more_readers_than_places_are_turned_away(client: TestClient) -> None:
    # of a FastAPI application
    (served,) = client.app.state.served.values()  # type: ignore[attr-defined]
    served.payload_reads = ConcurrencyLimit(1, "busy", wait_s=0.01, retry_s=2)
    with served.payload_reads.one():
        answer = client.get(f"{BASE}/diff", params={"old": "warm", "new": "main"})
        assert (answer.status_code, answer.json()["kind"], answer.headers["retry-after"]) == (
            503,
            "unavailable",
            "2",
        )
        assert (
            client.get(
                f"{BASE}/diff", params={"old": "warm", "new": "main", "tensors": False}
            ).status_code
            == 200
        )
    assert client.get(f"{BASE}/diff", params={"old": "warm", "new": "main"}).status_code == 200


def test_a_diff_ends_when_its_client_hangs_up(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Endless()
    monkeypatch.setattr(routes, "compare", reading)
    reading.hang_up(repo, f"{BASE}/diff?old=warm&new=main")
