"""What a stranger's connections cost a server: places that give way, requests that must come,
answers that must be taken."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from datastates import Repository
from datastates.api import WebServer, security, serve_in_thread
from datastates.api.routing import Scope
from datastates.system.admission import Limits
from datastates.transport import connections as visitors
from tests.api.conftest import READ, TOKENS

HALF = b"GET /api/v1/repositories HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = (
    b"GET /api/v1/repositories HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
    + READ.encode()
    + b"\r\n\r\n"
)
PATIENCE_S = 60.0
"""For what is to come soon: a busy machine is slow."""

LARGE = WHOLE.replace(b"/repositories ", b"/openapi.json ")


def port_of(server: WebServer | str) -> int:
    url = server if isinstance(server, str) else server.url
    return int(url.rstrip("/").rpartition(":")[2])


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_ended(connection: socket.socket, timeout_s: float = PATIENCE_S) -> bool:
    """Whether the server ends it, with or without saying something first."""
    connection.settimeout(timeout_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@contextmanager
def connected(
    server: WebServer | str, count: int, said: bytes = b""
) -> Iterator[list[socket.socket]]:
    """So many connections that say this and then nothing."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", port_of(server)), timeout=PATIENCE_S)
            )
            connection.sendall(said)
            made.append(connection)
        yield made


def send_for_ever(connection: socket.socket, said: bytes) -> None:
    while True:
        connection.sendall(said)


def get(server: WebServer, path: str = "/api/v1/repositories") -> int:
    headers = {"Authorization": f"Bearer {READ}"}
    return httpx.get(
        f"{server.url.rstrip('/')}{path}", headers=headers, timeout=PATIENCE_S
    ).status_code


def test_connection_that_has_not_asked_costs_no_more_than_a_place(repo: Repository) -> None:
    with serve_in_thread(repo, tokens=TOKENS) as server:
        for said in (b"", b"GET", HALF, HALF * 100):
            with connected(server, 20, said):
                assert get(server) == 200
                assert server._admission.connections >= 20
                assert len(server._uvicorn.server_state.connections) <= 1, (
                    "the honest one's at most"
                )


@pytest.mark.parametrize(
    "parts",
    [
        [WHOLE[:3], WHOLE[3:30], WHOLE[30:-1], WHOLE[-1:]],
        [WHOLE.replace(b"\r\n", b"\n")],
        [WHOLE[:-2], b"X-Long: " + b"x" * 20_000, b"x" * 20_000, b"\r\n\r\n"],
        [WHOLE + WHOLE],
        [b"GET / HTTP/1.0\r\n\r\n"],
    ],
    ids=["in pieces", "bare line feeds", "long", "two at once", "short"],
)
def test_head_is_understood_however_it_comes(repo: Repository, parts: list[bytes]) -> None:
    with serve_in_thread(repo, tokens=TOKENS) as server, connected(server, 1) as (connection,):
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)  # so that each comes by itself, as a slow network has it
        said, wanted = b"", b"".join(parts).count(b"HTTP/1")
        while said.count(b"HTTP/1.1 ") < wanted:
            more = connection.recv(65536)
            assert more, said
            said += more
        assert b"HTTP/1.1 400" not in said


