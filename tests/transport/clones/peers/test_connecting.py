"""Connections that do not come about, or lead elsewhere: the error says why, and what to do."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import datastates
from datastates.errors import Disconnected, PeerFault
from datastates.transport.session import Session
from tests.transport.certificates import certificate
from tests.transport.clones.peers.pairs import Made, Training, train


def over_at_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Sessions with a server end as soon as the handshake is over, as one does that is closed
    right then."""
    connect = Session.connect

    async def connected(where: str, **options: Any) -> Session:
        session = await connect(where, **options)
        if where == url:
            session._lifecycle.fall(
                Disconnected("the server at the other end closed the connection")
            )
            await session.wait_closed()
        return session

    monkeypatch.setattr(Session, "connect", connected)


def test_a_server_that_closes_right_after_the_handshake_is_disconnected(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made.repo().serve("memory://")
    over_at_once(monkeypatch, server.url)
    with pytest.raises(Disconnected, match="at the other end closed the connection"):
        datastates.connect(server.url)


def test_another_source_answers_when_one_closes_right_after_the_handshake(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repo = made.repo()
    train(repo, Training(0), 1)
    first, second = repo.serve("memory://"), repo.serve("memory://")
    over_at_once(monkeypatch, first.url)
    peer = made.peer([first.url, second.url])
    assert peer.state("main").uid == repo.state("main").uid
    assert "a source does not answer" in caplog.text


@pytest.mark.parametrize("is_server_plain", [True, False])
def test_an_error_between_tls_and_none_says_so(
    made: Made, is_server_plain: bool, tmp_path: Path
) -> None:
    tls = certificate(tmp_path)
    server = made.repo().serve("tcp://127.0.0.1:0", tls=None if is_server_plain else tls)
    with pytest.raises(
        Disconnected,
        match="TLS.* leave tls= and --tls-ca out" if is_server_plain else r"uses TLS, pass tls=",
    ):
        datastates.connect(server.url, tls=tls if is_server_plain else None)


def test_another_process_at_the_address_of_a_source_is_not_taken_for_it(made: Made) -> None:
    repo, other = made.repo(), made.repo()
    server = repo.serve("tcp://127.0.0.1:0")
    peer = made.peer(server)
    peer.refs()
    server.close()
    with (
        other.serve(server.url),
        pytest.raises(Disconnected, match="another process serves repository"),
    ):
        peer.refs()
    with repo.serve(server.url):
        assert peer.refs() == []


def test_another_program_at_the_address_of_a_source_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerFault, match="it may be another program"):
            datastates.connect(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
