"""A passage leads to one server, through a process that can reach it, for those who know the key."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from datastates.transport.session.passage import Gate, Passage

NAME = "server"


class Echo:
    """A server that says back what it hears, in capitals."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self.listening.getsockname()[1]))
        self.visits = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nobody is let in any more."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                self.visits += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while heard := connection.recv(1 << 16):
                connection.sendall(heard.upper())


@pytest.fixture
def echo() -> Iterator[Echo]:
    opened = Echo()
    yield opened
    opened.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def gate_to(echo: Echo, key: bytes, stack: ExitStack, most: int = 10) -> Gate:
    gate = Gate(echo.address, key, most=most)
    stack.callback(gate.close)
    return gate


def passage_by(gates: list[Gate], key: bytes, stack: ExitStack) -> Passage:
    passage = Passage([("127.0.0.1", gate.port) for gate in gates], key, name=NAME)
    stack.callback(passage.close)
    return passage


def through(passage: Passage) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(str(passage.folder / NAME))
    return connection


def exchanged(connection: socket.socket, said: bytes) -> bytes:
    connection.sendall(said)
    heard = b""
    while len(heard) < len(said) and (more := connection.recv(1 << 16)):
        heard += more
    return heard


def test_bytes_pass_both_ways_and_the_end_of_either_is_that_of_the_other(echo: Echo, stack: ExitStack) -> None:
    key = secrets.token_bytes(32)
    gate = gate_to(echo, key, stack)
    passage = passage_by([gate], key, stack)
    assert passage.is_open()
    with through(passage) as one, through(passage) as other:
        assert exchanged(one, b"one") == b"ONE"
        assert exchanged(other, b"other" * 100) == b"OTHER" * 100
        assert gate.passing == 2
        echo.close()
    with through(passage) as late, suppress(ConnectionError):
        assert late.recv(1) == b"", "the server is gone"


def test_nobody_else_may_look_into_the_folder_of_the_socket(echo: Echo, stack: ExitStack) -> None:
    key = secrets.token_bytes(32)
    passage = passage_by([gate_to(echo, key, stack)], key, stack)
    assert passage.folder.stat().st_mode & 0o777 == 0o700
    passage.close()
    assert not passage.folder.exists()


def test_a_stranger_does_not_reach_the_server(echo: Echo, stack: ExitStack) -> None:
    gate = gate_to(echo, secrets.token_bytes(32), stack)
    assert not passage_by([gate], secrets.token_bytes(32), stack).is_open()
    for said in (b"", b"\0" * 64, secrets.token_bytes(1 << 16), b"dsPass1\n" + b"\0" * 64):
        with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as stranger:
            heard = b""
            with suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while more := stranger.recv(1 << 16):
                    heard += more
            assert len(heard) in {0, 32}
    assert echo.visits == 0


def test_strangers_who_say_nothing_or_half_of_it_keep_nobody_out(echo: Echo, stack: ExitStack) -> None:
    key = secrets.token_bytes(32)
    gate = gate_to(echo, key, stack)
    passage = passage_by([gate], key, stack)
    with through(passage) as early:
        assert exchanged(early, b"early") == b"EARLY"
        for number in range(200):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", gate.port), timeout=20))
            with suppress(ConnectionError):
                stranger.sendall([b"", b"dsPass1\n", b"dsPass1\n" + secrets.token_bytes(32)][number % 3])
        with through(passage) as late:
            assert exchanged(late, b"late") == b"LATE"
        assert exchanged(early, b"still") == b"STILL"
    assert echo.visits == 2


def test_an_impostor_at_the_gate_gets_no_word_of_what_is_said(stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        passage = Passage([("127.0.0.1", int(impostor.getsockname()[1]))], secrets.token_bytes(32), name=NAME)
        stack.callback(passage.close)
        with through(passage) as inside:
            with suppress(OSError):
                inside.sendall(b"a secret")
            connection, _ = impostor.accept()
            heard = b""
            with connection, suppress(OSError):
                connection.settimeout(20)
                connection.sendall(os.urandom(64))
                while more := connection.recv(1 << 16):
                    heard += more
    assert len(heard) == 72
    assert b"secret" not in heard


def test_the_next_gate_is_taken_when_the_first_is_gone(echo: Echo, stack: ExitStack) -> None:
    key = secrets.token_bytes(32)
    first, second = gate_to(echo, key, stack), gate_to(echo, key, stack)
    passage = passage_by([first, second], key, stack)
    with through(passage) as one:
        assert exchanged(one, b"one") == b"ONE"
        assert (first.passing, second.passing) == (1, 0)
        first.close()
        with suppress(ConnectionError):
            assert one.recv(1) == b""
    with through(passage) as other:
        assert exchanged(other, b"other") == b"OTHER"
        assert second.passing == 1


def test_no_more_connections_pass_than_a_gate_was_made_for(echo: Echo, stack: ExitStack) -> None:
    key = secrets.token_bytes(32)
    passage = passage_by([gate_to(echo, key, stack, most=1)], key, stack)
    with through(passage) as one:
        assert exchanged(one, b"one") == b"ONE"
        assert not passage.is_open()
        with through(passage) as other, suppress(ConnectionError):
            assert other.recv(1) == b""
        assert exchanged(one, b"still") == b"STILL"