def test_what_is_no_request_is_refused_at_once(repo: Repository) -> None:
    with (
        serve_in_thread(repo, tokens=TOKENS) as server,
        connected(server, 1, b"\x16\x03\x01" + b"x" * 50) as (connection,),
    ):
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_half_a_request_that_ends_is_let_go(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REQUEST_S", 10 * PATIENCE_S)
    with serve_in_thread(repo, tokens=TOKENS) as server, connected(server, 2, HALF) as ends:
        for connection in ends:
            connection.shutdown(socket.SHUT_WR)
            assert is_ended(connection)


def test_programs_that_connect_for_each_request_are_not_kept_waiting(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(visitors.Acceptor, "_pause", lambda self, pause_s: pauses.append(pause_s))
    with serve_in_thread(repo, tokens=TOKENS) as server:
        for _ in range(200):
            with connected(
                server, 1, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            ) as (connection,):
                assert is_ended(connection)
        assert not pauses, "a crowd would be taken in batches"


@pytest.mark.parametrize(
    "said", [b"", HALF, b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10000\r\n\r\n"]
)
def test_half_sent_requests_leave_room_for_whole_ones(repo: Repository, said: bytes) -> None:
    flood = 600
    with serve_in_thread(repo, tokens=TOKENS) as server:
        limit, before = server._admission.limits.connections, open_descriptors()
        with connected(server, flood, said):
            assert get(server) == 200
            assert server._admission.connections <= limit
            assert open_descriptors() - before <= flood + limit + 64, (
                "of theirs and ours, which are in one process here"
            )
            assert server.stats().refused >= flood - limit
        assert get(server) == 200


def test_who_is_answered_is_not_sent_away(repo: Repository) -> None:
    with serve_in_thread(repo, tokens=TOKENS) as server, httpx.Client(timeout=PATIENCE_S) as client:
        headers = {"Authorization": f"Bearer {READ}"}
        with client.stream(
            "GET",
            f"{server.url}/api/v1/repositories/runs/events",
            headers=headers,
            params={"after": 0},
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            with connected(server, 600):
                repo.tag("still-here", "main")
                assert any("still-here" in line for line in lines)


def test_request_that_does_not_come_is_not_waited_for(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REQUEST_S", 0.2)
    post = (
        b"POST /api/v1/repositories/runs/merges HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length:"
        b" 10000\r\n\r\n{"
    )
    with serve_in_thread(repo, tokens=TOKENS) as server:
        for said in (b"", HALF, post, WHOLE + HALF, WHOLE + post, WHOLE[:-2]):
            with connected(server, 1, said) as (connection,):
                assert is_ended(connection), said
        assert get(server) == 200


def test_header_that_comes_byte_by_byte_is_not_for_ever(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REQUEST_S", 0.5)
    with (
        serve_in_thread(repo, tokens=TOKENS) as server,
        connected(server, 1, HALF) as (connection,),
    ):
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE_S:
            try:
                connection.sendall(b"x")
            except ConnectionError:
                break
            if is_ended(connection, 0.02):
                break
        assert time.monotonic() < began + PATIENCE_S


def test_answer_that_is_not_taken_is_given_up(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "ANSWER_S", 0.2)
    with serve_in_thread(repo, tokens=TOKENS) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port_of(server)))
        connection.settimeout(60)
        with pytest.raises(ConnectionError):
            send_for_ever(connection, LARGE)
        assert get(server) == 200


def test_address_has_no_more_than_its_share(repo: Repository) -> None:
    with serve_in_thread(repo, tokens={READ: Scope.READ}) as server:
        server._admission.limits = Limits(connections=4, per_address=2)
        with connected(server, 4) as idle:
            assert get(server) == 200
            assert is_ended(idle[0])
            assert not is_ended(idle[3], 0.1)


def test_many_requests_of_one_connection_are_answered(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REQUEST_S", 2.0)
    with (
        serve_in_thread(repo, tokens=TOKENS) as server,
        httpx.Client(timeout=PATIENCE_S, headers={"Authorization": f"Bearer {READ}"}) as client,
    ):
        for _ in range(6):  # in three seconds, each far sooner than it must come
            assert client.get(f"{server.url}/api/v1/repositories").status_code == 200
            time.sleep(0.5)
        assert server._admission.connections == 1


def test_training_keeps_its_descriptors_from_strangers(tmp_path: Path) -> None:
    limit = 400
    limited = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"]
    command = [sys.executable, "-m", "tests.api.besieged", str(tmp_path / "runs")]
    with subprocess.Popen(
        [*limited, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        url = training.stdout.readline().strip()
        for said in (b"", HALF):
            with connected(url, 1000, said):
                training.stdin.write("capture\n")
                training.stdin.flush()
                assert httpx.get(f"{url}/healthz", timeout=PATIENCE_S).text == "ok\n"
                most = int(training.stdout.readline())
                assert 0 < most < limit * 3 // 4 + 40, (
                    "some are taken from the backlog before they are counted"
                )
        training.stdin.close()
        assert training.wait(60) == 0
