"""The files of a state over HTTP: listed, sent to be saved, and never run or shown as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import torch

from datastates.maintenance.retention_pass import evict
from tests.api.conftest import BASE, NAME, READ, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from datastates import Repository

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
HOSTILE = {
    "page.html": b"<script>alert(1)</script>",
    "picture.svg": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
    "lie.png": b"<html><script>alert(1)</script></html>",
    "script.js": b"alert(1)",
    "ü (1), =@+.txt": b"text",
}
SHOWN = {"it.png": PNG, "it.gif": b"GIF89a" + bytes(9), "no suffix": b"\xff\xd8\xff" + bytes(9)}


@pytest.fixture
def uid(repo: Repository) -> str:
    with repo.track(branch="filed", rng=False, w=torch.zeros(9)) as run:
        return run.capture(files=HOSTILE | SHOWN).wait("durable").uid


def path_of(uid: str, name: str = "") -> str:
    return f"{BASE}/states/{uid}/files{name and '/' + quote(name, safe='')}"


def test_files_are_listed_with_a_type_by_their_content(client: TestClient, uid: str) -> None:
    answer = client.get(path_of(uid))
    found = {one["name"]: (one["bytes"], one["type"]) for one in answer.json()["items"]}
    assert found == {
        **{name: (len(said), "application/octet-stream") for name, said in HOSTILE.items()},
        "it.png": (len(PNG), "image/png"),
        "it.gif": (15, "image/gif"),
        "no suffix": (12, "image/jpeg"),
    }
    again = client.get(path_of(uid), headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = client.get(f"{BASE}/resolve?rev=main").json()["uid"]
    assert client.get(path_of(plain)).json() == {"items": [], "next": None}


@pytest.mark.parametrize("name", [*HOSTILE, *SHOWN])
def test_a_browser_saves_a_file_and_runs_nothing_of_it(
    client: TestClient, uid: str, name: str
) -> None:
    answer = client.get(path_of(uid, name))
    assert answer.content == (HOSTILE | SHOWN)[name]
    said = answer.headers
    assert said["content-type"].startswith("image/") == (name in SHOWN)
    assert name in SHOWN or said["content-type"] == "application/octet-stream"
    assert said["content-disposition"] == f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    assert said["x-content-type-options"] == "nosniff"
    assert said["content-security-policy"] == "default-src 'none'; sandbox"
    again = client.get(path_of(uid, name), headers={"If-None-Match": said["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    "name", ["nowhere", "../payload", "/etc/passwd", "it.png\0", "w", "%2e%2e", "files/it.png"]
)
def test_no_name_leads_anywhere_else(client: TestClient, uid: str, name: str) -> None:
    answer = client.get(path_of(uid, name))
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text


def test_the_files_of_a_state_without_bytes_are_gone(
    repo: Repository, client: TestClient, uid: str
) -> None:
    with repo.track(branch="filed", rng=False, w=torch.zeros(9)) as run:
        run.capture().wait("durable")
    evict(repo.core, uid)
    for name in ("", "it.png"):
        answer = client.get(path_of(uid, name))
        assert answer.status_code == 410
        assert answer.json()["nearest"] == repo.state("filed").uid


def test_files_need_a_token_that_reads(repo: Repository, serve: Serve, uid: str) -> None:
    for token, status in ((None, 401), (READ, 200)):
        client = serve({NAME: repo}, tokens=TOKENS, token=token)
        assert client.get(path_of(uid, "it.png")).status_code == status


def test_a_forged_file_is_a_problem_without_its_content(
    repo: Repository, client: TestClient
) -> None:
    with repo.track(branch="forged", rng=False, w=torch.zeros(9)) as run:
        run.values["captured_files"] = {"../it": "<script>"}
        forged = run.capture().wait("durable").uid
    answer = client.get(path_of(forged))
    assert (answer.status_code, answer.json()["kind"]) == (500, "corrupt")
    assert "script" not in answer.text


# What else the page asks of a state and of the repository


def test_an_evicted_state_names_the_nearest_one_that_can_be_restored(
    repo: Repository, client: TestClient
) -> None:
    path = repo.log("main")  # the newest first
    for state in path[1:5]:
        evict(repo.core, state.uid, is_forced=True)

    def nearest(place: int) -> Any:
        said = client.get(f"{BASE}/states/{path[place].uid}").json()["nearest"]
        return said and said["uid"]

    assert [nearest(place) for place in (0, 1, 4)] == [None, path[0].uid, path[5].uid]


def test_only_who_may_write_is_told_where_a_repository_is(repo: Repository, serve: Serve) -> None:
    def told(**options: Any) -> list[str | None]:
        (said,) = serve({NAME: repo}, **options).get("/api/v1/repositories").json()["items"]
        return [said["location"], said["packs"]]

    there = [str(repo.location.root), None]
    assert told(tokens=TOKENS, token=READ) == [None, None]
    assert told(tokens=TOKENS, token=WRITE) == there
    assert told() == there, "without tokens, the server listens to its own machine alone"
