"""Runs over the web."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates import Repository
from tests.api.conftest import BASE

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def test_runs_come_a_page_at_a_time_the_newest_first(client: TestClient, repo: Repository) -> None:
    whole = client.get(f"{BASE}/runs").json()
    first = client.get(f"{BASE}/runs", params={"limit": 2}).json()
    second = client.get(f"{BASE}/runs", params={"limit": 2, "after": first["next"]}).json()

    assert (len(whole["items"]), whole["next"], second["next"]) == (3, None, None)
    assert first["items"] + second["items"] == whole["items"]
    assert whole["items"][0]["uid"] == repo.state("lone").run
    assert whole["items"][-1]["uid"] == repo.state("main").run


def test_a_page_of_all_runs_is_the_last(client: TestClient) -> None:
    assert client.get(f"{BASE}/runs", params={"limit": 3}).json()["next"] is None


def test_one_run(client: TestClient, repo: Repository) -> None:
    uid = repo.state("main").run
    answer = client.get(f"{BASE}/runs/{uid}")
    assert answer.json()["uid"] == uid
    assert answer.json() in client.get(f"{BASE}/runs").json()["items"]
    assert (
        client.get(
            f"{BASE}/runs/{uid}", headers={"If-None-Match": answer.headers["etag"]}
        ).status_code
        == 304
    )


def test_fields_are_chosen(client: TestClient) -> None:
    item, *_ = client.get(f"{BASE}/runs", params={"fields": "uid,host"}).json()["items"]
    assert set(item) == {"uid", "host"}


def test_unknown_runs_are_not_found(client: TestClient) -> None:
    assert client.get(f"{BASE}/runs/{'0' * 24}").json()["kind"] == "not-found"
    assert client.get(f"{BASE}/runs", params={"after": "0" * 24}).json()["kind"] == "not-found"
    assert client.get(f"{BASE}/runs/..%2f..").status_code in (400, 404)
    assert client.get(f"{BASE}/runs", params={"limit": 0}).status_code == 400
