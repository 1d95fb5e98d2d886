"""Who may do what: every route is tried, and every way around the guard that is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Mount

import datastates
from datastates import Repository
from datastates.api import served
from datastates.api.app import create_app
from datastates.api.routing import Scope
from datastates.api.security import BODY_BYTES, OPEN, QUERY_BYTES, Hosts, Tokens
from datastates.errors import Corrupt, DatastatesError, InvalidInput, Unavailable
from tests.api.conftest import ADMIN, BASE, NAME, READ, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

UID = "0" * 24
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
FILLED = {
    "{repository}": NAME,
    "{uid}": UID,
    "{name:path}": "main",
    "{name}": "main",
    "{report}": "1",
    "{index}": "0",
}


def walk(routes: Any) -> Iterator[tuple[str, str]]:
    """Method and path of every route, those of mounts too."""
    for route in routes:
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/index-1234.js"
        else:
            for method in route.methods or ("GET",):
                yield method, route.path


def every_route() -> list[tuple[str, str]]:
    found = set()
    for method, path in walk(create_app({}).routes):
        for name, value in FILLED.items():
            path = path.replace(name, value)
        assert "{" not in path, path
        found.add((method, path))
    return sorted(found)


ROUTES = every_route()
OPENED = {
    ("GET", "/healthz"),
    ("GET", "/assets/index-1234.js"),
    *((method, path) for method in ("GET", "HEAD") for path in OPEN),
}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(repo: Repository, serve: Serve) -> TestClient:
    return serve({NAME: repo}, tokens=TOKENS)


def test_walk_finds_the_routes() -> None:
    assert len(ROUTES) > 30
    for known in (
        ("GET", f"{BASE}/events"),
        ("GET", f"{BASE}/states/{UID}/payload"),
        ("DELETE", f"{BASE}/refs/main"),
        ("GET", "/metrics"),
    ):
        assert known in ROUTES
    assert ("GET", "/api/v1/openapi.json") in ROUTES


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_route_refuses_who_has_no_token_or_a_wrong_one(
    guarded: TestClient, method: str, path: str
) -> None:
    for headers in (
        {},
        bearer("wrong"),
        bearer(""),
        {"Authorization": f"Basic {READ}"},
        {"Authorization": READ},
        bearer(READ + "x"),
    ):
        answer = guarded.request(method, path, headers=headers)
        if (method, path) in OPENED:
            assert answer.status_code in (200, 404)
            continue
        assert answer.status_code == 401, (method, path, headers)
        assert answer.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert answer.json()["kind"] == "unauthorized"


@pytest.mark.parametrize(
    ("method", "path"), [each for each in ROUTES if each[0] not in ("GET", "HEAD")]
)
def test_write_is_refused_without_a_token_always_and_with_one_that_reads(
    guarded: TestClient, client: TestClient, method: str, path: str
) -> None:
    assert client.request(method, path, json={}).status_code == 401, "no token is configured"
    assert client.request(method, path, json={}, headers=bearer(ADMIN)).status_code == 401
    assert guarded.request(method, path, json={}, headers=bearer(READ)).status_code == 403


def test_only_what_the_list_says_is_open() -> None:
    assert set(OPEN) == {"/", "/healthz", "/icon.svg", "/favicon.ico", "/favicon.svg"}
    assert {each for each in ROUTES if each in OPENED and each[1].startswith("/api")} == set()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/api/v1/nowhere",
        "/api",
        "/assets",
        "/%61pi/v1/repositories",
        "/healthz/",
        "/metrics/",
    ],
)
def test_what_is_not_there_is_not_told_to_strangers(
    guarded: TestClient, method: str, path: str
) -> None:
    assert guarded.request(method, path).status_code == 401


def test_eviction_needs_more_than_writing(guarded: TestClient) -> None:
    assert guarded.delete(f"{BASE}/states/{UID}/payload", headers=bearer(WRITE)).status_code == 403
    assert guarded.delete(f"{BASE}/states/{UID}/payload", headers=bearer(ADMIN)).status_code == 404


def test_token_in_the_address_counts_for_nothing(guarded: TestClient) -> None:
    for name in ("token", "access_token", "authorization"):
        assert guarded.get(f"{BASE}/refs", params={name: READ}).status_code == 401
    assert guarded.get(f"{BASE}/refs", headers={"Cookie": f"token={READ}"}).status_code == 401


def test_token_opens_what_it_is_for(guarded: TestClient) -> None:
    for token, scope in TOKENS.items():
        (info,) = guarded.get("/api/v1/repositories", headers=bearer(token)).json()["items"]
        assert info["scope"] == scope.name.lower()
    assert (
        guarded.get("/api/v1/repositories", headers={"Authorization": f"bearer {READ}"}).status_code
        == 200
    )


def test_tokens_are_known_by_their_whole() -> None:
    tokens = Tokens({READ: Scope.READ, ADMIN: Scope.ADMIN})

    assert [
        tokens.scope_of(token.encode()) for token in (READ, ADMIN, READ[:-1], READ + " ", "")
    ] == [1, 3, 0, 0, 0]
    assert not Tokens({})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1",
        "[::2]",
        "127.0.0.1:8701@evil",
        "localhost@evil",
        "127.0.0.1:x",
        "[::1]evil",
    ],
)
def test_name_that_was_pointed_here_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/healthz", f"{BASE}/refs"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 421
        assert "--allowed-host" in answer.json()["detail"]


def test_server_goes_by_the_names_it_was_given(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo}, allowed_hosts=["Lab.example", "10.0.0.1"])

    for host in (
        "lab.example",
        "LAB.example:80",
        "lab.example.",
        "10.0.0.1:8642",
        "localhost:1",
        "[::1]:8642",
        "127.0.0.1",
    ):
        assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
    assert client.get("/healthz", headers={"Host": "other.example"}).status_code == 421
    everywhere = Hosts(["0.0.0.0"])
    assert [everywhere.allow(host) for host in ("10.1.2.3:80", "[fe80::1]:80", "evil.example")] == [
        True,
        True,
        False,
    ]


def test_too_much_is_refused_before_it_is_read(guarded: TestClient) -> None:
    headers = bearer(WRITE)
    large = b" " * (BODY_BYTES + 1)

    def pieces() -> Iterator[bytes]:
        yield large[: BODY_BYTES // 2]
        yield large

    assert guarded.put(f"{BASE}/refs/x", content=large, headers=headers).status_code == 413
    assert guarded.put(f"{BASE}/refs/x", content=pieces(), headers=headers).status_code == 413
    assert guarded.get(f"{BASE}/states?q={'x' * QUERY_BYTES}", headers=headers).status_code == 414
    assert guarded.get(f"/{'x' * 5000}", headers=headers).status_code == 414


def test_deep_queries_are_refused_at_once(client: TestClient) -> None:
    deep = [
        "(" * 9_000,
        "(" * 4_000 + "step > 1" + ")" * 4_000,
        "not " * 2_000 + "step > 1",
        " or ".join(["(step > 1 and (step > 2"] * 300),
        "(step = 1 or not " * 500 + "step = 1" + ")" * 500,
        " and ".join(["step > 1"] * 600),
        "step in (" + ",".join(["1"] * 4_000) + ")",
    ]
    began = time.monotonic()
    for query in deep:
        answer = client.get(f"{BASE}/states", params={"q": query})
        assert answer.status_code in (200, 400), query[:40]
        assert answer.status_code == 200 or answer.json()["kind"] in ("syntax", "invalid-input")
    for rev in ("main" + "~1" * 200, "main" + "^" * 400, "main@best:loss" * 30, "(" * 400):
        assert client.get(f"{BASE}/resolve", params={"rev": rev}).status_code == 400
    assert (
        client.get(
            f"{BASE}/states", params={"q": "ancestor_of(main" + "~0" * 4_000 + ")"}
        ).status_code
        == 400
    )
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/%2e%2e/pyproject.toml",
        "/assets//etc/passwd",
        "/assets/%00",
        "/../etc/passwd",
    ],
)
def test_no_path_leads_out_of_the_page(client: TestClient, path: str) -> None:
    answer = client.get(path)

    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text


def test_every_answer_has_the_headers_that_browsers_need(guarded: TestClient) -> None:
    for path in ("/", "/healthz", "/nowhere", f"{BASE}/refs", f"{BASE}/refs/main"):
        for headers in ({}, bearer(READ), {"Host": "evil.example"}):
            sent = guarded.get(path, headers=headers).headers
            assert sent["x-content-type-options"] == "nosniff"
            assert sent["referrer-policy"] == "no-referrer"
            assert "frame-ancestors 'none'" in sent["content-security-policy"]
            assert "unsafe" not in sent["content-security-policy"]
            assert "access-control-allow-origin" not in sent
    assert "script-src 'self'" in guarded.get("/").headers["content-security-policy"]
    assert (
        "script-src"
        not in guarded.get(f"{BASE}/refs", headers=bearer(READ)).headers["content-security-policy"]
    )


def test_answers_are_kept_only_to_be_compared(guarded: TestClient) -> None:
    assert (
        guarded.get(f"{BASE}/refs", headers=bearer(READ)).headers["cache-control"]
        == "private, no-cache"
    )
    assert (
        guarded.get("/api/v1/repositories", headers=bearer(READ)).headers["cache-control"]
        == "no-store"
    )
    assert guarded.get(f"{BASE}/refs").headers["cache-control"] == "no-store"


def test_other_origins_are_answered_only_when_they_were_named(
    repo: Repository, serve: Serve
) -> None:
    origin, other = "https://lab.example", "https://evil.example"
    client = serve({NAME: repo}, tokens=TOKENS, cors=[origin])
    asking = {
        "Access-Control-Request-Method": "PATCH",
        "Access-Control-Request-Headers": "authorization,if-match",
    }

    assert (
        client.options(f"{BASE}/refs/main", headers={"Origin": origin, **asking}).headers[
            "access-control-allow-origin"
        ]
        == origin
    )
    assert (
        client.options(f"{BASE}/refs/main", headers={"Origin": other, **asking}).status_code == 400
    )
    assert (
        client.get(f"{BASE}/refs", headers={"Origin": origin}).headers[
            "access-control-allow-origin"
        ]
        == origin
    ), "of a 401 too"
    assert (
        "access-control-allow-origin"
        not in client.get(f"{BASE}/refs", headers={"Origin": other, **bearer(READ)}).headers
    )


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "anything"])
def test_page_of_another_site_costs_nothing(client: TestClient, site: str) -> None:
    for headers in (
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
    ):
        answer = client.get(f"{BASE}/refs", headers={"Sec-Fetch-Site": site, **headers})
        assert (answer.status_code, answer.json()["kind"]) == (403, "unauthorized")
        assert "--cors" in answer.json()["detail"]
    assert client.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200, (
        "a link to the page may be followed"
    )


def test_own_page_and_programs_may_ask(client: TestClient) -> None:
    for headers in (
        {},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://127.0.0.1:8642"},
    ):
        assert client.get(f"{BASE}/refs", headers=headers).status_code == 200
    for origin in ("https://evil.example", "null", ""):
        assert client.get(f"{BASE}/refs", headers={"Origin": origin}).status_code == 403, (
            "a browser that says no more than that"
        )


def test_named_origin_may_ask_from_its_site(repo: Repository, serve: Serve) -> None:
    origin = "https://lab.example"
    for cors in ([origin], ["*"]):
        client = serve({NAME: repo}, tokens=TOKENS, cors=cors)
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site", **bearer(READ)}
        assert client.get(f"{BASE}/refs", headers=headers).status_code == 200
        assert (
            client.get(
                f"{BASE}/refs", headers={"Sec-Fetch-Site": "cross-site", **bearer(READ)}
            ).status_code
            == 403
        )


def test_every_page_of_the_web_may_not_read_what_needs_no_token(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="name the origins"):
        create_app({NAME: repo}, cors=["*"])
    with pytest.raises(InvalidInput, match="name the origins"):
        create_app({NAME: repo}, cors=["https://lab.example", "*"])


@pytest.mark.parametrize(
    "token", ["short", "größer als sechzehn", "with a space in between", "x" * 20 + "\n", ""]
)
def test_token_that_could_never_be_shown_is_refused_unseen(repo: Repository, token: str) -> None:
    with pytest.raises(InvalidInput, match="token 1") as refused:
        create_app({NAME: repo}, tokens={token: Scope.READ})
    assert not token or token not in str(refused.value)
    if len(token) >= 16:
        with pytest.raises(InvalidInput, match="header"):
            repo.serve("http://127.0.0.1:0", token=token)


def test_question_that_takes_too_long_is_given_up(
    repo: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve({NAME: repo})
    monkeypatch.setattr(served, "ANSWER_S", 0.0)
    for path in (
        "/states",
        "/graph",
        "/resolve?rev=main",
        "/series?head=main&key=loss",
        "/refs",
        "/runs",
        "/diff?old=main~1&new=main",
    ):
        answer = client.get(f"{BASE}{path}")
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid-input"), path
        assert "ask for less" in answer.json()["detail"]


def test_work_of_one_request_is_bounded(client: TestClient) -> None:
    """As many heads as may be, each with as many searches of its history."""
    chain = "@best:loss" * 4 + "~0" * 16
    heads = [f"main{chain[: len(chain) - 2 * n]}" for n in range(16)]
    assert client.get(f"{BASE}/graph", params={"head": heads * 4}).status_code == 200
    assert client.get(f"{BASE}/graph", params={"head": [*heads * 4, "main"]}).status_code == 400
    assert (
        client.get(f"{BASE}/graph", params={"head": ["main" + "@best:loss" * 5]}).status_code == 400
    )


def test_prefix_is_understood_with_and_without_it(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo}, tokens=TOKENS, prefix="/lineage")

    for path in (f"/lineage{BASE}/refs", f"{BASE}/refs"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=bearer(READ)).status_code == 200
    assert client.get("/lineage/healthz").status_code == 200
    assert client.get("/lineage/").status_code == 200
    moved = client.get("/lineage", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (308, "/lineage/")
    assert client.get("/lineages/api/v1/repositories").status_code == 401
    assert client.get("/lineage/lineage/healthz").status_code == 401


def test_error_tells_nothing_of_the_inside(
    repo: Repository,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = serve({NAME: repo})
    # the application
    monkeypatch.setattr(type(client.app.state.served[NAME]), "reading", lambda self: 1 / 0)  # type: ignore[attr-defined]
    answer = client.get(f"{BASE}/refs")

    assert (answer.status_code, answer.json()["kind"]) == (500, "error")
    assert "division" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_error_of_ours_names_no_place_on_the_disk(
    repo: Repository,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = serve({NAME: repo})
    root, packs = str(repo.location.root), str(repo.location.packs)
    secret = f"{repo.location.database_url} (postgresql://me:hunter22@db/x)"
    for error, status in (
        (Corrupt(f"{packs}/x.safetensors: chunk 3 at 4096", nearest=UID), 500),
        (DatastatesError(f"{root}/lineage.db: near SELECT"), 500),
        (OverflowError(f"{packs}: too large [SQL: SELECT]"), 500),
        (Unavailable(f"{root}/lineage.db was locked; {secret}"), 503),
        (InvalidInput(f"{root}/lineage.db cannot hold a value"), 400),
    ):
        # the application
        monkeypatch.setattr(type(client.app.state.served[NAME]), "reading", _raising(error))  # type: ignore[attr-defined]
        answer = client.get(f"{BASE}/refs")
        assert answer.status_code == status
        assert not [
            said for said in (root, packs, "SELECT", "hunter22", "4096") if said in answer.text
        ], answer.text
    assert client.get(f"{BASE}/refs").json().get("nearest") is None
    assert packs in caplog.text, "the log says where"
    assert "hunter22" not in caplog.text


def _raising(error: Exception) -> Any:
    def reading(self: object) -> Any:
        raise error

    return reading


def test_closed_repository_is_unavailable(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo})
    repo.close()

    assert client.get(f"{BASE}/refs").status_code == 503
    assert client.get("/healthz").text == "ok\n"
    assert datastates.errors.Closed.kind == client.get(f"{BASE}/refs").json()["kind"]
