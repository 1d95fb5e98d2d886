"""Errors as problems: each kind has its status, and says what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fastapi import APIRouter

from datastates import Repository
from datastates.api.routing import MEDIA_TYPE, STATUSES, Refusal, problem_of
from datastates.errors import Corrupt, DatastatesError, SyntaxProblem, Torn, Unavailable
from datastates.maintenance.retention_pass import evict
from tests.api.conftest import ADMIN, BASE, NAME, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


def kinds(root: type[DatastatesError] = DatastatesError) -> set[str]:
    return {root.kind}.union(*map(kinds, root.__subclasses__()))


def test_every_kind_has_a_status() -> None:
    assert set(STATUSES) == kinds()
    assert STATUSES["ambiguous"] == STATUSES["not-found"]


def test_problem_says_what_its_error_knows() -> None:
    syntax = problem_of(SyntaxProblem("no such thing", text="a ~ b", column=3, expected=("'and'",)))
    assert (syntax.status, syntax.kind, syntax.text, syntax.column, syntax.expected) == (
        400,
        "syntax",
        "a ~ b",
        3,
        ("'and'",),
    )
    gone = problem_of(Unavailable("it is evicted", nearest="f" * 24))
    assert (gone.status, gone.kind, gone.nearest) == (410, "unavailable", "f" * 24)
    assert [
        problem_of(error).status for error in (Unavailable("away"), Corrupt("x"), Torn("x"))
    ] == [503, 500, 500]
    inside = problem_of(KeyError("secret"))
    assert (inside.status, inside.kind) == (500, "error")
    assert "secret" not in inside.detail


def problem(client: TestClient, path: str, **options: Any) -> dict[str, Any]:
    answer = client.request(options.pop("method", "GET"), path, **options)
    said: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert said["status"] == answer.status_code
    assert said["type"] == "about:blank"
    assert None not in said.values(), "what is not known is left out"
    return said


def test_query_that_does_not_parse_is_pointed_into(client: TestClient) -> None:
    said = problem(client, f"{BASE}/states", params={"q": "metrics.loss <"})

    assert (said["status"], said["kind"], said["text"], said["column"]) == (
        400,
        "syntax",
        "metrics.loss <",
        15,
    )
    assert "a number" in said["expected"]


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/states?limit=0", "limit"),
        ("/states?limit=1001", "limit"),
        ("/states?limit=x", "limit"),
        ("/graph?around=main", "around"),
        ("/states/main", "uid"),
        (f"/states/{'A' * 24}", "uid"),
        ("/resolve", "rev"),
        ("/reflog/main?after=0", "after"),
    ],
)
def test_parameter_that_does_not_fit_is_named(
    client: TestClient, path: str, parameter: str
) -> None:
    said = problem(client, f"{BASE}{path}")

    assert (said["status"], said["kind"], said["parameter"]) == (400, "invalid-input", parameter)
    assert repr(parameter) in said["detail"]


def test_what_is_not_there_is_not_found(client: TestClient) -> None:
    for path in (
        "/nowhere",
        "/api/v1/nowhere",
        "/api/v1/repositories/other/refs",
        f"{BASE}/states/{'0' * 24}",
        f"{BASE}/resolve?rev=nobody",
    ):
        said = problem(client, path)
        assert (said["status"], said["kind"]) == (404, "not-found"), path
    assert NAME in problem(client, "/api/v1/repositories/other/refs")["detail"], (
        "those that are there are named"
    )


def test_method_that_a_path_does_not_know_is_told_which_it_knows(
    repo: Repository, serve: Serve
) -> None:
    client = serve({NAME: repo}, token=ADMIN, tokens=TOKENS)
    answer = client.post(f"{BASE}/refs/main", json={})

    assert (answer.status_code, answer.json()["kind"]) == (405, "unsupported")
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"kind": "tag"}', b"[" * 30_000]
)
def test_body_that_is_none_is_refused(repo: Repository, serve: Serve, body: bytes) -> None:
    client = serve({NAME: repo}, token=WRITE, tokens=TOKENS)
    said = problem(
        client,
        f"{BASE}/refs/x",
        method="PUT",
        content=body,
        headers={"Content-Type": "application/json"},
    )

    assert (said["status"], said["kind"]) == (400, "invalid-input")


def test_bytes_that_are_gone_name_the_nearest_that_are_not(
    client: TestClient, repo: Repository
) -> None:
    gone = repo.state("main~1")
    evict(repo.core, gone.uid)
    said = problem(client, f"{BASE}/states/{gone.uid}/payload")

    assert (said["status"], said["kind"], said["nearest"]) == (
        410,
        "unavailable",
        repo.state("main~2").uid,
    )


def test_refusal_keeps_its_status_and_headers(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo})
    router = APIRouter()

    @router.get("/teapot")
    def teapot() -> None:
        raise Refusal(418, "unsupported", "no coffee", {"Retry-After": "7"})

    client.app.include_router(router)  # type: ignore[attr-defined]  # the application
    answer = client.get("/teapot")
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["title"]) == (
        418,
        "7",
        "I'm a Teapot",
    )


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (f"{BASE}/refs/main", {"GET", "HEAD", "PUT", "PATCH", "DELETE"}),
        (f"{BASE}/refs", {"GET", "HEAD"}),
        (f"{BASE}/events", {"GET"}),
        (f"{BASE}/states/{'0' * 24}/payload", {"GET", "HEAD", "DELETE"}),
        ("/healthz", {"GET", "HEAD"}),
        ("/metrics", {"GET", "HEAD"}),
        ("/assets/index-1234.js", {"GET", "HEAD"}),
    ],
)
def test_wrong_method_is_told_all_right_ones(
    repo: Repository, serve: Serve, path: str, allowed: set[str]
) -> None:
    client = serve({NAME: repo}, token=ADMIN, tokens=TOKENS)
    for method in ("POST", "TRACE", "OPTIONS"):
        answer = client.request(method, path)
        assert answer.status_code == 405, answer.text
        assert set(answer.headers["allow"].split(", ")) == allowed


def test_head_is_answered_where_get_is(client: TestClient) -> None:
    for path in ("/healthz", "/metrics", f"{BASE}/refs", f"{BASE}/resolve?rev=main"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert client.head(f"{BASE}/events").status_code == 405


def test_empty_revision_is_refused(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo}, token=WRITE, tokens=TOKENS)
    for path in ("/resolve?rev=", "/graph?head=", "/series?head=&key=loss", "/diff?old=&new=main"):
        assert problem(client, f"{BASE}{path}")["status"] == 400, path
    assert (
        problem(client, f"{BASE}/refs/x", method="PUT", json={"kind": "tag", "rev": ""})["status"]
        == 400
    )
