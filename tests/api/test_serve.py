"""The server in a process that does something else: where it listens, who it believes, how it
ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

import datastates
from datastates import Repository
from datastates.api import Scope, WebServer, serve_in_thread
from datastates.api.security import read_tokens
from datastates.api.serve import name_of
from datastates.errors import InvalidInput, Unavailable, Unsupported
from datastates.system.files import make_token
from tests.api.conftest import READ, TOKENS
from tests.support.secrets_kept import keep

LONG = "0123456789abcdef"


def test_server_is_a_context_and_its_url_says_where(repo: Repository) -> None:
    with serve_in_thread(repo) as server:
        assert httpx.get(f"{server.url}/healthz").text == "ok\n"
        (info,) = httpx.get(f"{server.url}/api/v1/repositories").json()["items"]
        assert info["name"] == "runs"
        assert server.url in repr(server)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
    server.close()
    assert repo.state("main").step == 8, "the repository stays open"


def test_several_servers_share_a_repository(repo: Repository) -> None:
    with serve_in_thread(repo) as one, serve_in_thread({"again": repo}, tokens=TOKENS) as other:
        assert one.url != other.url
        assert httpx.get(f"{other.url}/api/v1/repositories").status_code == 401
        assert (
            httpx.get(
                f"{other.url}/api/v1/repositories", headers={"Authorization": f"Bearer {READ}"}
            ).json()["items"][0]["name"]
            == "again"
        )
        assert other.stats().refused == 1
        assert one.stats().refused == 0


def test_address_with_brackets_is_one(repo: Repository) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        server = serve_in_thread(repo, "http://[::1]:0")
    except Unavailable:
        pytest.skip("this machine has no address ::1")
    with server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/healthz").status_code == 200


@pytest.mark.parametrize(
    "url", ["http://0.0.0.0:0", "http://[::]:0", "http://192.0.2.7:0", "http://lab.example:0"]
)
def test_other_machines_need_a_token(repo: Repository, url: str) -> None:
    with pytest.raises(InvalidInput, match="token"):
        WebServer({"repo": repo}, url)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://127.0.0.1",
        "http://127.0.0.1:x",
        "http://127.0.0.1:0/a",
        "http://u@127.0.0.1:0",
        "127.0.0.1:1",
    ],
)
def test_what_is_no_address_is_refused(repo: Repository, url: str) -> None:
    with pytest.raises(InvalidInput, match="http://HOST:PORT"):
        WebServer({"repo": repo}, url)


def test_port_that_is_taken_is_unavailable(repo: Repository) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"{port} is taken.*another port"):
            WebServer({"repo": repo}, f"http://127.0.0.1:{port}")


def test_request_that_is_no_http_gets_an_answer_and_no_more(repo: Repository) -> None:
    with serve_in_thread(repo) as server:
        port = int(server.url.rpartition(":")[2])
        for sent in (
            b"\x16\x03\x01garbage\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.0\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(sent)
                assert connection.recv(64).split()[1] in (b"400", b"421")
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_answers_name_no_software(repo: Repository) -> None:
    with serve_in_thread(repo) as server:
        assert "server" not in httpx.get(f"{server.url}/healthz").headers


def test_repository_closes_its_servers(built: Path) -> None:
    with datastates.open(built) as repo:
        server = repo.serve("http://127.0.0.1:0")
        assert httpx.get(f"{server.url}/healthz").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")


def test_one_token_reads_or_writes_too(repo: Repository) -> None:
    for is_writable, status in ((False, 403), (True, 201)):
        with repo.serve("http://127.0.0.1:0", token=LONG, is_writable=is_writable) as server:
            url, headers = (
                f"{server.url}/api/v1/repositories/runs/refs/mine",
                {"Authorization": f"Bearer {LONG}"},
            )
            assert (
                httpx.put(url, json={"kind": "tag", "rev": "main"}, headers=headers).status_code
                == status
            )
            assert httpx.get(f"{server.url}/api/v1/repositories").status_code == 401


def test_tls_is_a_proxys(repo: Repository, tmp_path: Path) -> None:
    from datastates.transport.contract import Tls

    with pytest.raises(Unsupported, match="proxy"):
        repo.serve("http://127.0.0.1:0", tls=Tls(certificate=tmp_path / "cert"))


def test_repository_is_called_by_its_folder(tmp_path: Path) -> None:
    for folder, name in (
        ("runs", "runs"),
        ("my runs!", "my-runs"),
        (".hidden", "hidden"),
        ("größe", "gr-e"),
        ("---", "repository"),
    ):
        with datastates.open(tmp_path / folder) as repo:
            assert name_of(repo) == name


def test_tokens_are_read_from_a_file(tmp_path: Path) -> None:
    keep(tmp_path / "tokens", f"# a comment\n\n  read  {LONG}1\nWRITE {LONG}2\nadmin {LONG}3\n")

    assert read_tokens(tmp_path / "tokens") == {
        f"{LONG}1": Scope.READ,
        f"{LONG}2": Scope.WRITE,
        f"{LONG}3": Scope.ADMIN,
    }
    assert read_tokens(environ={"DATASTATES_WEB_TOKENS": f"write:{LONG}1 read:{LONG}2"}) == {
        f"{LONG}1": Scope.WRITE,
        f"{LONG}2": Scope.READ,
    }
    assert read_tokens(environ={}) == {}
    assert len({make_token() for _ in range(10)}) == 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "read\n",
        "read short\n",
        f"all {LONG}\n",
        f"{LONG}\n",
        f"read {LONG} {LONG}\n",
        f"read {LONG}ü\n",
    ],
)
def test_tokens_that_are_none_are_refused_unseen(tmp_path: Path, text: str) -> None:
    keep(tmp_path / "tokens", text)
    with pytest.raises(InvalidInput) as refused:
        read_tokens(tmp_path / "tokens")
    assert LONG not in str(refused.value)
    assert "short" not in str(refused.value)


def test_web_is_not_imported_until_it_is_asked_for() -> None:
    code = (
        "import sys, datastates, datastates.api; print([name for name in ('fastapi', 'uvicorn',"
        " 'httpx') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout.strip() == "[]"
