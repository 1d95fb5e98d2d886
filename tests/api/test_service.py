"""The server itself: what it serves, that it lives, what it counts, and the page's files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

import datastates
from datastates import Repository
from datastates.api import app as page
from datastates.api.security import Gatekeeper, Hosts, Origins, Shield, Tokens
from tests.api.conftest import BASE, NAME, READ, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAMPLE = re.compile(r'[a-z_]+(\{([a-z]+="[^"\n]*",?)*\})? -?[0-9.e+-]+')


def metrics(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(_SAMPLE.fullmatch(line) for line in samples)
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in samples}


def test_health_is_a_word(client: TestClient) -> None:
    answer = client.get("/healthz")

    assert (answer.status_code, answer.text) == (200, "ok\n")


def test_the_first_answer_of_an_application_waits_for_no_route_to_be_made(
    repo: Repository, serve: Serve
) -> None:
    first, second = serve({NAME: repo}), serve({NAME: repo})
    # FastAPI's
    made = [
        {id(route) for route in client.app.routes if isinstance(route, APIRoute)}  # type: ignore[attr-defined]
        for client in (first, second)
    ]
    first.get("/healthz")

    assert len(made[0]) > 50
    assert made[0] == made[1]
    # FastAPI's
    assert made[0] == {id(route) for route in first.app.routes if isinstance(route, APIRoute)}  # type: ignore[attr-defined]


def test_repositories_are_listed_with_what_the_asker_may(
    repo: Repository, serve: Serve, tmp_path: Path
) -> None:
    with datastates.open(tmp_path / "second") as second:
        client = serve({"b": repo, "a": second}, token=WRITE, tokens=TOKENS)
        items = client.get("/api/v1/repositories").json()["items"]

        assert [(item["name"], item["scope"]) for item in items] == [("a", "write"), ("b", "write")]
        assert len({item["uid"] for item in items}) == 2
        assert client.get("/api/v1/repositories/a/refs").json()["items"] == []
        assert len(client.get("/api/v1/repositories/b/refs").json()["items"]) == 6


def test_a_training_in_the_same_process_is_counted_by_repository(
    repo: Repository, serve: Serve
) -> None:
    client = serve({"ours": repo})
    assert not any(name.startswith("datastates_captures_total") for name in metrics(client)), (
        "nothing was captured here"
    )
    with repo.track(branch="watched", weight=torch.ones(8)) as run:
        for _ in range(2):
            run.capture().wait("durable")
        repo.core.runner().drain()
        found, done = metrics(client), repo.stats().activity

    labels = 'repository="ours"'
    assert (
        found[f"datastates_captures_total{{{labels}}}"]
        == found[f"datastates_states_written_total{{{labels}}}"]
        == 2
    )
    assert found[f"datastates_bytes_copied_total{{{labels}}}"] == done.bytes_copied > 0
    stage = f'{labels},stage="write"'
    assert (
        found[f'datastates_stage_seconds_bucket{{{stage},le="+Inf"}}']
        == found[f"datastates_stage_seconds_count{{{stage}}}"]
        == 2
    )
    assert found[f"datastates_stage_seconds_sum{{{stage}}}"] == done.timing("write").total_s


def test_requests_are_counted_by_route_and_status(repo: Repository, serve: Serve) -> None:
    client = serve({NAME: repo}, token=READ, tokens=TOKENS)
    for _ in range(3):
        client.get(f"{BASE}/refs/main")
    client.get(f"{BASE}/refs/nobody")
    client.get(f"{BASE}/refs", headers={"Authorization": "Bearer wrong"})
    client.get("/made/up/by/a/client")
    client.request("MADEUP", "/")
    found = metrics(client)

    route = 'route="/repositories/{repository}/refs/{name:path}"'
    assert found[f'datastates_http_requests_total{{{route},method="GET",status="200"}}'] == 3
    assert found[f'datastates_http_requests_total{{{route},method="GET",status="404"}}'] == 1
    assert found['datastates_http_requests_total{route="unknown",method="GET",status="401"}'] == 1
    assert found[f'datastates_http_first_byte_seconds_bucket{{{route},le="+Inf"}}'] == 4
    assert found[f"datastates_http_first_byte_seconds_count{{{route}}}"] == 4
    buckets = [
        value
        for name, value in found.items()
        if name.startswith(f"datastates_http_first_byte_seconds_bucket{{{route}")
    ]
    assert buckets == sorted(buckets)
    assert not any("made" in name.lower() for name in found), "what clients make up is no label"
    assert found["datastates_http_requests_under_way"] == 1
    assert found["datastates_http_bytes_sent_total"] > 500
    assert found[f'datastates_states{{repository="{NAME}"}}'] == len(repo.find("step >= 0"))
    assert found[f'datastates_event_stream_clients{{repository="{NAME}"}}'] == 0


def test_head_is_answered_like_get_without_a_body(client: TestClient) -> None:
    for path in (f"{BASE}/refs", f"{BASE}/stats", "/api/v1/repositories"):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.headers.get("etag")) == (200, got.headers.get("etag"))


@pytest.fixture
def bundled(tmp_path: Path) -> Iterator[TestClient]:
    """A page that was built, alone."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html><title>page</title>")
    (tmp_path / "icon.svg").write_text("<svg/>")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "assets" / "index-1234.js").write_text("export {}")
    app = FastAPI()
    page.install(app, tmp_path)
    app.add_middleware(
        Gatekeeper,
        tokens=Tokens(TOKENS),
        hosts=(hosts := Hosts(["testserver"])),
        origins=Origins(hosts),
    )
    app.add_middleware(Shield)
    with TestClient(app) as client:
        yield client


def test_page_is_looked_for_anew_and_its_assets_are_kept(bundled: TestClient) -> None:
    index, asset = bundled.get("/"), bundled.get("/assets/index-1234.js")

    assert "<title>page" in index.text
    assert index.headers["cache-control"] == "no-cache"
    assert "script-src 'self'" in index.headers["content-security-policy"]
    assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert "javascript" in asset.headers["content-type"]
    assert bundled.get("/icon.svg").headers["content-type"] == "image/svg+xml"
    assert bundled.get("/", headers={"If-None-Match": index.headers["etag"]}).status_code in (
        200,
        304,
    )


def test_nothing_but_the_page_is_served_of_its_folder(bundled: TestClient) -> None:
    assert bundled.get("/secret.txt").status_code == 401
    assert (
        bundled.get("/secret.txt", headers={"Authorization": f"Bearer {READ}"}).status_code == 404
    )
    assert bundled.get("/assets/../secret.txt").status_code == 401
    assert bundled.get("/assets/%2e%2e/secret.txt").status_code == 404
    assert bundled.get("/favicon.ico").status_code == 404


def test_page_that_is_not_built_says_how(tmp_path: Path) -> None:
    app = FastAPI()
    page.install(app, tmp_path / "nowhere")
    with TestClient(app) as client:
        assert "make ui" in client.get("/").text
        assert client.get("/assets/x.js").status_code == 404
