"""Reading that goes on until the client that asked for it hangs up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from datastates import Repository
from datastates.errors import Cancelled
from tests.api.conftest import READ
from tests.api.live import live


class Endless:
    """Stands in for a function that reads payload and tells ``on_progress`` how far it is."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.raised: list[BaseException] = []

    def __call__(self, *_: object, on_progress: Callable[[int, int], None], **__: object) -> None:
        self.begun.set()
        try:
            while not self.ended.wait(0.01):
                on_progress(1, 2)
        except Cancelled as error:
            self.raised.append(error)
            raise
        finally:
            self.ended.set()

    def hang_up(self, repo: Repository, path: str) -> None:
        """Ask a server for what reads so, and hang up: the reading must end."""
        with (
            live({"repo": repo}) as url,
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client,
        ):
            client.sendall(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n\r\n".encode()
            )
            assert self.begun.wait(30)
            client.close()
            assert self.ended.wait(30)
        assert "hung up" in str(self.raised[0])
